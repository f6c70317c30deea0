"""The clock: what happens at one nanosecond goes in steps, each in an order of its own, never in that of queueing."""

from __future__ import annotations

from collections.abc import Callable

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
    "Environment",
    "Event",
    "Wake",
]

# The steps of one instant (docs/model.md, "One instant"); each leaves room for the id that orders what is in it:
# ends of ops (by op), ends of copies (by tensor), moves that follow one (by tensor), actions after an op (by op),
# frees (by op), devices that go on (by index), then what waits is granted space, engines and links.
ENDS, COPIES, FOLLOWS, AFTERS, FREES, STARTS, SETTLES = (step << 32 for step in range(7))


class Environment(simpy.Environment):
    """SimPy's, with the means to go on without an event."""

    def is_next(self, time: int, rank: int) -> bool:
        """Whether an event at this time and rank would be the next one, so that there is no need to queue it."""
        queue = self._queue
        return not queue or queue[0][:2] > (time, rank)


class At(Event):
    """An event `delay` ns from now, of a rank; its callbacks run then."""

    def __init__(
        self, env: simpy.Environment, delay: int | float, rank: int, then: Callable[[Event], None] | None = None
    ) -> None:
        if delay < 0:
            raise ValueError(f"an event {-delay} ns before now")
        self.env = env
        self.callbacks = [] if then is None else [then]
        self._value = None
        self._ok = True
        self._defused = False
        env.schedule(self, rank, delay)  # type: ignore[arg-type]


class Wake(Event):
    """What a device waits for; `fire` lets it go on, in its rank."""

    def __init__(self, env: simpy.Environment, rank: int) -> None:
        super().__init__(env)
        self.rank = rank

    def fire(self, delay: int = 0) -> None:
        """Trigger it `delay` ns from now."""
        self._ok = True
        self._value = None
        self.env.schedule(self, self.rank, delay)  # type: ignore[arg-type]
