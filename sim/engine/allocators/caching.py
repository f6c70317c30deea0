"""PyTorch's CUDA caching allocator, as its public documentation and constants describe it.

Requests round to 512 B. Those up to 1 MiB are served by the small pool from segments of 2 MiB; larger
ones by the large pool from segments of 20 MiB, from 10 MiB on from a segment of their own, rounded to
2 MiB. The smallest cached block that holds a request serves it (then the lowest address); the rest is
split off where it has at least 512 B (small pool) or more than 1 MiB (large pool). A released block merges
with free neighbours in its segment and stays cached. When a new segment does not fit into the tier, cached
segments without a live block are released to it, and the request is tried once more.

expandable_segments: one range of addresses per pool, mapped in steps of 2 MiB (small) or 20 MiB (large), so
that a free block at a mapped end grows in place. Every remainder from 512 B is split off. Free steps are
unmapped under pressure.
max_split_size: larger blocks are never split, serve only requests of at least that size and less than 20 MiB
below their own, and are released first under pressure; 0 for no limit.

Departs: one stream; no background collection; segments get rising addresses that are never reused
(addresses only break ties between blocks of one size); an expandable range never ends; a step that cannot
be mapped in full is not mapped in part. Ascend's and Moore Threads' allocators use the same constants.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import groupby

from sim.engine.allocators.cached_blocks import (
    ENDLESS,
    KIB,
    LARGE_ROUND,
    LARGE_SEGMENT,
    MIB,
    OWN_SEGMENT,
    ROUND,
    SMALL_REQUEST,
    Block,
    Cache,
    emptied,
    growable,
    map_cost,
    rounded,
    run,
    segment,
    steps,
    stretches,
    to_map,
)

__all__ = ["KIB", "MIB", "Caching"]


class Caching:
    """The caching allocator of a tier of `capacity` bytes; its interface is `Blocks`.

    used: bytes of live blocks, unsplit remainders included (`torch.cuda.memory_allocated`).
    reserved: bytes of segments (`torch.cuda.memory_reserved`).

    Raises ValueError if max_split_size is not above 20 MiB, or is combined with expandable segments, which split all.
    """

    def __init__(self, capacity: int, *, expandable_segments: bool = False, max_split_size: int = 0) -> None:
        if max_split_size and max_split_size <= LARGE_SEGMENT:
            raise ValueError(f"max_split_size: {max_split_size} is not above {LARGE_SEGMENT} bytes")
        if max_split_size and expandable_segments:
            raise ValueError("max_split_size has no effect with expandable_segments")
        self.capacity, self.rounding, self.used = capacity, ROUND, 0
        self._reserved = 0
        self._expandable = expandable_segments
        self._max_split = max_split_size or ENDLESS
        self._small, self._large = Cache(True), Cache(False)
        self._idle = 0  # bytes of segments without a live block
        self._next_address = 0
        self._handles: dict[int, Block | None] = {}
        self._next = 0
        if expandable_segments:
            for cache, base in ((self._small, 0), (self._large, ENDLESS)):
                cache.reserve_range(base)

    # ---- what the engine asks ----------------------------------------------------------------

    @property
    def reserved(self) -> int:
        """Bytes of all segments, live or cached."""
        return self._reserved

    def size(self, handle: int) -> int:
        """Bytes of that block: the request rounded up, and a remainder too small to split off."""
        block = self._handles[handle]
        return block.size if block else 0

    def address(self, handle: int) -> int:
        """Where that block begins in virtual addresses."""
        block = self._handles[handle]
        return block.address if block else 0

    def neighbours(self, handle: int) -> tuple[int, int]:
        """Free bytes just below and just above that block in its segment."""
        block = self._handles[handle]
        if block is None:
            return 0, 0
        sides = (block.below, block.above)
        low, high = (b.size if b and not b.live and b.mapped else 0 for b in sides)
        return low, high

    def take(self, bytes: int, offset: int | None = None, end: str = "low") -> int | None:
        """A handle of a new block, None if none fits after the cache has been emptied."""
        block = None
        if bytes > 0:
            size = rounded(bytes)
            cache = self._cache(size)
            block = self._find(cache, size) or self._grow(cache, size)
            if block is None and self._release_oversize(cache, size):
                block = self._grow(cache, size)
            if block is None:
                self.empty_cache()
                block = self._grow(cache, size)
            if block is None:
                return None
            self._split(block, size)
            block.hold(True)
            self.used += block.size
        handle, self._next = self._next, self._next + 1
        self._handles[handle] = block
        return handle

    def give(self, handle: int) -> None:
        """Release a block into the cache; it merges with free neighbours."""
        block = self._handles.pop(handle)
        if block is None:
            return
        self.used -= block.size
        block.hold(False)
        self._cached(self._merged(block))

    def fits(self, bytes: int, offset: int | None = None) -> bool:
        """Whether `take` would succeed now, if need be after emptying the cache."""
        return self.would_fit_after((), bytes)

    def would_fit_after(self, handles: Iterable[int], bytes: int, offset: int | None = None) -> bool:
        """Whether a request would fit once these blocks are released."""
        if bytes <= 0:
            return True
        size = rounded(bytes)
        cache = self._cache(size)
        if self._best(cache, size) is not None:
            return True
        released = {block.address: block for h in handles if (block := self._handles[h]) is not None}
        if self._expandable:
            return self._expandable_fits(cache, size, released)
        idle = self._idle
        for low, total, whole in stretches(released):
            if low.pool is cache and self._serves(total, size):
                return True
            idle += total if whole else 0
        return self._reserved - idle + segment(size) <= self.capacity

    def largest_hole(self) -> int:
        """The largest request that would fit with the cache emptied, or in a cached block if that is more."""
        small = self._small.free[-1][0] if self._small.free else 0
        large = self._large.free[-1][0] if self._large.free else 0
        if self._expandable:
            small, large = max(small, self._largest_grown(self._small)), max(large, self._largest_grown(self._large))
        else:
            room = (self.capacity - self._reserved + self._idle) // LARGE_ROUND * LARGE_ROUND
            small, large = max(small, room), max(large, room if room >= OWN_SEGMENT else 0)
        # a pool serves only requests of its own range of sizes
        return large if large > SMALL_REQUEST else min(small, SMALL_REQUEST)

    def empty_cache(self) -> None:
        """Release every segment (or mapped step) without a live block to the tier."""
        for cache in (self._small, self._large):
            for _, address in list(cache.free):
                block = cache.at[address]
                if self._expandable:
                    self._unmap(block)
                elif block.is_segment:
                    self._release(block)

    # ---- blocks and segments -----------------------------------------------------------------

    def _cache(self, size: int) -> Cache:
        return self._small if size <= SMALL_REQUEST else self._large

    def _serves(self, block: int, size: int) -> bool:
        """Whether a free block of that size may serve a request."""
        if size < self._max_split:
            return size <= block and block < self._max_split
        return size <= block < size + LARGE_SEGMENT

    def _best(self, cache: Cache, size: int) -> Block | None:
        i = bisect_left(cache.free, (size, -1))
        if i == len(cache.free):
            return None
        if self._expandable:  # a block that can grow counts with what it can grow by
            while i + 1 < len(cache.free) and growable(cache, i + 1) < growable(cache, i):
                i += 1
        block = cache.at[cache.free[i][1]]
        return block if self._serves(block.size, size) else None

    def _find(self, cache: Cache, size: int) -> Block | None:
        block = self._best(cache, size)
        if block is not None:
            self._uncached(block)
        return block

    def _grow(self, cache: Cache, size: int) -> Block | None:
        """A block from a new segment, or from newly mapped steps."""
        if self._expandable:
            return self._expand(cache, size)
        bytes = segment(size)
        if self._reserved + bytes > self.capacity:
            return None
        self._reserved += bytes
        block = Block(cache, self._next_address, bytes)
        self._next_address += bytes
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if block.pool.small or self._expandable:
            split = rest >= ROUND
        else:
            split = rest > SMALL_REQUEST and size < self._max_split
        if split:
            self._cached(block.cut(size))

    def _merged(self, block: Block) -> Block:
        """The block joined with its free neighbours of the same kind, in no list."""
        above, below = block.above, block.below
        if above and not above.live and above.mapped == block.mapped:
            self._uncached(above)
            block.absorb_above()
        if below and not below.live and below.mapped == block.mapped:
            self._uncached(below)
            below.absorb_above()
            return below
        return block

    def _cached(self, block: Block) -> None:
        block.pool.add(block)
        if block.is_segment and not self._expandable:
            self._idle += block.size

    def _uncached(self, block: Block) -> None:
        block.pool.remove(block)
        if block.is_segment and not self._expandable:
            self._idle -= block.size

    def _release(self, segment: Block) -> None:
        self._uncached(segment)
        self._reserved -= segment.size

    def _release_oversize(self, cache: Cache, size: int) -> bool:
        """Release one cached block above the split limit that is large enough, or several, largest first."""
        if self._max_split == ENDLESS:
            return False
        wanted = max(size, self._max_split)
        i, got = bisect_left(cache.free, (wanted, -1)), 0
        if i < len(cache.free):
            self._release(cache.at[cache.free[i][1]])
            return True
        while got < wanted and cache.free and cache.free[-1][0] >= self._max_split:
            got += cache.free[-1][0]
            self._release(cache.at[cache.free[-1][1]])
        return got >= wanted

    # ---- expandable segments -----------------------------------------------------------------

    def _expand(self, cache: Cache, size: int) -> Block | None:
        start = self._candidate(cache, size)
        if self._reserved + to_map(start, size) > self.capacity:
            return None
        block = start if start.mapped else self._map(start, size)
        while block.size < size:
            assert block.above is not None  # the candidate's range is long enough
            block = self._map(block.above, size - block.size)
        self._uncached(block)
        return block

    def _candidate(self, cache: Cache, size: int) -> Block:
        """The lowest range with an unmapped part that can hold `size`; its first block."""
        for address in cache.unmapped:
            block = cache.at[address]
            if block.below and not block.below.live:
                block = block.below
            if sum(piece.size for piece in run(block)) >= size:
                return block
        raise AssertionError("the range of an expandable segment has no end")

    def _map(self, block: Block, size: int) -> Block:
        """Back the first steps of an unmapped block; returns the free block they become part of."""
        self._uncached(block)
        bytes = min(block.size, steps(size, block.pool.unit))
        if bytes < block.size:
            self._cached(block.cut(bytes))
        block.back(True)
        self._reserved += bytes
        block = self._merged(block)
        self._cached(block)
        return block

    def _unmap(self, block: Block) -> None:
        unit = block.pool.unit
        low, high = steps(block.address, unit), (block.address + block.size) // unit * unit
        if low >= high:
            return
        self._uncached(block)
        self._reserved -= high - low
        if high < block.address + block.size:
            self._cached(block.cut(high - block.address))
        if low > block.address:
            middle = block.cut(low - block.address)
            self._cached(block)
            block = middle
        block.back(False)
        self._cached(self._merged(block))

    def _ranges(self, cache: Cache, released: dict[int, Block]) -> Iterator[list[Block]]:
        """The ranges between blocks that stay live, lowest first, as lists of blocks."""
        pieces: list[Block] = []
        block = cache.bottom
        while block is not None:
            if block.live and block.address not in released:
                if pieces:
                    yield pieces
                pieces = []
            else:
                pieces.append(block)
            block = block.above
        yield pieces

    def _touched(self, released: dict[int, Block]) -> int:
        """Bytes of the steps that blocks which stay live touch: what stays mapped with the cache empty."""
        total = 0
        for cache in (self._small, self._large):
            done = -1
            block = cache.bottom
            while block is not None:
                if block.live and block.address not in released:
                    first = max(block.address // cache.unit, done + 1)
                    last = (block.address + block.size - 1) // cache.unit
                    total += (last - first + 1) * cache.unit
                    done = last
                block = block.above
        return total

    def _expandable_fits(self, cache: Cache, size: int, released: dict[int, Block]) -> bool:
        """Whether `size` fits with those blocks released: cached, by growing, or with the cache emptied."""
        ranges = list(self._ranges(cache, released))
        for pieces in ranges:
            for mapped, group in groupby(pieces, key=lambda piece: piece.mapped):
                if mapped and sum(piece.size for piece in group) >= size:
                    return True
        for pieces in ranges:
            if sum(piece.size for piece in pieces) >= size and not all(piece.mapped for piece in pieces):
                if self._reserved + map_cost(pieces, size, cache.unit) <= self.capacity:
                    return True
                break
        room = self.capacity - self._touched(released)
        for start, stop, low, high in (emptied(pieces, cache.unit) for pieces in ranges):
            if stop - start >= size and low < high:
                return min(steps(size - (low - start), cache.unit), high - low) <= room
        return False

    def _largest_grown(self, cache: Cache) -> int:
        """The largest request that newly mapped steps can serve once the cache is empty."""
        room, best, longest = self.capacity - self._touched({}), 0, 0
        for start, stop, low, high in (emptied(pieces, cache.unit) for pieces in self._ranges(cache, {})):
            if low >= high:
                continue
            steps = room // cache.unit * cache.unit
            size = stop - start if high - low <= steps else low - start + steps
            if size > longest:  # smaller requests go to a lower range
                best = max(best, size)
            longest = max(longest, stop - start)
        return best
