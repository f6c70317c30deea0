"""The bytes of every tier: who takes and gives them back, what is about to leave or to arrive, who waits for space."""

from __future__ import annotations

from typing import NamedTuple

from sim.engine.allocators import make_allocator
from sim.engine.event_path.clock import Clock, Wake
from sim.engine.event_path.record import Record
from sim.engine.event_path.residency import Residency
from sim.hardware.platform import Platform
from sim.log import CAUSE

PRODUCED, WORKSPACE, OVERWRITTEN = CAUSE["made"], CAUSE["workspace"], CAUSE["overwritten"]
MOVED_IN, CALLED_OFF = CAUSE["moved in"], CAUSE["called off"]


class Space:
    """Per tier its capacity and use in bytes; every change is a row of the log.

    leaving: bytes that copies under way will release.
    arriving: bytes taken by copies that have not ended.
    blocks: the allocators of tiers with addresses, None for the others.
    compressed: bytes of copies that a link compressed, by tensor and tier.
    waiting: how many devices and transfers wait for space anywhere.
    freed: tiers where some was released, or promised, since their waiters were last asked.
    """

    def __init__(self, platform: Platform, size: list[int], clock: Clock, record: Record, residency: Residency) -> None:
        tiers = len(platform.tiers)
        self.names = [tier.name for tier in platform.tiers]
        self.capacity = [tier.capacity for tier in platform.tiers]
        self.used = [0] * tiers
        self.leaving = [0] * tiers
        self.arriving = [0] * tiers
        self.blocks = [make_allocator(tier) for tier in platform.tiers]
        self.waiting = 0
        self.freed: set[int] = set()
        self.compressed: dict[tuple[int, int], int] = {}
        self._size = size
        self._clock = clock
        self._residency = residency
        self._changes = record.changes.rows
        self._reserved = record.reserved.rows
        self._reserved_before = [0] * tiers
        self._handles: dict[tuple[int, int], int] = {}

    # ---- would it fit ------------------------------------------------------------------------

    def free(self, tier: int) -> int:
        """Bytes not taken."""
        return self.capacity[tier] - self.used[tier]

    def fits(self, tier: int, bytes: int, offset: int | None = None) -> bool:
        """Whether a request would be granted now."""
        blocks = self.blocks[tier]
        if blocks is None:
            return self.used[tier] + bytes <= self.capacity[tier]
        return bytes == 0 or blocks.fits(bytes, offset)

    def fits_later(self, tier: int, bytes: int, offset: int | None = None) -> bool:
        """Whether it would be granted once all that is leaving has left (as far as sizes tell)."""
        blocks = self.blocks[tier]
        if blocks is None or not self.leaving[tier]:
            return blocks is None and bytes <= self.free(tier) + self.leaving[tier]
        is_leaving = self._residency.is_leaving
        leaving = [
            handle for (tensor, where), handle in self._handles.items() if where == tier and is_leaving(tensor, tier)
        ]
        return blocks.would_fit_after(leaving, bytes, offset)

    def largest_free_block(self, tier: int) -> int:
        """The largest contiguous free range."""
        blocks = self.blocks[tier]
        return self.free(tier) if blocks is None else blocks.largest_hole()

    def neighbours(self, tensor: int, tier: int) -> tuple[int, int]:
        """Free bytes just below and just above a copy."""
        blocks, handle = self.blocks[tier], self._handles.get((tensor, tier))
        return (0, 0) if blocks is None or handle is None else blocks.neighbours(handle)

    def has_taken(self, tensor: int, tier: int) -> bool:
        """Whether an allocator with addresses has a block for a tensor, complete or not."""
        return (tensor, tier) in self._handles

    # ---- taking and giving back --------------------------------------------------------------

    def take(self, tensor: int, tier: int, bytes: int, op: int, cause: int, offset: int | None = None) -> int:
        """Take space that fits; returns the allocator's handle, -1 without one. tensor -1: workspace."""
        blocks = self.blocks[tier]
        handle = -1
        if blocks is not None:
            # in a pool with two ends what lives shortest comes from the far one
            block = blocks.take(bytes, offset, "high" if tensor < 0 else "low")
            assert block is not None, "a block that was free is not"
            handle = block
            bytes = blocks.size(handle)
            if tensor >= 0:
                self._handles[tensor, tier] = handle
            self._note_reserved(tier, blocks.reserved)
        self.used[tier] += bytes
        self._changes += (self._clock.now, tier, bytes, tensor, op, cause)
        return handle

    def give(self, tensor: int, tier: int, bytes: int, op: int, cause: int, handle: int = -1) -> None:
        """Give space back and have waiters ask again."""
        blocks = self.blocks[tier]
        if blocks is not None:
            if tensor >= 0:
                handle = self._handles.pop((tensor, tier))
            bytes = blocks.size(handle)
            blocks.give(handle)
            self._note_reserved(tier, blocks.reserved)
        self.used[tier] -= bytes
        self._changes += (self._clock.now, tier, -bytes, tensor, op, cause)
        if self.waiting:
            self.offer(tier)

    def give_copy(self, tensor: int, tier: int, op: int, cause: int) -> None:
        """Give back the space of a tensor's copy."""
        bytes = self._size[tensor]
        if self.compressed:
            bytes = self.compressed.pop((tensor, tier), bytes)
        if self.blocks[tier] is not None:
            self.give(tensor, tier, bytes, op, cause)
            return
        self.used[tier] -= bytes
        self._changes += (self._clock.now, tier, -bytes, tensor, op, cause)
        if self.waiting:
            self.offer(tier)

    def hand_over(self, old: int, new: int, tier: int, op: int) -> None:
        """`new` takes over the storage of `old`."""
        blocks = self.blocks[tier]
        bytes = self._size[old]
        if blocks is not None:
            handle = self._handles[new, tier] = self._handles.pop((old, tier))
            bytes = blocks.size(handle)
        now = self._clock.now
        self._changes += (now, tier, -bytes, old, op, OVERWRITTEN, now, tier, bytes, new, op, PRODUCED)

    def _note_reserved(self, tier: int, reserved: int) -> None:
        if reserved != self._reserved_before[tier]:
            self._reserved += (self._clock.now, tier, reserved - self._reserved_before[tier])
            self._reserved_before[tier] = reserved

    def size_in(self, tensor: int, tier: int) -> int:
        """Bytes of a tensor's copy in a tier (fewer than the tensor's where the link compressed it)."""
        return self.compressed.get((tensor, tier), self._size[tensor])

    # ---- copies under way --------------------------------------------------------------------

    def begin_arrival(self, tensor: int, tier: int, bytes: int, op: int) -> None:
        """Take space for a copy that will arrive."""
        if self.blocks[tier] is None:
            self.used[tier] += bytes
            self._changes += (self._clock.now, tier, bytes, tensor, op, MOVED_IN)
        else:
            self.take(tensor, tier, bytes, op, MOVED_IN)
        self.arriving[tier] += bytes

    def end_arrival(self, tensor: int, tier: int, bytes: int) -> None:
        """It has arrived; a link may have compressed it."""
        self.arriving[tier] -= bytes
        if bytes != self._size[tensor]:
            self.compressed[tensor, tier] = bytes

    def give_up_arrival(self, tensor: int, tier: int, bytes: int, op: int) -> None:
        """It will not arrive."""
        self.arriving[tier] -= bytes
        self.give(tensor, tier, bytes, op, CALLED_OFF)

    def begin_leaving(self, tensor: int, tier: int) -> None:
        """A copy under way will release this one."""
        self.leaving[tier] += self.size_in(tensor, tier) if self.compressed else self._size[tensor]
        self._residency.mark_leaving(tensor)

    def end_leaving(self, tensor: int, tier: int) -> None:
        """It releases it now, or will not."""
        self.leaving[tier] -= self.size_in(tensor, tier) if self.compressed else self._size[tensor]
        self._residency.unmark_leaving(tensor)

    # ---- who waits ---------------------------------------------------------------------------

    def begin_waiting(self) -> None:
        """One more device or transfer waits for space somewhere."""
        self.waiting += 1

    def end_waiting(self) -> None:
        """One fewer."""
        self.waiting -= 1

    def offer(self, tier: int) -> None:
        """Have those who wait for space in a tier ask again at the end of this instant."""
        self.freed.add(tier)
        self._clock.poke()


class Request(NamedTuple):
    """Bytes that a device waits for in a tier, at an offset where one is planned, and what wakes it."""

    bytes: int
    offset: int | None
    wake: Wake


class SpaceQueue:
    """Per tier the requests of devices that wait; transfers without space wait elsewhere, behind them.

    queues: the requests of each tier, to be looked at only.
    """

    def __init__(self, space: Space, clock: Clock) -> None:
        self._space = space
        self._clock = clock
        self.queues: list[list[Request]] = [[] for _ in space.names]

    def join(self, tier: int, request: Request, place: int) -> None:
        """Wait at a place in the queue, at its end where it is negative."""
        queue = self.queues[tier]
        place = len(queue) if place < 0 else place
        if place == 0:
            self._space.freed.discard(tier)  # what was given back before, it has seen
        queue.insert(place, request)
        self._space.begin_waiting()
        self._clock.poke()

    def leave(self, tier: int, request: Request) -> int:
        """Stop waiting; the place that the request had."""
        queue = self.queues[tier]
        place = queue.index(request)
        del queue[place]
        self._space.end_waiting()
        return place

    def wake_waiters(self) -> bool:
        """Let devices that wait for space ask again; whether there are any.

        The first in each tier where some was freed; then whoever comes after one that what is leaving cannot serve.
        """
        freed = self._space.freed
        woken = [self.queues[tier][0].wake for tier in sorted(freed) if self.queues[tier]]
        freed.clear()
        if not woken:
            passing = [self._passing(tier) for tier, queue in enumerate(self.queues) if len(queue) > 1]
            woken = [wake for wake in passing if wake is not None]
        self._clock.wake(woken)
        return bool(woken)

    def _passing(self, tier: int) -> Wake | None:
        """The first whose request fits, unless one before it is soon to be served."""
        for request in self.queues[tier]:
            if self._space.fits(tier, request.bytes, request.offset):
                return request.wake
            if self._space.fits_later(tier, request.bytes, request.offset):
                return None
        return None
