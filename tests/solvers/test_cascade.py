"""A host that is full sends what is coldest on to the tier behind it, and the law holds on all three."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.comparison import compare
from sim.engine.replay import replay
from sim.errors import OutOfMemory
from sim.experiment import simulate
from sim.hardware.platform import Link, Platform, Tier
from sim.hardware.profile import load_profile
from sim.pages import comparison_view, run_notes, run_view
from sim.plan import Move, Plan, Wait
from sim.report.page.run import run_data
from sim.report.page.table import table_data
from sim.report.table import comparison_text, summary_text
from sim.solvers.cascade import cascade, resident_bytes
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, facts, machine
from tests.strategies import traces
from workloads.transformer import transformer

POLICIES = ("swap_all", "vdnn", "save_on_cpu", "lru_tiering")
TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 512}


def tiers(hbm: int, host: int, drive: int = ROOMY, *, rate: int = GB) -> Platform:
    """Three tiers in a row, all links alike; drive: bytes of the last one, 0 for none."""
    base = machine(hbm)
    two = (base.tiers[0], replace(base.tiers[1], capacity=host))
    if not drive:
        return replace(base, tiers=two)
    links = (*base.links, Link("h2n", "host", "nvme", rate), Link("n2h", "nvme", "host", rate))
    return replace(base, tiers=(*two, Tier("nvme", drive, drive, GB, kind="nvme")), links=links)


def stack(layers: int, size: int = 100, forward: int = 1000, backward: int = 1000) -> Trace:
    """Layers whose results backward reads in reverse, one tensor of `size` bytes each."""
    b = TraceBuilder()
    x = [b.tensor("x0", 1, "input")]
    for i in range(layers):
        x.append(b.tensor(f"x{i + 1}", size, layer=i))
        b.op(f"f{i}", "conv", reads=[x[i]], writes=[x[-1]], layer=i, duration=forward)
    above = b.tensor("d", 1, "temporary")
    b.op("loss", "loss", reads=[x[-1]], writes=[above], phase="backward", duration=backward)
    for i in reversed(range(layers)):
        below = b.tensor(f"d{i}", 1, "temporary", layer=i)
        b.op(f"f{i}.bwd", "conv", reads=[above, x[i + 1], x[i]], writes=[below], phase="backward", layer=i,
             duration=backward)  # fmt: skip
        above = below
    return b.build(outputs=[above], carry=())


def moved(result) -> dict[str, list[str]]:
    """The tensors that each link carried, in order."""
    rows = result.events.query("why == 'move'").sort_values("start_ns")
    return {lane: list(group.tensor) for lane, group in rows.groupby("lane")}


def test_the_coldest_goes_on_and_comes_back_up_when_there_is_room() -> None:
    # x1 … x4 leave in turn; the host holds two, so that x1 and x2, needed last, lie on the drive at the end of
    # forward. When x4 has come back x2 fits, and after x3 for x1
    result = simulate(stack(6), tiers(10_000, 200), "swap_all", unit="op", ahead=1)
    found = moved(result)
    assert found["d2h"] == ["x1", "x2", "x3", "x4"]
    assert found["h2n"] == ["x1", "x2"]
    assert found["n2h"] == ["x2", "x1"]
    assert found["h2d"] == ["x4", "x3", "x2", "x1"]
    summary = result.summary()
    assert summary["moved_bytes"] == {"d2h": 400, "h2d": 400, "h2n": 200, "n2h": 200}
    assert summary["peak_by_tier"]["host"] == 200
    assert summary["peak_by_tier"]["nvme"] == 200
    assert summary["stall_ns"] == dict.fromkeys(summary["stall_ns"], 0)


def test_what_the_host_cannot_hold_at_all_goes_straight_through() -> None:
    result = simulate(stack(6), tiers(10_000, 99), "swap_all", unit="op")
    assert moved(result)["d2h"] == moved(result)["h2n"] == ["x1", "x2", "x3", "x4"]
    assert result.summary()["peak_by_tier"]["host"] == 0
    rows = result.events.query("why == 'move' and tensor == 'x1'")
    assert len(set(rows.start_ns)) == 2  # out, and back: over both links at once


def test_where_all_fits_the_plan_is_as_it_was() -> None:
    roomy, two = tiers(10_000, ROOMY), tiers(10_000, ROOMY, 0)
    trace = stack(6)
    for policy in POLICIES:
        with_drive, without = simulate(trace, roomy, policy), simulate(trace, two, policy)
        assert Counter(with_drive.plan.actions) == Counter(without.plan.actions)
        assert with_drive.log.end == without.log.end


def test_a_third_tier_may_have_a_fourth() -> None:
    platform = tiers(10_000, 100, 100)
    links = (*platform.links, Link("n2t", "nvme", "tape", GB), Link("t2n", "tape", "nvme", GB))
    platform = replace(platform, tiers=(*platform.tiers, Tier("tape", ROOMY, ROOMY, GB)), links=links)
    assert platform.cascade("host") == ("host", "nvme", "tape")
    for policy in ("swap_all", "vdnn"):
        parameters = {"unit": "op"} if policy == "swap_all" else {"variant": "all"}
        summary = simulate(stack(6), platform, policy, **parameters).summary()
        assert [summary["peak_by_tier"][tier] // 100 for tier in ("host", "nvme", "tape")] == [1, 1, 2]


def test_what_the_host_s_own_engine_keeps_there_is_not_counted_twice() -> None:
    b = TraceBuilder()
    state = b.tensor("state", 150, "optimizer_state")
    x, y, z = (b.tensor(name, 100) for name in "xyz")
    new = b.tensor("state.new", 150, "optimizer_state", replaces=state)
    b.op("f", writes=[x], duration=100)
    b.op("g", reads=[x], writes=[y], duration=100)
    b.op("h", reads=[y], writes=[z], duration=100)
    b.op("b", reads=[x, z], writes=[b.tensor("end", 1)], phase="backward", duration=100)
    b.op("adam", "optimizer", reads=[state], writes=[new], phase="update", engine="cpu")
    actions = (Move(x, "host", after=1), Move(x, "hbm", before=3))
    assert cascade(b.build(), tiers(1000, 249), actions, "host")[0] == Move(x, "nvme", after=1)
    assert cascade(b.build(), tiers(1000, 250), actions, "host") == actions


def planned(trace: Trace, host: int, drive: int = ROOMY, policy: str = "swap_all(unit=op, ahead=1)") -> list[str]:
    """What a policy plans with a host of so many bytes, in order: tensor, tier, and the op before or after it."""
    actions = simulate(trace, tiers(10_000, host, drive), policy).plan.actions
    name, op = trace.tensor_columns.name, trace.op_columns.name
    return [
        f"{name[trace.tensor_id(a.tensor)]} {a.to} "
        + (f"after {op[trace.op_id(a.after)]}" if a.before is None else f"before {op[trace.op_id(a.before)]}")
        for a in actions
        if isinstance(a, Move)
    ]


def test_what_goes_on_leaves_when_its_space_is_wanted_and_what_is_needed_next_rises_when_space_is_left() -> None:
    found = planned(stack(6), 200)
    down = [text for text in found if " hbm " not in text]
    assert [text.rsplit(" ", 2)[0] for text in down] == ["x1 host", "x2 host", "x1 nvme", "x3 host", "x2 nvme",
                                                         "x4 host", "x2 host", "x1 host"]  # fmt: skip
    at = {text.rsplit(" ", 2)[0]: text.split(" ", 2)[2] for text in reversed(found)}
    # each goes on at the anchor of the newcomer for which it makes way, ahead of it
    assert found.index(next(t for t in found if t.startswith("x1 nvme"))) + 1 == found.index(
        next(t for t in found if t.startswith("x3 host"))
    )
    # and rises where a tensor leaves the host, right behind that
    for rises, leaves in (("x2 host", "x4 hbm"), ("x1 host", "x3 hbm")):
        places = [i for i, text in enumerate(found) if text.startswith(rises)]
        fetch = next(i for i, text in enumerate(found) if text.startswith(leaves))
        assert places[-1] == fetch + 1
        assert found[fetch].split(" ", 2)[2] == found[places[-1]].split(" ", 2)[2]
    assert at["x1 hbm"] != at["x2 hbm"]


def test_what_rises_is_on_the_host_before_the_device_asks_for_it() -> None:
    # the drive is slow: x2 and x1 take 500 ns each over it, and rise beside the ops before those that read them
    slow = tiers(10_000, 200)
    slow = replace(slow, links=(*slow.links[:2], *(replace(link, rate=GB // 5) for link in slow.links[2:])))
    result = simulate(stack(6), slow, "swap_all", unit="op", ahead=1)
    assert sum(result.summary()["stall_ns"].values()) == 0
    rows = result.events.query("why == 'move'")
    starts = {(row.lane, row.tensor): row.start_ns for row in rows.itertuples()}
    for tensor in ("x1", "x2"):
        assert starts["n2h", tensor] + 500 <= starts["h2d", tensor]


def test_it_rises_only_into_space_that_is_left_and_no_further_than_fits() -> None:
    b = TraceBuilder()
    large, small, first = b.tensor("large", 150), b.tensor("small", 60), b.tensor("first", 60)
    made = [b.tensor(f"y{n}", 1) for n in range(6)]
    b.op("a", writes=[large, made[0]], duration=10)
    b.op("b", reads=[made[0]], writes=[small, made[1]], duration=10)
    b.op("c", reads=[made[1]], writes=[first, made[2]], duration=10)
    b.op("d", reads=[made[2], first], writes=[made[3]], phase="backward", duration=10)
    b.op("e", reads=[made[3], small], writes=[made[4]], phase="backward", duration=10)
    b.op("f", reads=[made[4], large], writes=[made[5]], phase="backward", duration=10)
    out = [Move(t, "host", after=op) for t, op in ((large, 0), (small, 1), (first, 2))]
    back = [Move(t, "hbm", before=op) for t, op in ((first, 3), (small, 4), (large, 5))]

    def steps(host: int) -> list[tuple[str, str]]:
        plan = cascade(b.build(), tiers(1000, host), [*out, *back], "host")
        return [(("large", "small", "first")[a.tensor], a.to) for a in plan if isinstance(a, Move)]

    # 149: `large` never fits, and stays behind; 150: it makes way for `small`, and rises when both others have left
    assert steps(149) == [("large", "nvme"), ("small", "host"), ("first", "host"), ("first", "hbm"), ("small", "hbm"),
                          ("large", "hbm")]  # fmt: skip
    assert steps(150) == [("large", "host"), ("large", "nvme"), ("small", "host"), ("first", "host"), ("first", "hbm"),
                          ("small", "hbm"), ("large", "host"), ("large", "hbm")]  # fmt: skip
    # 209: with `small` there is no space for it; 210: both fit until `first` comes
    assert steps(209)[:3] == steps(150)[:3]
    assert steps(210) == [("large", "host"), ("small", "host"), ("large", "nvme"), ("first", "host"), ("first", "hbm"),
                          ("large", "host"), ("small", "hbm"), ("large", "hbm")]  # fmt: skip
    # 269 is a byte less than all three take
    assert ("large", "nvme") in steps(269)
    assert steps(270) == [("large", "host"), ("small", "host"), ("first", "host"), ("first", "hbm"), ("small", "hbm"),
                          ("large", "hbm")]  # fmt: skip


def steps_of(host: int, drive: int, *actions: Move | Wait) -> list[str]:
    """The plan for tensors x, y and z of 100 bytes that six ops in a row use."""
    b = TraceBuilder()
    x, y, z = (b.tensor(name, 100) for name in "xyz")
    made = [b.tensor(f"m{n}", 1) for n in range(6)]
    b.op("0", writes=[x, y, z, made[0]], duration=10)
    for n in range(1, 6):
        b.op(str(n), reads=[made[n - 1], x, y, z], writes=[made[n]], duration=10)
    trace = b.build()
    plan = cascade(trace, tiers(1000, host, drive), actions, "host")
    names = [trace.tensor_columns.name[trace.tensor_id(a.tensor)] for a in plan]
    return [f"{name} {a.to if isinstance(a, Move) else 'wait'}" for name, a in zip(names, plan, strict=True)]


def test_what_is_no_move_stays_where_it_was() -> None:
    found = steps_of(100, ROOMY, Move("x", "host", after=0), Wait("x", before=1), Move("y", "host", after=1),
                     Move("y", "hbm", before=3), Move("x", "hbm", before=4))  # fmt: skip
    assert found == ["x host", "x wait", "x nvme", "y host", "y hbm", "x host", "x hbm"]


def test_what_has_not_started_when_it_is_displaced_goes_straight_on() -> None:
    found = steps_of(100, ROOMY, Move("x", "host", after=0), Move("y", "host", after=0), Move("y", "hbm", before=3),
                     Move("x", "hbm", before=4))  # fmt: skip
    assert found == ["x nvme", "y host", "y hbm", "x host", "x hbm"]


def test_what_fits_nowhere_is_left_as_it_was() -> None:
    # x, needed last, goes on; then the drive is full, so that y cannot make way for z
    found = steps_of(100, 100, Move("x", "host", after=0), Move("y", "host", after=1), Move("z", "host", after=2),
                     Move("z", "hbm", before=3), Move("y", "hbm", before=4), Move("x", "hbm", before=5))  # fmt: skip
    assert found[:4] == ["x host", "x nvme", "y host", "z host"]


def test_what_counts_is_when_it_is_needed_next_not_at_last() -> None:
    found = steps_of(100, ROOMY, Move("x", "host", after=0), Move("y", "host", after=1), Move("x", "hbm", before=2),
                     Move("x", "host", after=3), Move("y", "hbm", before=4), Move("x", "hbm", before=5))  # fmt: skip
    assert found[:2] == ["x host", "y nvme"]  # x is needed before y, and again after it


def test_one_that_is_sent_again_while_it_is_there_takes_its_space_once() -> None:
    found = steps_of(100, ROOMY, Move("x", "host", after=0), Move("x", "host", after=1), Move("y", "host", after=2),
                     Move("x", "hbm", before=3), Move("y", "hbm", before=4))  # fmt: skip
    assert found[:3] == ["x host", "x host", "y nvme"]


def test_the_most_that_the_host_s_own_ops_keep_there_at_once() -> None:
    b = TraceBuilder()
    state, gradient = b.tensor("state", 100, "optimizer_state"), b.tensor("g", 7)
    new = b.tensor("state.new", 100, "optimizer_state", replaces=state)
    scaled, other = b.tensor("scaled", 30), b.tensor("other", 20)
    b.op("f", writes=[gradient], duration=10)
    b.op("scale", reads=[gradient], writes=[scaled], phase="update", engine="cpu")
    b.op("adam", "optimizer", reads=[state, scaled], writes=[new], phase="update", engine="cpu")
    b.op("next", reads=[gradient], writes=[other], phase="update", engine="cpu")
    b.op("last", reads=[other], writes=[b.tensor("end", 5)], phase="update", engine="cpu")
    # state and what replaces it count once, from the start to the end; `scaled` is freed when `other` is produced
    trace = b.build(outputs=[new])
    assert resident_bytes(trace, tiers(1000, 1000), "host") == 100 + 30
    assert resident_bytes(trace, tiers(1000, 1000), "hbm") == 7
    assert resident_bytes(trace, tiers(1000, 1000), "nvme") == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_all_run_with_a_small_host_and_a_drive_and_name_the_host_without(policy) -> None:
    trace = transformer(TINY, batch=2, sequence=64)
    top = simulate(trace, tiers(ROOMY, ROOMY), "keep_all").summary()["peak_bytes"]
    parameters = {"variant": "all"} if policy == "vdnn" else {}
    freely = facts(simulate(trace, tiers(ROOMY, ROOMY, 0), policy, **parameters)).peak
    budget = top * 8 // 10 if policy == "lru_tiering" else freely
    whole = facts(simulate(trace, tiers(budget, ROOMY, 0), policy, **parameters))
    need = whole.host_peak
    for host in (need // 2, need // 5):
        done = facts(simulate(trace, tiers(budget, host), policy, **parameters))
        peaks = done.result.summary()["peak_by_tier"]
        assert peaks["host"] <= host
        assert peaks["nvme"] > 0
        bytes_on = done.result.summary()["moved_bytes"]
        assert bytes_on["d2h"] == sum(whole.out.values())
        assert bytes_on["h2d"] == sum(whole.back.values())
        assert bytes_on["h2n"] > 0
        assert bytes_on["h2n"] == bytes_on["n2h"]
    with pytest.raises(OutOfMemory, match="'host'") as error:
        simulate(trace, tiers(budget, need // 5, 0), policy, **parameters)
    assert "host" in error.value.full
    with pytest.raises(OutOfMemory, match="'host'"):
        simulate(trace, tiers(budget, need // 5, need // 5), policy, **parameters)  # a drive that is full, too


def test_moves_that_never_started_are_counted_and_said() -> None:
    trace = stack(6)
    roomy, small = tiers(10_000, ROOMY, 0), tiers(10_000, 200, 0)
    kept = simulate(trace, small, "swap_all", unit="op").summary()["counters"]
    assert (kept["moves_cancelled"], kept["cancelled_bytes"], kept["moves_without_space"]) == (2, 200, 2)
    assert simulate(trace, roomy, "swap_all", unit="op").summary()["counters"]["moves_cancelled"] == 0
    text = comparison_text(compare(trace, small, [("swap_all", {"unit": "op"})]).rows)
    said = "2 moves (200 B) cancelled before the copy started, 2 of them for lack of space at their destination"
    assert f"swap_all(unit=op): {said}" in text
    # what does not fit says which tiers were full
    refused = comparison_text(compare(trace, small, ["swap_all"], budget=350, find_floor=False).rows)
    assert "hbm and host full" in refused


def test_a_smaller_host_does_not_make_a_plan_faster_in_silence() -> None:
    # backward is faster than the link, and stalls for all four that left; a host of two tensors spares it two of them
    trace = stack(6, forward=1000, backward=300)
    whole, part = (simulate(trace, slow_links(host, GB // 8), "swap_all", unit="op") for host in (ROOMY, 200))
    assert (whole.log.end, part.log.end) == (10_100, 9_100)
    for result in (whole, part):  # each move out happened, or is counted
        assert result.summary()["moved_bytes"]["d2h"] + result.log.counters["cancelled_bytes"] == 400
    (note,) = run_notes(part)
    assert note in summary_text(part.summary(), footer=run_view(part).footer)
    assert note in run_data(run_view(part))["beside"]
    assert run_notes(whole) == ()
    table = comparison_view(compare(trace, slow_links(200, GB // 8), [("swap_all", {"unit": "op"})]))
    assert f"swap_all(unit=op): {note}" in table_data(table)["notes"]


def slow_links(host: int, rate: int) -> Platform:
    """Two tiers, and links at `rate`."""
    platform = tiers(10_000, host, 0)
    return replace(platform, links=tuple(replace(link, rate=rate) for link in platform.links))


def test_what_has_space_and_waits_for_the_link_is_counted_too() -> None:
    b = TraceBuilder()
    first, second = (b.tensor(name, size) for name, size in (("first", 500), ("second", 30)))
    b.op("make", writes=[first, second], duration=10)
    b.op("use", reads=[first, second], writes=[b.tensor("end", 1)], duration=10, phase="backward")
    moves = [Move("first", "host", after="make"), Move("second", "host", after="make")]
    back = [Move("second", "hbm", before="use")]
    log = replay(Plan(b.build(carry=()), [*moves, *back]), tiers(10_000, ROOMY, 0))
    counted = [log.counters[name] for name in ("moves_cancelled", "cancelled_bytes", "moves_without_space")]
    assert counted == [1, 30, 0]


def test_a_move_further_down_that_an_op_is_quicker_than_is_counted() -> None:
    # the drive is full until the end, so that `cold` waits in the host for room there; the op that reads it fetches it
    b = TraceBuilder()
    full = b.tensor("full", 100, "weight")
    cold, x = b.tensor("cold", 40, "weight"), b.tensor("x", 1)
    b.op("first", writes=[x], duration=10)
    b.op("read", reads=[x, cold, full], writes=[b.tensor("end", 1)], duration=10)
    plan = Plan(b.build(carry=()), [Move("cold", "nvme", after="first")], place={"cold": "host", "full": "nvme"})
    log = replay(plan, tiers(10_000, ROOMY, 100))
    counted = [log.counters[name] for name in ("moves_cancelled", "cancelled_bytes", "moves_without_space")]
    assert counted == [1, 40, 1]


def test_lru_gives_the_host_s_spare_copies_up_for_what_has_to_go() -> None:
    # w sends x away; x comes back for its second reader, and its copy in the host, which is full, is a spare one
    b = TraceBuilder()
    x, y, z, w, v = (b.tensor(name, 100) for name in "xyzwv")
    ends = [b.tensor(f"end{i}", 1) for i in range(4)]
    for name, tensor in (("x", x), ("y", y), ("z", z)):
        b.op(name, writes=[tensor], duration=10)
    b.op("w", reads=[z], writes=[w], duration=10)
    b.op("end of y", reads=[y], writes=[ends[0]], duration=10)
    b.op("x again", reads=[x], writes=[ends[1]], duration=10)
    b.op("v", reads=[w], writes=[v], duration=10)
    b.op("end of x", reads=[x, w], writes=[ends[2]], duration=10)
    b.op("end of z", reads=[z, v], writes=[ends[3]], duration=10)
    for drive in (0, ROOMY):
        found = moved(simulate(b.build(), tiers(310, 100, drive), "lru_tiering"))
        assert found == {"d2h": ["x", "z"], "h2d": ["x", "z"]}


def test_g10_s_question_can_be_asked_of_a_shipped_machine() -> None:
    trace = transformer("gpt2", batch=4, sequence=512, precision="amp_bf16")
    budget = simulate(trace, "a100_80_sxm", "swap_all").summary()["peak_bytes"]
    times = []
    for host in ("1.1 TB", "800 MB", "100 MB"):
        platform = load_profile("a100_80_sxm", overrides={"tiers.host.capacity": host})
        summary = simulate(trace, platform, "swap_all", budget=budget).summary()
        assert summary["fits"]
        assert (summary["peak_by_tier"]["nvme"] > 0) == (host != "1.1 TB")
        times.append(summary["makespan_ns"])
    assert times == sorted(times)
    assert times[0] < times[-1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_tier_overflows_and_no_byte_is_lost_whatever_the_sizes(data: st.DataObject) -> None:
    trace = data.draw(traces(cpu=False, update=data.draw(st.booleans())))
    policy = data.draw(st.sampled_from(POLICIES))
    whole = simulate(trace, tiers(ROOMY, ROOMY), policy)
    need = facts(whole).host_peak
    top = whole.summary()["peak_bytes"]
    host, drive = data.draw(st.integers(0, need + 1)), data.draw(st.sampled_from([ROOMY, need, need // 2, 0]))
    platform = tiers(top + data.draw(st.sampled_from([-1, 0, top])), host, drive)
    with suppress(OutOfMemory):
        facts(simulate(trace, platform, policy))  # every tier within its capacity, nothing ignored
    # a drive that holds everything is as good as a host that does: what fits there, fits here
    fits = {}
    for name, on in (("host", tiers(top, ROOMY, 0)), ("drive", tiers(top, host, ROOMY))):
        try:
            fits[name] = facts(simulate(trace, on, policy)).peak
        except OutOfMemory:
            fits[name] = None
    if policy != "lru_tiering":
        assert (fits["host"] is None) == (fits["drive"] is None)
