"""Consecutive steps without a barrier between them: gradients are summed in the order in which the next forward asks.

Backward produces the gradients of the last layers first, and the next forward needs the weights of the first layers
first. A collective among replicas therefore has the priority of its layer, the nearest to the input first, and gives
way between its slices (`sim.engine.event_path.groups.COLLECTIVE_CHUNK`, 4 MiB) to one of higher priority. The update of
a weight runs just before the op of the next step that reads it, so that forward begins when the first layer's gradients
are summed, beside the sums of all others. Other collectives go before all of these.

Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys 2019; Peng et al., "A
Generic Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), SOSP 2019.
Departs: gradients are summed by an all-reduce, as ByteScheduler's second form; a slice costs nothing by itself, and no
credit limits what is on the way, since a link takes one slice at a time.
"""

from __future__ import annotations

from sim.rewrites.order import as_late
from sim.rewrites.rewrite import reorder, unroll
from sim.rewrites.rewriter import with_columns
from sim.rewrites.slots import Slot, split_updates
from sim.rewrites.zero import AMONG_REPLICAS
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE

UPDATE = PHASE_CODE["update"]


def updates_by_layer(trace: Trace) -> Trace:
    """The trace with an op of the update for each layer, where one updates the weights of several."""
    columns = trace.tensor_columns
    layer = {columns.name[t]: int(columns.layer[t]) for t in range(len(columns.name)) if trace.producer[t] < 0}

    def layer_of(slot: Slot) -> int:
        return layer[slot.parameter]

    return split_updates(trace, layer_of)


def without_barrier(trace: Trace, steps: int = 2) -> Trace:
    """So many steps in one trace, each of whose updates waits for its own gradients alone.

    trace: an iteration of a replica, with the collectives that sum its gradients (`sim.rewrites.pipeline`).
    """
    whole = unroll(_by_position(trace), steps)
    held = {op for op in range(len(whole.ops)) if whole.op_columns.phase[op] == UPDATE}
    return reorder(whole, list(as_late(whole, held)))


def _by_position(trace: Trace) -> Trace:
    """The trace with sums of gradients in order of the first op that reads the weight, in steps of one."""
    priority = trace.op_columns.priority.copy()
    for op in trace.ops:
        if op.ring is None or op.ring.axis not in AMONG_REPLICAS or op.phase == "update":
            continue
        updates = {r for t in op.writes for r in trace.readers(t) if trace.op_columns.phase[r] == UPDATE}
        weights = {t for u in updates for t in trace.reads(u) if trace.producer[t] < 0}
        asked = [r for t in weights for r in trace.readers(t)[:1] if trace.op_columns.phase[r] != UPDATE]
        priority[op.id] = 1 + min(asked, default=len(trace.ops))
    return with_columns(trace, priority=priority)


__all__ = ["updates_by_layer", "without_barrier"]
