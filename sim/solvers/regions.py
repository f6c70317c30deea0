"""Regions of the forward that are recomputed together: layers, groups of layers, stages of a chain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sim.errors import PolicyError, TraceError
from sim.plan import Problem
from sim.solvers.schedule import TraceIndex
from sim.trace.chain import BACKWARD, FORWARD, Chain, chain
from sim.trace.gathers import gathers
from sim.trace.layers import layer_runs, op_layers


@dataclass(frozen=True, slots=True)
class Region:
    """Forward ops of one device that are recomputed together, and the backward ops that undo them."""

    forward: tuple[int, ...]
    backward: Collection[int]


# ---- by layer ----------------------------------------------------------------------------------


def layer_regions(index: TraceIndex, policy: str, every: int = 1) -> list[Region]:
    """One region per run of forward ops of the same `every` layers, on each device and for each microbatch.

    What gathers weights (ZeRO's level 3) belongs to no layer, since no checkpoint recomputes it.

    Raises PolicyError where no forward op has a layer.
    """
    trace, c, layer = index.trace, index.trace.op_columns, op_layers(index.trace)
    undoing: dict[int, set[int]] = {}
    computing = np.ones(len(c.name), np.bool_)
    computing[gathers(trace)] = False
    for op in np.flatnonzero((c.phase == BACKWARD) & (layer >= 0) & computing).tolist():
        undoing.setdefault(layer[op] // every, set()).add(op)
    # an op of no layer ends a layer; between the layers of a group it takes no part
    inside = (c.phase == BACKWARD) | (c.phase == FORWARD) & ((layer >= 0) | (every == 1))
    inside &= computing
    found = [
        Region(tuple(part), undoing.get(layer[run[0]] // every, set()))
        for run in layer_runs(trace, np.flatnonzero(inside).tolist(), every)
        if c.phase[run[0]] == FORWARD and layer[run[0]] >= 0
        for part in _separate(index, run)
    ]
    if not found:
        forward = np.flatnonzero(c.phase == FORWARD)
        what = f"{c.name[int(forward[0])]!r} and all others have none" if len(forward) else "there is no such op"
        hint = " (capture: layers= says which modules are layers)" if "layer_names" in trace.meta else ""
        raise PolicyError(f"policy {policy!r} needs forward ops with a layer; {what}{hint}")
    return sorted(found, key=lambda region: region.forward[0])


def _separate(index: TraceIndex, ops: list[int]) -> list[list[int]]:
    """A run of ops, divided where no result crosses: two microbatches of one layer may follow each other."""
    at = {op: i for i, op in enumerate(ops)}
    reach = list(range(len(ops)))  # per op the last one that reads a result of it or of an earlier one
    for i, op in enumerate(ops):
        for t in index.reads[op]:
            producer = at.get(index.producer[t])
            if producer is not None:
                reach[producer] = max(reach[producer], i)
    parts, start, furthest = [], 0, 0
    for i in range(len(ops)):
        furthest = max(furthest, reach[i])
        if furthest == i:
            parts.append(ops[start : i + 1])
            start = i + 1
    return parts


# ---- by stage ----------------------------------------------------------------------------------


def chain_of(problem: Problem, policy: str) -> Chain:
    """The trace as a chain of two stages or more. Raises PolicyError where it is not one, or is on several devices."""
    trace = problem.trace
    if trace.devices > 1:
        raise PolicyError(f"policy {policy!r} needs a chain on one device; this trace has {trace.devices}")
    try:
        return chain(trace, [problem.cost.op_ns(op) for op in range(len(trace.ops))])
    except TraceError as error:
        raise PolicyError(f"policy {policy!r}: {error}") from None


def stage_regions(line: Chain, ends: Sequence[int]) -> list[Region]:
    """Regions that end with the given stages (positions in the chain); the last one ends the chain."""
    found, start = [], 0
    for end in sorted({*ends, len(line) - 1}):
        stages = line.stages[start : end + 1]
        forward = tuple(op for stage in stages for op in stage.forward)
        found.append(Region(forward, {op for stage in stages for op in stage.backward}))
        start = end + 1
    return found


def first_backward(line: Chain, policy: str) -> list[int]:
    """Per stage the op with which its backward begins, -1 for none. Raises PolicyError if there is no backward."""
    found = [stage.backward[0] if stage.backward else -1 for stage in line.stages]
    if max(found) < 0:
        raise PolicyError(f"policy {policy!r} needs a trace with a backward phase")
    return found
