"""What an op adds where a CPU launches: sums beside the engine's makespan, slopes by running ops twice, and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from sim.engine.prepare import prepare
from sim.engine.replay import replay
from sim.experiment import Prices, problem_for
from sim.hardware.cost import op_times
from sim.hardware.dispatch import added
from sim.hardware.platform import Dispatch, Engine, Platform, Tier
from sim.hardware.profile import load_profile
from sim.plan import Plan, Recompute
from sim.policies import load
from sim.trace import Trace, TraceBuilder
from workloads import transformer

GB = 10**9
AMPLE = 1 << 40


def machine(forward: int, backward: int = 0, update: int = 0, once: int = 0) -> Platform:
    figures = Dispatch("eager", forward, backward or forward, update or forward, once)
    npu = Engine("npu", 0, "hbm", ("hbm",), {"fp32": GB})
    return Platform("drawn", (Tier("hbm", AMPLE, AMPLE, GB, device=0),), (npu,), dispatch=(figures,))


def chain(times: Sequence[int], phases: Sequence[str] = (), **meta: str) -> Trace:
    b = TraceBuilder(dict(meta))
    last = b.tensor("x", 10, "input")
    for i, ns in enumerate(times):
        new = b.tensor(f"y{i}", 10, "activation")
        b.op(f"op{i}", reads=[last], writes=[new], duration=ns, phase=phases[i] if phases else "forward")
        last = new
    return b.build(outputs=range(len(times) + 1))


@pytest.mark.parametrize("seed", range(60))
def test_what_ops_add_is_the_makespan(seed):
    draw = Random(seed)
    count = draw.randint(1, 40)
    first, second = sorted((draw.randint(0, count), draw.randint(0, count)))
    phases = ["forward"] * first + ["backward"] * (second - first) + ["update"] * (count - second)
    once, precision = draw.choice((0, 25)), draw.choice(("amp_fp16", "amp_bf16"))
    trace = chain([draw.choice((0, 1, 5, 20, 90)) for _ in range(count)], phases, precision=precision)
    platform = machine(*(draw.randint(1, 20) for _ in range(3)), once=once)
    waits = precision == "amp_fp16" and second == 0  # the count begins afresh, after `once`
    if not waits:
        assert int(added(trace, platform).sum()) + once == replay(Plan(trace), platform).end


@pytest.mark.parametrize("seed", range(20))
def test_no_op_adds_less_when_it_runs_twice(seed):
    """The makespan is convex in how often ops run, so that its slope is the least that one more run adds."""
    draw = Random(seed)
    times, launch = [draw.choice((0, 1, 5, 20, 90)) for _ in range(20)], draw.randint(1, 30)
    trace, platform = chain(times), machine(launch, once=draw.choice((0, 25)))
    adds, once = added(trace, platform).tolist(), replay(Plan(trace), platform).end
    critical = max(range(20), key=lambda r: launch * (r + 1) + sum(times[r:]))
    assert adds[critical] == launch + times[critical]
    for op in set(range(19)) - {critical}:
        twice = replay(Plan(trace, (Recompute(op, after=op),)), platform).end
        assert twice - once >= adds[op]


def test_where_the_cpu_sets_the_pace_an_op_adds_its_dispatch():
    """Each op of 3 ns is dispatched in 10; the last one adds its own time as well. One run more adds 10."""
    trace, platform = chain([3] * 5), machine(10)
    assert added(trace, platform).tolist() == [10, 10, 10, 10, 13]
    assert replay(Plan(trace, (Recompute(1, after=1),)), platform).end - replay(Plan(trace), platform).end == 10


def test_where_the_device_sets_it_an_op_adds_its_own_time():
    """Behind the first dispatch all others are hidden, also of ops that take less than their dispatch."""
    trace, platform = chain([30, 30, 3, 30]), machine(10)
    assert added(trace, platform).tolist() == [40, 30, 3, 30]
    assert replay(Plan(trace, (Recompute(2, after=2),)), platform).end - replay(Plan(trace), platform).end == 3


def test_a_loss_scale_parts_an_iteration():
    """Long ops hide their launches; the updates, before which the CPU waits for the device, hide none."""
    phases = ["forward", "backward", "update", "update"]
    trace = chain([50, 50, 2, 2], phases, precision="amp_fp16")
    assert added(trace, machine(10)).tolist() == [60, 50, 10, 12]


def test_without_a_cpu_that_launches_times_are_those_on_the_engine():
    trace, bare = chain([3] * 5), replace(machine(10), dispatch=())
    assert added(trace, bare).tolist() == op_times(trace, bare).total.tolist() == [3] * 5


def test_planners_see_what_an_op_adds():
    trace, platform = chain([3] * 5), machine(10)
    asked = problem_for(trace, platform)
    assert [asked.cost.op_ns(op) for op in range(5)] == [10, 10, 10, 10, 13]
    assert [asked.on_engines().cost.op_ns(op) for op in range(5)] == [3] * 5
    assert Prices(trace, replace(platform, dispatch=())).op_ns(0) == 3


SMALL = {
    "model_type": "gpt2", "n_layer": 6, "n_embd": 256, "n_head": 8, "n_positions": 1024, "vocab_size": 2000,
    "activation_function": "gelu_new",
}  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Trace:
    return transformer(SMALL, batch=2, sequence=512, precision="amp_bf16")


def test_a_planner_that_counts_launches_hides_more_copies(small):
    """The CPU leaves copies more time than ops take on the device: a plan that knows has fewer recomputations."""
    platform = load_profile("a100_40_pcie", overrides={"dispatch": "cpu"})
    ample = problem_for(small, platform).evaluate(Plan(small))
    static = int(small.tensor_columns.bytes[small.producer < 0].sum())
    peak = max(ample.change("delta").cumsum())
    asked = problem_for(small, platform.with_budget(static + (int(peak) - static) * 55 // 100))
    policy = load("hybrid")
    knows, blind = (asked.evaluate(policy.plan(problem)).end for problem in (asked, asked.on_engines()))
    assert knows < ample.end * 1.02 < blind


def test_a_captured_op_takes_no_longer_than_on_its_engine(small):
    """What a CPU takes to dispatch is not charged twice: as time of an op, and as its launch."""
    platform = load_profile("a100_40_pcie", overrides={"dispatch": "cpu"})
    plan = load("tso", capture=0, switch=0).plan(problem_for(small, platform.with_budget(10**9)))
    took = op_times(plan.trace, platform).total
    assert (took <= op_times(small, platform).total).all()
    assert (took < op_times(small, platform).total).any()


@pytest.mark.parametrize("name", ["checkmate", "joint_optimal"])
def test_nothing_is_proven_of_a_plan_whose_times_do_not_add_up(name):
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    last, made = x, []
    for i in range(4):
        new = b.tensor(f"y{i}", 10, "activation")
        b.op(f"f{i}", reads=[last], writes=[new], duration=3)
        made.append(last := new)
    grad = b.tensor("g", 1, "temporary")
    b.op("loss", reads=[last], writes=[grad], duration=3)
    for i in reversed(range(4)):
        new = b.tensor(f"g{i}", 1, "temporary")
        b.op(f"b{i}", phase="backward", reads=[grad, made[i]], writes=[new], duration=3)
        grad = new
    trace = b.build(outputs=[grad])
    tight = replace(machine(10), tiers=(Tier("hbm", 35, 35, GB, device=0),))
    launched, free = (load(name).plan(problem_for(trace, p)) for p in (tight, replace(tight, dispatch=())))
    assert launched.actions
    assert launched.notes["makespan_bound_ns"] is None
    assert launched.notes["status"] == "feasible"
    assert not launched.notes["optimal_among"]
    assert free.notes["status"] == "optimal"
    assert free.notes["makespan_bound_ns"]


def test_an_optimizer_that_reads_its_norms_parts_the_update_into_parameters():
    """Each update of Adafactor waits for the device, and so adds both: its launches and its own time."""
    trace = transformer(SMALL, batch=1, sequence=16, optimizer="adafactor")
    platform = load_profile("a100_40_pcie", overrides={"dispatch": "cpu"})
    launch = prepare(trace, platform).dispatch.each
    updates = [op.id for op in trace.ops if op.phase == "update"]
    own = op_times(trace, platform).total
    assert added(trace, platform)[updates].tolist() == (launch + own)[updates].tolist()
    assert int(added(trace, platform).sum()) == replay(Plan(trace), platform).end
