"""Shared bandwidth is max-min fair in charged bytes, also where flows cross several pools that charge differently."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from random import Random

import numpy as np
import pytest
from scipy.optimize import linprog

from sim.engine.event_path.fairness import fair_rates

GB = 10**9


def drawn(seed: int, *, pools: int = 4, flows: int = 6, one_charge: bool = False):
    """(flows as users, pool rates): random limits, and random charges, one per flow in all its pools if asked for."""
    draw = Random(seed)
    count = draw.randint(1, pools)
    users = []
    for i in range(draw.randint(1, flows)):
        own = Fraction(draw.randint(1, 6), draw.choice((1, 1, 2)))
        charges = tuple(
            (p, own if one_charge else Fraction(draw.randint(1, 6), draw.choice((1, 1, 2))), Fraction(1))
            for p in range(count)
            if draw.random() < 0.6
        )
        users.append(((f"u{i}", draw.randint(1, 40), charges),))
    return users, [draw.randint(1, 30) for _ in range(count)]


def charges_and_limits(users, count):
    charge = np.zeros((count, len(users)))
    for i, ((_, _, charges),) in enumerate(users):
        for pool, bytes, _ in charges:
            charge[pool, i] = float(bytes)
    return charge, np.array([limit for ((_, limit, _),) in users], float)


def unfair(rates, charge, limits, pools) -> str:
    """What is wrong with an allocation, by the words of the contract; "" if nothing is."""
    used = charge * np.array([float(r) for r in rates])
    if (used.sum(1) > np.array(pools) + 1e-6).any():
        return "a pool carries too much"
    full = np.isclose(used.sum(1), pools, rtol=1e-9)
    for i, rate in enumerate(rates):
        if rate > limits[i]:
            return f"flow {i} is above its limit"
        has_most = [p for p in np.flatnonzero(full & (charge[:, i] > 0)) if used[p, i] >= used[p].max() * (1 - 1e-9)]
        if rate != limits[i] and not has_most:
            return f"flow {i} could have more"
    return ""


def test_every_flow_has_its_limit_or_a_full_pool_where_none_gets_more():
    for seed in range(3000):
        users, pools = drawn(seed)
        why = unfair(fair_rates(users, pools), *charges_and_limits(users, len(pools)), pools)
        assert not why, (seed, why)


def lexicographic(charge, limits, weight, pools):
    """Max-min of weight x rate by linear programs: raise the least, fix who cannot go higher, go on with the rest."""
    count = len(limits)
    fixed: dict[int, float] = {}
    while len(fixed) < count:
        # variables: rates, then the level of all that are not fixed
        rows, right = [np.append(row, 0) for row in charge], list(pools)
        for i in set(range(count)) - set(fixed):
            row = np.zeros(count + 1)
            row[i], row[-1] = -weight[i], 1
            rows.append(row)
            right.append(0)
        bounds = [(fixed[i],) * 2 if i in fixed else (0, limits[i]) for i in range(count)]
        goal = np.append(np.zeros(count), -1)
        level = -linprog(goal, rows, right, bounds=[*bounds, (0, None)]).fun
        for i in set(range(count)) - set(fixed):
            alone = np.zeros(count + 1)
            alone[i] = -1
            most = -linprog(alone, rows, right, bounds=[*bounds, (level * (1 - 1e-9), None)]).fun
            if most * weight[i] <= level * (1 + 1e-6):
                fixed[i] = most
    return np.array([fixed[i] for i in range(count)])


def test_where_a_flow_charges_alike_everywhere_rates_are_the_lexicographic_optimum():
    for seed in range(150):
        users, pools = drawn(seed, one_charge=True)
        users = [user for user in users if user[0][2]]
        if not users:
            continue
        charge, limits = charges_and_limits(users, len(pools))
        expected = lexicographic(charge, limits, charge.max(0), pools)
        found = [float(rate) for rate in fair_rates(users, pools)]
        assert np.allclose(found, expected, rtol=1e-4), seed


def test_brute_force_over_what_limits_each_flow_finds_the_same_rates():
    for seed in range(150):
        users, pools = drawn(seed, pools=2, flows=4)
        charge, limits = charges_and_limits(users, len(pools))
        fair = []
        for limited in product(range(-1, len(pools)), repeat=len(users)):
            full = sorted(set(limited) - {-1})
            if any(p >= 0 and not charge[p, i] for i, p in enumerate(limited)):
                continue
            matrix, right = np.zeros((len(full), len(full))), np.array([pools[p] for p in full], float)
            for i, by in enumerate(limited):
                for k, p in enumerate(full):
                    if by < 0:
                        right[k] -= charge[p, i] * limits[i]
                    else:
                        matrix[k, full.index(by)] += charge[p, i] / charge[by, i]
            if full and abs(np.linalg.det(matrix)) < 1e-9:
                continue
            level = dict(zip(full, np.linalg.solve(matrix, right) if full else []))
            rates = [limits[i] if by < 0 else level[by] / charge[by, i] for i, by in enumerate(limited)]
            rates = [limits[i] if np.isclose(r, limits[i], rtol=1e-9) else r for i, r in enumerate(rates)]
            if min(rates) > 0 and not unfair(rates, charge, limits, pools):
                fair.append(rates)
        assert any(np.allclose([float(r) for r in fair_rates(users, pools)], rates) for rates in fair), seed


def test_what_one_pool_takes_from_a_flow_goes_to_the_others_of_another_pool():
    # `both` charges little in the first pool, but the second holds it at 2 bytes/s: `one` gets 10 - 2, not 5
    users = [(("one", 100, ((0, Fraction(1), Fraction(1)),)),)]
    users.append((("both", 100, ((0, Fraction(1), Fraction(1)), (1, Fraction(4), Fraction(1)))),))
    assert fair_rates(users, [10, 8]) == [8, 2]


def test_two_flows_that_hold_each_other_in_two_pools_fill_both():
    users = [(("a", 100, ((0, Fraction(2), Fraction(1)), (1, Fraction(1), Fraction(1)))),)]
    users.append((("b", 100, ((0, Fraction(1), Fraction(1)), (1, Fraction(2), Fraction(1)))),))
    assert fair_rates(users, [1, 1]) == [Fraction(1, 3)] * 2


@pytest.mark.parametrize("seed", range(20))
def test_flows_of_other_pools_change_nothing(seed):
    users, pools = drawn(seed)
    more, others = drawn(seed + 1000)
    moved = [((f"x{n}", limit, tuple((p + len(pools), c, f) for p, c, f in ch)),) for ((n, limit, ch),) in more]
    assert fair_rates([*moved, *users], [*pools, *others])[len(moved) :] == fair_rates(users, pools)
