"""Regions of the forward that are run again together: layers, groups of layers, stages of a chain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.errors import PolicyError, TraceError
from sim.plan import Problem
from sim.solvers.runs import Ledger, backward_slice
from sim.trace.chain import BACKWARD, FORWARD, Chain, chain
from sim.trace.graph import PERSISTENT
from sim.trace.op import KIND_CODE


@dataclass(frozen=True, slots=True)
class Region:
    """Forward ops of one device that are run again together, and the backward ops that undo them."""

    forward: tuple[int, ...]
    backward: Collection[int]


def rerun_regions(
    ledger: Ledger,
    regions: Sequence[Region],
    *,
    early_stop: bool = True,
    skip_last: bool = False,
    keep: Collection[int] = (),
) -> dict[int, list[int]]:
    """Run each region again just before its first backward op that reads what the region makes.

    What enters a region stays, and so does its border: what only other regions read. early_stop: run again only what
    the region's backward needs, so that nothing runs for the border alone; else the whole region. skip_last:
    leave alone a region whose backward begins before any later region's forward. keep: ops that are not run again,
    so that their results stay; as do those of ops that can't run again. A region of which nothing would go is not
    run again. The result is for `runs`.
    """
    kept = set(keep)
    next_on: dict[int, int] = {}  # per device the first op of the region that follows
    found: list[tuple[int, list[int]]] = []
    for region in sorted(regions, key=lambda one: one.forward[0], reverse=True):
        device = ledger.device[region.forward[0]]
        anchor, last, wanted, stays = _inside(ledger, region, kept)
        follower = next_on.get(device, len(ledger.reads))
        next_on[device] = region.forward[0]
        if anchor < 0 or (skip_last and anchor < follower):
            continue
        ops = [op for op in region.forward if op not in kept]
        possible = ledger.can_run_together(ops, anchor)
        if early_stop or len(possible) < len(ops):
            # an op that is kept is passed on the way, and what it reads is there again for it
            passed = {t for op in region.forward if op in kept and op <= last for t in ledger.reads[op]}
            there = {t for t in stays if ledger.gone_at[t] >= anchor}
            possible = backward_slice(ledger, possible, (wanted | passed) - there, there)
        found.append((anchor, possible))
    again: dict[int, list[int]] = {}
    for anchor, ops in reversed(found):
        again.setdefault(anchor, []).extend(ops)
    return again


def _inside(ledger: Ledger, region: Region, kept: Collection[int]) -> tuple[int, int, set[int], set[int]]:
    """Where a region runs again, how far, and for what.

    The op before which it does (-1 for none), the last of its ops whose results its backward reads, those results
    that are not kept by name, and what stays.
    """
    inside, undoing, outputs = set(region.forward), region.backward, set(ledger.trace.outputs)
    anchor = last = -1
    goes = False
    wanted, stays = set(), set()
    for op in region.forward:
        for t in ledger.writes[op]:
            readers = ledger.trace.readers(t)
            first = next((r for r in readers if r in undoing), len(ledger.reads))
            leaves = any(r < first and r not in inside for r in readers)
            if op in kept or t in outputs:
                stays.add(t)
            elif first < len(ledger.reads):
                wanted.add(t)
                anchor = first if anchor < 0 else min(anchor, first)
                goes = goes or not leaves
            elif leaves:
                stays.add(t)
            if first < len(ledger.reads):
                last = op
    return anchor if goes else -1, last, wanted, stays


def cached_casts(ledger: Ledger, regions: Sequence[Region]) -> dict[int, int]:
    """Copies of weights that a region makes, and the last forward op before the next backward: for `runs`' `hold`.

    PyTorch's autocast casts each weight once and keeps the copy until its context is left, which is after
    the forward pass and the loss.
    """
    c = ledger.trace.op_columns
    weight = np.isin(ledger.trace.tensor_columns.role, PERSISTENT)
    ends: dict[int, NDArray[np.int64]] = {}
    for device in range(ledger.trace.devices):
        ends[device] = np.flatnonzero((c.device == device) & (c.phase == BACKWARD))
    copy, forward = KIND_CODE["copy"], np.flatnonzero(c.phase == FORWARD)
    held: dict[int, int] = {}
    for region in regions:
        later = ends[ledger.device[region.forward[0]]]
        after = later[np.searchsorted(later, region.forward[-1]) :]
        stop = int(after[0]) if len(after) else len(ledger.reads)
        last = int(forward[np.searchsorted(forward, stop) - 1])
        for op in region.forward:
            reads = ledger.reads[op]
            if c.kind[op] == copy and reads and weight[list(reads)].all():
                held.update(dict.fromkeys(ledger.writes[op], last))
    return held


# ---- by layer ----------------------------------------------------------------------------------


def layer_regions(ledger: Ledger, policy: str, every: int = 1) -> list[Region]:
    """One region a run of forward ops of the same `every` layers, on each device and for each microbatch.

    Raises PolicyError where no forward op has a layer.
    """
    c = ledger.trace.op_columns
    layer, phase = c.layer.tolist(), c.phase.tolist()
    backward: dict[int, set[int]] = {}
    for op in np.flatnonzero((c.phase == BACKWARD) & (c.layer >= 0)).tolist():
        backward.setdefault(layer[op] // every, set()).add(op)
    found: list[Region] = []
    for device in range(ledger.trace.devices):
        run: list[int] = []
        for op in np.flatnonzero((c.device == device) & (c.phase <= BACKWARD)).tolist():
            if phase[op] == BACKWARD or layer[op] < 0:
                if phase[op] == BACKWARD or every == 1:
                    found += _regions_of(ledger, run, backward, layer, every)
                    run = []
                continue
            if run and (layer[op] // every != layer[run[-1]] // every or layer[op] < layer[run[-1]]):
                found += _regions_of(ledger, run, backward, layer, every)
                run = []
            run.append(op)
        found += _regions_of(ledger, run, backward, layer, every)
    if not found:
        forward = np.flatnonzero(c.phase == FORWARD)
        what = f"{c.name[int(forward[0])]!r} and all others have none" if len(forward) else "there is no such op"
        raise PolicyError(f"policy {policy!r} needs forward ops with a layer; {what}")
    return sorted(found, key=lambda region: region.forward[0])


def _regions_of(
    ledger: Ledger, run: list[int], backward: dict[int, set[int]], layer: list[int], every: int
) -> list[Region]:
    if not run:
        return []
    undoing = backward.get(layer[run[0]] // every, set())
    return [Region(tuple(part), undoing) for part in _separate(ledger, run)]


def _separate(ledger: Ledger, ops: list[int]) -> list[list[int]]:
    """A run of ops, cut where no result crosses: two microbatches of one layer may follow each other."""
    at = {op: i for i, op in enumerate(ops)}
    reach = list(range(len(ops)))  # per op the last one that reads a result of it or of one before
    for i, op in enumerate(ops):
        for t in ledger.reads[op]:
            maker = at.get(ledger.producer[t])
            if maker is not None:
                reach[maker] = max(reach[maker], i)
    parts, start, furthest = [], 0, 0
    for i in range(len(ops)):
        furthest = max(furthest, reach[i])
        if furthest == i:
            parts.append(ops[start : i + 1])
            start = i + 1
    return parts


# ---- by stage ----------------------------------------------------------------------------------


def chain_of(problem: Problem, policy: str) -> Chain:
    """The trace as a chain of two stages or more. Raises PolicyError where it is none, or of several devices."""
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
