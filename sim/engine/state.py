"""Who holds memory where: the ledger of a run, and the columns of its log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.allocators import make_allocator
from sim.engine.events import SETTLES, At, Environment, Event, Wake
from sim.engine.prepare import Prepared
from sim.errors import OutOfMemory, Thrashing
from sim.hardware.platform import Platform
from sim.log import CAUSE, Ints
from sim.plan import Change, Online, Plan
from sim.units import format_time

if TYPE_CHECKING:
    from sim.engine.transfer import Transfer

LEAVING = 1 << 62
"""Bit of `State.copies` of a tensor whose running copy will release its source."""

MADE, FREED, DROPPED, MOVED_IN = CAUSE["made"], CAUSE["freed"], CAUSE["dropped"], CAUSE["moved in"]
MOVED_OUT, WORKSPACE, OVERWRITTEN, PLACED = (
    CAUSE["moved out"],
    CAUSE["workspace"],
    CAUSE["overwritten"],
    CAUSE["placed"],
)


class Columns:
    """Rows of integers, appended to a flat list and packed when it grows long."""

    PACK = 1 << 19

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[int] = []
        self._packed: list[NDArray[np.int64]] = []

    def pack(self) -> None:
        """Move the rows so far into an array."""
        self._packed.append(np.array(self.rows, np.int64).reshape(-1, self.width))
        self.rows.clear()

    def array(self) -> Ints:
        """All rows, shape (rows, width)."""
        self.pack()
        return np.concatenate(self._packed)


class Request(NamedTuple):
    """Bytes that a device waits for in a tier, at an offset where one is planned, and what wakes it."""

    bytes: int
    offset: int | None
    event: Wake


class State:
    """Per tensor: copies (a bit a tier), locks, uses to come. Per tier: bytes used, leaving and arriving.

    Everything that happens does so at `now`: a device may be ahead of the event queue's clock as long
    as no event lies between.
    """

    def __init__(self, plan: Plan, platform: Platform, prepared: Prepared, env: Environment) -> None:
        count, tiers = len(prepared.size), len(platform.tiers)
        self.env = env
        self.now = 0
        self.platform = platform
        self.prepared = prepared
        self.names = [tier.name for tier in platform.tiers]
        self.capacity = [tier.capacity for tier in platform.tiers]
        self.used = [0] * tiers
        self.leaving = [0] * tiers
        self.arriving = [0] * tiers
        self.blocks = [make_allocator(tier) for tier in platform.tiers]
        self.size = prepared.size
        self.copies = [0] * count
        self.locks = [0] * count
        self.uses = list(prepared.uses)
        self.made = [False] * count
        self.last_read = [-1] * count
        self.on_arrival: dict[int, list[Wake]] = {}
        self.pending: dict[int, dict[int, int]] = {}  # releases that wait for a lock or a copy: tensor -> tier -> cause
        self.began_in: dict[int, int] = {}  # tensors there from the start: their tier
        self.dead: dict[int, None] = {}  # kept although nobody reads them any more, oldest first
        self.space_waiters: list[list[Request]] = [[] for _ in range(tiers)]  # devices, first come first served
        self.counters = dict.fromkeys(
            (
                *("ignored_actions", "implicit_moves", "implicit_recomputes", "moves_cancelled", "cancelled_bytes"),
                *("moves_without_space", "pressure_calls", "returned_moves"),
            ),
            0,
        )
        self.online: Online | None = None
        self.recompute_ns = 0
        self.recompute_limit: float | None = None  # a multiple of the ideal time of the trace
        self.keep_dead = plan.keep_dead
        self.changes = Columns(6)
        self.spans = Columns(9)
        self.reserved = Columns(3)
        self.end = 0
        self.settle_at = -1
        self.settlers: list[Callable[[], None]] = []
        self.transfers: dict[int, Transfer] = {}
        self.wanted = False  # something waits for the end of this instant
        self.queued_for_space = 0  # devices and transfers that wait for space somewhere
        self.running = {"engine": 0, "peer": 0}  # ops under way on other engines, and in groups
        self.overwriting: dict[int, int] = {}  # old values that an op under way overwrites in place: in which tier
        self.making: set[tuple[int, int]] = set()  # (tensor, tier) of results that an op is making again
        self.on_unlock: dict[int, list[Wake]] = {}  # who waits to overwrite a value until its readers have ended
        self.idle_waiters: list[Wake] = []
        self.awaited: dict[int, str] = {}  # results under way on another engine or device: why one waits for them
        self.stale_tiers: set[int] = set()
        self._handles: dict[tuple[int, int], int] = {}
        self.odd_sizes: dict[tuple[int, int], int] = {}
        self._reserved_was = [0] * tiers

    # ---- time --------------------------------------------------------------------------------

    def poke(self) -> None:
        """Have what waits granted at the end of this instant. A `flush` must follow before time passes."""
        self.wanted = True

    def then(self, rank: int, step: Callable[[], None]) -> None:
        """Carry out a later step of this instant, when all that comes before it is done."""
        if self.env.is_next(self.now, rank):
            step()
        else:
            self.later(rank, step)

    def later(self, rank: int, step: Callable[[], None]) -> None:
        """Queue a step of this instant."""

        def run(_: Event) -> None:
            self.tick(int(self.env.now))
            step()
            self.flush()

        At(self.env, self.now - int(self.env.now), rank, run)

    def tick(self, now: int) -> None:
        """Something ends at `now`: the clock comes up. A `flush` must follow."""
        self.now = now

    def flush(self) -> None:
        """Whoever acts has gone as far as it can at this instant: settle, after all others have, too.

        To be called where nothing more is done at this instant: an event saved is one that would be the next.
        """
        if self.wanted:
            if self.env.is_next(self.now, SETTLES):
                self.settle()
            else:
                self.wanted = False
                if self.settle_at != self.now:
                    self.settle_at = self.now
                    At(self.env, self.now - int(self.env.now), SETTLES, self._settle)

    def _settle(self, _: Event) -> None:
        self.settle_at = -1
        self.now = int(self.env.now)
        self.settle()

    def settle(self) -> None:
        """Grant space, start jobs and ops, share bandwidth: all that could not be said before."""
        for settler in self.settlers:
            settler()

    def wake_waiters(self) -> bool:
        """Let devices that wait for space ask again; whether there are any.

        The first in each tier where some was freed; then whoever comes after one that what is leaving cannot serve.
        """
        woken = [self.space_waiters[tier][0].event for tier in sorted(self.stale_tiers) if self.space_waiters[tier]]
        self.stale_tiers.clear()
        if not woken:
            passing = [self._passing(tier) for tier, queue in enumerate(self.space_waiters) if len(queue) > 1]
            woken = [event for event in passing if event is not None]
        self.wake(woken)
        return bool(woken)

    def _passing(self, tier: int) -> Wake | None:
        """The first whose request fits, unless one before it is soon to be served."""
        for request in self.space_waiters[tier]:
            if self.fits(tier, request.bytes, request.offset):
                return request.event
            if self.fits_later(tier, request.bytes, request.offset):
                return None
        return None

    def note_idle(self) -> None:
        """Wake who waits for the end once nothing of one kind is under way."""
        if self.idle_waiters and not (self.transfers and self.running["engine"] and self.running["peer"]):
            waiting, self.idle_waiters = self.idle_waiters, []
            self.wake(waiting)

    # ---- space -------------------------------------------------------------------------------

    def fits(self, tier: int, bytes: int, offset: int | None = None) -> bool:
        """Whether a request would be granted now."""
        blocks = self.blocks[tier]
        if blocks is None:
            return self.used[tier] + bytes <= self.capacity[tier]
        return bytes == 0 or blocks.fits(bytes, offset)

    def fits_later(self, tier: int, bytes: int, offset: int | None = None) -> bool:
        """Whether it would be granted once all that is leaving has left (as far as sizes tell)."""
        free = self.capacity[tier] - self.used[tier]
        blocks = self.blocks[tier]
        if blocks is None or not self.leaving[tier]:
            return blocks is None and bytes <= free + self.leaving[tier]
        bit = 1 << tier | LEAVING
        going = [
            handle
            for (tensor, where), handle in self._handles.items()
            if where == tier and self.copies[tensor] & bit == bit
        ]
        return blocks.would_fit_after(going, bytes, offset)

    def hole(self, tier: int) -> int:
        """The largest contiguous free range."""
        blocks = self.blocks[tier]
        return self.capacity[tier] - self.used[tier] if blocks is None else blocks.largest_hole()

    def neighbours(self, tensor: int, tier: int) -> tuple[int, int]:
        """Free bytes just below and just above a copy."""
        blocks, handle = self.blocks[tier], self._handles.get((tensor, tier))
        return (0, 0) if blocks is None or handle is None else blocks.neighbours(handle)

    def take(self, tensor: int, tier: int, bytes: int, op: int, cause: int, offset: int | None = None) -> int:
        """Take space that fits; returns the allocator's handle, -1 without one. tensor -1: scratch space."""
        blocks = self.blocks[tier]
        handle = -1
        if blocks is not None:
            # in a pool with two ends what lives shortest comes from the far one
            got = blocks.take(bytes, offset, "high" if tensor < 0 else "low")
            if got is None:
                raise self.out_of_memory(tier, bytes, op, "a block that was free is not")
            handle = got
            bytes = blocks.size(handle)
            if tensor >= 0:
                self._handles[tensor, tier] = handle
            self._note_reserved(tier)
        self.used[tier] += bytes
        self.changes.rows += (self.now, tier, bytes, tensor, op, cause)
        return handle

    def give(self, tensor: int, tier: int, bytes: int, op: int, cause: int, handle: int = -1) -> None:
        """Give space back and have waiters ask again."""
        blocks = self.blocks[tier]
        if blocks is not None:
            if tensor >= 0:
                handle = self._handles.pop((tensor, tier))
            bytes = blocks.size(handle)
            blocks.give(handle)
            self._note_reserved(tier)
        self.used[tier] -= bytes
        self.changes.rows += (self.now, tier, -bytes, tensor, op, cause)
        if self.queued_for_space:
            self.stale_tiers.add(tier)
            self.poke()

    def _note_reserved(self, tier: int) -> None:
        blocks = self.blocks[tier]
        if blocks is not None and blocks.reserved != self._reserved_was[tier]:
            self.reserved.rows += (self.now, tier, blocks.reserved - self._reserved_was[tier])
            self._reserved_was[tier] = blocks.reserved

    def size_in(self, tensor: int, tier: int) -> int:
        """Bytes of a tensor's copy in a tier (fewer than the tensor's where the link compressed it)."""
        return self.odd_sizes.get((tensor, tier), self.size[tensor]) if self.odd_sizes else self.size[tensor]

    def set_size_in(self, tensor: int, tier: int, bytes: int) -> None:
        """Note that the copy in that tier is compressed."""
        if bytes != self.size[tensor]:
            self.odd_sizes[tensor, tier] = bytes

    # ---- copies ------------------------------------------------------------------------------

    def arrive(self, tensor: int, tier: int) -> None:
        """A copy is complete: whoever waits for it goes on."""
        self.copies[tensor] |= 1 << tier
        self.made[tensor] = True
        if self.online is not None:
            self.online.notice(Change("came", tensor, self.names[tier], self.now))
        waiting = self.on_arrival.pop(tensor, None)
        if waiting:
            self.wake(waiting)

    def note_unlocked(self, tensors: Iterable[int]) -> None:
        """What read or made these has ended: who waits to overwrite one of them looks again."""
        for tensor in tensors:
            self.wake(self.on_unlock.pop(tensor, ()))

    def wake(self, events: Iterable[Wake]) -> None:
        """Let waiting devices go on now."""
        for event in events:
            if not event.triggered:
                event.fire(self.now - int(self.env.now))

    def release(self, tensor: int, tier: int, op: int, cause: int) -> None:
        """One copy goes."""
        self.copies[tensor] &= ~(1 << tier)
        bytes = self.odd_sizes.pop((tensor, tier), self.size[tensor]) if self.odd_sizes else self.size[tensor]
        self.give(tensor, tier, bytes, op, cause)
        if self.keep_dead:
            self.dead.pop(tensor, None)
        if self.online is not None:
            self.online.notice(Change("went", tensor, self.names[tier], self.now))

    def release_all(self, tensor: int, op: int, cause: int) -> None:
        """Every copy goes that no transfer is busy with; that one goes when it ends."""
        bits = self.copies[tensor] & ~LEAVING
        if self.copies[tensor] & LEAVING or tensor in self.transfers:
            for tier in range(len(self.used)):
                if bits & 1 << tier:
                    self.release_later(tensor, tier, cause)
            return
        tier = 0
        while bits:
            if bits & 1:
                self.release(tensor, tier, op, cause)
            bits >>= 1
            tier += 1

    def release_later(self, tensor: int, tier: int, cause: int) -> None:
        """One copy goes once nothing locks or copies the tensor, for the reason that came first."""
        self.pending.setdefault(tensor, {}).setdefault(tier, cause)

    def release_pending(self, tensor: int, op: int) -> None:
        """Carry out the releases that waited for the last lock or for a transfer."""
        if tensor in self.pending and tensor not in self.transfers:
            for tier, cause in sorted(self.pending.pop(tensor).items()):
                if self.copies[tensor] & 1 << tier:
                    self.release(tensor, tier, op, cause)

    def bury(self, tensor: int, op: int) -> None:
        """Free a tensor that nothing still to run reads, if it may go."""
        if self.uses[tensor] <= 0 and not self.locks[tensor] and self.copies[tensor]:
            overwritten = self.prepared.replaced_by[tensor]
            if not self.prepared.freeable[tensor] and not (overwritten >= 0 and self.made[overwritten]):
                return
            if self.keep_dead:
                self.dead.setdefault(tensor)
            else:
                self.release_all(tensor, op, FREED)

    def overwrite(self, old: int, new: int, tier: int, op: int) -> None:
        """`new` takes over the storage of `old` in a tier."""
        blocks = self.blocks[tier]
        bytes = self.size[old]
        if blocks is not None:
            handle = self._handles.pop((old, tier))
            self._handles[new, tier] = handle
            bytes = blocks.size(handle)
        self.copies[old] &= ~(1 << tier)
        self.changes.rows += (self.now, tier, -bytes, old, op, OVERWRITTEN, self.now, tier, bytes, new, op, MADE)
        self.dead.pop(old, None)
        if self.online is not None:
            self.online.notice(Change("went", old, self.names[tier], self.now))

    def free_the_dead(self, tier: int) -> bool:
        """Free the tensor that has been dead longest in a tier; False if there is none."""
        for tensor in self.dead:
            if self.copies[tensor] & 1 << tier and not self.locks[tensor] and tensor not in self.transfers:
                self.release_all(tensor, -1, FREED)
                return True
        return False

    # ---- the end -----------------------------------------------------------------------------

    def note_recompute(self, op: int) -> None:
        """An op is to run again. Raises Thrashing past the limit."""
        self.recompute_ns += max(1, self.prepared.total[op])
        limit, ideal = self.recompute_limit, self.prepared.ideal_ns
        if limit is not None and self.recompute_ns > limit * ideal:
            raise Thrashing(
                f"op {self.prepared.trace.op_columns.name[op]!r}: recomputation takes more than {limit:g} times "
                f"the {format_time(ideal)} that all ops take once: the run thrashes",
                recompute_ns=self.recompute_ns,
                ideal_ns=ideal,
                limit=limit,
            )

    def out_of_memory(self, tier: int, bytes: int, op: int, reason: str) -> OutOfMemory:
        """The error of a request that cannot be met, with the table of holders."""
        trace = self.prepared.trace
        held = [
            (self.size_in(t, tier), t)
            for t in range(len(self.copies))
            if self.copies[t] & 1 << tier or (t, tier) in self._handles
        ]
        held.sort(key=lambda row: (-row[0], row[1]))
        names, roles = trace.tensor_columns.name, trace.tensors
        holders = tuple((names[t], size, roles[t].role) for size, t in held[:10])
        free = self.capacity[tier] - self.used[tier]
        name = self.names[tier]
        what = f"op {trace.op_columns.name[op]!r}" if op >= 0 else "the start"
        top = ", ".join(f"{held_name} ({size:,} B)" for held_name, size, _ in holders[:3])
        full = [
            i
            for i, free_there in enumerate(c - u for c, u in zip(self.capacity, self.used, strict=True))
            if i != tier and self.platform.tiers[i].device < 0 and free_there < bytes
        ]
        others = ", ".join(
            f"{self.names[i]!r} ({self.capacity[i] - self.used[i]:,} B of {self.capacity[i]:,} B free)" for i in full
        )
        return OutOfMemory(
            f"{what} needs {bytes:,} B in {name!r} for {reason}; {free:,} B of {self.capacity[tier]:,} B are free "
            f"(largest hole {self.hole(tier):,} B); largest holders: {top or 'none'}"
            + (f"; nor has this room for as much: {others}" if others else ""),
            tier=name,
            need_bytes=bytes,
            free_bytes=free,
            largest_hole_bytes=self.hole(tier),
            holders=holders,
            full=(name, *(self.names[i] for i in full)),
        )
