"""Bandwidth that is shared: flows whose rates change when one of them starts or ends.

Remaining work is an exact number of 1e-9 bytes and rates are exact fractions of bytes per second, so that
a flow's progress in whole nanoseconds is exact; its end rounds up to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from sim.engine.events import ENDS, At, Event
from sim.engine.fairness import Users, fair_rates
from sim.engine.state import State

NANO = 10**9


class Flow:
    """Bytes under way. rank: that of its end."""

    __slots__ = ("done", "rank", "rate", "remaining", "since", "users")

    def __init__(self, bytes: int, users: Users, done: Callable[[int], None], rank: int) -> None:
        self.remaining: int | Fraction = bytes * NANO
        self.users = users
        self.done = done
        self.rank = rank
        self.rate: int | Fraction = 0
        self.since = 0

    def ends_at(self, now: int, alone: int) -> int:
        """When it will end at its present rate; `alone` while it has none."""
        if not self.rate:
            return alone
        remaining = self.remaining - self.rate * (now - self.since)
        return now + max(0, int(-(-remaining // self.rate)))


class Flows:
    """All flows now under way, with the pools that they share."""

    def __init__(self, state: State, pool_rates: Sequence[int | None], first_link: int) -> None:
        self._state = state
        self._env = state.env
        self._pool_rates = pool_rates
        self._first_link = first_link
        self._active: list[Flow] = []
        self._stamp = 0
        self._known: dict[tuple[Users, ...], list[Fraction]] = {}
        self.stale = False

    def start(self, flow: Flow, now: int) -> None:
        """Let a flow begin; rates are settled by the next `update`."""
        flow.since = now
        self._active.append(flow)
        self.stale = True

    def update(self, now: int) -> None:
        """Give every flow its new rate and set the alarm for the next end."""
        self.stale = False
        self._stamp += 1
        for flow in self._active:
            flow.remaining -= flow.rate * (now - flow.since)
            flow.since = now
        key = tuple(flow.users for flow in self._active)
        if key not in self._known:
            self._known[key] = fair_rates(key, self._pool_rates, self._first_link)
        for flow, rate in zip(self._active, self._known[key], strict=True):
            flow.rate = rate
        if self._active:
            soonest = min(int(-(-flow.remaining // flow.rate)) for flow in self._active)
            stamp = self._stamp
            At(self._env, now + soonest - int(self._env.now), ENDS, lambda event: self._end(event, stamp))

    def _end(self, _: Event, stamp: int) -> None:
        if stamp != self._stamp:
            return
        now = int(self._env.now)
        ended = [flow for flow in self._active if flow.remaining <= flow.rate * (now - flow.since)]
        self._active = [flow for flow in self._active if flow not in ended]
        self.stale = True
        for flow in ended:
            At(self._env, 0, flow.rank, lambda _, flow=flow: flow.done(now))  # type: ignore[misc]
        self._state.tick(now)
        self._state.wanted = True
        self._state.flush()
