"""The bound from what lies there when backward begins: by hand, and against brute force over all orders of runs."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import load_profile
from sim.analysis.peak_memory import peak_bytes
from sim.engine.replay import replay
from sim.errors import Infeasible
from sim.experiment import Prices, simulate
from sim.hardware.platform import Engine, Platform, Tier
from sim.plan import Drop, Plan
from sim.solvers.runs import Ledger, runs
from sim.solvers.turning import Turn, least_bytes
from sim.trace import Trace, TraceBuilder
from tests.solvers.reruns import least_time, small_graphs, unit_mirror
from workloads import transformer


def machine(budget: int) -> Platform:
    tier = Tier("hbm", budget, budget, 10**9, device=0)
    return Platform("toy", (tier,), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}),), ())


def turn(trace: Trace, at: int | None = None) -> Turn:
    return Turn(Ledger(trace), Prices(trace, machine(1 << 60)).op_ns, at)


def plain_ns(trace: Trace) -> int:
    return sum(op.duration or 0 for op in trace.ops)


def saved_twice() -> Trace:
    """Forward makes 4 bytes in 3 ns and, from them, 6 bytes in 8 ns; backward's second op reads both."""
    b = TraceBuilder({"model": "two"})
    x, a, c = b.tensor("x", 1, "input"), b.tensor("a", 4), b.tensor("c", 6)
    first, last = b.tensor("first", 1), b.tensor("last", 1)
    b.op("fa", phase="forward", reads=[x], writes=[a], duration=3)
    b.op("fc", phase="forward", reads=[a], writes=[c], duration=8)
    b.op("b0", phase="backward", reads=[x], writes=[first], duration=1)
    b.op("b1", phase="backward", reads=[first, a, c], writes=[last], duration=1)
    return b.build(outputs=(last,), carry=())


@pytest.mark.parametrize(("room", "bound"), [(10, 0), (9, 3 / 4), (6, 3), (5, 3 + 8 / 6), (3, 3 + 8 / 2), (0, 11)])
def test_bound_by_hand(room, bound):
    """Beside the input and what the first backward op makes; what is least dear per byte goes first, in parts."""
    found = turn(saved_twice()).least(2 + room)
    assert found is not None
    assert found.bound == math.ceil(bound)


def test_nothing_fits_where_the_first_backward_op_does_not():
    assert turn(saved_twice()).least(1) is None


def test_floor_by_hand():
    """The last op reads 1 + 4 + 6 bytes and makes 1; the input of 1 may be dropped by then."""
    assert least_bytes(Ledger(saved_twice())) == 12
    plan = Plan(saved_twice(), (Drop("x", after="b0"),))
    assert peak_bytes(replay(plan, machine(1 << 60)))["hbm"] == 12


def test_an_input_that_only_a_rerun_reads_counts_as_far_as_that_runs():
    """Where its only reader might run again, the input lies there as far as that does, or not at all."""
    b = TraceBuilder({"model": "one"})
    x, a = b.tensor("x", 8, "input"), b.tensor("a", 4)
    first, last = b.tensor("first", 1), b.tensor("last", 1)
    b.op("f", phase="forward", reads=[x], writes=[a], duration=8)
    b.op("b0", phase="backward", reads=[], writes=[first], duration=1)
    b.op("b1", phase="backward", reads=[first, a], writes=[last], duration=1)
    found = turn(b.build(outputs=(last,), carry=()), at=1)
    assert (found.least(13).bound, found.least(5).bound, found.least(4)) == (0, 0, None)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=small_graphs(), data=st.data())
def test_no_order_of_runs_beats_the_bound_or_the_floor(trace, data):
    top = runs(Ledger(trace), {}).peak()
    floor = least_bytes(Ledger(trace))
    budget = data.draw(st.integers(max(1, floor - 2), max(top, floor, 1)))
    at = data.draw(st.sampled_from([None, *range(len(trace.ops))]))
    best = least_time(trace, budget, staged=False, keep_inputs=False)
    if budget < floor:
        assert best is None
    if best is not None:
        found = turn(trace, at).least(budget)
        assert found is not None
        assert found.bound <= best - plain_ns(trace)


def test_bound_meets_the_optimum_where_each_op_runs_again_once():
    """The mirror of 9 unit ops holds most at its sixth: with one slot less than that, one op more has to run."""
    trace = unit_mirror(4)
    ledger = Ledger(trace)
    top = runs(ledger, {}).peak()
    found = [turn(trace, at=5).least(top - less) for less in range(2)]
    best = [least_time(trace, top - less) for less in range(2)]
    assert [one.bound for one in found if one] == [(one or 0) - plain_ns(trace) for one in best]


SMALL = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 256, "vocab_size": 1000}


@pytest.mark.parametrize("policy", ["full_recompute", "sac_knapsack", "dtr"])
def test_policies_on_a_transformer_stay_above_both(policy):
    trace = transformer(SMALL, batch=8, sequence=256, precision="amp_bf16", attention="eager")
    ledger = Ledger(trace)
    floor, top = least_bytes(ledger), runs(ledger, {}).peak()
    card = load_profile("a100_80_sxm")
    bound = Turn(ledger, Prices(trace, card).op_ns)
    ran = 0
    for share in (0.2, 0.5, 0.8):
        budget = int(floor + share * (top - floor))
        try:
            again = simulate(trace, card, policy, budget=budget).summary()["recompute_ns"]
        except Infeasible:
            continue
        least = bound.least(budget)
        assert least is not None
        assert again >= least.bound
        ran += least.bound > 0
    assert ran
    with pytest.raises(Infeasible):
        simulate(trace, card, policy, budget=floor - 1)
