"""Convolutions of images with channels first, where libraries have channels last: what is transposed, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sim import simulate
from sim.errors import ProfileError
from sim.hardware.cost import bytes_per_second, ns_on, op_times
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads import cnn

IMAGE, FILTERS, RESULT = 40_000, 6_000, 90_000
"""Bytes of the operands and the result of the convolution below."""


def convolution(dtype: str, **meta: object) -> Trace:
    """A convolution, both its gradients in one op, and one that computes the filters' gradient alone."""
    b = TraceBuilder()
    images = b.tensor("images", IMAGE, "input", shape=(2, 4, 50, 50))
    filters = b.tensor("filters", FILTERS, "weight", shape=(15, 4, 10, 5))
    out = b.tensor("out", RESULT, "activation", shape=(2, 15, 30, 25))
    arrived = b.tensor("out.grad", RESULT, "temporary", shape=(2, 15, 30, 25))
    grads = [b.tensor(n, size, "gradient", shape=(1, 1, 1, 1)) for n, size in (("di", IMAGE), ("df", FILTERS))]
    biases = [b.tensor(f"db{i}", 60, "gradient", shape=(15,)) for i in range(2)]
    alone = b.tensor("alone", FILTERS, "gradient", shape=(1, 1, 1, 1))
    b.op("conv", "conv", reads=[images, filters], writes=[out], flops=10**6, dtype=dtype)
    b.op("loss", "loss", reads=[out], writes=[arrived], dtype=dtype)
    b.op("both", "conv", reads=[arrived, images, filters], writes=[*grads, biases[0]], phase="backward", dtype=dtype)
    b.op("one", "conv", reads=[arrived, images, filters], writes=[alone, biases[1]], phase="backward", dtype=dtype)
    b.meta.update(meta)
    return b.build()


def moved(trace: Trace, platform: Platform) -> list[int]:
    """Bytes that are touched beyond operands and results, by op."""
    found: list[int] = (op_times(trace, platform).bytes - trace.touched).tolist()
    return found


def test_each_operand_and_result_is_read_and_written_once_more():
    whole = 2 * (RESULT + IMAGE + FILTERS)
    both = 2 * (RESULT + IMAGE + FILTERS + IMAGE + FILTERS + 60) + 2 * RESULT  # each gradient transposes what arrives
    one = 2 * (RESULT + IMAGE + FILTERS + FILTERS + 60)
    assert moved(convolution("fp16"), load_profile("a100_80_sxm")) == [whole, 0, both, one]
    assert moved(convolution("tf32"), load_profile("h100")) == [whole, 0, both, one]
    assert moved(convolution("fp16"), load_profile("v100_32")) == [whole, 0, both, one]


@pytest.mark.parametrize(
    ("profile", "trace"),
    [
        ("a100_80_sxm", convolution("fp32")),  # plain fp32 kernels take channels first
        ("a100_80_sxm", convolution("fp16", channels_last=True)),
        ("a100_80_sxm", cnn("resnet-50", 2, precision="fp16", stack="compiled")),
        ("v100_32", convolution("tf32")),  # which computes it in fp32
        ("p100", convolution("fp16")),
        ("mt3000_cluster", convolution("fp16")),
    ],
)
def test_nothing_is_transposed_where_no_library_does(profile: str, trace: Trace):
    assert moved(trace, load_profile(profile)) == [0] * len(trace.op_columns.name)


def test_time_of_one_op_on_an_engine_has_it_too():
    trace, platform = convolution("bf16"), load_profile("a100_80_sxm")
    ops = np.array([0, 2, 3])
    assert ns_on(trace, ops, platform, 0).tolist() == op_times(trace, platform).total[ops].tolist()


def test_a_run_takes_as_much_longer_as_the_bytes_need():
    platform = load_profile("a100_80_sxm")
    unit = platform.engines[0]
    rate = bytes_per_second(unit, "conv", platform.tier(unit.home))
    first, last = (
        simulate(cnn("resnet-50", 8, precision="amp_fp16", channels_last=x), platform) for x in (False, True)
    )
    more = sum(moved(first.log.trace, platform)) / rate * 1e9
    assert first.log.end - last.log.end == pytest.approx(more, abs=2 * len(first.log.trace.op_columns.name))


def test_published_speed_of_channels_last_is_not_exceeded():
    """ResNet-50 trains 1.48 times as fast under autocast with channels last (apex, issue 1445), SSD on an A100 1.49
    times (DeepLearningExamples, pull request 1017): transpositions at the memory's full rate are a lower bound."""
    end = [simulate(cnn("resnet-50", 200, precision="amp_fp16", channels_last=x), "a100_80_sxm") for x in (False, True)]
    assert 1.2 < end[0].log.end / end[1].log.end < 1.48


def test_profile_without_a_valid_order_names_the_valid_ones():
    with pytest.raises(ProfileError, match=r"image_order.*expected one of any, channels_last \(did you mean"):
        load_profile("a100_80_sxm", overrides={"engines.gpu.image_order.fp16": "channel_last"})


def test_tf32_is_what_pytorch_rounds_by_default():
    plain, high = (cnn("resnet-50", 2, precision=p) for p in ("fp32", "tf32"))
    kinds = [{(op.kind, op.dtype) for op in t.ops if op.kind in ("conv", "matmul") and op.dtype} for t in (plain, high)]
    assert kinds == [{("conv", "tf32"), ("matmul", "fp32")}, {("conv", "tf32"), ("matmul", "tf32")}]
    assert (plain.tensor_columns.bytes == high.tensor_columns.bytes).all()
