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
from math import prod

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
    of_base = _Cut(trace, chunks)
    return of_base.build() if of_base.wide else trace


class _Cut:
    """What `cut` makes of a trace.

    of: per op the one of the joined trace of which it is a share, -1 for none.
    wide: products of more tokens than a chunk has. losses: those of their logits.
    exchanged: per loss the ops by which ranks tell each other of their columns what its rows need.
    slopes: by what a loss makes, what it reads.
    """

    def __init__(self, trace: Trace, chunks: Chunks) -> None:
        assert trace.origin is not None
        self.trace, self.chunks = trace, chunks
        self.of, self.tensors = [_only(expr) for expr in trace.origin.ops], list(trace.tensors)
        is_wide = (op.id for op in trace.ops if self.of[op.id] == chunks.chunk and _tokens(trace, op) > chunks.rows)
        self.wide = set(is_wide)
        self.logits = {trace.writes(op)[0] for op in self.wide}
        self.losses = {r for t in self.logits for r in trace.readers(t) if self.of[r] == chunks.loss}
        self.slopes = {trace.writes(op)[0]: trace.reads(op) for op in self.losses}
        self.exchanged = {op: _exchange(trace, trace.reads(op)) for op in self.losses}
        has_rows = {-1: False, **dict(enumerate(batched(chunks.trace).tolist()))}
        self.rows = {t for t, expr in enumerate(trace.origin.tensors) if has_rows[_only(expr)]}

    def build(self) -> Trace:
        """The new trace."""
        trace = self.trace
        between = {each for ops in self.exchanged.values() for each in ops}
        told = {t for op in between for t in trace.writes(op)}
        self.new = new = Rewriter(trace)
        self.ids = ids = new.all_tensors(without=self.logits | self.slopes.keys() | told)
        for op in trace.ops:
            if op.id in self.wide or op.id in self.losses or op.id in between:
                continue
            if self.of[op.id] == self.chunks.back and op.reads[0] in self.slopes:
                self._add_chunks(op)
            else:
                new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
        carry = [(ids[a], ids[b]) for a, b in trace.carry]
        return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)

    def _add_chunks(self, back: Op) -> None:
        """Product, loss and product back of each chunk."""
        trace, new, ids, tensors = self.trace, self.new, self.ids, self.tensors
        whole, labels, *_ = self.slopes[back.reads[0]]
        loss, product = (trace.ops[int(trace.producer[t])] for t in (back.reads[0], whole))
        tokens, (weight, x) = _tokens(trace, product), (ids[t] for t in back.reads[1:3])
        sums = [ids[t] for t in back.reads[3:]]
        for number, first in enumerate(range(0, tokens, self.chunks.rows), 1):
            some = first, min(first + self.chunks.rows, tokens), tokens
            part, slope = (_rows(new, tensors[t], f"{tensors[t].name}.{number}", *some) for t in (whole, back.reads[0]))
            new.builder.take_over(slope, part)
            grown = [self._sum(t, over, number, *some) for t, over in zip(back.writes, sums, strict=True)]
            self._add(product, number, some, [x, weight], [part])
            known = [part, ids[labels]]
            if exchange := self.exchanged[loss.id]:
                known.append(self._add_exchange(exchange, part, number, some))
            self._add(loss, number, some, known, [slope])
            self._add(back, number, some, [slope, weight, x, *sums], grown)
            sums = grown

    def _sum(self, t: int, over: int, number: int, first: int, stop: int, tokens: int) -> int:
        """A sum of gradients after a chunk, in the place of the one before; after the last one it is the result."""
        if stop == tokens:
            self.new.builder.take_over(self.ids[t], over)
            return self.ids[t]
        so_far: Expr = Microbatch(Same(t), 0, stop, tokens)
        fields = {"name": f"{self.tensors[t].name}.{number}", "replaces": over, "saved_for": ""}
        return self.new.tensor(self.tensors[t], Packed((so_far, None)) if t in self.rows else so_far, **fields)

    def _add_exchange(self, ops: Sequence[int], logits: int, number: int, some: tuple[int, int, int]) -> int:
        """What ranks tell each other of a chunk's rows."""
        told = logits
        for each in (self.trace.ops[op] for op in ops):
            t = self.tensors[each.writes[0]]
            found = _rows(self.new, t, f"{t.name}.{number}", *some)
            if each.kind == "collective":
                self.new.builder.take_over(found, told)
            self._add(each, number, some, [told], [found])
            told = found
        return told

    def _add(
        self, like: Op, number: int, some: tuple[int, int, int], reads: Sequence[int], writes: Sequence[int]
    ) -> None:
        """An op for the rows of a chunk."""
        of_base, name = self.of[like.id] >= 0, self.chunks.trace.op_columns.name
        joint = name[self.of[like.id]] if of_base else name[self.chunks.loss]
        own, group = (
            text if number == 1 else text.replace(joint, f"{joint}.{number}", 1) for text in (like.name, like.group)
        )
        touched = like.bytes if of_base or like.bytes is None else slice_of(like.bytes, *some)
        self.new.op(
            like, Microbatch(Same(like.id), *some) if of_base else None, reads=reads, writes=writes, name=own,
            flops=slice_of(like.flops, *some), bytes=touched, group=group,
        )  # fmt: skip


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
    """The rows of a head's input; of its result, a part of a vocabulary without a rest, the shape may be unknown."""
    shape = trace.tensor_columns.shape
    return prod(next(shape[t] for t in (product.writes[0], product.reads[0]) if t in shape)[:-1])


def _only(expr: Expr) -> int:
    """The op or tensor of which an expression is a share; -1 for several or none."""
    found = leaves(expr)
    return found[0].id if len(found) == 1 else -1


__all__ = ["CHUNKED", "Chunks", "as_base", "cut", "joined"]
