"""The summary of the drawn run, its units, what it leaves unknown; the Pareto front against brute force; speed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import simulate
from sim.analysis import bounds, bubbles, fragmentation, lifetimes, pareto, pareto_front, peak_memory, summarize
from sim.analysis.summary import Reference
from sim.log import CAUSE, STALL, WHY, EventLog
from sim.trace.builder import TraceBuilder
from tests.clocks import cpu_s, least

from .conftest import GPU, HBM, HOST, OUT, log_of, machine


def test_the_figures_of_the_drawn_run(step):
    s = summarize(step)
    assert (s.peak_bytes, s.peak_by_tier, s.capacity_bytes) == (410, {"hbm": 410, "host": 200}, 1000)
    assert (s.makespan_ns, s.compute_ns, s.recompute_ns, s.idle_ns) == (770, 410, 100, 0)
    assert s.stall_ns == {"transfer": 250, "space": 10}
    assert s.moved_bytes == {"out": 200, "back": 200}
    assert (s.overlap, s.fits, s.complete, s.devices) == (150 / 400, True, True, 1)
    assert s.samples_per_s == pytest.approx(4 / 770e-9)
    assert s.tokens_per_s == pytest.approx(40 / 770e-9)
    # 1 FLOP a ns: 300 model FLOPs; f 100, g 200 twice, h 100, u 10 were executed
    assert s.mfu == pytest.approx(300 / 770)
    assert s.hfu == pytest.approx(610 / 770)
    assert (s.saved_fraction, s.overhead, s.energy_j) == (None, None, None)


def test_more_flops_than_64_bits_hold_are_added_up():
    b = TraceBuilder()
    x = b.tensor("x", 8, "input")
    for i in range(6):
        b.op(f"op{i}", "matmul", reads=[x], writes=[b.tensor(f"y{i}", 8)], flops=2**61 + 1)
    s = simulate(b.build(), "a100_80_sxm").summary()
    assert s["hfu"] == pytest.approx(0.8, rel=1e-3)  # the efficiency of a product


def test_the_reference_gives_savings_and_overhead(step):
    keep_all = log_of(step.trace, step.platform, [(0, 410, 0, GPU, "run", 0, -1, "", 0)], [(0, HBM, 820, 2, 0, "made")])
    s = summarize(step, keep_all)
    assert (s.saved_fraction, s.overhead) == (0.5, 770 / 410 - 1)


def test_memory_is_averaged_over_time():
    b = TraceBuilder()
    x = b.tensor("x", 10, "input")
    b.op("a", reads=[x], writes=[b.tensor("y", 30)], duration=100)
    trace = b.build()
    # 10 B for 100 ns, 40 B for 50, none for 50: 3,000 B ns in 200 ns
    changes = [(0, HBM, 10, 0, -1, "placed"), (100, HBM, 30, 1, 0, "made"), (150, HBM, -40, 1, 0, "freed")]
    log = log_of(trace, machine(), [(0, 200, 0, GPU, "run", 0, -1, "", 0)], changes)
    s = summarize(
        log, log_of(trace, machine(), [(0, 100, 0, GPU, "run", 0, -1, "", 0)], [(0, HBM, 60, 0, -1, "placed")])
    )
    assert (s.mean_bytes, s.mean_saved_fraction) == (15, 0.75)


def test_overhead_is_against_the_fastest_run_with_the_same_freedoms(step):
    s = summarize(step, Reference(step, 385, "fastest implementations"))
    assert (s.overhead, s.unlimited_ns, s.unlimited_run) == (1.0, 385, "fastest implementations")
    assert s.saved_fraction == 0  # memory is saved against keeping everything, whatever the freedoms


def test_the_record_survives_json_and_integers_stay_integers(step):
    record = summarize(step, step).as_dict()
    assert json.loads(json.dumps(record)) == record
    for key, value in record.items():
        if key.endswith(("_ns", "_bytes")):
            values = value.values() if isinstance(value, dict) else [value]
            assert all(type(v) is int for v in values) or (key == "pinning_ns" and value is None), key


def test_main_lane_times_add_up_to_makespan_times_devices(step):
    longer = summarize(replace(step, end=800))
    lanes = longer.compute_ns + longer.recompute_ns + longer.codec_ns + sum(longer.stall_ns.values())
    assert lanes + longer.idle_ns == 800
    assert longer.idle_ns == 30


def test_energy_needs_a_price_for_every_part(step):
    price = {"gpu": 100.0, "cpu": 50.0, "out": 1e-9, "back": 2e-9}
    s = summarize(replace(step, platform=machine(energy=price)))
    assert s.energy_j == pytest.approx(100 * 510e-9 + 200 * 1e-9 + 200 * 2e-9)
    del price["cpu"]
    assert summarize(replace(step, platform=machine(energy=price))).energy_j is None


def test_what_cannot_be_known_is_none():
    b = TraceBuilder()
    b.op("f", writes=[b.tensor("t", 5)])
    s = summarize(log_of(b.build(), machine(), []))
    assert (s.overlap, s.samples_per_s, s.tokens_per_s, s.mfu, s.hfu, s.recompute_overhead) == (None,) * 6
    assert json.dumps(s.as_dict())


def test_a_run_that_stopped_early_does_not_fit_and_has_no_rates(step):
    s = summarize(replace(step, complete=False), step)
    assert (s.fits, s.complete, s.tokens_per_s, s.mfu, s.overhead) == (False, False, None, None, None)
    assert s.peak_bytes == 410


def test_a_tier_above_capacity_does_not_fit(step):
    assert not summarize(replace(step, platform=machine(capacity=409))).fits
    assert summarize(replace(step, platform=machine(capacity=410))).fits


def test_the_peak_of_all_devices_used_bounds_the_flops(step):
    b = TraceBuilder({"model_flops": 100})
    b.op("f", writes=[b.tensor("t", 5)], flops=60)
    b.op("g", writes=[b.tensor("u", 5)], flops=40, device=1)
    rows = [(0, 60, 0, 0, "run", 0, -1, "", 0), (0, 40, 1, 1, "run", 1, -1, "", 0)]
    s = summarize(log_of(b.build(), machine(devices=2), rows))
    assert s.mfu == s.hfu == pytest.approx(100 / (60 * 2))


# ---- pareto ------------------------------------------------------------------------------------


@given(points=st.lists(st.tuples(st.integers(0, 6), st.one_of(st.none(), st.integers(0, 6))), max_size=20))
def test_the_front_holds_exactly_the_points_that_none_beats(points):
    known = [(i, p) for i, p in enumerate(points) if p[1] is not None]
    expected = [i for i, p in known if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for _, q in known)]
    front = pareto_front(points)
    assert sorted(front) == expected
    assert [points[i] for i in front] == sorted(points[i] for i in front)


def test_rows_without_a_result_are_left_out():
    rows = [
        {"policy": "a", "peak_bytes": 4, "makespan_ns": 9},
        {"policy": "b", "peak_bytes": 9, "makespan_ns": 4},
        {"policy": "c", "peak_bytes": 9, "makespan_ns": 9},
        {"policy": "oom", "peak_bytes": None, "makespan_ns": 1},
        {"policy": "nan", "peak_bytes": float("nan"), "makespan_ns": 1},
        {"policy": "failed"},
    ]
    assert [row["policy"] for row in pareto(rows)] == ["a", "b"]
    assert [row["policy"] for row in pareto(rows, "makespan_ns", "peak_bytes")] == ["b", "a"]


# ---- speed -------------------------------------------------------------------------------------


def long_log(ops: int) -> EventLog:
    """A chain whose every output goes out and comes back: two changes and a move an op."""
    b = TraceBuilder({"tokens": 1})
    last = b.tensor("t", 8)
    for i in range(ops):
        new = b.tensor(f"t{i}", 8, layer=i % 50)
        b.op(f"op{i}", reads=[last] if i else [], writes=[new], flops=10)
        last = new
    op = np.arange(ops)
    zero = np.zeros(ops, np.int64)
    run = np.stack((10 * op, 10 * op + 9, zero, zero + GPU, zero + WHY["run"], op, zero - 1, zero, zero), axis=1)
    wait = np.stack(
        (10 * op + 9, 10 * op + 10, zero, zero + GPU, zero + WHY["stall"], op, zero - 1, zero + STALL["space"], zero),
        axis=1,
    )
    move = np.stack((10 * op, 10 * op + 8, zero, zero + OUT, zero + WHY["move"], op, op + 1, zero, zero + 8), axis=1)
    made = np.stack((10 * op, zero + HBM, zero + 8, op + 1, op, zero + CAUSE["made"]), axis=1)
    gone = np.stack((10 * op + 9, zero + HBM, zero - 8, op + 1, op, zero + CAUSE["moved out"]), axis=1)
    there = np.stack((10 * op + 9, zero + HOST, zero + 8, op + 1, op, zero + CAUSE["moved in"]), axis=1)
    changes = np.stack((made, gone, there), axis=1).reshape(-1, 6)
    intervals = np.concatenate((run, wait, move))
    return EventLog(b.build(), machine(), intervals, changes, np.zeros((0, 3), np.int64), 10 * ops)


@pytest.mark.alone
def test_analyses_are_vectorised():
    """100,000 ops, 600,000 rows: loops over rows would take many times as long as the bound."""
    log = long_log(100_000)

    def analyse():
        assert summarize(log).peak_bytes == 8
        assert peak_memory(log, "host").bytes == 800_000
        assert bubbles(log)[0].stall_ns == 100_000
        assert fragmentation(log)[0].unused_peak_bytes == 0
        assert len(lifetimes(log)) == 100_000
        assert bounds(log).time_ns > 0

    assert least(5, lambda: cpu_s(analyse), tries=3) < 5
