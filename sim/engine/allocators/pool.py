"""The allocator `pool`: first or best fit, filled from one end or from both."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from sim.engine.allocators.contiguous import Contiguous
from sim.engine.allocators.free_ranges import FreeRanges
from sim.errors import UnitError
from sim.units import parse_bytes


class Pool(Contiguous):
    """One contiguous range; a request gets the first or the smallest free range that holds it.

    fit: `first` (lowest address) or `best` (smallest range, then lowest address).
    ends: 1, or 2 for a range filled from both ends, where `take(…, end="high")` searches from above and puts the
        block at the upper end of its range.
    classes: sizes that requests are rounded up to, separated by commas ("2 MiB, 20 MiB" or bytes; larger requests
        round to `rounding`); "pow2" for powers of two, "" for none.

    Raises ValueError on another value.
    """

    def __init__(self, capacity: int, *, fit: str = "best", ends: int = 1, classes: str = "", rounding: int = 1):
        super().__init__(capacity, rounding)
        if fit not in ("first", "best"):
            raise ValueError(f"fit: {fit!r} is neither 'first' nor 'best'")
        if ends not in (1, 2):
            raise ValueError(f"ends: {ends} is neither 1 nor 2")
        self._first = fit == "first"
        self._two_ended = ends == 2
        self._powers = classes == "pow2"
        try:
            parts = [] if self._powers or not classes else [part.strip() for part in classes.split(",")]
            self._classes = sorted(int(part) if part.isdecimal() else parse_bytes(part) for part in parts)
        except UnitError:
            raise ValueError(f"classes: {classes!r} is neither 'pow2' nor sizes separated by commas") from None
        if self._classes and self._classes[0] < 1:
            raise ValueError(f"classes: {self._classes[0]} is less than 1")

    def rounded(self, bytes: int) -> int:
        """Bytes that a request takes: its size class, then a multiple of `rounding`."""
        if bytes and self._powers:
            bytes = 1 << (bytes - 1).bit_length()
        elif bytes and self._classes:
            i = bisect_left(self._classes, bytes)
            bytes = self._classes[i] if i < len(self._classes) else bytes
        return super().rounded(bytes)

    def largest_hole(self) -> int:
        """The largest request that would fit now, after rounding up to its class."""
        largest = super().largest_hole()
        if self._powers and largest:
            largest = 1 << (largest.bit_length() - 1)
            while self.rounded(largest) > self._free.largest():
                largest //= 2
            return largest
        if self._classes and largest <= self._classes[-1]:
            return max((c for c in self._classes if super(Pool, self).rounded(c) <= largest), default=0)
        return largest

    def fits(self, bytes: int, offset: int | None = None) -> bool:
        """Whether some free range holds the request."""
        return self.rounded(bytes) <= self._free.largest()

    def take(self, bytes: int, offset: int | None = None, end: str = "low") -> int | None:
        """A handle of a new block, or None; `end` matters only if there are two."""
        size = self.rounded(bytes)
        if not size:
            return self._live(0, 0)
        high = self._two_ended and end == "high"
        free = self._free.first(size, high) if self._first else self._free.best(size, high)
        if free is None:
            return None
        start = free + self._free.size_at[free] - size if high else free
        return self._carve(free, start, size)

    def would_fit_after(self, handles: Iterable[int], bytes: int, offset: int | None = None) -> bool:
        """Whether a request would fit once these blocks are released."""
        return self.rounded(bytes) <= self._largest_after(handles)

    def compact(self) -> int:
        """Slide all blocks to the low end, in order of address. Returns the bytes that had to be moved."""
        moved, end, self._free = 0, 0, FreeRanges()
        for handle, (start, size) in sorted(self._blocks.items(), key=lambda item: item[1]):
            if size:
                moved += size if start != end else 0
                self._blocks[handle] = (end, size)
                end += size
        if end < self.capacity:
            self._free.add(end, self.capacity - end)
        return moved
