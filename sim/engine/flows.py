"""Bandwidth that is shared: flows whose rates change when one of them starts or ends.

Remaining work is an exact number of 1e-9 bytes and rates are exact fractions of bytes per second, so that
a flow's progress in whole nanoseconds is exact; its end rounds up to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from sim.engine.events import ENDS, At, Event
from sim.engine.prepare import Charges
from sim.engine.state import State

NANO = 10**9

Users = tuple[tuple[str, int, Charges], ...]
"""Of one flow: (name, rate limit in bytes/s, what it charges) of each link or engine that it uses."""


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


class Flows:
    """All flows now under way, with the pools that they share."""

    def __init__(self, state: State, pool_rates: Sequence[int | None]) -> None:
        self._state = state
        self._env = state.env
        self._pool_rates = pool_rates
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
            self._known[key] = fair_rates(key, self._pool_rates)
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


def fair_rates(flows: Sequence[Users], pool_rates: Sequence[int | None]) -> list[Fraction]:
    """Max-min fair rates in bytes/s of flows given by their users.

    A pool's charged bytes are shared equally by its flows; what one cannot take (its own link is slower, or
    another pool is tighter) goes to the others. A member of a pool whose `factor` is below 1 runs at
    that part of its own rate while another member of the pool has a flow.
    """
    members: dict[int, set[str]] = {}
    for users in flows:
        for name, _, charges in users:
            for pool, _, _ in charges:
                members.setdefault(pool, set()).add(name)
    caps, demands = [], []
    for users in flows:
        cap: Fraction | None = None
        demand: dict[int, Fraction] = {}
        for _, limit, charges in users:
            own = Fraction(limit)
            for pool, charge, factor in charges:
                if len(members[pool]) > 1:
                    own *= factor
                if pool_rates[pool] is not None and charge:
                    demand[pool] = demand.get(pool, Fraction(0)) + charge
            cap = own if cap is None else min(cap, own)
        caps.append(cap if cap is not None else Fraction(1))
        demands.append(demand)
    rates: list[Fraction | None] = [None] * len(flows)
    left = {pool: Fraction(rate) for pool, rate in enumerate(pool_rates) if rate is not None}
    while None in rates:
        open_flows = [i for i, rate in enumerate(rates) if rate is None]
        count: dict[int, int] = {}
        for i in open_flows:
            for pool in demands[i]:
                count[pool] = count.get(pool, 0) + 1
        share = {pool: left[pool] / n for pool, n in count.items()}
        bound = {
            i: min((share[pool] / charge, share[pool], pool) for pool, charge in demands[i].items())
            for i in open_flows
            if demands[i]
        }
        frozen = {i: caps[i] for i in open_flows if i not in bound or caps[i] <= bound[i][0]}
        if not frozen:
            tightest = min(limits[1:] for limits in bound.values())
            frozen = {i: limits[0] for i, limits in bound.items() if limits[1:] == tightest}
        for i, rate in frozen.items():
            rates[i] = rate
            for pool, charge in demands[i].items():
                left[pool] -= rate * charge
    return [rate for rate in rates if rate is not None]
