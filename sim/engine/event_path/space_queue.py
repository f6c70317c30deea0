"""Devices that wait for space: first come, first served, and who may pass."""

from __future__ import annotations

from typing import NamedTuple

from sim.engine.event_path.clock import Clock, Wake
from sim.engine.event_path.space import Space


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
