"""Head and loss in chunks of tokens (`workloads.losses`, `chunked`), where the samples are divided.

Chunks are counted from the first token of what an iteration runs together. A microbatch counts its own tokens: of m
tokens it has ceil(m / 1,024) chunks, whose ends need not be those of any chunk of the whole batch. So chunks are joined
before the samples are divided (`joined`: one product, one loss and one product back for all tokens, whose operands are
those of the chunks, one behind the other), and each microbatch's are cut afterwards (`cut`). So they are where tokens
or the vocabulary are divided among ranks: a rank has chunks of its own tokens; of divided columns it exchanges what the
rows of each chunk need (`Rowwise`), and the gradient of the head's input is a term of a sum over the ranks. Such a
kernel is Liger-Kernel's `LigerFusedLinearScaledCrossEntropyTPFunction` (pull request 1428).

Both steps are rewrites that the law checks. The first leaves nothing out, each of its ops being those of all chunks;
what is divided is a rewrite of its result, see `sim.rewrites.values.departures`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sim.rewrites.batching import batched
from sim.rewrites.rewriter import Rewriter, slice_of
from sim.trace.graph import Trace
from sim.trace.op import Op
from sim.trace.origin import Expr, Fused, Microbatch, Packed, Same, leaves
from sim.trace.tensor import Tensor

CHUNKED = "chunked"
"""Entry `loss` of a trace's `meta`."""
_CHUNK = re.compile(r"(.*)\.chunk(\.\d+)?")


@dataclass(frozen=True)
class Chunks:
    """The ops of a joined head and loss.

    trace: whose ops they are. chunk, loss, back: their ids. rows: tokens of a chunk, of the last one at most.
    """

    trace: Trace
    chunk: int
    loss: int
    back: int
    rows: int


def joined(trace: Trace) -> Chunks | None:
    """The trace with all chunks of head and loss as one, which may be split by batch; None where it has none to join.

    Its origin says of which ops of `trace` each is.
    """
    chunks = _chunks(trace)
    if not chunks:
        return None
    (products, losses, backs), tensors, ops = zip(*chunks, strict=True), list(trace.tensors), list(trace.ops)
    new, sliced = Rewriter(trace), {t for op in (*products, *losses) for t in op.writes}
    inner = {t for op in backs[:-1] for t in op.writes}
    ids = new.all_tensors(without=sliced | inner)
    logits, slope = (_behind_each_other(new, [tensors[op.writes[0]] for op in each]) for each in (products, losses))
    new.builder.take_over(slope, logits)
    first, last = backs[0], backs[-1]
    sums = [ids[t] for t in first.reads[3:]]
    has_rows = any(len(tensors[t].shape or ()) == 3 for t in last.writes)  # the gradient of the head's input
    by_batch, found = ("batch",) if has_rows else ("batch_sum",), [-1, -1, -1]
    for op in ops:
        if op.id == last.id:
            weight, x = (ids[t] for t in last.reads[1:3])
            operands = [x, weight], [logits, ids[losses[0].reads[1]]], [slope, weight, x, *sums]
            results, ways = ([logits], [slope], [ids[t] for t in last.writes]), (("batch",), ("batch",), by_batch)
            for k, each in enumerate((products, losses, backs)):
                found[k] = _join(new, each, reads=operands[k], writes=results[k], splits=ways[k])
        elif op.id < products[0].id or op.id > last.id:
            makes_sums = bool(op.writes) and set(op.writes) <= set(first.reads[3:])
            splits = by_batch if makes_sums else op.splits
            new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes], splits=splits)
    outputs, carry = [ids[t] for t in trace.outputs], [(ids[a], ids[b]) for a, b in trace.carry]
    shape = tensors[products[0].writes[0]].shape
    assert shape is not None
    chunk, loss, back = found
    return Chunks(new.build(outputs=outputs, carry=carry), chunk, loss, back, shape[0])


def as_base(trace: Trace) -> Trace:
    """The trace as one of its own: rewrites of it are compared with it."""
    return Trace(trace.tensor_columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta)


def cut(trace: Trace, chunks: Chunks) -> Trace:
    """The trace with head and loss of each microbatch in chunks of its own tokens.

    trace: as it has been divided; what it stands for is `as_base` of the joined trace.
    """
    assert trace.origin is not None
    of, tensors = [_only(expr) for expr in trace.origin.ops], list(trace.tensors)
    wide = {op.id for op in trace.ops if of[op.id] == chunks.chunk and _tokens(trace, op) > chunks.rows}
    logits = {trace.writes(op)[0] for op in wide}
    losses = {r for t in logits for r in trace.readers(t) if of[r] == chunks.loss}
    slopes = {trace.writes(op)[0]: trace.reads(op) for op in losses}
    if not wide:
        return trace
    # where ranks divide the vocabulary, what a row's loss needs of all its columns is exchanged before it
    exchanged = {op: _exchange(trace, trace.reads(op)) for op in losses}
    between = {each for ops in exchanged.values() for each in ops}
    new = Rewriter(trace)
    ids = new.all_tensors(without=logits | slopes.keys() | {t for op in between for t in trace.writes(op)})
    has_rows = {-1: False, **dict(enumerate(batched(chunks.trace).tolist()))}
    rows = {t for t, expr in enumerate(trace.origin.tensors) if has_rows[_only(expr)]}
    name = chunks.trace.op_columns.name
    for op in trace.ops:
        if op.id in wide or op.id in losses or op.id in between:
            continue
        if of[op.id] != chunks.back or op.reads[0] not in slopes:
            new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
            continue
        whole, labels, *_ = slopes[op.reads[0]]
        loss, product = (trace.ops[int(trace.producer[t])] for t in (op.reads[0], whole))
        tokens, operands = _tokens(trace, product), [ids[t] for t in op.reads[1:3]]
        before, last = list(op.reads[3:]), list(op.writes)
        sums = [ids[t] for t in before]
        for number, first in enumerate(range(0, tokens, chunks.rows), 1):
            stop = min(first + chunks.rows, tokens)
            some = first, stop, tokens
            part, slope = (_rows(new, tensors[t], f"{tensors[t].name}.{number}", *some) for t in (whole, op.reads[0]))
            new.builder.take_over(slope, part)
            grown = list[int]()
            for t, over in zip(last, sums, strict=True):
                if stop == tokens:
                    new.builder.take_over(ids[t], over)
                    grown.append(ids[t])
                    continue
                so_far: Expr = Microbatch(Same(t), 0, stop, tokens)
                fields = {"name": f"{tensors[t].name}.{number}", "replaces": over, "saved_for": ""}
                grown.append(new.tensor(tensors[t], Packed((so_far, None)) if t in rows else so_far, **fields))
            exchange, told = list[tuple[Op, list[int], list[int]]](), [part]
            for each in (trace.ops[k] for k in exchanged[loss.id]):
                found = _rows(new, tensors[each.writes[0]], f"{tensors[each.writes[0]].name}.{number}", *some)
                if each.kind == "collective":
                    new.builder.take_over(found, told[0])
                exchange.append((each, told, [found]))
                told = [found]
            known = [part, ids[labels], *(told if exchange else ())]
            for each, reads, writes in (
                (product, [operands[1], operands[0]], [part]),
                *exchange,
                (loss, known, [slope]),
                (op, [slope, *operands, *sums], grown),
            ):
                of_base = of[each.id] >= 0
                joint = name[of[each.id]] if of_base else name[chunks.loss]
                own, group = (
                    text if number == 1 else text.replace(joint, f"{joint}.{number}", 1)
                    for text in (each.name, each.group)
                )
                touched = each.bytes if of_base or each.bytes is None else slice_of(each.bytes, *some)
                new.op(
                    each, Microbatch(Same(each.id), *some) if of_base else None, reads=reads, writes=writes, name=own,
                    flops=slice_of(each.flops, *some), bytes=touched, group=group,
                )  # fmt: skip
            sums = grown
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def _chunks(trace: Trace) -> list[tuple[Op, Op, Op]]:
    """Product, loss, and product back of each chunk, in order; [] where they do not follow each other so."""
    ops = trace.ops
    found = list[tuple[Op, Op, Op]]()
    for op in range(len(ops) - 2):
        if not (name := _CHUNK.fullmatch(trace.op_columns.name[op])):
            continue
        product, loss, back = ops[op], ops[op + 1], ops[op + 2]
        stem, number = name[1], name[2] or ""
        follows = not found or found[-1][2].id == op - 1
        if (loss.name, back.name) != (f"{stem}.chunk.loss{number}", f"{stem}.chunk.bwd{number}") or not follows:
            return []
        found.append((product, loss, back))
    return found


def _behind_each_other(new: Rewriter, parts: list[Tensor]) -> int:
    """A tensor with the rows of all of them."""
    rows = sum(t.shape[0] for t in parts if t.shape)
    shape = (rows, *(parts[0].shape or ())[1:])
    packed = Packed(tuple(Same(t.id) for t in parts))
    return new.tensor(parts[0], packed, bytes=sum(t.bytes for t in parts), shape=shape, replaces=None)


def _join(new: Rewriter, parts: tuple[Op, ...], **fields: object) -> int:
    counted = sum(op.flops if op.counted is None else op.counted for op in parts)
    flops = sum(op.flops for op in parts)
    return new.op(
        parts[0], Fused(tuple(Same(op.id) for op in parts)), flops=flops, counted=None if counted == flops else counted,
        **fields,
    )  # fmt: skip


def _exchange(trace: Trace, reads: Sequence[int]) -> list[int]:
    """The ops by which ranks tell each other of their columns what the rows of a loss need, in order; [] for none.

    reads: of the loss: logits, labels and, where there are such ranks, what they have told.
    """
    ops, logits = list[int](), reads[0]
    for t in reads[2:]:
        while t != logits:
            ops.append(int(trace.producer[t]))
            (t,) = trace.reads(ops[-1])
    return ops[::-1]


def _rows(new: Rewriter, t: Tensor, name: str, first: int, stop: int, count: int) -> int:
    """Some rows of a tensor."""
    shape = None if t.shape is None else (stop - first, *t.shape[1:])
    size = slice_of(t.bytes, first, stop, count)
    return new.tensor(t, Microbatch(Same(t.id), first, stop, count), name=name, bytes=size, shape=shape, replaces=None)


def _tokens(trace: Trace, product: Op) -> int:
    shape = trace.tensor_columns.shape[product.writes[0]]
    return shape[0]


def _only(expr: Expr) -> int:
    """The op or tensor of which an expression is a share; -1 for several or none."""
    found = leaves(expr)
    return found[0].id if len(found) == 1 else -1


__all__ = ["CHUNKED", "Chunks", "as_base", "cut", "joined"]
