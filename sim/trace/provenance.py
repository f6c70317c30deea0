"""What a trace that was captured or imported does not know: what was assumed in its place, and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.trace.chain import RECOMPUTED
from sim.trace.columns import distinct
from sim.trace.graph import Trace
from sim.trace.layers import has_layers
from sim.trace.phases import BACKWARD
from sim.trace.tensor import ROLES

SHOWN = 8
"""Assumptions that are written out."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that a trace does not have.

    what: "layers".
    effect: on policies and figures.
    needs: a word of a policy's `needs` without which it refuses the trace, "" for none.
    manages: a policy that manages this finds nothing of it.
    """

    what: str
    effect: str
    needs: str = ""
    manages: tuple[str, ...] = ()


def lacks(trace: Trace) -> tuple[Lack, ...]:
    """What an imported or captured trace lacks; one that is built from a configuration lacks nothing."""
    if "source" not in trace.meta:
        return ()
    ops, tensors = trace.op_columns, trace.tensor_columns
    roles = {ROLES[code] for code in distinct(tensors.role).tolist()}
    timed = bool((ops.duration >= 0).any())
    found = []
    if not (ops.phase == BACKWARD).any():
        found.append(Lack("backward pass", "policies for training refuse it", needs="backward"))
    if not has_layers(trace):
        found.append(Lack("layers", "policies that work by layer refuse it or find nothing to do", needs="layers"))
    if not ops.flops.any():
        cost = "its measured time" if timed else "the time of its bytes"
        found.append(Lack("FLOPs", f"mfu and hfu are 0, and to a policy the cost of an op is {cost}"))
    if "weight" not in roles:
        found.append(
            Lack("weights", "its peak leaves them out, and nothing of them can be moved", manages=("weights",))
        )
    if "optimizer_state" not in roles:
        effect = "its peak leaves it out, and nothing of it can be moved"
        found.append(Lack("optimizer state", effect, manages=("optimizer_state",)))
    if not tensors.shape:
        found.append(Lack("shapes", "it can't be split by batch, sharded or pipelined"))
    return tuple(found)


def workload_notes(trace: Trace) -> tuple[str, ...]:
    """Lines for the footer of a result: what was assumed of the workload, and what it lacks."""
    missing = (f"the workload has no {lack.what}: {lack.effect}" for lack in lacks(trace))
    count = trace.meta.get(RECOMPUTED)
    own = (
        (f"the step recomputes {count} ops by checkpoints of its own, which stay under every policy",) if count else ()
    )
    return *assumption_notes(trace.meta), *own, *missing


def assumption_notes(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Lines on what a trace's metadata says was assumed."""
    lines = []
    assumed = meta.get("assumed")
    if isinstance(assumed, dict) and assumed:
        texts = [f"{what} ({count})" if count not in (1, True) else str(what) for what, count in assumed.items()]
        more = f" and {len(texts) - SHOWN} more: tiersim trace show" if len(texts) > SHOWN else ""
        lines.append(f"assumed of the workload: {'; '.join(map(str, texts[:SHOWN]))}{more}")
    uncounted = meta.get("uncounted")
    if isinstance(uncounted, dict) and uncounted:
        names = ", ".join(f"{name} ({count})" for name, count in uncounted.items())
        lines.append(f"ops whose FLOPs are unknown, timed by their bytes: {names}")
    return tuple(lines)
