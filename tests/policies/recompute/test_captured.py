"""Captured ops, by hand: launches saved, times charged, and what dies inside kept to the end."""

from __future__ import annotations

from dataclasses import replace

from sim.experiment import problem_for
from sim.hardware.platform import Engine, Platform, Tier
from sim.policies.recompute.tso.captured import Part, captured, saved_launches
from sim.trace import Trace, TraceBuilder

BIG = 1 << 60
HBM = Tier("hbm", BIG, BIG, 10**9, device=0)
NPU = Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}, launch=100)
TOY = Platform("toy", (HBM,), (NPU,), ())


def three() -> Trace:
    """a -> b -> c, of which nothing is read twice but the input; a weight gradient; c is kept."""
    b = TraceBuilder()
    x = b.tensor("x", 7, "input")
    names = {"a": 10, "b": 20, "c": 30}
    a, mid, end = (b.tensor(name, size) for name, size in names.items())
    dw = b.tensor("dw", 5, "gradient")
    b.op("make a", reads=[x], writes=[a], workspace=1)
    b.op("make b", reads=[a], writes=[mid, dw], duration=40)
    b.op("make c", reads=[x, mid], writes=[end])
    b.op("read dw", reads=[dw], writes=[])
    return b.build(outputs=(end,), carry=())


def test_launches_are_the_engines_unless_the_time_was_measured_or_they_are_given():
    problem = problem_for(three(), TOY)
    assert saved_launches(problem, None).tolist() == [100, 0, 100, 100]
    assert saved_launches(problem, 60).tolist() == [60, 40, 60, 60]
    assert saved_launches(problem, 0).tolist() == [0] * 4


def test_what_dies_inside_stays_as_workspace_and_times_change():
    trace = three()
    problem = problem_for(trace, TOY)
    times = [problem.cost.op_ns(op) for op in range(4)]
    new = captured(problem, [Part([0, 1, 2])], saved_launches(problem, None), {1: 9})
    # a is dead once b is made; b's tensor dies with the part; dw and c lie elsewhere
    assert new.op_columns.workspace.tolist() == [1, 0, 10, 0]
    assert new.op_columns.duration.tolist() == [times[0] - 100, 49, times[2] - 100, -1]
    assert new.origin is not None


def test_a_part_also_holds_what_earlier_ops_made_and_only_it_ends():
    trace = three()
    problem = problem_for(trace, TOY)
    saved_launch = saved_launches(problem, 0)
    new = captured(problem, [Part([1, 2], before=[0])], saved_launch, {})
    assert new.op_columns.workspace.tolist() == [1, 0, 10, 0]
    alone = captured(problem, [Part([1, 2])], saved_launch, {})
    assert alone.op_columns.workspace.tolist() == [1, 0, 0, 0]
    assert (alone.op_columns.duration == trace.op_columns.duration).all()


def test_the_peak_of_a_captured_chain_is_all_that_it_makes():
    b = TraceBuilder()
    t = [b.tensor("t0", 1, "input")]
    for i in range(6):
        t.append(b.tensor(f"t{i + 1}", 10))
        b.op(f"o{i}", reads=t[-2:-1], writes=t[-1:], duration=1)
    trace = b.build(outputs=(t[-1],), carry=())
    problem = problem_for(trace, TOY)
    from sim.solvers.schedule import TraceIndex, schedule_of

    assert schedule_of(TraceIndex(trace), {}).peak() == 21
    new = captured(problem, [Part(range(6))], saved_launches(problem, 0), {})
    assert schedule_of(TraceIndex(new), {}).peak() == 61
    assert replace(new.op_columns, workspace=trace.op_columns.workspace).name == trace.op_columns.name
