"""Who gets how much of what is shared: max-min fair rates of flows that cross several pools, in exact fractions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from sim.engine.prepare import Charges
from sim.hardware.platform import Platform

Users = tuple[tuple[str, int | Fraction, Charges], ...]
"""Of one flow: (name, rate limit in bytes/s, what it charges) of each link or engine that it uses."""

Demand = Mapping[int, Fraction]
"""Of one flow: charged bytes per byte of payload in each pool that it crosses."""

SWEEPS = 1000


class FairRates:
    """The rates of flows on a platform. What the same flows get is solved once, in whatever order they are given."""

    def __init__(self, platform: Platform) -> None:
        # bytes/s of each pool, then of each link, which is a pool of its own
        self._pool_rates = [pool.rate for pool in platform.pools] + [link.rate for link in platform.links]
        self._first_link = len(platform.pools)
        self._numbers: dict[Users, int] = {}
        self._users: list[Users] = []
        self._known: dict[tuple[int, ...], dict[int, int | Fraction]] = {}

    def number(self, users: Users) -> int:
        """What flows of these users are called, so that their fractions are not compared again and again."""
        if users not in self._numbers:
            self._numbers[users] = len(self._users)
            self._users.append(users)
        return self._numbers[users]

    def of(self, flows: list[int]) -> list[int | Fraction]:
        """The rates in bytes/s of flows that go on at once, by the numbers of their users."""
        alike = tuple(sorted(flows))
        rates = self._known.get(alike)
        if rates is None:
            fair = fair_rates([self._users[users] for users in alike], self._pool_rates, self._first_link)
            rates = {
                users: rate.numerator if rate.denominator == 1 else rate
                for users, rate in zip(alike, fair, strict=True)
            }
            self._known[alike] = rates
        return [rates[users] for users in flows]


def fair_rates(
    flows: Sequence[Users], pool_rates: Sequence[int | None], first_link: int | None = None
) -> list[Fraction]:
    """Max-min fair rates in bytes/s of flows given by their users.

    A pool's charged bytes are shared equally by its flows; what one cannot take (its own link is slower, or
    another pool is tighter) goes to the others. So each flow has its own limit, or crosses a pool that is
    full and in which no flow charges more. A member of a pool whose `factor` is below 1 runs at that part of
    its own rate while another member of the pool has a flow. From `first_link` on a pool is a link that makes
    several copies at once: they share what the factors leave of its rate.
    """
    members: dict[int, set[str]] = {}
    for users in flows:
        for name, _, charges in users:
            for pool, _, _ in charges:
                members.setdefault(pool, set()).add(name)
    limits: list[Fraction] = []
    demands: list[dict[int, Fraction]] = []
    capacity: dict[int, Fraction] = {}
    for users in flows:
        cap: Fraction | None = None
        demand: dict[int, Fraction] = {}
        for _, limit, charges in users:
            own = Fraction(limit)
            for pool, charge, factor in charges:
                if len(members[pool]) > 1:
                    own *= factor
                most = pool_rates[pool]
                if most is not None and charge:
                    demand[pool] = demand.get(pool, Fraction(0)) + charge
                    capacity.setdefault(pool, Fraction(most))
            cap = own if cap is None else min(cap, own)
            for pool, _, _ in charges:
                if first_link is not None and pool >= first_link:
                    capacity[pool] = own
        limits.append(cap if cap is not None else Fraction(1))
        demands.append(demand)
    rates = list(limits)
    for part in _parts(demands):
        found = share([limits[i] for i in part], [demands[i] for i in part], capacity)
        for i, rate in zip(part, found, strict=True):
            rates[i] = rate
    return rates


def _parts(demands: Sequence[Demand]) -> list[list[int]]:
    """Flows that share pools, directly or through others; those of no pool are left out."""
    parts: list[tuple[set[int], list[int]]] = []
    for i, demand in enumerate(demands):
        if demand:
            pools, flows = set(demand), [i]
            for other in [part for part in parts if part[0] & pools]:
                parts.remove(other)
                pools |= other[0]
                flows += other[1]
            parts.append((pools, sorted(flows)))
    return [flows for _, flows in parts]


def share(limits: Sequence[Fraction], demands: Sequence[Demand], capacity: Mapping[int, Fraction]) -> list[Fraction]:
    """Fair rates of flows that share pools.

    A pool has a level: the charged bytes that a flow gets which is limited there. Levels are filled pool
    by pool in floats; what they say limits each flow is then solved and checked in exact fractions.
    """
    pools = sorted({pool for demand in demands for pool in demand})
    users = {pool: [i for i, demand in enumerate(demands) if pool in demand] for pool in pools}
    level = {pool: float(capacity[pool] / len(users[pool])) for pool in pools}
    tried: set[tuple[int, ...]] = set()
    for _ in range(SWEEPS):
        limited = tuple(_limited_by(limit, demand, level) for limit, demand in zip(limits, demands, strict=True))
        if limited not in tried:
            tried.add(limited)
            rates = _solve(limited, limits, demands, capacity)
            if rates is not None and is_fair(rates, limits, demands, capacity):
                return rates
        for pool in pools:
            level[pool] = _fill(pool, users[pool], limits, demands, float(capacity[pool]), level)
    # never seen: equal parts of every pool, which all of them can carry
    return [
        min(limit, *(capacity[pool] / len(users[pool]) / charge for pool, charge in demand.items()))
        for limit, demand in zip(limits, demands, strict=True)
    ]


def is_fair(
    rates: Sequence[Fraction],
    limits: Sequence[Fraction],
    demands: Sequence[Demand],
    capacity: Mapping[int, Fraction],
) -> bool:
    """Whether no pool carries too much, and each flow has its limit or a full pool where no flow charges more."""
    used: dict[int, Fraction] = {}
    most: dict[int, Fraction] = {}
    for rate, limit, demand in zip(rates, limits, demands, strict=True):
        if not 0 <= rate <= limit:
            return False
        for pool, charge in demand.items():
            used[pool] = used.get(pool, Fraction(0)) + charge * rate
            most[pool] = max(most.get(pool, Fraction(0)), charge * rate)
    full = {pool for pool in used if used[pool] == capacity[pool]}
    return all(used[pool] <= capacity[pool] for pool in used) and all(
        rate == limit or any(pool in full and charge * rate == most[pool] for pool, charge in demand.items())
        for rate, limit, demand in zip(rates, limits, demands, strict=True)
    )


def _limited_by(limit: Fraction, demand: Demand, level: Mapping[int, float]) -> int:
    """The pool that limits a flow, -1 for its own limit."""
    rate, pool = min((level[pool] / float(charge), pool) for pool, charge in demand.items())
    return pool if rate < float(limit) else -1


def _fill(
    pool: int,
    users: Sequence[int],
    limits: Sequence[Fraction],
    demands: Sequence[Demand],
    capacity: float,
    level: Mapping[int, float],
) -> float:
    """The level of one pool while its flows are limited by the others as they stand; infinite where it has enough."""
    wanted = sorted(
        float(demands[i][pool])
        * min(float(limits[i]), *(level[other] / float(c) for other, c in demands[i].items() if other != pool), 1e300)
        for i in users
    )
    left = capacity
    for k, bytes in enumerate(wanted):
        if bytes > left / (len(wanted) - k):
            return left / (len(wanted) - k)
        left -= bytes
    return float("inf")


def _solve(
    limited: Sequence[int], limits: Sequence[Fraction], demands: Sequence[Demand], capacity: Mapping[int, Fraction]
) -> list[Fraction] | None:
    """The rates if each flow is limited by that pool, and each such pool is full; None where no levels do it."""
    pools = sorted({pool for pool in limited if pool >= 0})
    rows = []
    for pool in pools:
        row = dict.fromkeys(pools, Fraction(0))
        right = capacity[pool]
        for by, limit, demand in zip(limited, limits, demands, strict=True):
            charge = demand.get(pool, Fraction(0))
            if by < 0:
                right -= charge * limit
            else:
                row[by] += charge / demand[by]
        rows.append([*row.values(), right])
    for k in range(len(pools)):
        pivot = next((j for j in range(k, len(rows)) if rows[j][k]), None)
        if pivot is None:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for j in range(len(rows)):
            if j != k and rows[j][k]:
                rows[j] = [x - rows[j][k] * y for x, y in zip(rows[j], rows[k], strict=True)]
    level = {pool: row[-1] for pool, row in zip(pools, rows, strict=True)}
    return [
        limit if by < 0 else level[by] / demand[by] for by, limit, demand in zip(limited, limits, demands, strict=True)
    ]
