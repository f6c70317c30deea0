"""Replicas and ZeRO: closed forms, every rank against the one that stands for all, and faults that the law finds."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.analysis.peak_memory import peak_bytes
from sim.engine.event_path.groups import COLLECTIVE_CHUNK
from sim.engine.replay import replay
from sim.errors import LayoutError, TraceError
from sim.experiment import simulate
from sim.hardware.platform import Engine, Link, Platform, Tier, rank_link, shared_link
from sim.hardware.profile import load_profile
from sim.layout import Layout, lay_out
from sim.plan import Plan
from sim.rewrites.batching import split_batch_ops
from sim.rewrites.pipeline import pipeline
from sim.rewrites.ranks import all_ranks
from sim.rewrites.rewriter import noted, with_columns
from sim.rewrites.schedules import parts_per_device, refusal
from sim.rewrites.values import departures
from sim.rewrites.zero import LEVELS, shard
from sim.trace import Trace, TraceBuilder
from sim.trace.io import load as load_trace
from sim.trace.io import save as save_trace
from sim.trace.op import Ring
from tests.rewrites.test_schedules import FAMILIES
from tests.strategies import traces
from workloads import transformer

CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 128}
GB = 10**9
AMONG = ("data", "group", "group_data")
LAYOUTS = [
    {"dp": 2},
    {"dp": 2, "micro_batches": 2, "zero": 1},
    {"dp": 4, "zero": 2},
    {"dp": 2, "micro_batches": 2, "zero": 3},
    {"dp": 2, "micro_batches": 2, "zero": 3, "reshard": False},
    {"dp": 2, "pp": 2, "micro_batches": 4, "zero": 3, "reshard": False},
    {"dp": 4, "zero": 3, "reshard_to": 2},
    {"dp": 4, "zero": 3, "shard_within": 2},
    {"dp": 4, "pp": 2, "micro_batches": 2, "zero": 2, "shard_within": 2},
    {"dp": 2, "micro_batches": 2, "zero": 3, "gathered": "module", "prefetch": 2},
    {"dp": 4, "pp": 2, "micro_batches": 2, "zero": 3, "reshard_to": 2, "prefetch": 2},
    {"dp": 2, "pp": 2, "micro_batches": 2, "zero": 1},
    {"dp": 2, "pp": 2, "micro_batches": 2, "zero": 3, "schedule": "zb_h1"},
    {"dp": 2, "pp": 1, "micro_batches": 4, "zero": 1, "schedule": "dualpipe_v"},
]


@cache
def step() -> Trace:
    """A step whose tensors divide by all the ranks here."""
    return transformer(CONFIG, batch=8, sequence=16, precision="mixed_bf16")


def line(devices: int, ranks: int = 1) -> Platform:
    """Devices that each reach all others at 1 GB/s, without latency; of each, a link among so many ranks."""
    which = range(devices)
    links = [Link(f"l{i}.{j}", f"hbm@{i}", f"hbm@{j}", GB) for i in which for j in which if i != j]
    if ranks > 1:
        links += [Link(rank_link(axis, i), f"hbm@{i}", f"hbm@{i}", GB) for axis in AMONG for i in which]
    return Platform(
        "line",
        tuple(Tier(f"hbm@{i}", 1 << 40, 1 << 40, 10**12, device=i) for i in which),
        tuple(Engine(f"gpu@{i}", i, f"hbm@{i}", (f"hbm@{i}",), {"fp32": 10**12}, launch=7) for i in which),
        tuple(links),
    )


def peaks(trace: Trace, platform: Platform) -> tuple[int, list[int]]:
    """Makespan, and the peak of each device."""
    log = replay(Plan(trace), platform)
    held = peak_bytes(log)
    return log.end, [held[f"hbm@{i}"] for i in range(trace.devices)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_rank_stands_for_all(layout: dict, tmp_path: Path) -> None:
    """Same time, same peaks, and the same values: the law checks all ranks without knowing that they are symmetric."""
    trace, _ = lay_out(step(), "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, step())} <= {"repeated"}  # what is not divided, per microbatch
    save_trace(trace, tmp_path / "t")
    assert load_trace(tmp_path / "t").content_hash == trace.content_hash
    every = all_ranks(trace)
    assert {each.what for each in departures(every, step())} <= {"repeated"}
    stages, ranks = trace.devices, layout["dp"]
    own, among = line(stages, ranks), line(stages * ranks)
    if layout.get("reshard_to"):  # which of two rings goes first on a wire would be arbitrary
        among, own = (replace(p, links=tuple(replace(ln, rate=10**15) for ln in p.links)) for p in (among, own))
    one, all_of_them = peaks(trace, own), peaks(every, among)
    assert one[0] == all_of_them[0]
    assert [peak for peak in one[1] for _ in range(ranks)] == all_of_them[1]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    traces(update=True, cpu=False, in_place=False),
    st.integers(1, 3),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from(LEVELS),
    st.sampled_from(("1f1b", "gpipe", "naive", "zb_h1", "zb_v", "dualpipe_v")),
    st.sampled_from(({}, {"group": 2}, {"within": 2})),
)
def test_random_traces_on_random_devices_compute_the_same(
    base: Trace, stages: int, n: int, ranks: int, level: int, schedule: str, near: dict[str, int]
) -> None:
    layers = 1 + max(op.layer for op in base.ops)
    chunks = parts_per_device(schedule)
    assume(layers >= stages * chunks)
    assume(not refusal(schedule, stages, chunks, n))
    parts = [i * stages * chunks // layers for i in range(layers)]
    try:
        divided = pipeline(base, parts, n, schedule, chunks, ranks=ranks, dealt=level > 1)
    except TraceError as error:  # rows of all replicas in one place
        assume(not any(text in str(error) for text in ("with the rows of all", "do not divide the batch")))
        raise
    trace = shard(divided, ranks, level, **(near if ranks == 4 else {}))
    for whole in (trace, all_ranks(trace)):
        found = [each.text for each in departures(whole, base) if each.what != "repeated"]
        # a rank's bytes are rounded as those of the first
        assert not [text for text in found if " bytes, not " not in text]


# ---- closed forms ------------------------------------------------------------------------------------


def parameters(count: int, ranks: int, gradient: int = 2) -> Trace:
    """One layer of so many parameters: 16-bit weights, gradients, 12 bytes of optimizer state each."""
    b = TraceBuilder({"batch": ranks})
    x, w, s = (
        b.tensor("x", ranks, "input"),
        b.tensor("w", 2 * count, "weight"),
        b.tensor("w.s", 12 * count, "optimizer_state"),
    )
    y, g = b.tensor("y", ranks), b.tensor("w.grad", gradient * count, "gradient")
    w2, s2 = (
        b.tensor("w.new", 2 * count, "weight", replaces=w),
        b.tensor("w.s.new", 12 * count, "optimizer_state", replaces=s),
    )
    b.op("f", "matmul", reads=[x, w], writes=[y], layer=0, splits=["batch"])
    b.op("b", "matmul", reads=[x, y, w], writes=[g], layer=0, phase="backward", splits=["batch_sum"])
    b.op("u", "optimizer", reads=[g, s, w], writes=[w2, s2], phase="update", splits=["rows"])
    return b.build(outputs=[w2, s2], carry=[(w2, w), (s2, s)])


def zero(trace: Trace, ranks: int, level: int) -> Trace:
    return shard(split_batch_ops(trace, 1, ranks, level > 1)[0], ranks, level)


@pytest.mark.parametrize(
    ("level", "kept"), [(0, 120 * GB), (1, 31_406_250_000), (2, 16_640_625_000), (3, 1_875_000_000)]
)
def test_training_state_of_the_papers_example(level: int, kept: int) -> None:
    """7.5e9 parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB (ZeRO, figure 1)."""
    base = parameters(7_500_000_000, 64)
    trace = zero(base, 64, level)
    assert not departures(trace, base)
    initial = sum(t.bytes for t in trace.tensors if trace.producer[t.id] < 0 and t.role != "input")
    ring = next(op for op in trace.ops if op.ring is not None and op.phase == "backward")
    gradients = trace.tensors[(ring.writes if level > 1 else ring.reads)[0]].bytes
    assert initial + gradients == kept


def held(trace: Trace, *, is_summed: bool) -> int:
    """Bytes of a rank's weights, states, and gradients before or after they have been summed."""
    ring = next(op for op in trace.ops if op.ring is not None and op.phase == "backward")
    initial = sum(t.bytes for t in trace.tensors if trace.producer[t.id] < 0 and t.role != "input")
    return initial + trace.tensors[(ring.writes if is_summed else ring.reads)[0]].bytes


def test_states_that_deepspeeds_estimators_print() -> None:
    """t5-3b on eight GPUs (DeepSpeed, docs/code-docs/source/memory.rst): 2,851 million parameters, 32 in one layer.

    Level 2, 15.93 GiB: 16-bit gradients not summed yet, and 4 bytes of each of a rank's, since its update converts them
    all; a fused one here reads them as they are. Level 3, 6.10 GiB: gradients in fp32, and a layer's weights and
    gradients in 16 bits.
    """
    d, count, largest, gib = 8, 2_851_000_000, 32_000_000, 2**30
    second = held(zero(parameters(count, d), d, 2), is_summed=False) + 4 * count / d
    assert second / gib == pytest.approx(15.93, rel=0.002)
    assert second == pytest.approx(4 * count + 16 * count / d, rel=0.002)
    third = held(zero(parameters(count, d, 4), d, 3), is_summed=True) + 4 * largest
    assert third / gib == pytest.approx(6.10, rel=0.005)
    assert third == pytest.approx(4 * largest + 18 * count / d, rel=0.002)


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_that_a_rank_sends(level: int) -> None:
    """Per parameter of 2 bytes: twice (d - 1) / d of them, at level 3 three times."""
    trace = zero(parameters(64_000, 64), 64, level)
    sent = sum(op.bytes or 0 for op in trace.ops if op.ring is not None)
    assert sent == {0: 2, 1: 2, 2: 2, 3: 3}[level] * 2 * 64_000 * 63 // 64


def test_weights_that_stay_after_forward_are_sent_twice_and_not_three_times() -> None:
    """(d - 1) / d of the parameters for forward and for the gradients; all weights of the layers are there at once."""
    base, sent, held = step(), {}, {}
    weights = sum(t.bytes for t in base.tensors if t.role == "weight" and base.producer[t.id] < 0)
    for reshard in (True, False):
        trace, _ = lay_out(base, "a100_80_sxm", {"dp": 4, "zero": 3, "reshard": reshard})
        gathers = [op for op in trace.ops if op.ring is not None and op.name.endswith(".all_gather")]
        sent[reshard] = sum(op.bytes or 0 for op in gathers)
        held[reshard] = peaks(trace, line(1, 4))[1][0]
    assert 0 <= sent[False] - weights * 3 // 4 <= 10  # each collective rounds up
    assert sent[True] > 1.9 * sent[False]  # backward reads no biases
    assert held[False] > held[True]


def test_weights_that_stay_divided_among_fewer_replicas_come_from_these_for_backward() -> None:
    """(d - 1) / d of them for forward, (n - 1) / n for backward, on the link among n; 1 / n stays in between."""
    base, far, near, held = step(), {}, {}, {}
    for n in (0, 2, 4):
        trace, _ = lay_out(base, "a100_80_sxm", {"dp": 8, "zero": 3, "reshard_to": n})
        gathers = [op for op in trace.ops if op.ring is not None and ".all_gather" in op.name]
        for sent, axis in ((far, "data"), (near, "group")):
            sent[n] = sum(op.bytes or 0 for op in gathers if op.ring is not None and op.ring.axis == axis)
        held[n] = peaks(trace, line(1, 8))[1][0]
        for op in trace.ops:
            if op.name.endswith(".reshard"):
                kept, whole = (sum(trace.tensors[t].bytes for t in ids) for ids in (op.writes, op.reads))
                assert kept * n == whole
    again = far[0] - far[2]  # for backward, of seven eighths of the weights
    assert near[0] == 0
    assert far[2] == far[4]
    for n in (2, 4):
        assert abs(near[n] - again * 8 // 7 * (n - 1) // n) <= 20  # each collective rounds up
    assert held[0] < held[4] < held[2]


def test_a_group_that_lacks_a_member_is_no_whole_weight() -> None:
    trace, _ = lay_out(step(), "a100_80_sxm", {"dp": 4, "zero": 3, "reshard_to": 2})
    rings = {op: ring for op, ring in trace.op_columns.ring.items() if ring.axis == "group"}
    assert rings
    assert trace.origin is not None
    alone = Trace(trace.tensor_columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta,
                  origin=replace(trace.origin, group=1))  # fmt: skip
    found = {each.text for each in departures(alone, step()) if each.what == "wrong"}
    assert any("joins 2 group ranks of 1 replicas" in text for text in found)


def test_a_group_gathers_inside_its_node() -> None:
    """Of 16 replicas on two nodes of eight, four gather over the links inside; both rings share the replicas' wires."""
    layout = {"dp": 16, "zero": 3, "reshard_to": 4}
    _, machine = lay_out(transformer(CONFIG, batch=16, sequence=16), "a100_80_sxm", layout)
    link = {each.name: each for each in machine.links}
    inside = link[rank_link("group", 0)]
    assert inside.fixed == 3 * load_profile("a100_80_sxm", overrides={"devices": "2"}).links[-1].fixed
    assert inside.rate > link[rank_link("data", 0)].rate
    assert link[shared_link(0)].rate == inside.rate
    near, far = (
        simulate(*lay_out(transformer(CONFIG, batch=16, sequence=16), "a100_80_sxm", each))
        for each in (layout, {**layout, "reshard_to": 0})
    )
    assert near.log.end < far.log.end
    sent = sum(op.bytes or 0 for op in near.plan.trace.ops if op.ring is not None)
    assert sum(near.summary()["moved_bytes"].values()) == sent  # on the shared wires no second time


# ---- hybrid sharding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS[1:])
def test_hybrid_sharding_divides_state_in_a_group_and_sums_its_parts_among_groups(level: int) -> None:
    """Of d replicas s divide: 1 / s of it each; (s - 1) / s of the weights go round among these so often as ever, and
    2 (g - 1) / g of 1 / s of the gradients among the g = d / s that have the same part."""
    d, s, count = 64, 8, 64_000
    base = parameters(count, d)
    divided = split_batch_ops(base, 1, d, level > 1)[0]
    trace = shard(divided, d, level, within=s)
    assert not departures(trace, base)
    assert not {each.what for each in departures(all_ranks(trace), base)} - {"repeated"}
    initial = [t for t in trace.tensors if trace.producer[t.id] < 0 and t.role != "input"]
    assert [t.bytes for t in initial] == [2 * count // (s if level == 3 else 1), 12 * count // s]
    sent = dict.fromkeys(AMONG, 0)
    for op in trace.ops:
        if op.ring is not None:
            sent[op.ring.axis] += op.bytes or 0
    assert sent["data"] == 0
    assert sent["group"] == {1: 2, 2: 2, 3: 3}[level] * 2 * count * (s - 1) // s
    assert sent["group_data"] == 2 * (d // s - 1) * 2 * count // s // (d // s)
    assert shard(divided, d, level, within=d).content_hash == shard(divided, d, level).content_hash


def test_a_group_of_all_or_of_one_is_no_hybrid() -> None:
    """All replicas divide as ZeRO does, one alone has what a replica without it has, to the byte and nanosecond."""
    for same, layout in ((4, {"dp": 4, "zero": 3}), (1, {"dp": 4, "zero": 0})):
        trace, machine = lay_out(step(), "a100_80_sxm", layout)
        other, its = lay_out(step(), "a100_80_sxm", {"dp": 4, "zero": 3, "shard_within": same})
        assert noted(other, layout={}).content_hash == noted(trace, layout={}).content_hash
        assert (its.links, its.pools) == (machine.links, machine.pools)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_ranks_of_tokens_and_a_group_of_replicas_divide_the_state_together(level: int) -> None:
    """Of 4 x 2 ranks 2 x 2 divide; a part of a sum over groups takes the place of that over one."""
    base = transformer(CONFIG, batch=8, sequence=16, precision="mixed_bf16", attention="flash", dropout=0.0)
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 4, "cp": 2, "zero": level, "shard_within": 2})
    assert {(op.ring.axis, op.ring.ranks) for op in trace.ops if op.ring is not None} >= {
        ("group_context", 4),
        ("group_data", 2),
    }
    for op in trace.ops:
        if op.ring is not None and op.ring.axis == "group_data":
            assert [trace.tensors[t].replaces for t in op.writes] == list(op.reads)
    for whole in (trace, all_ranks(trace)):
        assert {each.what for each in departures(whole, base)} <= {"repeated"}


def test_gradients_that_are_not_summed_among_groups_are_found() -> None:
    for layout in ({"dp": 4, "zero": 3}, {"dp": 4, "zero": 1, "micro_batches": 2}):
        trace, _ = lay_out(step(), "a100_80_sxm", {**layout, "shard_within": 2})
        rings = {op: ring for op, ring in trace.op_columns.ring.items() if ring.axis != "group_data"}
        summed = (t for op in trace.op_columns.ring.keys() - rings.keys() for t in trace.writes(op))
        every = {trace.tensors[t].name.rpartition(".reduced")[0] for t in summed}
        assert len(every) == sum(t.role == "weight" for t in step().tensors if step().producer[t.id] < 0)
        alone = with_columns(trace, ring=rings)
        for whole in (alone, all_ranks(alone)):
            found = [each for each in departures(whole, step()) if each.what == "wrong"]
            assert {each.tensor.partition(".shard")[0].rpartition(".reduced")[0] for each in found} == every


def test_hybrid_sharding_crosses_nodes_only_to_sum_parts() -> None:
    """Of 16 replicas on two nodes of eight, each has one of the same part on the other, at its own rate there; these
    sums run beside the gathers inside, over other wires."""
    base = transformer(CONFIG, batch=16, sequence=16)
    hybrid, plain = (simulate(*lay_out(base, "a100_80_sxm", {"dp": 16, "zero": 3, "shard_within": s})) for s in (8, 0))
    link = {each.name: each for each in hybrid.log.platform.links}
    network = load_profile("a100_80_sxm").networks[0]
    inside = load_profile("a100_80_sxm", overrides={"devices": "2"}).links[-1]
    between = link[rank_link("group_data", 0)]
    assert (between.rate, between.fixed) == (network.rate, network.fixed)
    assert link[rank_link("group", 0)].fixed == 7 * inside.fixed
    assert shared_link(0) not in link
    assert rank_link("data", 0) not in link
    assert hybrid.log.end < plain.log.end


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp": 4, "zero": 2, "reshard_to": 2}, "reshard_to: only weights that zero 3 divides are gathered, zero is 2"),
        ({"dp": 4, "zero": 3, "reshard_to": 4}, "nearest: 2"),
        ({"dp": 4, "zero": 3, "reshard_to": 1}, "nearest: 2"),
        ({"dp": 6, "zero": 3, "reshard_to": 4}, "nearest: 3"),
        ({"dp": 4, "zero": 3, "reshard_to": -2}, "reshard_to: needs a whole number of at least 1, has -2"),
        ({"dp": 4, "zero": 3, "reshard_to": 2, "reshard": False}, "nearest: reshard true"),
        ({"dp": 4, "zero": 3, "ep": 2, "reshard_to": 2}, "nearest: ep 1"),
        ({"dp": 4, "shard_within": 2}, "shard_within: replicas divide nothing at zero 0; nearest: zero 1"),
        ({"dp": 12, "zero": 1, "shard_within": 8}, "shard_within: 8 does not divide the 12 replicas of dp; nearest: 6"),
        ({"dp": 4, "zero": 3, "shard_within": -2}, "shard_within: needs a whole number of at least 1, has -2"),
        ({"dp": 4, "zero": 3, "ep": 2, "shard_within": 2}, "nearest: ep 1"),
        ({"dp": 8, "zero": 3, "reshard_to": 2, "shard_within": 4}, "nearest: reshard_to 0"),
        ({"dp": 9, "cp": 2, "zero": 3, "shard_within": 1}, "nearest: 3"),
        ({"dp": 4, "zero": 3, "reshard": 2}, "reshard: needs true or false, has 2; for a number of replicas there is"),
    ],
)
def test_a_group_that_cannot_keep_weights_is_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(said)):
        Layout(**layout)


def test_weights_that_stay_are_gathered_again_after_a_backward_has_freed_them() -> None:
    """1F1B on the first of two stages: F0 F1 B0 F2 B1 F3 B2 B3; weights are gathered for F0, F2, F3 and B3 alone."""
    trace, _ = lay_out(step(), "a100_80_sxm", {"dp": 2, "pp": 2, "micro_batches": 4, "zero": 3, "reshard": False})
    gathers = [
        op.name for op in trace.ops if op.device == 0 and op.name.endswith(".all_gather") and op.phase != "update"
    ]
    of_layer = [name for name in gathers if name.startswith("h0.")]
    assert [name.rsplit(".mb", 1)[1].split(".")[0] for name in of_layer] == ["0", "2", "3", "3"]


def test_a_ring_of_four_takes_60_ms_for_a_gigabyte() -> None:
    trace = zero(parameters(GB // 2, 4), 4, 0)
    ring = next(op for op in trace.ops if op.ring is not None)
    assert ring.bytes == 3 * GB // 2
    device = Tier("hbm", 1 << 60, 1 << 60, 10**18, device=0)
    engine = Engine("gpu", 0, "hbm", ("hbm",), {"fp32": 10**18})
    machine = Platform("ring", (device,), (engine,), (Link(rank_link("data", 0), "hbm", "hbm", 25 * GB),))
    log = replay(Plan(trace), machine)
    rows = log.interval("bytes") == ring.bytes
    (took,) = (log.interval("end") - log.interval("start"))[rows].tolist()
    chunks = -(-(3 * GB // 2) // COLLECTIVE_CHUNK)
    assert 60_000_000 <= took < 60_000_000 + chunks  # each chunk rounds up to a nanosecond


# ---- faults that the law finds -----------------------------------------------------------------------


def whats(trace: Trace) -> set[str]:
    return {each.what for each in departures(trace, step())}


def rebuilt(trace: Trace, **columns: object) -> Trace:
    ops = replace(trace.op_columns, **columns)
    return Trace(
        trace.tensor_columns, ops, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin
    )


def named(trace: Trace, name: str) -> int:
    return next(t.id for t in trace.tensors if t.name == name)


def op_named(trace: Trace, name: str) -> int:
    return next(op.id for op in trace.ops if op.name == name)


def reading(trace: Trace, op: int, old: int, new: int) -> Trace:
    ids = trace.op_columns.read_ids.copy()
    start, stop = trace.op_columns.read_start[op : op + 2]
    ids[start:stop][ids[start:stop] == old] = new
    return rebuilt(trace, read_ids=ids)


def replica(layout: dict) -> Trace:
    return lay_out(step(), "a100_80_sxm", layout)[0]


def test_a_collective_without_a_member_is_wrong() -> None:
    trace = replica({"dp": 4})
    first = min(trace.op_columns.ring)
    ring = {**trace.op_columns.ring, first: Ring("data", 3, 2)}
    assert whats(rebuilt(trace, ring=ring)) == {"wrong"}


def test_a_gradient_that_was_not_summed_over_the_replicas_is_wrong() -> None:
    trace = replica({"dp": 2})
    reduce = next(op for op in trace.ops if op.ring is not None)
    update = next(op for op in trace.ops if op.phase == "update" and set(op.reads) & set(reduce.writes))
    t = next(t for t in update.reads if t in reduce.writes)
    own = reduce.reads[reduce.writes.index(t)]
    loose = replace(trace.tensor_columns, replaces=trace.tensor_columns.replaces.copy())
    loose.replaces[t] = -1
    apart = Trace(
        loose, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin
    )
    assert whats(apart) == set()
    assert whats(reading(apart, update.id, t, own)) == {"wrong"}


def test_a_gradient_counted_twice_is_wrong() -> None:
    trace = replica({"dp": 2, "micro_batches": 2, "zero": 2})
    add = next(op for op in trace.ops if op.name.endswith(".sum.add.mb1"))
    total, term = add.reads
    assert "wrong" in whats(reading(trace, add.id, term, total))


def test_the_gathered_weights_of_another_layer_are_wrong() -> None:
    trace = replica({"dp": 2, "zero": 3})
    op = next(
        op for op in trace.ops if op.name.startswith("h0.mlp.fc") and op.phase == "forward" and op.kind == "matmul"
    )
    names = [trace.tensors[t].name for t in range(len(trace.tensors))]
    mine = next(t for t in op.reads if names[t].startswith("h0.mlp.fc.weight"))
    other = next(
        t for op in trace.ops if op.phase == "forward" for t in op.writes if names[t].startswith("wpe.weight.for")
    )
    assert "wrong" in whats(reading(trace, op.id, mine, other))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("precision", ["amp_bf16", "mixed_bf16"])
def test_level_3_gathers_for_forward_and_for_backward_in_every_precision(precision: str, n: int) -> None:
    """Each microbatch: weights twice and gradients once, all but the embedding's weight, which backward does not need.

    Under autocast backward reads casts; the hooks of FSDP and DeepSpeed gather the weights before it none the less.
    """
    config = {**FAMILIES["llama"], "model_type": "llama", "tie_word_embeddings": False}
    base = transformer(config, batch=4 * n, sequence=16, precision=precision)
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 4, "zero": 3, "micro_batches": n})
    weights = {t.name: t.bytes for t in base.tensors if t.role == "weight" and base.producer[t.id] < 0}
    gathered_or_reduced = 3 * sum(weights.values()) - weights["embed.weight"]
    rings = [op for op in trace.ops if op.ring is not None]
    sent = sum(op.bytes for op in rings)
    assert 0 <= sent - n * 3 * gathered_or_reduced // 4 <= len(rings)  # each is rounded up to whole bytes
    gathers = [op for op in rings if op.phase == "backward" and "all_gather" in op.name]
    if precision == "amp_bf16":  # read by nothing, and resident until the layer's backward has ended
        held = [t for op in gathers for t in op.writes if not trace.readers(t)]
        assert held
        assert all(trace.ops[trace.released[t]].phase == "backward" for t in held)


@pytest.mark.parametrize("layout", [{"micro_batches": 2}, {"dp": 2}, {"dp": 2, "micro_batches": 2, "zero": 2}], ids=str)
def test_a_gradient_of_tied_embeddings_is_summed_in_the_type_in_which_it_is_kept(layout: dict) -> None:
    """Two stages add a term of each microbatch to their fp32 gradients, and then sum these, as Megatron-LM's do."""
    base = transformer(CONFIG, batch=8, sequence=16, precision="megatron_bf16")
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 2, **layout})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}
    casts = [op for op in trace.ops if op.name.startswith("wte.weight.grad.main")]
    dealt = layout.get("zero", 0) == 2  # per microbatch, on the first stage, which sends the result
    assert sorted(op.device for op in casts) == ([0, 0] if dealt else sorted([0, 1] * layout.get("micro_batches", 1)))
