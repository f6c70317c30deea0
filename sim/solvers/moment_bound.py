"""A lower bound for traces of thousands of ops: the program at moments of the schedule alone, with the link between.

The conditions are those of `sim.solvers.moments`: at a moment an op runs in its place, what a later op reads is
resident then, or restored later, and what is resident fits the budget. Restored means here: recomputed, or copied back
from the host. What returns has left before; the copies that leave, and those that return, take together no longer than
the time between two moments, which recomputation and waiting add to. Of a copy back that is under way at a moment at
least the part that has been copied is resident. Every plan on one device that drops, recomputes and copies, in whatever
order and however often, keeps these conditions.

`joint_optimal` makes a plan of the answer; `sim.least_time` takes the bound alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sim.solvers.linear import INF, INFEASIBLE, LinearProgram, Terms
from sim.solvers.moments import MEGABYTE, MICROSECOND, SLACK, TOLERANCE, Moment, wanted_until
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.solvers.trip import Trip

MARKS = 12
"""Parts of the time before the first moment in which the link's time is counted."""
SMALL = 20_000
"""Tensors below this part of the budget count nothing, which lowers the bound a little."""


class NothingFits(Exception):
    """The relaxation has no solution, so that no plan fits."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The program's answer.

    bound: ns of recomputation and waiting that every plan takes at least.
    resident: per tensor how far it is resident at the first moment.
    restored: per tensor how far it returns from the host after that.
    recomputed: per op how far it is recomputed.
    """

    bound: int
    resident: Mapping[int, float]
    restored: Mapping[int, float]
    recomputed: Mapping[int, float]


class MomentBound:
    """The linear program: what Checkmate's says at every op is said at a few, and tensors may also leave.

    index: of the trace.
    cost: ns per op.
    ops: the moments, in order.
    marks: ops before the first moment at which the link's time is divided, in order; the first is op 0.
    trips: per tensor that may leave its copies.
    small: tensors of fewer bytes count nothing.
    leaving: inputs that may be away before their last reader.
    """

    def __init__(
        self,
        index: TraceIndex,
        cost: Sequence[int],
        ops: Sequence[int],
        marks: Sequence[int],
        trips: Mapping[int, Trip],
        small: int,
        leaving: Collection[int] = (),
    ) -> None:
        self.index, self.cost, self.trips = index, cost, trips
        self._small = small
        self._moments = [Moment(index, op, index.recomputable_until, leaving) for op in ops]
        self._marks = list(marks)
        self._rows = LinearProgram()
        count = len(self._moments)
        before = [0, *np.cumsum(cost).tolist()]
        ends = [*marks[1:], ops[0]] if marks else []
        self._early = [(before[b] - before[a]) / MICROSECOND for a, b in zip(marks, ends, strict=True)]
        stops = [*ops[1:], len(cost)]
        self._length = [(before[b] - before[a]) / MICROSECOND for a, b in zip(ops, stops, strict=True)]
        self._stall = [self._rows.column(high=INF, cost=1.0) for _ in range(len(self._early) + count)]
        self._tensors = [[t for t in moment.tensors if index.size[t] >= small] for moment in self._moments]
        self._s: list[dict[int, int]] = []
        self._r: list[dict[int, int]] = []
        self._i: list[dict[int, int]] = []
        for k, moment in enumerate(self._moments):
            here = set(self._tensors[k])
            self._s.append({t: self._rows.column(low=float(t in moment.reads)) for t in self._tensors[k]})
            useful = [op for op in moment.reruns if not here.isdisjoint(index.writes[op])]
            self._r.append({op: self._rows.column(cost=cost[op] / MICROSECOND) for op in useful})
            self._i.append({t: self._rows.column() for t in self._tensors[k] if t in trips})
        for k in range(count):
            self._between(k)
        self._copied: list[dict[int, Terms]] = [{} for _ in self._moments]
        self._progress = self._returns()
        self._departures()
        for k in range(count - 1):  # of the last moment `_between` says the same
            self._ever_after(k)

    # ---- rows --------------------------------------------------------------------------------

    def _has(self, k: int, tensor: int) -> Terms:
        """That a tensor is resident at a moment or restored before the next: at most minus that."""
        terms = [(self._s[k][tensor], -1.0)]
        for columns, key in ((self._r[k], self.index.producer[tensor]), (self._i[k], tensor)):
            if key in columns:
                terms.append((columns[key], -1.0))
        return terms

    def _between(self, k: int) -> None:
        """What is read from a moment to the next, and what is resident there, was resident or is restored."""
        moment, following = self._moments[k], self._moments[k + 1].at if k + 1 < len(self._moments) else None
        for t in sorted(wanted_until(self.index, moment, following)):
            if t in self._s[k]:
                self._rows.row(self._has(k, t), most=-1.0)
        for op, column in self._r[k].items():
            for t in self.index.reads[op]:
                if t in self._s[k]:
                    self._rows.row([*self._has(k, t), (column, 1.0)], most=0.0)
        if k + 1 < len(self._moments):
            for t, column in self._s[k + 1].items():
                if t in self._s[k]:
                    self._rows.row([*self._has(k, t), (column, 1.0)], most=0.0)

    def _ever_after(self, k: int) -> None:
        """The conditions of one moment alone, over all that is recomputed after it, however often."""
        ever = {op: self._rows.column() for op in self._r[k]}
        for op, column in ever.items():
            self._rows.row([(column, 1.0), *((part[op], -1.0) for part in self._r[k:] if op in part)], most=0.0)

        def has(tensor: int) -> Terms:
            again = ever.get(self.index.producer[tensor])
            return [*self._kept(k, tensor), *([] if again is None else [(again, -1.0)])]

        for op, column in ever.items():
            for t in self.index.reads[op]:
                if t in self._s[k]:
                    self._rows.row([*has(t), (column, 1.0)], most=0.0)
        for t in sorted(self._moments[k].wanted):
            if t in self._s[k]:
                self._rows.row(has(t), most=-1.0)

    def _kept(self, k: int, tensor: int) -> Terms:
        """That a tensor is resident at a moment, or has been copied to the host: at most minus that."""
        return [(self._s[k][tensor], -1.0), *((c, -f) for c, f in self._copied[k].get(tensor, ()))]

    def _time(self, interval: int) -> tuple[Terms, float]:
        """What an interval lasts: columns, negative, and a constant. Intervals before the first moment come first."""
        waiting: Terms = [(self._stall[interval], -1.0)]
        k = interval - len(self._early)
        if k < 0:
            return waiting, self._early[interval]
        return [*waiting, *((c, -self.cost[op] / MICROSECOND) for op, c in self._r[k].items())], self._length[k]

    def _returns(self) -> list[int]:
        """Per moment the column of copies back under way, in microseconds of the link."""
        progress = []
        waiting: Terms = [(self._stall[i], -1.0) for i in range(len(self._early))]
        under_way = self._rows.column(high=INF)
        self._rows.row([(under_way, 1.0), *waiting], most=sum(self._early))
        for k, columns in enumerate(self._i):
            progress.append(under_way)
            work, after = self._rows.column(high=INF), self._rows.column(high=INF)
            terms, length = self._time(len(self._early) + k)
            self._rows.row([(work, 1.0), *terms], most=length)
            landed = [(c, self.trips[t].back / MICROSECOND) for t, c in columns.items()]
            for sign in (1.0, -1.0):
                flow = [(after, 1.0), (under_way, -1.0), (work, -1.0), *landed]
                self._rows.row([(c, sign * f) for c, f in flow], most=0.0)
            under_way = after
        return progress

    def _departures(self) -> None:
        """Nothing returns that has not left, and the copies out fit into the time of each interval."""
        early, index = len(self._early), self.index
        starts = [*self._marks, *(moment.at for moment in self._moments)]
        work: list[Terms] = [[] for _ in starts]
        copied: list[Terms] = [[] for _ in self._moments]
        first = {t: k for k in reversed(range(len(self._moments))) for t in self._i[k]}
        for t, k0 in first.items():
            out = self.trips[t].out / MICROSECOND
            begin = max(bisect_right(starts, index.producer[t]) - 1, 0)
            state: Terms = []  # how far it has been copied
            if begin < early:
                state = [(self._rows.column(), 1.0)]
                work[begin].append((state[0][0], out))
            for k in range(max(begin - early, 0), len(self._moments)):
                if t in self._i[k]:
                    self._copied[k][t] = state
                    copied[k] += [(c, self.trips[t].back / MICROSECOND) for c, _ in state]
                    # what is resident at the moment, or recomputed after it, need not return before the next
                    self._rows.row([(self._i[k][t], 1.0), *((c, -f) for c, f in state)], most=0.0)
                elif k > k0:
                    break  # nothing reads it any more
                if k + 1 == len(self._moments):
                    break  # what leaves later never returns
                share = self._rows.column()
                work[early + k].append((share, out))
                if t in self._s[k]:
                    self._rows.row([(share, 1.0), *self._has(k, t)], most=0.0)
                total = self._rows.column()
                for sign in (1.0, -1.0):
                    flow = [(total, 1.0), (share, -1.0), *((c, -f) for c, f in state)]
                    self._rows.row([(c, sign * f) for c, f in flow], most=0.0)
                state = [(total, 1.0)]
        for k, terms in enumerate(copied):  # what is under way back has been copied, and is not resident
            self._rows.row([(self._progress[k], 1.0), *((c, -f) for c, f in terms)], most=0.0)
        self._in_time(work)

    def _in_time(self, work: Sequence[Terms]) -> None:
        """The copies out fit into the time.

        What begins in an interval before the first moment may be copied in any later one before that moment. So these
        intervals can hold them all if, from each of them on, all that begins there fits into all the time there.
        """
        early = len(self._early)
        behind: list[tuple[int, float]] = []  # all that begins in this interval or later, before the first moment
        waiting: Terms = []
        length = 0.0
        for interval in reversed(range(early)):
            more, duration = self._time(interval)
            behind, waiting, length = [*work[interval], *behind], [*waiting, *more], length + duration
            if work[interval]:
                self._rows.row([*behind, *waiting], most=length)
        for interval in range(early, len(work)):
            if work[interval]:
                waiting, length = self._time(interval)
                self._rows.row([*work[interval], *waiting], most=length)

    # ---- solving -----------------------------------------------------------------------------

    def relax(self, budget: int, time_limit: float) -> Shares | None:
        """The answer for a budget; None where the time is up. Raises NothingFits where no plan fits."""
        density = min((self.index.size[t] / max(trip.back, 1) for t, trip in self.trips.items()), default=0.0)
        density *= MICROSECOND / MEGABYTE
        for k, moment in enumerate(self._moments):
            resident = [(c, self.index.size[t] / MEGABYTE) for t, c in self._s[k].items()]
            self._rows.row([*resident, (self._progress[k], density)], most=(budget - moment.pinned) / MEGABYTE)
        found = self._rows.solve(time_limit=time_limit)
        if found.status == INFEASIBLE:
            raise NothingFits
        if found.status != 0:
            return None
        x = found.x
        bound = max(0, math.ceil(found.fun * (1 - TOLERANCE) * MICROSECOND - SLACK))
        restored: dict[int, float] = {}
        recomputed: dict[int, float] = {}
        for total, parts in ((restored, self._i), (recomputed, self._r)):
            for part in parts:
                for key, column in part.items():
                    total[key] = total.get(key, 0.0) + float(x[column])
        return Shares(bound, {t: float(x[c]) for t, c in self._s[0].items()}, restored, recomputed)


def movable(index: TraceIndex) -> list[int]:
    """What the bound lets leave for the host: what ops produce, but no weight gradient, output or overwritten value."""
    return [t for t, droppable in enumerate(index.droppable) if droppable]


def program_of(
    index: TraceIndex,
    cost: Sequence[int],
    budget: int,
    trip: Callable[[int], Trip] | None,
    moments: int,
    leaving: Collection[int] = (),
) -> MomentBound:
    """The program: the op of largest footprint of each part of the trace in which the plain plan exceeds the budget.

    cost: ns per op. budget: bytes, exceeded somewhere. trip: the copies of so many bytes; None without a host.
    moments: how many parts. leaving: inputs that may leave, too.
    """
    peaks = np.array(schedule_of(index, {}).peaks()[1:])
    over = np.flatnonzero(peaks > budget)
    cuts = np.linspace(over[0], over[-1] + 1, moments + 1).astype(int)
    ops = sorted({int(a + np.argmax(peaks[a:b])) for a, b in pairwise(cuts.tolist()) if b > a})
    marks = sorted({int(mark) for mark in np.linspace(0, ops[0], MARKS)[:-1]}) if ops[0] else []
    small = budget // SMALL
    away = [*movable(index), *leaving] if trip else ()
    least = max(small, 1)  # what counts at all may leave
    trips = {t: trip(index.size[t]) for t in away if trip and index.size[t] >= least}
    return MomentBound(index, cost, ops, marks, trips, small, leaving)
