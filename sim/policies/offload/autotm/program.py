"""AutoTM's integer program: a path through the two tiers for each tensor, at the least time of ops and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.policies.offload.autotm.lifetimes import Life, Lives
from sim.solvers.linear import LinearProgram, Terms

WIDE = 10_000
"""Bytes are counted in units of so many to the capacity."""


@dataclass
class Columns:
    """The columns of a tensor.

    fast: per use whether it is in the fast tier. stays: per gap whether it is there throughout.
    free: per gap whether it leaves at no cost, as the slow tier still has a copy.
    out, back: per gap whether it is copied out behind the use before it, and in ahead of the one behind it, while the
        device waits.
    out_at, back_at: per gap and op whether it is copied beside that op.
    """

    fast: list[int]
    stays: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    out_at: list[dict[int, int]] = field(default_factory=list)
    back_at: list[dict[int, int]] = field(default_factory=list)


class Program:
    """Columns and rows for some lives.

    columns: per tensor its columns.
    """

    def __init__(self, lives: Lives, capacity: int, mode: str, window: int) -> None:
        """mode: `static`, `synchronous` or `asynchronous`. window: ops beside which a copy may run, on either side."""
        self._rows = LinearProgram()
        self._lives, self._mode, self._window = lives, mode, window if mode == "asynchronous" else 0
        self._unit = max(sum(lives.took), 1) / 1000
        self._resident: list[Terms] = [[] for _ in lives.took]  # per op the bytes of what is decided
        self._longer: dict[int, list[tuple[int, int]]] = {}  # per op the ns that a use in the slow tier adds
        self._copies: dict[int, list[tuple[int, int]]] = {}  # per op the ns of the copies beside it
        self._others = 0  # ns of the ops that always take as long
        scale = WIDE / max(capacity, 1)
        self.columns: dict[int, Columns] = {}
        for life in lives.lives:
            self.columns[life.tensor] = self._life(life, scale)
        for op, terms in enumerate(self._resident):
            if terms:
                self._rows.row(terms, most=(capacity - lives.held[op]) * scale)
        for end, held in zip((-1, len(lives.took)), lives.ends, strict=True):
            here = [life for life in lives.lives if end in life.uses]
            terms = [(self.columns[life.tensor].fast[life.uses.index(end)], life.bytes * scale) for life in here]
            if terms:
                self._rows.row(terms, most=(capacity - held) * scale)
        self._times()

    def solve(self, **options: Any) -> tuple[str, dict[int, Columns] | None, float]:
        """Status, whether each column is taken (as 0 or 1), and the least time of the whole iteration in ns."""
        answer = self._rows.solve(**options)
        status = {0: "optimal", 1: "feasible", 2: "infeasible"}.get(answer.status, "unknown")
        if answer.x is None:
            return status if status == "infeasible" else "unknown", None, 0.0
        taken = [round(value) for value in answer.x]
        bound = getattr(answer, "mip_dual_bound", None)
        ns = (answer.fun if bound is None else bound) * self._unit + self._others
        return status, {t: _values(each, taken) for t, each in self.columns.items()}, ns

    # ---- a tensor ----------------------------------------------------------------------------

    def _life(self, life: Life, scale: float) -> Columns:
        rows, must = self._rows, life.slow_ns is None
        count = len(self._lives.took)
        fast = [rows.column(low=1.0 if must and 0 <= use < count else 0.0, whole=True) for use in life.uses]
        mine = Columns(fast)
        for i, use in enumerate(life.uses):
            if 0 <= use < count:
                if use != life.until:  # there the new value has its space
                    self._resident[use].append((fast[i], life.bytes * scale))
                if life.slow_ns is not None:
                    self._longer.setdefault(use, []).append((fast[i], life.slow_ns[i]))
        for i, gap in enumerate(life.gaps):
            ops = range(gap.first, gap.last + 1)
            self._gap(life, mine, i, ops)
            for op in ops:
                here = [mine.stays[i]]
                here += [column for at, column in mine.out_at[i].items() if at >= op]
                here += [column for at, column in mine.back_at[i].items() if at <= op]
                self._resident[op] += [(column, life.bytes * scale) for column in here]
        if life.first in self.columns:  # the storage is where the old value was
            rows.row([(fast[0], 1.0), (self.columns[life.first].fast[-1], -1.0)], 0.0, 0.0)
        if life.starts in self.columns or life.starts == life.tensor:
            first = fast[0] if life.starts == life.tensor else self.columns[life.starts].fast[0]
            rows.row([(fast[-1], 1.0), (first, -1.0)], 0.0, 0.0)
        return mine

    def _gap(self, life: Life, mine: Columns, i: int, ops: range) -> None:
        """The columns of a gap, and how a tensor passes through it."""
        rows, left, right = self._rows, mine.fast[i], mine.fast[i + 1]
        if self._mode == "static":
            stays = left
            rows.row([(left, 1.0), (right, -1.0)], 0.0, 0.0)
            mine.stays.append(stays)
            for table in (mine.free, mine.out, mine.back):
                table.append(-1)
            mine.out_at.append({})
            mine.back_at.append({})
            return
        stays, free = rows.column(whole=True), rows.column(whole=True)
        out = rows.column(cost=life.out_ns / self._unit, whole=True)
        back = rows.column(cost=life.in_ns / self._unit, whole=True)
        usable = [op for op in ops if op in self._lives.beside]
        beside_out = {op: rows.column(whole=True) for op in usable[: self._window]}
        beside_in = {op: rows.column(whole=True) for op in (usable[-self._window :] if self._window else ())}
        for beside, ns in ((beside_out, life.out_ns), (beside_in, life.in_ns)):
            for op, column in beside.items():
                self._copies.setdefault(op, []).append((column, ns))
        # in the fast tier before: it stays, or leaves; there behind: it stayed, or comes
        leaving = [(free, 1.0), (out, 1.0), *((column, 1.0) for column in beside_out.values())]
        coming = [(back, 1.0), *((column, 1.0) for column in beside_in.values())]
        rows.row([(left, 1.0), (stays, -1.0), *((column, -factor) for column, factor in leaving)], 0.0, 0.0)
        rows.row([(right, 1.0), (stays, -1.0), *((column, -factor) for column, factor in coming)], 0.0, 0.0)
        for at, leaves in beside_out.items():  # it has left before it comes back
            earlier = [(c, 1.0) for op, c in beside_in.items() if op <= at]
            if earlier:
                rows.row([(leaves, 1.0), *earlier], most=1.0)
        # the slow tier has a copy once the tensor was there
        written = [(c, -1.0) for k in range(i) for c in (mine.out[k], *mine.out_at[k].values())]
        rows.row([(free, 1.0), (mine.fast[0], 1.0), *written], most=1.0)
        mine.stays.append(stays)
        mine.free.append(free)
        mine.out.append(out)
        mine.back.append(back)
        mine.out_at.append(beside_out)
        mine.back_at.append(beside_in)

    # ---- time --------------------------------------------------------------------------------

    def _times(self) -> None:
        """An op takes as long as its operands' places say, and no less than the copies beside it."""
        rows, unit = self._rows, self._unit
        timed = {*self._longer, *self._copies}
        self._others = sum(ns for op, ns in enumerate(self._lives.took) if op not in timed)
        for op in sorted(timed):
            took = self._lives.took[op]
            uses = self._longer.get(op, [])
            copies = self._copies.get(op, [])
            high = (took + sum(ns for _, ns in uses) + self._lives.latency + sum(ns for _, ns in copies)) / unit
            time = rows.column(low=took / unit, high=max(high, took / unit), cost=1.0)
            if uses:
                waits = rows.column(whole=True)
                for column, _ in uses:
                    rows.row([(waits, 1.0), (column, 1.0)], least=1.0)
                longest = took + sum(ns for _, ns in uses)
                terms = [(time, 1.0), *((column, ns / unit) for column, ns in uses)]
                rows.row([*terms, (waits, -self._lives.latency / unit)], least=longest / unit)
            if copies:
                rows.row([(time, 1.0), *((column, -ns / unit) for column, ns in copies)], least=0.0)


def _values(columns: Columns, taken: Sequence[int]) -> Columns:
    def of(column: int) -> int:
        return taken[column] if column >= 0 else 0

    return Columns(
        [of(c) for c in columns.fast],
        [of(c) for c in columns.stays],
        [of(c) for c in columns.free],
        [of(c) for c in columns.out],
        [of(c) for c in columns.back],
        [{op: of(c) for op, c in each.items()} for each in columns.out_at],
        [{op: of(c) for op, c in each.items()} for each in columns.back_at],
    )
