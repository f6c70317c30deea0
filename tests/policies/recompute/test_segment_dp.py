"""Segments and modes: every choice tried, the priced program against plain sums, and prices by hand."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.policies.recompute.tso.segment_dp import at_price, by_price, by_slots, room_for, tightest, total_ns
from sim.policies.recompute.tso.segments import FAR, MODES, Figures, ModePrices, prices_of


def random_figures(seed: int, count: int) -> Figures:
    draw = random.Random(seed)

    def some(low: int, high: int) -> np.ndarray:
        return np.array([draw.randint(low, high) for _ in range(count)], np.int64)

    x = np.append(some(1, 4), 1)
    xbar = x[1:] + some(0, 5)
    uf = some(1, 9)
    return Figures(
        x=x, xbar=xbar, forward_temp=some(0, 3), saving_temp=some(0, 3), backward_temp=some(0, 5), uf=uf,
        turn=np.minimum(uf, some(0, 9)), saved_launch_f=some(0, 1), saved_launch_b=some(0, 2), made_f=xbar + some(0, 4),
        made_b=some(0, 4), work_f=some(0, 2), work_b=some(0, 2), capture=draw.randint(0, 4),
    )  # fmt: skip


def choices(count: int, modes: int):
    """Every way to cut a chain and give each segment a mode."""
    for cuts in product((False, True), repeat=count - 1):
        marks = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        for chosen in product(range(modes), repeat=len(marks) - 1):
            yield [(i, j, q) for (i, j), q in zip(pairwise(marks), chosen, strict=True)]


def all_prices(figures: Figures, names=tuple(MODES)) -> list[ModePrices]:
    return [prices_of(figures, MODES[name]) for name in names]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 5), switch=st.integers(0, 6))
def test_slots_give_the_best_of_all_choices(seed, count, switch):
    prices = all_prices(random_figures(seed, count))
    every = [(room_for(prices, c), total_ns(prices, c, switch)) for c in choices(count, 4)]
    least = min(room for room, _ in every)
    assert room_for(prices, tightest(prices)) == least
    assert by_slots(prices, least - 1, 500, switch) is None
    for room in range(least, least + 30, 3):
        found = by_slots(prices, room, 500, switch)
        assert found is not None
        assert room_for(prices, found) <= room
        assert total_ns(prices, found, switch) == min(time for needs, time in every if needs <= room)


def test_ten_stages_in_two_modes_give_the_best_of_all_39366_choices():
    prices = all_prices(random_figures(5, 10), ("eager", "checkpoint"))
    every = [(room_for(prices, c), total_ns(prices, c, 0)) for c in choices(10, 2)]
    assert len(every) == 39366
    least = min(room for room, _ in every)
    for room in (least, least + 4, least + 9):
        found = by_slots(prices, room, 500, 0)
        assert found is not None
        assert total_ns(prices, found, 0) == min(time for needs, time in every if needs <= room)


@pytest.mark.parametrize("name", MODES)
def test_of_a_single_mode_every_segment_has_it_and_more_modes_are_never_worse(name):
    figures = random_figures(11, 7)
    alone, together = all_prices(figures, (name,)), all_prices(figures)
    room = room_for(alone, tightest(alone)) + 5
    one, best = by_slots(alone, room, 500, 1), by_slots(together, room, 500, 1)
    assert one is not None
    assert best is not None
    assert {q for _, _, q in one} == {0}
    assert total_ns(together, best, 1) <= total_ns(alone, one, 1)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 12), switch=st.integers(0, 6),
    price=st.fractions(0, 20, max_denominator=30), part=st.integers(5, 70),
)  # fmt: skip
def test_sliding_windows_equal_the_plain_program(seed, count, switch, price, part):
    prices = all_prices(random_figures(seed, count))

    def value(i: int, j: int, q: int) -> Fraction:
        saved = price * int(prices[q].saved[i, j]) if j < count else 0
        return prices[q].cost[i, j] + saved if prices[q].peak[i, j] <= part else Fraction(FAR)

    # per cut and way the least value, over all starts: O(L^2)
    best: list[list[Fraction]] = [[Fraction(0)] * 2]
    for j in range(1, count + 1):
        row = [Fraction(FAR)] * 2
        for q, one in enumerate(prices):
            way = int(one.mode.captured)
            for i in range(j):
                entered = min(best[i][way], best[i][1 - way] + (switch if i else 0))
                row[way] = min(row[way], entered + value(i, j, q))
        best.append(row)
    found = at_price(prices, part, price, switch)
    if found is None:
        assert min(best[count]) > FAR // 2
        return
    changes = sum(prices[a[2]].mode.captured != prices[b[2]].mode.captured for a, b in pairwise(found))
    assert sum((value(*segment) for segment in found), Fraction(0)) + switch * changes == min(best[count])


def test_prices_find_what_fits_and_come_near_the_best():
    gaps = []
    for seed in range(30):
        figures = random_figures(seed, 12)
        prices = all_prices(figures)
        room = room_for(prices, tightest(prices)) + 20
        exact, found = by_slots(prices, room, 500, 2), by_price(prices, room, 2)
        assert exact is not None
        assert found is not None
        assert room_for(prices, found) <= room
        gaps.append((total_ns(prices, found, 2) - total_ns(prices, exact, 2)) / int(figures.uf.sum()))
    assert min(gaps) == 0  # never better than the exact program
    assert sum(gaps) / len(gaps) < 0.1  # of one forward
    assert gaps.count(0) >= 5


def test_prices_have_no_rounding_to_lose_by():
    figures = random_figures(3, 60)
    prices = all_prices(figures, ("eager", "checkpoint"))
    room = room_for(prices, tightest(prices)) * 2
    rounded, priced = by_slots(prices, room, 60, 0), by_price(prices, room, 0)
    assert rounded is not None
    assert priced is not None
    assert total_ns(prices, priced, 0) < total_ns(prices, rounded, 0)


def test_nothing_fits_in_nothing():
    prices = all_prices(random_figures(2, 4))
    assert by_slots(prices, 1, 500, 0) is None
    assert by_price(prices, 1, 0) is None


HAND = Figures(
    x=np.array([2, 3, 4]), xbar=np.array([5, 6]), forward_temp=np.array([1, 0]), saving_temp=np.array([10, 2]),
    backward_temp=np.array([3, 1]), uf=np.array([10, 20]), turn=np.array([7, 9]), saved_launch_f=np.array([1, 2]),
    saved_launch_b=np.array([3, 4]), made_f=np.array([8, 9]), made_b=np.array([6, 5]), work_f=np.array([0, 1]),
    work_b=np.array([2, 0]), capture=50,
)  # fmt: skip


@pytest.mark.parametrize(("name", "segment", "cost", "saved", "peak"), [
    # kept: 5 beside 10 of scratch, then 5 + 6; backward of both: 11 + 4 + 1, of the second alone: 6 + 4 + 1
    ("eager", (0, 1), 0, 5, 15), ("eager", (0, 2), 0, 11, 16), ("eager", (1, 2), 0, 6, 11),
    # runs its 7 of 10 ns again, beside the gradient, and saves its output only; the end of the chain is kept
    ("checkpoint", (0, 1), 7, 3, 18), ("checkpoint", (1, 2), 0, 6, 11), ("checkpoint", (0, 2), 0, 11, 16),
    # what it makes stays: 5 + 3 + 6 + 2; 5 + 6 + 4 + (6 + 5) + 2
    ("graph", (0, 1), 50 - 4, 5, 16), ("graph", (0, 2), 50 - 10, 11, 28),
    # all 10 ns again, less the 1 saved
    ("graph_checkpoint", (0, 1), 50 - 4 + 9, 3, 16),
])  # fmt: skip
def test_prices_by_hand(name, segment, cost, saved, peak):
    prices = prices_of(HAND, MODES[name])
    assert (prices.cost[segment], prices.saved[segment], prices.peak[segment]) == (cost, saved, peak)
