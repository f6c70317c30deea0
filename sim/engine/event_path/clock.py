"""The clock: what happens at one nanosecond goes in steps, each in an order of its own, never in that of queueing.

A device may be ahead of the event queue as long as no event lies between; `Clock.now` is how far the run has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappush
from typing import Any

import simpy
from simpy import Event

__all__ = [
    "AFTERS",
    "COPIES",
    "ENDS",
    "FOLLOWS",
    "FREES",
    "SETTLES",
    "STARTS",
    "At",
    "Clock",
    "Event",
    "Wake",
]

# The steps of one instant (docs/model.md, "One instant"); each is followed by ids that order what is in it:
# ends of ops (by op), ends of copies (by tensor), moves that follow one (by tensor), actions after an op (by op),
# frees (by op), devices that go on (by index), then what waits is granted space, engines and links.
ENDS, COPIES, FOLLOWS, AFTERS, FREES, STARTS, SETTLES = (step << 32 for step in range(7))


class At(Event):
    """An event `delay` ns from the event queue's time, of a rank; its callbacks run then."""

    _value = None  # as of all of them: a run makes one for most of what happens in it
    _ok = True
    _defused = False

    def __init__(
        self, env: simpy.Environment, delay: int | float, rank: int, then: Callable[[Event], None] | None = None
    ) -> None:
        if delay < 0:
            raise ValueError(f"an event {-delay} ns before now")
        self.env = env
        self.callbacks = [] if then is None else [then]
        heappush(env._queue, (env._now + delay, rank, next(env._eid), self))  # type: ignore[misc]


class Wake(Event):
    """What a device waits for; `fire` lets it go on, in its rank."""

    def __init__(self, env: simpy.Environment, rank: int) -> None:
        super().__init__(env)
        self.rank = rank

    def fire(self, delay: int = 0) -> None:
        """Trigger it `delay` ns from the event queue's time."""
        self._ok = True
        self._value = None
        self.env.schedule(self, self.rank, delay)  # type: ignore[arg-type]


class Clock:
    """The present time, the events to come, and whether anything waits for the end of this instant.

    queue: the events to come, a heap of (time, rank, …); to look at only.
    """

    def __init__(self) -> None:
        self.env = simpy.Environment()
        self.queue: list[Any] = self.env._queue
        self.now = 0
        self.wanted = False
        self._settle_at = self._settled_at = -1
        self._settle: Callable[[], bool] = lambda: False

    def settle_with(self, settle: Callable[[], bool]) -> None:
        """What is done at the end of each instant; it says whether it has to be done once more."""
        self._settle = settle

    # ---- the present -------------------------------------------------------------------------

    def advance(self, time: int) -> None:
        """The run has come to this time."""
        self.now = time

    def catch_up(self) -> None:
        """An event has been reached: its time is the present."""
        self.now = self.env._now  # type: ignore[assignment]  # every delay is an int

    @property
    def has_settled(self) -> bool:
        """Whether what waited at this instant has been granted once already."""
        return self._settled_at == self.now

    def is_next(self, rank: int) -> bool:
        """Whether an event of this instant and rank would be the next one, so that there is no need to queue it."""
        queue = self.queue
        return not queue or queue[0][:2] > (self.now, rank)

    # ---- events ------------------------------------------------------------------------------

    def at(self, time: int, rank: int, then: Callable[[Event], None] | None = None) -> At:
        """An event at a time from now on."""
        return At(self.env, time - self.env._now, rank, then)

    def wake_up(self, rank: int) -> Wake:
        """What a device can wait for, to be fired by whoever ends its wait."""
        return Wake(self.env, rank)

    def wake(self, events: Iterable[Wake]) -> None:
        """Let waiting devices go on now."""
        for event in events:
            if not event.triggered:
                event.fire(self.now - self.env._now)  # type: ignore[arg-type]

    def then(self, rank: int, step: Callable[[], None]) -> None:
        """Carry out a later step of this instant, when all that comes before it is done."""
        if self.is_next(rank):
            step()
        else:
            self.later(rank, step)

    def later(self, rank: int, step: Callable[[], None]) -> None:
        """Queue a step of this instant."""

        def run(_: Event) -> None:
            self.catch_up()
            step()
            self.flush()

        self.at(self.now, rank, run)

    # ---- the end of an instant ---------------------------------------------------------------

    def poke(self) -> None:
        """Have what waits granted at the end of this instant. A `flush` must follow before time passes."""
        self.wanted = True

    def flush(self) -> None:
        """Whoever acts can do no more at this instant: settle, once the same is true of all others.

        To be called where nothing more is done at this instant: an event saved is one that would be the next.
        """
        if self.wanted:
            queue = self.queue
            if not queue or queue[0][:2] > (self.now, SETTLES):
                self._settled_at = self.now
                self.wanted = self._settle()
            else:
                self.wanted = False
                if self._settle_at != self.now:
                    self._settle_at = self.now
                    self.at(self.now, SETTLES, self._on_settle)

    def _on_settle(self, _: Event) -> None:
        self._settle_at = -1
        self.catch_up()
        self._settled_at = self.now
        self.wanted = self._settle()
