"""The joint optimum: never below its bound, at it where it says so; against every plan of small graphs, replayed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from sim.analysis.peak_memory import home_peak
from sim.comparison import compare
from sim.errors import Infeasible, PolicyError
from sim.experiment import simulate
from sim.hardware.platform import Engine
from sim.least_time import lower_bound
from sim.limits import SECONDS
from sim.plan import Move, Recompute
from sim.policies.hybrid.joint_optimal import JointOptimal
from sim.policies.hybrid.joint_optimal.copies import Copies
from sim.trace import TraceBuilder
from tests.machines import machine
from tests.policies.hybrid.joint_plans import fastest, small_graph
from tests.policies.hybrid.least_schedule import Least, TooManyStates
from tests.policies.recompute.test_checkmate import UNIT
from workloads.synthetic import uniform_chain

NO_LIMIT_ON_THE_LINK = 10**15


def told(trace, platform, **parameters):
    """A run whose notes agree with its log."""
    result = simulate(trace, platform, "joint_optimal", **parameters)
    notes, log = result.plan.notes, result.log
    assert home_peak(log) <= platform.home(0).capacity
    assert log.counters["ignored_actions"] == log.counters["implicit_recomputes"] == 0
    assert notes["makespan_bound_ns"] <= log.end
    assert (notes["status"] == "optimal") == (notes["makespan_bound_ns"] == log.end)
    assert notes["optimal_among"] == (notes["bound_among"] if notes["status"] == "optimal" else "")
    return result


def does(result, kind):
    return [action for action in result.plan.actions if isinstance(action, kind)]


# ---- without a link, and with one that takes no time -------------------------------------------


@pytest.mark.parametrize(("n", "budget", "best"), [(n, b, v) for n in (4, 6, 8) for b, v in UNIT[n].items()])
@pytest.mark.parametrize("host", [0, 1000])
def test_without_a_link_it_is_checkmates_optimum(n, budget, best, host):
    result = told(uniform_chain(n), machine(budget, host=host, rate=None))
    assert result.log.end == result.plan.notes["makespan_bound_ns"] == best


@pytest.mark.parametrize(("n", "budget"), [(4, 3), (6, 3), (6, 5)])
def test_with_a_link_that_takes_no_time_nothing_is_recomputed(n, budget):
    result = told(
        uniform_chain(n, duration=1000), machine(budget, host=1000, rate=NO_LIMIT_ON_THE_LINK), time_limit=300.0
    )
    assert not does(result, Recompute)
    assert result.log.end - 2000 * n <= len(does(result, Move))  # a copy takes a nanosecond at least


# ---- timelines drawn by hand -------------------------------------------------------------------


def one_idle_tensor(between: int, expensive: int):
    """`a` of 4 bytes is read at the end again; meanwhile `between` ns with as much memory as there is without it."""
    b = TraceBuilder({"model": "hand"})
    a, p, q, r = b.tensor("a", 4), b.tensor("p", 2), b.tensor("q", 5), b.tensor("r", 1)
    b.op("make", writes=[a], duration=expensive)
    b.op("use", reads=[a], writes=[p], duration=3)
    b.op("wide", reads=[p], writes=[q], duration=between)
    b.op("narrow", reads=[q], phase="backward", writes=[r], duration=3)
    b.op("last", reads=[a, r], phase="backward", writes=[b.tensor("z", 1, "temporary")], duration=3)
    return b.build(outputs=[], carry=())


@pytest.mark.parametrize(
    ("expensive", "rate", "end"),
    [
        # 10 bytes: `a` (4) beside `p` and `q` (7) does not fit. It is copied while `use` reads it, 3 of 4 ns at 1 GB/s,
        # and `wide` waits for its space; then it returns while `narrow` runs (3 of 4 ns), and `last` waits for it
        (50, 10**9, 50 + 3 + 10 + 3 + 3 + 1 + 1),
        # at half that rate 8 ns out, 8 back
        (50, 5 * 10**8, 50 + 3 + 10 + 3 + 3 + 5 + 5),
        # dropped, and recomputed before `last` where that is faster than the copies
        (1, 10**9, 1 + 3 + 10 + 3 + 3 + 1),
    ],
)
def test_the_link_is_waited_for_where_it_is_faster_than_recomputation(expensive, rate, end):
    result = told(one_idle_tensor(10, expensive), machine(10, host=100, rate=rate))
    assert (result.log.end, result.plan.notes["status"]) == (end, "optimal")
    assert bool(does(result, Recompute)) == (expensive == 1)


def four_layers():
    """A chain whose first two results may leave and come back while other ops run, if both leave at once."""
    b = TraceBuilder({"model": "hand"})
    h = [b.tensor("x", 40, "weight")]
    for i, (size, duration) in enumerate(((40, 60), (30, 10), (60, 40), (40, 60))):
        h.append(b.tensor(f"h{i + 1}", size))
        b.op(f"f{i + 1}", reads=h[-2:-1], writes=h[-1:], duration=duration)
    gradients = [b.tensor("g4", 40, "temporary")]
    b.op("loss", "loss", phase="backward", reads=h[-1:], writes=gradients, duration=30)
    for i, saved, duration in ((4, h[4:], 90), (3, h[2:4], 30), (2, h[1:3], 120), (1, h[:1], 10)):
        gradients.append(b.tensor(f"g{i - 1}", (40, 40, 30, 60)[i - 1], "temporary"))
        reads = [gradients[-2], *saved]
        b.op(f"b{i}", phase="backward", reads=reads, writes=gradients[-1:], duration=duration)
    return b.build(outputs=gradients[-1:], carry=())


def test_two_decisions_that_pay_only_together_are_found():
    """Changing one at a time ends at 530 ns, where the second layer's product is recomputed."""
    result = told(four_layers(), machine(250, host=1000, rate=10**9))
    assert (result.log.end, result.plan.notes["status"]) == (520, "optimal")
    assert {result.plan.trace.tensors[move.tensor].name for move in does(result, Move)} == {"h1", "h2"}


def rectified_in_place():
    """`y` takes over the storage of `a`, and leaves for the time of `big`."""
    b = TraceBuilder({"model": "hand"})
    x, a, z, big = b.tensor("x", 1, "input"), b.tensor("a", 100), b.tensor("z", 1), b.tensor("big", 100)
    y = b.tensor("y", 100, replaces=a)
    b.op("conv", reads=[x], writes=[a], duration=1000)
    b.op("relu_", reads=[a], writes=[y], duration=1000)
    b.op("after", reads=[y], writes=[z], duration=500)
    b.op("wide", reads=[z], writes=[big], duration=500)
    n, m = b.tensor("n", 1, "temporary"), b.tensor("m", 1, "temporary")
    b.op("narrow", phase="backward", reads=[big], writes=[n], duration=500)
    b.op("idle", phase="backward", reads=[n], writes=[m], duration=500)
    b.op("last", phase="backward", reads=[m, y], writes=[b.tensor("o", 1, "temporary")], duration=500)
    return b.build(outputs=[], carry=())


@pytest.mark.parametrize("parameters", [{}, {"max_ops": 2}])
def test_what_was_written_in_place_may_leave(parameters):
    result = told(rectified_in_place(), machine(105, host=1000, rate=10**9), **parameters)
    assert result.log.end <= 4600
    assert {move.tensor for move in does(result, Move)} == {4}


def read_first_and_last():
    """The input `x` of 200 bytes is read by the first and the last op; meanwhile `a` and `d` need 400."""
    b = TraceBuilder({"model": "hand"})
    x, s, a, c, d = (
        b.tensor("x", 200, "input"),
        b.tensor("s", 1),
        b.tensor("a", 200),
        b.tensor("c", 1),
        b.tensor("d", 200),
    )
    b.op("first", reads=[x], writes=[s], duration=2000)
    b.op("fa", reads=[s], writes=[a], duration=500)
    b.op("fc", reads=[a], writes=[c], duration=10)
    b.op("fd", reads=[c], writes=[d], duration=10)
    e, f, g, h = (b.tensor(name, 1, "temporary") for name in "efgh")
    b.op("loss", phase="backward", reads=[d], writes=[e], duration=10)
    b.op("ba", phase="backward", reads=[e, a], writes=[f], duration=10)
    b.op("long", phase="backward", reads=[f], writes=[g], duration=2000)
    b.op("last", phase="backward", reads=[g, x], writes=[h], duration=10)
    return b.build(outputs=[h], carry=())


@pytest.mark.parametrize("parameters", [{}, {"max_ops": 2}])
def test_inputs_stay_as_the_class_of_its_plans_says(parameters):
    result = told(read_first_and_last(), machine(420, host=1000, rate=10**9), **parameters)
    assert 0 not in {action.tensor for action in does(result, Move)}
    with pytest.raises(Infeasible) as refused:
        simulate(read_first_and_last(), machine(300, host=1000, rate=10**9), "joint_optimal", **parameters)
    assert refused.value.floor_bytes > 300


def overlapped():
    """`a` and `b` leave during one long op each, and return during one each."""
    b = TraceBuilder({"model": "hand"})
    x, y = b.tensor("x", 6), b.tensor("y", 6)
    made = [b.tensor(f"t{i}", 2, "temporary") for i in range(6)]
    b.op("fx", writes=[x], duration=9)
    b.op("fy", reads=[x], writes=[y], duration=9)
    b.op("t0", reads=[y], writes=[made[0]], duration=9)
    b.op("t1", reads=[made[0]], writes=[made[1]], duration=9)
    b.op("wide", reads=[made[1]], writes=[made[2]], workspace=11, duration=9)
    b.op("t3", reads=[made[2]], phase="backward", writes=[made[3]], duration=9)
    b.op("t4", reads=[made[3], y], phase="backward", writes=[made[4]], duration=9)
    b.op("t5", reads=[made[4], x], phase="backward", writes=[made[5]], duration=9)
    return b.build(outputs=[], carry=())


def test_copies_that_fit_beside_the_ops_cost_nothing():
    result = told(overlapped(), machine(16, host=100, rate=10**9))
    assert (result.log.end, result.plan.notes["status"]) == (8 * 9, "optimal")
    assert {move.tensor for move in does(result, Move)} == {0, 1}
    assert not does(result, Recompute)


def test_copies_of_one_direction_follow_one_another():
    # 12 ns a copy: both leave during `t0` and `t1`, 24 ns in 18; both return during `t3` (9 ns) and `t4`
    slow = told(overlapped(), machine(16, host=100, rate=5 * 10**8))
    assert slow.plan.notes["makespan_bound_ns"] > 8 * 9


def made_late():
    """`x` of 100 bytes is made in 50 ns after 200, and is in the way of `wide` 4 ns later."""
    b = TraceBuilder({"model": "hand"})
    made = [b.tensor(f"t{i}", 1, "temporary") for i in range(5)]
    x = b.tensor("x", 100)
    b.op("long", writes=[made[0]], duration=200)
    b.op("make", reads=[made[0]], writes=[x], duration=50)
    b.op("use", reads=[x], writes=[made[1]], duration=4)
    b.op("wide", reads=[made[1]], writes=[made[2]], workspace=108, duration=10)
    b.op("idle", reads=[made[2]], phase="backward", writes=[made[3]], duration=300)
    b.op("last", reads=[x, made[3]], phase="backward", writes=[made[4]], duration=10)
    return b.build(outputs=[], carry=())


def test_at_moments_nothing_leaves_before_it_is_made():
    # its copy takes 100 ns, of which 54 pass before `wide`; the other 46 hundredths are recomputed, 50 ns in all
    result = told(made_late(), machine(110, host=1000, rate=10**9), max_ops=2, moments=1)
    assert result.plan.notes["makespan_bound_ns"] == 574 + 23


# ---- planted faults: a row less is seen ----------------------------------------------------------


def test_without_the_links_time_the_bound_is_too_low(monkeypatch):
    end = Copies.end

    def no_time(self, program, stage, held):
        self._work = {}
        end(self, program, stage, held)

    monkeypatch.setattr(Copies, "end", no_time)
    low = simulate(one_idle_tensor(10, 50), machine(10, host=100, rate=10**9), "joint_optimal")
    assert low.plan.notes["makespan_bound_ns"] < 50 + 3 + 10 + 3 + 3 + 1 + 1


def test_without_the_space_of_copies_the_bound_is_too_low(monkeypatch):
    monkeypatch.setattr(Copies, "value", lambda *_: [])
    monkeypatch.setattr(Copies, "end", lambda *_: None)
    low = simulate(one_idle_tensor(10, 50), machine(10, host=100, rate=10**9), "joint_optimal")
    assert low.plan.notes["makespan_bound_ns"] < 50 + 3 + 10 + 3 + 3 + 1 + 1


# ---- brute force -------------------------------------------------------------------------------


def beside_brute_force(
    seed: int, moves: int, reruns: int, forward: int, *, in_place: bool = False, **parameters
) -> str:
    draw = random.Random(seed)
    trace = small_graph(seed, forward, in_place=in_place)
    peak = home_peak(simulate(trace, machine()).log)
    budget = peak - draw.randint(1, max(1, peak // 4))
    rate = draw.choice((10**8, 3 * 10**8, 10**9, 2 * 10**9, 5 * 10**9))
    platform = machine(budget, host=10_000, rate=rate)
    best = fastest(trace, platform, moves=moves, reruns=reruns)
    try:
        result = told(trace, platform, time_limit=300.0, **parameters)
    except Infeasible as refused:
        return "refused" if best is None else "missed" if "no plan was found" in str(refused) else "wrong"
    if best is None:
        return "found"
    assert result.plan.notes["makespan_bound_ns"] <= best, "a plan of the class is faster than the bound"
    if result.plan.notes["status"] == "optimal":
        return "proven"
    return "best" if result.log.end <= best else "worse"


def test_no_plan_of_small_graphs_is_faster_than_the_bound():
    seen = Counter(beside_brute_force(seed, 1, 1, 4) for seed in range(24))
    assert seen["missed"] == seen["wrong"] == 0
    assert seen["proven"] >= 12, seen
    assert seen["worse"] <= 2, seen


def test_no_plan_of_small_graphs_is_faster_than_the_bound_at_moments():
    seen = Counter(beside_brute_force(seed, 1, 1, 4, max_ops=2, moments=1 + seed % 8) for seed in range(24))
    assert seen["wrong"] == 0
    assert seen["proven"] + seen["best"] + seen["worse"] >= 8, seen


@pytest.mark.parametrize("parameters", [{}, {"max_ops": 2, "moments": 3}])
def test_no_plan_is_faster_than_the_bound_where_ops_write_in_place(parameters):
    seen = Counter(beside_brute_force(seed, 1, 1, 4, in_place=True, **parameters) for seed in range(24))
    assert seen["wrong"] == 0
    assert seen["proven"] + seen["best"] + seen["worse"] >= 6, seen


@pytest.mark.parametrize("host", [0, 1000])
def test_without_a_link_the_bound_at_moments_is_below_checkmates_optimum(host):
    for budget, best in UNIT[8].items():
        result = told(uniform_chain(8), machine(budget, host=host, rate=None), max_ops=2, moments=16)
        assert 16 < result.plan.notes["makespan_bound_ns"] <= best or budget == 8


def test_a_faster_link_lowers_the_bound_at_moments_down_to_the_ops_alone():
    trace, bounds = uniform_chain(8, duration=1000), []
    for rate in (None, 10**5, 10**6, 5 * 10**6, NO_LIMIT_ON_THE_LINK):
        result = told(trace, machine(5, host=1000, rate=rate), max_ops=2, moments=8)
        bounds.append(result.plan.notes["makespan_bound_ns"])
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]
    assert bounds[-1] <= 16_000 + 8


def beside_all_schedules(seed: int, most: int) -> str:
    """How the plan for a small graph compares with the least time of any schedule, which no planner's code has found.

    most: states of that search.
    """
    draw, trace = random.Random(seed), small_graph(seed, 4)
    peak, size = home_peak(simulate(trace, machine()).log), trace.tensor_columns.bytes
    low = max(op.workspace + sum(int(size[t]) for t in {*op.reads, *op.writes}) for op in trace.ops)
    if low >= peak:
        return "nothing to decide"
    budget, rate = draw.randint(low, peak - 1), draw.choice((0, 10**8, 3 * 10**8, 10**9, 2 * 10**9, 5 * 10**9))
    platform = machine(budget, host=10_000, rate=rate or None)
    try:
        least = Least(trace, budget, rate).ns(most)
    except TooManyStates:
        return "too long"
    bound = lower_bound(trace, platform).makespan_ns
    try:
        end = told(trace, platform).log.end
    except Infeasible:
        return "none" if least is None else "refused"
    assert least is not None, "a plan fits where no schedule does"
    assert bound is not None
    assert bound <= least <= end
    return "least" if end == least else "worse"


def test_of_all_schedules_of_small_graphs_none_is_below_the_bound_and_few_are_faster():
    seen = Counter(beside_all_schedules(seed, 1000) for seed in range(20))
    assert seen["least"] >= 10, seen
    assert seen["worse"] + seen["refused"] <= 1, seen


@pytest.mark.slow
def test_of_all_schedules_of_more_graphs_none_is_below_the_bound_and_few_are_faster():
    seen = Counter(beside_all_schedules(seed, 3000) for seed in range(1000, 1500))
    assert seen["least"] >= 200, seen
    assert seen["worse"] + seen["refused"] <= 0.05 * seen.total(), seen


# ---- what it says ------------------------------------------------------------------------------


def test_comparisons_say_how_near_the_bound_a_run_is():
    found = compare(uniform_chain(6), machine(4, host=1000, rate=10**9), ["joint_optimal", "checkmate", "keep_all"])
    own = [line for line in found.bounds if not line.startswith("bound: ")]
    assert [line.partition(" among ")[0] for line in own] == [
        "joint_optimal: time: the least makespan proven possible",
        "checkmate: time: the least makespan proven possible",
    ]


def test_what_it_does_not_plan_for_is_refused_by_name():
    trace = uniform_chain(6)
    platform = machine(4, host=100)
    reaches = replace(platform, engines=(Engine("npu", 0, "hbm", ("hbm", "host"), {"fp32": 10**9}),))
    with pytest.raises(PolicyError, match="'npu' reads 'host' in place"):
        simulate(trace, reaches, "joint_optimal")
    with pytest.raises(Infeasible, match="no plan of this class fits 2 B; 3 B would do") as refused:
        simulate(trace, machine(2, host=100), "joint_optimal")
    assert refused.value.floor_bytes == 3


def test_its_own_limit_of_time_ends_before_that_of_the_law():
    """A program of nine ops can stay at its first node, which no limit of nodes ends."""
    assert JointOptimal().time_limit < SECONDS
