"""When a link is taken: copies in both directions of time, the first gap after a moment and the last one before."""

from __future__ import annotations

from bisect import bisect_right


class Calendar:
    """The times at which one link copies, in ns, one copy at a time."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def after(self, moment: int, ns: int) -> int:
        """The earliest begin, not before a moment, of a copy that takes so long."""
        i = bisect_right(self._ends, moment)
        while i < len(self._begins) and self._begins[i] < moment + ns:
            moment = max(moment, self._ends[i])
            i += 1
        return moment

    def before(self, moment: int, ns: int) -> int:
        """The latest begin of a copy that takes so long and ends by a moment; negative where only that is free."""
        i = bisect_right(self._begins, moment - 1) - 1
        while i >= 0 and self._ends[i] > moment - ns:
            moment = min(moment, self._begins[i])
            i -= 1
        return moment - ns

    def book(self, begin: int, ns: int) -> None:
        """Take the link."""
        i = bisect_right(self._begins, begin)
        self._begins.insert(i, begin)
        self._ends.insert(i, begin + ns)
