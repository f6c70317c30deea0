"""G10: what is chosen by hand, that copies hide where the links are free, and what is never slower or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.engine.replay import replay as replayed
from sim.errors import OutOfMemory, PolicyError
from sim.eviction.farthest import FarthestNextUse
from sim.experiment import simulate
from sim.hardware.platform import Link, Platform, Tier
from sim.hardware.profile import load_profile
from sim.plan import Move, Plan, Problem
from sim.policies.base import Policy
from sim.policies.offload import g10
from sim.policies.offload.g10.residents import Away, away_of
from sim.policies.offload.g10.scheduling import Given, Schedule
from sim.policies.offload.g10.vitality import Level, Period, Vitality, vitality_of
from sim.solvers.lanes import Lane, Lanes
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, facts, machine
from tests.policies.offload.test_uvm import step
from tests.policies.offload.test_vdnn import net
from workloads import cnn, transformer

# ---- the time of links ---------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 9)), max_size=12), st.integers(0, 10**6))
def test_gaps_are_those_of_a_table_of_every_nanosecond(wanted: list[tuple[bool, int, int]], seed: int) -> None:
    lane, table, taken = Lane(), np.zeros(400, np.bool_), []
    rng = random.Random(seed)
    for early, at, ns in wanted:
        if early:
            start = lane.earliest(at, ns)
            assert start == next(i for i in range(at, 400) if not table[i : i + ns].any())
        else:
            start = lane.latest(at, ns)
            gaps = (i for i in range(at - ns, -1, -1) if not table[i : i + ns].any())
            found = next(gaps, None)
            assert start == found if found is not None else start < 0
        if start >= 0:
            lane.take(start, ns)
            table[start : start + ns] = True
            taken.append((start, ns))
        if taken and rng.random() < 0.3:
            start, ns = taken.pop(rng.randrange(len(taken)))
            lane.give(start, ns)
            table[start : start + ns] = False


def test_a_route_of_two_links_needs_a_gap_in_both() -> None:
    lanes = Lanes()
    lanes.take((0,), 10, 10)
    lanes.take((1,), 22, 10)
    assert lanes.earliest((0, 1), 0, 10) == 0
    assert lanes.earliest((0, 1), 5, 10) == 32
    assert lanes.latest((0, 1), 34, 5) == 5
    assert lanes.latest((0, 1), 34, 2) == 32
    assert lanes.earliest((0, 1), 12, 0) == 12


# ---- the choice ----------------------------------------------------------------------------------


def vitality(load: list[int], *periods: tuple[int, int, int], capacity: int, levels: int = 1) -> Vitality:
    """Ops of 10 ns; periods: (bytes, left, right); links 2i out and 2i + 1 back of tier i."""
    tiers = [Level(f"tier{i}", ROOMY, (2 * i,), (2 * i + 1,)) for i in range(levels)]
    found = [Period(t, *period) for t, period in enumerate(periods)]
    took = np.full(len(load), 10, np.int64)
    return Vitality(0, range(len(load)), took, np.array(load, np.int64), capacity, tiers, found, {})


def linked(*rates: int) -> Platform:
    """Per tier behind the device a link each way, of so many bytes per ns."""
    on = machine()
    tiers = [replace(on.tiers[1], name=f"tier{i}") for i in range(len(rates))]
    pairs = [("hbm", tier.name) for tier in tiers]
    links = [Link(f"{a}-{b}", a, b, rate * GB) for (h, t), rate in zip(pairs, rates) for a, b in ((h, t), (t, h))]
    return replace(on, tiers=(on.tiers[0], *tiers), engines=on.engines[:1], links=tuple(links))


def chosen(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """Tensor, level, and when the copies begin."""
    return sorted((trip.period.tensor, trip.level, trip.out_at, trip.in_at) for trip in schedule.trips)


def test_the_period_that_takes_most_away_per_byte_is_chosen() -> None:
    # above 20 by 8 during ops 2 to 7. 0 is away for all of them but 1 is so for two alone, 2 is too small for it
    drawn = vitality([20, 20, *[28] * 6, 20, 20], (8, 0, 9), (8, 3, 8), (2, 0, 9), capacity=20)
    schedule = Schedule(drawn, linked(1), 1.0, deep=False)
    schedule.plan(())
    # out from 10 on, back by 90; it would begin at 82, and memory has space for it from op 8 on
    assert chosen(schedule) == [(0, 0, 10, 82)]
    assert schedule.excess_bytes == 0
    assert schedule.load.max() == 20


def test_a_copy_in_begins_as_early_as_memory_allows() -> None:
    drawn = vitality([20, 20, 28, 28, 20, 12, 12, 12, 20, 20], (8, 0, 9), capacity=20)
    schedule = Schedule(drawn, linked(1), 1.0, deep=False)
    schedule.plan(())
    assert chosen(schedule) == [(0, 0, 10, 40)]


def test_copies_of_one_direction_take_turns_and_what_has_no_time_stays() -> None:
    # two tensors of 8 bytes, one out behind the other; a third of 30 bytes has no time for it between ops 2 and 7
    drawn = vitality([20, 20, 20, *[36] * 4, 20, 20, 20], (8, 0, 9), (8, 0, 9), (30, 2, 7), capacity=20)
    schedule = Schedule(drawn, linked(1), 1.0, deep=False)
    schedule.plan(())
    assert [row[0] for row in chosen(schedule)] == [0, 1]
    assert sorted(row[2] for row in chosen(schedule)) == [10, 18]
    assert schedule.excess_bytes == 0
    slow = Schedule(drawn, linked(1), 0.1, deep=False)
    slow.plan(())
    assert slow.excess_bytes


def test_what_begins_in_a_tier_behind_is_not_copied_out() -> None:
    # 0 begins there, so that it is away from the first op on, and the link is free for 1 at once
    drawn = vitality([20] * 10, (8, -1, 9), (8, 0, 9), capacity=4)
    schedule = Schedule(drawn, linked(1), 1.0, deep=False)
    schedule.plan([Given(drawn.periods[0], 0, True)])
    clean, copied = sorted(schedule.trips, key=lambda trip: trip.period.tensor)
    assert (clean.gone, clean.out_ns) == (0, 0)
    assert (copied.gone, copied.out_at, copied.out_ns) == (2, 10, 8)


def test_superfluous_trips_are_forgotten() -> None:
    # 8 too much during ops 3 and 4: per ns of its copies 0 takes most away; 1 is needed for the rest, and does it all
    drawn = vitality([20, 20, 20, 28, 28, 20, 20, 20], (6, 0, 7), (20, 1, 6), capacity=20)
    schedule = Schedule(drawn, linked(10), 1.0, deep=False)
    schedule.plan(())
    assert [row[0] for row in chosen(schedule)] == [1]
    assert schedule.load.tolist() == [20, 20, 20, 8, 8, 20, 20, 20]


def test_ops_seem_so_long_that_each_way_has_the_time_for_what_exceeds_memory_at_its_worst() -> None:
    # 80 bytes have 30 ns before, and 20 from there on
    drawn = vitality([20, 20, 20, 100, 20], capacity=20)
    assert g10._least_stretch(SimpleNamespace(platform=linked(1)), drawn) == 4


def test_what_a_forgotten_trip_had_of_the_link_is_free_for_others() -> None:
    # as above, with the copy in of 0 from 57 to 60, where that of 1 begins at 50 if nothing stands in its way
    drawn = vitality([20, 20, 20, 28, 28, 20, 20, 20], (6, 0, 6), (20, 1, 7), capacity=20)
    schedule = Schedule(drawn, linked(2), 1.0, deep=False)
    schedule.plan(())
    assert chosen(schedule) == [(1, 0, 20, 50)]


def test_the_farthest_tier_comes_first_where_it_is_asked_for_and_its_links_have_the_time() -> None:
    load = [20, 20, *[28] * 2, *[20] * 6]
    near = Schedule(vitality(load, (8, 0, 9), capacity=20, levels=2), linked(8, 1), 1.0, deep=False)
    deep = Schedule(vitality(load, (8, 0, 9), capacity=20, levels=2), linked(8, 1), 1.0, deep=True)
    for schedule in (near, deep):
        schedule.plan(())
    assert [row[1] for row in (*chosen(near), *chosen(deep))] == [0, 1]
    late = Schedule(vitality(load, (8, 0, 4), capacity=20, levels=2), linked(8, 1), 0.5, deep=True)
    late.plan(())
    assert [row[1] for row in chosen(late)] == [0]


def test_what_a_tier_has_no_space_for_goes_on_to_the_next() -> None:
    drawn = vitality([20, 20, 20, *[36] * 4, 20, 20, 20], (8, 0, 9), (8, 0, 9), capacity=20, levels=2)
    for spare, levels in ((16, [0, 0]), (15, [0, 1])):
        tiers = [drawn.levels[0]._replace(spare=spare), drawn.levels[1]]
        schedule = Schedule(replace(drawn, levels=tiers), linked(1, 1), 1.0, deep=False)
        schedule.plan(())
        assert sorted(row[1] for row in chosen(schedule)) == levels
        assert schedule.excess_bytes == 0


# ---- whole runs ----------------------------------------------------------------------------------


def test_by_hand(run) -> None:
    # f1 makes y1 (10) that the last op reads; the ops between fill 20 bytes more than fit beside it
    b = TraceBuilder()
    x, y = b.tensor("x", 1, "input"), b.tensor("y", 10)
    b.op("f", reads=[x], writes=[y], duration=10)
    big = b.tensor("big", 25)
    b.op("wait", reads=[x], writes=[b.tensor("z", 0)], duration=20)
    b.op("g", reads=[x], writes=[big], duration=10)
    b.op("h", reads=[big], writes=[b.tensor("u", 0)], duration=10)
    b.op("rest", reads=[x], writes=[b.tensor("v", 0)], duration=30)
    b.op("end", reads=[y], writes=[b.tensor("w", 0)], duration=10)
    trace = b.build()
    keep, done = run(trace, "keep_all"), run(trace, "g10", 30)
    assert done.moves == [("d2h", "y", 10, 20), ("h2d", "y", 50, 60)]
    assert done.time == keep.time == 90
    assert run(trace, "g10", 36).moves == []


def test_workspace_counts_as_load(run) -> None:
    b = TraceBuilder()
    x, y = b.tensor("x", 1, "input"), b.tensor("y", 10)
    b.op("f", reads=[x], writes=[y], duration=10)
    b.op("wait", reads=[x], writes=[b.tensor("z", 0)], duration=20)
    b.op("g", reads=[x], writes=[b.tensor("u", 0)], duration=10, workspace=25)
    b.op("rest", reads=[x], writes=[b.tensor("v", 0)], duration=30)
    b.op("end", reads=[y], writes=[b.tensor("w", 0)], duration=10)
    done = run(b.build(), "g10", 30)
    assert done.moves == [("d2h", "y", 10, 20), ("h2d", "y", 40, 50)]
    assert done.time == 80


def test_what_the_end_has_no_space_for_begins_and_ends_behind_the_device(run) -> None:
    b = TraceBuilder()
    w, y, big = b.tensor("w", 15, "weight"), b.tensor("y", 1), b.tensor("big", 15)
    b.op("f", reads=[w], writes=[y], duration=10)
    b.op("wait", reads=[y], writes=[b.tensor("z", 0)], duration=30)
    b.op("g", reads=[y], writes=[big], duration=10)
    trace = b.build(outputs=[w, big])
    done = run(trace, "g10", 20)
    assert done.result.plan.place == {w: "host"}
    assert done.peak <= 20
    assert (done.out, done.back) == ({}, {"w": 15})  # nothing has changed it, so that the host still has it
    assert seen_by_a_policy(trace, machine(20), lambda it: away_of(it.trace, vitality_of(it, 0, "host"), 0)) == [
        Away(w, w, 0)
    ]


def seen_by_a_policy(trace: Trace, on: Platform, look: Callable[[Problem], Any]) -> Any:
    """What a function makes of the problem that a policy is given."""
    found: list[Any] = []

    class Looks(Policy):
        def plan(self, problem: Problem) -> Plan:
            found.append(look(problem))
            return Plan(problem.trace)

    with suppress(OutOfMemory):
        simulate(trace, on, Looks)
    return found[0]


def test_devices_share_the_tiers_behind_them() -> None:
    b = TraceBuilder()
    for device in range(2):
        x, y = b.tensor(f"x{device}", 1, "input"), b.tensor(f"y{device}", 10)
        b.op(f"f{device}", reads=[x], writes=[y], device=device, duration=10)
    on = load_profile("a100_80_sxm", overrides={"devices": "2", "tiers.host.capacity": "1000 B"})
    levels = seen_by_a_policy(b.build(), on, lambda it: [vitality_of(it, d, "host").levels[0] for d in range(2)])
    assert [level.spare for level in levels] == [500, 500]


def test_a_prefetch_that_leaves_too_little_space_turns_back() -> None:
    b = TraceBuilder()
    x, y, big = b.tensor("x", 1, "input"), b.tensor("y", 10), b.tensor("big", 25)
    b.op("f", reads=[x], writes=[y], duration=10)
    b.op("wait", reads=[x], writes=[b.tensor("z", 0)], duration=20)
    b.op("g", reads=[x], writes=[big], duration=10)
    b.op("end", reads=[x, y], writes=[b.tensor("w", 0)], duration=10)
    size = [1, 10, 25, 0, 0]
    online = partial(
        FarthestNextUse, chain=["host"], homes=["hbm"], movable=[True] * 5, size=size, uses={0: [0, 1, 2, 3], y: [0, 3]}
    )
    moves = [Move(y, "host", after="f"), Move(y, "hbm", before="g")]  # g needs the space at once, and y is on its way
    log = replayed(Plan(b.build(), moves, online=online), machine(30))
    assert log.complete
    assert log.counters["pressure_calls"] > 0


def random_net(seed: int) -> tuple[Trace, Platform, int]:
    """A chain net, a machine, and a budget of which no one knows whether it suffices."""
    rng = random.Random(seed)
    kinds = ["conv", "elementwise"]
    layers = [(rng.choice(kinds), *(rng.randint(1, 40) for _ in range(3))) for _ in range(rng.randint(3, 12))]
    trace, on = net(layers), machine(rate=GB * rng.choice([1, 2, 5]) // rng.choice([1, 4]))
    return trace, on, int(simulate(trace, on, "keep_all").summary()["peak_bytes"] * rng.uniform(0.3, 1.0))


@settings(max_examples=25)
@given(st.integers(0, 10**6))
@example(139)
@example(66)
@example(354)  # the plan of `swap_all` is faster than any of its own
@example(1615)
def test_never_slower_than_swapping_all_and_no_budget_refused_that_paging_can_do_with(seed: int) -> None:
    trace, on, budget = random_net(seed)
    ends = {}
    for name in ("g10", "swap_all", "uvm", "lru_tiering"):
        try:
            ends[name] = facts(simulate(trace, on.with_budget(budget), name)).time
        except OutOfMemory:
            ends[name] = ROOMY
    assert ends["g10"] <= ends["swap_all"]
    assert (ends["g10"] < ROOMY) == (min(ends.values()) < ROOMY)


@pytest.mark.parametrize("seed", [18, 64])
def test_where_the_links_have_too_little_time_a_plan_that_does_not_count_it_is_faster(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[list[Plan]] = []
    chosen_of = g10.fastest
    monkeypatch.setattr(g10, "fastest", lambda of, plans: drafts.append(list(plans)) or chosen_of(of, drafts[0]))
    trace, on, budget = random_net(seed)
    done = simulate(trace, on.with_budget(budget), "g10").log
    timed, untimed = (replayed(plan, on.with_budget(budget)).end for plan in drafts[0][:2])
    assert done.end <= untimed < timed


@pytest.mark.parametrize("seed", [35, 63])
def test_a_timeline_on_which_not_all_fits_is_stretched_further(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, on, budget = random_net(seed)
    ends = []
    for stretches in (g10.STRETCHES, 1):
        monkeypatch.setattr(g10, "STRETCHES", stretches)
        ends.append(simulate(trace, on.with_budget(budget), "g10").log.end)
    assert ends[0] < ends[1]


@pytest.mark.parametrize("share", [0.85, 0.7])
def test_on_a_convolution_net_copies_hide(share: float) -> None:
    trace, on = cnn("vgg-16", batch=32), load_profile("p100")
    plain = simulate(trace, on.with_budget(1 << 40), "keep_all").summary()
    run = simulate(trace, on, "g10", budget=int(share * plain["peak_bytes"])).summary()
    assert run["makespan_ns"] <= 1.02 * plain["makespan_ns"]


@pytest.mark.parametrize("host", ["128 GB", "4 GiB"])
def test_bert_beyond_the_memory_of_its_machine(host: str) -> None:
    """Copies to the host hide; behind a small one the drive's rate binds, within a tenth of what it must take."""
    trace = transformer("bert-base", batch=256, sequence=197, precision="fp32")
    on = load_profile("a100_40_g10", overrides={"tiers.host.capacity": host})
    plain = simulate(trace, on.with_budget(1 << 40), "keep_all").summary()
    assert plain["peak_bytes"] == pytest.approx(47.8 * 2**30, rel=0.002)
    lacking = plain["peak_bytes"] - on.home().capacity
    done = simulate(trace, on, "g10").summary()
    assert lacking <= sum(done["moved_bytes"].values()) / 2 <= min(1.05 * lacking, 10e9)
    assert on.host is not None
    drive = (lacking - on.host.capacity) / 3.2  # ns each way; a third of the ops' time is forward, and two are backward
    late = sum(max(drive - share * plain["makespan_ns"], 0) for share in (1 / 3, 2 / 3))
    assert done["makespan_ns"] <= 1.01 * plain["makespan_ns"] + 1.1 * late


def test_a_larger_transformer_is_free_too_where_paging_and_swapping_all_are_not() -> None:
    """BERT-large, three times the weights of the published case, with a batch of the same peak."""
    trace = transformer("bert-large", batch=120, sequence=197, precision="fp32")
    on = load_profile("a100_40_g10")
    plain = simulate(trace, on.with_budget(1 << 40), "keep_all").summary()
    assert plain["peak_bytes"] == pytest.approx(48 * 2**30, rel=0.01)
    done, every, paged = (simulate(trace, on, name).summary() for name in ("g10", "swap_all", "uvm"))
    assert done["makespan_ns"] <= 1.01 * plain["makespan_ns"]
    assert done["moved_bytes"]["d2h"] <= 10e9
    assert done["moved_bytes"]["h2d"] <= 10e9
    assert every["makespan_ns"] > 1.1 * plain["makespan_ns"]
    assert paged["makespan_ns"] > 1.4 * plain["makespan_ns"]


def test_weights_that_do_not_fit_begin_behind_the_device_and_return_there(run) -> None:
    done = run(step(), "g10", 50)
    assert done.peak <= 50
    # w1 begins in the host; w0, read first, leaves in time for it
    assert ("h2d", "w1") in {move[:2] for move in done.moves}
    with pytest.raises(OutOfMemory):
        run(step(), "g10", 40)


def test_a_small_host_overflows_to_the_drive() -> None:
    trace, on = net([("conv", 30, 30, 30)] * 8), machine()
    peak = facts(simulate(trace, on, "keep_all")).peak
    tiers = (on.tiers[0], replace(on.tiers[1], capacity=40), Tier("ssd", ROOMY, ROOMY, GB, kind="nvme"))
    links = (*on.links, Link("write", "host", "ssd", GB), Link("read", "ssd", "host", GB))
    with pytest.raises(OutOfMemory):
        simulate(trace, replace(on, tiers=tiers[:2]).with_budget(peak // 2), "g10")
    small = replace(on, tiers=tiers, links=links).with_budget(peak // 2)
    assert simulate(trace, small, "g10").log.end < simulate(trace, small, "uvm").log.end


def test_no_host_is_refused() -> None:
    with pytest.raises(PolicyError, match="g10: toy has no host tier"):
        simulate(step(), machine(50, host=False), "g10")
