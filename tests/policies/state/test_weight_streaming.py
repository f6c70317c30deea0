"""Weights fetched layer by layer: fetches and releases by hand, what is resident at once, what joins with it."""

from __future__ import annotations

import numpy as np
import pytest

from sim.errors import PolicyError
from sim.experiment import simulate
from sim.log import WHY
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine
from workloads.transformer import transformer

SMALL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 512}


def net(layers: int = 4, *, weight: int = 100, length: int = 1000, update: bool = False) -> Trace:
    """Layers of one forward and one backward op that read the layer's weight; results take hardly any space."""
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    w = [b.tensor(f"w{i}", weight, "weight", layer=i) for i in range(layers)]
    saved, gradients = [x], []
    for i in range(layers):
        saved.append(b.tensor(f"y{i}", 1))
        b.op(f"f{i}", "matmul", reads=[saved[-2], w[i]], writes=[saved[-1]], layer=i, duration=length)
    d = b.tensor("d", 1, "temporary")
    b.op("loss", "loss", reads=[saved[-1]], writes=[d], phase="backward", duration=length)
    for i in reversed(range(layers)):
        below, g = b.tensor(f"d{i}", 1, "temporary"), b.tensor(f"g{i}", 1, "gradient", layer=i)
        reads = [d, saved[i], saved[i + 1], w[i]]
        b.op(f"b{i}", "matmul", reads=reads, writes=[below, g], phase="backward", layer=i, duration=length)
        gradients.insert(0, g)
        d = below
    if not update:
        return b.build(outputs=[*w, *gradients])
    new = [b.tensor(f"w{i}.new", weight, "weight", layer=i, replaces=w[i]) for i in range(layers)]
    for i in range(layers):
        step = {"phase": "update", "layer": i, "duration": length}
        b.op(f"u{i}", "optimizer", reads=[w[i], gradients[i]], writes=[new[i]], **step)
    return b.build(outputs=new, carry=list(zip(new, w, strict=True)))


def fetches(log) -> list[tuple[str, int]]:
    """Per copy to the device the tensor and its start, in order."""
    events = log.events
    rows = events[(events.why == "move") & (events.lane == "h2d")]
    return sorted(zip(rows.tensor, rows.start_ns.tolist(), strict=True), key=lambda row: row[1])


def test_each_weight_comes_one_layer_ahead_and_goes_behind_it():
    # f3, loss and b3 are neighbours but one: b3 is two runs behind f3, so w3 leaves and comes again with the loss
    log = simulate(net(), machine(), "weight_streaming").log
    found = fetches(log)
    # w0 is waited for (100 ns); then run k begins at 100 + 1000 k: f0..f3, loss, b3..b0
    starts = {"w0": [0, 7100], "w1": [100, 6100], "w2": [1100, 5100], "w3": [2100, 4100]}
    assert {name: [at for other, at in found if other == name] for name in starts} == starts
    assert log.end == 9 * 1000 + 100


@pytest.mark.parametrize(("ahead", "resident"), [(0, 1), (1, 2), (2, 3)])
def test_as_many_weights_are_resident_as_runs_are_looked_ahead(ahead, resident):
    peak = simulate(net(layers=8), machine(), "weight_streaming", ahead=ahead).summary()["peak_bytes"]
    assert resident * 100 <= peak < (resident + 1) * 100


def test_without_lookahead_each_fetch_is_waited_for():
    kept = simulate(net(), machine(), "keep_all").log.end
    assert simulate(net(), machine(), "weight_streaming", ahead=0).log.end == kept + 8 * 100
    slow = simulate(net(), machine(rate=10**7), "weight_streaming").log
    assert slow.end >= 7 * 100 * 100  # 100 bytes at a byte per 100 ns; the one that is still there is not fetched


def test_what_the_device_updates_goes_back_and_what_it_does_not_only_comes():
    plain, updated = (simulate(net(update=update), machine(), "weight_streaming") for update in (False, True))
    moved = [result.summary()["moved_bytes"] for result in (plain, updated)]
    assert moved[0]["d2h"] == 0
    assert moved[1]["d2h"] == 4 * 100
    for result in (plain, updated):  # everything is where it began, so the next iteration is like this one
        again = simulate(result.log.trace, machine(), "weight_streaming", iterations=2).log
        assert again.end == result.log.end


def test_a_weight_that_two_neighbouring_runs_read_stays_between_them():
    b = TraceBuilder()
    x, w = b.tensor("x", 1, "input"), b.tensor("w", 100, "weight")
    y, z = b.tensor("y", 1), b.tensor("z", 1)
    b.op("f0", "matmul", reads=[x, w], writes=[y], layer=0, duration=1000)
    b.op("f1", "matmul", reads=[y, w], writes=[z], layer=1, duration=1000)
    log = simulate(b.build(outputs=[z, w]), machine(), "weight_streaming").log
    assert len(fetches(log)) == 1


def test_with_zero_offload_weights_stay_on_the_host():
    trace = transformer(SMALL, batch=2, sequence=64, precision="mixed_bf16")
    alone, both = (
        simulate(trace, machine(), name).summary()
        for name in ("zero_offload", "zero_offload(weights=host) + weight_streaming")
    )
    assert both["peak_bytes"] < alone["peak_bytes"]
    assert both["moved_bytes"]["d2h"] == alone["moved_bytes"]["d2h"]  # gradients alone go down
    assert both["counters"]["implicit_moves"] == 0
    with pytest.raises(PolicyError, match="two owners"):
        simulate(trace, machine(), "zero_offload + weight_streaming")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_recomputation_finds_the_weights_that_it_reads(order):
    # a bias is read by no backward op, but by recomputation
    trace = transformer(SMALL, batch=2, sequence=64, precision="mixed_bf16")
    parts = ("zero_offload(weights=host)", "full_recompute", "weight_streaming")
    result = simulate(trace, machine(), " + ".join(parts[i] for i in order))
    assert result.summary()["counters"]["implicit_moves"] == 0
    assert (result.log.interval("why") == WHY["recompute"]).any()


def test_a_delayed_update_refuses_weights_on_the_host():
    with pytest.raises(PolicyError, match="delayed update needs its weights on the device"):
        simulate(net(update=True), machine(), "zero_offload", delayed=True, weights="host")


def test_a_machine_without_host_is_refused():
    with pytest.raises(PolicyError, match="no host tier"):
        simulate(net(), machine(host=False), "weight_streaming")


@pytest.mark.parametrize(
    ("precision", "width", "cast"), [("amp_bf16", 4, True), ("mixed_bf16", 2, False), ("fp32", 4, False)]
)
def test_joined_they_are_fsdp_s_offload_of_parameters(precision, width, cast) -> None:
    """FSDP2 keeps originals, gradients and states on the host: 16 bytes per parameter; each gradient comes down once.

    Forward fetches every weight. Backward fetches those that it reads, in each layer four matrices of 12 h^2 elements
    in all and the scales of two norms, but for autocast, which keeps its casts of the matrices. At most two layers'
    weights are on the device at once.
    """
    trace = transformer({**SMALL, "tie_word_embeddings": False}, batch=2, sequence=64, precision=precision)
    parameters, layers, h = trace.meta["parameters"], SMALL["n_layer"], SMALL["n_embd"]
    result = simulate(trace, machine(), "zero_offload(weights=host) + weight_streaming")
    summary, log = result.summary(), result.log
    matrices, scales = layers * 12 * h * h, layers * 2 * h
    assert summary["moved_bytes"]["d2h"] == width * parameters
    assert summary["moved_bytes"]["h2d"] == width * (parameters + scales + (0 if cast else matrices))
    assert summary["peak_by_tier"]["host"] == 16 * parameters
    weights = [t.id for t in log.trace.tensors if t.role == "weight"]
    rows = log.changes[(log.changes[:, 1] == 0) & np.isin(log.changes[:, 3], weights)]
    assert int(rows[:, 2].cumsum().max()) == width * 2 * (12 * h * h + 13 * h)
    placed = result.memory.query("tier == 'hbm' and cause == 'placed'").tensor
    assert {log.trace.tensors[log.trace.tensor_id(name)].role for name in placed} == {"input"}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("precision", "up", "host"), [("amp_bf16", 4, 16), ("mixed_bf16", 2, 16), ("fp32", 4, 16)])
def test_on_several_ranks_each_copies_its_part_up_before_it_is_gathered(ranks, precision, up, host):
    """FSDP2 on d ranks: 1/d of every byte per rank, no part on the device between its gathers."""
    config = {**SMALL, "tie_word_embeddings": False}
    trace = transformer(config, batch=2 * ranks, sequence=64, precision=precision)
    parameters = trace.meta["parameters"]
    layout = {"dp": ranks, "zero": 3}
    result = simulate(trace, "a100_80_sxm", "zero_offload(weights=host) + weight_streaming", parallel=layout)
    summary, log = result.summary(), result.log
    moved, slack = summary["moved_bytes"], 4 * 400  # step counters, and parts that are rounded down
    assert abs(moved["d2h"] - up * parameters / ranks) < slack
    assert up * parameters / ranks - slack <= moved["h2d"] <= 2 * up * parameters / ranks
    assert abs(summary["peak_by_tier"]["host"] - host * parameters / ranks) < slack
    assert summary["counters"]["implicit_moves"] == summary["counters"]["returned_moves"] == 0
    placed = result.memory.query("tier == 'hbm' and cause == 'placed'").tensor
    assert {log.trace.tensors[log.trace.tensor_id(name)].role for name in placed} == {"input"}
    # each gather begins behind the copies of the parts that it reads
    rows = log.events
    arrived = rows[(rows.why == "move") & (rows.lane == "h2d")]
    for op in (op for op in log.trace.ops if op.name.endswith("all_gather")):
        start = rows[(rows.op == op.name) & rows.lane.str.startswith("data")].start_ns.min()
        for part in op.reads:
            ends = arrived[arrived.tensor == log.trace.tensors[part].name].end_ns
            assert (ends <= start).any(), (op.name, part)


def test_where_the_hosts_processor_reads_a_weight_unlimited_memory_may_leave_it_there():
    b = TraceBuilder()
    x, w, y, g = b.tensor("x", 16, "input"), b.tensor("w", 9, "weight"), b.tensor("y", 16), b.tensor("g", 9, "gradient")
    new = b.tensor("w.new", 9, "weight", replaces=w)
    b.op("forward", "matmul", reads=[x, w], writes=[y], bytes=200)
    b.op("backward", "matmul", reads=[y], writes=[g], bytes=400, phase="backward")
    b.op("step", "optimizer", reads=[w, g], writes=[new], bytes=200, phase="update", engine="cpu")
    trace = b.build(outputs=(new,))
    result = simulate(trace, "v100_32", "weight_streaming")
    assert result.log.end < simulate(trace, "v100_32", "keep_all").log.end
    assert result.summary()["overhead"] >= 0
