"""The CPU that launches runs ahead: closed forms, timelines drawn by hand, brute force, and the paths of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from sim.analysis.stalls import stalls
from sim.conformance.ledger import Ledger
from sim.conformance.rates import check_rates
from sim.conformance.replayed import LawBroken
from sim.engine import array_path
from sim.engine.event_path.waits import Waits
from sim.engine.prepare import prepare
from sim.engine.replay import replay
from sim.engine.resolve import Resolved
from sim.hardware.platform import Dispatch, Engine, Link, Platform, Tier
from sim.log import STALL, WHY
from sim.plan import Drop, Move, Plan, Recompute, Wait
from sim.trace import Trace, TraceBuilder
from tests.engine.differential import difference
from tests.engine.random_problems import Problem, problem

GB = 10**9
AMPLE = 1 << 40
HOME, HOST = Tier("hbm", AMPLE, AMPLE, GB, device=0), Tier("host", AMPLE, AMPLE, GB, kind="ddr")
NPU = Engine("npu", 0, "hbm", ("hbm",), {"fp32": GB})
CPU = Engine("cpu", -1, "hbm", ("hbm",), {"fp32": GB}, main=False)
LINKS = (Link("d2h", "hbm", "host", GB), Link("h2d", "host", "hbm", GB))


def machine(*dispatch: Dispatch) -> Platform:
    return Platform("drawn", (HOME, HOST), (NPU, CPU), LINKS, dispatch=dispatch)


def each(ns: int, once: int = 0, stack: str = "eager") -> Dispatch:
    return Dispatch(stack, ns, ns, ns, once)


def chain(times: Sequence[int], phases: Sequence[str] = (), engines: Sequence[str] = (), **meta: str) -> Trace:
    """Ops of so many ns, each reading the result of the one before."""
    b = TraceBuilder(dict(meta))
    last = b.tensor("x", 10, "input")
    for i, ns in enumerate(times):
        new = b.tensor(f"y{i}", 10, "activation")
        phase = phases[i] if phases else "forward"
        engine = engines[i] if engines else ""
        b.op(f"op{i}", "matmul", reads=[last], writes=[new], flops=1, duration=ns, phase=phase, engine=engine)
        last = new
    return b.build(outputs=[last])


def runs(plan: Plan, platform: Platform) -> list[tuple[str, int, int]]:
    """(what, start, end) on the main lane; both paths and the reference agree on it."""
    assert difference(plan, platform) == ""
    assert replay(plan, platform) == replay(plan, platform, fast=False)
    names = plan.trace.op_columns.name
    rows = replay(plan, platform).intervals.tolist()
    return [
        (("wait " if why == WHY["stall"] else "") + names[op], start, end)
        for start, end, _, lane, why, op, *_ in rows
        if lane == 0
    ]


def makespan(trace: Trace, platform: Platform) -> int:
    return replay(Plan(trace), platform).end


# ---- closed forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 50])
def test_short_ops_take_the_time_of_their_dispatch(count):
    """n ops of 3 ns, each dispatched in 10: 10 n + 3."""
    assert makespan(chain([3] * count), machine(each(10))) == 10 * count + 3


@pytest.mark.parametrize("count", [1, 2, 50])
def test_behind_long_ops_all_dispatch_but_the_first_is_hidden(count):
    """n ops of 30 ns, each dispatched in 10: 10 + 30 n."""
    assert makespan(chain([30] * count), machine(each(10))) == 10 + 30 * count


def test_the_cpu_runs_ahead_behind_a_long_op():
    """Dispatched at 10, 20, 30, 40, 50; the first runs till 35, which hides two; the last wait for the CPU again.

    cpu     0 ..10 ..20 ..30 ..40 ..50
    npu           [0: 10-35][1 35-37][2 37-39] 40 [3 40-42] 50 [4 50-52]
    """
    assert runs(Plan(chain([25, 2, 2, 2, 2])), machine(each(10))) == [
        ("wait op0", 0, 10),
        ("op0", 10, 35),
        ("op1", 35, 37),
        ("op2", 37, 39),
        ("wait op3", 39, 40),
        ("op3", 40, 42),
        ("wait op4", 42, 50),
        ("op4", 50, 52),
    ]


def test_the_wait_is_a_stall_of_its_own_cause():
    log = replay(Plan(chain([3] * 5)), machine(each(10)))
    assert stalls(log).by_cause == {"launch": 10 + 4 * 7}


def test_each_phase_has_its_own_dispatch():
    trace = chain([1, 1, 1], ["forward", "backward", "update"])
    assert makespan(trace, machine(Dispatch("eager", 10, 20, 40))) == 10 + 20 + 40 + 1


def test_an_iteration_may_have_a_start_of_its_own():
    assert makespan(chain([1, 1]), machine(each(10, once=100))) == 100 + 10 + 10 + 1


def test_a_trace_has_the_dispatch_of_its_stack_else_the_eager_one():
    platform = machine(each(10), each(2, stack="compiled"))
    assert makespan(chain([1], stack="compiled"), platform) == 2 + 1
    assert makespan(chain([1], stack="fused"), platform) == 10 + 1
    assert makespan(chain([1]), platform) == 10 + 1


def test_a_machine_without_it_never_waits():
    assert makespan(chain([3] * 50), machine()) == 150


def test_what_the_host_itself_runs_is_not_dispatched():
    """The second op is a call on the CPU's own engine; the third, dispatched at 20, waits for its result."""
    trace = chain([5, 5, 5], engines=["", "cpu", ""])
    assert makespan(trace, machine(each(10))) == 10 + 5 + 5 + 5


# ---- synchronization ---------------------------------------------------------------------------


def test_a_loss_scale_makes_the_cpu_wait_before_the_update():
    """Dispatched at 10 and 20; the device ends at 110; only then are the updates dispatched, at 120 and 130."""
    times, phases = [50, 50, 1, 1], ["forward", "backward", "update", "update"]
    assert runs(Plan(chain(times, phases, precision="amp_fp16")), machine(each(10))) == [
        ("wait op0", 0, 10),
        ("op0", 10, 60),
        ("op1", 60, 110),
        ("wait op2", 110, 120),
        ("op2", 120, 121),
        ("wait op3", 121, 130),
        ("op3", 130, 131),
    ]
    assert makespan(chain(times, phases, precision="amp_bf16"), machine(each(10))) == 112


def test_a_graph_waits_for_nothing():
    graph = replace(each(0, once=10), is_graph=True)
    times, phases = [50, 50, 1, 1], ["forward", "backward", "update", "update"]
    assert makespan(chain(times, phases, precision="amp_fp16"), machine(graph)) == 10 + 102


# ---- plans -------------------------------------------------------------------------------------


def test_a_recomputed_op_is_dispatched_once_more_in_its_place():
    """op0 is dropped after op1 and recomputed before op2: dispatched at 10, 20, 30 (again) and 40.

    Where op2 finds that its read is missing, it has been dispatched itself before that is recomputed.
    """
    b = TraceBuilder()
    x, a = b.tensor("x", 10, "input"), b.tensor("a", 10, "activation")
    y, z = b.tensor("y", 10, "activation"), b.tensor("z", 10, "activation")
    b.op("op0", "matmul", reads=[x], writes=[a], flops=1, duration=3)
    b.op("op1", "matmul", reads=[a], writes=[y], flops=1, duration=3)
    b.op("op2", "matmul", reads=[a, y], writes=[z], flops=1, duration=3)
    trace = b.build(outputs=[z])
    planned = Plan(trace, (Drop(a, after=1), Recompute(0, before=2)))
    implicit = Plan(trace, (Drop(a, after=1),))
    assert runs(planned, machine(each(10)))[-4:] == [
        ("wait op0", 23, 30),
        ("op0", 30, 33),
        ("wait op2", 33, 40),
        ("op2", 40, 43),
    ]
    assert makespan_of(implicit, machine(each(10))) == 40 + 3 + 3


def makespan_of(plan: Plan, platform: Platform) -> int:
    assert difference(plan, platform) == ""
    return replay(plan, platform).end


def test_a_copy_does_not_wait_for_the_dispatch_of_the_op_after_its_anchor():
    """The move before op1 begins when op0 has ended, at 11, though op1 is dispatched at 20 only."""
    plan = Plan(chain([1, 1]), (Move(0, "host", before=1),))
    log = replay(plan, machine(each(10)))
    moves = log.intervals[log.interval("why") == WHY["move"]]
    assert moves[:, :2].tolist() == [[11, 21]]


def test_what_waits_for_a_copy_has_been_dispatched_meanwhile():
    """op1 reads what returns at 10 + 1 + 2 · 10; it is dispatched at 20, so that nothing waits for the CPU then."""
    trace = chain([1, 1])
    plan = Plan(trace, (Move(1, "host", after=0), Wait(1, before=1)))
    assert difference(plan, machine(each(10))) == ""
    assert makespan_of(plan, machine(each(10))) == 10 + 1 + 10 + 10 + 1


# ---- brute force -------------------------------------------------------------------------------


def by_hand(times: Sequence[int], dispatch: Sequence[int], synchronized: Sequence[int] = ()) -> list[int]:
    """When each op starts: the recurrence, one op after the other."""
    cpu = device = 0
    starts = []
    for i, (ns, cost) in enumerate(zip(times, dispatch)):
        cpu = max(cpu, device) + cost if i in synchronized else cpu + cost
        starts.append(max(cpu, device))
        device = starts[-1] + ns
    return starts


@pytest.mark.parametrize("seed", range(30))
def test_starts_are_those_of_the_recurrence(seed):
    draw = Random(seed)
    count = draw.randint(1, 40)
    times = [draw.choice((0, 1, 5, 20, 90)) for _ in range(count)]
    first, second = sorted((draw.randint(0, count), draw.randint(0, count)))
    phases = ["forward"] * first + ["backward"] * (second - first) + ["update"] * (count - second)
    figures = Dispatch("eager", draw.randint(0, 20), draw.randint(0, 20), draw.randint(0, 20))
    precision = draw.choice(("amp_fp16", "amp_bf16"))
    plan = Plan(chain(times, phases, precision=precision))
    log = replay(plan, machine(figures))
    starts = log.intervals[log.interval("why") != WHY["stall"], 0].tolist()
    cost = [getattr(figures, phase) for phase in phases]
    assert starts == by_hand(times, cost, [second] if precision == "amp_fp16" else [])
    assert log == replay(plan, machine(figures), fast=False)


@pytest.mark.parametrize("seed", range(10))
def test_a_slower_cpu_is_never_faster(seed):
    draw = Random(seed)
    trace = chain([draw.choice((0, 1, 5, 20, 90)) for _ in range(40)])
    spans = [makespan(trace, machine(each(ns))) for ns in range(30)]
    assert spans == sorted(spans)
    assert makespan(trace, machine()) == spans[0]


# ---- the paths of the engine -------------------------------------------------------------------


def launched(case: Problem, seed: int) -> Problem:
    """The same problem with a CPU that launches, and now and then a loss scale and updates at the end."""
    draw = Random(seed)
    figures = Dispatch("eager", *(draw.choice((0, 3, 10, 40)) for _ in range(3)), once=draw.choice((0, 25)))
    trace, plan = case.plan.trace, case.plan
    if draw.random() < 0.4:
        phase = trace.op_columns.phase.copy()
        phase[draw.randrange(len(phase)) :] = 2
        ops = replace(trace.op_columns, phase=phase)
        meta = {"precision": "amp_fp16"}
        trace = Trace(trace.tensor_columns, ops, outputs=trace.outputs, carry=trace.carry, meta=meta)
    plan = replace(plan, trace=trace)
    return Problem(plan, replace(case.platform, dispatch=(figures,)))


def differing(first: int, count: int) -> list[str]:
    found = []
    for seed in range(first, first + count):
        case = launched(problem(seed), seed)
        for fast in (True, False):
            if where := difference(case.plan, case.platform, fast=fast):
                found.append(f"problem {seed}: {where}")
    return found


@pytest.mark.parametrize("part", range(4))
def test_engine_and_reference_agree_where_a_cpu_launches(part):
    assert differing(part * 60, 60) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_they_agree_on_thousands_of_problems_where_a_cpu_launches():
    assert differing(400, 3000) == []


def test_a_cpu_that_runs_no_op_late_changes_no_start():
    """Dispatch of 0 ns: the log is that of a machine without it."""
    for seed in range(40):
        case = problem(seed)
        free = replace(case.platform, dispatch=(each(0),))
        try:
            plain = replay(case.plan, case.platform)
        except Exception as error:  # refused either way
            with pytest.raises(type(error)):
                replay(case.plan, free)
            continue
        assert np.array_equal(plain.intervals, replay(case.plan, free).intervals)


def test_the_array_path_covers_it():
    plan, platform = Plan(chain([3] * 20)), machine(each(10))
    prepared = prepare(plan.trace, platform)
    resolved = Resolved(plan, platform, prepared)
    assert array_path.covers(plan, platform, prepared, resolved)
    assert array_path.run(plan, platform, prepared, resolved, None) == replay(plan, platform, fast=False)


def test_a_forgotten_dispatch_of_recomputations_is_found(monkeypatch):
    """The fault planted: the event path dispatches first runs alone."""
    launch = Waits.launch

    def forgetful(self: Waits, op: int):
        seen = vars(self).setdefault("seen", set())
        if op in seen:
            return iter(())
        seen.add(op)
        return launch(self, op)

    monkeypatch.setattr(Waits, "launch", forgetful)
    assert differing(0, 60) != []


def test_the_law_finds_what_begins_before_it_is_dispatched(monkeypatch):
    """The fault planted: recomputations are not dispatched. Law 4 says so, and is content without the fault."""
    b = TraceBuilder()
    x, a, y, z = (b.tensor(name, 10, "activation" if name != "x" else "input") for name in "xayz")
    b.op("op0", "matmul", reads=[x], writes=[a], flops=1, duration=3)
    b.op("op1", "matmul", reads=[a], writes=[y], flops=1, duration=3)
    b.op("op2", "matmul", reads=[a, y], writes=[z], flops=1, duration=3)
    trace = b.build(outputs=[z])
    # a copy, so that the run takes the event path
    plan = Plan(trace, (Drop(a, after=1), Recompute(0, before=2), Move(y, "host", keep=True, after=1)))
    platform = machine(each(10))
    check_rates(Ledger(replay(plan, platform)))
    launch = Waits.launch
    again: dict[int, int] = {}

    def forgetful(self: Waits, op: int):
        again[op] = again.get(op, 0) + 1
        return launch(self, op) if again[op] == 1 else iter(())

    monkeypatch.setattr(Waits, "launch", forgetful)
    with pytest.raises(LawBroken, match=r"begins at .* ns; the CPU has dispatched it at 30 ns"):
        check_rates(Ledger(replay(plan, platform)))


def test_the_problems_wait_for_the_cpu():
    waits = 0
    for seed in range(40):
        case = launched(problem(seed), seed)
        try:
            log = replay(case.plan, case.platform)
        except Exception:
            continue
        waits += bool((log.interval("cause") == STALL["launch"]).any())
    assert waits > 20
