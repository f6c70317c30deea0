"""The clock: events at a nanosecond, in three ranks, so that no result depends on which of two came first."""

from __future__ import annotations

from collections.abc import Callable

from simpy import Environment, Event
from simpy.core import EmptySchedule

__all__ = ["ENDS", "SETTLES", "STARTS", "At", "EmptySchedule", "Environment", "Event"]

# At one instant all that ends comes first, then devices go on, then what waited is granted space and links.
ENDS, STARTS, SETTLES = 0, 1, 2


class At(Event):
    """An event `delay` ns from now, of a rank; its callbacks run then."""

    def __init__(
        self, env: Environment, delay: int | float, rank: int, then: Callable[[Event], None] | None = None
    ) -> None:
        if delay < 0:
            raise ValueError(f"an event {-delay} ns before now")
        self.env = env
        self.callbacks = [] if then is None else [then]
        self._value = None
        self._ok = True
        self._defused = False
        env.schedule(self, rank, delay)  # type: ignore[arg-type]


def fire(event: Event, rank: int, delay: int = 0) -> None:
    """Trigger a waiting event `delay` ns from now, in a rank."""
    event._ok = True
    event._value = None
    event.env.schedule(event, rank, delay)  # type: ignore[arg-type]
