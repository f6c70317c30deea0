"""What is known of a run: the parts that hold it, and the ops under way."""

from __future__ import annotations

from dataclasses import dataclass

from sim.engine.event_path.clock import Clock, Wake
from sim.engine.event_path.lifetimes import Lifetimes
from sim.engine.event_path.record import Record
from sim.engine.event_path.residency import Residency
from sim.engine.event_path.space import Space, SpaceQueue
from sim.engine.prepare import Prepared
from sim.hardware.platform import Platform


class Work:
    """One run of an op: what it produces, what it overwrites, and the workspace that it takes.

    why: `run` for the first one, else `recompute`.
    counted: whether its reads were expected beforehand, in program order or by a planned Recompute.
    fresh: (tensor, tier) of results that take space.
    takeovers: (old value, new value, tier) of results in place.
    workspace: (tier, bytes, handle); results that are resident already are recomputed there, too.
    began: when it began on an engine beside the device's main one.
    """

    __slots__ = ("began", "counted", "device", "fresh", "op", "takeovers", "why", "workspace")

    def __init__(self, op: int, device: int, why: str, counted: bool) -> None:
        self.op = op
        self.device = device
        self.why = why
        self.counted = counted
        self.fresh: list[tuple[int, int]] = []
        self.takeovers: list[tuple[int, int, int]] = []
        self.workspace: list[tuple[int, int, int]] = []
        self.began = -1

    def begin(self, now: int) -> None:
        """It starts."""
        self.began = now


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


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What is known, each kind by one part, which alone writes it. All that acts in a run gets it whole."""

    platform: Platform
    prepared: Prepared
    clock: Clock
    record: Record
    residency: Residency
    space: Space
    space_queue: SpaceQueue
    lifetimes: Lifetimes
    ops: OpsUnderWay
