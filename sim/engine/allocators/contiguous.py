"""One contiguous range of addresses: live blocks, and free ranges between them that merge."""

from __future__ import annotations

from collections.abc import Iterable

from sim.engine.allocators.free_ranges import FreeRanges


class Contiguous:
    """Live blocks and free ranges of [0, capacity)."""

    def __init__(self, capacity: int, rounding: int) -> None:
        if rounding < 1:
            raise ValueError(f"rounding: {rounding} is less than 1")
        self.capacity, self.rounding, self.used = capacity, rounding, 0
        self._blocks: dict[int, tuple[int, int]] = {}
        self._next = 0
        self._free = FreeRanges()
        if capacity > 0:
            self._free.add(0, capacity)

    @property
    def reserved(self) -> int:
        """Bytes taken from the tier: those of the live blocks."""
        return self.used

    def rounded(self, bytes: int) -> int:
        """Bytes that a request takes."""
        return -(-bytes // self.rounding) * self.rounding

    def size(self, handle: int) -> int:
        """Bytes of that block."""
        return self._blocks[handle][1]

    def address(self, handle: int) -> int:
        """Where that block begins."""
        return self._blocks[handle][0]

    def largest_hole(self) -> int:
        """The largest request that would fit now."""
        return self._free.largest() // self.rounding * self.rounding

    def neighbours(self, handle: int) -> tuple[int, int]:
        """Free bytes just below and just above that block."""
        start, size = self._blocks[handle]
        if not size:
            return 0, 0
        below = self._free.start_of_end.get(start, start)
        return start - below, self._free.size_at.get(start + size, 0)

    def give(self, handle: int) -> None:
        """Release a block; it merges with adjacent free ranges."""
        below, above = self.neighbours(handle)
        start, size = self._blocks.pop(handle)
        self.used -= size
        if not size:
            return
        if below:
            self._free.remove(start - below)
        if above:
            self._free.remove(start + size)
        self._free.add(start - below, below + size + above)

    def _carve(self, free: int, start: int, size: int) -> int:
        """A block at `start` of the free range that begins at `free`."""
        stop = free + self._free.remove(free)
        if start > free:
            self._free.add(free, start - free)
        if stop > start + size:
            self._free.add(start + size, stop - start - size)
        return self._live(start, size)

    def _live(self, start: int, size: int) -> int:
        handle, self._next = self._next, self._next + 1
        self._blocks[handle] = (start, size)
        self.used += size
        return handle

    def _largest_after(self, handles: Iterable[int]) -> int:
        """Size of the largest free range once these blocks are released."""
        best, low, high = self._free.largest(), 0, -1
        for start, size, handle in sorted((*self._blocks[h], h) for h in set(handles)):
            if not size:
                continue
            below, above = self.neighbours(handle)
            if start - below > high:
                low = start - below
            high = start + size + above
            best = max(best, high - low)
        return best
