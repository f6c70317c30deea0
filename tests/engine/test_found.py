"""Faults of the engine that random plans found, each as small as it gets, with what must happen instead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.conformance import CHECKS, replayed
from sim.engine.replay import replay
from sim.errors import IllegalPlan, OutOfMemory
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.plan import Drop, Move, Online, Plan, Recompute, Wait
from sim.trace import TraceBuilder
from tests.engine.random_plans import Anything

GB = 10**9  # at 1 GB/s one byte takes one nanosecond
LAWS = ("capacity", "values", "ops", "order", "tiling", "outcome", "carried")


def machine(devices: int = 1, hbm: int = 1000, host: int = 1000, cpu_home: str = "host") -> Platform:
    names = [f"@{d}" if devices > 1 else "" for d in range(devices)]
    tiers = [Tier(f"hbm{n}", hbm, hbm, GB, device=d) for d, n in enumerate(names)]
    engines = [Engine(f"npu{n}", d, f"hbm{n}", (f"hbm{n}",), {"fp32": GB}) for d, n in enumerate(names)]
    engines.append(Engine("cpu", -1, cpu_home, (cpu_home,), {"fp32": GB}, main=False))
    links = [Link(f"d2h{n}", f"hbm{n}", "host", GB) for n in names]
    links += [Link(f"h2d{n}", "host", f"hbm{n}", GB) for n in names]
    if devices > 1:
        links += [Link("a2b", "hbm@0", "hbm@1", GB), Link("b2a", "hbm@1", "hbm@0", GB)]
    return Platform("hand", (*tiers, Tier("host", host, host, GB)), tuple(engines), tuple(links))


def lawful(plan: Plan, platform: Platform):
    run = replayed(Anything(), plan, plan.trace, platform)
    for law in LAWS:
        CHECKS[law](run)
    if run.log is not None and run.error is None:
        assert replay(plan, platform, fast=False) == run.log
    return run


def spans(log, lane: str) -> list[tuple[str, int, int]]:
    rows = log.events[log.events.lane == lane]
    return [(row.tensor or row.op, row.start_ns, row.end_ns) for row in rows.itertuples() if row.why != "stall"]


def test_a_copy_and_a_send_that_queue_at_one_instant_are_put_in_order():
    b = TraceBuilder()
    x, y = b.tensor("x", 10, "input"), b.tensor("y", 10, "input")
    got = b.tensor("got", 10)
    b.op("send", "send", reads=[x], group="s")
    b.op("recv", "recv", writes=[got], group="s", device=1)
    b.op("use", reads=[got], duration=5, device=1)
    trace = b.build(outputs=[], carry=())
    log = lawful(Plan(trace, [Move(y, "hbm@1", before="send")]), machine(2)).log
    assert [row[1:] for row in spans(log, "a2b")] == [(0, 10), (10, 20)]


def test_an_op_run_again_for_another_device_takes_its_turn_on_the_engine():
    """Device 0 reads y, which device 1 made and dropped; it is run again where it was made, between two ops."""
    b = TraceBuilder()
    y = b.tensor("y", 10)
    b.op("make", writes=[y], duration=10, device=1)
    b.op("busy", duration=100, device=1)
    b.op("more", duration=100, device=1)
    b.op("wait", duration=30)
    b.op("use", reads=[y], duration=5)
    trace = b.build(outputs=[], carry=())
    log = lawful(Plan(trace, [Drop("y", after="make")]), machine(2)).log
    assert spans(log, "npu@1") == [("make", 0, 10), ("busy", 10, 110), ("make", 110, 120), ("more", 120, 220)]
    assert spans(log, "npu@0") == [("wait", 0, 30), ("use", 130, 135)]


def test_a_release_that_waited_for_a_copy_that_is_replaced_by_nothing_is_carried_out():
    """y dies while its copy waits for the link; the move home that follows leaves nothing under way."""
    b = TraceBuilder()
    x, y = b.tensor("x", 100, "input"), b.tensor("y", 10)
    b.op("make", writes=[y], duration=10)
    b.op("use", reads=[y], duration=10)
    b.op("end", reads=[x], duration=10)
    trace = b.build(outputs=[], carry=())
    moves = [Move("x", "host", keep=True, before="make"), Move("y", "host", keep=True, after="make")]
    lawful(Plan(trace, [*moves, Move("y", "hbm", before="end")]), machine())


def test_a_dropped_copy_that_a_later_move_wants_stays():
    b = TraceBuilder()
    x, y = b.tensor("x", 100, "input"), b.tensor("y", 10)
    b.op("make", writes=[y], duration=10)
    b.op("use", reads=[y, x], duration=10)
    trace = b.build(outputs=[], carry=())
    first = Move("x", "host", keep=True, before="make")
    away = [Move("y", "host", after="make"), Drop("y", after="make"), Move("y", "hbm", after="make")]
    log = lawful(Plan(trace, [first, *away]), machine()).log
    assert log.counters["implicit_recomputes"] == 0


def test_a_release_that_waited_for_a_reader_comes_after_the_actions_at_its_end():
    b = TraceBuilder()
    x, y = b.tensor("x", 10, "input"), b.tensor("y", 10)
    b.op("other", duration=10, device=0)
    b.op("read", reads=[x], writes=[y], duration=10, device=1)
    b.op("again", reads=[x, y], duration=10, device=1)
    trace = b.build(outputs=[], carry=())
    moves = [Move("x", "host", keep=True, before="read"), Move("x", "hbm@1", after="other")]
    lawful(Plan(trace, [*moves, Move("x", "hbm@0", keep=True, after="read")], place={x: "hbm@1"}), machine(2))


def test_a_write_in_place_waits_for_a_reader_on_another_engine():
    b = TraceBuilder()
    x, y, z = b.tensor("x", 10, "input"), b.tensor("y", 10), b.tensor("z", 10)
    b.op("slow", reads=[x], writes=[y], duration=100, engine="cpu")
    b.op("over", reads=[x], writes=[b.tensor("new", 10, replaces=x)], duration=5)
    b.op("last", reads=[y], writes=[z], duration=5)
    log = lawful(Plan(b.build(outputs=[z], carry=())), machine(cpu_home="hbm")).log
    assert spans(log, "npu") == [("over", 100, 105), ("last", 105, 110)]


def test_a_write_in_place_looks_again_after_each_wait():
    """While it waits for the copy of one value, a copy of the other one begins."""
    b = TraceBuilder()
    v, w = b.tensor("v", 50, "input"), b.tensor("w", 50, "input")
    b.op("mark", duration=20, device=0)
    b.op(
        "over",
        reads=[v, w],
        writes=[b.tensor("v2", 50, replaces=v), b.tensor("w2", 50, replaces=w)],
        duration=10,
        device=1,
    )
    trace = b.build(outputs=[], carry=())
    moves = [Move("w", "host", keep=True, before="over"), Move("v", "host", keep=True, after="mark")]
    log = lawful(Plan(trace, moves, place={v: "hbm@1", w: "hbm@1"}), machine(2)).log
    assert [row[1:] for row in spans(log, "npu@1")] == [(100, 110)]


def test_a_value_that_is_being_overwritten_is_not_fetched():
    b = TraceBuilder()
    w, y = b.tensor("w", 10, "weight"), b.tensor("y", 10)
    new, end = b.tensor("w2", 10, "weight", replaces=w), b.tensor("end", 10)
    b.op("use", reads=[w], writes=[y], duration=10)
    b.op("step", "optimizer", reads=[w], writes=[new], duration=100, engine="cpu", phase="update")
    b.op("last", reads=[y], writes=[end], duration=10, phase="update")
    actions = [Drop("y", after="use"), Move("w", "host", after="use"), Wait("w", after="use")]
    plan = Plan(b.build(outputs=[new, end]), actions)
    with pytest.raises(IllegalPlan, match="tensor 'w' is being overwritten by 'step'"):
        replay(plan, machine())


def test_a_compressed_copy_is_no_place_to_write_the_new_value():
    b = TraceBuilder()
    w = b.tensor("w", 10, "weight")
    b.op("use", reads=[w], duration=10)
    b.op("step", reads=[w], writes=[b.tensor("w2", 10, "weight", replaces=w)], duration=5, engine="cpu")
    lawful(Plan(b.build(), [Move("w", "host", wire=4, after="use")]), machine())


def test_a_copy_that_never_gets_space_is_out_of_memory_and_no_deadlock():
    b = TraceBuilder()
    x, y = b.tensor("x", 80, "input"), b.tensor("y", 80, "input")
    b.op("use", reads=[x], duration=10)
    run = lawful(Plan(b.build(outputs=[x, y], carry=()), [Move("x", "host", before="use")]), machine(host=50))
    assert isinstance(run.error, OutOfMemory)
    assert run.error.need_bytes == 80


def test_a_write_in_place_demands_space_for_the_copy_that_it_waits_for():
    b = TraceBuilder()
    x = b.tensor("x", 80, "input")
    b.op("over", reads=[x], writes=[b.tensor("x2", 80, replaces=x)], duration=10)
    run = lawful(Plan(b.build(outputs=[1], carry=()), [Move("x", "host", before="over")]), machine(host=50))
    assert isinstance(run.error, OutOfMemory)


def test_a_wait_demands_space_for_a_copy_that_replaced_the_first():
    b = TraceBuilder()
    x, y = b.tensor("x", 60, "input"), b.tensor("y", 60, "input")
    b.op("use", reads=[y], duration=10)
    plan = Plan(
        b.build(outputs=[], carry=()), [Move("x", "hbm", before="use"), Wait("x", before="use")], place={x: "host"}
    )
    run = lawful(plan, machine(hbm=100))
    assert isinstance(run.error, OutOfMemory)


class DropsOutputs(Online):
    """Makes room by dropping outputs, which can be made again."""

    def on_pressure(self, need, memory):
        here = [t for t in memory.residents(need.tier) if not memory.is_locked(t) and t in (1, 2)]
        return [Drop(here[0])] if here else []


def test_restoring_an_output_does_not_drop_another():
    b = TraceBuilder()
    x = b.tensor("x", 10, "input")
    outs = [b.tensor(name, 40) for name in ("p", "q")]
    for name, out in zip("pq", outs, strict=True):
        b.op(f"make {name}", reads=[x], writes=[out], duration=10)
    b.op("large", duration=10, workspace=60)
    plan = Plan(b.build(outputs=outs, carry=()), online=DropsOutputs)
    assert lawful(plan, machine(hbm=90)).error is None
    assert lawful(plan, machine(hbm=75)).error is not None


def test_a_request_that_fits_is_not_refused_because_a_larger_one_came_before():
    """Device 1 waits for 80 B of its memory for good; device 0, which needs 10 B there, goes on."""
    b = TraceBuilder()
    x, y = b.tensor("x", 10, "input"), b.tensor("y", 10)
    b.op("hold", reads=[x], duration=50, device=0)
    b.op("large", duration=10, workspace=80, device=1)
    b.op("use", reads=[x], writes=[y], duration=5, device=0)
    big = b.tensor("big", 60, "input")
    trace = b.build(outputs=[big], carry=())
    plan = Plan(trace, [Move("x", "hbm@1", after="hold"), Wait("x", after="hold")], place={x: "hbm@0", big: "hbm@1"})
    run = lawful(plan, machine(2, hbm=100))
    assert isinstance(run.error, OutOfMemory)
    assert run.error.need_bytes == 80


def test_an_op_reads_in_place_what_is_on_its_way_home():
    """The engine reads the host's memory, so it does not wait for the copy; and both paths say so."""
    b = TraceBuilder()
    x, y = b.tensor("x", 50, "input"), b.tensor("y", 10)
    b.op("use", reads=[x], writes=[y], duration=10)
    near = machine()
    platform = replace(near, engines=(replace(near.engines[0], reaches=("hbm", "host")),))
    plan = Plan(b.build(outputs=[y], carry=()), [Move("x", "hbm", before="use")], place={x: "host"})
    assert spans(lawful(plan, platform).log, "npu") == [("use", 0, 10)]


def test_a_result_made_again_while_its_copy_waits_for_space_is_there_once():
    """Both wait for the 75 B that leave until 85; the op comes first, and then nothing is left to copy."""
    b = TraceBuilder()
    x, _ = b.tensor("x", 10, "input"), b.tensor("z", 75, "input")
    y, t, end = (b.tensor(name, 10) for name in ("y", "t", "end"))
    b.op("make", reads=[x], writes=[y], duration=10)
    b.op("fill", writes=[t], duration=10)
    b.op("late", reads=[y, t], writes=[end], duration=10)
    actions = [Move("y", "host", after="make"), Wait("y", after="make"), Move("z", "host", before="late")]
    actions += [Move("y", "hbm", before="late"), Recompute("make", before="late")]
    log = lawful(Plan(b.build(outputs=[end], carry=()), actions), machine(hbm=95)).log
    assert spans(log, "npu")[2:] == [("make", 105, 115), ("late", 115, 125)]
    assert [row[0] for row in spans(log, "h2d")] == []
