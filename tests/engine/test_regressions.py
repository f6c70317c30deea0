"""Faults of the engine that random plans found, each as small as it gets, with what must happen instead."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from sim.conformance import CHECKS, replayed
from sim.engine.replay import replay
from sim.errors import IllegalPlan, OutOfMemory
from sim.hardware.platform import Engine, Member, Platform, Pool, Tier
from sim.plan import Drop, Move, Online, Plan, Recompute, Wait
from sim.trace import TraceBuilder
from tests.engine.random_plans import Anything
from tests.machines import machine as toy_machine

GB = 10**9  # at 1 GB/s one byte takes one nanosecond
LAWS = ("capacity", "values", "ops", "order", "tiling", "outcome", "carried")

machine = partial(toy_machine, hbm=1000, host=1000, cpu="host")


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
    log = lawful(Plan(trace, [Move(y, "hbm@1", before="send")]), machine(devices=2)).log
    assert [row[1:] for row in spans(log, "a2b")] == [(0, 10), (10, 20)]


def test_an_op_run_again_for_another_device_takes_its_turn_on_the_engine():
    """Device 0 reads y, which device 1 made and dropped; it is recomputed where it was produced, between two ops."""
    b = TraceBuilder()
    y = b.tensor("y", 10)
    b.op("make", writes=[y], duration=10, device=1)
    b.op("busy", duration=100, device=1)
    b.op("more", duration=100, device=1)
    b.op("wait", duration=30)
    b.op("use", reads=[y], duration=5)
    trace = b.build(outputs=[], carry=())
    log = lawful(Plan(trace, [Drop("y", after="make")]), machine(devices=2)).log
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
    lawful(Plan(trace, [*moves, Move("x", "hbm@0", keep=True, after="read")], place={x: "hbm@1"}), machine(devices=2))


def test_a_write_in_place_waits_for_a_reader_on_another_engine():
    b = TraceBuilder()
    x, y, z = b.tensor("x", 10, "input"), b.tensor("y", 10), b.tensor("z", 10)
    b.op("slow", reads=[x], writes=[y], duration=100, engine="cpu")
    b.op("over", reads=[x], writes=[b.tensor("new", 10, replaces=x)], duration=5)
    b.op("last", reads=[y], writes=[z], duration=5)
    log = lawful(Plan(b.build(outputs=[z], carry=())), machine(cpu="hbm")).log
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
    log = lawful(Plan(trace, moves, place={v: "hbm@1", w: "hbm@1"}), machine(devices=2)).log
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
    """Releases bytes by dropping outputs, which can be recomputed."""

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
    run = lawful(plan, machine(devices=2, hbm=100))
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


@pytest.mark.parametrize(("keep", "gone"), [(False, 115), (True, 125)])
def test_a_result_made_again_while_its_copy_waits_for_space_is_there_once(keep, gone):
    """Both wait until 105 for the 75 B that leave; the op comes first, and then nothing is left to copy.

    If it was to be moved its copy on the host goes when the op has made it; if copied, after its last reader.
    """
    b = TraceBuilder()
    x, _ = b.tensor("x", 10, "input"), b.tensor("z", 75, "input")
    y, t, end = (b.tensor(name, 10) for name in ("y", "t", "end"))
    b.op("make", reads=[x], writes=[y], duration=10)
    b.op("fill", writes=[t], duration=10)
    b.op("late", reads=[y, t], writes=[end], duration=10)
    actions = [Move("y", "host", after="make"), Wait("y", after="make"), Move("z", "host", before="late")]
    actions += [Move("y", "hbm", keep=keep, before="late"), Recompute("make", before="late")]
    log = lawful(Plan(b.build(outputs=[end], carry=()), actions), machine(hbm=95)).log
    assert spans(log, "npu")[2:] == [("make", 105, 115), ("late", 115, 125)]
    assert [row[0] for row in spans(log, "h2d")] == []
    assert list(log.memory.query("tensor == 'y' and tier == 'host' and delta_bytes < 0").time_ns) == [gone]


def test_a_write_in_place_waits_for_a_rerun_that_makes_the_old_value_and_goes_on():
    """t is recomputed on the second engine just before it is overwritten; nobody woke the writer."""
    near = machine(cpu="hbm")
    b = TraceBuilder()
    x, t = b.tensor("x", 10, "input"), b.tensor("t", 10)
    b.op("make", reads=[x], writes=[t], duration=20, engine="cpu")
    b.op("use", reads=[t], writes=[b.tensor("y", 10)], duration=5)
    b.op("over", reads=[t], writes=[b.tensor("new", 10, replaces=t)], duration=5)
    plan = Plan(b.build(outputs=[], carry=()), [Recompute("make", before="over")])
    log = lawful(plan, near).log
    assert spans(log, "cpu") == [("make", 0, 20), ("make", 25, 45)]
    assert spans(log, "npu") == [("use", 20, 25), ("over", 45, 50)]


def test_a_move_asked_for_while_an_op_waits_for_another_read_is_not_taken_back_by_that_op():
    """Device 0 holds x for an op that waits for y until 10; device 1 moves x; its release waits for the op's end."""
    b = TraceBuilder()
    x, y = b.tensor("x", 50, "input"), b.tensor("y", 10, "input")
    b.op("use", reads=[x, y], duration=100, device=0)
    b.op("other", duration=5, device=1)
    moves = [Move("y", "hbm@0", before="use"), Move("x", "hbm@1", before="other")]
    log = lawful(Plan(b.build(outputs=[], carry=()), moves, place={x: "hbm@0", y: "host"}), machine(devices=2)).log
    gone = log.memory.query("tensor == 'x' and tier == 'hbm@0' and delta_bytes < 0")
    assert list(gone.time_ns) == [110]
    assert log.memory.query("tensor == 'x'").groupby("tier").delta_bytes.sum()["hbm@1"] == 50


class Answers(Online):
    """Answers pressure with what it is given, one answer after the other, and notes when it was asked."""

    def __init__(self, asked, *answers):
        self.asked, self.answers = asked, list(answers)

    def on_pressure(self, need, memory):
        self.asked.append(memory.now)
        return self.answers.pop(0) if self.answers else ()


def test_an_answer_that_frees_nothing_but_does_something_is_followed_by_another_question():
    b = TraceBuilder()
    nothing, y = b.tensor("nothing", 0), b.tensor("y", 40)
    b.op("make", writes=[nothing, y], duration=10)
    b.op("large", writes=[b.tensor("z", 80)], duration=10)
    b.op("use", reads=[nothing, y], duration=10)
    trace = b.build(outputs=[], carry=())
    asked = []
    plan = Plan(trace, online=lambda: Answers(asked, [Drop("nothing")], [Move("y", "host")]))
    assert spans(replay(plan, machine(hbm=100)), "npu")[1] == ("large", 50, 60)
    assert asked[:2] == [10, 10]


def test_who_waits_for_space_asks_again_when_the_move_that_was_to_free_it_is_replaced():
    """Device 1 turns the queued move of x into a copy that stays; device 0, which counted on its space, asks again."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 40, "input"), b.tensor("y", 60, "input"), b.tensor("z", 40)
    b.op("large", writes=[z], duration=10, device=0)
    b.op("other", duration=5, device=1)
    b.op("more", duration=5, device=1)
    moves = [Move("y", "host", keep=True, before="large"), Move("x", "host", before="large")]
    moves.append(Move("x", "host", keep=True, before="more"))
    asked = []
    trace, place = b.build(outputs=[], carry=()), {x: "hbm@0", y: "hbm@0"}
    log = replay(Plan(trace, moves, place=place, online=lambda: Answers(asked, [Drop(y)])), machine(devices=2, hbm=100))
    assert asked == [5]
    assert spans(log, "npu@0") == [("large", 60, 70)]


def test_reading_one_copy_does_not_keep_another_that_leaves():
    """x lies at home and on the host; the host's copy goes on to the other device though x is read at home."""
    b = TraceBuilder()
    x = b.tensor("x", 10, "input")
    for name in ("a", "b", "c"):
        b.op(name, reads=[x], duration=20)
    b.op("other", duration=5, device=1)
    moves = [Move("x", "host", keep=True, before="a"), Move("x", "hbm@1", before="b")]
    plan = Plan(b.build(outputs=[x], carry=()), moves, place={x: "hbm@0"})
    near = machine(devices=2)
    platform = replace(near, links=tuple(link for link in near.links if link.name != "a2b"))
    log = lawful(plan, platform).log
    left = log.memory.query("tensor == 'x'").groupby("tier").delta_bytes.sum()
    assert dict(left) == {"hbm@0": 10, "hbm@1": 10, "host": 0}


def test_a_link_is_free_when_what_shares_it_now_lets_it():
    """Both directions share 1 B/ns: at 10 there are 35 of 40 B left, at half a byte a nanosecond: free at 80."""
    seen = []

    class Looks(Online):
        def before(self, op, memory):
            seen.append((memory.now, memory.link_free_at("hbm", "host")))
            return ()

    near = machine()
    pool = Pool("bus", (Member("d2h"), Member("h2d")), GB)
    b = TraceBuilder()
    x, y = b.tensor("x", 40, "input"), b.tensor("y", 100, "input")
    b.op("first", duration=10)
    b.op("second", duration=10)
    moves = [Move("x", "host", keep=True, before="first"), Move("y", "hbm", keep=True, before="first")]
    plan = Plan(b.build(outputs=[], carry=()), moves, place={x: "hbm", y: "host"}, online=Looks)
    replay(plan, replace(near, pools=(pool,)))
    assert seen == [(0, 40), (10, 80)]


def test_a_copy_of_nothing_on_a_shared_link_ends_before_the_devices_of_that_instant_go_on():
    """0 B after 10 ns of fixed time; an op ends at 10, too, and whoever looks then finds the copy there."""
    seen = []

    class Looks(Online):
        def before(self, op, memory):
            seen.append((memory.now, memory.where(x)))
            return ()

    b = TraceBuilder()
    x = b.tensor("x", 0, "input")
    b.op("first", duration=10)
    b.op("second", reads=[x], duration=10)
    near = machine()
    links = tuple(replace(link, fixed=10) for link in near.links)
    platform = replace(near, links=links, pools=(Pool("bus", (Member("d2h"), Member("h2d")), GB),))
    moves = [Move("x", "hbm", keep=True, before="first")]
    log = replay(Plan(b.build(outputs=[], carry=()), moves, place={x: "host"}, online=Looks), platform)
    assert spans(log, "h2d") == [("x", 0, 10)]
    assert seen == [(0, ("host",)), (10, ("hbm", "host"))]


def test_two_copies_at_once_share_what_a_duplex_factor_leaves_of_their_link():
    """d2h makes two copies at once; while h2d is active half of its 1 B/ns is left: 2 x 10 B need 40 ns."""
    near = machine()
    links = tuple(replace(link, copy_engines=2) for link in near.links)
    pool = Pool("pcie", (Member("d2h", factor=Fraction(1, 2)), Member("h2d")))
    b = TraceBuilder()
    x, y, z = b.tensor("x", 10, "input"), b.tensor("y", 10, "input"), b.tensor("z", 100, "input")
    b.op("use", duration=10)
    moves = [Move(name, to, keep=True, before="use") for name, to in (("x", "host"), ("y", "host"), ("z", "hbm"))]
    plan = Plan(b.build(outputs=[], carry=()), moves, place={x: "hbm", y: "hbm", z: "host"})
    log = lawful(plan, replace(near, links=links, pools=(pool,))).log
    assert spans(log, "d2h") == [("x", 0, 40), ("y", 0, 40)]
    assert spans(log, "h2d") == [("z", 0, 100)]


def test_a_value_is_not_read_where_it_is_being_overwritten():
    """The second engine overwrites w in place when `use` is to be recomputed on w."""
    b = TraceBuilder()
    w, y = b.tensor("w", 10, "weight"), b.tensor("y", 10)
    new, end = b.tensor("w2", 10, "weight", replaces=w), b.tensor("end", 10)
    b.op("use", reads=[w], writes=[y], duration=10)
    b.op("step", "optimizer", reads=[w], writes=[new], duration=100, engine="cpu", phase="update")
    b.op("last", reads=[y], writes=[end], duration=10, phase="update")
    plan = Plan(b.build(outputs=[new, end]), [Recompute("use", before="last")])
    with pytest.raises(IllegalPlan, match="tensor 'w' is being overwritten by 'step'"):
        replay(plan, machine(cpu="hbm"))


def in_place_reader(share: float) -> Platform:
    """A device that works in the host's memory too, which has a tenth of its own bandwidth."""
    tiers = (Tier("hbm", 10**6, 10**6, 10 * GB, device=0), Tier("host", 10**6, 10**6, GB, latency=5, kind="ddr"))
    engine = Engine("npu", 0, "hbm", ("hbm", "host"), {"fp32": GB}, bandwidth_share={"": 1.0, "norm": share})
    return Platform("hand", tiers, (engine,))


def test_an_op_gets_the_same_share_of_a_tier_further_away_as_of_its_home():
    b = TraceBuilder()
    x = b.tensor("x", 1000, "input")
    b.op("read", "norm", reads=[x])
    plan = Plan(b.build(outputs=[], carry=()), place={x: "host"})
    assert [lawful(plan, in_place_reader(share)).log.end for share in (1.0, 0.5)] == [1005, 2005]


def test_what_an_op_overwrites_in_place_in_a_slower_tier_is_written_at_that_tiers_rate():
    b = TraceBuilder()
    x = b.tensor("x", 1000, "input")
    y = b.tensor("y", 1000, replaces=x)
    b.op("write", reads=[x], writes=[y])
    plan = Plan(b.build(outputs=[y], carry=()), place={x: "host"})
    assert spans(lawful(plan, in_place_reader(1.0)).log, "npu")[0] == ("write", 0, 2005)


def test_the_memory_of_a_device_without_ops_is_a_device_s_memory_at_the_end():
    """What began on the host gives its copy back when the op has ended, whoever's memory the other one returns to.

    By hand, at a byte per nanosecond: `state` (100 B) comes from the host and `w` (40 B) from device 1, both from 0 on;
    the op runs from 100 to 105. `state` is on the host, too, and leaves at 105; `w.new` is back at device 1 at 145.
    """
    b = TraceBuilder()
    w, state = b.tensor("w", 40, "weight"), b.tensor("state", 100, "optimizer_state")
    new = b.tensor("w.new", 40, "weight", replaces=w)
    b.op("step", reads=[w, state], writes=[new], duration=5)
    trace = b.build(outputs=[state, new], carry=[(new, w), (state, state)])
    log = lawful(Plan(trace, place={w: "hbm@1", state: "host"}), machine(devices=2)).log
    left = log.memory[(log.memory.tensor == "state") & (log.memory.delta_bytes < 0)]
    assert left[["time_ns", "tier", "cause"]].values.tolist() == [[105, "hbm@0", "freed"]]
    assert spans(log, "a2b") == [("w.new", 105, 145)]
