"""Where blocks lie in a tier: the allocators that have addresses.

    exact     sum of sizes; done by the engine itself, `make_allocator` gives None
    caching   PyTorch's CUDA allocator, in `sim.engine.caching`
    pool      one contiguous range, first or best fit, filled from one end or from both
    planned   one contiguous range, each block at the offset that the plan gives it

A request of zero bytes is legal everywhere: it gets a handle, no space, and address 0.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Protocol

from sim.engine.caching import Caching
from sim.errors import IllegalPlan, ProfileError, UnitError, near
from sim.hardware.platform import Tier
from sim.units import parse_bytes

OPTIONS: dict[str, dict[str, type]] = {
    "exact": {},
    "caching": {"expandable_segments": bool, "max_split_size": int},
    "pool": {"fit": str, "ends": int, "classes": str, "rounding": int},
    "planned": {"rounding": int},
}
"""The options of each allocator and their types; sizes in bytes."""


class Blocks(Protocol):
    """What the engine asks of a tier with addresses. Sizes and addresses in bytes.

    rounding: granularity of a request. used: bytes of the live blocks, as `size` counts them.
    reserved: what was taken from the tier (caching: its segments; others: `used`).
    """

    rounding: int
    used: int

    @property
    def reserved(self) -> int:
        """Bytes taken from the tier."""

    def fits(self, bytes: int, offset: int | None = None) -> bool:
        """Whether `take` would succeed now (for caching, after it has given back what it caches)."""

    def take(self, bytes: int, offset: int | None = None, end: str = "low") -> int | None:
        """A handle (>= 0) of a new block, None where none fits. `offset` is for planned, `end` for pool."""

    def give(self, handle: int) -> None:
        """Release a block. Raises KeyError where the handle is not live."""

    def size(self, handle: int) -> int:
        """Bytes counted against the tier for that block: at least what was asked for."""

    def largest_hole(self) -> int:
        """The largest request that would fit now."""

    def neighbours(self, handle: int) -> tuple[int, int]:
        """Free bytes just below and just above that block."""

    def address(self, handle: int) -> int:
        """Where that block begins."""

    def would_fit_after(self, handles: Iterable[int], bytes: int, offset: int | None = None) -> bool:
        """Whether a request would fit once these blocks are given back. Changes nothing."""


def make_allocator(tier: Tier) -> Blocks | None:
    """The allocator that a tier names, empty; None for `exact`.

    Raises ProfileError on an unknown allocator, option or value.
    """
    name, where = tier.allocator.name, f"tier {tier.name!r}: allocator"
    if name not in OPTIONS:
        raise ProfileError(f"{where}: {name!r} is unknown{near(name, OPTIONS)}")
    given = dict(tier.allocator.options)
    for key, value in given.items():
        if key not in OPTIONS[name]:
            raise ProfileError(f"{where} {name!r}: option {key!r} is unknown{near(key, OPTIONS[name])}")
        if key == "classes" and type(value) is int:
            given[key] = value = str(value)  # a profile turns "2 MiB" into bytes
        if type(value) is not OPTIONS[name][key]:
            raise ProfileError(f"{where} {name!r}: {key}: {value!r} is no {OPTIONS[name][key].__name__}")
    try:
        if name == "caching":
            return Caching(tier.capacity, **given)  # type: ignore[arg-type]
        if name == "pool":
            return Pool(tier.capacity, **given)  # type: ignore[arg-type]
        if name == "planned":
            return Planned(tier.capacity, **given)  # type: ignore[arg-type]
    except ValueError as error:
        raise ProfileError(f"{where} {name!r}: {error}") from None
    return None


class _Holes:
    """The free ranges, maximal and disjoint, found by size and by address."""

    def __init__(self) -> None:
        self.size_at: dict[int, int] = {}
        self.start_of_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        # first fit: starts in order, one list per power of two, so that only one list has to be searched
        self._by_power: dict[int, list[int]] = {}

    def add(self, start: int, size: int) -> None:
        self.size_at[start] = size
        self.start_of_end[start + size] = start
        insort(self._by_size, (size, start))
        insort(self._by_power.setdefault(size.bit_length(), []), start)

    def remove(self, start: int) -> int:
        size = self.size_at.pop(start)
        del self.start_of_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        starts = self._by_power[size.bit_length()]
        del starts[bisect_left(starts, start)]
        return size

    def largest(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def best(self, bytes: int, high: bool) -> int | None:
        """Start of the smallest hole that holds `bytes`; among equals the lowest, or the highest."""
        i = bisect_left(self._by_size, (bytes, -1))
        if i == len(self._by_size):
            return None
        if high:
            i = bisect_left(self._by_size, (self._by_size[i][0] + 1, -1)) - 1
        return self._by_size[i][1]

    def first(self, bytes: int, high: bool) -> int | None:
        """Start of the lowest (or highest) hole that holds `bytes`."""
        own, found = bytes.bit_length(), None
        for power, starts in self._by_power.items():
            if power > own and starts:  # every hole of a larger power fits
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


class _Contiguous:
    """Live blocks and holes of one range [0, capacity)."""

    def __init__(self, capacity: int, rounding: int) -> None:
        if rounding < 1:
            raise ValueError(f"rounding: {rounding} is less than 1")
        self.capacity, self.rounding, self.used = capacity, rounding, 0
        self._blocks: dict[int, tuple[int, int]] = {}
        self._next = 0
        self._holes = _Holes()
        if capacity > 0:
            self._holes.add(0, capacity)

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
        return self._holes.largest() // self.rounding * self.rounding

    def neighbours(self, handle: int) -> tuple[int, int]:
        """Free bytes just below and just above that block."""
        start, size = self._blocks[handle]
        if not size:
            return 0, 0
        below = self._holes.start_of_end.get(start, start)
        return start - below, self._holes.size_at.get(start + size, 0)

    def give(self, handle: int) -> None:
        """Release a block; it merges with the holes beside it."""
        below, above = self.neighbours(handle)
        start, size = self._blocks.pop(handle)
        self.used -= size
        if not size:
            return
        if below:
            self._holes.remove(start - below)
        if above:
            self._holes.remove(start + size)
        self._holes.add(start - below, below + size + above)

    def _carve(self, hole: int, start: int, size: int) -> int:
        room = self._holes.remove(hole)
        if start > hole:
            self._holes.add(hole, start - hole)
        if hole + room > start + size:
            self._holes.add(start + size, hole + room - start - size)
        return self._live(start, size)

    def _live(self, start: int, size: int) -> int:
        handle, self._next = self._next, self._next + 1
        self._blocks[handle] = (start, size)
        self.used += size
        return handle

    def _hole_after(self, handles: Iterable[int]) -> int:
        """Size of the largest hole once these blocks are given back."""
        best, low, high = self._holes.largest(), 0, -1
        for start, size, handle in sorted((*self._blocks[h], h) for h in set(handles)):
            if not size:
                continue
            below, above = self.neighbours(handle)
            if start - below > high:
                low = start - below
            high = start + size + above
            best = max(best, high - low)
        return best


class Pool(_Contiguous):
    """One contiguous range that hands out the first or the smallest hole that holds a request.

    fit: `first` (lowest address) or `best` (smallest hole, then lowest address). ends: 1, or 2 for a
    range filled from both ends, where `take(…, end="high")` searches from above and puts the block at
    the upper end of its hole. classes: sizes that requests are rounded up to, with commas between
    ("2 MiB, 20 MiB" or bytes; larger requests round to `rounding`), "pow2" for powers of two, "" for none.
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
            raise ValueError(f"classes: {classes!r} is neither 'pow2' nor sizes with commas between") from None
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
        hole = super().largest_hole()
        if self._powers and hole:
            hole = 1 << (hole.bit_length() - 1)
            while self.rounded(hole) > self._holes.largest():
                hole //= 2
            return hole
        if self._classes and hole <= self._classes[-1]:
            return max((c for c in self._classes if super(Pool, self).rounded(c) <= hole), default=0)
        return hole

    def fits(self, bytes: int, offset: int | None = None) -> bool:
        """Whether some hole holds the request."""
        return self.rounded(bytes) <= self._holes.largest()

    def take(self, bytes: int, offset: int | None = None, end: str = "low") -> int | None:
        """A handle of a new block, or None; `end` counts only where there are two."""
        size = self.rounded(bytes)
        if not size:
            return self._live(0, 0)
        high = self._two_ended and end == "high"
        hole = self._holes.first(size, high) if self._first else self._holes.best(size, high)
        if hole is None:
            return None
        start = hole + self._holes.size_at[hole] - size if high else hole
        return self._carve(hole, start, size)

    def would_fit_after(self, handles: Iterable[int], bytes: int, offset: int | None = None) -> bool:
        """Whether a request would fit once these blocks are given back."""
        return self.rounded(bytes) <= self._hole_after(handles)

    def compact(self) -> int:
        """Slide all blocks to the low end, in order of address. Returns the bytes that had to be moved."""
        moved, at, self._holes = 0, 0, _Holes()
        for handle, (start, size) in sorted(self._blocks.items(), key=lambda item: item[1]):
            if size:
                moved += size if start != at else 0
                self._blocks[handle] = (at, size)
                at += size
        if at < self.capacity:
            self._holes.add(at, self.capacity - at)
        return moved


class Planned(_Contiguous):
    """One contiguous range in which the plan says where each block lies.

    A request without an offset (workspace, or a tensor that the plan leaves open) goes as high as it can,
    out of the way of offsets, which planners give out from 0.
    """

    def __init__(self, capacity: int, *, rounding: int = 1):
        super().__init__(capacity, rounding)
        self._order: list[tuple[int, int]] = []  # (start, handle) of blocks that hold bytes

    def overlapping(self, bytes: int, offset: int) -> tuple[int, ...]:
        """Handles of the live blocks in that range, lowest first."""
        stop = offset + self.rounded(bytes)
        first = max(0, bisect_left(self._order, (offset, -1)) - 1)
        found = []
        for start, handle in self._order[first:] if stop > offset else ():
            if start >= stop:
                break
            if start + self.size(handle) > offset:
                found.append(handle)
        return tuple(found)

    def fits(self, bytes: int, offset: int | None = None) -> bool:
        """Whether that range is free; without an offset, whether some hole holds the request."""
        return self.would_fit_after((), bytes, offset)

    def take(self, bytes: int, offset: int | None = None, end: str = "low") -> int | None:
        """A handle of a new block at `offset`; None where it passes the capacity.

        Raises IllegalPlan where another live block lies there.
        """
        size = self.rounded(bytes)
        if not size:
            return self._live(0, 0)
        if offset is None:
            hole = self._holes.first(size, True)
            if hole is None:
                return None
            start = hole + self._holes.size_at[hole] - size
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
            hole = below[0] + self.size(below[1]) if below else 0
        handle = self._carve(hole, start, size)
        insort(self._order, (start, handle))
        return handle

    def give(self, handle: int) -> None:
        """Release a block."""
        start, size = self._blocks[handle]
        super().give(handle)
        if size:
            del self._order[bisect_left(self._order, (start, handle))]

    def would_fit_after(self, handles: Iterable[int], bytes: int, offset: int | None = None) -> bool:
        """Whether that range would be free once these blocks are given back."""
        gone, size = set(handles), self.rounded(bytes)
        if offset is None:
            return size <= self._hole_after(gone)
        return 0 <= offset <= self.capacity - size and gone.issuperset(self.overlapping(size, offset))
