"""The sizes of fused kernels: what they add up of the ops that they compute and of the tensors that they touch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.trace.columns import row_sums
from sim.trace.graph import Trace

Ints = NDArray[np.int64]


class Table:
    """Rows of ids, in CSR form."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.start = np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64)))
        self.ids: Ints = np.fromiter(chain.from_iterable(rows), np.int64, int(self.start[-1]))

    def sums(self, column: Ints) -> Ints:
        """Of each row the sum of what a column says of its ids. Raises OverflowError for one of 2**63 or more."""
        values = column[self.ids]
        longest = int(np.diff(self.start).max(initial=0))
        if int(values.max(initial=0)) * longest < 2**63:
            return row_sums(self.start, values)
        exact: list[int] = values.tolist()
        return np.array([sum(exact[a:b]) for a, b in pairwise(self.start.tolist())], np.int64)

    def largest(self, column: Ints) -> Ints:
        """Of each row the largest of it; no row is empty."""
        return np.maximum.reduceat(column[self.ids], self.start[:-1]) if len(self.ids) else self.ids


class Kernels:
    """Ops of a trace that are kernels of several ops of an older one, for all traces of its structure.

    rows: which ops they are, in order.
    computed: per kernel the ops that it computes.
    touched: per kernel the tensors of which it touches all bytes, as often as it does.
    workspace: whether they have the largest workspace of their ops, else none.
    streams: whether they touch no more than their ops do one after the other, which may touch less than their operands.
    """

    def __init__(
        self,
        rows: Sequence[int],
        computed: Sequence[Sequence[int]],
        touched: Sequence[Sequence[int]],
        *,
        workspace: bool,
        streams: bool,
    ) -> None:
        self.rows, self._known = np.array(rows, np.int64), frozenset(rows)
        self._computed, self._touched = Table(computed), Table(touched)
        self._workspace, self._streams = workspace, streams

    def sizes(self, trace: Trace) -> dict[str, Ints]:
        """Per kernel `flops`, `counted`, `bytes` and `workspace` for the sizes of an old trace, shape (kernels,) each.

        Raises OverflowError for a number of 2**63 or more.
        """
        c, computed = trace.op_columns, self._computed
        touched = self._touched.sums(trace.tensor_columns.bytes)
        if self._streams:
            touched = np.minimum(touched, computed.sums(trace.touched))
        return {
            "flops": computed.sums(c.flops),
            "counted": computed.sums(trace.counted_flops),
            "bytes": touched,
            "workspace": computed.largest(c.workspace) if self._workspace else np.zeros_like(touched),
        }

    def over(self, trace: Trace, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Columns of sizes of the new ops with what the kernels have, as `sizes` says and raises."""
        sizes, rows = self.sizes(trace), self.rows
        new = {key: column if key == "counted" else column.copy() for key, column in columns.items()}
        for key in ("flops", "bytes", "workspace"):
            new[key][rows] = sizes[key]
        more = np.flatnonzero(sizes["counted"] != sizes["flops"])
        counted = dict(zip(rows[more].tolist(), sizes["counted"][more].tolist()))
        new["counted"] = {row: n for row, n in columns["counted"].items() if row not in self._known} | counted
        return new
