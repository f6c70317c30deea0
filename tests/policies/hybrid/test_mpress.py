"""MPress (HPCA 2023): peers' memory beside recomputation and the host's, in pipelines whose stages differ."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.errors import Infeasible, PolicyError
from sim.experiment import Result, problem_for, reference_run, simulate
from sim.hardware.platform import Link, Platform
from sim.layout import lay_out
from sim.log import CAUSE, WHY, EventLog
from sim.policies.hybrid.mpress import MPress
from sim.policies.hybrid.mpress.assignment import Assignment
from sim.policies.hybrid.mpress.timeline import timeline
from sim.solvers.lanes import Lane
from sim.solvers.located import index_of
from sim.trace import Trace, TraceBuilder
from tests.machines import GB, machine
from workloads import transformer

SMALL = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 2, "vocab_size": 200, "n_positions": 64}


@cache
def staged(**layout: Any) -> tuple[Trace, Platform]:
    """A small net in a layout on cards with a link of their own between every two."""
    base = transformer(SMALL, batch=16, sequence=64, precision="amp_fp16")
    return lay_out(base, "v100_16", layout)


def peaks(log: EventLog) -> list[int]:
    return [int(np.cumsum(log.changes[log.changes[:, 1] == i, 2]).max(initial=0)) for i in range(log.trace.devices)]


def copies(log: EventLog) -> list[tuple[str, int, int]]:
    """(link, start, end) of all copies, in order."""
    rows = log.intervals[log.interval("why") == WHY["move"]].tolist()
    return sorted((log.platform.lanes[row[3]], row[0], row[1]) for row in rows)


# ---- the timeline ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4, "micro_batches": 8, "schedule": "1f1b"},
        {"pp": 4, "micro_batches": 4, "schedule": "gpipe"},
        {"pp": 2, "micro_batches": 4, "schedule": "interleaved"},
        {"pp": 2, "micro_batches": 4, "schedule": "zb_v"},
        {"pp": 2, "tp": 2, "micro_batches": 4, "schedule": "1f1b"},
    ],
    ids=str,
)
def test_the_timeline_is_the_engines_run_with_unlimited_memory(layout):
    trace, platform = staged(**layout)
    times, log = timeline(problem_for(trace, platform)), reference_run(trace, platform)
    rows = log.intervals[(log.interval("why") == WHY["run"])]
    starts, ends = np.array(times.start)[rows[:, 5]], np.array(times.end)[rows[:, 5]]
    off = max(np.abs(starts - rows[:, 0]).max(), np.abs(ends - rows[:, 1]).max())
    assert off <= 0.001 * log.end
    # what is being sent stays until it has arrived, so that a peak may be a little higher
    loads = [int(stage.load.max()) for stage in times.stages[: trace.devices]]
    assert loads == pytest.approx(peaks(log), rel=0.01)


# ---- the time of a link ----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.booleans()), max_size=12))
def test_a_lane_finds_the_first_gap_after_and_the_last_one_before(asked):
    lane, taken = Lane(), set[int]()

    def is_free(begin: int, ns: int) -> bool:
        return taken.isdisjoint(range(begin, begin + ns))

    for moment, ns, backwards in asked:
        first = next(begin for begin in range(moment, 10_000) if is_free(begin, ns))
        last = next(begin for begin in range(moment - ns, -10_000, -1) if is_free(begin, ns))
        assert lane.earliest(moment, ns) == first
        assert lane.latest(moment, ns) == last
        begin = last if backwards else first
        lane.take(begin, ns)
        taken.update(range(begin, begin + ns))


# ---- peers -----------------------------------------------------------------------------------------


def lender(*waits: int, size: int = 1000) -> Trace:
    """Device 0 makes `x`, then after a wait holds another tensor for 20 ns, and after more waits uses `x` again.

    The absence of `x` is 20 ns and the waits; two more devices do little.
    """
    b = TraceBuilder()
    x, other, end = b.tensor("x", size), b.tensor("other", size), b.tensor("end", 1)
    y = [b.tensor("y0", 1)]
    b.op("make", writes=[x], duration=100)
    b.op("wait0", writes=y, duration=waits[0])
    b.op("hold", reads=y, writes=[other], duration=10)
    y.append(b.tensor("y1", 1))
    b.op("hold.bwd", reads=[other], writes=y[-1:], phase="backward", duration=10)
    for i, ns in enumerate(waits[1:], 1):
        y.append(b.tensor(f"y{i + 1}", 1))
        b.op(f"wait{i}", reads=y[-2:-1], writes=y[-1:], phase="backward", duration=ns)
    b.op("x.bwd", reads=[x, y[-1]], writes=[end], phase="backward", duration=100)
    for device in (1, 2):
        b.op(f"idle{device}", writes=[b.tensor(f"idle{device}.out", 1)], duration=1, device=device)
    return b.build(outputs=[end], carry=())


LONG, SHORT = lender(1000, 1980, 1000), lender(600, 380, 500)
"""Absences of 4,000 and 1,500 ns."""


def three(budget: int, *, rates: tuple[int, int] = (GB, GB), host: int = 0, host_rate: int = GB) -> Platform:
    """Three devices, and a link of its own each way between the first and both others. At 1 GB/s a byte takes a ns."""
    plain = machine(budget, devices=3, rate=host_rate if host else None, host=host)
    links = [link for link in plain.links if {"a2b", "b2a"}.isdisjoint({link.name})]
    for device, rate in zip((1, 2), rates, strict=True):
        links += [
            Link(f"0-{device}", "hbm@0", f"hbm@{device}", rate),
            Link(f"{device}-0", f"hbm@{device}", "hbm@0", rate),
        ]
    return replace(plain, links=tuple(links))


def test_a_tensor_goes_to_one_peer_where_both_copies_fit_its_absence():
    result = simulate(LONG, three(1900), "mpress")
    assert copies(result.log) == [("0-1", 100, 1100), ("1-0", 3100, 4100)]
    assert result.log.end == reference_run(LONG, three(1900)).end == 4200
    assert (result.plan.notes["peer_bytes"], result.plan.notes["striped"]) == (1000, 0)


def test_it_is_striped_over_several_peers_where_one_takes_too_long():
    # 1,000 ns each way do not fit into 1,500; two halves do: bytes over the sum of the rates
    result = simulate(SHORT, three(1900), "mpress")
    assert copies(result.log) == [("0-1", 100, 600), ("0-2", 100, 600), ("1-0", 1100, 1600), ("2-0", 1100, 1600)]
    assert result.log.end == reference_run(SHORT, three(1900)).end == 1700
    assert result.plan.notes["striped"] == 1


def test_stripes_are_in_proportion_to_the_rates_of_their_links():
    trace = lender(300, 80, 250, size=1200)  # 300 B at 1 GB/s beside 900 at 3 GB/s
    result = simulate(trace, three(2300, rates=(GB, 3 * GB)), "mpress")
    sizes = {name: end - start for name, start, end in copies(result.log)}
    assert sizes == {"0-1": 300, "0-2": 300, "1-0": 300, "2-0": 300}


@pytest.mark.parametrize("room", [1900, 999, 700, 499])
def test_a_peer_lends_what_it_has_room_for_and_no_more(room):
    tight = three(1900)
    tiers = [replace(tier, capacity=room) if tier.name in ("hbm@1", "hbm@2") else tier for tier in tight.tiers]
    result = simulate(LONG, replace(tight, tiers=tuple(tiers)), MPress())
    assert max(peaks(result.log)[1:]) <= room
    # whole, in halves of 500 B, or recomputed in 100 ns where not even these fit beside what a peer has
    lent = {1900: (1000, 0), 999: (1000, 1), 700: (1000, 1), 499: (0, 0)}[room]
    assert (result.plan.notes["peer_bytes"], result.plan.notes["striped"]) == lent
    assert result.log.end == 4200 + (100 if room == 499 else 0)


def test_what_peers_cannot_take_is_recomputed_or_offloaded_whichever_adds_less():
    # recomputing x takes 100 ns, and one host is too slow to bring it back in time
    slow = simulate(LONG, three(1900, host=10_000, host_rate=GB // 10), MPress(peers=False))
    assert (slow.plan.notes["recompute_bytes"], slow.plan.notes["host_bytes"], slow.log.end) == (1000, 0, 4300)
    quick = simulate(LONG, three(1900, host=10_000), MPress(peers=False))
    assert (quick.plan.notes["recompute_bytes"], quick.plan.notes["host_bytes"], quick.log.end) == (0, 1000, 4200)


def test_equal_devices_have_nothing_to_lend():
    """Both are full at the same time."""
    b = TraceBuilder()
    for device in (0, 1):
        x, y = (b.tensor(f"{name}{device}", 1000) for name in "xy")
        z, end = (b.tensor(f"{name}{device}", 1) for name in ("z", "end"))
        seed = b.tensor(f"seed{device}", 1)
        b.op(f"make{device}", writes=[x], duration=100, device=device)
        b.op(f"seed{device}", writes=[seed], duration=100, device=device)
        b.op(f"hold{device}", reads=[seed], writes=[y], duration=3000, device=device)
        b.op(f"hold{device}.bwd", reads=[y], writes=[z], phase="backward", duration=3000, device=device)
        b.op(f"x{device}.bwd", reads=[x, z], writes=[end], phase="backward", duration=100, device=device)
    trace = b.build(outputs=[], carry=())
    run = simulate(trace, machine(1900, devices=2), "mpress")
    assert (run.plan.notes["peer_bytes"], run.plan.notes["recompute_bytes"]) == (0, 2000)


# ---- pipelines -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline() -> tuple[Trace, Platform, int]:
    """Four stages under 1F1B, and a budget that the first alone exceeds."""
    trace, platform = staged(pp=4, micro_batches=8, schedule="1f1b")
    first, *rest = peaks(reference_run(trace, platform))
    assert first > max(rest)
    return trace, platform, max(int(0.8 * first), max(rest))


def test_a_stage_that_holds_too_much_costs_nothing_where_others_have_room(pipeline):
    trace, platform, budget = pipeline
    kept = reference_run(trace, platform)
    run: Result = simulate(trace, platform, "mpress", budget=budget)
    assert run.plan.notes["peer_bytes"] > 0
    assert max(peaks(run.log)) <= budget
    assert run.log.end <= 1.005 * kept.end
    lent = run.log.changes[(run.log.change("cause") == CAUSE["moved in"]) & (run.log.change("tier") > 0)]
    assert len(lent)


def test_without_peers_the_run_takes_longer(pipeline):
    trace, platform, budget = pipeline
    alone = simulate(trace, platform, MPress(peers=False, host=False), budget=budget)
    assert alone.plan.notes["peer_bytes"] == alone.plan.notes["host_bytes"] == 0
    assert alone.plan.notes["recompute_bytes"] > 0
    assert simulate(trace, platform, MPress(host=False), budget=budget).log.end < alone.log.end


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_pipelines_keep_the_law(pipeline, share):
    trace, platform, _ = pipeline
    budget = int(share * max(peaks(reference_run(trace, platform))))
    run = run_policy(MPress(), trace, platform.with_budget(budget))
    assert run.done, run.error
    laws = ("capacity", "ops", "order", "tiling", "outcome")
    assert not [text for law in laws if (text := breaks(CHECKS[law], run))]


def test_the_assignment_keeps_to_what_it_counts(pipeline):
    trace, platform, budget = pipeline
    problem = problem_for(trace, platform.with_budget(budget))
    chosen = Assignment(problem, timeline(problem), index_of(problem), most=4)
    assert chosen.choose()
    assert all(int(load.max()) <= budget for load in chosen._load)


# ---- refusals --------------------------------------------------------------------------------------


def test_one_device_no_links_and_too_little_memory_are_refused_in_words():
    base = transformer(SMALL, batch=2, sequence=16)
    with pytest.raises(PolicyError, match="one device, and has no peers"):
        simulate(base, "v100_16", "mpress")
    with pytest.raises(PolicyError, match="no links between its devices"):
        simulate(LONG, machine(1900, devices=3, rate=None), "mpress")
    with pytest.raises(Infeasible, match="no plan was found that fits 50 B"):
        simulate(LONG, three(50), "mpress")
