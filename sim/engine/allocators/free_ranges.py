"""The free ranges of one contiguous range, found by size and by address."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRanges:
    """Maximal, disjoint ranges.

    size_at: per start the bytes.
    start_of_end: per end the start.
    """

    def __init__(self) -> None:
        self.size_at: dict[int, int] = {}
        self.start_of_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        # first fit: starts in order, one list per power of two, so that only one list has to be searched
        self._by_power: dict[int, list[int]] = {}

    def add(self, start: int, size: int) -> None:
        """Add a free range that touches no other one."""
        self.size_at[start] = size
        self.start_of_end[start + size] = start
        insort(self._by_size, (size, start))
        insort(self._by_power.setdefault(size.bit_length(), []), start)

    def remove(self, start: int) -> int:
        """Remove a free range; returns its bytes."""
        size = self.size_at.pop(start)
        del self.start_of_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        starts = self._by_power[size.bit_length()]
        del starts[bisect_left(starts, start)]
        return size

    def largest(self) -> int:
        """Bytes of the largest one, 0 for none."""
        return self._by_size[-1][0] if self._by_size else 0

    def best(self, bytes: int, high: bool) -> int | None:
        """Start of the smallest range that holds `bytes`; among equals the lowest, or the highest."""
        i = bisect_left(self._by_size, (bytes, -1))
        if i == len(self._by_size):
            return None
        if high:
            i = bisect_left(self._by_size, (self._by_size[i][0] + 1, -1)) - 1
        return self._by_size[i][1]

    def first(self, bytes: int, high: bool) -> int | None:
        """Start of the lowest (or highest) range that holds `bytes`."""
        own, found = bytes.bit_length(), None
        for power, starts in self._by_power.items():
            if power > own and starts:  # every range of a larger power fits
                start = starts[-1] if high else starts[0]
                if found is None or (start > found) == high:
                    found = start
        same = self._by_power.get(own, ())
        for start in reversed(same) if high else same:
            if found is not None and (start < found) == high:
                break
            if self.size_at[start] >= bytes:
                return start
        return found
