"""The rewrite that splits the batch into microbatches and accumulates their gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError
from sim.rewrites.rewriter import Rewriter, slice_of
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.op import Op
from sim.trace.origin import Microbatch, Same
from sim.trace.tensor import ROLE_CODE, Tensor


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


def split_batch_ops(trace: Trace, n: int) -> tuple[Trace, list[tuple[int, int]]]:
    """`split_batch`, and for each new op the old op that it is, or works for, and its microbatch."""
    size = trace.meta.get("batch")
    if n < 1 or (isinstance(size, int) and size % n):
        raise TraceError(f"split_batch: {n} microbatches do not divide the batch of {size}")
    if n == 1:
        return trace, [(op, 0) for op in range(len(trace.ops))]
    splits, rows = batch_ops(trace), batched(trace)
    for _, first in trace.carry:
        if rows[first]:
            raise TraceError(
                f"split_batch: tensor {trace.tensor_columns.name[first]!r} is carried, so that it cannot be split"
            )
    return _Split(trace, n, splits, rows).run()


class _Split:
    """A trace as it is dealt out to n microbatches.

    whole: per tensor the new one that stands for all of it.
    current: per tensor the new one of the microbatch at hand.
    which: for each new op the old one and its microbatch.
    """

    def __init__(self, trace: Trace, n: int, splits: NDArray[np.bool_], rows: NDArray[np.bool_]) -> None:
        self.trace, self.n, self.splits, self.rows = trace, n, splits, rows
        self.late = _late_ops(trace, splits, rows)
        self.new = Rewriter(trace, {"microbatches": n * int(trace.meta.get("microbatches", 1))})
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
                if self.splits[op.id]:
                    self._in_microbatch(op, k)
                elif k == (self.n - 1 if self.late[op.id] else 0):
                    reads = [self.whole[t] if t in self.whole else self.place(self.tensors[t], k) for t in op.reads]
                    self.new.op(op, reads=reads, writes=[self.place(self.tensors[t], k) for t in op.writes])
                    self.which.append((op.id, k))
        self._concatenate()
        trace, whole = self.trace, self.whole
        for t in [*trace.outputs, *(t for pair in trace.carry for t in pair)]:
            if t not in whole:  # exists from the start and is kept unchanged
                whole[t] = self.new.tensor(self.tensors[t])
        carry = [(whole[a], whole[b]) for a, b in trace.carry]
        return self.new.build(outputs=[whole[t] for t in trace.outputs], carry=carry), self.which

    def place(self, t: Tensor, k: int) -> int:
        """The id that a tensor has in microbatch k."""
        whole, current = self.whole, self.current
        sliced = bool(self.rows[t.id])
        if t.id in current:
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
            changes["bytes"] = slice_of(t.bytes, k, k + 1, self.n)
            if t.shape:
                changes["shape"] = (t.shape[0] // self.n, *t.shape[1:]) if t.shape[0] % self.n == 0 else None
        if t.replaces is not None:
            changes["replaces"] = self.place(self.tensors[t.replaces], k)
        current[t.id] = self.new.tensor(t, Microbatch(Same(t.id), k, k + 1, self.n), **changes)
        return current[t.id]

    def _in_microbatch(self, op: Op, k: int) -> None:
        """An op that each microbatch runs."""
        n, current = self.n, self.current
        reads = [self.place(self.tensors[t], k) for t in op.reads]
        writes = [self.place(self.tensors[t], k) for t in op.writes]
        _add_microbatch(self.new, self.trace, op, k, n, self.rows, reads, writes)
        for t in op.writes:
            if t in self.needed_outside and self.rows[t]:
                self.slices.setdefault(t, []).append(current[t])
            elif t in self.needed_outside:
                self.sums[t] = _add_up(self.new, self.tensors[t], op, k, n, self.sums.get(t), current[t])
                if k == n - 1:
                    self.whole[t] = self.sums[t]
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


def _add_microbatch(
    new: Rewriter, trace: Trace, op: Op, k: int, n: int, rows: NDArray[np.bool_], reads: list[int], writes: list[int]
) -> None:
    touched = op.bytes
    if touched is not None:
        size = trace.tensor_columns.bytes
        operands = [*op.reads, *op.writes]
        everything = sum(int(size[t]) for t in operands)
        sliced = sum(int(size[t]) for t in operands if rows[t])
        # stated bytes shrink as the operands do: slices to 1/n, weights not at all
        scale = (everything - sliced) * n + sliced if everything else 1
        touched = -(-touched * scale // (max(everything, 1) * n))
    new.op(
        op,
        Microbatch(Same(op.id), k, k + 1, n),
        name=f"{op.name}.mb{k}",
        reads=reads,
        writes=writes,
        flops=slice_of(op.flops, k, k + 1, n),
        bytes=touched,
        workspace=-(-op.workspace // n),
        duration=None if op.duration is None else -(-op.duration // n),
        alternatives=tuple(replace(other, workspace=-(-other.workspace // n)) for other in op.alternatives),
        group=f"{op.group}.mb{k}" if op.group else "",
    )


def _add_up(new: Rewriter, t: Tensor, after: Op, k: int, n: int, total: int | None, term: int) -> int:
    """Add microbatch k of a tensor to the sum over microbatches 0 … k-1, in place. Returns the id of the new sum."""
    if total is None:
        return term
    stands_for = Same(t.id) if k == n - 1 else Microbatch(Same(t.id), 0, k + 1, n)
    grown = new.tensor(t, stands_for, name=t.name if k == n - 1 else f"{t.name}.sum{k}", replaces=total)
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
