"""CSWAP: compressed where the swap becomes shorter by it, and never worse than all or nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.conformance.costs import check_costs
from sim.conformance.replayed import LawBroken, replayed
from sim.conformance.values import check_values
from sim.errors import PolicyError
from sim.experiment import problem_for, simulate
from sim.hardware.profile import load_profile
from sim.policies import load
from sim.policies.compression.cswap import Cswap
from sim.policies.offload.vdnn import Vdnn
from sim.rewrites.encoding import Codec, encode
from sim.trace import TraceBuilder
from tests.policies.compression.test_cdma import chain
from tests.policies.offload.conftest import GB, machine
from workloads import cnn

SIZES = (304, 640, 256, 512)


def fast(rate: int, *, memory: int = 1000):
    """A machine whose device touches `memory` bytes a nanosecond, with links of `rate` bytes/s."""
    plain = machine(rate=rate)
    hbm, *rest = plain.tiers
    return replace(plain, tiers=(replace(hbm, bandwidth=memory * GB), *rest))


def end(trace, platform, policy) -> int:
    return simulate(trace, platform, policy).log.end


def test_a_swap_costs_what_the_model_says():
    """Drawn by hand: copies of 6, 2.5 and 5 times their bytes in ns, layers of 400 ns, half of the elements zero.

    Of x1 (640 B) at a tenth of a byte per ns: 6400 ns out and back; 400 ns are hidden in forward, and 400 in backward.
    Compressed it has 20 + 320 B: 3400 ns each way, and two passes of 640 + 340 B at 1000 B/ns.
    """
    plan = simulate(chain(0.5, SIZES), fast(GB // 10), Cswap(variant="all")).plan
    plain, small = plan.notes["predicted_ns"]["x1"]
    assert (plain, small) == (2 * 6400 - 800, 2 * 3400 - 800 + 2 * 1)
    assert plan.notes["compressed"] == {"x1": "zvc", "x2": "zvc", "x3": "zvc"}


def test_two_swaps_beside_one_layer_share_what_it_hides():
    """Plain copies take 640 ns, codes of 20 + 320 B 340 of the 400 ns of the layer; in backward the next op reads both.

    The second one has the 60 ns that the first one's code leaves.
    """
    b = TraceBuilder()
    x = b.tensor("x", 4, "input", zeros=0.0)
    left, right = (b.tensor(name, 640, zeros=0.5) for name in ("left", "right"))
    out, d, e = b.tensor("out", 4), b.tensor("d", 4, "temporary"), b.tensor("e", 4, "temporary")
    b.op("f0", "conv", reads=[x], writes=[left, right], duration=400, flops=1)
    b.op("f1", "conv", reads=[left, right], writes=[out], duration=400, flops=1)
    b.op("loss", "matmul", reads=[out], writes=[b.tensor("value", 0)], duration=0, flops=1)
    b.op("loss.bwd", "matmul", reads=[out], writes=[d], phase="backward", duration=0, flops=1)
    b.op("f1.bwd", "conv", reads=[d, left, right], writes=[e], phase="backward", duration=400, flops=1)
    plan = simulate(b.build(outputs=[e], carry=()), fast(GB), Cswap(variant="all")).plan
    codec = 2 * 1  # two passes of 640 + 340 B at 1000 B/ns
    assert plan.notes["predicted_ns"] == {
        "left": (2 * 640 - 400, 2 * 340 - 340 + codec),
        "right": (2 * 640 - 60, 2 * 340 - 60 + codec),
    }


@pytest.mark.parametrize(
    ("zeros", "rate", "throughput", "expected"),
    [
        (0.0, GB // 10, None, 0),  # no zeros: no code is smaller
        (0.03, GB // 10, None, 0),  # fewer than the mask takes
        (None, GB // 10, None, 0),  # nothing is stated
        (0.5, 1, None, 3),  # as good as no link
        (0.5, 10**9 * GB, None, 0),  # every copy is as good as none
        (0.5, GB // 10, 10**6, 0),  # a codec as slow as that
    ],
)
def test_limits_of_the_decision(zeros, rate, throughput, expected):
    plan = simulate(chain(zeros, SIZES), fast(rate), Cswap(variant="all", throughput=throughput)).plan
    assert len(plan.notes["compressed"]) == expected


@settings(max_examples=10, deadline=None)
@given(
    st.tuples(*[st.integers(8, 400).map(lambda n: 4 * n)] * 4),
    st.sampled_from((0.2, 0.5, 0.8)),
    st.sampled_from((GB // 20, GB // 4, GB, 4 * GB)),
    st.sampled_from((1, 5, 1000)),
)
def test_never_slower_than_compressing_all_or_nothing(sizes, zeros, rate, memory):
    """With exact predictions and one offload per layer, up to a nanosecond of rounding for each copy."""
    trace, platform = chain(zeros, sizes), fast(rate, memory=memory)
    chosen, every = (end(trace, platform, Cswap(variant="all", choose=c)) for c in ("model", "always"))
    assert chosen <= min(every, end(trace, platform, Vdnn(variant="all"))) + 2 * len(sizes)


@pytest.mark.parametrize("error", [0.2, 0.9])
def test_wrong_predictions_cost_at_most_what_they_are_off_by(error):
    trace, platform = chain(0.3, SIZES), fast(GB // 2, memory=2)
    exact, wrong = (simulate(trace, platform, Cswap(variant="all", error=e), seed=3) for e in (0.0, error))
    took = sum(op.duration or 0 for op in encode_all(trace, platform) if op.kind == "codec")
    assert exact.log.end <= wrong.log.end <= exact.log.end + error * took


def test_wrong_predictions_change_decisions_that_are_near():
    """Of x1 and x3 exact figures are 10,776 of 12,000 and 8,896 of 9,840 ns; x2 3,848 of 4,320."""
    trace, platform = chain(0.3, SIZES), fast(GB // 10, memory=1)
    found = {
        error: [
            set(simulate(trace, platform, Cswap(variant="all", error=error), seed=seed).plan.notes["compressed"])
            for seed in (0, 2)
        ]
        for error in (0.0, 0.9)
    }
    assert found == {0.0: [{"x1", "x2", "x3"}] * 2, 0.9: [{"x2", "x3"}, {"x3"}]}


def encode_all(trace, platform):
    return simulate(trace, platform, Cswap(variant="all", choose="always")).plan.trace.ops


def test_more_zeros_flip_each_decision_once():
    found = []
    for zeros in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        plan = simulate(chain(zeros, SIZES), fast(GB // 2, memory=2), Cswap(variant="all")).plan
        found.append(set(plan.notes["compressed"]))
    assert found[0] == set()
    assert found[-1] == {"x1", "x3"}  # of x2 little is not hidden, and what is takes less than its codec
    assert all(before <= after for before, after in itertools.pairwise(found))


def test_time_of_a_compressed_swap_has_both_codecs_in_it():
    """Encoding stands before the layer whose copy hides beside it, decoding before the first use."""
    trace, platform = chain(0.75, SIZES), fast(1000 * GB, memory=1)
    every = simulate(trace, platform, Cswap(variant="all", choose="always"))
    took = [2 * (size + ceil(size / 32) + size // 4) for size in SIZES[1:]]
    assert every.log.end == end(trace, platform, Vdnn(variant="all")) + sum(took)
    lanes = every.log.events.query("why == 'codec'")
    assert (lanes.end_ns - lanes.start_ns).sum() == sum(took)


def test_a_codec_that_takes_no_time_or_loses_values_breaks_the_law():
    """Planted: decompression left out of the time; a lossy codec that is not declared."""
    trace, platform = chain(0.75, SIZES), fast(GB // 10)

    def run(codec: Codec, policy: Cswap):
        from sim.plan import Plan

        return replayed(policy, Plan(encode(trace, {"x1": codec})), trace, platform)

    check_costs(run(Codec("zvc"), Cswap()))
    with pytest.raises(LawBroken, match=r"'x1.decode' encodes or decodes 820 B in 0 ns"):
        check_costs(run(Codec("zvc", decode_ns=0), Cswap()))
    with pytest.raises(LawBroken, match=r"lossy: op 'f1.bwd' reads a lossy copy of 'x1'"):
        check_values(run(Codec("fp16", lossless=False), Cswap()))
    with pytest.raises(LawBroken, match=r"'fp16' is a lossy format"):
        check_values(run(Codec("fp16"), Cswap()))
    check_values(run(Codec("fp16", lossless=False), Cswap(precision="fp16")))


def test_of_two_formats_the_smaller_one_is_taken():
    """Sparse rows take a byte per element that is not zero, a mask a bit for each: a ninth of them, more or less."""
    for zeros, form in ((0.85, "zvc"), (0.95, "csr")):
        trace = chain(zeros, tuple(10 * size for size in SIZES))
        plan = simulate(trace, fast(GB // 10), Cswap(variant="all", choose="always")).plan
        assert set(plan.notes["compressed"].values()) == {form}


def test_lossy_codes_are_for_tensors_that_no_sparse_format_makes_smaller():
    trace = chain(None, SIZES)
    plan = simulate(trace, fast(GB // 10), Cswap(variant="all", precision="fp8")).plan
    assert set(plan.notes["compressed"].values()) == {"fp8"}
    assert set(plan.notes["approximate"]) == {"x1.decoded", "x2.decoded", "x3.decoded"}
    assert (Cswap().lossless, Cswap(precision="fp8").lossless) == (True, False)


def test_training_time_against_vdnn_on_a_v100():
    """Abstract: 20.7 % less on average of six networks; here 16 to 41 % less with the device's bandwidth for codecs,
    and 20 % on average where they take 60 GB/s, which is ours: the paper's kernels are tuned, and not stated so."""
    platform, at_best, slower = load_profile("v100_16"), [], []
    for name, batch in (("alexnet", 128), ("vgg-16", 64)):
        trace = cnn(name, batch, zeros="cdma", kernels="cudnn")
        plain = simulate(trace, platform, Vdnn(variant="all"), budget="64 GB").log.end
        for rate, found in ((None, at_best), ("60 GB/s", slower)):
            result = simulate(trace, platform, Cswap(variant="all", throughput=rate), budget="64 GB")
            found.append(1 - result.log.end / plain)
    assert all(0.1 < gain < 0.45 for gain in (*at_best, *slower))
    assert sum(slower) / len(slower) == pytest.approx(0.207, abs=0.05)


def test_while_a_codec_runs_the_device_holds_the_tensor_and_its_code():
    result = simulate(chain(0.5, SIZES), fast(GB // 10), Cswap(variant="all"))
    size = dict(zip(result.log.trace.tensor_columns.name, result.log.trace.tensor_columns.bytes.tolist(), strict=True))
    on_device = result.memory.query("tier == 'hbm'")
    codecs = result.events[result.events.op.str.endswith((".encode", ".decode")) & (result.events.why == "codec")]
    assert len(codecs) == 6
    for row in codecs.itertuples():
        name, _, way = row.op.rpartition(".")
        held = on_device[on_device.time_ns <= row.start_ns].groupby("tensor").delta_bytes.sum()
        here = (name, f"{name}.zvc") if way == "encode" else (f"{name}.zvc", f"{name}.decoded")
        assert [held[each] for each in here] == [size[each] for each in here]


def test_where_codes_do_not_fit_it_is_vdnn():
    """One large result, and beside it nothing as large as its code: what encodes it needs more than any layer."""
    b = TraceBuilder()
    made = [b.tensor("x0", 4, "input"), b.tensor("x1", 640, zeros=0.5), b.tensor("x2", 4), b.tensor("x3", 4)]
    for i in range(3):
        b.op(f"f{i}", "conv", reads=[made[i]], writes=[made[i + 1]], duration=400, flops=1)
    gradient = made[3]
    for i in reversed(range(3)):
        new = b.tensor(f"d{i}", 4, "temporary")
        b.op(f"f{i}.bwd", "conv", reads=[gradient, made[i]], writes=[new], phase="backward", duration=400, flops=1)
        gradient = new
    trace, platform = b.build(outputs=[gradient], carry=()), fast(GB // 10)
    found = {}
    for budget in (700, 1000):
        result, plain = (simulate(trace, platform, policy(variant="all"), budget=budget) for policy in (Cswap, Vdnn))
        found[budget] = result.plan.notes["compressed"], result.log.end < plain.log.end
    assert found == {700: ({}, False), 1000: ({"x1": "zvc"}, True)}


def test_bad_input_is_one_clear_line():
    with pytest.raises(PolicyError, match=r"cswap.*throughput is '60'.*GB/s"):
        load("cswap", throughput="60")
    with pytest.raises(PolicyError, match=r"cswap: toy has no host tier to offload to"):
        Cswap(variant="all").plan(problem_for(chain(0.5), machine(host=False)))
