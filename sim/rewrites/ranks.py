"""Every symmetric rank as a device of its own, from the trace of the one that stands for all of them."""

from __future__ import annotations

from typing import Any

from sim.rewrites.holding import carry_releases
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.origin import Origin, Same


def all_ranks(trace: Trace) -> Trace:
    """The same work with all replicas in one trace: replica r of stage s of d replicas on device s d + r.

    A collective becomes a group with a member per replica. This trace has as many times more ops; it shows what a
    layout leaves out, since the law checks it without any assumption about symmetry. The trace itself is returned where
    it stands for itself alone.

    trace: of one replica.
    """
    origin = trace.origin
    if origin is None or origin.ranks == 1:
        return trace
    ranks, tensors = origin.ranks, list(trace.tensors)
    builder = TraceBuilder({**trace.meta, "replicas": ranks})
    ids: list[list[int]] = []
    for t in tensors:
        fields: dict[str, Any] = {
            "layer": t.layer,
            "shape": t.shape,
            "dtype": t.dtype,
            "zeros": t.zeros,
            "saved_for": t.saved_for,
        }
        ids.append([builder.tensor(f"{t.name}@{r}", t.bytes, t.role, **fields) for r in range(ranks)])
    for t in tensors:
        if t.replaces is not None:
            for mine, old in zip(ids[t.id], ids[t.replaces], strict=True):
                builder.take_over(mine, old)
    for op in trace.ops:
        for r in range(ranks):
            builder.copy_op(
                op,
                name=f"{op.name}@{r}",
                reads=[ids[t][r] for t in op.reads],
                writes=[ids[t][r] for t in op.writes],
                device=op.device * ranks + r,
                group=op.group if op.ring is not None or not op.group else f"{op.group}@{r}",
                ring=None,
                releases=(),
            )
    whole = Origin(
        origin.base,
        tuple(origin.of_rank(expr, r) for expr in origin.tensors for r in range(ranks)),
        tuple(origin.of_rank(expr, r) for expr in origin.ops for r in range(ranks)),
        origin.iterations,
    )
    outputs = [each for t in trace.outputs for each in ids[t]]
    carry = [pair for a, b in trace.carry for pair in zip(ids[a], ids[b], strict=True)]
    new = builder.build(outputs=outputs, carry=carry, origin=whole)
    return new if not trace.op_columns.releases else carry_releases(trace, new, _copies(trace, ranks))


def _copies(trace: Trace, ranks: int) -> Origin:
    """What each tensor and op of all ranks is a copy of."""
    tensors = tuple(Same(t) for t in range(len(trace.tensors)) for _ in range(ranks))
    ops = tuple(Same(op) for op in range(len(trace.ops)) for _ in range(ranks))
    return Origin(trace.content_hash, tensors, ops)
