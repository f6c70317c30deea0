"""Which inactive periods a tensor is evicted for, where to, and when its copies use the links."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from sim.hardware.platform import Platform
from sim.hardware.transfer_time import transfer_ns
from sim.policies.offload.g10.vitality import Ints, Period, Vitality
from sim.solvers.lanes import Lanes

NEAR = 0.9
"""A choice is made whose benefit per time is at least so much of the best that any other may have."""


@dataclass
class Trip:
    """A period in which a tensor is away, in a tier behind the device (`level`).

    out_at, in_at: when its copies begin, in ns. out_ns, in_ns: how long they take.
    gone, back: positions from which it is away and from which it takes space again; equal where it is away for no op.
    """

    period: Period
    level: int
    out_at: int
    in_at: int
    out_ns: int
    in_ns: int
    gone: int
    back: int


class Given(NamedTuple):
    """A period in which a tensor is away in any case, as it begins or ends in a tier behind the device.

    is_clean: whether it is there already, so that nothing is copied out.
    """

    period: Period
    level: int
    is_clean: bool


class Schedule:
    """Trips of one device, on a timeline that is `stretch` times as long as its ops.

    trips: those chosen.
    load: bytes resident during each op with these away. end: when each op ends.
    """

    def __init__(self, vitality: Vitality, platform: Platform, stretch: float, *, deep: bool) -> None:
        """deep: whether the tier farthest behind is taken wherever its links have the time, as published; else the
        nearest with space.
        """
        took = np.maximum((vitality.took * stretch).astype(np.int64), 1)
        self.trips: list[Trip] = []
        self.end: Ints = np.cumsum(took)
        self.load: Ints = vitality.load.copy()
        self._vitality, self._platform, self._deep = vitality, platform, deep
        self._took = took.astype(np.float64)
        self._ends: list[int] = self.end.tolist()
        self._starts: list[int] = [0, *self._ends]  # the last one is the end of the iteration
        self._over = np.maximum(self.load - vitality.capacity, 0).astype(np.float64)  # bytes above the capacity
        self._away: list[Ints] = [np.zeros(len(took), np.int64) for _ in vitality.levels]
        self._most_away = [0] * len(self._away)
        self._lanes = Lanes()
        self._clean: set[Period] = set()
        self._times: dict[tuple[int, tuple[int, ...]], int] = {}  # of copies, by bytes and route

    @property
    def excess_bytes(self) -> int:
        """The most bytes above the capacity."""
        return int(self._over.max(initial=0))

    @property
    def is_deep(self) -> bool:
        """Whether anything goes farther than to the nearest tier."""
        return any(trip.level for trip in self.trips)

    def plan(self, given: Sequence[Given]) -> None:
        """Choose trips until nothing exceeds the capacity, or none helps; then prefetch as early as memory allows."""
        self._clean = {one.period for one in given if one.is_clean}
        for one in given:
            self._add(self._trip(one.period, one.level) or self._at_once(one))
        fixed = {one.period for one in given}
        self._choose(fixed)
        self._prune(fixed)
        self._prefetch_early()

    # ---- the choice --------------------------------------------------------------------------

    def _choose(self, fixed: Collection[Period]) -> None:
        """By benefit per byte copied, the greatest first.

        The benefit of a choice only falls as others are made, so that one that still leads is the greatest.
        """
        periods = self._vitality.periods
        over = np.flatnonzero(self.load > self._vitality.capacity)
        heap = []
        for i, period in enumerate(periods):
            first = np.searchsorted(over, period.left, side="right")
            if first < len(over) and over[first] < period.right and period not in fixed:
                heap.append((-float("inf"), i))
        heapq.heapify(heap)
        excess = self.excess_bytes
        while heap and excess:
            i = heap[0][1]
            best = self._best(periods[i])
            if best is None:
                heapq.heappop(heap)
            elif len(heap) > 1 and best[0] < NEAR * -min(heap[1:3])[0]:
                heapq.heapreplace(heap, (-best[0], i))
            else:
                heapq.heappop(heap)
                self._add(best[1])
                excess = self.excess_bytes

    def _best(self, period: Period) -> tuple[float, Trip] | None:
        """The trip for a period and its score, None where none helps."""
        found, most, quickest = list[tuple[float, Trip]](), 0.0, inf
        for level in range(len(self._vitality.levels)):
            trip = self._trip(period, level)
            if trip is not None:
                area, took = self._area(trip), trip.out_ns + trip.in_ns + 1
                most, quickest = max(most, area), min(quickest, took)
                found.append((area, trip))
        if not most:
            return None
        good = [one for one in found if one[0] >= NEAR * most]
        area, trip = good[-1 if self._deep else 0]
        return area / quickest, trip

    def _trip(self, period: Period, level: int) -> Trip | None:
        """The trip with the earliest copy out and the latest copy in that the links have time for; None for none."""
        tier = self._vitality.levels[level]
        out_ns = 0 if self._clean and period in self._clean else self._copy_ns(period, tier.out)
        in_ns = 0 if period.right == len(self._ends) else self._copy_ns(period, tier.back)
        out_at = self._lanes.earliest(tier.out, self._ends[period.left] if period.left >= 0 else 0, out_ns)
        in_at = self._lanes.latest(tier.back, self._starts[period.right], in_ns)
        gone = max(bisect_left(self._starts, out_at + out_ns), period.left + 1)
        back = bisect_right(self._starts, in_at) - 1
        if back <= gone:
            return None
        most = self._most_away[level]  # in all: most tiers never fill
        if most + period.bytes > tier.spare:
            most = int(np.maximum.reduce(self._away[level][gone:back]))
        if most + period.bytes > tier.spare:
            return None
        return Trip(period, level, out_at, in_at, out_ns, in_ns, gone, back)

    def _at_once(self, one: Given) -> Trip:
        """The trip of what is away in any case, where the links have no time for it: it is away for no op."""
        at = min(max(one.period.right - 1, one.period.left + 1), len(self._ends) - 1)
        left = self._ends[one.period.left] if one.period.left >= 0 else 0
        return Trip(one.period, one.level, left, self._starts[at], 0, 0, at, at)

    def _copy_ns(self, period: Period, route: tuple[int, ...]) -> int:
        key = period.bytes, route
        if key not in self._times:
            fixed, rate = self._platform.pace(route)
            self._times[key] = transfer_ns(period.bytes, rate, fixed)
        return self._times[key]

    def _area(self, trip: Trip) -> float:
        """The area above the capacity, in bytes times ns, that a trip takes away."""
        here = slice(trip.gone, trip.back)
        return float(np.minimum(self._over[here], float(trip.period.bytes)).dot(self._took[here]))

    # ---- keeping account ---------------------------------------------------------------------

    def _add(self, trip: Trip) -> None:
        level = self._vitality.levels[trip.level]
        self._lanes.take(level.out, trip.out_at, trip.out_ns)
        self._lanes.take(level.back, trip.in_at, trip.in_ns)
        self._hold(trip, -trip.period.bytes)
        self.trips.append(trip)

    def _hold(self, trip: Trip, bytes: int) -> None:
        """So many more bytes are resident while a tensor would be away."""
        here = slice(trip.gone, trip.back)
        self.load[here] += bytes
        self._over[here] = np.maximum(self.load[here] - self._vitality.capacity, 0)
        self._away[trip.level][here] -= bytes
        self._most_away[trip.level] = int(self._away[trip.level].max(initial=0))

    def _prune(self, fixed: Collection[Period]) -> None:
        """Forget trips that others have made superfluous, the largest first."""
        for trip in sorted(self.trips, key=lambda trip: -trip.period.bytes):
            bytes, level = trip.period.bytes, self._vitality.levels[trip.level]
            most = int(self.load[trip.gone : trip.back].max(initial=0))
            if trip.period not in fixed and most + bytes <= self._vitality.capacity:
                self.trips.remove(trip)
                self._hold(trip, bytes)
                self._lanes.give(level.out, trip.out_at, trip.out_ns)
                self._lanes.give(level.back, trip.in_at, trip.in_ns)

    def _prefetch_early(self) -> None:
        """In the order of their copies in, each as early as memory and the links allow."""
        for trip in sorted(self.trips, key=lambda trip: (trip.in_at, trip.period.right)):
            bytes, route = trip.period.bytes, self._vitality.levels[trip.level].back
            full = np.flatnonzero(self.load[trip.gone : trip.back] + bytes > self._vitality.capacity)
            first = trip.gone + (int(full[-1]) + 1 if len(full) else 0)
            if first >= trip.back or not trip.in_ns:
                continue
            self._lanes.give(route, trip.in_at, trip.in_ns)
            trip.in_at = min(self._lanes.earliest(route, self._starts[first], trip.in_ns), trip.in_at)
            self._lanes.take(route, trip.in_at, trip.in_ns)
            self._hold(trip, bytes)
            trip.back = max(bisect_right(self._starts, trip.in_at) - 1, first)
            self._hold(trip, -bytes)
