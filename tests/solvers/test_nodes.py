"""What solvers are told of a trace, against every schedule of small graphs, and what of a part may be recomputed."""

from __future__ import annotations

import random
from itertools import chain, combinations, product

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sim.errors import Infeasible
from sim.experiment import problem_for, simulate
from sim.hardware.platform import Allocator, Engine, Platform, Tier
from sim.hardware.profile import load_profile
from sim.solvers.granularity import by_op, by_stage
from sim.solvers.milp import Program
from sim.solvers.nodes import counts_all, nodes_of
from sim.solvers.rounding import fewest_reruns
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace, TraceBuilder
from tests.machines import machine
from workloads import cnn
from workloads.synthetic import uniform_chain

Drawn = list[tuple[tuple[int, ...], int, int, int]]
"""Per op which earlier ops it reads, the bytes of its result, its workspace, its time."""


def drawn(seed: int, count: int = 5) -> Drawn:
    """A small graph; each op reads one to three earlier results. Times differ by less than a solver is let off."""
    draw = random.Random(seed)
    ops: Drawn = []
    for i in range(count):
        reads = tuple(sorted(draw.sample(range(i), min(i, draw.randint(1, 3)))))
        ops.append((reads, draw.randint(0, 5), draw.choice((0, 0, 2)), draw.choice((1, 300, 301, 302))))
    return ops


def built(ops: Drawn, statistics: int | None) -> Trace:
    """The same as a trace. Op `statistics`, if any, also renews an input of 3 bytes in place."""
    b = TraceBuilder({"model": "drawn"})
    x, running = b.tensor("x", 2, "input"), b.tensor("running", 3, "weight")
    results: list[int] = []
    outputs = []
    for i, (reads, size, workspace, took) in enumerate(ops):
        results.append(b.tensor(f"t{i}", size))
        read, write = [results[r] for r in reads] or [x], [results[i]]
        if i == statistics:
            outputs = [b.tensor("running.new", 3, "weight", replaces=running)]
            read, write = [*read, running], [*write, *outputs]
        b.op(f"o{i}", reads=read, writes=write, workspace=workspace, duration=took)
    return b.build(outputs=(results[-1], *outputs), carry=())


def all_schedules(ops: Drawn, statistics: int | None) -> list[tuple[int, int]]:
    """Peak and time of every schedule that, before each op, runs some earlier ones again in order."""
    stages = []
    for t in range(len(ops)):
        earlier = [i for i in range(t) if i != statistics]
        stages.append(list(chain.from_iterable(combinations(earlier, k) for k in range(len(earlier) + 1))))
    found = []
    for choice in product(*stages):
        steps = [op for t, again in enumerate(choice) for op in (*again, t)]
        found.append((peak_of(ops, steps), sum(ops[op][3] for op in steps)))
    return found


def peak_of(ops: Drawn, steps: list[int]) -> int:
    """A result is resident from the step that produces it to the last that reads it before it is recomputed."""
    held = [5 + ops[op][2] for op in steps]  # two inputs of 5 bytes, workspace
    last_op = len(ops) - 1
    for op, (_, size, _, _) in enumerate(ops):
        makes = [s for s, one in enumerate(steps) if one == op]
        for made, follower in zip(makes, [*makes[1:], len(steps)], strict=True):
            reads = [s for s in range(made, follower) if op in ops[steps[s]][0]]
            until = len(steps) - 1 if op == last_op else max(reads, default=made)
            for s in range(made, until + 1):
                held[s] += size
    return max(held)


def within(budget: int) -> Platform:
    tier = Tier("hbm", budget, budget, 10**9, device=0)
    return Platform("toy", (tier,), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}),), ())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), statistics=st.none() | st.integers(1, 4), less=st.integers(0, 6))
@example(seed=3, statistics=1, less=1)
@example(seed=0, statistics=2, less=0)
def test_checkmate_finds_the_best_of_all_schedules_where_an_input_is_renewed_in_place(seed, statistics, less):
    ops = drawn(seed)
    trace, schedules = built(ops, statistics), all_schedules(ops, statistics)
    plain = peak_of(ops, list(range(len(ops))))
    assert schedule_of(TraceIndex(trace), {}).peak() == plain
    budget = plain - less
    best = min((time for peak, time in schedules if peak <= budget), default=None)
    if best is None:
        with pytest.raises(Infeasible, match="no plan of this class fits") as refused:
            simulate(trace, within(budget), "checkmate")
        least, floor = min(peak for peak, _ in schedules), refused.value.floor_bytes
        assert floor == least if "is the smallest budget" in str(refused.value) else (floor or 0) >= least
        return
    result = simulate(trace, within(budget), "checkmate")
    assert result.log.end == best
    assert result.plan.notes["status"] == "optimal"
    assert result.plan.notes["rerun_ns"] == best - sum(took for *_, took in ops)


@pytest.mark.parametrize("seed", range(12))
def test_rounding_runs_again_what_the_published_conditions_ask_for_and_no_more(seed):
    # S[t + 1, i] <= S[t, i] + R[t, i] and R[t, j] <= R[t, i] + S[t, i] for each edge, R[t, t] = 1, S given
    ops = drawn(seed)
    draw, count = random.Random(seed), len(ops)
    trace = built(ops, None)
    nodes = by_op(problem_for(trace, within(1000)), TraceIndex(trace), "test")
    index = {value.producer: v for v, value in enumerate(nodes.values)}
    for _ in range(20):
        there = [[i in index and i < t and draw.random() < 0.4 for i in range(count)] for t in range(count)]
        there.append([nodes.values[index[i]].end if i in index else False for i in range(count)])
        best = None
        for again in product(*(list(_subsets(range(t))) for t in range(count))):
            run = [{*stage, t} for t, stage in enumerate(again)]
            follows = all(
                there[t][i] or i in run[t] for t in range(count) for i in range(count) if there[t + 1][i]
            ) and all(there[t][i] or i in run[t] for t in range(count) for j in run[t] for i in ops[j][0])
            if follows and (best is None or sum(map(len, run)) < sum(map(len, best))):
                best = run
        found = fewest_reruns(nodes, [(t, index[i]) for t in range(count) for i in range(count) if there[t][i]])
        assert best is not None
        assert found == [sorted(stage - {t}) for t, stage in enumerate(best)]


def _subsets(items: range) -> chain[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))


def test_a_renewed_input_counts_once():
    ops: Drawn = [((), 4, 0, 1), ((0,), 4, 0, 1), ((1,), 4, 0, 1)]
    trace = built(ops, 1)
    trace_index, peak = TraceIndex(trace), peak_of(ops, [0, 1, 2])
    nodes = by_op(problem_for(trace, within(peak)), trace_index, "test")
    assert counts_all(trace_index, 3)
    assert nodes.outside == 5
    assert all(value.size == 4 for value in nodes.values)
    relaxed = Program(nodes, peak - nodes.outside).relax()
    assert relaxed is not None
    assert relaxed.bound == 0
    assert Program(nodes, peak - 1 - nodes.outside).minimise(node_limit=100, time_limit=60).status == "infeasible"


def two_blocks(*, joined: bool) -> tuple[Trace, list[list[int]]]:
    """Two layers and their backward, one part each; an op of each layer renews an input in place.

    joined: that op also makes what the next one of its layer reads, as one op of the frameworks does.
    """
    b = TraceBuilder({"model": "two blocks"})
    reads, wides, outputs = b.tensor("x", 1, "input"), [], []
    for i in range(2):
        running = b.tensor(f"running{i}", 1, "weight")
        wide, mean, out = (b.tensor(f"{name}{i}", size) for name, size in (("wide", 8), ("mean", 2), ("out", 4)))
        renewed = b.tensor(f"running{i}.new", 1, "weight", replaces=running)
        b.op(f"conv{i}", reads=[reads], writes=[wide], duration=5)
        if joined:
            b.op(f"norm{i}", reads=[wide, running], writes=[mean, renewed], duration=1)
        else:
            b.op(f"norm{i}", reads=[wide], writes=[mean], duration=1)
            b.op(f"renew{i}", reads=[mean, running], writes=[renewed], duration=1)
        b.op(f"apply{i}", reads=[wide, mean], writes=[out], duration=1)
        reads = out
        wides.append(wide)
        outputs.append(renewed)
    for i in (1, 0):
        grad = b.tensor(f"grad{i}", 1)
        b.op(f"back{i}", phase="backward", reads=[reads, wides[i]], writes=[grad], duration=1)
        reads = grad
    n = 3 if joined else 4
    return b.build(outputs=(reads, *outputs), carry=()), [[*range(n)], [*range(n, 2 * n)], [2 * n], [2 * n + 1]]


@pytest.mark.parametrize("joined", [False, True])
def test_a_part_runs_again_without_its_op_that_renews_an_input(joined):
    trace, parts = two_blocks(joined=joined)
    trace_index = TraceIndex(trace)
    nodes = nodes_of(problem_for(trace, within(1000)), trace_index, parts)
    names = [[trace.ops[op].name for op in again] for again in nodes.repeats]
    assert names[0] == (["conv0", "apply0"] if joined else ["conv0", "norm0", "apply0"])
    assert nodes.last_rerun == [3, 3, 3, 3]
    assert nodes.cost[0] == (6 if joined else 7)
    own = [value for value in nodes.values if value.once]
    assert [(value.producer, value.readers, value.size) for value in own] == (
        [(0, (0,), 2), (1, (1,), 2)] if joined else []
    )
    # the wide result of the first layer is recomputed for its backward; what only one run produces stays for that
    least = None
    for room in range(10, 40):
        answer = Program(nodes, room).minimise(node_limit=1000, time_limit=60)
        if answer.status == "optimal":
            found = schedule_of(trace_index, nodes.reruns(answer.stages), prune=True)
            assert found.peak() <= room + nodes.outside
            assert found.rerun_count() > 0 or answer.bound == 0
            assert not {op for op, anchor in found.steps if anchor >= 0} & {1 if joined else 2}
            least = least or (room, answer.bound, found.rerun_count())
    whole = schedule_of(trace_index, {}).peak() - nodes.outside
    assert least is not None
    assert least[0] < whole
    assert least[1:] == (nodes.cost[0], 1)  # a part is reckoned whole, but nothing reads more of it than conv0 makes
    assert fewest_reruns(nodes, []) is not None


@pytest.mark.parametrize("name", ["checkmate", "moccasin"])
def test_a_convolutional_network_is_planned_by_stage_with_batch_norm_recomputed_and_its_statistics_not(name):
    if name == "moccasin":
        pytest.importorskip("ortools", reason="the extra `solvers` is not installed")
    trace, card = cnn("resnet-50", 8), load_profile("a100_40_pcie")
    trace_index = TraceIndex(trace)
    budget = int(0.7 * schedule_of(trace_index, {}).peak())
    parameters = {"checkmate": {"method": "rounding"}, "moccasin": {"work_limit": 2.0}}[name]
    result = simulate(trace, card, name, budget=budget, granularity="stage", max_ops=60, **parameters)
    again = {trace.ops[trace.op_id(action.op)].name for action in result.plan.actions if hasattr(action, "op")}
    assert any(name.endswith(".norm") for name in again)
    assert any(name.endswith(".conv") for name in again)
    assert not any(name.endswith(".statistics") for name in again)
    assert result.summary()["peak_bytes"] <= budget


def test_by_stage_every_part_of_a_forward_with_batch_norm_may_run_again():
    trace = cnn("resnet-50", 2)
    trace_index = TraceIndex(trace)
    nodes = by_stage(problem_for(trace, load_profile("a100_40_pcie")), trace_index, "test", 200)
    forward = [i for i, part in enumerate(nodes.members) if trace.ops[part[0]].phase == "forward"]
    assert all(nodes.last_rerun[i] > i for i in forward[:-1])
    barred = {op.id for op in trace.ops if op.name.endswith(".statistics")}
    assert barred
    assert barred.isdisjoint(op for again in nodes.repeats for op in again)


@pytest.mark.parametrize("name", ["rotor", "checkmate", "twremat", "hybrid"])
def test_where_memory_has_addresses_no_budget_is_promised(name):
    least = {}
    for allocator in ("exact", "pool"):
        platform = machine(host=1 << 40, allocator=Allocator(allocator))
        with pytest.raises(Infeasible) as refused:
            simulate(uniform_chain(8, size=100, duration=100), platform, name, budget=150)
        least[allocator] = refused.value.floor_bytes
        assert ("without fragmentation" in str(refused.value)) == (allocator == "pool")
    assert least["exact"] > 150
    assert least["pool"] is None
