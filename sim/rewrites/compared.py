"""What a rewrite asks about sizes: where all of it comes out alike, a trace of other sizes is rewritten alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import repeat
from math import prod

import numpy as np
from numpy.typing import NDArray

from sim.rewrites.kernels import Table
from sim.trace.graph import PERSISTENT, Trace

Ints = NDArray[np.int64]
WIDTHS = {"fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2}
MOST = 2**63 - 1


class _Elements:
    """How many elements tensors and ops have, for all traces of a structure."""

    def __init__(self, trace: Trace) -> None:
        t, c = trace.tensor_columns, trace.op_columns
        self._width = np.array(list(map(WIDTHS.get, t.dtype, repeat(1))), np.int64)
        self._updated = np.isin(t.role, PERSISTENT)
        self._operands = (c.read_start, c.read_ids), (c.write_start, c.write_ids)

    def of_tensors(self, trace: Trace) -> Ints:
        """Per tensor its elements, by its shape where it has one."""
        t = trace.tensor_columns
        found: Ints = t.bytes // self._width
        if t.shape:
            known = {shape: min(prod(shape), MOST) for shape in dict.fromkeys(t.shape.values())}
            found[list(t.shape)] = list(map(known.__getitem__, t.shape.values()))
        return found

    def of_ops(self, of_tensors: Ints) -> Ints:
        """Per op how many elements it goes through: those of the largest operand or result but weights."""
        counts = np.where(self._updated, 0, of_tensors)
        found = np.zeros(len(self._operands[0][0]) - 1, np.int64)
        for start, ids in self._operands:
            some = np.flatnonzero(start[:-1] < start[1:])
            if len(some):
                found[some] = np.maximum(found[some], np.maximum.reduceat(counts[ids], start[some]))
        return found


class Compared:
    """The questions of one rewrite about the sizes of one trace, and their answers.

    trace: the trace; it is not kept beyond `close`.
    of_tensors, of_ops: how many elements each tensor has, and each op goes through.
    """

    def __init__(self, trace: Trace) -> None:
        self._elements = _Elements(trace)
        self._trace: Trace | None = trace
        self.of_tensors: list[int] = (of_tensors := self._elements.of_tensors(trace)).tolist()
        self.of_ops: list[int] = self._elements.of_ops(of_tensors).tolist()
        self._pairs: list[tuple[int, int]] = []
        self._multiples: list[tuple[int, int]] = []
        self._reductions: list[int] = []
        self._answers: tuple[Hashable, ...] = ()
        self._weighed: list[tuple[Sequence[int], Sequence[int]]] = []

    def larger(self, a: int, b: int) -> int:
        """Which of two ops goes through more elements, the first where both go through as many."""
        self._pairs.append((a, b))
        return b if self.of_ops[b] > self.of_ops[a] else a

    def divides(self, few: int, many: int) -> bool:
        """Whether an op goes through a multiple of the elements of another one, which goes through some."""
        self._multiples.append((few, many))
        return self.of_ops[few] > 0 and self.of_ops[many] % self.of_ops[few] == 0

    def sums_over_rows(self, op: int) -> bool:
        """Whether a reduction leaves one number per column: its result is as long as a row of what it reads."""
        assert self._trace is not None
        self._reductions.append(op)
        return _sums_over_rows(self._trace, self.of_tensors, op)

    def are_fewer(self, some: Sequence[int], others: Sequence[int]) -> bool:
        """Whether some tensors have fewer bytes than others."""
        assert self._trace is not None
        self._weighed.append((some, others))
        few, many = (sum(int(self._trace.tensor_columns.bytes[t]) for t in tensors) for tensors in (some, others))
        return few < many

    def close(self) -> None:
        """Note all answers: nothing more will be asked."""
        assert self._trace is not None
        counts = np.array(self.of_tensors, np.int64), np.array(self.of_ops, np.int64)
        self._answers = self._answered(self._trace, *counts)
        self._trace, self.of_tensors, self.of_ops = None, [], []

    def is_alike(self, trace: Trace) -> bool:
        """Whether all answers are the same for another trace of the structure, and what else of sizes decides kernels:
        which tensors are scalars, and which ops compute nothing."""
        of_tensors = self._elements.of_tensors(trace)
        return self._answered(trace, of_tensors, self._elements.of_ops(of_tensors)) == self._answers

    def _answered(self, trace: Trace, of_tensors: Ints, of_ops: Ints) -> tuple[Hashable, ...]:
        t = trace.tensor_columns
        (a, b), (few, many) = (
            of_ops[np.array(pairs, np.int64).reshape(-1, 2)].T for pairs in (self._pairs, self._multiples)
        )
        some, others = (Table([pair[k] for pair in self._weighed]).sums(t.bytes) for k in (0, 1))
        lengths = of_tensors.tolist()
        return (
            np.sign(a - b).tobytes(),
            ((few > 0) & (many % np.maximum(few, 1) == 0)).tobytes(),
            (some < others).tobytes(),
            tuple(_sums_over_rows(trace, lengths, op) for op in self._reductions),
            tuple(row for row, shape in t.shape.items() if not shape),
            (trace.op_columns.flops > 0).tobytes(),
        )


def _sums_over_rows(trace: Trace, of_tensors: Sequence[int], op: int) -> bool:
    t, made = trace.tensor_columns, trace.all_writes[op]
    read = [x for x in trace.distinct_reads[op] if t.role[x] not in PERSISTENT]
    if not made or not read:
        return True
    shape = t.shape.get(max(read, key=lambda x: t.bytes[x]))
    return not shape or of_tensors[made[0]] % shape[-1] == 0
