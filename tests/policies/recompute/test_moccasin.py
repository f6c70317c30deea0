"""Moccasin: the table of what so many runs an op allow, and Checkmate's optima where they suffice."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from sim.conformance.checker import check
from sim.errors import Infeasible, PolicyError
from sim.experiment import Prices, problem_for
from sim.hardware.platform import Engine, Platform, Tier
from sim.policies.recompute.moccasin import Moccasin
from sim.solvers.nodes import counts_all
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace, TraceBuilder
from tests.solvers.reruns import least_time, mixed_mirror, small_graphs, unit_mirror
from workloads.synthetic import random_dag, uniform_chain

has_solver = find_spec("ortools") is not None
needs_solver = pytest.mark.skipif(not has_solver, reason="the extra `solvers` (OR-Tools) is not installed")

# What at most C runs an op allow on U(n), from this model and from Checkmate's program with sum_t R[t, i] <= C
TABLE = {
    (6, 1): {6: 12, 5: None},
    (6, 2): {5: 13, 4: 14, 3: None},
    (8, 2): {6: 18, 5: 19, 4: None},
    (8, 3): {5: 19, 4: 21, 3: None},
    (8, 6): {4: 21, 3: 31},
}


@needs_solver
@pytest.mark.parametrize(("n", "most"), TABLE)
def test_runs_an_op_bound_the_plan(n, most, run):
    for budget, best in TABLE[n, most].items():
        if best is None:
            with pytest.raises(Infeasible) as refused:
                run(uniform_chain(n), "moccasin", budget, runs=most)
            assert refused.value.floor_bytes == budget + 1
            assert f"run no op more than {most} times" in str(refused.value)
            continue
        facts = run(uniform_chain(n), "moccasin", budget, runs=most)
        assert facts.time == best
        assert max(map(facts.rerun.count, facts.rerun), default=0) < most
        assert facts.result.plan.notes["status"] == "optimal"
        assert f"run no op more than {most} times" in facts.result.plan.notes["optimal_among"]


@needs_solver
def test_what_is_proven_is_proven_of_so_few_runs_per_op(run):
    """The word names its class: with more runs per op less memory does, and a plan of two is no longer the best."""
    with pytest.raises(Infeasible, match=r"5 B is the smallest budget that does \(of plans that .* 2 times\)"):
        run(uniform_chain(8), "moccasin", 4)
    assert run(uniform_chain(8), "moccasin", 4, runs=6).time == run(uniform_chain(8), "checkmate", 4).time == 21
    few, more = Moccasin(), Moccasin(runs=6)
    plan = run(uniform_chain(8), "moccasin", 3, runs=6).result.plan
    assert more.in_class(plan)
    assert not few.in_class(plan)


@needs_solver
@pytest.mark.parametrize(("trace", "budget", "best"), [
    (unit_mirror(8), 5, 22), (unit_mirror(12), 7, 32), (*mixed_mirror(10), 170),
])  # fmt: skip
def test_equals_checkmate_where_two_runs_do(trace, budget, best, run):
    facts = run(trace, "moccasin", budget)
    assert facts.time == best == run(trace, "checkmate", budget).time
    assert facts.result.plan.notes["bound_ns"] == facts.result.plan.notes["rerun_ns"]


@needs_solver
@pytest.mark.slow
def test_61_nodes_of_mixed_costs_are_proven(run):
    trace, budget = mixed_mirror(30)
    facts = run(trace, "moccasin", budget)
    assert (facts.time, facts.result.plan.notes["status"]) == (448, "optimal")


def overwritten_and_wanted_again():
    """What o2 and o4 overwrite is wanted once more: recomputed between, it may not be kept over the op between."""
    b = TraceBuilder()
    x = b.tensor("x", 9, "input")
    a, c = b.tensor("a", 5), b.tensor("c", 4)
    b.op("o0", reads=[], writes=[a, c], workspace=3, duration=6)
    e, f = b.tensor("e", 2), b.tensor("f", 1)
    b.op("o1", reads=[c], writes=[e, f], duration=5)
    g, h = b.tensor("g", 2), b.tensor("h", 1, replaces=f)
    b.op("o2", reads=[f, x], writes=[g, h], workspace=1, duration=1)
    b.op("o3", reads=[c, x], writes=[b.tensor("i", 5)], duration=3)
    j, k, m = b.tensor("j", 5), b.tensor("k", 4), b.tensor("m", 1, replaces=h)
    b.op("o4", reads=[a, h, x], writes=[j, k, m], workspace=3, duration=1)
    n, o = b.tensor("n", 1), b.tensor("o", 2, replaces=e)
    b.op("o5", reads=[g, e, j], writes=[n, o], workspace=1, duration=0)
    p, q, r = b.tensor("p", 1), b.tensor("q", 1), b.tensor("r", 2, replaces=o)
    b.op("o6", reads=[o], writes=[p, q, r], workspace=1, duration=2)
    return b.build(outputs=(r,), carry=())


@needs_solver
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@example(overwritten_and_wanted_again(), 1)
@given(small_graphs(), st.integers(0, 4))
def test_small_graphs_match_brute_force_when_runs_suffice(trace, less):
    top = schedule_of(TraceIndex(trace), {}).peak()
    assume(top > less)
    tier = Tier("hbm", top - less, top - less, 10**9, device=0)
    platform = Platform("toy", (tier,), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}),), ())
    best, exact = least_time(trace, top - less), counts_all(TraceIndex(trace), len(trace.ops))
    refusal = None
    try:
        plan = Moccasin(runs=8).plan(problem_for(trace, platform))
    except Infeasible as error:
        refusal = error
    if refusal is not None:
        assert best is None or not exact
        assert exact or "of this class" not in str(refusal)
        assert least_time(trace, refusal.floor_bytes or 0) is not None
        return
    checked = check(plan, Prices(trace, platform).op_ns)
    assert checked.peak <= top - less
    if exact:
        assert checked.time == best
        assert plan.notes["status"] == "optimal"


@needs_solver
def test_a_limited_search_says_so(run):
    notes = run(unit_mirror(20), "moccasin", 9, work_limit=1.0).result.plan.notes
    assert (notes["status"], notes["limit"], notes["time_limited"]) == ("feasible", "work", False)


@needs_solver
def test_weights_updates_and_stages_replay_within_the_budget(run):
    trace = random_dag(9, 5, max_bytes=1000, max_ns=50)
    top = run(trace, "keep_all").peak
    with pytest.raises(Infeasible) as refused:
        run(trace, "moccasin", 1)
    floor = refused.value.floor_bytes
    assert floor is not None
    assert run(trace, "moccasin", floor).peak <= floor <= top
    assert run(trace, "moccasin", top, max_ops=8, granularity="stage").time == run(trace, "keep_all").time


def test_without_the_solver_the_error_says_how_to_get_it(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(PolicyError, match=r"pip install 'tiersim\[solvers\]'"):
        run(uniform_chain(4), "moccasin", 3)


def test_wrong_parameters(run):
    with pytest.raises(PolicyError, match="runs is 0; expected int of at least 1"):
        run(uniform_chain(4), "moccasin", runs=0)


def held() -> Trace:
    """`a` is read once, and held by the program until the end."""
    b = TraceBuilder({"model": "held"})
    x, a, c, wide, end = (b.tensor(name, size) for name, size in zip("xacwz", (1, 10, 1, 10, 1), strict=True))
    b.op("fx", writes=[x], duration=1)
    b.op("fa", reads=[x], writes=[a], duration=1)
    b.op("fc", reads=[a], writes=[c], duration=1)
    b.op("widen", reads=[c], writes=[wide], duration=1)
    b.op("last", reads=[wide], writes=[end], duration=1, releases=[a])
    return b.build(outputs=(end,), carry=())


def counted() -> Trace:
    """An input is overwritten in place, and its new value is an output."""
    b = TraceBuilder({"model": "counted"})
    s, a, wide, narrow, end = (b.tensor(name, size) for name, size in zip("sawnz", (2, 3, 4, 1, 1), strict=True))
    new = b.tensor("t", 2, replaces=s)
    b.op("count", reads=[s], writes=[new], duration=1)
    b.op("fa", writes=[a], duration=1)
    b.op("widen", writes=[wide], duration=1)
    b.op("narrow", reads=[wide], writes=[narrow], duration=1)
    b.op("join", reads=[narrow, a], writes=[end], duration=1)
    return b.build(outputs=(end, new), carry=())


@needs_solver
@pytest.mark.parametrize("policy", ["checkmate", "moccasin"])
@pytest.mark.parametrize(("trace", "budget"), [(held(), 13), (counted(), 8)], ids=("held", "counted"))
def test_nothing_is_proven_where_memory_is_counted_otherwise(policy, trace, budget, run):
    """Both fit: the one without `a`, the other with `a` recomputed."""
    said = ""
    try:
        run(trace, policy, budget)
    except Infeasible as refused:
        said = str(refused)
    assert "no plan of this class" not in said
    assert "smallest" not in said
