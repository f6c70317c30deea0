"""A rewritten trace at other sizes: what a rewrite has copied follows the sizes of the old trace."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.rewrites.kernels import Kernels
from sim.rewrites.rewriter import followed
from sim.trace.graph import Trace
from sim.trace.origin import Expr, Origin, leaves

Ints = NDArray[np.int64]
OF_OPS = ("flops", "bytes", "workspace")


def sizes_of(trace: Trace, ops: Collection[int]) -> Hashable:
    """All sizes of some ops and of what they read, write and overwrite."""
    t, c = trace.tensor_columns, trace.op_columns
    rows, operands = sorted(ops), sorted(_operands(trace, ops))
    of_ops = tuple(getattr(c, key)[rows].tobytes() for key in OF_OPS)
    return t.bytes[operands].tobytes(), of_ops, _at(t.shape, operands), _at(c.counted, rows)


def _operands(trace: Trace, ops: Collection[int]) -> set[int]:
    """The tensors that some ops read, write and overwrite."""
    found = {t for op in ops for t in chain(trace.reads(op), trace.writes(op))}
    return found | set(trace.tensor_columns.replaces[sorted(found)].tolist()) - {-1}


def _at(column: Mapping[int, Any], rows: Sequence[int]) -> tuple[Any, ...]:
    return tuple(map(column.get, rows))


class Resized:
    """What a rewrite made of one trace, for others of its structure.

    Wherever the new trace stands for a tensor or an op of the old one and has its sizes, it follows them, and kernels
    add up those of their ops; all else must come of what decided the rewrite, and stays.

    new: a trace that shares the columns of the rewritten one, and keeps nothing else of it alive.
    """

    def __init__(self, old: Trace, new: Trace, tensors: Ints, ops: Ints, kernels: Kernels | None = None) -> None:
        """tensors, ops: per row of the new trace that of the old one which it follows, -1 for none.

        kernels: which ops of the new trace are kernels of several.
        """
        self._tensors, self._ops, self._kernels = _Followed(tensors), _Followed(ops), kernels
        self._added = {key: value for key, value in new.meta.items() if (key, value) not in old.meta.items()}
        origin = new.origin
        self._fields = None if origin is None else {key: each for key, each in vars(origin).items() if key != "base"}
        self.new = _over(new, old, self._fields, new.tensor_columns, new.op_columns, new.meta)
        self.new.derive()

    def over(self, trace: Trace) -> Trace:
        """What the rewrite makes of another trace of the structure, with the sizes that decide alike."""
        old_t, old_c, new_t, new_c = (
            trace.tensor_columns,
            trace.op_columns,
            self.new.tensor_columns,
            self.new.op_columns,
        )
        columns: dict[str, Any] = {key: self._ops.column(getattr(new_c, key), getattr(old_c, key)) for key in OF_OPS}
        columns["counted"] = self._ops.sparse(new_c.counted, old_c.counted)
        if self._kernels is not None:
            columns = self._kernels.over(trace, columns)
        tensors = replace(
            new_t,
            bytes=self._tensors.column(new_t.bytes, old_t.bytes),
            shape=self._tensors.sparse(new_t.shape, old_t.shape),
        )
        return _over(self.new, trace, self._fields, tensors, replace(new_c, **columns), {**trace.meta, **self._added})


class _Followed:
    """Rows of the new trace that follow the old one's."""

    def __init__(self, rows: Ints) -> None:
        self.rows = np.flatnonzero(rows >= 0)
        self.of = rows[self.rows]
        self.old_of: dict[int, int] = dict(zip(self.rows.tolist(), self.of.tolist(), strict=True))

    def column(self, new: Ints, old: Ints) -> Ints:
        """The new column, with the numbers of the old one."""
        column = new.copy()
        column[self.rows] = old[self.of]
        return column

    def sparse(self, new: Mapping[int, Any], old: Mapping[int, Any]) -> dict[int, Any]:
        """The same of a column that not all rows have, nor the same ones at each size."""
        of = self.old_of
        own = {row: value for row, value in new.items() if row not in of}
        return own | {row: old[old_row] for row, old_row in of.items() if old_row in old}


def _over(
    new: Trace, old: Trace, fields: Mapping[str, Any] | None, tensors: Any, ops: Any, meta: Mapping[str, Any]
) -> Trace:
    """A trace like `new`, made of `old`. fields: of its origin, None for a trace that has none."""
    origin = None if fields is None else Origin(base=old.content_hash, **fields)
    return Trace(tensors, ops, outputs=new.outputs, carry=new.carry, meta=meta, origin=origin, like=new)


def resized(old: Trace, new: Trace, decide: Collection[int]) -> Resized | None:
    """What a rewrite has made, for other traces of the old one's structure; None where it is made only for this one.

    decide: the ops whose sizes, with those of their operands, decide the rewrite besides the structure.
    """
    if old.origin is not None or new.origin is None:
        return None
    (t, c), (new_t, new_c) = ((each.tensor_columns, each.op_columns) for each in (old, new))
    tensors = _followed(new.origin.tensors, [(t.bytes, new_t.bytes)], [(t.shape, new_t.shape)])
    columns = [(getattr(c, key), getattr(new_c, key)) for key in OF_OPS]
    ops = _followed(new.origin.ops, columns, [(c.counted, new_c.counted)])
    own = (
        (tensors, new.origin.tensors, _operands(old, decide)),
        (ops, new.origin.ops, frozenset(decide)),
    )
    for rows, exprs, known in own:
        for row in np.flatnonzero(rows < 0).tolist():
            of = leaves(exprs[row])
            if of and all(leaf.id in known for leaf in of):
                continue
            if of or rows is not ops or not _follows_operands(new, row):
                return None
    return Resized(old, new, tensors, ops)


def _follows_operands(trace: Trace, op: int) -> bool:
    """Whether an op has no sizes of its own but those of its operands."""
    c = trace.op_columns
    return not c.flops[op] and not c.workspace[op] and int(c.bytes[op]) < 0 and op not in c.counted


def _followed(
    exprs: Sequence[Expr],
    columns: Sequence[tuple[Ints, Ints]],
    sparse: Sequence[tuple[Mapping[int, Any], Mapping[int, Any]]],
) -> Ints:
    """Per row of the new trace that of the old one which it stands for and has all sizes of, -1 for none.

    columns, sparse: those of sizes, old and new.
    """
    of = followed(exprs)
    for old, new in columns:
        of[(of >= 0) & (old[of] != new)] = -1
    for row, old_row in enumerate(of.tolist()):
        if old_row >= 0 and any(old.get(old_row) != new.get(row) for old, new in sparse):
            of[row] = -1
    return of
