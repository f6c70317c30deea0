"""The rewrite that splits the batch into microbatches and accumulates their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError
from sim.rewrites.rewriter import Rewriter, slice_of
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.op import PHASE_CODE, Op, Ring
from sim.trace.origin import Expr, Microbatch, Same
from sim.trace.tensor import ROLE_CODE, Tensor

UPDATE = PHASE_CODE["update"]


def batch_ops(trace: Trace) -> NDArray[np.bool_]:
    """Whether each op may be split by batch. Shape (ops,)."""
    return _splits_by(trace, "batch") | _splits_by(trace, "batch_sum")


def _splits_by(trace: Trace, way: str) -> NDArray[np.bool_]:
    out = np.zeros(len(trace.ops), np.bool_)
    out[[op for op, ways in trace.op_columns.splits.items() if way in ways]] = True
    return out


def batched(trace: Trace) -> NDArray[np.bool_]:
    """Whether each tensor has one row per sample, so that a microbatch needs a slice of it. Shape (tensors,).

    These are the inputs and the results of ops that split by `batch`, except gradients of weights, weights, optimizer
    states, and tensors whose shape rules it out (a scalar, a random state). The exceptions, and all results of ops that
    split by `batch_sum`, are sums over the samples or the same for all of them.
    """
    c = trace.tensor_columns
    by_batch_op = np.append(_splits_by(trace, "batch"), False)[trace.producer]  # -1, no producer, is the last entry
    summed = np.isin(c.role, (*PERSISTENT, ROLE_CODE["gradient"]))
    out: NDArray[np.bool_] = np.where(trace.producer < 0, c.role == ROLE_CODE["input"], by_batch_op & ~summed)
    out[[t for t, shape in c.shape.items() if trace.producer[t] >= 0 and _has_no_rows(shape, trace)]] = False
    return out


def _has_no_rows(shape: tuple[int, ...], trace: Trace) -> bool:
    """Whether a shape rules out one row per sample: a scalar, or a length that the samples do not divide."""
    batch, parts = trace.meta.get("batch"), trace.meta.get("microbatches", 1)
    return shape == () or (isinstance(batch, int) and batch > parts and shape[0] % (batch // parts) > 0)


def split_batch(trace: Trace, n: int) -> Trace:
    """Run forward and backward once per microbatch, then the update once; names gain `.mb0`, `.mb1`, ….

    Every op that reads a slice of the batch must have `batch` or `batch_sum` in its `splits`. Gradients of weights
    are accumulated in place, by an op after each microbatch but the first. An op that may not be split runs once:
    with microbatch 0 if it reads no slice (a cast of a weight), with the last microbatch if it reads an accumulated
    gradient (an optimizer). Rows of activations and FLOPs are divided evenly, rounded so that they add up; workspace
    (also that of alternatives), durations and bytes touched round up. Each microbatch reads the weights. Where an op
    states the bytes that it touches, they are scaled in proportion to its operands.

    trace: the trace to split.
    n: number of microbatches.

    Departs: durations and workspaces scale linearly with the batch, which measured ones do not.
    Raises TraceError naming an op that cannot be split, or where `meta["batch"]` is not a multiple of n.
    """
    return split_batch_ops(trace, n)[0]


def split_batch_ops(
    trace: Trace, n: int, ranks: int = 1, dealt: bool = False, passes: bool = False
) -> tuple[Trace, list[tuple[int, int]]]:
    """`split_batch`, and for each new op the old op that it is, or works for, and its microbatch.

    ranks: symmetric replicas, of which the new trace is one; each has n microbatches of its own. The gradients of a
        layer are summed over all of them by one collective, as soon as the last microbatch has produced them.
    dealt: they are summed after each microbatch, before they are accumulated.
    passes: each microbatch is a pass of a training loop through the model, and repeats what reads no slice and
        what only the pass needs: it casts weights, since it enters autocast's context, whose cache is empty then.
    """
    size = trace.meta.get("batch")
    if n < 1 or (isinstance(size, int) and size % (n * ranks)):
        raise TraceError(f"split_batch: {n * ranks} microbatches do not divide the batch of {size}")
    if n * ranks == 1:
        return trace, [(op, 0) for op in range(len(trace.ops))]
    splits, rows = batch_ops(trace), batched(trace)
    for _, first in trace.carry:
        if rows[first]:
            raise TraceError(
                f"split_batch: tensor {trace.tensor_columns.name[first]!r} is carried, so that it cannot be split"
            )
    return _Split(trace, n, splits, rows, ranks, dealt, passes).run()


class _Split:
    """A trace as it is dealt out to n microbatches.

    whole: per tensor the new one that stands for all of it.
    current: per tensor the new one of the microbatch at hand.
    which: for each new op the old one and its microbatch.
    reduced: tensors that wait for the collective among replicas, with the op and the microbatch that produced each.
    """

    def __init__(
        self,
        trace: Trace,
        n: int,
        splits: NDArray[np.bool_],
        rows: NDArray[np.bool_],
        ranks: int = 1,
        dealt: bool = False,
        passes: bool = False,
    ) -> None:
        self.trace, self.n, self.splits, self.rows = trace, n, splits, rows
        self.ranks, self.dealt, self.total = ranks, dealt and ranks > 1, n * ranks
        self.reduced: list[tuple[Tensor, Op, int]] = []
        self.late = _late_ops(trace, splits, rows)
        self.repeated = _repeated_ops(trace, splits, self.late) if passes and n > 1 else np.zeros_like(splits)
        self.new = Rewriter(trace, {"microbatches": self.total * int(trace.meta.get("microbatches", 1))})
        self.tensors, self.ops = list(trace.tensors), list(trace.ops)
        self.produced_by_split = np.append(splits, False)[trace.producer]
        outputs = set(trace.outputs)
        # sums that something outside the microbatches reads; all others are consumed within their microbatch
        self.needed_outside = {
            t.id
            for t in self.tensors
            if self.produced_by_split[t.id] and (t.id in outputs or any(not splits[op] for op in trace.readers(t.id)))
        }
        self.whole: dict[int, int] = {}
        self.current: dict[int, int] = {}
        self.which: list[tuple[int, int]] = []
        self.sums: dict[int, int] = {}
        self.slices: dict[int, list[int]] = {}

    def run(self) -> tuple[Trace, list[tuple[int, int]]]:
        """The new trace, and `which`."""
        for k in range(self.n):
            self.current.clear()
            for op in self.ops:
                if self.reduced and (not self.splits[op.id] or op.layer != self.reduced[-1][1].layer):
                    self._reduce()
                if self.splits[op.id]:
                    self._in_microbatch(op, k)
                elif self.repeated[op.id]:
                    reads, writes = ([self.place(self.tensors[t], k) for t in ids] for ids in (op.reads, op.writes))
                    self.new.op(op, name=f"{op.name}.mb{k}", reads=reads, writes=writes)
                    self.which.append((op.id, k))
                elif k == (self.n - 1 if self.late[op.id] else 0):
                    reads = [self.whole[t] if t in self.whole else self.place(self.tensors[t], k) for t in op.reads]
                    self.new.op(op, reads=reads, writes=[self.place(self.tensors[t], k) for t in op.writes])
                    self.which.append((op.id, k))
            if self.reduced:
                self._reduce()
        self._concatenate()
        trace, whole = self.trace, self.whole
        for t in [*trace.outputs, *(t for pair in trace.carry for t in pair)]:
            if t not in whole:  # exists from the start and is kept unchanged
                whole[t] = self.new.tensor(self.tensors[t])
        carry = [(whole[a], whole[b]) for a, b in trace.carry]
        outputs = [whole[t] for t in trace.outputs]
        return self.new.build(outputs=outputs, carry=carry, ranks=self.ranks, dealt=self.dealt), self.which

    def first(self, k: int) -> int:
        """The position of this replica's microbatch k among those of all."""
        return k * self.ranks if self.dealt else k

    def place(self, t: Tensor, k: int) -> int:
        """The id that a tensor has in microbatch k."""
        whole, current = self.whole, self.current
        sliced = bool(self.rows[t.id])
        if t.id in current:
            return current[t.id]
        if self.trace.producer[t.id] >= 0 and self.repeated[self.trace.producer[t.id]]:
            current[t.id] = self.new.tensor(t, name=f"{t.name}.mb{k}")
            return current[t.id]
        if not sliced and not self.produced_by_split[t.id]:
            if t.id not in whole:
                whole[t.id] = self.new.tensor(t)
                if t.replaces is not None:  # a sum, or a tensor that is the same for all microbatches
                    old = whole[t.replaces] if t.replaces in whole else self.place(self.tensors[t.replaces], k)
                    self.new.builder.take_over(whole[t.id], old)
            return whole[t.id]
        changes: dict[str, object] = {"name": f"{t.name}.mb{k}"}
        if sliced:
            changes["bytes"] = slice_of(t.bytes, self.first(k), self.first(k) + 1, self.total)
            if t.shape:
                rows, rest = divmod(t.shape[0], self.total)
                changes["shape"] = None if rest else (rows, *t.shape[1:])
        if t.replaces is not None:
            changes["replaces"] = self.place(self.tensors[t.replaces], k)
        current[t.id] = self.new.tensor(t, self.microbatch(t, k), **changes)
        return current[t.id]

    def microbatch(self, of: Tensor | Op, k: int) -> Microbatch:
        """This replica's microbatch k of a tensor or an op."""
        return Microbatch(Same(of.id), self.first(k), self.first(k) + 1, self.total)

    def _in_microbatch(self, op: Op, k: int) -> None:
        """An op that each microbatch runs."""
        current = self.current
        reads = [self.place(self.tensors[t], k) for t in op.reads]
        writes = [self.place(self.tensors[t], k) for t in op.writes]
        part = self.microbatch(op, k)
        share = share_of_op(self.trace, op, part.first, part.count, self.rows, part.stop)
        names = {"name": f"{op.name}.mb{k}", "group": f"{op.group}.mb{k}" if op.group else ""}
        self.new.op(op, part, reads=reads, writes=writes, **names, **share)
        for t in op.writes:
            if t in self.needed_outside and self.rows[t]:
                if self.ranks > 1:
                    name = self.tensors[t].name
                    raise TraceError(f"split_batch: {name!r} is needed with the rows of all {self.ranks} replicas")
                self.slices.setdefault(t, []).append(current[t])
            elif t in self.needed_outside:
                if not self.dealt:
                    self._accumulate(t, op, k, current[t])
                if self.ranks > 1 and (self.dealt or k == self.n - 1):
                    self.reduced.append((self.tensors[t], op, k))
        self.which += [(op.id, k)] * (self.new.op_count - len(self.which))

    def _accumulate(self, t: int, op: Op, k: int, term: int) -> None:
        """Add microbatch k of a tensor to the sum of those before."""
        stop = (k + 1) * self.ranks if self.dealt else k + 1
        whole = stop == self.total
        stands_for = Same(t) if whole else Microbatch(Same(t), 0, stop, self.total)
        self.sums[t] = _add_up(self.new, self.tensors[t], op, k, stands_for, self.sums.get(t), term)
        if whole:
            self.whole[t] = self.sums[t]

    def _reduce(self) -> None:
        """Sum what waits over the replicas, by one collective, and accumulate it where microbatches are dealt."""
        waiting, self.reduced = self.reduced, []
        op, k = waiting[-1][1:]
        terms = [self.current[t.id] if self.dealt else self.sums[t.id] for t, _, _ in waiting]
        sums = []
        for (t, _, _), term in zip(waiting, terms, strict=True):
            first = self.first(k)
            part = Microbatch(Same(t.id), first, first + self.ranks, self.total)
            stands_for = part if self.dealt and self.n > 1 else Same(t.id)
            name = f"{t.name}.reduced.mb{k}" if self.dealt else f"{t.name}.reduced"
            sums.append(self.new.tensor(t, stands_for, name=name, replaces=term))
        size = sum(t.bytes for t, _, _ in waiting)
        name = f"{waiting[0][0].name}.all_reduce.mb{k}"
        fields = {
            "phase": op.phase,
            "layer": op.layer,
            "device": op.device,
            "group": name,
            "dtype": waiting[0][0].dtype,
        }
        ring = Ring("data", self.ranks, 2)
        self.new.glue(name, "collective", terms, sums, bytes=sent(size, ring), ring=ring, **fields)
        for (t, _, _), total in zip(waiting, sums, strict=True):
            if self.dealt and self.n > 1:
                self._accumulate(t.id, op, k, total)
            else:
                self.whole[t.id] = total
        self.which += [(op.id, k)] * (self.new.op_count - len(self.which))

    def _concatenate(self) -> None:
        """Join the slices that something outside the microbatches reads."""
        for t, pieces in self.slices.items():
            tensor, last = self.tensors[t], self.ops[-1]
            self.whole[t] = self.new.tensor(tensor)
            fields = {"phase": last.phase, "layer": tensor.layer, "device": last.device}
            self.new.glue(f"{tensor.name}.concat", "copy", pieces, [self.whole[t]], **fields)
            self.which.append((int(self.trace.producer[t]), self.n - 1))


def _late_ops(trace: Trace, splits: NDArray[np.bool_], rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each op must wait for all microbatches. Raises TraceError for an op that cannot be split."""
    late = np.zeros(len(trace.ops), np.bool_)
    name, producer = trace.tensor_columns.name, trace.producer
    for op in trace.ops:
        for t in op.reads:
            producing_op = int(producer[t])
            if splits[op.id]:
                if producing_op >= 0 and late[producing_op]:
                    raise TraceError(f"split_batch: op {op.name!r} needs {name[t]!r}, computed from all microbatches")
            elif rows[t]:
                raise TraceError(f"split_batch: op {op.name!r} reads {name[t]!r}, but may not be split by batch")
            elif producing_op >= 0 and (splits[producing_op] or late[producing_op]):
                late[op.id] = True
        for t in op.writes:
            old = int(trace.tensor_columns.replaces[t])
            if old < 0:
                continue
            per_microbatch = rows[old] or (producer[old] >= 0 and splits[producer[old]])
            if splits[op.id] and not per_microbatch:
                raise TraceError(f"split_batch: op {op.name!r} overwrites {name[old]!r} in every microbatch")
            if not splits[op.id] and any(splits[r] for r in trace.readers(old)) and not late[op.id]:
                raise TraceError(f"split_batch: op {op.name!r} overwrites {name[old]!r} before all microbatches")
    return late


def _repeated_ops(trace: Trace, splits: NDArray[np.bool_], late: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each op runs as a whole in every microbatch: only its ops read the results, and nothing overwrites them.

    An op that draws random numbers runs once, since it would draw others each time.
    """
    c, columns = trace.op_columns, trace.tensor_columns
    kept = {*trace.outputs, *(t for pair in trace.carry for t in pair)}
    once = {t for t in range(len(columns.name)) if t in kept or columns.replaces[t] >= 0 or trace.replaced_by[t] >= 0}
    repeated = np.zeros(len(splits), np.bool_)
    for op in reversed(range(len(splits))):
        if splits[op] or late[op] or c.phase[op] == UPDATE or c.random[op] or not once.isdisjoint(trace.writes(op)):
            continue
        readers = [reader for t in trace.writes(op) for reader in trace.readers(t)]
        repeated[op] = bool(readers) and all(splits[reader] or repeated[reader] for reader in readers)
    return repeated


def sent(size: int, ring: Ring) -> int:
    """Bytes that each rank of a ring sends in a collective over that many: (p - 1) / p of them per pass, rounded up."""
    return -(-ring.passes * (ring.ranks - 1) * size // ring.ranks)


def share_of_op(trace: Trace, op: Op, k: int, n: int, rows: NDArray[np.bool_], stop: int = 0) -> dict[str, Any]:
    """The fields in which part k of n of an op by batch (or those from k to `stop`) differs from the whole.

    rows: which tensors have rows, see `batched`.
    """
    touched = op.bytes
    if touched is not None:
        size = trace.tensor_columns.bytes
        operands = [*op.reads, *op.writes]
        everything = sum(int(size[t]) for t in operands)
        sliced = sum(int(size[t]) for t in operands if rows[t])
        # stated bytes shrink as the operands do: slices to 1/n, weights not at all
        scale = (everything - sliced) * n + sliced if everything else 1
        touched = -(-touched * scale // (max(everything, 1) * n))
    return {
        "flops": slice_of(op.flops, k, stop or k + 1, n),
        "bytes": touched,
        "workspace": -(-op.workspace // n),
        "duration": None if op.duration is None else -(-op.duration // n),
        "alternatives": tuple(replace(other, workspace=-(-other.workspace // n)) for other in op.alternatives),
    }


def _add_up(new: Rewriter, t: Tensor, after: Op, k: int, stands_for: Expr, total: int | None, term: int) -> int:
    """Add microbatch k of a tensor to the sum over microbatches 0 … k-1, in place. Returns the id of the new sum."""
    if total is None:
        return term
    name = t.name if isinstance(stands_for, Same) else f"{t.name}.sum{k}"
    grown = new.tensor(t, stands_for, name=name, replaces=total)
    new.glue(
        f"{t.name}.sum.add.mb{k}",
        "elementwise",
        [total, term],
        [grown],
        phase=after.phase,
        layer=t.layer,
        device=after.device,
        engine=after.engine,
        dtype=t.dtype,
    )
    return grown
