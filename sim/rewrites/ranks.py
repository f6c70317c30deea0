"""Every symmetric rank as a device of its own, from the trace of the one that stands for all of them."""

from __future__ import annotations

from typing import Any

from sim.rewrites.experts import EXPERTS, is_of_weight, row_span
from sim.rewrites.experts_in_turn import OF_ONE, of_weight_in_turn, places
from sim.rewrites.holding import carry_releases, has_points
from sim.rewrites.rewriter import slice_of
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.launched import with_launched
from sim.trace.op import Op
from sim.trace.origin import Along, Chosen, Expr, Microbatch, Origin, Same
from sim.trace.tensor import Tensor


def all_ranks(trace: Trace) -> Trace:
    """The same work with all ranks in one trace: of d replicas of c parts of the tokens and t ranks each, rank k of
    part j of replica r of stage s on device ((s d + r) c + j) t + k.

    A collective becomes groups with a member per rank that it joins, which exchange what the one op says. This trace
    has as many times more ops; it shows what a layout leaves out, since the law checks it without any assumption about
    symmetry. The trace itself is returned where it stands for itself alone. Ranks that divide experts have as many rows
    as these are routed.

    trace: of one rank.
    """
    origin = trace.origin
    if origin is None or origin.symmetric == 1:
        return trace
    ranks, tensors = origin.symmetric, list(trace.tensors)
    builder = TraceBuilder({**trace.meta, "replicas": origin.ranks})
    ids: list[list[int]] = []
    for t in tensors:
        fields: dict[str, Any] = {
            "layer": t.layer,
            "shape": t.shape,
            "dtype": t.dtype,
            "zeros": t.zeros,
            "saved_for": t.saved_for,
            "axes": t.axes,
        }
        sizes = [_of_experts(trace, origin.tensors[t.id], t, t.bytes, r) for r in range(ranks)]
        ids.append([builder.tensor(f"{t.name}@{r}", sizes[r], t.role, **fields) for r in range(ranks)])
    for t in tensors:
        if t.replaces is not None:
            for mine, old in zip(ids[t.id], ids[t.replaces], strict=True):
                builder.take_over(mine, old)
    for op in trace.ops:
        for r in range(ranks):
            builder.copy_op(
                op,
                name=f"{op.name}@{r}",
                flops=_of_experts(trace, origin.ops[op.id], op, op.flops, r),
                reads=[ids[t][r] for t in op.reads],
                writes=[ids[t][r] for t in op.writes],
                device=op.device * ranks + r,
                group=_group(op, r, origin),
                releases=(),
            )
    whole = Origin(
        origin.base,
        tuple(_of_rank(origin, expr, r) for expr in origin.tensors for r in range(ranks)),
        tuple(_of_rank(origin, expr, r) for expr in origin.ops for r in range(ranks)),
        origin.iterations,
        steps=origin.steps,
    )
    outputs = [each for t in trace.outputs for each in ids[t]]
    carry = [pair for a, b in trace.carry for pair in zip(ids[a], ids[b], strict=True)]
    copied = [Same(op) for op in range(len(trace.ops)) for _ in range(ranks)]
    new = with_launched(trace, builder.build(outputs=outputs, carry=carry, origin=whole), copied)
    return new if not has_points(trace) else carry_releases(trace, new, _copies(trace, ranks))


def _group(op: Op, rank: int, origin: Origin) -> str:
    """The group of an op's copy for a rank: the ranks that its collective joins, or the rank alone."""
    if not op.group:
        return ""
    if op.ring is None:
        return f"{op.group}@{rank}"
    replica, tokens, own = _position(origin, rank)
    group, member = divmod(replica, origin.experts)
    within = f"{tokens}.{own}"  # a replica
    joined = {
        "tensor": f"{replica}.{tokens}",
        "context": f"{replica}.{own}",
        "neighbour": f"{replica}.{own}",
        "data": within,
        "expert": f"{group}.{within}",
        "expert_data": f"{member}.{within}",
        "group": f"{replica // origin.group}.{within}",
        "group_data": f"{replica % origin.group}.{within}",
        "group_context": f"{replica // origin.group}.{own}",
        "data_context": f"{own}",
        "expert_data_context": f"{member}.{own}",
    }
    return f"{op.group}@{joined[op.ring.axis]}"


def _of_experts(trace: Trace, expr: Expr, of: Tensor | Op, amount: int, rank: int) -> int:
    """Bytes or FLOPs of a rank where those of the first are known: in proportion to the rows of its experts."""
    origin = trace.origin
    assert origin is not None
    member = _position(origin, rank)[0] % origin.experts
    if member and isinstance(expr, Chosen):
        return _of_other_expert(trace, expr, of, amount, member)
    by_rows = isinstance(expr, Along) and expr.dimension == EXPERTS and isinstance(expr.of, Microbatch)
    if not member or not by_rows:
        return amount
    if isinstance(of, Tensor) and (of.dtype == "int32" or is_of_weight(of.name)):
        return amount  # as large for each expert: how many rows it has; its weights
    (_, first, total), (start, stop, _) = (row_span(trace, of.layer, r, r + 1, origin.experts) for r in (0, member))
    whole = -(-amount * total // max(first, 1))
    return slice_of(whole, start, stop, total)


def _of_other_expert(trace: Trace, expr: Chosen, of: Tensor | Op, amount: int, member: int) -> int:
    """The same of experts that run one after another: in proportion to the rows of each rank's expert in one place."""
    named = OF_ONE.fullmatch(of.name)
    if named is None or not isinstance(expr.of, Microbatch) or (isinstance(of, Tensor) and of_weight_in_turn(of.name)):
        return amount
    loads: list[int] = trace.meta["expert_loads"][0][named[2]]
    expert = int(named[3])
    by_place = {place: k for k, place in places(loads, len(expr.parts)).items()}
    rank, place = places(loads, len(expr.parts))[expert]
    return -(-amount * loads[by_place[rank + member, place]] // loads[expert])


def _of_rank(origin: Origin, expr: Expr, rank: int) -> Expr:
    replica, tokens, own = _position(origin, rank)
    return origin.of_rank(origin.of_rank(origin.of_rank(expr, replica), tokens, "context"), own, "tensor")


def _position(origin: Origin, rank: int) -> tuple[int, int, int]:
    """The replica of a rank, the part of its tokens, and that of its layers."""
    part, own = divmod(rank, origin.tensor)
    return *divmod(part, origin.context), own


def _copies(trace: Trace, ranks: int) -> Origin:
    """What each tensor and op of all ranks is a copy of."""
    tensors = tuple(Same(t) for t in range(len(trace.tensors)) for _ in range(ranks))
    ops = tuple(Same(op) for op in range(len(trace.ops)) for _ in range(ranks))
    return Origin(trace.content_hash, tensors, ops)
