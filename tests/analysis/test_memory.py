"""Peaks, memory over time, lifetimes and fragmentation: figures read off the drawing in conftest, and naive loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.analysis import (
    Holder,
    bounds,
    fragmentation,
    fullest_home,
    home_peak,
    lifetimes,
    mean_bytes,
    memory_over_time,
    peak_bytes,
    peak_memory,
    peaks_by_phase,
    residence,
    roles_over_time,
    summarize,
)
from sim.errors import ProfileError
from sim.hardware.platform import Allocator
from sim.trace.builder import TraceBuilder

from .conftest import GPU, HBM, HOST, log_of, machine


def test_the_peak_names_its_moment_its_op_and_what_was_alive(step):
    peak = peak_memory(step)
    assert (peak.tier, peak.bytes, peak.time_ns, peak.op) == ("hbm", 410, 660, "h")
    assert peak.by_role == {"weight": 100, "gradient": 100, "activation": 210}
    assert peak.by_layer == {0: 400, 1: 10}
    assert peak.largest[:2] == (Holder("a", 200, "activation", 0), Holder("w", 100, "weight", 0))
    assert len(peak_memory(step, largest=1).largest) == 1
    assert peak.workspace_bytes == 0
    assert peak.reserved_bytes is None


def test_the_mean_weighs_each_level_by_how_long_it_lasts(step):
    levels = ((350, 100), (340, 200), (310, 250), (340, 100), (310, 10), (410, 100), (200, 10))
    assert mean_bytes(step) == sum(held * lasts for held, lasts in levels) // 770 == 338
    assert mean_bytes(step, "host") == 200 * 400 // 770


def test_the_home_peak_is_that_of_the_fullest_device():
    b = TraceBuilder()
    y, z = b.tensor("y", 10), b.tensor("z", 30)
    b.op("f", writes=[y], duration=5, device=0)
    b.op("g", writes=[z], duration=5, device=1)
    rows = [(0, 0, 10, y, 0, "made"), (0, 1, 30, z, 1, "made"), (5, 2, 99, y, 0, "moved in")]
    log = log_of(b.build(outputs=(), carry=()), machine(2), [], rows)
    assert home_peak(log) == 30
    assert peak_bytes(log) == {"hbm": 10, "hbm1": 30, "host": 99}


def test_a_single_figure_of_several_devices_is_that_of_the_fullest():
    """y takes 10 bytes of device 0 for all of the 10 ns, z takes 30 of device 1 in the second half of them."""
    b = TraceBuilder()
    y, z = b.tensor("y", 10), b.tensor("z", 30)
    b.op("f", writes=[y], duration=5, device=0)
    b.op("g", writes=[z], duration=5, device=1)
    ran = [(0, 5, 0, 0, "run", 0, -1, "", 0), (5, 10, 1, 1, "run", 1, -1, "", 0)]
    log = log_of(b.build(outputs=(), carry=()), machine(2), ran, [(0, 0, 10, y, 0, "made"), (5, 1, 30, z, 1, "made")])
    kept = replace(log, changes=log.changes * [1, 1, 2, 1, 1, 1])
    found = summarize(log, kept)
    assert (found.peak_bytes, found.mean_bytes, found.saved_fraction) == (30, 15, 0.5)
    assert found.as_dict()["fullest_bytes"] == found.peak_bytes
    assert (peak_memory(log).tier, bounds(log).tier, mean_bytes(log)) == ("hbm1", "hbm1", 15)


def test_of_equally_full_devices_the_first_one_counts():
    b = TraceBuilder()
    y, z = b.tensor("y", 10), b.tensor("z", 10)
    b.op("f", writes=[y], duration=5, device=0)
    b.op("g", writes=[z], duration=5, device=1)
    log = log_of(b.build(outputs=(), carry=()), machine(2), [], [(0, 0, 10, y, 0, "made"), (0, 1, 10, z, 1, "made")])
    assert fullest_home(log).name == peak_memory(log).tier == "hbm"


def test_residence_is_where_all_of_a_tensor_is_at_the_end(step):
    names = {step.trace.tensors[t].name: tiers for t, tiers in residence(step).items()}
    assert names == {"w2": ("hbm",)}
    during_the_copy = replace(step, changes=step.changes[:7])
    names = {step.trace.tensors[t].name: tiers for t, tiers in residence(during_the_copy).items()}
    assert names == {"w": ("hbm",), "a": ("hbm", "host"), "y": ("hbm",)}


def test_each_phase_has_a_peak_of_its_own(step):
    assert peak_memory(step).by_phase == {"forward": 350, "backward": 410, "update": 200}
    assert peaks_by_phase(step) == {"forward": 350, "backward": 410, "update": 200}


def test_a_phase_that_only_gives_back_has_the_peak_that_it_began_with():
    b = TraceBuilder()
    t = b.tensor("t", 5)
    b.op("f", writes=[t], workspace=3)
    b.op("b", reads=[t], phase="backward")
    spans = [(0, 4, 0, GPU, "run", 0, -1, "", 0), (4, 9, 0, GPU, "run", 1, -1, "", 0)]
    rows = [(0, HBM, 5, t, 0, "made"), (0, HBM, 3, -1, 0, "workspace"), (4, HBM, -3, -1, 0, "workspace")]
    log = log_of(b.build(), machine(), spans, [*rows, (9, HBM, -5, t, 1, "freed")])
    assert peak_memory(log).by_phase == {"forward": 8, "backward": 5}
    assert peaks_by_phase(log, unit=4) == {"forward": 8 + 4, "backward": 8}  # each tensor in whole units
    with pytest.raises(ProfileError, match="hbm"):
        peaks_by_phase(log, "hmb")


def test_every_tier_has_a_peak(step):
    assert peak_bytes(step) == {"hbm": 410, "host": 200}
    assert peak_memory(step, "host").by_role == {"activation": 200}
    with pytest.raises(ProfileError, match="did you mean 'host'"):
        peak_memory(step, "hots")


def test_workspace_is_a_category_of_its_own():
    b = TraceBuilder()
    b.op("f", writes=[b.tensor("t", 5, layer=3)], workspace=7)
    rows = [(0, HBM, 5, 0, 0, "made"), (0, HBM, 7, -1, 0, "workspace"), (4, HBM, -7, -1, 0, "workspace")]
    log = log_of(b.build(), machine(), [(0, 4, 0, GPU, "run", 0, -1, "", 0)], rows, reserved=[(0, HBM, 20)])
    peak = peak_memory(log)
    assert (peak.by_role, peak.by_layer) == ({"activation": 5, "workspace": 7}, {3: 5, -1: 7})
    assert (peak.workspace_bytes, peak.reserved_bytes) == (7, 20)


def test_an_unused_tier_has_an_empty_peak(step):
    log = log_of(step.trace, step.platform, [])
    peak = peak_memory(log)
    assert (peak.bytes, peak.by_role, peak.by_layer, peak.largest, peak.op) == (0, {}, {}, (), "")
    assert fragmentation(log) == ()


def test_memory_over_time_is_the_running_sum(step):
    times, used = memory_over_time(step)
    assert used.tolist()[:6] == [50, 150, 350, 300, 310, 340]
    assert times.tolist()[:6] == [0, 0, 0, 100, 100, 100]
    roles = roles_over_time(step)
    assert list(roles.columns) == ["time_ns", "weight", "gradient", "activation", "input", "workspace"]
    assert roles.drop(columns="time_ns").sum(axis=1).tolist() == used.tolist()


def test_lifetimes_say_when_each_tensor_was_needed(step):
    table = lifetimes(step).set_index("tensor")
    a = table.loc["a"]
    # made at 100 by f, read by g until 300, by g again from 550 to 650, by h from 660
    assert (a.made_ns, a.gone_ns, a.last_read_ns, a.reads) == (0, 760, 760, 3)
    assert (a.idle_ns, a.idle_from_ns, a.idle_until_ns) == (250, 300, 550)
    assert (a.recompute_ns, a.move_ns, a.slack_ns, a.byte_seconds) == (100, 200, -150, 200 * 250e-9)
    y = table.loc["y"]  # made at 300, and again at 650
    assert (y.idle_ns, y.idle_from_ns, y.idle_until_ns) == (350, 300, 650)
    w = table.loc["w"]
    assert (w.made_ns, w.idle_ns, w.idle_from_ns, w.idle_until_ns, w.recompute_ns) == (0, 660, 100, 760, -1)
    assert table.loc["w2"].gone_ns == 770  # resident to the end
    assert table.loc["w2"].last_read_ns == -1
    assert lifetimes(step).tensor[0] == "w"  # 100 bytes for 660 ns
    assert lifetimes(step).byte_seconds.is_monotonic_decreasing


def test_without_a_host_nothing_can_be_moved(step):
    alone = replace(step.platform, links=())
    rows = lifetimes(replace(step, platform=alone, intervals=step.intervals[:2]))
    assert set(rows.move_ns) == set(rows.slack_ns) == {-1}


def test_a_tensor_that_never_came_has_no_row():
    b = TraceBuilder()
    b.op("f", writes=[b.tensor("t", 5)])
    b.op("g", writes=[b.tensor("never", 5)])
    log = log_of(b.build(), machine(), [(0, 4, 0, GPU, "run", 0, -1, "", 0)], [(0, HBM, 5, 0, 0, "made")])
    assert lifetimes(log).tensor.tolist() == ["t"]
    assert len(lifetimes(log_of(b.build(), machine(), []))) == 0


def test_fragmentation_compares_what_is_held_with_what_lives(step):
    hbm, host = step.platform.tiers
    platform = replace(step.platform, tiers=(replace(hbm, allocator=Allocator("caching")), host))
    log = replace(
        step,
        platform=platform,
        reserved=log_of(step.trace, platform, [], reserved=[(0, HBM, 400), (100, HBM, 100), (760, HBM, -300)]).reserved,
    )
    first, second = fragmentation(log)
    # 500 held from 100 on; after 350 first 310 live, from 660 on 410; least at 300: 310 of 500
    assert (first.reserved_peak_bytes, first.allocated_peak_bytes, first.unused_peak_bytes) == (500, 410, 190)
    assert first.fraction == 1 - 340 / 500
    assert first.largest_hole_bytes is None
    assert (second.tier, second.unused_peak_bytes, second.fraction, second.largest_hole_bytes) == ("host", 0, 0.0, 9800)


# ---- naive twins -------------------------------------------------------------------------------

CHANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(-1, 4), st.integers(1, 9)), max_size=30)


@given(steps=CHANGES)
def test_peaks_of_random_changes_agree_with_a_loop(steps):
    b = TraceBuilder()
    roles = ["weight", "activation", "gradient", "activation", "input"]
    for t, role in enumerate(roles):
        b.tensor(f"t{t}", 9, role, layer=t % 3 - 1)
    trace = b.build()
    now, held, rows = 0, {}, []
    best: dict[int, tuple[int, int, dict]] = {HBM: (0, 0, {}), HOST: (0, 0, {})}
    for wait, tier, tensor, bytes in steps:
        now += wait
        key = (tier, tensor)
        if key in held:
            rows.append((now, tier, -held.pop(key), tensor, -1, "freed"))
        else:
            held[key] = bytes
            rows.append((now, tier, bytes, tensor, -1, "made"))
        used = sum(size for (where, _), size in held.items() if where == tier)
        if used > best[tier][0]:
            best[tier] = (used, now, {t: size for (where, t), size in held.items() if where == tier})
    log = log_of(trace, machine(), [], rows)
    for tier, name in ((HBM, "hbm"), (HOST, "host")):
        used, when, alive = best[tier]
        peak = peak_memory(log, name)
        assert (peak.bytes, peak.time_ns, peak_bytes(log)[name]) == (used, when, used)
        by_role: dict[str, int] = {}
        by_layer: dict[int, int] = {}
        for t, size in alive.items():
            role, layer = (roles[t], t % 3 - 1) if t >= 0 else ("workspace", -1)
            by_role[role] = by_role.get(role, 0) + size
            by_layer[layer] = by_layer.get(layer, 0) + size
        assert (peak.by_role, peak.by_layer) == (by_role, by_layer)
        tensors = sorted(((-size, t) for t, size in alive.items() if t >= 0))
        assert [h.tensor for h in peak.largest] == [f"t{t}" for _, t in tensors]


@given(
    data=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans(), st.sets(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_idle_times_of_random_traces_agree_with_a_loop(data):
    """Ops on two engines that may overlap, over five tensors that exist from the start."""
    b = TraceBuilder()
    for t in range(5):
        b.tensor(f"t{t}", t + 1, "input")
    rows, at = [], 0
    for i, (wait, length, on_cpu, reads) in enumerate(data):
        b.op(f"op{i}", reads=sorted(reads), engine="cpu" if on_cpu else "")
        at += wait
        rows.append((at, at + length, 0, 1 if on_cpu else GPU, "run", i, -1, "", 0))
    log = log_of(b.build(), machine(), rows, [(0, HBM, t + 1, t, -1, "placed") for t in range(5)])
    table = lifetimes(log).set_index("tensor")
    for t in range(5):
        uses = [(0, 0)] + [(row[0], row[1]) for row, (*_, reads) in zip(rows, data, strict=True) if t in reads]
        longest, free_from = (0, -1, -1), 0
        for start, end in uses:
            if start - free_from > longest[0]:
                longest = (start - free_from, free_from, start)
            free_from = max(free_from, end)
        row = table.loc[f"t{t}"]
        assert (row.idle_ns, row.idle_from_ns, row.idle_until_ns) == longest
        assert row.reads == len(uses) - 1
        assert row.last_read_ns == max((end for _, end in uses[1:]), default=-1)
