"""Memory budgets: nothing expensive recomputed at 1, layer checkpointing at 0, the best items between."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import PolicyError
from sim.experiment import problem_for
from sim.policies.recompute.sac_knapsack import SacKnapsack
from sim.solvers.joint_graph import CHEAP
from sim.solvers.knapsack import PICKERS, QUANTA, by_dp, by_ratio
from sim.trace import TraceBuilder
from tests.policies.recompute.dtr_runs import one_tier
from workloads import transformer
from workloads.synthetic import w1


def gpt2(**changes):
    given = {"batch": 2, "sequence": 512, "attention": "sdpa", "dropout": 0.1, "precision": "bf16"}
    return transformer("gpt2-small", **{**given, **changes})


@settings(max_examples=80, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(0, QUANTA), st.integers(1, 50)), max_size=9),
    pick=st.sampled_from(("dp", "ilp")),
)
def test_exact_solvers_gain_what_brute_force_finds(items, pick):
    weights, gains = [w / QUANTA for w, _ in items], [g for _, g in items]
    if pick == "ilp" and not items:
        return
    best = max(
        sum(g for g, take in zip(gains, chosen, strict=True) if take)
        for chosen in product((False, True), repeat=len(items))
        if sum(w for (w, _), take in zip(items, chosen, strict=True) if take) <= QUANTA
    )
    chosen = PICKERS[pick](weights, gains, 1.0)
    assert sum(w for (w, _), take in zip(items, chosen, strict=True) if take) <= QUANTA * (1 + 1e-6)
    assert sum(g for g, take in zip(gains, chosen, strict=True) if take) == best


@settings(max_examples=60, deadline=None)
@given(items=st.lists(st.tuples(st.floats(1e-6, 1), st.integers(1, 50)), max_size=20), room=st.floats(0, 1))
def test_items_fit_but_for_rounding(items, room):
    weights, gains = [w for w, _ in items], [g for _, g in items]
    for pick, over in ((by_dp, (len(items) + 1) / 2 / QUANTA), (by_ratio, 0)):
        chosen = pick(weights, gains, room)
        assert sum(w for w, take in zip(weights, chosen, strict=True) if take) <= room + over + 1e-12


def test_knapsack_by_hand():
    """Bytes and FLOPs of three items, room 0.7: the last two gain 17, the first and none other 10."""
    assert by_dp([0.5, 0.4, 0.3], [10, 9, 8], 0.7) == [False, True, True]
    assert by_dp([0.5, 0.5], [1, 1], 0.5) == [True, False]


def spare_trace(spare: int):
    """Two products in a layer; weights without a reader, of `spare` bytes, in that layer and in one without ops."""
    b = TraceBuilder({"model": "spare"})
    x, w, v = b.tensor("x", 64, "input"), b.tensor("w", 64, "weight"), b.tensor("v", 64, "weight")
    for layer in (0, 7):
        b.tensor(f"idle{layer}", spare, "weight", layer=layer)
    y, z, loss, grad, end = (b.tensor(name, size) for name, size in zip("yzlge", (1000, 400, 4, 400, 64), strict=True))
    b.op("up", "matmul", phase="forward", layer=0, reads=[x, w], writes=[y], flops=10)
    b.op("down", "matmul", phase="forward", layer=0, reads=[y, v], writes=[z], flops=90)
    b.op("loss", "loss", phase="forward", layer=0, reads=[z], writes=[loss])
    b.op("down.back", "matmul", phase="backward", layer=0, reads=[y, z, v], writes=[grad], flops=180)
    b.op("up.back", "matmul", phase="backward", layer=0, reads=[grad, x], writes=[end], flops=20)
    return b.build(outputs=[end])


@pytest.mark.parametrize(("regions", "counted"), [("graph", 2), ("layer", 1)])
def test_a_weight_that_nothing_reads_enters_the_region_of_its_layer(regions, counted):
    """The default cut saves both results, an input and a weight; 64 bytes and the idle weights enter besides."""
    for spare in (0, 100, 300):
        share = 400 / (1400 - 64 - counted * spare)
        for budget, kept in ((share - 0.01, 0), (share + 0.01, 400)):
            plan = SacKnapsack(memory_budget=budget, regions=regions).plan(
                problem_for(spare_trace(spare), one_tier(1 << 30))
            )
            assert plan.notes["kept_bytes"] == kept, (spare, budget)


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
    with pytest.raises(PolicyError, match="float from 0 to 1"):
        run(w1(2), "sac_knapsack", memory_budget=1.5)
    with pytest.raises(PolicyError, match="greedy"):
        SacKnapsack(knapsack="greedyy")
