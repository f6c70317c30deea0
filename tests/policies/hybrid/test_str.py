"""STR (IPDPS 2022): Checkmate's program with host copies and bandwidth windows; rounding and source tracing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.analysis.peak_memory import home_peak
from sim.analysis.stalls import stalls
from sim.errors import Infeasible, PolicyError
from sim.experiment import Result, problem_for, reference_run, simulate
from sim.hardware.platform import Engine, Tier
from sim.log import WHY
from sim.policies.hybrid.joint_optimal.copies import Trip
from sim.policies.hybrid.str.tracing import Tracing
from sim.policies.hybrid.str.windows import windows_of
from sim.solvers.granularity import by_op
from sim.solvers.nodes import Nodes
from sim.solvers.schedule import TraceIndex
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, machine
from workloads import uniform_chain

CHAIN = uniform_chain(6, size=100, duration=10)
METHODS = pytest.mark.parametrize("method", ["milp", "rounding"])


def run(trace: Trace, budget: int, rate: int = GB, **parameters: Any) -> Result:
    result = simulate(trace, machine(budget, rate=rate), "str", **parameters)
    assert home_peak(result.log) <= budget
    # what has left is fetched because the plan says so: the engine has nothing to fetch or to recompute by itself
    assert result.log.counters["implicit_moves"] == result.log.counters["implicit_recomputes"] == 0
    return result


def copied(result: Result) -> int:
    return int((result.log.interval("why") == WHY["move"]).sum())


def nodes_of(trace: Trace) -> Nodes:
    return by_op(problem_for(trace, machine()), TraceIndex(trace), "str", apart=True)


# ---- limits of the bandwidth -----------------------------------------------------------------------


@pytest.mark.parametrize("budget", [300, 400, 500])
def test_a_link_that_carries_nothing_leaves_checkmate(budget):
    # a byte takes a second
    mine = run(CHAIN, budget, rate=1, method="milp")
    theirs = simulate(CHAIN, machine(budget, rate=1), "checkmate")
    assert copied(mine) == 0
    assert mine.log.end == theirs.log.end
    assert mine.plan.notes["rerun_ns"] == theirs.plan.notes["rerun_ns"] > 0


def test_without_a_host_it_is_checkmate():
    mine = simulate(CHAIN, machine(400, host=False), "str", method="milp")
    assert mine.log.end == simulate(CHAIN, machine(400, host=False), "checkmate").log.end


@METHODS
@pytest.mark.parametrize("budget", [300, 400, 500])
def test_a_link_of_any_bandwidth_leaves_no_recomputation(method, budget):
    result = run(CHAIN, budget, rate=10**18, method=method)
    assert result.plan.notes["rerun_ns"] == stalls(result.log).recompute_ns == 0
    assert copied(result) > 0
    # each copy takes a nanosecond, the least there is
    assert result.log.end <= reference_run(CHAIN, machine()).end + copied(result)


@METHODS
def test_where_all_fits_it_does_nothing(method):
    result = run(CHAIN, home_peak(reference_run(CHAIN, machine())), method=method)
    assert result.plan.actions == ()


@METHODS
@pytest.mark.parametrize("rate", [10**8, GB, 4 * GB, 10**10, 10**11])
def test_between_them_plans_fit(method, rate):
    for budget in (300, 400, 500):
        assert run(CHAIN, budget, rate=rate, method=method).log.complete


# ---- windows ---------------------------------------------------------------------------------------


def test_a_window_lasts_as_long_as_the_longest_copy():
    nodes = nodes_of(CHAIN)  # 12 ops of 10 ns
    assert [len(window) for window in windows_of(nodes, {0: Trip(25, 20)})] == [3, 3, 3, 3]
    assert [len(window) for window in windows_of(nodes, {0: Trip(10, 10)})] == [1] * 12
    assert [len(window) for window in windows_of(nodes, {0: Trip(10**9, 1)})] == [12]


# ---- source tracing --------------------------------------------------------------------------------


def line() -> Trace:
    """a -> b -> c, which only the last op reads, 10, 20 and 30 ns; between them one that reads nothing of these."""
    b = TraceBuilder()
    x, y, z, other = (b.tensor(name, 100) for name in "xyzo")
    b.op("f", writes=[x], duration=10)
    b.op("g", reads=[x], writes=[y], duration=20)
    b.op("h", reads=[y], writes=[z], duration=30)
    b.op("between", writes=[other], duration=40)
    b.op("last", reads=[other, z], duration=5)
    return b.build(outputs=[], carry=())


def test_a_missing_value_is_traced_to_its_sources():
    nodes = nodes_of(line())
    values = {line().tensors[value.tensors[0]].name: v for v, value in enumerate(nodes.values)}
    trips = {v: Trip(35, 35) for v in values.values()}
    last = 4

    def traced(kept: list[str], host: list[str], trips: dict[int, Trip] = trips) -> tuple[list[int], list[int]]:
        tracing = Tracing(nodes, trips, windows_of(nodes, {0: Trip(1, 1)}))
        stages = range(1, last + 1)
        resident = {(t, values[name]) for name in kept for t in stages}
        resident |= {(1, values["x"]), (2, values["y"]), (last, values["o"])}
        choice = tracing.choice(resident, {(t, values[name]) for name in host for t in stages})
        assert choice is not None
        assert all(one.due == last for one in choice.away)
        return [i for t, i in sorted(choice.reruns) if t == last], sorted(one.value for one in choice.away)

    # nothing kept: z needs h, g and f again; never from an x or a y that is not resident
    assert traced([], []) == ([0, 1, 2], [])
    assert traced(["x"], []) == ([1, 2], [])
    assert traced(["y"], []) == ([2], [])
    # z has a copy: 35 ns on a link that is free for 5, so 30 are exposed, as long as h: fetched
    assert traced(["y"], ["z"]) == ([], [values["z"]])
    slow = {v: Trip(36, 36) for v in values.values()}
    assert traced(["y"], ["z"], slow) == ([2], [])
    # without y, that is h and g, or all three
    assert traced([], ["z"], slow) == ([], [values["z"]])
    # only x has one: it is fetched if that exposes no more than f
    quick = {v: Trip(15, 15) for v in values.values()}
    assert traced([], ["x"], quick) == ([1, 2], [values["x"]])
    assert traced([], ["x"], {v: Trip(16, 16) for v in values.values()}) == ([0, 1, 2], [])


# ---- what it refuses -------------------------------------------------------------------------------


@METHODS
def test_too_little_memory_is_refused_with_a_budget_that_does(method):
    with pytest.raises(Infeasible, match="policy 'str': no plan was found that fits 199 B"):
        simulate(CHAIN, machine(199), "str", method=method)


def test_a_search_that_is_cut_short_finds_a_plan_or_says_so():
    try:
        said = run(CHAIN, 400, rate=1, method="milp", time_limit=1e-6).plan.notes["limit"]
    except PolicyError as error:
        said = str(error)
    assert said in ("", "time") or "found no plan before it met its limit of time" in said


def test_too_many_ops_and_several_devices_are_refused_by_name():
    with pytest.raises(PolicyError, match="policy 'str' plans op by op for 11 ops at most"):
        simulate(CHAIN, machine(400), "str", max_ops=11)
    b = TraceBuilder()
    for device in (0, 1):
        b.op(f"f{device}", writes=[b.tensor(f"x{device}", 8)], device=device, duration=1)
    trace, one = b.build(outputs=[], carry=()), machine(4)
    two = replace(
        one,
        tiers=(*one.tiers, Tier("hbm1", 4, 4, GB, device=1)),
        engines=(*one.engines, Engine("npu1", 1, "hbm1", ("hbm1",), {"fp32": GB})),
    )
    with pytest.raises(PolicyError, match="policy 'str' plans for one device; this trace has 2"):
        simulate(trace, two, "str")


def test_ops_in_place_run():
    b = TraceBuilder()
    x, y, z, wide = b.tensor("x", 100), b.tensor("y", 100), b.tensor("z", 100), b.tensor("wide", 200)
    b.take_over(y, x)
    b.op("f", writes=[x], duration=10)
    b.op("in place", reads=[x], writes=[y], duration=10)
    b.op("g", reads=[y], writes=[z], duration=10)
    b.op("make_wide", writes=[wide], duration=10)
    b.op("use_wide", reads=[wide], duration=10)
    b.op("last", reads=[y, z], duration=10)
    trace = b.build(outputs=[], carry=())
    for rate in (1, 10**18):
        for method in ("milp", "rounding"):
            assert run(trace, 300, rate=rate, method=method).log.complete
