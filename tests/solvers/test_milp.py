"""The program against the published one, brute force over what is resident, and its own relaxation."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.experiment import problem_for
from sim.hardware.platform import Engine, Platform, Tier
from sim.solvers.granularity import by_op
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes
from sim.solvers.rounding import rounded, tightest
from sim.solvers.schedule import TraceIndex, schedule_of
from tests.solvers.reruns import least_time, published, small_graphs, unit_mirror
from workloads.synthetic import uniform_chain


def nodes_in(trace, budget) -> tuple[TraceIndex, Nodes, int]:
    tier = Tier("hbm", budget, budget, 10**9, device=0)
    platform = Platform("toy", (tier,), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}),), ())
    index = TraceIndex(trace)
    nodes = by_op(problem_for(trace, platform), index, "test")
    return index, nodes, budget - nodes.outside


def solved(trace, budget):
    _, nodes, room = nodes_in(trace, budget)
    answer = Program(nodes, room).minimise(node_limit=10_000, time_limit=60)
    return answer, nodes


@pytest.mark.parametrize("budget", [3, 4, 5, 6, 7, 8])
def test_relaxed_bound_is_never_below_the_published_one(budget):
    trace = uniform_chain(8)
    _, nodes, room = nodes_in(trace, budget)
    ours = Program(nodes, room).relax()
    theirs = published(trace, budget, relaxed=True)
    assert ours is not None
    assert theirs is not None
    assert 16 + ours.bound >= theirs - 1e-6


def test_published_relaxation_gives_its_known_bounds():
    bounds = {b: published(uniform_chain(8), b, relaxed=True) for b in (4, 5, 6)}
    assert bounds == pytest.approx({4: 20, 5: 19, 6: 18})


@pytest.mark.parametrize(("trace", "budget"), [
    (uniform_chain(6), 3), (uniform_chain(6), 4), (uniform_chain(8), 4), (unit_mirror(6), 4),
])  # fmt: skip
def test_published_program_ours_and_brute_force_agree(trace, budget):
    answer, nodes = solved(trace, budget)
    total = sum(nodes.cost) + answer.bound
    assert answer.status == "optimal"
    assert total == least_time(trace, budget) == pytest.approx(published(trace, budget))


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(small_graphs(), st.integers(0, 4))
def test_small_graphs_match_brute_force(trace, less):
    top = schedule_of(TraceIndex(trace), {}).peak()
    assume(top > less)
    best = least_time(trace, top - less)
    answer, nodes = solved(trace, top - less)
    if best is None:
        assert answer.status == "infeasible"
    else:
        assert answer.status == "optimal"
        assert sum(nodes.cost) + answer.bound == best
        found = schedule_of(TraceIndex(trace), nodes.reruns(answer.stages))
        assert found.peak() <= top - less
        assert sum(nodes.cost[op] for op, _ in found.steps) == best


@settings(max_examples=25)
@given(small_graphs())
def test_smallest_budget_is_one_that_brute_force_meets(trace):
    index, nodes, _ = nodes_in(trace, 1 << 30)
    least, proven = tightest(index, nodes)
    assert least_time(trace, least.peak()) is not None
    if proven and least.peak():
        assert least_time(trace, least.peak() - 1) is None


def test_a_limited_search_is_never_called_optimal():
    _, nodes, room = nodes_in(uniform_chain(12), 4)
    answer = Program(nodes, room, at_most=21).minimise(node_limit=1, time_limit=60)
    assert answer.status in ("feasible", "unknown")
    assert answer.limit == "nodes"
    assert answer.bound <= 14
    answer = Program(nodes, room).minimise(node_limit=10_000, time_limit=0.01)
    assert (answer.status, answer.limit) in {("feasible", "time"), ("unknown", "time")}


def test_rounding_gives_only_plans_that_can_run():
    index, nodes, room = nodes_in(uniform_chain(10), 4)
    relaxed = Program(nodes, room).relax()
    assert relaxed is not None
    plans = list(rounded(nodes, relaxed.keep))
    assert len(plans) > 1
    for stages in plans:
        wanted = nodes.reruns(stages)
        assert schedule_of(index, wanted).rerun_count() == sum(map(len, wanted.values()))


def test_both_solvers_live_in_one_process():
    pytest.importorskip("ortools", reason="the extra `solvers` is not installed")
    from ortools.sat.python import cp_model

    assert solved(uniform_chain(4), 3)[0].bound == 1
    model = cp_model.CpModel()
    x = model.NewIntVar(0, 5, "x")
    model.Maximize(x)
    solver = cp_model.CpSolver()
    assert solver.Solve(model) == cp_model.OPTIMAL
    assert solver.Value(x) == 5
