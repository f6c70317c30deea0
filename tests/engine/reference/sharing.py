"""How flows share links and pools: max-min fair in charged bytes, found from the definition.

Rates are fair when nothing carries more than it can, and each flow either runs at its own limit or crosses a full
link or pool in which no other flow takes more charged bytes than it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product

Limits = Mapping[str, Fraction]
"""Per shared thing (a link, an engine, a pool) its rate in charged bytes/s."""
Charges = Mapping[str, Fraction]
"""Of one flow: charged bytes per byte of payload on each shared thing that it crosses."""


def is_fair(rates: Sequence[Fraction], own: Sequence[Fraction], charges: Sequence[Charges], limits: Limits) -> bool:
    """The definition, word by word."""
    load = {p: sum((rate * c.get(p, 0) for rate, c in zip(rates, charges)), Fraction(0)) for p in limits}
    if any(load[p] > limits[p] for p in limits) or any(rate > cap or rate <= 0 for rate, cap in zip(rates, own)):
        return False
    for i, rate in enumerate(rates):
        full = [p for p in charges[i] if load[p] == limits[p]]
        most = [all(rate * charges[i][p] >= r * c.get(p, 0) for r, c in zip(rates, charges)) for p in full]
        if rate < own[i] and not any(most):
            return False
    return True


def fair(own: Sequence[Fraction], charges: Sequence[Charges], limits: Limits) -> list[Fraction]:
    """Fair rates of flows with limits of their own.

    A flow whose own limit is below all its shares runs at it. Where every open flow of a pool has its tightest
    share there, the pool is split among them. Where neither holds (flows that charge two pools differently,
    each tight in the other one's) all ways to say what holds back whom are tried.
    """
    charges = [{p: c for p, c in crossed.items() if c} for crossed in charges]
    rates: list[Fraction | None] = [None] * len(own)
    while None in rates:
        open_flows = [i for i, rate in enumerate(rates) if rate is None]
        share: dict[str, Fraction] = {}
        for p, limit in limits.items():
            left = limit - sum((rate * c.get(p, 0) for rate, c in zip(rates, charges) if rate is not None), Fraction(0))
            users = [i for i in open_flows if p in charges[i]]
            if users:
                share[p] = left / len(users)
        bound = {i: min((share[p] / charges[i][p] for p in charges[i]), default=own[i]) for i in open_flows}
        slow = [i for i in open_flows if own[i] <= bound[i]]
        for i in slow:
            rates[i] = own[i]
        if slow:
            continue
        for p in share:
            users = [i for i in open_flows if p in charges[i]]
            if all(share[p] / charges[i][p] == bound[i] for i in users):
                for i in users:
                    rates[i] = bound[i]
                break
        else:
            return _searched(own, charges, limits)
    return [rate for rate in rates if rate is not None]


def _searched(own: Sequence[Fraction], charges: Sequence[Charges], limits: Limits) -> list[Fraction]:
    """Try what holds each flow back, its own limit or a pool that it crosses; solve, and ask the definition."""
    for held_by in product(*[(None, *crossed) for crossed in charges]):
        pools = sorted({p for p in held_by if p is not None})
        rows = []
        for p in pools:  # sum over flows of charge * rate = limit, where rate = own or level(pool) / charge
            row = [Fraction(0)] * (len(pools) + 1)
            row[-1] = limits[p]
            for i, q in enumerate(held_by):
                if p not in charges[i]:
                    continue
                if q is None:
                    row[-1] -= own[i] * charges[i][p]
                else:
                    row[pools.index(q)] += charges[i][p] / charges[i][q]
            rows.append(row)
        level = _solved(rows)
        if level is None:
            continue
        rates = [own[i] if q is None else level[pools.index(q)] / charges[i][q] for i, q in enumerate(held_by)]
        if is_fair(rates, own, charges, limits):
            return rates
    raise AssertionError("no fair rates")


def _solved(rows: list[list[Fraction]]) -> list[Fraction] | None:
    """Gauss and Jordan; None for equations that do not determine their unknowns."""
    for k in range(len(rows)):
        pivot = next((r for r in range(k, len(rows)) if rows[r][k]), None)
        if pivot is None:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for r in range(len(rows)):
            if r != k and rows[r][k]:
                rows[r] = [x - rows[r][k] * y for x, y in zip(rows[r], rows[k])]
    return [row[-1] for row in rows]
