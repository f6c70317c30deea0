"""DeepCuts' bound as the time of ops: the longer of arithmetic and bytes, and whole waves of blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim import load_profile, simulate
from sim.errors import ProfileError
from sim.hardware.cost import TILE, ns_on, op_times, waves
from sim.hardware.platform import Engine, Platform, Tier
from sim.trace import Trace, TraceBuilder
from workloads import transformer

PEAK, BANDWIDTH, LAUNCH, CORES = 10**12, 10**9, 7, 80


def machine(op_time: str = "bound", cores: int = CORES) -> Platform:
    hbm = Tier("hbm", 1 << 50, 1 << 50, BANDWIDTH, device=0)
    gpu = Engine("gpu", 0, "hbm", ("hbm",), {"fp32": PEAK}, launch=LAUNCH, cores=cores)
    return Platform("toy", (hbm,), (gpu,), op_time=op_time)


def product(flops: int, bytes: int, blocks: int = CORES, duration: int | None = None) -> Trace:
    b = TraceBuilder()
    x, y = b.tensor("x", 4, "input"), b.tensor("y", 4 * TILE * TILE * blocks, dtype="fp32")
    b.op("f", "matmul", reads=[x], writes=[y], flops=flops, bytes=bytes, dtype="fp32", duration=duration)
    return b.build(outputs=[y], carry=())


def took(trace: Trace, platform: Platform) -> int:
    """As the model says, as the mapping table says, and as a run takes."""
    total = int(op_times(trace, platform).total[0])
    assert simulate(trace, platform, "keep_all").log.end == total
    if trace.op_columns.duration[0] < 0:
        assert int(ns_on(trace, np.array([0]), platform, 0)[0]) == total
    return total


@pytest.mark.parametrize(
    ("flops", "bytes", "expected"),
    [
        (10**6, 10**6, 10**6),  # memory-bound: bytes / bandwidth
        (10**9, 10, 10**6),  # compute-bound, whole waves: FLOPs / peak
        (10**9, 10**6, 10**6),  # both at once
        (0, 0, 0),
    ],
)
def test_the_longer_part_counts(flops, bytes, expected):
    assert took(product(flops, bytes), machine()) == LAUNCH + expected


@pytest.mark.parametrize(("blocks", "slower"), [(80, 1), (160, 1), (81, 160 / 81), (40, 2), (1, 80), (400, 1)])
def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one(blocks, slower):
    time = took(product(10**9, 10, blocks), machine()) - LAUNCH
    assert time == pytest.approx(10**6 * slower, abs=1)
    assert waves(blocks, CORES) == pytest.approx(1 / slower)
    assert took(product(10**9, 10, blocks), machine(cores=0)) == LAUNCH + 10**6  # nobody says how many there are


def test_the_bound_is_never_above_peak_and_never_above_the_sum_without_waves():
    trace = transformer("gpt2", batch=1, sequence=128)
    platform = load_profile("v100_16")
    bound = op_times(trace, load_profile("v100_16", overrides={"op_time": "bound"})).total
    summed = op_times(trace, platform).total
    assert (bound <= summed).all()
    assert (2 * (bound - platform.main_engine().launch) + 2 >= summed - platform.main_engine().launch).all()


def test_a_measured_time_stays():
    assert took(product(10**9, 10**6, duration=42), machine()) == 42


def test_the_default_is_the_sum_and_its_hash_is_as_it_was():
    platform = machine("sum")
    assert took(product(10**9, 10**6), platform) == LAUNCH + 2 * 10**6
    assert platform.content_hash == replace(platform, engines=machine(cores=0).engines).content_hash
    assert platform.content_hash != machine().content_hash


def test_bad_input_is_one_clear_line():
    with pytest.raises(ProfileError, match=r"op_time: value 'bond': expected one of sum, bound \(did you mean 'bound'"):
        load_profile("p100", overrides={"op_time": "bond"})
