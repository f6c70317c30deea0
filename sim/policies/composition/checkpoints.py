"""What recomputation reads, as a trace on which a part for `checkpoints` or weights can plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sim.plan import Action, Recompute
from sim.policies.composition.merging import anchor
from sim.policies.composition.selectors import Mask
from sim.trace.graph import Trace
from sim.trace.index import TraceIndex
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE

FORWARD, BACKWARD = PHASE_CODE["forward"], PHASE_CODE["backward"]
WEIGHT = ROLE_CODE["weight"]


def with_recomputation(trace: Trace, actions: Sequence[Action], released: Mask) -> Trace:
    """The trace with what recomputations read as read by the ops before which they run.

    A checkpoint need not be read by any backward op: where a norm saves an fp32 copy of its 16-bit input, the input of
    a block is needed by recomputation alone; nor need a bias. Ops, tensors and their times stay; only reads are added,
    for weights and results of forward that a backward op's recomputations read and nothing overwrites before.

    actions: what is planned for the trace, with ids.
    released: the tensors that those actions take away themselves; they do not count.
    """
    c, columns = trace.op_columns, trace.tensor_columns
    phase, producer, index = c.phase, trace.producer, TraceIndex(trace)
    found: set[tuple[int, int]] = set()
    views = trace.view_of

    def is_there(t: int) -> bool:
        return bool(phase[producer[t]] == FORWARD if producer[t] >= 0 else columns.role[t] == WEIGHT)

    for action in actions:
        if not isinstance(action, Recompute):
            continue
        op, after = anchor(action, trace)
        at = op + after
        if at >= len(phase) or phase[at] != BACKWARD:
            continue
        held = set(trace.reads(at))
        reads = trace.reads(action.op)  # type: ignore[arg-type]
        lasting = {t for t in reads if is_there(t) and not released[t] and index.overwritten_at[t] > at}
        # a view is read with what it shares storage with
        found.update((at, t) for t in lasting - held if views.get(t, t) in lasting | held)
    if not found:
        return trace
    ops, tensors = np.array(sorted(found), np.int64).T
    counts = np.diff(c.read_start) + np.bincount(ops, minlength=len(phase))
    late = {t for at, t in found}
    releases = {op: tuple(t for t in gone if t not in late) for op, gone in c.releases.items()}
    return Trace(
        columns,
        replace(
            c,
            bytes=trace.touched,
            read_start=np.concatenate([[0], np.cumsum(counts)]),
            read_ids=np.insert(c.read_ids, c.read_start[ops + 1], tensors).astype(c.read_ids.dtype),
            releases={op: gone for op, gone in releases.items() if gone},
        ),
        outputs=trace.outputs,
        carry=trace.carry,
        meta=trace.meta,
        origin=trace.origin,
    )
