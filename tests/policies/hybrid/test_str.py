"""STR (IPDPS 2022): Checkmate's program with host copies and bandwidth windows; rounding and source tracing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize

from sim.analysis.peak_memory import home_peak
from sim.analysis.stalls import stalls
from sim.errors import Infeasible, PolicyError
from sim.experiment import Result, problem_for, reference_run, simulate
from sim.hardware.platform import Engine, Tier
from sim.log import WHY
from sim.policies.hybrid.str.tracing import Tracing
from sim.policies.hybrid.str.windows import Windows, windows_of
from sim.solvers.granularity import by_op
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes
from sim.solvers.schedule import TraceIndex
from sim.solvers.trip import Trip
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


# ---- the program, written again --------------------------------------------------------------------


@st.composite
def drawn_steps(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Per forward op its time, bytes, and how far back a second operand lies (0 for none); times of backward ops."""
    count = draw(st.integers(2, 4))
    steps = [(draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(0, 2))) for _ in range(count)]
    return steps, [draw(st.integers(1, 9)) for _ in range(count)]


def net_of(steps: list[tuple[int, int, int]], backward: list[int]) -> Trace:
    """Forward ops of one result each, and a backward that reads each op's operands and the last gradient."""
    b = TraceBuilder()
    x: list[int] = []
    reads: list[list[int]] = []
    for i, (ns, bytes, back) in enumerate(steps):
        reads.append(sorted({*x[-1:], *(x[-1 - back : -back] if 0 < back < len(x) else [])}))
        x.append(b.tensor(f"x{i}", bytes))
        b.op(f"f{i}", reads=reads[i], writes=[x[i]], duration=ns)
    gradient: list[int] = []
    for i in reversed(range(len(steps))):
        made = b.tensor(f"d{i}", steps[i][1], "temporary")
        b.op(f"b{i}", reads=[*gradient, *(reads[i] or x[:1])], writes=[made], phase="backward", duration=backward[i])
        gradient = [made]
    return b.build(outputs=[], carry=())


def written_again(trace: Trace, budget: int, rate_ns: int) -> float | None:
    """The least recomputation and waiting, by rows over R, S, copies out and in, and the memory of each moment.

    rate_ns: ns per byte of each direction. Nothing here is taken from the package's own program.
    """
    n = len(trace.ops)
    made_by = {t: op.id for op in trace.ops for t in op.writes}
    size = {t: trace.tensors[t].bytes for t in made_by}
    cost = [op.duration or 0 for op in trace.ops]
    values = [t for t in made_by if any(t in op.reads for op in trace.ops)]
    low: list[float] = []
    high: list[float] = []
    price: list[float] = []
    whole: list[int] = []
    rows: list[tuple[dict[int, float], float, float]] = []

    def column(least: float = 0, most: float = 1, cost: float = 0, integer: bool = True) -> int:
        low.append(least), high.append(most), price.append(cost), whole.append(int(integer))
        return len(low) - 1

    def row(terms: list[tuple[int, float]], least: float = -np.inf, most: float = np.inf) -> None:
        total: dict[int, float] = {}
        for c, f in terms:
            total[c] = total.get(c, 0.0) + f
        rows.append((total, least, most))

    R = {(t, i): column(float(i == t), 1, 0 if i == t else cost[i]) for t in range(n) for i in range(t + 1)}
    S = {(t, v): column() for v in values for t in range(made_by[v] + 1, n)}
    out, into = {key: column() for key in S}, {key: column() for key in S}
    longest = max(size[v] for v in values) * rate_ns
    windows, now = [[0]], cost[0]
    for t in range(1, n):
        if now >= min(longest, sum(cost)):
            windows.append([])
            now = 0
        windows[-1].append(t)
        now += cost[t]
    window = {t: each for each in windows for t in each}
    for t, v in S:
        start = [(S[t, v], 1.0), (into[t, v], 1.0)]
        again = [(R[t, made_by[v]], 1.0)]
        row([*start, *again, (out[t, v], -1.0)], least=0)
        if (t + 1, v) in S:
            row([*start, *again, (S[t + 1, v], -1.0)], least=0)
        row([*((out[s, v], 1.0) for s, other in out if other == v and s < t), (into[t, v], -1.0)], least=0)
    for v in values:
        first = made_by[v]
        if (first + 1, v) in S:
            row([(R[first, first], 1.0), (S[first + 1, v], -1.0)], least=0)
        row([(c, 1.0) for (_, other), c in out.items() if other == v], most=1)
    for t, k in R:
        for v in trace.ops[k].reads:
            has = [(S[t, v], 1.0), (into[t, v], 1.0)] if (t, v) in S else []
            row([*has, (R[t, made_by[v]], 1.0), (R[t, k], -1.0)], least=0)
    for each in windows:
        waits = [(column(0, np.inf, 1, False), -1.0)]
        again = [(R[t, i], -float(cost[i])) for t in each for i in range(t)]
        for way in (out, into):
            row(
                [*((way[t, v], float(size[v] * rate_ns)) for t, v in way if t in each), *again, *waits],
                most=sum(cost[t] for t in each),
            )
    # what is held while op k of stage t runs: what existed at the start, or has been produced, and is read later
    for t in range(n):
        for k in range(t + 1):
            held: list[tuple[int, float]] = [(R[t, k], float(size[w])) for w in trace.ops[k].writes]
            for v in values:
                p = made_by[v]
                if p > t or p == k:
                    continue
                inside = window[t]
                arriving = [into[s, v] for s in inside if s > t and (s, v) in into]
                held += [(c, float(size[v])) for c in arriving]
                start = [c for c in (S.get((t, v)), into.get((t, v))) if c is not None]
                start += [R[t, p]] if p < k else []
                wanted = [R[t, i] for i in range(k, t + 1) if v in trace.ops[i].reads]
                wanted += [out[s, v] for s in inside if s <= t and (s, v) in out]
                wanted += [S[t + 1, v]] if (t + 1, v) in S else []
                if k == 0:  # what a stage begins with is held at first, wanted or not
                    wanted += [R[t, t]]
                resident = column(integer=False)
                held.append((resident, float(size[v])))
                for a, b in itertools.product(start, wanted):
                    row([(resident, -1.0), (a, 1.0), (b, 1.0)], most=1)
            row(held, most=budget)
    matrix = np.zeros((len(rows), len(low)))
    for i, (terms, _, _) in enumerate(rows):
        for c, f in terms.items():
            matrix[i, c] = f
    limits = optimize.LinearConstraint(matrix, [each[1] for each in rows], [each[2] for each in rows])
    found = optimize.milp(price, constraints=limits, bounds=optimize.Bounds(low, high), integrality=whole)
    return None if found.x is None else float(found.fun)


@settings(max_examples=10, deadline=None)
@example(([(2, 2, 0), (5, 3, 0), (3, 2, 2)], [2, 3, 2]), 0, 2)
@given(drawn_steps(), st.integers(0, 6), st.integers(1, 4))
def test_the_program_finds_what_its_rows_written_again_find(drawn, spare, rate_ns):
    trace = net_of(*drawn)
    budget = max(sum(trace.tensors[t].bytes for t in {*op.reads, *op.writes}) for op in trace.ops) + spare
    nodes = nodes_of(trace)
    trips = {v: Trip(value.size * rate_ns, value.size * rate_ns) for v, value in enumerate(nodes.values)}
    answer = Program(nodes, budget, elsewhere=Windows(nodes, trips)).minimise(node_limit=10**6, time_limit=60.0)
    least = written_again(trace, budget, rate_ns)
    assert (answer.status == "infeasible") == (least is None)
    if least is not None:
        assert abs(answer.bound - least) <= 1
