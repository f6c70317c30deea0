"""Timelines drawn by hand: every interval compared to the nanosecond."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from sim.analysis import stalls as stalls_of
from sim.engine.replay import replay
from sim.errors import Deadlock, IllegalPlan, OutOfMemory, TraceError
from sim.hardware.platform import Link, Member, Platform, Pool, Tier
from sim.log import CAUSES
from sim.plan import Drop, Move, Online, Plan, Recompute, Wait
from sim.rewrites.holding import with_releases
from sim.trace import Trace, TraceBuilder
from tests.machines import machine as toy_machine

GB = 10**9  # at 1 GB/s one byte takes one nanosecond

machine = partial(toy_machine, hbm=1000, host=10_000)
"""One accelerator or several, a host, and a link each way at one byte per nanosecond."""


def chain(*steps: tuple[str, int], size: int = 10) -> Trace:
    """Ops in a row, each reading the result of the one before: (name, ns)."""
    b = TraceBuilder()
    last = b.tensor("x", size, "input")
    for name, ns in steps:
        made = b.tensor(f"{name}.out", size)
        b.op(name, reads=[last], writes=[made], duration=ns)
        last = made
    return b.build()


def spans(log, why=None):
    """(lane, name, start, end) of the intervals, in order of start."""
    rows = [
        (e.lane, e.tensor if e.why == "move" and e.tensor else e.op, e.start_ns, e.end_ns)
        for e in log.events.itertuples()
        if why is None or e.why == why
    ]
    return sorted(rows, key=lambda row: (row[2], row[3], row[0]))


def stalls(log):
    return [(e.op, e.cause, e.start_ns, e.end_ns) for e in log.events.itertuples() if e.why == "stall"]


def weights(*sizes: int, op_ns: int = 1000) -> TraceBuilder:
    """One long op that reads nothing, and tensors that exist from the start."""
    b = TraceBuilder()
    for i, size in enumerate(sizes):
        b.tensor(f"w{i}", size, "input")
    b.op("compute", duration=op_ns)
    return b


def test_copies_of_one_direction_queue_first_come_first_served():
    plan = Plan(weights(30, 20).build(), [Move("w0", "host", before="compute"), Move("w1", "host", before="compute")])
    assert spans(replay(plan, machine()), "move") == [("d2h", "w0", 0, 30), ("d2h", "w1", 30, 50)]


def test_lower_priority_value_goes_first_and_a_running_copy_is_not_interrupted():
    b = weights(30, 20, 10)
    moves = [
        Move("w0", "host", before="compute", priority=5),
        Move("w1", "host", before="compute", priority=5),
        Move("w2", "host", before="compute", priority=0),
    ]
    log = replay(Plan(b.build(), moves), machine())
    assert spans(log, "move") == [("d2h", "w2", 0, 10), ("d2h", "w0", 10, 40), ("d2h", "w1", 40, 60)]


def test_each_transfer_pays_its_fixed_time():
    plan = Plan(weights(30, 20).build(), [Move("w0", "host", before="compute"), Move("w1", "host", before="compute")])
    log = replay(plan, machine(fixed=7))
    assert spans(log, "move") == [("d2h", "w0", 0, 37), ("d2h", "w1", 37, 64)]


def test_a_delay_holds_the_links_before_the_bytes_flow():
    plan = Plan(
        weights(30, 20).build(),
        [Move("w0", "host", before="compute", delay=7), Move("w1", "host", before="compute")],
    )
    assert spans(replay(plan, machine()), "move") == [("d2h", "w0", 0, 37), ("d2h", "w1", 37, 57)]
    both = [Move("w0", "host", before="compute", delay=6), Move("w1", "host2", before="compute")]
    shared = Pool("bus", (Member("d2h"), Member("d2p")), GB)
    on = machine()
    on = replace(
        on,
        tiers=(*on.tiers, replace(on.tiers[1], name="host2")),
        links=(*on.links, replace(on.links[0], name="d2p", target="host2")),
        pools=(shared,),
    )
    # w1 has the bus alone for 6 ns, then half of it: 14 bytes in 28 ns; w0 then needs 30 - 14 more
    assert spans(replay(Plan(weights(30, 20).build(), both), on), "move") == [
        ("d2p", "w1", 0, 34),
        ("d2h", "w0", 0, 50),
    ]
    with pytest.raises(IllegalPlan, match="delay is negative"):
        replay(Plan(weights(30).build(), [Move("w0", "host", before="compute", delay=-1)]), machine())


def test_two_links_on_one_pool_share_it_equally_until_one_ends():
    """Pool of 1 B/ns: both at 1/2; w0 (20 B) ends at 40; then w1 has 20 of its 40 B left at full rate."""
    pool = Pool("bus", (Member("d2h@0"), Member("d2h@1")), GB)
    b = TraceBuilder()
    for d, size in enumerate((20, 40)):
        b.tensor(f"w{d}", size, "input")
        b.op(f"first{d}", reads=[d], duration=0, device=d)
    for d in range(2):
        b.op(f"compute{d}", duration=1000, device=d)
    plan = Plan(b.build(), [Move(f"w{d}", "host", before=f"compute{d}") for d in range(2)])
    log = replay(plan, machine(devices=2, pools=(pool,)))
    assert spans(log, "move") == [("d2h@0", "w0", 0, 40), ("d2h@1", "w1", 0, 60)]


def duplex_log(down: int, up: int):
    """w0 goes down while w1, which starts on the host, comes up; factors 0.95 and 0.47 while both run."""
    pool = Pool("pcie", (Member("d2h", factor=Fraction(95, 100)), Member("h2d", factor=Fraction(47, 100))))
    plan = Plan(
        weights(down, up).build(),
        [Move("w0", "host", before="compute"), Move("w1", "hbm", before="compute")],
        place={1: "host"},
    )
    return spans(replay(plan, machine(hbm=10_000, pools=(pool,))), "move")


def test_both_directions_at_once_slow_each_other_by_the_duplex_factors():
    """Down: 950 B at 0.95 B/ns end at 1000. Up: 470 B by then; the other 530 B at full rate end at 1530."""
    assert duplex_log(950, 1000) == [("d2h", "w0", 0, 1000), ("h2d", "w1", 0, 1530)]


def test_a_duplex_link_alone_keeps_its_whole_rate():
    pool = Pool("pcie", (Member("d2h", factor=Fraction(95, 100)), Member("h2d", factor=Fraction(47, 100))))
    plan = Plan(weights(950).build(), [Move("w0", "host", before="compute")])
    assert spans(replay(plan, machine(pools=(pool,))), "move") == [("d2h", "w0", 0, 950)]


def test_pageable_copy_beside_cpu_adam_shares_host_memory_in_charged_bytes():
    """Host DRAM 2 B/ns; the copy charges 3 a byte at most 1 B/ns, CPU Adam 1 a byte at most 2 B/ns.

    Alone the copy would take 2/3 B/ns. Together each gets 1 charged B/ns: the copy 1/3 B/ns, Adam 1 B/ns.
    Adam's 90 B end at 90; by then the copy has moved 30 of 60 B; the rest at 2/3 B/ns takes 45: it ends at 135.
    """
    pool = Pool("dram", (Member("d2h", charge=Fraction(3)), Member("cpu")), 2 * GB)
    platform = machine(cpu="host", pools=(pool,))
    host = Tier("host", 10_000, 10_000, 2 * GB)
    platform = Platform("hand", (platform.tiers[0], host), platform.engines, platform.links, platform.pools)
    b = weights(60)
    state = b.tensor("m", 45, "optimizer_state")
    new = b.tensor("m'", 45, "optimizer_state", replaces=state)
    b.op("adam", "optimizer", reads=[state], writes=[new], bytes=90, engine="cpu", phase="update")
    plan = Plan(b.build(), [Move("w0", "host", before="compute")])
    # "compute" lasts 1000; put adam first by making it start at once
    log = replay(plan, platform)
    adam = next(row for row in spans(log) if row[1] == "adam")
    copy = next(row for row in spans(log, "move"))
    assert copy[2:] == (0, 90)  # alone: 60 B at 2/3 B/ns
    assert adam[2:] == (1000, 1045)  # alone: 90 B at 2 B/ns

    b = TraceBuilder()
    b.tensor("w0", 60, "input")
    state = b.tensor("m", 45, "optimizer_state")
    new = b.tensor("m'", 45, "optimizer_state", replaces=state)
    b.op("adam", "optimizer", reads=[state], writes=[new], bytes=90, engine="cpu", phase="update")
    b.op("compute", duration=1000)
    log = replay(Plan(b.build(), [Move("w0", "host", before="compute")]), platform)
    assert ("cpu", "adam", 0, 90) in spans(log)
    assert spans(log, "move") == [("d2h", "w0", 0, 135)]


def test_a_collective_starts_when_its_last_member_has_come_and_devices_go_on():
    """Device 0 reaches the all-reduce at 10, device 1 at 50; 40 B over the ring take 40: both results at 90.

    Device 0 computes on until 30 and then waits for the result it reads.
    """
    b = TraceBuilder()
    grads, sums = [], []
    for d in range(2):
        grads.append(b.tensor(f"g{d}", 40, "gradient"))
        sums.append(b.tensor(f"sum{d}", 40, "gradient", replaces=grads[d]))
        b.op(f"backward{d}", writes=[grads[d]], duration=(10, 50)[d], device=d)
    for d in range(2):
        b.op(f"reduce{d}", "collective", reads=[grads[d]], writes=[sums[d]], bytes=40, group="all", device=d)
    b.op("more0", duration=20, device=0)
    for d in range(2):
        b.op(f"update{d}", reads=[sums[d]], duration=5, device=d)
    log = replay(Plan(b.build()), machine(devices=2))
    assert spans(log, "move") == [("a2b", "reduce1", 50, 90), ("b2a", "reduce1", 50, 90)]
    assert ("npu@0", "update0", 90, 95) in spans(log, "run")
    assert ("npu@1", "update1", 90, 95) in spans(log, "run")
    assert stalls(log) == [("update0", "peer", 30, 90), ("update1", "peer", 50, 90)]


def pipeline_1f1b() -> Trace:
    """Two stages, two micro-batches; forward 10, backward 20; 5 B between the stages."""
    b = TraceBuilder()
    acts, grads = {}, {}
    arriving = [b.tensor(f"in{m}", 5) for m in range(2)]
    for m in range(2):  # receives are posted ahead, as irecv is
        b.op(f"recv_a{m}", "recv", writes=[arriving[m]], group=f"a{m}", device=1)
    steps = [("f", 0, 0), ("f", 0, 1), ("f", 1, 0), ("b", 1, 0), ("b", 0, 0), ("f", 1, 1), ("b", 1, 1), ("b", 0, 1)]
    for kind, stage, m in steps:
        if kind == "f":
            reads = [arriving[m]] if stage else []
            acts[stage, m] = b.tensor(f"act{stage}{m}", 5)
            b.op(f"f{stage}{m}", reads=reads, writes=[acts[stage, m]], duration=10, device=stage)
            if not stage:
                b.op(f"send_a{m}", "send", reads=[acts[0, m]], group=f"a{m}", device=0)
        else:
            reads = [acts[stage, m]]
            if not stage:
                reads.append(b.tensor(f"gin{m}", 5, "temporary"))
                b.op(f"recv_g{m}", "recv", writes=reads[1:], group=f"g{m}", device=0)
            grads[stage, m] = b.tensor(f"grad{stage}{m}", 5, "temporary")
            b.op(f"b{stage}{m}", reads=reads, writes=[grads[stage, m]], duration=20, device=stage, phase="backward")
            if stage:
                b.op(f"send_g{m}", "send", reads=[grads[1, m]], group=f"g{m}", device=1)
    return b.build()


def test_a_two_stage_1f1b_pipeline():
    """Drawn by hand. Stage 0: F0 0-10, F1 10-20, B0 50-70, B1 80-100. Stage 1: F0 15-25, B0 25-45, F1 45-55, B1 55-75.

    Copies of 5 ns: a0 10-15, a1 20-25, g0 45-50, g1 75-80. The bubble of stage 0 is 30 + 10.
    """
    log = replay(Plan(pipeline_1f1b()), machine(devices=2))
    assert [row[1:] for row in spans(log, "run") if row[0] == "npu@0"] == [
        ("f00", 0, 10),
        ("f01", 10, 20),
        ("b00", 50, 70),
        ("b01", 80, 100),
    ]
    assert [row[1:] for row in spans(log, "run") if row[0] == "npu@1"] == [
        ("f10", 15, 25),
        ("b10", 25, 45),
        ("f11", 45, 55),
        ("b11", 55, 75),
    ]
    assert [row[2:] for row in spans(log, "move")] == [(10, 15), (20, 25), (45, 50), (75, 80)]
    assert [(op, start, end) for op, _, start, end in stalls(log)] == [("f10", 0, 15), ("b00", 20, 50), ("b01", 70, 80)]
    assert log.end == 100


def test_vdnn_layers_take_the_longer_of_compute_and_copy():
    """F = 4,4,4,4 with copies of 3,6,2,5: 4 + 6 + 4 + 5 = 19, not 16."""
    b = TraceBuilder()
    xs = [b.tensor(f"x{i}", size, "input") for i, size in enumerate((3, 6, 2, 5))]
    for i, x in enumerate(xs):
        b.op(f"f{i}", "conv", reads=[x], duration=4)
    actions = []
    for i in range(4):
        actions += [Move(f"x{i}", "host", keep=True, before=f"f{i}")]
        actions += [Wait(f"x{i}", after=f"f{i}"), Drop(f"x{i}", after=f"f{i}")]
    log = replay(Plan(b.build(), actions), machine())
    assert [row[2:] for row in spans(log, "run")] == [(0, 4), (4, 8), (10, 14), (14, 18)]
    assert log.end == 19
    assert stalls(log) == [("f1", "wait", 8, 10), ("f3", "wait", 18, 19)]


def test_dropped_tensor_is_recomputed_with_what_it_needs():
    trace = chain(("a", 10), ("b", 10), ("c", 10), ("d", 10))
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op)
    end = b.tensor("end", 10)
    b.op("late", reads=[trace.tensor_id("b.out")], writes=[end], duration=5, phase="backward")
    log = replay(Plan(b.build(), [Drop("b.out", after="c")]), machine())
    assert [(row[1], row[2]) for row in spans(log, "recompute")] == [("a", 40), ("b", 50)]
    assert log.end == 65
    assert log.counters["implicit_recomputes"] == 2


def test_a_planned_recompute_keeps_its_reads_alive():
    trace = chain(("a", 10), ("b", 10), ("c", 10), ("d", 10))
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op)
    b.op("late", reads=[trace.tensor_id("b.out")], writes=[b.tensor("end", 10)], duration=5, phase="backward")
    log = replay(Plan(b.build(), [Drop("b.out", after="c"), Recompute("b", before="late")]), machine())
    assert [(row[1], row[2]) for row in spans(log, "recompute")] == [("b", 40)]
    assert log.counters["implicit_recomputes"] == 0


def test_a_tensor_wanted_back_while_leaving_stays():
    """The copy of a.out runs 10-20; b reads it from 10 on, so its release is cancelled."""
    log = replay(Plan(chain(("a", 10), ("b", 30), ("c", 5)), [Move("a.out", "host", after="a")]), machine())
    assert spans(log, "run") == [("npu", "a", 0, 10), ("npu", "b", 10, 40), ("npu", "c", 40, 45)]
    gone = log.memory.query("tensor == 'a.out' and delta_bytes < 0")
    assert list(gone.time_ns) == [40, 40]  # both copies, when b, the last reader, has ended
    assert set(gone.cause) == {"freed"}


def goings(log, tensor):
    """(tier, ns, cause) of each release of a tensor."""
    rows = log.memory[(log.memory.tensor == tensor) & (log.memory.delta_bytes < 0)]
    return [(r.tier, r.time_ns, r.cause) for r in rows.itertuples()]


def test_a_copy_that_has_not_begun_when_its_tensor_dies_never_does():
    """t leaves at 10, behind w, which is copied until 300; its last reader ends at 30: nobody waits for its copy."""
    b = TraceBuilder()
    w, x = b.tensor("w", 300, "input"), b.tensor("x", 10, "input")
    t, y, z = b.tensor("t", 100), b.tensor("y", 10), b.tensor("z", 10)
    b.op("first", reads=[x], writes=[t], duration=10)
    b.op("second", reads=[t], writes=[y], duration=10)
    b.op("third", reads=[t, y], writes=[z], duration=10)
    moves = [Move(w, "host", before="first"), Move(t, "host", keep=True, after="first")]
    log = replay(Plan(b.build(), moves), machine())
    assert spans(log, "move") == [("d2h", "w", 0, 300)]
    assert log.end == 300
    assert goings(log, "t") == [("host", 30, "called off"), ("hbm", 30, "freed")]
    assert (log.counters["moves_cancelled"], log.counters["cancelled_bytes"]) == (1, 100)
    assert log.counters["moves_without_space"] == 0


def test_a_copy_without_space_is_called_off_when_its_tensor_dies():
    """The host has space for t when w has come back, at 40; t's last reader has ended at 30."""
    b = TraceBuilder()
    w, x = b.tensor("w", 20, "input"), b.tensor("x", 10, "input")
    t, y, z = b.tensor("t", 20), b.tensor("y", 10), b.tensor("z", 10)
    b.op("first", reads=[x], writes=[t], duration=10)
    b.op("second", reads=[t], writes=[y], duration=20)
    b.op("third", reads=[y], writes=[z], duration=20)
    moves = [Move(t, "host", keep=True, after="first"), Move(w, "hbm", before="second")]
    plan = Plan(b.build(), moves, place={w: "host"})
    log = replay(plan, machine(host=20))
    assert spans(log, "move") == [("h2d", "w", 10, 30)]
    assert goings(log, "t") == [("hbm", 30, "freed")]
    assert log.end == 50
    assert log.counters["moves_without_space"] == 1


def test_a_copy_that_follows_another_is_called_off_when_its_tensor_has_died():
    """t is copied to the host from 10 to 60 and was to go on to the drive; its last reader ends at 30."""
    b = TraceBuilder()
    x, t, y = b.tensor("x", 10, "input"), b.tensor("t", 50), b.tensor("y", 10)
    b.op("first", reads=[x], writes=[t], duration=10)
    b.op("second", reads=[t], writes=[y], duration=20)
    small = machine()
    disk = Tier("disk", 1000, 1000, GB, kind="nvme")
    links = (*small.links, Link("h2f", "host", "disk", GB, 0), Link("f2h", "disk", "host", GB, 0))
    moves = [Move(t, "host", keep=True, after="first"), Move(t, "disk", keep=True, after="second")]
    log = replay(Plan(b.build(), moves), replace(small, tiers=(*small.tiers, disk), links=links))
    assert spans(log, "move") == [("d2h", "t", 10, 60)]
    assert log.end == 60


def test_a_copy_that_the_plan_waits_for_is_made_whoever_reads_it():
    """As in the first of these, but the device waits for t before its last op: w is out at 300, t at 400."""
    b = TraceBuilder()
    w, x = b.tensor("w", 300, "input"), b.tensor("x", 10, "input")
    t, y, z = b.tensor("t", 100), b.tensor("y", 10), b.tensor("z", 10)
    b.op("first", reads=[x], writes=[t], duration=10)
    b.op("second", reads=[t], writes=[y], duration=10)
    b.op("third", reads=[y], writes=[z], duration=10)
    moves = [Move(w, "host", before="first"), Move(t, "host", keep=True, after="first"), Wait(t, before="third")]
    log = replay(Plan(b.build(), moves), machine())
    assert spans(log, "move") == [("d2h", "w", 0, 300), ("d2h", "t", 300, 400)]
    assert log.end == 410


def test_a_tensor_that_dies_during_its_copy_is_waited_for():
    b = TraceBuilder()
    x, t, y = b.tensor("x", 10, "input"), b.tensor("t", 50), b.tensor("y", 10)
    b.op("first", reads=[x], writes=[t], duration=10)
    b.op("second", reads=[t], writes=[y], duration=20)
    log = replay(Plan(b.build(), [Move(t, "host", keep=True, after="first")]), machine())
    assert spans(log, "move") == [("d2h", "t", 10, 60)]
    assert log.end == 60


def test_a_release_that_waits_keeps_its_cause():
    """The CPU reads x in the host from 20 to 70; it is back on the device at 30, and leaves the host at 70."""
    b = TraceBuilder()
    x, y, z = (b.tensor(name, 10) for name in "xyz")
    b.op("make", writes=[x], duration=10)
    b.op("beside", reads=[x], writes=[y], duration=50, engine="cpu")
    b.op("long", writes=[z], duration=30)
    b.op("end", reads=[y, z], duration=5)
    out, back = Move("x", "host", after="make"), Move("x", "hbm", before="long")
    log = replay(Plan(b.build(carry=()), [out, Wait("x", before="beside"), back]), machine(cpu="host"))
    assert goings(log, "x") == [("hbm", 20, "moved out"), ("host", 70, "moved out"), ("hbm", 70, "freed")]
    dropped = Plan(b.build(carry=()), [out, Wait("x", before="beside"), Drop("x", tier="host", before="long")])
    assert goings(replay(dropped, machine(cpu="host")), "x")[1] == ("host", 70, "dropped")


def test_what_dies_while_it_is_copied_is_freed_when_the_copy_ends():
    trace = chain(("a", 10), ("b", 5), ("c", 50), size=20)
    log = replay(Plan(trace, [Move("a.out", "host", after="a", keep=True)]), machine())
    assert goings(log, "a.out") == [("hbm", 30, "freed"), ("host", 30, "freed")]


def test_a_copy_turned_round_on_its_way_is_moved_out_of_where_it_arrives():
    """The copy of a.out runs 10-30 and is called back at 15: it arrives, and goes again; it was never dropped."""
    trace = chain(("a", 10), ("b", 5), ("c", 50), size=20)
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op)
    b.op("late", reads=[trace.tensor_id("a.out")], duration=5)
    plan = Plan(b.build(), [Move("a.out", "host", after="a"), Move("a.out", "hbm", after="b")])
    assert goings(replay(plan, machine()), "a.out") == [("host", 30, "moved out"), ("hbm", 70, "freed")]


def test_an_op_waits_for_space_that_a_copy_releases():
    """30 B of room: x, a.out, b.out. c needs 10 more, which the copy of a.out (from 20 to 30) frees."""
    trace = chain(("a", 10), ("b", 10), ("c", 10))
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op)
    b.op("late", reads=[trace.tensor_id("a.out"), trace.tensor_id("c.out")], duration=5)
    plan = Plan(b.build(), [Move("a.out", "host", after="b")])
    log = replay(plan, machine(hbm=40))
    assert stalls(log) == [("late", "transfer", 40, 40)] or ("npu", "c", 20, 30) in spans(log, "run")
    log = replay(plan, machine(hbm=30))
    assert stalls(log)[0] == ("c", "space", 20, 30)
    assert ("npu", "c", 30, 40) in spans(log, "run")


def test_an_in_place_write_waits_for_a_copy_of_the_old_value():
    b = TraceBuilder()
    old = b.tensor("w", 50, "weight")
    new = b.tensor("w'", 50, "weight", replaces=old)
    b.op("read", reads=[old], duration=10)
    b.op("step", "optimizer", reads=[old], writes=[new], duration=5, phase="update")
    log = replay(Plan(b.build(), [Move("w", "host", keep=True, after="read")]), machine())
    assert stalls(log) == [("step", "hazard", 10, 60)]
    assert spans(log, "run")[-1] == ("npu", "step", 60, 65)
    final = log.memory.groupby(["tier", "tensor"]).delta_bytes.sum()
    assert final["hbm", "w'"] == 50
    assert final["host", "w"] == 0  # the copy of the old value goes with it


def rectified() -> TraceBuilder:
    """conv makes a (50 B, 10 ns), relu_ writes b over it (5 ns), next reads b and makes c (10 B, 20 ns)."""
    b = TraceBuilder()
    x, a, c = b.tensor("x", 10, "input"), b.tensor("a", 50), b.tensor("c", 10)
    over = b.tensor("b", 50, replaces=a)
    b.op("conv", reads=[x], writes=[a], duration=10)
    b.op("relu_", reads=[a], writes=[over], duration=5)
    b.op("next", reads=[over], writes=[c], duration=20)
    b.op("late", reads=[over, c], duration=1)
    return b


def use(log, tier="hbm"):
    """(ns, bytes, tensor, cause) of every change after the start, in order."""
    rows = log.memory[(log.memory.tier == tier) & (log.memory.cause != "placed")]
    return [(r.time_ns, r.delta_bytes, r.tensor, r.cause) for r in rows.itertuples()]


@pytest.mark.parametrize("planned", [False, True], ids=["implicit", "planned"])
def test_an_op_in_place_overwrites_the_remade_value_when_it_runs_again(planned):
    actions = [Drop("b", after="next")]
    if planned:
        actions += [Recompute("conv", before="late"), Recompute("relu_", before="late")]
    log = replay(Plan(rectified().build(), actions), machine(hbm=70))  # x, c and one of a and b
    assert spans(log, "recompute") == [("npu", "conv", 35, 45), ("npu", "relu_", 45, 50)]
    assert [row for row in use(log) if 35 <= row[0] <= 50] == [
        (35, -50, "b", "dropped"),
        (35, 50, "a", "made"),
        (50, -50, "a", "overwritten"),
        (50, 50, "b", "made"),
    ]
    assert log.end == 51


def test_who_needs_the_overwritten_value_again_has_it_made_once_more():
    b = TraceBuilder()
    x, a, y = b.tensor("x", 10, "input"), b.tensor("a", 50), b.tensor("y", 10)
    over = b.tensor("b", 50, replaces=a)
    b.op("conv", reads=[x], writes=[a], duration=10)
    b.op("look", reads=[a], writes=[y], duration=3)
    b.op("relu_", reads=[a], writes=[over], duration=5)
    b.op("next", reads=[over], duration=20)
    b.op("late", reads=[over, y], duration=1)
    actions = [Drop("b", after="next"), Drop("y", after="next")]
    # b comes back first, over a; y needs a, which has been evicted once more
    log = replay(Plan(b.build(), actions), machine())
    again = [name for _, name, _, _ in spans(log, "recompute")]
    assert again == ["conv", "relu_", "conv", "look"]


def test_what_is_there_already_is_not_held_twice_where_an_op_overwrites_again():
    actions = [Recompute("conv", before="late"), Recompute("relu_", before="late")]
    log = replay(Plan(rectified().build(), actions), machine(hbm=120))  # x, b, c, and a for as long as it takes
    assert [row for row in use(log) if 35 <= row[0] <= 50] == [(35, 50, "a", "made"), (50, -50, "a", "overwritten")]
    with pytest.raises(OutOfMemory):
        replay(Plan(rectified().build(), actions), machine(hbm=119))


def test_an_op_that_runs_again_in_place_waits_for_a_copy_of_what_it_overwrites():
    actions = [
        Drop("b", after="next"),
        Recompute("conv", before="late"),
        Move("a", "host", keep=True, before="late"),
        Recompute("relu_", before="late"),
    ]
    log = replay(Plan(rectified().build(), actions), machine())
    assert stalls(log) == [("relu_", "hazard", 45, 95)]
    assert ("npu", "relu_", 95, 100) in spans(log, "recompute")
    assert log.memory.groupby(["tier", "tensor"]).delta_bytes.sum()["host", "a"] == 0


def test_a_copy_kept_elsewhere_is_what_an_op_in_place_runs_on_again():
    b = TraceBuilder()
    w, out = b.tensor("w", 50, "weight"), b.tensor("out", 10)
    new = b.tensor("w'", 50, "weight", replaces=w)
    b.op("read", reads=[w], duration=10)
    b.op("scale_", reads=[w], writes=[new], duration=5)
    b.op("next", reads=[new], duration=20)
    b.op("late", reads=[new], writes=[out], duration=1)
    trace = b.build(outputs=[out], carry=())
    drop = Drop("w'", after="next")
    with pytest.raises(IllegalPlan, match="'w' was overwritten by 'scale_' and no copy was kept"):
        replay(Plan(trace, [drop]), machine())
    kept = [Move("w", "host", keep=True, before="read"), drop, Recompute("scale_", before="late")]
    log = replay(Plan(trace, kept), machine())
    assert spans(log, "move") == [("d2h", "w", 0, 50), ("h2d", "w", 75, 125)]
    assert spans(log, "recompute") == [("npu", "scale_", 125, 130)]
    assert log.memory.groupby("tensor").delta_bytes.sum()["w"] == 0


def test_an_op_on_another_engine_runs_beside_the_device():
    b = TraceBuilder()
    g = b.tensor("g", 10, "gradient")
    s = b.tensor("s", 10, "optimizer_state")
    s2 = b.tensor("s'", 10, "optimizer_state", replaces=s)
    b.op("backward", writes=[g], duration=10)
    b.op("adam", "optimizer", reads=[g, s], writes=[s2], duration=100, engine="cpu", phase="update")
    b.op("next", duration=30)
    b.op("last", reads=[s2], duration=1, engine="cpu", phase="update")
    log = replay(Plan(b.build()), machine(cpu="host"))
    assert ("h2d", "s", 0, 0) not in spans(log)
    assert spans(log, "move")[0] == ("d2h", "g", 10, 20)  # an implicit fetch: the CPU can't read hbm
    assert ("cpu", "adam", 20, 120) in spans(log, "run")
    assert ("npu", "next", 20, 50) in spans(log, "run")
    # first for the result that `last` reads, then for `last` itself: both on the CPU
    assert stalls(log)[-2:] == [("last", "engine", 50, 120), ("last", "engine", 120, 121)]


def test_the_end_says_what_it_waits_for():
    b = TraceBuilder()
    w, x = b.tensor("w", 300, "input"), b.tensor("x", 10, "input")
    y = b.tensor("y", 10)
    b.op("first", reads=[x], writes=[y], duration=10)
    b.op("adam", "optimizer", reads=[y], duration=100, engine="cpu", phase="update")
    log = replay(Plan(b.build(), [Move(w, "host", before="first")]), machine(cpu="host", copy_engines=2))
    # y goes to the host at half the link's rate from 10 to 30, the CPU runs to 130, and w is on its way until 310
    assert [row[1:] for row in stalls(log)][-2:] == [("engine", 30, 130), ("drain", 130, 310)]


def test_running_again_waits_for_the_first_run_on_another_engine():
    b = TraceBuilder()
    x, y, z = b.tensor("x", 10, "input"), b.tensor("y", 10), b.tensor("z", 10)
    b.op("aside", reads=[x], writes=[y], duration=100, engine="cpu")
    b.op("main", reads=[x], writes=[z], duration=5)
    b.op("late", reads=[y, z], duration=1)
    log = replay(Plan(b.build(), [Recompute("aside", before="late")]), machine(cpu="host"))
    assert ("cpu", "aside", 0, 100) in spans(log, "run")
    assert stalls(log)[:2] == [("main", "transfer", 0, 10), ("aside", "engine", 15, 100)]
    assert ("cpu", "aside", 100, 200) in spans(log, "recompute")


def test_carried_tensors_come_home_at_the_end():
    b = TraceBuilder()
    w = b.tensor("w", 40, "weight")
    b.op("use", reads=[w], duration=10)
    log = replay(Plan(b.build(), [Move("w", "host", after="use")]), machine())
    assert log.counters["returned_moves"] == 1
    assert spans(log, "move") == [("d2h", "w", 10, 50), ("h2d", "w", 50, 90)]
    assert log.end == 90
    final = log.memory.groupby("tier").delta_bytes.sum()
    assert final["hbm"] == 40
    assert final["host"] == 0


def test_what_began_behind_a_device_leaves_it_before_others_return_to_it():
    b = TraceBuilder()
    old = [b.tensor(f"w{i}", 40, "weight") for i in range(2)]
    new = [b.tensor(f"v{i}", 40, "weight", replaces=old[i]) for i in range(2)]
    for i in range(2):
        b.op(f"u{i}", reads=[old[i]], writes=[new[i]], duration=10)
    trace = b.build(outputs=new, carry=list(zip(new, old)))
    moves = [Move("v0", "host", after="u0"), Move("w1", "hbm", before="u1")]
    # 50 bytes hold one of the two: at the end v1 goes to where w1 began, and then v0 comes back
    log = replay(Plan(trace, moves, place={old[1]: "host"}), machine(hbm=50))
    assert spans(log, "move") == [
        ("d2h", "v0", 10, 50),
        ("h2d", "w1", 50, 90),
        ("d2h", "v1", 100, 140),
        ("h2d", "v0", 140, 180),
    ]
    assert log.counters["returned_moves"] == 2


def test_out_of_memory_names_who_holds_what():
    with pytest.raises(OutOfMemory, match=r"op 'b' needs 10 B in 'hbm'.*x \(10 B\)") as caught:
        replay(Plan(chain(("a", 10), ("b", 10), ("c", 10))), machine(hbm=25))
    assert caught.value.need_bytes == 10
    assert caught.value.log is not None
    assert not caught.value.log.complete


def test_a_read_that_nothing_can_restore_is_illegal():
    trace = chain(("a", 10), ("b", 10))
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op)
    b.op("late", reads=[0], duration=1)
    with pytest.raises(IllegalPlan, match=r"op .late.: tensor .x. was dropped, and no op produces it"):
        replay(Plan(b.build(), [Drop("x", after="a")]), machine())


def test_recompute_after_the_update_is_illegal_and_names_the_overwriting_op():
    b = TraceBuilder()
    w = b.tensor("w", 10, "weight")
    y = b.tensor("y", 10)
    w2 = b.tensor("w'", 10, "weight", replaces=w)
    b.op("forward", reads=[w], writes=[y], duration=1)
    b.op("step", "optimizer", reads=[w], writes=[w2], duration=1, phase="update")
    b.op("late", reads=[y], duration=1)
    with pytest.raises(IllegalPlan, match="'w' was overwritten by 'step' and no copy was kept"):
        replay(Plan(b.build(), [Drop("y", after="forward")]), machine())


def test_two_copies_that_wait_for_each_others_space_are_a_deadlock():
    b = weights(600, 600)
    plan = Plan(
        b.build(),
        [Move("w0", "host", before="compute"), Move("w1", "hbm", before="compute")],
        place={1: "host"},
    )
    with pytest.raises((Deadlock, OutOfMemory), match=r"w0|w1"):
        replay(plan, machine(hbm=1000, host=1000))


def test_a_group_without_its_partner_is_refused():
    b = TraceBuilder()
    b.op("send", "send", reads=[b.tensor("x", 4, "input")], group="lonely")
    with pytest.raises(TraceError, match="group 'lonely' lacks a member"):
        replay(Plan(b.build()), machine(devices=2))


def test_a_later_move_replaces_one_that_has_not_started():
    b = weights(50, 20)
    moves = [
        Move("w0", "host", before="compute"),
        Move("w1", "host", before="compute"),
        Move("w1", "hbm", before="compute"),
    ]
    log = replay(Plan(b.build(), moves), machine())
    assert [row for row in spans(log, "move") if row[2] < 1000] == [("d2h", "w0", 0, 50)]


def test_moving_where_a_clean_copy_lies_is_free():
    b = weights(50)
    b.op("more", reads=[0], duration=1000)
    moves = [Move("w0", "host", keep=True, before="compute"), Move("w0", "host", before="more")]
    log = replay(Plan(b.build(), moves), machine())
    assert [row[1:] for row in spans(log, "move")] == [("w0", 0, 50), ("w0", 1000, 1050)]  # out once; back once
    assert [row[0] for row in spans(log, "move")] == ["d2h", "h2d"]


# ---- what the program holds -------------------------------------------------------------------------


def holding(*, until: str = "c") -> Trace:
    """a, b, c, d in a row; the program holds what `a` makes until the end of `until`, though only b reads it."""
    trace = chain(("a", 10), ("b", 10), ("c", 10), ("d", 10))
    return with_releases(trace, [(trace.tensor_id("a.out"), trace.op_id(until))])


def freed(log, tensor):
    """When a tensor came and went: (time, bytes, cause)."""
    rows = log.changes[log.change("tensor") == log.trace.tensor_id(tensor)].tolist()
    return [(row[0], row[2], CAUSES[row[5]]) for row in rows]


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_held_goes_when_it_is_released(fast):
    log = replay(Plan(holding()), machine(), fast=fast)
    assert freed(log, "a.out") == [(0, 10, "made"), (30, -10, "freed")]
    assert spans(log) == [("npu", name, 10 * i, 10 * i + 10) for i, name in enumerate("abcd")]


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_held_may_be_dropped_and_stays_away(fast):
    log = replay(Plan(holding(), [Drop("a.out", after="b")]), machine(), fast=fast)
    assert freed(log, "a.out") == [(0, 10, "made"), (20, -10, "dropped")]
    assert log.counters["implicit_recomputes"] == 0


def test_what_comes_back_is_held_again_and_after_the_release_goes_with_its_last_reader():
    for until, gone in (("c", 40), ("d", 50)):
        plan = Plan(holding(until=until), [Drop("a.out", after="b"), Recompute("a", before="c")])
        log = replay(plan, machine())
        assert freed(log, "a.out")[2:] == [(20, 10, "made"), (gone, -10, "freed")]
    # recomputed once the program has let go: nobody reads it
    plan = Plan(holding(), [Drop("a.out", after="b"), Recompute("a", before="d")])
    assert freed(replay(plan, machine()), "a.out")[2:] == [(30, 10, "made"), (40, -10, "freed")]


def test_a_release_during_a_copy_frees_when_the_copy_has_ended():
    plan = Plan(holding(), [Move("a.out", "host", after="b", keep=True)])
    log = replay(plan, machine(rate=GB // 4))  # 10 B in 40 ns: from 20 to 60
    assert [row[:2] for row in freed(log, "a.out") if row[1] < 0] == [(60, -10), (60, -10)]


def test_a_release_on_another_engine_counts_at_its_end():
    b = TraceBuilder()
    t = [b.tensor(name, 10, "input" if name == "x" else "activation") for name in "xyzv"]
    b.op("a", reads=[t[0]], writes=[t[1]], duration=10)
    b.op("b", reads=[t[1]], writes=[t[2]], duration=10)
    b.op("slow", writes=[t[3]], duration=100, engine="cpu", releases=[t[1]])
    b.op("c", duration=10)
    log = replay(Plan(b.build(outputs=[t[2]])), machine(cpu="host"))
    assert [row[0] for row in freed(log, "y") if row[1] < 0] == [120]


@pytest.mark.parametrize(("until", "cause"), [("c", "dropped"), ("b", "freed")])
def test_a_plan_that_keeps_the_dead_has_what_is_held_among_the_living(until, cause):
    names = holding().op_columns.name

    class Evicting(Online):
        def on_pressure(self, need, memory):
            return [Drop({"c": "a.out", "d": "b.out"}[names[need.op]])]

    log = replay(Plan(holding(until=until), online=Evicting, keep_dead=True), machine(hbm=30))
    assert freed(log, "a.out") == [(0, 10, "made"), (20, -10, cause)]


@pytest.mark.parametrize("engine", ["", "cpu"])
def test_an_encoding_is_logged_as_codec_and_run_again_as_recompute(engine):
    """act 0-10, enc 10-15, dec 15-22; what dec produced is dropped and recomputed before late."""
    b = TraceBuilder()
    act, code, back = (b.tensor(name, size) for name, size in (("act", 20), ("code", 5), ("back", 20)))
    b.op("make", writes=[act], duration=10)
    b.op("enc", "codec", reads=[act], writes=[code], duration=5, engine=engine)
    b.op("dec", "codec", reads=[code], writes=[back], duration=7, engine=engine)
    b.op("use", reads=[back], duration=10)
    b.op("late", reads=[back], duration=10)
    platform = machine(cpu="host" if engine else "")
    if engine:  # one memory for both
        near = replace(platform.engines[-1], home="hbm", reaches=("hbm",))
        platform = replace(platform, engines=(platform.engines[0], near))
    log = replay(Plan(b.build(outputs=[], carry=()), [Drop("back", after="use")]), platform)
    lane = engine or "npu"
    assert spans(log, "codec") == [(lane, "enc", 10, 15), (lane, "dec", 15, 22)]
    again = [row[1:] for row in spans(log, "recompute")]
    assert again == [("make", 32, 42), ("enc", 42, 47), ("dec", 47, 54)]
    assert spans(log, "run")[-1] == ("npu", "late", 54, 64)
    assert stalls_of(log).codec_ns == (0 if engine else 12)
