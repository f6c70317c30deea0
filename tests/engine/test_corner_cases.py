"""Ways through the engine that random problems seldom take, each drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.engine.event_path.record import Columns
from sim.engine.replay import replay
from sim.errors import IllegalPlan, ProfileError, TraceError
from sim.hardware.platform import Allocator, Link, Tier
from sim.plan import Drop, Move, Online, Plan, Recompute, Wait
from sim.trace import TraceBuilder
from tests.engine.test_regressions import GB, lawful, machine, spans
from tests.engine.test_timeline import chain


def three() -> TraceBuilder:
    b = TraceBuilder()
    x, y, z, end = b.tensor("x", 10, "input"), b.tensor("y", 20), b.tensor("z", 10), b.tensor("end", 10)
    b.op("a", reads=[x], writes=[y], duration=10)
    b.op("b", reads=[y], writes=[z], duration=100)
    b.op("c", reads=[y, z], writes=[end], duration=10)
    return b


@pytest.mark.parametrize("tensor", ["y", 1])
@pytest.mark.parametrize("anchor", ["a", 0])
def test_tensors_and_ops_of_a_move_go_by_name_or_by_id(tensor, anchor):
    log = replay(Plan(three().build(), [Move(tensor, "host", keep=True, after=anchor)]), machine())
    assert spans(log, "d2h") == [("y", 10, 30)]


@pytest.mark.parametrize("action", [Move(0, "host", before=0, after=1), Drop(0, before=0, after=1), Move(0, "host")])
def test_an_action_stands_before_or_after_one_op(action):
    with pytest.raises(IllegalPlan, match="either before or after one op"):
        replay(Plan(three().build(), [action]), machine())


@pytest.mark.parametrize("name", [0, "x"])
@pytest.mark.parametrize(("to", "wire", "why"), [("hsot", None, "no tier 'hsot'"), ("host", -1, "wire is negative")])
def test_a_move_by_id_is_refused_like_one_by_name(name, to, wire, why):
    with pytest.raises(IllegalPlan, match=why):
        replay(Plan(three().build(), [Move(name, to, wire=wire, before=0)]), machine())


@pytest.mark.parametrize("name", ["priority", "delay", "wire", "codec"])
@pytest.mark.parametrize("value", ["high", 2**63, -(10**400), float("nan"), float("inf"), 0.5, [1]])
def test_the_figures_of_a_move_are_whole_numbers_of_64_bits(name, value):
    with pytest.raises(IllegalPlan, match=f"{name} is not a whole number of less than 64 bits"):
        replay(Plan(three().build(), [Move("x", "host", before=0, **{name: value})]), machine())


@pytest.mark.parametrize("answer", [Recompute("make"), Wait("y")])
def test_only_drops_and_moves_answer_pressure(answer):
    class Answers(Online):
        def on_pressure(self, need, memory):
            return [answer]

    b = TraceBuilder()
    y, z = b.tensor("y", 60), b.tensor("z", 60)
    b.op("make", writes=[y], duration=10)
    b.op("more", writes=[z], duration=10)
    plan = Plan(b.build(outputs=[y, z], carry=()), online=Answers)
    with pytest.raises(IllegalPlan, match="only Drop and Move can answer pressure"):
        replay(plan, machine(hbm=100))


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (Move("z", "host", before="a"), "Move of tensor 'z' at op 'a': it has not been produced yet"),
        (Drop("z", before="a"), "Drop of tensor 'z' at op 'a': it has not been produced yet"),
        (Recompute("b", before="a"), "op 'b': Recompute before it has run"),
    ],
)
def test_what_is_not_made_yet_is_not_moved_dropped_or_made_again(action, why):
    with pytest.raises(IllegalPlan, match=why):
        replay(Plan(three().build(), [action]), machine())


def test_a_copy_that_comes_back_compressed_gives_back_what_it_took():
    """y leaves, comes back as 5 of its 20 B, and is freed after its last reader."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 10, "input"), b.tensor("y", 20), b.tensor("z", 10)
    b.op("a", reads=[x], writes=[y], duration=10)
    b.op("b", reads=[x], duration=100)
    b.op("c", reads=[y], writes=[z], duration=10)
    moves = [Move("y", "host", after="a"), Wait("y", before="b"), Move("y", "hbm", before="b", wire=5)]
    log = replay(Plan(b.build(outputs=[z], carry=()), moves), machine())
    rows = log.memory.query("tensor == 'y'")
    assert dict(rows.groupby("tier").delta_bytes.sum()) == {"hbm": 0, "host": 0}
    assert spans(log, "h2d") == [("y", 30, 35)]
    assert sorted(rows[rows.tier == "hbm"].delta_bytes) == [-20, -5, 5, 20]


def test_what_is_run_again_is_made_at_home_though_a_copy_lies_elsewhere():
    """y is on the host only; its producer is recomputed just before c, which finds y at home."""
    b = three()
    log = lawful(Plan(b.build(), [Move("y", "host", after="b"), Wait("y", after="b"), Recompute("a", before="c")]),
                 machine()).log  # fmt: skip
    assert spans(log, "h2d") == []
    assert spans(log, "npu")[2:] == [("a", 130, 140), ("c", 140, 150)]


def test_a_read_whose_copy_is_given_up_is_fetched_at_once_though_another_is_still_on_its_way():
    """Device 1 replaces the queued copy of x by none at 5; x is asked for again then, before w, which comes at 20.

    Device 0 waits for x and for y, which takes until 300 from the other device. On the link from the host: z until
    100, x until 150, w until 350; `use` starts at 300. Asked for after y only, x would come at 400.
    """
    b = TraceBuilder()
    x, y = b.tensor("x", 50, "input"), b.tensor("y", 300, "input")
    z, w = b.tensor("z", 100, "input"), b.tensor("w", 200, "input")
    b.op("use", reads=[x, y], duration=10, device=0)
    b.op("other", duration=5, device=1)
    b.op("more", duration=15, device=1)
    b.op("last", duration=5, device=1)
    moves = [Move(name, "hbm@0", keep=True, before="use") for name in ("z", "x", "y")]
    moves += [Move("x", "host", before="more"), Move("w", "hbm@0", keep=True, before="last")]
    place = {x: "host", y: "hbm@1", z: "host", w: "host"}
    log = lawful(Plan(b.build(outputs=[], carry=()), moves, place=place), machine(devices=2)).log
    assert spans(log, "h2d@0") == [("z", 0, 100), ("x", 100, 150), ("w", 150, 350)]
    assert spans(log, "npu@0") == [("use", 300, 310)]


def test_all_that_a_recomputation_reads_is_fetched_at_once():
    """a comes from the host, c from the other device, over links of their own: both from 0, and again from 40."""
    b = TraceBuilder()
    a, c = b.tensor("a", 20, "input"), b.tensor("c", 30, "input")
    y = b.tensor("y", 10)
    b.op("make", reads=[a, c], writes=[y], duration=10)
    b.op("use", reads=[y], duration=10)
    drops = [Drop(tensor, tier="hbm@0", after="make") for tensor in (a, c, y)]
    log = lawful(Plan(b.build(outputs=[], carry=()), drops, place={a: "host", c: "hbm@1"}), machine(devices=2)).log
    assert spans(log, "h2d@0") == [("a", 0, 20), ("a", 40, 60)]
    assert spans(log, "b2a") == [("c", 0, 30), ("c", 40, 70)]
    assert spans(log, "npu@0") == [("make", 30, 40), ("make", 70, 80), ("use", 80, 90)]


def test_a_read_takes_back_a_move_elsewhere_that_has_no_space_yet():
    """w fills the other device for good, so the move of x there would never begin."""
    b = TraceBuilder()
    x, w = b.tensor("x", 50, "input"), b.tensor("w", 80, "input")
    b.op("use", reads=[x], duration=10)
    plan = Plan(b.build(outputs=[], carry=()), [Move(x, "hbm@1", before="use")], place={x: "host", w: "hbm@1"})
    log = lawful(plan, machine(devices=2, hbm=100)).log
    assert spans(log, "h2d@0") == [("x", 0, 50)]
    assert spans(log, "npu@0") == [("use", 50, 60)]
    assert log.counters["moves_without_space"] == 1


def test_a_copy_of_what_the_first_tensor_of_a_trace_overwrites_is_freed_like_any_other():
    """The new value stands before the old one in the trace; `step` waits for the copy and runs from 10 to 20."""
    b = TraceBuilder()
    new, w = b.tensor("w2", 10, "weight"), b.tensor("w", 10, "weight")
    b.take_over(new, w)
    b.op("step", "optimizer", reads=[w], writes=[new], duration=10, phase="update")
    log = lawful(Plan(b.build(outputs=[new], carry=()), [Move(w, "host", keep=True, before="step")]), machine()).log
    rows = log.memory.query("tensor == 'w' and tier == 'host'")
    there = zip(rows.time_ns, rows.delta_bytes, rows.cause, strict=True)
    assert list(there) == [(0, 10, "moved in"), (20, -10, "freed")]


def test_each_member_of_a_group_has_a_device_of_its_own():
    b = TraceBuilder()
    got = [b.tensor(f"g{i}", 10, "gradient") for i in range(2)]
    for i in range(2):
        b.op(f"reduce{i}", "collective", writes=[got[i]], bytes=10, group="all", device=0)
    b.op("else", duration=1, device=1)
    with pytest.raises(TraceError, match="each member needs a device of its own"):
        replay(Plan(b.build()), machine(devices=2))


def test_a_long_log_is_packed_as_it_grows_and_stays_the_same(monkeypatch):
    plan = Plan(chain(*((f"op{i}", 10) for i in range(20))), [Move("op1.out", "host", after="op1")])
    whole = replay(plan, machine())
    monkeypatch.setattr(Columns, "PACK", 12)
    assert replay(plan, machine()) == whole


def test_free_neighbours_are_those_of_the_copy_in_that_tier():
    """In 100 B: x at 0, y (freed after b) at 10, z at 30, then nothing; none on the host and for what is freed."""
    seen = []

    class Looks(Online):
        def before(self, op, memory):
            seen.append([memory.neighbours(t, tier) for t in range(3) for tier in ("hbm", "host")])
            return ()

    near = machine()
    pool = Tier("hbm", 100, 100, GB, device=0, allocator=Allocator("pool", (("rounding", 1),)))
    b = TraceBuilder()
    x, y, z = b.tensor("x", 10, "input"), b.tensor("y", 20), b.tensor("z", 10)
    b.op("a", reads=[x], writes=[y], duration=10)
    b.op("b", reads=[y], writes=[z], duration=10)
    b.op("c", reads=[z], duration=10)
    plan = Plan(b.build(outputs=[z], carry=()), online=Looks)
    replay(plan, replace(near, tiers=(pool, *near.tiers[1:])))
    none = (0, 0)
    assert seen[0] == [(0, 90), none, none, none, none, none]
    assert seen[2] == [(0, 20), none, none, none, (20, 60), none]


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("question", ["free", "leaving", "arriving", "largest_hole", "neighbours", "residents"])
def test_a_question_about_a_tier_that_is_not_there_is_answered_in_words(question, pooled):
    """On either path: a tier with an allocator takes the one of events."""

    class Looks(Online):
        def before(self, op, memory):
            list(memory.residents("hmb")) if question == "residents" else getattr(memory, question)(*given)
            return ()

    given, near = (0, "hmb") if question == "neighbours" else ("hmb",), machine()
    pool = Tier("hbm", 100, 100, GB, device=0, allocator=Allocator("pool", (("rounding", 1),)))
    with pytest.raises(ProfileError, match=r"^.*: no tier 'hmb' \(did you mean 'hbm'\?\)"):
        replay(Plan(three().build(), online=Looks), replace(near, tiers=(pool, *near.tiers[1:])) if pooled else near)


def test_a_route_of_several_links_is_taken_whole():
    """Two links on the way down, one slow: both are held from 0 to 40."""
    near = machine()
    tiers = (*near.tiers, Tier("nvme", 1000, 1000, GB))
    links = (*near.links, Link("h2n", "host", "nvme", GB // 2), Link("n2h", "nvme", "host", GB))
    moves = [Move("y", "nvme", keep=True, after="a")]
    log = replay(Plan(three().build(), moves), replace(near, tiers=tiers, links=links))
    assert spans(log, "d2h") == spans(log, "h2n") == [("y", 10, 50)]


def test_an_engine_takes_longer_for_what_it_makes_in_a_slower_tier():
    """600 B take 1200 ns to write on the host at 1/2 B/ns; the 60 ns that they take at home are in the 100 ns."""
    near = machine()
    tiers = (replace(near.tiers[0], bandwidth=10 * GB), replace(near.tiers[1], bandwidth=GB // 2))
    engines = (replace(near.engines[0], reaches=("hbm", "host")), *near.engines[1:])
    b = TraceBuilder()
    y = b.tensor("y", 600)
    b.op("make", writes=[y], duration=100)
    trace = b.build(outputs=[y], carry=())
    platform = replace(near, tiers=tiers, engines=engines)
    assert spans(replay(Plan(trace), platform), "npu") == [("make", 0, 100)]
    assert spans(replay(Plan(trace, place={y: "host"}), platform), "npu") == [("make", 0, 100 + 1200 - 60)]


def test_a_send_that_no_link_can_carry_is_refused():
    near = machine(devices=2)
    platform = replace(near, links=tuple(link for link in near.links if link.name in ("d2h@0", "d2h@1")))
    b = TraceBuilder()
    x, got = b.tensor("x", 10, "input"), b.tensor("got", 10)
    b.op("send", "send", reads=[x], group="s")
    b.op("recv", "recv", writes=[got], group="s", device=1)
    with pytest.raises(IllegalPlan, match="op 'send': no route from 'hbm@0' to 'hbm@1'"):
        replay(Plan(b.build()), platform)


def test_an_op_waits_for_a_hole_though_the_free_bytes_would_do():
    """In 100 B: t1 at 30 leaves 20 to 50; the 70 free bytes beside it lie in holes of 30 and 40, and 60 are asked."""
    near = machine()
    pool = Tier("hbm", 100, 100, GB, device=0, allocator=Allocator("pool", (("rounding", 1),)))
    b = TraceBuilder()
    t = [b.tensor(f"t{i}", 30) for i in range(3)]
    b.op("a", writes=t, duration=10)
    b.op("b", reads=[t[0], t[2]], duration=10)
    b.op("large", writes=[b.tensor("z", 60)], duration=10)
    b.op("late", reads=[t[1]], duration=10)
    plan = Plan(b.build(outputs=[], carry=()), [Move("t1", "host", after="b")])
    log = replay(plan, replace(near, tiers=(pool, *near.tiers[1:])))
    assert spans(log, "d2h") == [("t1", 20, 50)]
    assert spans(log, "npu")[2:] == [("large", 50, 60), ("late", 90, 100)]


def test_space_is_asked_for_a_result_and_for_workspace_each_for_what_it_is():
    """In 100 B: w at 0, v at 50; w leaves for big, which is the first tensor of the trace, and v for workspace."""
    asked = []

    class Notes(Online):
        def on_pressure(self, need, memory):
            asked.append((memory.now, need.bytes, need.reason))
            return [Move(w if memory.where(w) == ("hbm",) else v, "host")]

    near = machine()
    pool = Tier("hbm", 100, 100, GB, device=0, allocator=Allocator("pool", (("rounding", 1),)))
    b = TraceBuilder()
    big, w, v = b.tensor("big", 40), b.tensor("w", 50, "input"), b.tensor("v", 30, "input")
    b.op("large", writes=[big], workspace=40, duration=10)
    plan = Plan(b.build(outputs=[big], carry=()), online=Notes)
    log = replay(plan, replace(near, tiers=(pool, *near.tiers[1:])))
    assert asked == [(0, 40, "its results"), (50, 40, "its workspace")]
    assert spans(log, "npu") == [("large", 80, 90)]


def test_a_copy_that_arrives_has_an_address_of_its_own():
    """In 100 B from 0: x, which stays; w comes from the host beside it, and y beside both."""
    seen = []

    class Looks(Online):
        def before(self, op, memory):
            seen.append([memory.neighbours(tensor, "hbm") for tensor in range(3)])
            return ()

    near = machine()
    pool = Tier("hbm", 100, 100, GB, device=0, allocator=Allocator("pool", (("rounding", 1),)))
    b = TraceBuilder()
    x, w, y = b.tensor("x", 10, "input"), b.tensor("w", 20, "input"), b.tensor("y", 30)
    b.op("a", reads=[x], duration=100)
    b.op("b", reads=[w], writes=[y], duration=10)
    b.op("c", reads=[y], duration=10)
    plan = Plan(b.build(outputs=[y], carry=()), [Move(w, "hbm", before="a")], place={w: "host"}, online=Looks)
    replay(plan, replace(near, tiers=(pool, *near.tiers[1:])))
    coming = [(0, 0), (0, 70), (0, 0)]  # it takes its space when it is asked for
    assert seen == [coming, coming, [(0, 0), (0, 0), (0, 40)]]


def test_a_wait_holds_the_device_until_an_engine_beside_it_has_made_the_tensor():
    """The CPU makes y until 50; b is over at 20, and what sends y away before c waits for it."""
    b = TraceBuilder()
    x, y, z, end = b.tensor("x", 10, "input"), b.tensor("y", 20), b.tensor("z", 10), b.tensor("end", 10)
    b.op("a", reads=[x], writes=[y], duration=50, engine="cpu")
    b.op("b", reads=[x], writes=[z], duration=20)
    b.op("c", reads=[z], writes=[end], duration=10)
    b.op("d", reads=[y, end], duration=10)
    moves = [Wait("y", before="c"), Move("y", "host", before="c")]
    log = lawful(Plan(b.build(outputs=[end], carry=()), moves), machine(cpu="hbm")).log
    assert spans(log, "cpu") == [("a", 0, 50)]
    assert spans(log, "d2h") == [("y", 50, 70)]
    assert spans(log, "npu")[:2] == [("b", 0, 20), ("c", 50, 60)]
