"""One copy of a tensor under way between two tiers."""

from __future__ import annotations

from typing import Protocol

from sim.engine.event_path.clock import COPIES, Wake
from sim.engine.event_path.links import Job
from sim.plan import Move


class Owner(Protocol):
    """Who is told of the end."""

    def end(self, transfer: Transfer, now: int) -> None:
        """The copy is complete."""


class Transfer(Job):
    """A copy from the tier `source` to `target` (positions in the platform).

    keep: whether the source stays.
    size: bytes that it takes at its destination.
    wire: bytes on the links.
    drop_target: whether the copy is released as soon as it has arrived.
    followers: moves of the tensor that were asked for meanwhile.
    waiters: who is woken when it is complete, or given up.
    """

    __slots__ = (
        *("device", "drop_target", "followers", "keep", "op", "owner", "priority", "size", "source"),
        *("target", "tensor", "waiters", "wire"),
    )

    def __init__(
        self,
        owner: Owner,
        tensor: int,
        ends: tuple[int, int],
        route: tuple[int, ...],
        move: Move,
        sizes: tuple[int, int],
        device: int,
        op: int,
    ) -> None:
        self.owner = owner
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
        super().__init__(route, self.wire, COPIES + tensor)

    def done(self, now: int) -> None:
        """The copy is complete."""
        self.owner.end(self, now)

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
