"""Which tiers hold a copy of each tensor, what is on its way, and who waits for it to arrive."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from sim.engine.event_path.clock import COPIES, Clock, Wake
from sim.engine.event_path.links import Job
from sim.plan import ChangeFields, Move, Online

LEAVING = 1 << 62
"""Bit of `Residency.copies` of a tensor whose running copy will release its source."""


class Transfer(Job):
    """A copy from the tier `source` to `target` (positions in the platform).

    keep: whether the source stays.
    size: bytes that it takes at its destination.
    wire: bytes on the links.
    drop_target: whether the copy is released as soon as it has arrived.
    followers: moves of the tensor that were asked for meanwhile.
    waiters: who is woken when it is complete, or given up.
    then: called with it and the time when it is complete.
    off: called with it where nobody needs the tensor any more before it has begun.
    """

    __slots__ = (
        *("device", "drop_target", "followers", "keep", "off", "op", "priority", "size", "source"),
        *("target", "tensor", "then", "waiters", "wire"),
    )

    def __init__(
        self,
        then: Callable[[Transfer, int], None],
        off: Callable[[Transfer], None],
        tensor: int,
        ends: tuple[int, int],
        route: tuple[int, ...],
        move: Move,
        sizes: tuple[int, int],
        device: int,
        op: int,
        most: Fraction | None = None,
    ) -> None:
        self.then = then
        self.off = off
        self.tensor = tensor
        self.source, self.target = ends
        self.keep = move.keep
        self.priority = move.priority
        self.size, self.wire = sizes
        self.device = device
        self.op = op
        self.followers: tuple[Move, ...] = ()
        self.waiters: tuple[Wake, ...] = ()
        self.drop_target = False
        super().__init__(route, self.wire, COPIES + tensor, most=most, delay=move.delay)

    def done(self, now: int) -> None:
        """The copy is complete."""
        self.then(self, now)

    def call_off(self) -> None:
        """Nobody needs the tensor any more, and the copy has not begun: it never does."""
        self.off(self)

    @property
    def waits(self) -> bool:
        """Whether it has no space yet and stands outside all queues."""
        return not self.key

    @property
    def stage(self) -> str:
        """How far it is, in words."""
        return "waits for space" if self.waits else "queued" if self.began < 0 else "runs"

    def touches(self, tier: int) -> bool:
        """Whether it reads or writes a tier."""
        return tier in (self.source, self.target)

    def wake_at_end(self, wake: Wake) -> None:
        """Fire an event when the copy is complete, or when it is given up."""
        self.waiters = (*self.waiters, wake)

    def follow_with(self, *moves: Move) -> None:
        """Moves of the tensor that are to begin when this one has ended."""
        self.followers = (*self.followers, *moves)

    def keep_source(self) -> None:
        """The source is not to be released after all."""
        self.keep = True

    def release_source(self) -> None:
        """The source is to be released after all."""
        self.keep = False

    def drop_on_arrival(self, drop: bool) -> None:
        """Whether the copy is released as soon as it has arrived."""
        self.drop_target = drop


class Residency:
    """Per tensor its copies, and what is about to change them.

    copies: a bit per tier with a complete copy, and `LEAVING`.
    produced: whether there has ever been a copy.
    last_read: when an op that reads it was last reached, -1 for never.
    in_flight: the transfer under way, at most one per tensor.
    reproducing: (tensor, tier) of results that an op under way produces once more.
    overwriting: old values that an op under way overwrites in place, and in which tier.
    awaited: results of ops on another engine or device, and the cause of a stall that waits for them.
    began_in: the tier of what has no producer, at the start.
    waiters: who waits for a copy to arrive.
    is_watched: whether there is an online part.
    news: the changes that it has not been told of yet (`Decisions.tell`).
    note: what adds one; None where it does not listen.
    """

    def __init__(self, tensors: int, tiers: list[str], clock: Clock, online: Online | None) -> None:
        self.copies = [0] * tensors
        self.produced = [False] * tensors
        self.last_read = [-1] * tensors
        self.in_flight: dict[int, Transfer] = {}
        self.reproducing: set[tuple[int, int]] = set()
        self.overwriting: dict[int, int] = {}
        self.awaited: dict[int, str] = {}
        self.began_in: dict[int, int] = {}
        self.waiters: dict[int, list[Wake]] = {}
        self._tiers = tiers
        self._clock = clock
        self.is_watched = online is not None
        self.news: list[ChangeFields] = []
        self.note: Callable[[ChangeFields], None] | None = self.news.append if online and listens(online) else None

    # ---- copies ------------------------------------------------------------------------------

    def place(self, tensor: int, tier: int) -> None:
        """A tensor without a producer is resident from the start."""
        self.began_in[tensor] = tier
        self.arrive(tensor, tier)

    def arrive(self, tensor: int, tier: int) -> None:
        """A copy is complete: whoever waits for it goes on."""
        self.copies[tensor] |= 1 << tier
        self.produced[tensor] = True
        if self.note is not None:
            self.note(("came", tensor, self._tiers[tier], self._clock.now))
        if tensor in self.waiters:
            self.wake_waiters(tensor)

    def remove(self, tensor: int, tier: int) -> None:
        """A copy is released, or another value has taken over its storage."""
        self.copies[tensor] &= ~(1 << tier)
        if self.note is not None:
            self.note(("went", tensor, self._tiers[tier], self._clock.now))

    def held(self, tensor: int) -> int:
        """The tiers with a complete copy, as bits."""
        return self.copies[tensor] & ~LEAVING

    def has_copy(self, tensor: int, tier: int) -> bool:
        """Whether a tier has a complete copy."""
        return bool(self.copies[tensor] & 1 << tier)

    def is_there(self, tensor: int, tier: int) -> bool:
        """Whether a tier has a copy, or space for one that is on its way."""
        transfer = self.in_flight.get(tensor)
        is_arriving = transfer is not None and not transfer.waits and transfer.target == tier
        return is_arriving or self.has_copy(tensor, tier)

    # ---- leaving -----------------------------------------------------------------------------

    def mark_leaving(self, tensor: int) -> None:
        """Its transfer will release the source."""
        self.copies[tensor] |= LEAVING

    def unmark_leaving(self, tensor: int) -> None:
        """Its transfer has released the source, or will keep it."""
        self.copies[tensor] &= ~LEAVING

    def is_leaving(self, tensor: int, tier: int) -> bool:
        """Whether the tensor is being moved away and that tier holds a copy of it."""
        bits = 1 << tier | LEAVING
        return self.copies[tensor] & bits == bits

    # ---- in flight ---------------------------------------------------------------------------

    def begin_transfer(self, transfer: Transfer) -> None:
        """A transfer is under way, if only to wait for space."""
        self.in_flight[transfer.tensor] = transfer

    def end_transfer(self, tensor: int) -> None:
        """It has ended, or is given up."""
        del self.in_flight[tensor]

    def waiting_for_space(self, tensor: int) -> Transfer | None:
        """The tensor's transfer if it still waits for space."""
        transfer = self.in_flight.get(tensor)
        return transfer if transfer is not None and transfer.waits else None

    def wait_for(self, tensor: int, wake: Wake) -> None:
        """Fire an event when a copy arrives, or when its transfer is given up."""
        self.waiters.setdefault(tensor, []).append(wake)

    def wake_waiters(self, tensor: int) -> None:
        """Whoever waits for a tensor looks again."""
        self._clock.wake(self.waiters.pop(tensor, ()))

    # ---- results of ops under way ------------------------------------------------------------

    def await_result(self, tensor: int, cause: str) -> None:
        """A result is to come from another engine or device; `cause` is the stall of who waits for it."""
        self.awaited[tensor] = cause

    def begin_overwriting(self, old: int, tier: int) -> None:
        """An op is about to overwrite a value in place."""
        self.overwriting[old] = tier

    def end_overwriting(self, old: int) -> None:
        """The op that overwrites a value has ended."""
        self.overwriting.pop(old, None)

    def begin_reproducing(self, tensor: int, tier: int) -> None:
        """An op is about to produce a result once more."""
        self.reproducing.add((tensor, tier))

    def end_reproducing(self, tensor: int, tier: int) -> None:
        """It has."""
        self.reproducing.discard((tensor, tier))

    def deliver(self, tensor: int, tier: int) -> None:
        """The op that produces a tensor has ended."""
        self.end_awaiting(tensor, tier)
        self.arrive(tensor, tier)

    def end_awaiting(self, tensor: int, tier: int) -> None:
        """It has ended, whether its result arrives or is not needed any more."""
        self.end_reproducing(tensor, tier)
        self.awaited.pop(tensor, None)


def listens(online: Online) -> bool:
    """Whether an online part has a use for what it is told."""
    kind = type(online)
    return kind.notice is not Online.notice or kind.notice_all is not Online.notice_all
