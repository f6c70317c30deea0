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
from sim.plan import Move, Plan
from sim.report.page.run import run_data
from sim.report.table import comparison_text, summary_text
from sim.solvers.cascade import cascade
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
    assert run_data(run_view(part))["notes"] == [note]
    assert run_notes(whole) == ()
    table = comparison_view(compare(trace, slow_links(200, GB // 8), [("swap_all", {"unit": "op"})]))
    assert [each for each in table.notes if not each.startswith("bound: ")] == [f"swap_all(unit=op): {note}"]


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
