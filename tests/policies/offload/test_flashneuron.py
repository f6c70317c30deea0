"""FlashNeuron: a drive beside a busy host, and a choice of tensors whose copies end with the forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import PolicyError
from sim.experiment import simulate
from sim.hardware.platform import Link, Platform, Tier
from sim.hardware.profile import load_profile
from sim.policies.offload.flashneuron import Saved, choose
from sim.rewrites.codecs import code_bytes
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, Facts, facts, machine
from workloads import cnn


def with_drive(capacity: int = ROOMY, *, write: int = GB, read: int = GB, kind: str = "nvme") -> Platform:
    """The machine of the other tests, with a drive that the device writes and reads itself, in bytes/s."""
    plain = machine(capacity)
    links = (Link("d2n", "hbm", "drive", write), Link("n2d", "drive", "hbm", read))
    drive = Tier("drive", ROOMY, ROOMY, GB, kind=kind)
    return replace(plain, tiers=(*plain.tiers, drive), links=(*plain.links, *links))


def net(sizes: list[int], zeros: dict[int, float] | None = None, forward: int = 10) -> Trace:
    """A chain whose layer n saves its result, of sizes[n] bytes; with zeros where they are stated."""
    b = TraceBuilder()
    x = [b.tensor("x", 4, "input")]
    for n, size in enumerate(sizes):
        x.append(b.tensor(f"y{n}", size, layer=n, zeros=(zeros or {}).get(n), dtype="fp32", shape=(size // 4,)))
        b.op(f"f{n}", "conv", reads=x[-2:-1], writes=x[-1:], layer=n, duration=forward)
    gradient = b.tensor("d", 4, "temporary")
    b.op("loss", "loss", writes=[gradient], duration=forward, phase="backward")
    for n in reversed(range(len(sizes))):
        made = b.tensor(f"d{n}", 4, "temporary", layer=n)
        b.op(
            f"f{n}.bwd", "conv", reads=[gradient, x[n + 1]], writes=[made], layer=n, duration=forward, phase="backward"
        )
        gradient = made
    return b.build(outputs=(), carry=())


def run(trace: Trace, budget: int, platform: Platform | None = None, **parameters: object) -> Facts:
    return facts(simulate(trace, (platform or with_drive()).with_budget(budget), "flashneuron", **parameters))


def test_tensors_leave_in_the_order_of_production_until_the_share_of_free_memory_holds_the_rest() -> None:
    trace = net([40, 40, 40, 40])  # of 160 bytes saved 0.6 of 100 - 4 stay: 103 leave, in whole tensors
    done = run(trace, 100)
    assert done.result.plan.notes["needed_bytes"] == 160 - int(0.6 * 96)
    assert done.out == {"y0": 40, "y1": 40, "y2": 40}
    assert run(trace, 400).moves == []
    assert run(trace, 100, share=1.0).out == {"y0": 40, "y1": 40}


def saved(*rows: tuple[int, int, str, int]) -> list[Saved]:
    """(bytes, ready, format, time of the copy)"""
    return [Saved(t, *row) for t, row in enumerate(rows)]


def test_the_last_dense_tensor_makes_way_for_later_ones_that_compress() -> None:
    # 0 and 1 suffice, but end at 130 instead of 100; 3 and 4 together have the bytes of 1, and end in time
    dense, sparse = (50, 10, "", 50), (50, 20, "", 70)
    some = saved(dense, sparse, (10, 30, "", 10), (30, 40, "csr", 10), (20, 50, "csr", 5))
    assert [one.tensor for one in choose(some, 80, 200)] == [0, 1]
    assert [one.tensor for one in choose(some, 80, 100)] == [0, 3, 4]
    # where nothing is left to exchange, what was reached stays
    assert [one.tensor for one in choose(some[:3], 80, 100)] == [0, 1]


def test_what_is_halved_makes_way_for_what_is_sparse() -> None:
    some = saved((40, 0, "fp16", 30), (40, 10, "csr", 10))
    assert [one.tensor for one in choose(some, 40, 30)] == [0]
    assert [one.tensor for one in choose(some, 40, 20)] == [1]


def test_what_the_next_op_needs_is_not_offloaded() -> None:
    b = TraceBuilder()
    x, y, z = b.tensor("x", 4, "input"), b.tensor("y", 40, dtype="fp32"), b.tensor("z", 40, dtype="fp32")
    b.op("f0", "conv", reads=[x], writes=[y], duration=10)
    b.op("f1", "conv", reads=[y], writes=[z], duration=10)
    b.op("f1.bwd", "conv", reads=[z], writes=[b.tensor("d", 4, "temporary")], duration=10, phase="backward")
    b.op("f0.bwd", "conv", reads=[y], writes=[b.tensor("e", 4, "temporary")], duration=10, phase="backward")
    done = run(b.build(outputs=(), carry=()), 90, share=0.0)
    assert done.result.plan.notes["offloaded"] == 1
    assert set(done.out) == {"y"}


def test_fp16_makes_way_for_sparse_after_dense_has_for_both() -> None:
    some = saved((40, 0, "", 40), (40, 10, "fp16", 30), (40, 20, "fp16", 30), (40, 30, "csr", 10))
    assert [one.tensor for one in choose(some, 80, 60)] == [1, 3]
    assert [one.tensor for one in choose(some, 120, 1)] == [1, 2, 3]


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 40), st.sampled_from(["", "csr", "fp16"]), st.integers(1, 9)),
        max_size=9,
    ),
    st.integers(-5, 40),
    st.integers(0, 60),
)
def test_what_is_chosen_suffices_wherever_all_together_would(rows, need, end) -> None:
    some = saved(*sorted(rows, key=lambda row: row[1]))
    chosen = choose(some, need, end)
    assert sum(one.bytes for one in chosen) >= min(need, sum(one.bytes for one in some))
    assert len({one.tensor for one in chosen}) == len(chosen)


def test_no_copy_is_left_at_the_end_of_forward_where_sparse_tensors_suffice() -> None:
    sizes, zeros = [400, 400, 400, 400, 40, 40], {2: 0.9, 3: 0.9}
    trace = net(sizes, zeros, forward=300)
    plain = run(trace, 1400, csr=False)
    assert plain.result.plan.notes["compressed"] == {}
    slow = with_drive(write=GB // 2)
    done = run(trace, 1400, slow)
    assert done.result.plan.notes["late_ns"] == 0
    assert done.result.plan.notes["compressed"] == {"y2": "csr", "y3": "csr"}
    assert done.out["y2.csr"] == code_bytes("csr", trace.tensors[trace.tensor_id("y2")])
    (loss,) = done.ran("loss")
    assert max(end for lane, _, _, end in done.moves if lane == "d2n") <= loss[0]
    assert run(trace, 1400, slow, csr=False).result.plan.notes["late_ns"] > 0


def test_half_of_the_bits_cross_where_that_is_asked_for() -> None:
    done = run(net([400, 400, 400, 400]), 1250, fp16=True)
    assert set(done.out.values()) == {200}
    assert done.result.plan.notes["approximate"]
    assert not done.result.policy.lossless
    assert simulate(net([400]), with_drive(), "flashneuron").policy.lossless


IN_FP32 = {"engines.gpu.peak.tf32": "19.5 TFLOP/s", "engines.gpu.image_order.tf32": "any"}
"""A card that convolves fp32 as it is: in TF32 it is too fast for four drives."""


def test_a_busy_host_slows_offload_to_its_memory_and_not_to_the_drive() -> None:
    trace = cnn("vgg-16", 160)
    times: dict[str, list[int]] = {}
    for name in ("flashneuron", "swap_all"):
        for rate in ("120 GB/s", "10 GB/s", "5 GB/s"):
            busy = {**IN_FP32, "tiers.hbm.capacity": "16 GB", "pools.host_dram.rate": rate}
            result = simulate(trace, load_profile("a100_80_gds", overrides=busy), name)
            times.setdefault(name, []).append(result.log.end)
            lanes = set(result.events.query("why == 'move'").lane)
            assert lanes == ({"gds_write", "gds_read"} if name == "flashneuron" else {"d2h", "h2d"})
    assert len(set(times["flashneuron"])) == 1
    assert times["swap_all"][0] < times["swap_all"][1] < times["swap_all"][2]


def test_a_batch_beyond_the_memory_of_the_device_trains() -> None:
    """VGG-16 with 320 images on a card of 16 GB, which holds 160 of them."""
    card = load_profile("a100_80_gds", overrides={**IN_FP32, "tiers.hbm.capacity": "16 GB"})
    result = simulate(cnn("vgg-16", 320, zeros="cdma"), card, "flashneuron")
    assert result.summary()["overhead"] < 0.15
    assert result.plan.notes["compressed"]


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(
        PolicyError, match="flashneuron: toy has no drive that the device reads and writes past the host"
    ):
        simulate(net([4]), machine(), "flashneuron")
    with pytest.raises(PolicyError, match="flashneuron: toy has no drive"):
        simulate(net([4]), with_drive(kind="ddr"), "flashneuron")
    with pytest.raises(PolicyError, match="share is 2; expected"):
        simulate(net([4]), with_drive(), "flashneuron", share=2)
