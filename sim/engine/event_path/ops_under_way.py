"""Ops that no device stands by: on other engines, and in groups; and who waits until nothing is under way."""

from __future__ import annotations

from sim.engine.event_path.clock import Clock, Wake
from sim.engine.event_path.residency import Residency
from sim.engine.event_path.work import Work


class OpsUnderWay:
    """How many there are, by what a device that waits for them calls its stall: `engine` or `peer`."""

    def __init__(self, clock: Clock, residency: Residency) -> None:
        self._clock = clock
        self._residency = residency
        self._count = {"engine": 0, "peer": 0}
        self._idle_waiters: list[Wake] = []

    def begin(self, work: Work, cause: str) -> None:
        """An op is handed over; whoever reads its results waits for that cause."""
        self._count[cause] += 1
        for tensor, _ in work.fresh:
            self._residency.await_result(tensor, cause)
        for _, tensor, _ in work.takeovers:
            if tensor >= 0:
                self._residency.await_result(tensor, cause)

    def end(self, cause: str, count: int) -> None:
        """So many have ended."""
        self._count[cause] -= count

    def pending(self) -> tuple[str, str] | None:
        """What is still under way, as the cause of a stall and in words; ops first, then copies; None for nothing."""
        if self._count["engine"]:
            return "engine", "the end of all ops on other engines"
        if self._count["peer"]:
            return "peer", "the end of all groups"
        if self._residency.in_flight:
            return "drain", "the end of all copies"
        return None

    def wait_for_end(self, wake: Wake) -> None:
        """Fire an event when nothing of one kind is under way."""
        self._idle_waiters.append(wake)

    def note_idle(self) -> None:
        """Wake who waits for the end once nothing of one kind is under way."""
        if self._idle_waiters and not (self._residency.in_flight and self._count["engine"] and self._count["peer"]):
            waiters, self._idle_waiters = self._idle_waiters, []
            self._clock.wake(waiters)
