"""Memory budgets: nothing dear again at 1, layer checkpointing at 0, the best items between."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import PolicyError
from sim.policies.recompute.sac_knapsack import QUANTA, SacKnapsack, best_items, densest_items
from sim.solvers.cuts import CHEAP
from workloads import transformer
from workloads.synthetic import w1


def gpt2(**changes):
    given = {"batch": 2, "sequence": 512, "attention": "sdpa", "dropout": 0.1, "precision": "bf16"}
    return transformer("gpt2-small", **{**given, **changes})


@settings(max_examples=80, deadline=None)
@given(items=st.lists(st.tuples(st.integers(0, QUANTA), st.integers(1, 50)), max_size=9))
def test_best_items_gain_what_brute_force_finds(items):
    weights, gains = [w for w, _ in items], [g for _, g in items]
    best = max(
        sum(g for g, take in zip(gains, chosen, strict=True) if take)
        for chosen in product((False, True), repeat=len(items))
        if sum(w for w, take in zip(weights, chosen, strict=True) if take) <= QUANTA
    )
    # in a room of that many units no weight is rounded
    chosen = best_items(weights, gains, QUANTA)
    assert sum(w for w, take in zip(weights, chosen, strict=True) if take) <= QUANTA
    assert sum(g for g, take in zip(gains, chosen, strict=True) if take) == best


@settings(max_examples=60, deadline=None)
@given(items=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 50)), max_size=20), room=st.integers(0, 10**7))
def test_items_always_fit(items, room):
    weights, gains = [w for w, _ in items], [g for _, g in items]
    for pick in (best_items, densest_items):
        chosen = pick(weights, gains, room)
        assert sum(w for w, take in zip(weights, chosen, strict=True) if take) <= room


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_share_of_nothing_is_layer_checkpointing(attention, run):
    trace = gpt2(attention=attention)
    nothing, full = run(trace, "sac_knapsack", memory_budget=0), run(trace, "full_recompute")
    assert (nothing.peak, nothing.time) == (full.peak, full.time)
    assert sorted(nothing.rerun) == sorted(full.rerun)


def test_the_whole_share_runs_nothing_dear_again(run):
    trace = gpt2()
    facts = run(trace, "sac_knapsack", memory_budget=1)
    assert facts.rerun
    assert all(trace.ops[trace.op_id(name)].kind in CHEAP for name in facts.rerun)
    assert facts.time <= run(trace, "min_cut").time


@pytest.mark.parametrize("knapsack", ["dp", "greedy"])
def test_more_is_kept_and_time_falls_with_the_share(knapsack, run):
    trace = gpt2()
    facts = [run(trace, "sac_knapsack", memory_budget=b, knapsack=knapsack) for b in (0, 0.25, 0.5, 0.75, 1)]
    times = [f.time for f in facts]
    assert times == sorted(times, reverse=True)
    kept = [f.result.plan.notes["kept_bytes"] for f in facts]
    assert kept == sorted(kept)


def test_without_a_share_the_platforms_budget_decides(run):
    trace = gpt2(batch=4)
    least, most = run(trace, "sac_knapsack", memory_budget=0).peak, run(trace, "sac_knapsack", memory_budget=1).peak
    middle = (least + most) // 2
    facts = run(trace, "sac_knapsack", middle)
    share = facts.result.plan.notes["memory_budget"]
    assert 0 < share < 1
    assert run(trace, "sac_knapsack", memory_budget=share + 1 / 16).peak > middle


def test_layers_are_needed(run):
    with pytest.raises(PolicyError, match="0 … 1"):
        run(w1(2), "sac_knapsack", memory_budget=1.5)
    with pytest.raises(PolicyError, match="greedy"):
        SacKnapsack(knapsack="greedyy")
