"""Bandwidth that is shared: flows whose rates change when one of them starts or ends.

Remaining work is an exact number of 1e-9 bytes and rates are exact fractions of bytes per second, integers where
they can be, so that a flow's progress in whole nanoseconds is exact; its end rounds up to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from sim.engine.event_path.clock import ENDS, Clock
from sim.engine.event_path.fairness import Users, fair_rates
from sim.hardware.platform import Platform

NANO = 10**9


class Flow:
    """Bytes under way.

    users: what they use, by the number that `Flows.number` gives it.
    rank: that of its end.
    done: called with the time of its end.
    """

    __slots__ = ("_since", "done", "rank", "rate", "remaining", "users")

    def __init__(self, bytes: int, users: int, done: Callable[[int], None], rank: int) -> None:
        self.remaining: int | Fraction = bytes * NANO
        self.users = users
        self.done = done
        self.rank = rank
        self.rate: int | Fraction = 0
        self._since = 0

    def flow_until(self, now: int) -> None:
        """Count what has flowed at the present rate."""
        self.remaining -= self.rate * (now - self._since)
        self._since = now

    def flow_at(self, rate: int | Fraction) -> None:
        """Flow at this rate from now on."""
        self.rate = rate

    def has_ended(self, now: int) -> bool:
        """Whether all its bytes have flowed by now."""
        return self.remaining <= self.rate * (now - self._since)

    def ends_at(self, now: int, alone: int) -> int:
        """When it will end at its present rate; `alone` while it has none."""
        if not self.rate:
            return alone
        remaining = self.remaining - self.rate * (now - self._since)
        return now + max(0, int(-(-remaining // self.rate)))


class Flows:
    """All flows now under way, with the pools that they share."""

    def __init__(self, platform: Platform, clock: Clock) -> None:
        self._clock = clock
        # bytes/s of each pool, then of each link, which is a pool of its own
        self._pool_rates = [pool.rate for pool in platform.pools] + [link.rate for link in platform.links]
        self._first_link = len(platform.pools)
        self._active: list[Flow] = []
        self._alarm = 0
        self._numbers: dict[Users, int] = {}
        self._users: list[Users] = []
        self._known: dict[tuple[int, ...], list[int | Fraction]] = {}
        self.stale = False

    def number(self, users: Users) -> int:
        """What flows of these users call them, so that their fractions are not compared again and again."""
        if users not in self._numbers:
            self._numbers[users] = len(self._users)
            self._users.append(users)
        return self._numbers[users]

    def start(self, flow: Flow, now: int) -> None:
        """Let a flow begin; rates are settled at the end of this instant."""
        flow.flow_until(now)
        self._active.append(flow)
        self.stale = True

    def settle(self) -> None:
        """If any has started or ended, give every flow its new rate and set the alarm for the next end."""
        self.stale = False
        self._alarm += 1
        if not self._active:
            return
        now = self._clock.now
        key = tuple([flow.users for flow in self._active])
        rates = self._known.get(key)
        if rates is None:
            fair = fair_rates([self._users[users] for users in key], self._pool_rates, self._first_link)
            rates = self._known[key] = [rate.numerator if rate.denominator == 1 else rate for rate in fair]
        soonest = -1
        for flow, rate in zip(self._active, rates, strict=True):
            flow.flow_until(now)
            flow.flow_at(rate)
            left = int(-(-flow.remaining // rate))
            soonest = left if soonest < 0 else min(soonest, left)
        alarm = self._alarm
        self._clock.at(now + soonest, ENDS, lambda _: self._end(alarm))

    def _end(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._clock.catch_up()
        now = self._clock.now
        ended = [flow for flow in self._active if flow.has_ended(now)]
        self._active = [flow for flow in self._active if flow not in ended]
        self.stale = True
        self._clock.poke()
        if len(ended) == 1 and self._clock.is_next(ended[0].rank):
            ended[0].done(now)
        else:
            for flow in ended:
                self._clock.at(now, flow.rank, lambda _, flow=flow: flow.done(now))  # type: ignore[misc]
        self._clock.flush()
