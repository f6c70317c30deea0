"""Rotor: printed optima, brute force over persistent schedules, and plans that keep what the model says."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import Infeasible, PolicyError
from sim.solvers.chain_dp import INF, ChainCosts, solve
from sim.solvers.reversal import extra_steps
from tests.clocks import cpu_s, least
from workloads import transformer
from workloads.synthetic import chain, w1


def costs(uf, ub, x, xbar, of=None, ob=None) -> ChainCosts:
    none = [0] * len(uf)
    return ChainCosts(uf, uf, ub, x, xbar, of or none, of or none, ob or none)


UNIT = {4: 51, 5: 34, 6: 30, 7: 28, 8: 27, 9: 26, 10: 24, 11: 24, 20: 24}
FAT = {7: 52, 9: 35, 11: 31, 13: 30, 17: 29, 19: 28, 23: 27, 27: 26, 31: 25, 35: 24, 50: 24}
MIXED = {11: 36, 12: 34, 13: 34, 14: 34, 15: 34, 16: 33, 17: 31, 18: 31, 19: 31, 20: 30, 30: 30}
UNIT_CHAIN = ([1] * 8, [2] * 8, [1] * 9, [1] * 8)
FAT_CHAIN = ([1] * 8, [2] * 8, [1] * 9, [4] * 8)
MIXED_CHAIN = ([1, 3, 2, 4], [2, 6, 4, 8], [1, 2, 1, 3, 1], [5, 4, 6, 3])


@pytest.mark.parametrize(("lists", "table", "too_small"), [
    (UNIT_CHAIN, UNIT, 3), (FAT_CHAIN, FAT, 6), (MIXED_CHAIN, MIXED, 10),
])  # fmt: skip
def test_printed_optima(lists, table, too_small):
    assert {budget: solve(costs(*lists), budget).time for budget in table} == table
    assert solve(costs(*lists), too_small).time == INF


@pytest.mark.parametrize(("lists", "table", "too_small"), [(UNIT_CHAIN, UNIT, 3), (FAT_CHAIN, FAT, 6)])
def test_engine_needs_the_printed_time_within_the_budget(lists, table, too_small, run):
    trace = chain(*lists)
    for budget, best in table.items():
        facts = run(trace, "rotor", budget)
        assert facts.time == best == facts.result.plan.notes["model_ns"]
    with pytest.raises(Infeasible) as refused:
        run(trace, "rotor", too_small)
    assert refused.value.floor_bytes == too_small + 1


def persistent_optimum(c: ChainCosts, budget: int) -> int:
    """Least time over all persistent schedules, by Dijkstra's algorithm over what is held.

    A state: the inputs kept as checkpoints, the stages whose insides are saved, where the forward stands
    (-1: nowhere), and the stage to be undone next, L while the loss has not been.
    """
    count = len(c)

    def held(kept, saved, at, undo):
        total = c.x[0] + sum(c.x[i] for i in kept if i and i - 1 not in saved) + sum(c.xbar[i] for i in saved)
        total += c.x[at] if at > 0 and at not in kept and at - 1 not in saved else 0
        # the gradient of the output of the stage to be undone, and those of weights behind it
        return total + (c.x[undo + 1] + (c.there[undo] if c.there else 0) if undo < count else 0)

    start = (frozenset({0}), frozenset(), 0, count)
    queue, best, order = [(0, 0, start)], {start: 0}, 1
    while queue:
        now, _, state = heapq.heappop(queue)
        kept, saved, at, undo = state
        if now > best[state]:
            continue
        if undo < 0:
            return now
        base = held(*state)
        steps = []
        if at == count and undo == count:  # the loss: turns the last output into its gradient
            steps.append((0, base, (kept, saved, -1, count - 1)))
        if 0 <= at < min(count, undo + 1):
            i = at
            steps.append((c.uf[i], base + c.xbar[i] + c.of_saving[i], (kept | {i}, saved | {i}, i + 1, undo)))
            out = base + c.x[i + 1] + c.of[i]
            steps.append((c.uf[i], out, (kept | {i}, saved, i + 1, undo)))
            if i not in kept and i - 1 not in saved:
                steps.append((c.uf[i], out, (kept, saved, i + 1, undo)))
        if at >= 0 and undo < count:  # stop here, or begin again at a checkpoint
            steps.append((0, 0, (kept, saved, -1, undo)))
        if at < 0:
            steps += [(0, 0, (kept, saved, i, undo)) for i in kept if i <= undo and i not in saved]
            steps += [(0, 0, (kept, saved, i + 1, undo)) for i in saved if i + 1 <= undo and i + 1 not in saved]
            if undo in saved:
                after = (kept - {undo} | {0} if undo else kept, saved - {undo}, -1, undo - 1)
                own = c.grown[undo] - c.there[undo] if c.there else 0
                steps.append((c.ub[undo], base + c.ob[undo] + own, after))
        for took, peak, target in steps:
            if peak <= budget and now + took < best.get(target, INF):
                best[target] = now + took
                heapq.heappush(queue, (now + took, order, target))
                order += 1
    return INF


def random_costs(draw: random.Random, count: int) -> ChainCosts:
    def some(low, high):
        return [draw.randint(low, high) for _ in range(count)]

    x = [draw.randint(1, 3) for _ in range(count + 1)]
    xbar = [size + more for size, more in zip(x[1:], some(0, 4), strict=True)]
    of = some(0, 2)
    uf = some(1, 5)
    return ChainCosts(uf, uf, some(1, 8), x, xbar, of, of, some(0, 3))


def test_times_equal_brute_force_over_persistent_schedules():
    draw = random.Random(7)
    compared = feasible = 0
    for _ in range(60):
        c = random_costs(draw, draw.randint(1, 4))
        for budget in range(3, sum(c.x) + sum(c.xbar) + 4, 2):
            found = solve(c, budget).time
            assert found == persistent_optimum(c, budget), (c, budget)
            compared += 1
            feasible += found < INF
    assert compared > 300
    assert feasible > compared // 3


def test_times_beside_weight_gradients_equal_brute_force():
    draw = random.Random(11)
    feasible = 0
    for _ in range(60):
        c = random_costs(draw, draw.randint(2, 4))
        own = [draw.randint(0, 4) for _ in c.uf]
        there = [sum(own[i + 1 :]) for i in range(len(c))]
        grown = [lying + draw.randint(0, more) for lying, more in zip(there, own, strict=True)]
        c = replace(c, there=there, grown=grown)
        for budget in range(3, sum(c.x) + sum(c.xbar) + 4, 2):
            found = solve(c, budget).time
            assert found == persistent_optimum(c, budget), (c, budget)
            feasible += found < INF
    assert feasible > 100


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9), count=st.integers(2, 7), share=st.floats(0.2, 1.1))
def test_engine_agrees_with_the_model_on_random_chains(seed, count, share, run):
    c = random_costs(random.Random(seed), count)
    ob = [a + b for a, b in zip(c.x, c.ob, strict=False)]  # each gradient beside the one before
    trace = chain(c.uf, c.ub, c.x, c.xbar, c.of, ob)
    budget = max(1, int(share * run(trace, "keep_all").peak))
    floor = budget
    try:
        facts = run(trace, "rotor", budget)
    except Infeasible as refused:
        floor = refused.floor_bytes or 0
    if floor != budget:  # the budget that was said to do
        assert floor > budget
        budget = floor
        facts = run(trace, "rotor", budget)
    assert facts.time == facts.result.plan.notes["model_ns"]
    assert facts.peak <= budget


def test_time_never_rises_with_exact_slots():
    c = random_costs(random.Random(3), 9)
    times = [solve(c, budget).time for budget in range(5, 100)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == sum(c.uf) + sum(c.ub)


def test_rounding_only_costs_time():
    c = random_costs(random.Random(5), 8)
    for budget in range(15, 60, 5):
        assert solve(c, budget, slots=12).time >= solve(c, budget).time


@pytest.mark.parametrize(("steps", "slots"), [(8, 2), (12, 3), (20, 3), (30, 5)])
def test_with_states_only_it_costs_what_revolve_costs(steps, slots):
    # saving makes the same bytes as keeping the output: x and xbar of one, no gradient
    c = ChainCosts([1] * steps, [1] * steps, [0] * steps, [1] * steps + [0], [1] * steps, *[[0] * steps] * 3)
    best = solve(c, slots + 3).time
    assert best <= steps + extra_steps(steps, slots)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9), count=st.integers(2, 12))
def test_never_slower_than_chen_at_the_same_peak(seed, count, run):
    c = random_costs(random.Random(seed), count)
    ob = [a + b for a, b in zip(c.x, c.ob, strict=False)]
    trace = chain(c.uf, c.ub, c.x, c.xbar, c.of, ob)
    chen = run(trace, "chen")
    assert run(trace, "rotor", chen.peak).time <= chen.time


def test_beats_chen_on_a_transformer_like_stack(run):
    trace = w1(12)
    chen = run(trace, "chen")
    assert run(trace, "rotor", int(1.2 * chen.peak)).time < chen.time


def test_never_much_slower_than_the_simple_plans_where_weight_gradients_come_late(run):
    # the chain is largest at the loss, where no weight has its gradient yet; all of them take a fifth of the budget
    trace = transformer("gpt2-medium", batch=4, sequence=1024, precision="amp_bf16")
    simple = [run(trace, policy) for policy in ("chen", "full_recompute")]
    compared = 0
    for budget in (7_200_000_000, 7_500_000_000, 7_800_000_000):
        time = run(trace, "rotor", budget).time
        fits = [facts.time for facts in simple if facts.peak <= budget]
        assert all(time <= 1.01 * other for other in fits)
        compared += len(fits)
    assert compared >= 4


def test_more_memory_is_used_to_save_time(run):
    trace = w1(8)
    full = run(trace, "keep_all")
    found = [run(trace, "rotor", int(share * full.peak)) for share in (0.45, 0.6, 0.8, 1.0)]
    times = [facts.time for facts in found]
    assert times == sorted(times, reverse=True)
    assert times[-1] == full.time
    assert times[0] > full.time


@pytest.mark.alone
def test_planning_is_fast():
    draw = random.Random(1)
    x = [draw.randint(10**6, 10**7) for _ in range(49)]
    c = costs([draw.randint(1, 999) for _ in range(48)], [5] * 48, x, [5 * size for size in x[1:]])
    assert least(0.4, lambda: cpu_s(lambda: solve(c, sum(c.xbar) // 4, slots=500).schedule())) < 0.4


def test_wrong_parameters_are_refused(run):
    with pytest.raises(PolicyError, match="slots is 1"):
        run(chain(*UNIT_CHAIN), "rotor", slots=1)
