"""Rockmate: Rotor where stages are single ops, between Rotor and Checkmate elsewhere, and its table against the log."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from sim.conformance.checker import check
from sim.errors import Infeasible, PolicyError
from sim.experiment import problem_for
from sim.hardware.platform import Engine, Platform, Tier
from sim.policies.recompute.rockmate.option_dp import Line, OptionTable
from sim.policies.recompute.rockmate.options import Menu, held_by
from sim.policies.recompute.rotor import costs_of
from sim.solvers.chain_dp import INF, solve
from sim.solvers.granularity import by_op
from sim.solvers.regions import chain_of
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace, TraceBuilder
from tests.solvers.reruns import small_graphs
from workloads.synthetic import chain, w1

ROOMY = 1 << 60
HBM, NPU = Tier("hbm", ROOMY, ROOMY, 10**9, device=0), Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9})
TOY = Platform("toy", (HBM,), (NPU,), ())


def two_halves(count: int = 2) -> Trace:
    """Stages that are each a wide cheap op between two narrow expensive ones; backward needs all that is inside."""
    b = TraceBuilder({"model": "two halves"})
    x = b.tensor("x", 1, "input")
    stages = []
    for s in range(count):
        made = [b.tensor(f"{s}.{name}", size, layer=s) for name, size in (("a", 2), ("wide", 8), ("c", 2), ("y", 1))]
        reads = [[x], [made[0]], [made[1]], [made[0], made[2]]]
        for i, took in enumerate((10, 1, 10, 10)):
            b.op(f"{s}.f{i}", reads=reads[i], writes=[made[i]], layer=s, duration=took)
        stages.append((x, made))
        x = made[-1]
    gradient = b.tensor("loss.grad", 1, "temporary")
    b.op("loss", "loss", phase="backward", reads=[x], writes=[gradient], layer=1, duration=1)
    for s, (came, (a, wide, c, _)) in reversed(list(enumerate(stages))):
        for name, read in (("b3", [a, c]), ("b2", [wide]), ("b1", [a]), ("b0", [came])):
            new = b.tensor(f"{s}.{name}.out", 1, "temporary", layer=s)
            b.op(f"{s}.{name}", phase="backward", reads=[gradient, *read], writes=[new], layer=s, duration=20)
            gradient = new
    return b.build(outputs=(gradient,), carry=())


def rectified_halves() -> Trace:
    """The same with a ReLU in place behind each wide op, and behind each stage's last op."""
    b = TraceBuilder({"model": "rectified halves"})
    x = b.tensor("x", 1, "input")
    stages = []
    for s in range(2):
        a, wide, c, sum = (
            b.tensor(f"{s}.{n}", size, layer=s) for n, size in zip(("a", "wide", "c", "sum"), (2, 8, 2, 1))
        )
        over, y = b.tensor(f"{s}.over", 8, layer=s, replaces=wide), b.tensor(f"{s}.y", 1, layer=s, replaces=sum)
        ops = (("f0", [x], a, 10), ("f1", [a], wide, 1), ("relu", [wide], over, 1), ("f2", [over], c, 10))
        for name, reads, made, took in (*ops, ("f3", [a, c], sum, 10), ("out", [sum], y, 1)):
            b.op(f"{s}.{name}", reads=reads, writes=[made], layer=s, duration=took)
        stages.append((x, a, over, c, y))
        x = y
    gradient = b.tensor("loss.grad", 1, "temporary")
    b.op("loss", "loss", phase="backward", reads=[x], writes=[gradient], layer=1, duration=1)
    for s, (came, a, over, c, y) in reversed(list(enumerate(stages))):
        for name, read in (("b4", [y]), ("b3", [a, c]), ("b2", [over]), ("b1", [a]), ("b0", [came])):
            new = b.tensor(f"{s}.{name}.out", 1, "temporary", layer=s)
            b.op(f"{s}.{name}", phase="backward", reads=[gradient, *read], writes=[new], layer=s, duration=20)
            gradient = new
    return b.build(outputs=(gradient,), carry=())


@pytest.mark.parametrize("policy", ["rockmate", "relax_and_fix", "checkmate", "twremat"])
def test_what_is_written_in_place_is_recomputed_with_what_it_overwrites(policy, run):
    """The wide result costs two cheap ops; a stage ends behind its last ReLU, so that no byte counts twice."""
    trace = rectified_halves()
    plain = run(trace, "keep_all")
    facts = run(trace, policy, plain.peak - 6)
    assert facts.rerun == ["0.f1", "0.relu"]
    assert facts.time == plain.time + 2


def test_a_stage_saves_its_dear_results_and_runs_its_cheap_one_again(run):
    trace = two_halves()
    plain = run(trace, "keep_all")
    budget = plain.peak - 6  # less than one wide result must go
    facts = run(trace, "rockmate", budget)
    assert facts.rerun == ["0.f1"]
    assert facts.time == plain.time + 1 == run(trace, "checkmate", budget).time
    assert facts.time < run(trace, "rotor", budget).time


@pytest.mark.parametrize("budget", [12, 13, 14, 16, 17, 20, 25, 30])
def test_single_ops_a_stage_give_rotor(budget, run):
    trace = chain([1, 3, 2, 4], [2, 6, 4, 8], [1, 2, 1, 3, 1], [5, 4, 6, 3])
    assert run(trace, "rockmate", budget).time == run(trace, "rotor", budget).time


@pytest.mark.parametrize("seed", range(6))
def test_table_with_one_option_a_stage_is_never_above_rotors(seed):
    lists = [3, 1, 4, 1 + seed], [6, 2, 8, 3], [2, 3, 1, 4, 2], [6, 4, 5, 6 + seed], [0, 2, 1, 0], [3, 4, 3, 5]
    problem = problem_for(chain(*lists), TOY)
    index, line = TraceIndex(problem.trace), chain_of(problem, "test")
    costs = costs_of(problem, index, line)
    menu = Menu(problem, index, levels=2, exact_ops=10, node_limit=10, time_limit=10)
    options = [menu.of(stage, turn, 50) for stage, turn in zip(line.stages, costs.turn, strict=True)]
    assert all(len(found) == 1 for found in options)
    mine = Line(costs.uf, costs.ub, costs.x, costs.of, options)
    fits = 0
    for budget in range(8, 40):
        ours, theirs = OptionTable(mine, budget, 500).time, solve(costs, budget).time
        assert ours <= theirs
        fits += theirs < INF
    assert fits > 5


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_between_rotor_and_keeping_all_on_transformer_layers(share, run):
    trace = w1(3)
    plain = run(trace, "keep_all")
    budget = int(plain.peak * share)
    facts = run(trace, "rockmate", budget, levels=2)
    assert plain.time < facts.time < run(trace, "rotor", budget).time
    notes = facts.result.plan.notes
    assert facts.time == plain.time + notes["rerun_ns"]
    assert check(facts.result.plan, problem_for(trace, TOY).cost.op_ns).peak == facts.peak


def test_less_room_than_any_schedule_needs_is_refused_with_a_floor(run):
    trace = two_halves()
    with pytest.raises(Infeasible) as refused:
        run(trace, "rockmate", 5, levels=2)
    floor = refused.value.floor_bytes
    assert floor is not None
    assert run(trace, "rockmate", floor, levels=2).peak <= floor


@settings(max_examples=25)
@given(small_graphs())
def test_what_an_option_holds_is_what_a_run_holds(trace):
    index = TraceIndex(trace)
    nodes = by_op(problem_for(trace, TOY), index, "test")
    _, most, _ = held_by(nodes, [[] for _ in range(len(nodes))], ())
    kept = sum(v.size for v in nodes.values if v.end and v.held_until >= len(nodes))
    peak = schedule_of(index, {}).peak() - nodes.outside
    assert peak - kept <= most <= peak


def test_stages_that_are_alike_share_their_options():
    """Inner stages have the same sizes and times: one search answers for all of them."""
    problem = problem_for(two_halves(5), TOY)
    menu = Menu(problem, TraceIndex(problem.trace), levels=2, exact_ops=24, node_limit=200, time_limit=20.0)
    inner = [stage for stage in chain_of(problem, "rockmate").stages if len(stage.forward) > 1][1:-1]
    options = [menu.of(stage, 0, 100) for stage in inner]
    assert len(options) == 3
    assert len(options[0]) > 1
    assert all(one is options[0] for one in options)


def test_graphs_without_a_chain_are_refused(run):
    b = TraceBuilder({"model": "crossed"})
    x = b.tensor("x", 1, "input")
    t = [b.tensor(f"t{i}", 1) for i in range(4)]
    b.op("f0", reads=[x], writes=t[:2], duration=1)
    b.op("f1", reads=t[:1], writes=t[2:3], duration=1)
    b.op("f2", reads=t[1:3], writes=t[3:], duration=1)
    with pytest.raises(PolicyError, match=r"policy 'rockmate': this trace is not a chain: op 'f2' reads 't1'"):
        run(b.build(outputs=(t[3],), carry=()), "rockmate")


def test_wrong_parameters(run):
    with pytest.raises(PolicyError, match="levels is 0; expected int of at least 1"):
        run(w1(1), "rockmate", levels=0)
