"""Op times: launch, plus FLOPs over what the engine sustains, plus bytes over the share of bandwidth."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sim.errors import ProfileError
from sim.hardware import Engine, Platform, Tier
from sim.hardware.cost import first_engines, flops_per_second, op_times, slow_operand_ns
from sim.trace import TraceBuilder

GB = 10**9


def machine(*, bandwidth=GB, launch=0, efficiency=None, share=None, peak=None, cpu=False):
    engines = [
        Engine("npu", 0, "hbm", ("hbm",), peak or {"fp16": 10**12}, efficiency or {}, share or {}, launch),
    ]
    if cpu:
        engines.append(Engine("cpu", -1, "host", ("host",), {"fp32": GB}, main=False))
    tiers = (Tier("hbm", GB, GB, bandwidth, device=0), Tier("host", GB, GB, GB // 10, latency=100))
    return Platform("m", tiers, tuple(engines))


def times(platform, *ops):
    b = TraceBuilder()
    for i, op in enumerate(ops):
        b.op(f"op{i}", **{"kind": "matmul", "bytes": 0, **op})
    return op_times(b.build(), platform).total.tolist()


def test_the_three_parts_add_up():
    p = machine(launch=500, efficiency={"matmul": 0.5}, share={"matmul": 0.25})
    # 500 ns + 1e6 / (0.5 * 1e12) s + 1000 / (0.25 * 1e9) s
    assert times(p, {"flops": 10**6, "bytes": 1000}) == [500 + 2000 + 4000]


def test_each_kind_has_its_own_efficiency_and_the_empty_key_is_for_all_others():
    p = machine(efficiency={"matmul": 0.5, "": 0.1}, share={"norm": 0.5})
    ops = [{"kind": k, "flops": 10**6, "bytes": 1000} for k in ("matmul", "norm", "conv")]
    assert times(p, *ops) == [2000 + 1000, 10_000 + 2000, 10_000 + 1000]


def test_an_efficiency_in_one_type_goes_before_that_of_the_kind():
    p = machine(peak={"fp16": 10**12, "fp32": 10**11}, efficiency={"matmul": 0.5, "matmul_fp32": 1.0})
    assert times(p, {"flops": 10**6, "dtype": "fp16"}, {"flops": 10**6, "dtype": "fp32"}) == [2000, 10_000]


def test_a_type_without_a_peak_is_priced_as_the_next_wider_and_keeps_its_efficiency():
    engine = machine(peak={"fp32": 10**11}, efficiency={"matmul_fp32": 0.5}).engines[0]
    assert flops_per_second(engine, "matmul", "bf16") == 0.5 * 10**11
    with pytest.raises(ProfileError, match="engine 'npu' has no peak for 'fp64'; it has fp32"):
        flops_per_second(engine, "matmul", "fp64")


def test_a_measured_duration_is_all_of_the_time():
    assert times(machine(launch=500), {"flops": 10**9, "bytes": 10**6, "duration": 7}) == [7]


@pytest.mark.parametrize(
    ("optimizer", "shape", "calls"),
    [("adamw_loop", (4, 4), 8), ("adafactor", (4, 4), 18), ("adafactor", (4,), 9), ("adamw_fused", (4, 4), 1)],
)
def test_an_optimizer_in_a_loop_launches_each_of_its_kernels_once(optimizer, shape, calls):
    """`_single_tensor_adam` calls mul_, lerp_, mul_, addcmul_, sqrt, div, add_ and addcdiv_ for each parameter."""
    b = TraceBuilder({"optimizer": optimizer})
    w = b.tensor("w", 64, "weight", shape=shape)
    new = b.tensor("new", 64, "weight", shape=shape, replaces=w)
    b.op("optimizer.w", "optimizer", reads=[w], writes=[new], phase="update", bytes=1000)
    assert op_times(b.build(), machine(launch=500)).total.tolist() == [calls * 500 + 1000]


def test_an_op_on_another_engine_is_priced_there():
    p = machine(cpu=True)
    assert times(p, {"engine": "cpu", "bytes": 1000, "kind": "optimizer"}) == [10_000]


def test_bytes_default_to_the_operands():
    b = TraceBuilder()
    x, y = b.tensor("x", 300, "input"), b.tensor("y", 700)
    b.op("op", reads=[x], writes=[y])
    assert op_times(b.build(), machine()).total.tolist() == [1000]


@given(flops=st.integers(0, 10**15), peak=st.sampled_from([10**9, 10**12, 312 * 10**12]))
def test_compute_time_is_the_exact_quotient_rounded_up(flops, peak):
    exact = Fraction(flops * 10**9, peak)
    (ns,) = times(machine(peak={"fp16": peak}), {"flops": flops})
    assert abs(ns - exact) < 1 + exact / 10**14
    if exact.denominator == 1 and exact < 10**13:
        assert ns == exact


@given(ns=st.integers(0, 10**11), peak_per_ns=st.integers(1, 10**6))
@example(ns=10**10 + 1, peak_per_ns=989_000)
def test_a_whole_number_of_nanoseconds_of_compute_stays_one(ns, peak_per_ns):
    assert times(machine(peak={"fp16": peak_per_ns * 10**9}), {"flops": peak_per_ns * ns}) == [ns]


@given(bytes=st.integers(0, 10**13), rate=st.integers(1, 10**13))
def test_byte_time_is_the_exact_quotient_rounded_up_whatever_the_size(bytes, rate):
    if bytes * 10**9 // rate < 2**62:
        assert times(machine(bandwidth=rate), {"bytes": bytes}) == [-(-bytes * 10**9 // rate)]


def test_an_operand_in_a_slower_tier_is_charged_at_that_tiers_rate():
    p = machine()
    # 1000 bytes at 0.1 GB/s instead of 1 GB/s, and one access
    assert slow_operand_ns(p, 0, "other", {"host": 1000}, {}) == 10_000 - 1000 + 100
    assert slow_operand_ns(p, 0, "other", {"hbm": 1000}, {}) == 0


def test_an_operand_in_a_slower_tier_is_charged_at_the_share_that_the_kind_of_op_gets():
    p = machine(share={"": 0.5, "norm": 0.25})
    assert slow_operand_ns(p, 0, "other", {"host": 1000}, {}) == 2 * (10_000 - 1000) + 100
    assert slow_operand_ns(p, 0, "norm", {"host": 1000}, {}) == 4 * (10_000 - 1000) + 100


def test_what_is_written_in_a_tier_that_writes_slowly_is_charged_at_that_rate_and_its_access_once():
    p = machine()
    slow = replace(p, tiers=tuple(replace(t, write_bandwidth=GB // 50) if t.name == "host" else t for t in p.tiers))
    # 1000 bytes read at 0.1 GB/s and 10 written at 0.02 GB/s instead of 1 GB/s
    assert slow_operand_ns(slow, 0, "other", {"host": 1000}, {"host": 10}) == 10_000 - 1000 + 500 - 10 + 100
    assert slow_operand_ns(slow, 0, "other", {}, {"host": 10}) == 500 - 10 + 100
    assert slow_operand_ns(p, 0, "other", {}, {"host": 10}) == slow_operand_ns(p, 0, "other", {"host": 10}, {})


def test_the_charge_of_a_slower_tier_rounds_up():
    p = machine(bandwidth=3 * GB)
    # 2 bytes at 0.1 GB/s instead of 3 GB/s: 19 1/3 ns more
    assert slow_operand_ns(p, 0, "other", {"host": 2}, {}) == 20 + 100


def test_a_tensor_that_is_only_overwritten_begins_where_that_happens():
    b = TraceBuilder()
    x, y = b.tensor("x", 1, "input"), b.tensor("y", 1)
    buffer = b.tensor("buffer", 8, "gradient")
    full = b.tensor("full", 8, "gradient", replaces=buffer)
    b.op("first", reads=[x], writes=[y], device=0)
    b.op("fills", reads=[y], writes=[full], device=1)
    first = first_engines(b.build(outputs=[full], carry=[(full, buffer)]), np.array([3, 5], np.int32), 3)
    assert first.tolist() == [3, 3, 5, 5]
