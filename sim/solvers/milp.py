"""Which values to keep and which nodes to recompute, as a mixed-integer program.

The stages are Checkmate's (Jain et al., MLSys 2020): in stage t run[t, i] says that node i is recomputed, keep[t, v]
that value v is resident when the stage starts. Where Checkmate frees a value with a binary FREE[t, (i, k)] and a
row that divides by how many reasons there are to keep it, here a value is resident after reader k as much as the
largest of those reasons says: resident >= run[t, j] of each later reader j, resident >= keep[t + 1, v]. A value is
freed only behind a reader that runs, which the row FREE[t, (i, k)] <= R[t, k] says there. For whole numbers both say
the same; relaxed, this bound is never lower and mostly much higher, and it needs no binaries for freeing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sim.solvers.linear import INFEASIBLE, LinearProgram, Terms, limit_of
from sim.solvers.nodes import Nodes
from sim.solvers.outcome import Answer

Residency = list[tuple[int, Terms]]
"""After which nodes of a stage (-1: its start) how much of a value is resident."""
WIDE = 10_000  # sizes and costs of up to so many units stay whole numbers
TIES = 0.01


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The linear relaxation's answer.

    keep: (stage, value) -> 0 … 1.
    bound: least ns of recomputation.
    room: least bytes.
    """

    keep: Mapping[tuple[int, int], float]
    bound: int
    room: int


class Elsewhere(Protocol):
    """What else can be done with a value than to keep it or to recompute it: columns and rows of a program."""

    def begin(self, program: Program, there: Sequence[Sequence[int]]) -> None:
        """Its columns. there: per stage the values worth having resident at its start."""

    def has(self, stage: int, value: int) -> bool:
        """Whether its rows stand for that value in that stage."""

    def value(self, program: Program, stage: int, value: int, steps: Sequence[int]) -> Residency:
        """The rows of such a value; returns after which node (-1: the start) how much of it is resident."""

    def end(self, program: Program, stage: int, held: int) -> None:
        """The rows of a whole stage. held: the column of what is resident when its node runs."""


class Program:
    """Columns and rows for some nodes.

    Costs get up to 1 % more at random, always the same: a chain of equal nodes has very many equal optima,
    among which a search gets lost. Bounds are for costs without that.

    room: bytes beyond what is resident throughout; None minimises them.
    at_most: ns of recomputation of a known plan; more expensive plans are excluded. It also caps what is added to
        costs, so that a more expensive plan can't win; costs that are no small multiples of a unit get 1e-6 of it.
    saved: (stage, bytes): at most so many bytes may be resident at the start of that stage.
    elsewhere: what else can be done with values; costs stay exact then, since the part adds times of its own to them.
    prices: all costs that the part adds, where it adds them to whole choices alone: the bound is exact then.
    column, row: add variables and conditions, for what else the program is to decide.
    found: the value of each column in the last answer.
    """

    def __init__(
        self,
        nodes: Nodes,
        room: int | None,
        *,
        at_most: int | None = None,
        saved: tuple[int, int] | None = None,
        elsewhere: Elsewhere | None = None,
        prices: Sequence[int] | None = None,
    ) -> None:
        self.nodes = nodes
        self.elsewhere = elsewhere
        self.run: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}
        self._rows = LinearProgram()
        self.column, self.row = self._rows.column, self._rows.row
        self.found: Sequence[float] = ()
        unit = math.gcd(*(value.size for value in nodes.values), *nodes.run_bytes, *nodes.rerun_bytes) or 1
        largest = sum(value.size for value in nodes.values) + max(nodes.run_bytes, default=0) if room is None else room
        whole_room = largest // unit
        scale = 1.0 if whole_room <= WIDE else WIDE / whole_room
        self._byte = scale / unit
        self.size = [value.size // unit * scale for value in nodes.values]
        self.run_bytes = [bytes // unit * scale for bytes in nodes.run_bytes]
        self._rerun_bytes = [bytes // unit * scale for bytes in nodes.rerun_bytes]
        self.room = whole_room * scale
        again, there = nodes.useful
        self.price_unit, self.whole_prices = unit_of(
            [*(prices or ()), *(nodes.cost[i] for stage in again for i in stage)]
        )
        self.whole_prices &= elsewhere is None or prices is not None
        self.ties = TIES if elsewhere is None else 0.0
        if at_most is not None:
            self.ties = min(TIES, 0.5 * self.price_unit / max(at_most, 1)) if self.whole_prices else 1e-6
        self._columns(again, there, 1.0 if room is not None else 1e-6)
        self._least_room = self.column(high=self.room, cost=1.0) if room is None else -1
        if elsewhere is not None:
            elsewhere.begin(self, there)
        for t, stage in enumerate(again):
            self._stage(t, [*stage, t], there[t], there[t + 1])
        if saved is not None:
            lies = [(c, self.size[v]) for (t, v), c in self.keep.items() if t == saved[0]]
            self.row(lies, most=saved[1] * self._byte)
        if at_most is not None:
            self.row([(c, nodes.cost[i] / self.price_unit) for (t, i), c in self.run.items() if i < t],
                      most=at_most / self.price_unit)  # fmt: skip

    # ---- building ----------------------------------------------------------------------------

    def _columns(self, again: Sequence[Sequence[int]], there: Sequence[Sequence[int]], weight: float) -> None:
        n, count = self.nodes, len(self.nodes)
        draw = np.random.default_rng(0)
        for t, values in enumerate(there):
            for v in values:
                must = t <= n.values[v].held_until or t == count
                self.keep[t, v] = self.column(low=float(must), whole=True)
        always = self.column(low=1.0)
        for t, stage in enumerate(again):
            for i in stage:
                price = n.cost[i] / self.price_unit * (1 + self.ties * float(draw.random()))
                # where bytes are minimised, time only breaks ties
                self.run[t, i] = self.column(cost=price * weight, whole=True)
            self.run[t, t] = always

    def _stage(self, t: int, steps: Sequence[int], now: Sequence[int], then: Sequence[int]) -> None:
        """What must be resident when nodes run, and how much is resident at each step."""
        change: dict[int, Terms] = {-1: [], **{k: [] for k in steps}}
        for v in sorted({*now, *then, *(v for k in steps for v in self.nodes.produced_by[k])}):
            before: Terms = []
            if self.elsewhere is not None and self.elsewhere.has(t, v):
                rows = self.elsewhere.value(self, t, v, steps)
            else:
                rows = self.value(t, v, steps)
            for after, lies in rows:
                change[after] += [(c, f * self.size[v]) for c, f in lies]
                change[after] += [(c, -f * self.size[v]) for c, f in before]
                before = lies
        previous, held_before = -1, -1
        for k in steps:
            held = self.column(high=self.room)
            run_bytes = (self.run[t, k], self.run_bytes[k] if k == t else self._rerun_bytes[k])
            last = [(held_before, -1.0)] if previous >= 0 else []
            self.row([(held, 1.0), *last, *((c, -f) for c, f in _sum(change[previous]))], 0.0, 0.0)
            if self._least_room < 0:
                self.row([(held, 1.0), run_bytes], most=self.room)
            else:
                self.row([(held, 1.0), run_bytes, (self._least_room, -1.0)], most=0.0)
            previous, held_before = k, held
        if self.elsewhere is not None:
            self.elsewhere.end(self, t, held_before)

    def value(
        self, t: int, v: int, steps: Sequence[int], *, arrives: int | None = None, leaves: int | None = None
    ) -> Residency:
        """Rows of one value in one stage; returns after which node (-1: the start) how much of it is resident.

        arrives: the column that says whether it is copied back when the stage ends, for the next one.
        leaves: the column that says whether it is copied away while the stage runs, at whose start it is resident; if
            nothing reads it in the stage it is held to its end.
        """
        value = self.nodes.values[v]
        readers = [k for k in value.readers if k in steps and not k == t == value.producer]
        kept, then = self.keep.get((t, v)), self.keep.get((t + 1, v))
        made = self.run[t, value.producer] if value.producer in steps and value.produced_in(t) else None
        is_held = kept is not None and t <= value.held_until
        has = [(c, 1.0) for c in (kept, made) if c is not None]
        uses = [self.run[t, k] for k in readers]
        coming = [] if arrives is None else [(arrives, 1.0)]
        for use in uses:
            self.row([*has, (use, -1.0)], least=0.0)
        if then is not None:
            self.row([*has, *coming, (then, -1.0)], least=0.0)
        if kept is not None and not is_held:
            if made is not None or coming:  # what is recomputed, or arrives, need not have been resident
                self.row([*has, *coming], most=1.0)
            # nor what is neither read in this stage nor kept for the next
            reasons = (*uses, then, leaves)
            self.row([(kept, -1.0), *((c, 1.0) for c in reasons if c is not None)], least=0.0)
        if arrives is not None and then is not None:
            then = self._without(then, arrives)
        if is_held:
            has, made = [(kept, 1.0)], None  # type: ignore[list-item]
        alone = len(self.nodes.produced_by[value.producer]) == 1
        first = made is not None and not alone and value.producer != t
        left = self.reasons(uses, then, first=first)
        if leaves is not None:
            idle = self.column()
            self.row([(idle, 1.0), (leaves, -1.0), *((c, 1.0) for c in (*uses, then) if c is not None)], least=0.0)
            known = int(bool(readers) and not first)  # before the first reader it is there anyway
            left = [*left[:known], *([*terms, (idle, 1.0)] for terms in left[known:])]
        lies: list[tuple[int, Terms]] = []
        if kept is not None:
            lies.append((-1, [(kept, 1.0)]))
        if made is not None:
            lies.append((value.producer, (left[0] or has) if readers else left[0]))
        elif kept is not None:
            lies[0] = (-1, has)
        lies += [(k, left[i + 1]) for i, k in enumerate(readers)]
        return lies

    def _without(self, then: int, arrives: int) -> int:
        """How far the next stage needs a value that has not just arrived for it."""
        self.row([(then, 1.0), (arrives, -1.0)], least=0.0)
        stays = self.column()
        self.row([(stays, 1.0), (arrives, 1.0), (then, -1.0)], least=0.0)
        return stays

    def reasons(self, uses: Sequence[int], then: int | None, *, first: bool) -> list[Terms]:
        """Before each use, and behind the last, how far later uses or the next stage need a value.

        The entry before the first use is empty unless asked for: all that was produced or kept is resident there.
        """
        always = self.run[0, 0]
        follow = then
        left: list[Terms] = [[] if then is None else [(then, 1.0)]]
        for i in reversed(range(len(uses))):
            if i == 0 and not first:
                left.append([])
                break
            if follow is None or uses[i] == always:
                follow = uses[i]
            else:
                need = self.column()
                self.row([(need, 1.0), (uses[i], -1.0)], least=0.0)
                self.row([(need, 1.0), (follow, -1.0)], least=0.0)
                follow = need
            left.append([(follow, 1.0)])
        return left[::-1]

    # ---- solving -----------------------------------------------------------------------------

    def _bound(self, objective: float) -> int:
        """The least ns that a solver's bound allows, without what was added to tell equals apart."""
        units = objective / (1 + self.ties)
        if self.whole_prices:
            return math.ceil(units - 1e-6) * round(self.price_unit)
        return math.ceil(units * (1 - 1e-6) * self.price_unit)

    def relax(self) -> Relaxed | None:
        """The linear relaxation, None where it has no solution. Its time is limited by nothing."""
        if self.room < 0:
            return None
        solution = self._rows.solve(relaxed=True, mip_rel_gap=0.0)
        if solution.x is None:
            return None
        self.found = solution.x
        keep = {key: float(solution.x[c]) for key, c in self.keep.items()}
        if self._least_room < 0:
            return Relaxed(keep, self._bound(max(0.0, solution.fun)), 0)
        return Relaxed(keep, 0, math.ceil((solution.x[self._least_room] - 1e-3) / self._byte))

    def minimise(self, *, node_limit: int, time_limit: float) -> Answer:
        """Branch and bound, up to a number of nodes and of seconds. A limited answer is never `optimal`."""
        if self.room < 0:
            return Answer("infeasible")
        solution = self._rows.solve(mip_rel_gap=0.0, node_limit=node_limit, time_limit=time_limit)
        if solution.status == INFEASIBLE:
            return Answer("infeasible")
        limit = limit_of(solution)
        low = solution.mip_dual_bound
        bound = self._bound(max(0.0, low)) if low is not None and math.isfinite(low) else 0
        if solution.x is None:
            return Answer("unknown", bound, limit=limit)
        self.found = solution.x
        stages: list[list[int]] = [[] for _ in range(len(self.nodes))]
        for (t, i), c in sorted(self.run.items()):
            if i < t and solution.x[c] > 0.5:
                stages[t].append(i)
        return Answer("feasible" if limit else "optimal", bound, stages, limit)


def unit_of(prices: Sequence[int]) -> tuple[float, bool]:
    """In which unit costs are handed to the solver, ns, and whether they are then whole numbers."""
    unit = math.gcd(*prices) or 1
    if max(prices, default=0) // unit <= WIDE:
        return float(unit), True
    return max(prices) / 1000, False


def _sum(terms: Terms) -> Terms:
    total: dict[int, float] = {}
    for column, factor in terms:
        total[column] = total.get(column, 0.0) + factor
    return [(column, factor) for column, factor in total.items() if factor]
