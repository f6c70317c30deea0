"""The bound from moments of the schedule: by hand, and against brute force over all orders of recomputation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import load_profile
from sim.conformance.checker import check
from sim.errors import Infeasible
from sim.experiment import Prices, problem_for, simulate
from sim.plan import Drop, Plan, Recompute
from sim.policies.recompute.relax_and_fix.least_bytes import least_bytes
from sim.policies.recompute.relax_and_fix.moment_search import MomentSearch
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace, TraceBuilder
from tests.machines import machine
from tests.solvers.reruns import least_time, small_graphs, unit_mirror
from workloads import transformer


def bound(trace: Trace, ops: Sequence[int], budget: int) -> int | None:
    prices = Prices(trace, machine(1 << 60))
    return MomentSearch(TraceIndex(trace), [prices.op_ns(op) for op in range(len(trace.ops))]).bound(ops, budget)


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


@pytest.mark.parametrize(("room", "least"), [(10, 0), (9, 3 / 4), (6, 3), (5, 3 + 8 / 6), (3, 3 + 8 / 2), (0, 11)])
def test_bound_by_hand(room, least):
    """Beside the input and what the first backward op makes; what is cheapest per byte is dropped first, in parts."""
    assert bound(saved_twice(), [2], 2 + room) == math.ceil(least)


def test_nothing_fits_where_the_op_at_the_moment_does_not():
    assert bound(saved_twice(), [2], 1) is None


def test_an_input_may_be_dropped_after_its_last_read():
    """At `b1` the input counts no more: 11 bytes are resident and one is made."""
    assert bound(saved_twice(), [3], 12) == 0
    assert bound(saved_twice(), [3], 11) is None
    assert least_bytes(TraceIndex(saved_twice())) == 12
    assert least_time(saved_twice(), 12, keep_inputs=False) == plain_ns(saved_twice())


def test_an_output_may_be_dropped_and_made_again():
    b = TraceBuilder({"model": "early"})
    x, early, wide, late = b.tensor("x", 1, "input"), b.tensor("early", 10), b.tensor("wide", 10), b.tensor("late", 1)
    b.op("first", reads=[x], writes=[early], duration=1)
    b.op("widen", reads=[x], writes=[wide], duration=1)
    b.op("narrow", reads=[wide], writes=[late], duration=1)
    trace = b.build(outputs=(early, late), carry=())
    plan = Plan(trace, (Drop(early, after="first"),))
    assert least_bytes(TraceIndex(trace)) <= 12
    assert problem_for(trace, machine(12)).evaluate(plan).complete
    with pytest.raises(Infeasible, match="no plan was found"):
        simulate(trace, machine(12), "relax_and_fix")


def rectified() -> Trace:
    """`a` is overwritten in place by `b`, which is read again at the end; between them lies a wide op."""
    b = TraceBuilder({"model": "rectified"})
    x, a = b.tensor("x", 1, "input"), b.tensor("a", 5)
    over, wide, end = b.tensor("b", 5, replaces=a), b.tensor("wide", 6), b.tensor("end", 1)
    b.op("conv", reads=[x], writes=[a], duration=4)
    b.op("relu_", reads=[a], writes=[over], duration=2)
    b.op("widen", reads=[x], writes=[wide], duration=1)
    b.op("join", reads=[over, wide], writes=[end], duration=1)
    return b.build(outputs=(end,), carry=())


def test_what_is_written_in_place_may_be_recomputed():
    """With 7 bytes at `widen` neither `a` nor `b` is kept: both are recomputed. It is legal, so no bound forbids it."""
    trace = rectified()
    assert bound(trace, [2], 12) == 0
    assert bound(trace, [2], 7) == 6
    assert least_bytes(TraceIndex(trace)) == 12
    plan = Plan(trace, (Drop("b", after="relu_"), Recompute("conv", before="join"), Recompute("relu_", before="join")))
    assert check(plan, lambda op: trace.ops[op].duration or 0).rerun == 6


def read_late() -> Trace:
    """Two tensors of 4 bytes that take 5 ns; the first is read at once, then the second, and both at the end."""
    b = TraceBuilder({"model": "late"})
    a, c, wide, narrow, end = (b.tensor(n, s) for n, s in (("a", 4), ("c", 4), ("wide", 6), ("narrow", 1), ("end", 1)))
    b.op("fa", writes=[a], duration=5)
    b.op("fc", writes=[c], duration=5)
    b.op("widen", writes=[wide], duration=1)
    b.op("narrow", reads=[wide, a], writes=[narrow], workspace=4, duration=1)
    b.op("join", reads=[a, c, narrow], writes=[end], duration=1)
    return b.build(outputs=(end,), carry=())


def test_two_moments_add_what_each_of_them_asks():
    """With 10 bytes at `widen` one of both goes, 5 ns, and `narrow` needs its reads, 10, what it makes and 4."""
    trace = read_late()
    assert bound(trace, [2], 10) == 5
    assert bound(trace, [3], 15) == 5
    assert bound(trace, [2, 3], 15) == 5
    assert bound(trace, [3], 19) == 0


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=small_graphs(), data=st.data())
def test_no_order_of_recomputation_beats_the_bound_or_the_least_bytes(trace, data):
    top = schedule_of(TraceIndex(trace), {}).peak()
    floor = least_bytes(TraceIndex(trace))
    budget = data.draw(st.integers(max(1, floor - 2), max(top, floor, 1)))
    ops = data.draw(st.lists(st.integers(0, len(trace.ops) - 1), min_size=1, max_size=4, unique=True))
    best = least_time(trace, budget, staged=False, keep_inputs=False)
    if budget < floor:
        assert best is None
    if best is not None:
        together = bound(trace, ops, budget)
        assert together is not None
        assert together <= best - plain_ns(trace)
        assert together >= max(bound(trace, [op], budget) or 0 for op in ops)


def test_bound_meets_the_optimum_where_each_op_is_recomputed_once():
    """The mirror of 9 unit ops holds most at its sixth: with one slot less than that, one op more has to run."""
    trace = unit_mirror(4)
    top = schedule_of(TraceIndex(trace), {}).peak()
    found = [bound(trace, [5], top - less) for less in range(2)]
    best = [least_time(trace, top - less) for less in range(2)]
    assert found == [(one or 0) - plain_ns(trace) for one in best]


SMALL = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 256, "vocab_size": 1000}


@pytest.mark.parametrize("policy", ["full_recompute", "sac_knapsack", "dtr"])
def test_policies_on_a_transformer_stay_above_both(policy):
    trace = transformer(SMALL, batch=8, sequence=256, precision="amp_bf16", attention="eager")
    index = TraceIndex(trace)
    floor, top = least_bytes(index), schedule_of(index, {}).peak()
    card = load_profile("a100_80_sxm")
    prices = Prices(trace, card)
    search = MomentSearch(index, [prices.op_ns(op) for op in range(len(trace.ops))])
    ran = 0
    for share in (0.2, 0.5, 0.8):
        budget = int(floor + share * (top - floor))
        try:
            again = simulate(trace, card, policy, budget=budget).summary()["recompute_ns"]
        except Infeasible:
            continue
        least = search.bound(search.dive(budget, 0.5, 3).moments, budget)
        assert least is not None
        assert again >= least
        ran += least > 0
    assert ran
    with pytest.raises(Infeasible):
        simulate(trace, card, policy, budget=floor - 1)
