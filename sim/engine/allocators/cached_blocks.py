"""Blocks of the caching allocator: their segments, how sizes round, and what merges with what."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

KIB, MIB = 1 << 10, 1 << 20
ROUND = 512
SMALL_REQUEST = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
LARGE_ROUND = 2 * MIB
ENDLESS = LARGE_SEGMENT << 30


class Block:
    """A range of a segment.

    below, above: its neighbours in the segment.
    mapped: whether the tier backs it.
    """

    __slots__ = ("above", "address", "below", "live", "mapped", "pool", "size")

    def __init__(self, pool: Cache, address: int, size: int, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.live = False
        self.below: Block | None = None
        self.above: Block | None = None

    @property
    def is_segment(self) -> bool:
        """Whether it is all of its segment."""
        return self.below is None and self.above is None

    def hold(self, live: bool) -> None:
        """Whether a request holds it."""
        self.live = live

    def back(self, mapped: bool) -> None:
        """Whether the tier backs it."""
        self.mapped = mapped

    def link_below(self, below: Block) -> None:
        """Another block is now just below it."""
        self.below = below

    def cut(self, size: int) -> Block:
        """Shorten it to `size`; returns what was above, linked."""
        rest = Block(self.pool, self.address + size, self.size - size, self.mapped)
        rest.link_below(self)
        rest.link_above(self.above)
        self.size = size
        self.above = rest
        return rest

    def link_above(self, above: Block | None) -> None:
        """Another block, or none, is now just above it."""
        self.above = above
        if above:
            above.link_below(self)

    def absorb_above(self) -> None:
        """Merge with the block just above it."""
        if self.above:
            self.size += self.above.size
            self.link_above(self.above.above)


class Cache:
    """One of the two pools: its free blocks by size and, with expandable segments, the unmapped ones."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.unit = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int]] = []  # (size, address)
        self.unmapped: list[int] = []
        self.at: dict[int, Block] = {}  # free and unmapped blocks
        self.bottom: Block | None = None  # of the expandable range

    def add(self, block: Block) -> None:
        """Add a free block."""
        self.at[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def reserve_range(self, base: int) -> None:
        """Add an expandable range of addresses, none of it mapped yet."""
        self.bottom = Block(self, base, ENDLESS, mapped=False)
        self.add(self.bottom)

    def remove(self, block: Block) -> None:
        """Remove it."""
        del self.at[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]


def rounded(bytes: int) -> int:
    """Bytes that a request takes."""
    return -(-bytes // ROUND) * ROUND


def steps(bytes: int, unit: int) -> int:
    """Rounded up to whole steps."""
    return -(-bytes // unit) * unit


def segment(size: int) -> int:
    """Bytes of the new segment that a request of `size` asks for."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else steps(size, LARGE_ROUND)


def growable(cache: Cache, i: int) -> int:
    """Bytes of a free block of an expandable range, with what could be mapped just above it."""
    block = cache.at[cache.free[i][1]]
    return block.size + (block.above.size if block.above and not block.above.mapped else 0)


def run(block: Block | None) -> Iterator[Block]:
    """A block and those above it, up to the next live one."""
    while block is not None and not block.live:
        yield block
        block = block.above


def to_map(start: Block, size: int) -> int:
    """Bytes to map so that a request fits from that block on."""
    return map_cost(run(start), size, start.pool.unit)


def map_cost(pieces: Iterable[Block], size: int, unit: int) -> int:
    """Bytes of the steps to map so that the first `size` bytes of a range are backed."""
    have = cost = 0
    for piece in pieces:
        if have >= size:
            break
        if not piece.mapped:
            cost += min(piece.size, steps(size - have, unit))
        have += piece.size
    return cost


def emptied(pieces: list[Block], unit: int) -> tuple[int, int, int, int]:
    """A range's start and stop, and the part of it in whole steps, which an emptied cache leaves unmapped."""
    start, stop = pieces[0].address, pieces[-1].address + pieces[-1].size
    return start, stop, steps(start, unit), stop // unit * unit


def stretches(released: dict[int, Block]) -> Iterator[tuple[Block, int, bool]]:
    """The block that these merge to once free: the lowest one, its bytes, and whether it is a whole segment."""
    seen: set[int] = set()
    for block in released.values():
        if block.address in seen:
            continue
        low = block
        while low.below and (not low.below.live or low.below.address in released):
            low = low.below
        total, at = 0, low
        while True:
            seen.add(at.address)
            total += at.size
            if not at.above or (at.above.live and at.above.address not in released):
                break
            at = at.above
        yield low, total, low.below is None and at.above is None
