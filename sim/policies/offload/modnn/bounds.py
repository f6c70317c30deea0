"""What sub-batches take at least, found without making them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sim.errors import TraceError
from sim.hardware.cost import op_times
from sim.hardware.platform import Platform
from sim.policies.offload.vdnn.implementations import choose
from sim.rewrites.batching import batch_ops, batched, share_of_op
from sim.trace.graph import Trace
from sim.trace.kept import kept


def least_of_parts(trace: Trace, platform: Platform, parts: int, chosen: Mapping[int, str]) -> int:
    """Nanoseconds for which the ops of so many sub-batches keep the device busy, without those that add up gradients.

    0 where nothing is known, since the parts are not equal.
    chosen: per op of the trace its implementation.
    """
    columns, divided = trace.op_columns, batch_ops(trace)
    part = kept(trace, "part_of_batch", parts, lambda: _part(trace, parts))
    if part is None:
        return 0
    often = np.where(divided, parts, 1)
    often[[*columns.engine, *columns.ring]] = 0  # other engines run beside it; a collective may replace another
    return int((often * op_times(choose(part, chosen), platform).total).sum())


def _part(trace: Trace, parts: int) -> Trace | None:
    """The trace with the sizes that one of so many equal parts of the batch has in each op that is divided."""
    tensors, ops, rows, divided = trace.tensor_columns, trace.op_columns, batched(trace), batch_ops(trace)
    if (tensors.bytes[rows] % parts).any() or (ops.flops[divided] % parts).any():
        return None
    stated = ops.bytes.copy()
    for op in np.flatnonzero(divided & (stated >= 0)).tolist():
        stated[op] = share_of_op(trace, trace.ops[op], 0, parts, rows)["bytes"]
    flops = np.where(divided, ops.flops // parts, ops.flops)
    duration = np.where(divided & (ops.duration >= 0), -(-ops.duration // parts), ops.duration)
    try:
        return Trace(
            replace(tensors, bytes=np.where(rows, tensors.bytes // parts, tensors.bytes)),
            replace(ops, flops=flops, bytes=stated, duration=duration),
            outputs=trace.outputs,
            carry=trace.carry,
            meta=trace.meta,
            origin=trace.origin,
            like=trace,
        )
    except TraceError:  # what the parts join again may be as large as what is carried or overwritten
        return None
