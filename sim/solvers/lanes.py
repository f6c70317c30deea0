"""The time of links that is taken, and the gaps in it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence


class Lane:
    """One link: what is taken, in disjoint intervals that do not touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def earliest(self, after: int, ns: int) -> int:
        """The earliest start of so long a gap, not before `after`."""
        i = bisect_right(self._ends, after)
        while i < len(self._starts) and self._starts[i] < after + ns:
            after = max(after, self._ends[i])
            i += 1
        return after

    def latest(self, before: int, ns: int) -> int:
        """The latest start of so long a gap that ends by `before`; it may be negative."""
        i = bisect_left(self._starts, before) - 1
        while i >= 0 and self._ends[i] > before - ns:
            before = min(before, self._starts[i])
            i -= 1
        return before - ns

    def take(self, start: int, ns: int) -> None:
        """Take a gap; what it touches becomes one interval with it."""
        end = start + ns
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def give(self, start: int, ns: int) -> None:
        """Give a part of what was taken back."""
        i = bisect_right(self._starts, start) - 1
        rest = [(a, b) for a, b in ((self._starts[i], start), (start + ns, self._ends[i])) if a < b]
        self._starts[i : i + 1] = [a for a, _ in rest]
        self._ends[i : i + 1] = [b for _, b in rest]


class Lanes:
    """All links: a copy takes each of its route at once, and one of no time takes none."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = defaultdict(Lane)

    def earliest(self, route: Sequence[int], after: int, ns: int) -> int:
        """The earliest start of a gap that all links of a route have."""
        if ns and len(route) == 1:
            return self._lanes[route[0]].earliest(after, ns)
        while ns:
            found = max(self._lanes[link].earliest(after, ns) for link in route)
            if found == after:
                break
            after = found
        return after

    def latest(self, route: Sequence[int], before: int, ns: int) -> int:
        """The latest start of a gap that all have and that ends by `before`; it may be negative."""
        if ns and len(route) == 1:
            return self._lanes[route[0]].latest(before, ns)
        while ns:
            found = min(self._lanes[link].latest(before, ns) for link in route) + ns
            if found == before:
                break
            before = found
        return before - ns

    def take(self, route: Sequence[int], start: int, ns: int) -> None:
        """Take a gap of all."""
        for link in route if ns else ():
            self._lanes[link].take(start, ns)

    def give(self, route: Sequence[int], start: int, ns: int) -> None:
        """Give it back."""
        for link in route if ns else ():
            self._lanes[link].give(start, ns)
