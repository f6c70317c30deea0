"""The allocator `planned`: each block at the offset that the plan gives it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from sim.engine.allocators.contiguous import Contiguous
from sim.errors import IllegalPlan


class Planned(Contiguous):
    """One contiguous range in which the plan gives each block its offset.

    A request without an offset (workspace, or a tensor that the plan leaves open) takes the highest free range, since
    planners assign offsets from 0.
    """

    def __init__(self, capacity: int, *, rounding: int = 1):
        super().__init__(capacity, rounding)
        self._order: list[tuple[int, int]] = []  # (start, handle) of blocks that hold bytes

    def overlapping(self, bytes: int, offset: int) -> tuple[int, ...]:
        """Handles of the live blocks in that range, lowest first."""
        stop = offset + self.rounded(bytes)
        first = max(0, bisect_left(self._order, (offset, -1)) - 1)
        live = []
        for start, handle in self._order[first:] if stop > offset else ():
            if start >= stop:
                break
            if start + self.size(handle) > offset:
                live.append(handle)
        return tuple(live)

    def fits(self, bytes: int, offset: int | None = None) -> bool:
        """Whether that range is free; without an offset, whether some free range holds the request."""
        return self.would_fit_after((), bytes, offset)

    def take(self, bytes: int, offset: int | None = None, end: str = "low") -> int | None:
        """A handle of a new block at `offset`; None if it exceeds the capacity.

        Raises IllegalPlan if it overlaps a live block.
        """
        size = self.rounded(bytes)
        if not size:
            return self._live(0, 0)
        if offset is None:
            free = self._free.first(size, True)
            if free is None:
                return None
            start = free + self._free.size_at[free] - size
        else:
            start = offset
            if start < 0 or start + size > self.capacity:
                return None
            for other in self.overlapping(size, start):
                begin, length = self._blocks[other]
                raise IllegalPlan(
                    f"planned bytes {start}..{start + size} overlap a live block at {begin}..{begin + length}"
                )
            i = bisect_left(self._order, (start, -1))
            below = self._order[i - 1] if i else None
            free = below[0] + self.size(below[1]) if below else 0
        handle = self._carve(free, start, size)
        insort(self._order, (start, handle))
        return handle

    def give(self, handle: int) -> None:
        """Release a block."""
        start, size = self._blocks[handle]
        super().give(handle)
        if size:
            del self._order[bisect_left(self._order, (start, handle))]

    def would_fit_after(self, handles: Iterable[int], bytes: int, offset: int | None = None) -> bool:
        """Whether that range would be free once these blocks are released."""
        released, size = set(handles), self.rounded(bytes)
        if offset is None:
            return size <= self._largest_after(released)
        return 0 <= offset <= self.capacity - size and released.issuperset(self.overlapping(size, offset))
