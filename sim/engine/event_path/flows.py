"""Bandwidth that is shared: flows whose rates change when one of them starts or ends.

Remaining work is an exact number of 1e-9 bytes and rates are exact fractions of bytes per second, integers where
they can be, so that a flow's progress in whole nanoseconds is exact; its end rounds up to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from sim.engine.event_path.clock import COPIES, ENDS, Clock
from sim.engine.event_path.fairness import FairRates, Users
from sim.hardware.platform import Platform

NANO = 10**9


class Flow:
    """Bytes under way.

    users: what they use, by the number that `Flows.number` gives it.
    rank: that of its end.
    rate, since: at which it flows, from which time on.
    end: when all of it has flowed at this rate; 0 before it has had any.
    is_ahead: whether that is a time to come, and nothing has changed it since it was set.
    done: called with the time of its end.
    """

    __slots__ = ("done", "end", "is_ahead", "rank", "rate", "remaining", "since", "users")

    def __init__(self, bytes: int, users: int, done: Callable[[int], None], rank: int) -> None:
        self.remaining: int | Fraction = bytes * NANO
        self.users = users
        self.done = done
        self.rank = rank
        self.rate: int | Fraction = 0
        self.since = 0
        self.end = 0
        self.is_ahead = False

    def flow_until(self, now: int) -> None:
        """Count what has flowed at the present rate."""
        self.remaining -= self.rate * (now - self.since)
        self.since = now

    def flow_at(self, rate: int | Fraction, since: int, *, ahead: bool = False) -> None:
        """Flow at this rate from a time on. ahead: that is to come."""
        self.rate = rate
        self.since = since
        self.is_ahead = ahead
        if rate:
            self.end = since + int(-(-self.remaining // rate))

    def has_ended(self, now: int) -> bool:
        """Whether all its bytes have flowed by now."""
        return self.remaining <= self.rate * (now - self.since)

    def ends_at(self, now: int, alone: int, shared: bool) -> int:
        """When it will end at its present rate; `alone` while it has none. shared: shares of `now` have been given."""
        if not self.rate or (self.is_ahead and (now < self.since or (now == self.since and not shared))):
            return alone
        return max(now, self.end)


class Flows:
    """All flows now under way, with the pools that they share. settled_at: when their shares were last looked at."""

    def __init__(self, platform: Platform, clock: Clock) -> None:
        self._clock = clock
        self._rates = FairRates(platform)
        self._active: list[Flow] = []
        self._ahead: Flow | None = None  # the only one, which begins later: its end is known
        self._alarm = 0
        self.stale = False
        self.settled_at = -1

    def number(self, users: Users) -> int:
        """What flows of these users call them, so that their fractions are not compared again and again."""
        return self._rates.number(users)

    def start_at(self, flow: Flow, time: int) -> None:
        """Let a flow begin at a later time. While it is the only one it runs like a job that shares nothing."""
        if self._active or self._ahead is not None:
            self._clock.at(time, COPIES, lambda _: self._begin(flow))
            return
        (rate,) = self._rates.of([flow.users])
        flow.flow_at(rate, time, ahead=True)
        self._ahead = flow
        self._set_alarm(flow.end)

    def _begin(self, flow: Flow) -> None:
        self._clock.catch_up()
        self.start(flow, self._clock.now)
        self._clock.poke()
        self._clock.flush()

    def start(self, flow: Flow, now: int) -> None:
        """Let a flow begin; rates are settled at the end of this instant."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.since <= now:
            self._active.append(ahead)
        elif ahead is not None:  # it is to share with this one
            begins = ahead.since
            ahead.flow_at(0, now)
            self._clock.at(begins, COPIES, lambda _: self._begin(ahead))
        flow.flow_until(now)
        self._active.append(flow)
        self.stale = True

    def settle(self) -> None:
        """If any has started or ended, give every flow its new rate and set the alarm for the next end."""
        now = self.settled_at = self._clock.now
        if not self.stale:
            return
        self.stale = False
        if not self._active:
            return
        ends = []
        for flow, rate in zip(self._active, self._rates.of([flow.users for flow in self._active]), strict=True):
            if rate != flow.rate or flow.is_ahead:
                flow.flow_until(now)
                flow.flow_at(rate, now)
            ends.append(flow.end)
        self._set_alarm(min(ends))

    def _set_alarm(self, time: int) -> None:
        """Look then whether a flow has ended; what was set before is void."""
        self._alarm += 1
        alarm = self._alarm
        self._clock.at(time, ENDS, lambda _: self._end(alarm))

    def _end(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._clock.catch_up()
        now = self._clock.now
        if self._ahead is not None:
            self._active.append(self._ahead)
            self._ahead = None
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
