"""ZeRO-Infinity: where every byte of the model resides, what crosses which link, and when; published efficiencies."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from sim.errors import Infeasible, PolicyError
from sim.experiment import simulate
from sim.hardware.platform import Link, Platform, Tier
from sim.hardware.profile import load_profile
from sim.plan import Move
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, machine
from tests.policies.offload.test_zero_offload import layers
from workloads.transformer import transformer

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 64, "vocab_size": 128}


def with_drive(*, read: int = GB, write: int = GB, direct: int = 0, host: int = ROOMY, **options: int) -> Platform:
    """The toy machine with a drive behind its host. direct: bytes/s of links between device and drive, 0 for none."""
    base = machine(**options)
    links = [Link("write", "host", "nvme", write), Link("read", "nvme", "host", read)]
    if direct:
        links += [Link("gds_write", "hbm", "nvme", direct), Link("gds_read", "nvme", "hbm", direct)]
    tiers = (*(replace(t, capacity=host) if t.name == "host" else t for t in base.tiers),
             Tier("nvme", ROOMY, ROOMY, read, kind="nvme"))  # fmt: skip
    return replace(base, tiers=tiers, links=(*base.links, *links))


def copies(result, *names: str) -> list[tuple[str, str, int, int]]:
    """(link, tensor, start, end) of the copies, of those tensors."""
    rows = result.events.query("why == 'move'").sort_values(["start_ns", "lane"])
    found = zip(rows.lane, rows.tensor, rows.start_ns.tolist(), rows.end_ns.tolist(), strict=True)
    return [row for row in found if not names or row[1] in names]


def test_weights_and_states_are_streamed_as_drawn_by_hand() -> None:
    # 2 layers: f0 0-20 .. ; weights of 10 bytes, states of 40, all links 1 B/ns; an update of 100 B takes 10 ns
    on = with_drive(cpu_rate=10 * GB)
    done = simulate(layers(2, 10, 20, 40), on, "zero_infinity", ahead=0)
    assert copies(done, "w0", "w1") == [
        # forward: each waits for its weight. The loss is a run of no layer, so that w1 comes again for backward
        ("h2d", "w0", 0, 10), ("read", "w0", 0, 10),
        ("h2d", "w1", 30, 40), ("read", "w1", 30, 40),
        ("h2d", "w1", 60, 70), ("read", "w1", 60, 70),
        ("h2d", "w0", 110, 120), ("read", "w0", 110, 120),
    ]  # fmt: skip
    assert copies(done, "g1", "g0") == [
        ("d2h", "g1", 110, 120), ("write", "g1", 110, 120), ("d2h", "g0", 160, 170), ("write", "g0", 160, 170),
        ("read", "g0", 170, 180), ("read", "g1", 220, 230),
    ]  # fmt: skip
    # tile 0 is read from 170 to 220; its update and writes run beside the reads of tile 1, which end at 270
    ran = {row.op: (row.start_ns, row.end_ns) for row in done.events.query("lane == 'cpu'").itertuples()}
    assert ran == {"adam0": (220, 230), "adam1": (270, 280)}
    assert copies(done, "w0.new", "w1.new") == [("write", "w0.new", 270, 280), ("write", "w1.new", 320, 330)]
    assert done.log.end == 330
    assert done.log.counters["implicit_moves"] == done.log.counters["returned_moves"] == 0


@pytest.mark.parametrize(("intensity", "rate", "quoted"), [(1024, 70, 0.506), (256, 1500, 0.846)])
def test_without_overlap_efficiency_is_that_of_the_papers_formula(intensity, rate, quoted) -> None:
    """One linear layer of P parameters: 6 P b FLOPs for 6 P bytes on the link, so b FLOPs per byte; 70 TFLOP/s."""
    parameters = 105 * 10**6
    trace = one_linear(parameters, intensity, peak=70)
    on = with_drive(rate=rate * GB, cpu_rate=1 << 60)
    done = simulate(trace, on, "zero_infinity", states="host", weights="host", ahead=0)
    compute = sum(op.duration for op in trace.ops[:3])
    assert compute / done.log.end == pytest.approx(intensity * rate / (intensity * rate + 70_000), rel=1e-4)
    assert compute / done.log.end == pytest.approx(quoted, abs=5e-4)


def one_linear(parameters: int, batch: int, peak: int) -> Trace:
    """Forward, loss and backward of one layer with 16-bit weights; the update takes no time. peak: TFLOP/s."""
    b = TraceBuilder()
    x, y, d = b.tensor("x", 1, "input"), b.tensor("y", 1), b.tensor("d", 1, "temporary")
    w, g = b.tensor("w", 2 * parameters, "weight", layer=0), b.tensor("g", 2 * parameters, "gradient", layer=0)
    forward = 2 * parameters * batch // (peak * 1000)
    b.op("f", "matmul", reads=[x, w], writes=[y], layer=0, duration=forward)
    b.op("loss", "loss", reads=[y], writes=[d], phase="backward", duration=0)
    b.op("b", "matmul", reads=[d, x, w], writes=[g], layer=0, phase="backward", duration=2 * forward)
    new = b.tensor("w.new", 2 * parameters, "weight", layer=0, replaces=w)
    b.op("u", "optimizer", reads=[w, g], writes=[new], layer=0, phase="update", bytes=0)
    return b.build(outputs=[new], carry=[(new, w)])


def test_between_steps_the_drive_holds_14_bytes_a_parameter_and_the_device_none() -> None:
    trace = transformer(TINY, batch=1, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    elements, inputs = trace.meta["parameters"], 2 * 32 * 8  # token ids and labels, int64
    done = simulate(trace, with_drive(cpu_rate=100 * GB), "zero_infinity", ahead=1)
    assert not departures(done.plan.trace, trace)
    changes = done.memory
    for tier, expected in (("hbm", inputs), ("host", 0), ("nvme", 14 * elements)):
        here = changes[changes.tier == tier]
        placed, steps = (int(rows.delta_bytes.sum()) for rows in (here[here.cause == "placed"], here))
        assert expected <= placed <= expected + 4 * 100  # step counters
        assert steps == placed, "it ends as it began"
    moved = done.summary()["moved_bytes"]
    assert moved["d2h"] == 2 * elements
    assert 2 * elements < moved["h2d"] <= 4 * elements
    assert 0 <= moved["write"] - 16 * elements <= 4 * 100  # gradients, then 12 of states and 2 of weights
    assert 0 <= moved["read"] - moved["h2d"] - 16 * elements <= 4 * 100
    assert done.log.counters["implicit_moves"] == done.log.counters["returned_moves"] == 0
    # on the host never more than four tiles: one updated, one read ahead, those that are written
    tiles = [op for op in done.plan.trace.ops if op.engine == "cpu"]
    size = done.plan.trace.tensor_columns.bytes
    largest = max(sum(int(size[t]) for t in op.reads) for op in tiles)
    assert done.summary()["peak_by_tier"]["host"] <= 4 * largest


@pytest.mark.parametrize(("states", "tier"), [("host", "host"), ("nvme", "nvme")])
def test_with_weights_on_the_device_14_bytes_a_parameter_are_below_it(states, tier) -> None:
    """12 of states, and the gradient or, in its place, the new weight, which goes up as soon as it is written."""
    trace = transformer(TINY, batch=1, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    elements = trace.meta["parameters"]
    done = simulate(trace, with_drive(cpu_rate=100 * GB), "zero_infinity", weights="device", states=states)
    assert not departures(done.plan.trace, trace)
    here = done.memory[done.memory.tier == tier]
    steps = here[here.tensor.str.contains(r"\.step")].groupby("time_ns").delta_bytes.sum().cumsum().max()
    held = here[~here.tensor.str.contains(r"\.step")].groupby("time_ns").delta_bytes.sum().cumsum()
    assert steps <= 4 * 100
    assert (held.max(), held.iloc[-1]) == (14 * elements, 12 * elements)
    moved = done.summary()["moved_bytes"]
    assert moved["d2h"] == moved["h2d"] == 2 * elements


@pytest.mark.parametrize(("ahead", "runs"), [(0, 1), (1, 2), (3, 4)])
def test_the_device_holds_the_weights_of_a_window(ahead, runs) -> None:
    done = simulate(layers(10, 1000, 2000, 4000), with_drive(), "zero_infinity", ahead=ahead)
    peak = done.summary()["peak_bytes"]
    assert runs * 1000 <= peak <= (runs + 2) * 1000 + 100  # and two gradients: one produced, one leaving


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_a_weight_is_fetched_as_its_run_begins_or_that_many_runs_earlier(ahead) -> None:
    plan = simulate(layers(8, 1000, 2000, 4000), with_drive(), "zero_infinity", ahead=ahead).plan
    names, ops, first = plan.trace.tensor_columns.name, plan.trace.op_columns.name, {}
    for action in plan.actions:
        if isinstance(action, Move) and action.to == "hbm":
            first.setdefault(names[action.tensor], ops[action.before])
    assert first == {f"w{k}": f"f{max(k - ahead, 0)}" for k in range(8)}


def test_a_weight_leaves_the_drive_to_its_new_value() -> None:
    done = simulate(layers(6, 1000, 2000, 4000), with_drive(), "zero_infinity")
    left = done.memory.query("tier == 'nvme'").groupby("tensor").delta_bytes.sum()
    assert {name: size for name, size in left.items() if size and name.startswith("w")} == {
        f"w{k}.new": 1000 for k in range(6)
    }
    assert left.sum() == 6 * 5000, "weights and states"


def test_gradients_of_a_bucket_leave_when_it_is_full() -> None:
    trace = layers(5, 10, 20, 40)
    done = simulate(trace, with_drive(), "zero_infinity", bucket=20)
    ends = {row.op: row.end_ns for row in done.events.query("why == 'run'").itertuples()}
    begun = {tensor: start for lane, tensor, start, _ in copies(done) if lane == "d2h"}
    # two at a time, one after the other on the link; the last one alone
    at = {4: "f3.bwd", 3: "f3.bwd", 2: "f1.bwd", 1: "f1.bwd", 0: "f0.bwd"}
    assert begun == {f"g{k}": ends[op] + 10 * (k in (3, 1)) for k, op in at.items()}


def test_a_state_that_nothing_changes_is_read_and_not_written_back() -> None:
    b = TraceBuilder()
    x, w, g = b.tensor("x", 1, "input"), b.tensor("w", 10, "weight"), b.tensor("g", 10, "gradient")
    scale, unread = b.tensor("scale", 40, "optimizer_state"), b.tensor("unread", 70, "optimizer_state")
    b.op("b", "matmul", reads=[x, w], writes=[g], layer=0, phase="backward", duration=10)
    new = b.tensor("w.new", 10, "weight", replaces=w)
    b.op("u", "optimizer", reads=[w, g, scale], writes=[new], layer=0, phase="update", bytes=0)
    done = simulate(b.build(), with_drive(), "zero_infinity")
    assert [row[0] for row in copies(done, "scale")] == ["read"]
    here = done.memory.query("tensor == 'scale'").groupby("tier").delta_bytes.sum().to_dict()
    assert here == {"nvme": 40, "host": 0}
    assert done.plan.place[unread] == "nvme"
    with pytest.raises(TypeError):  # other runs may have the same plan
        done.plan.place[unread] = "hbm"
    for change in (
        lambda notes: notes.update(steps=0),
        lambda notes: notes.pop("steps", 0),
        lambda notes: notes.clear(),
    ):
        with pytest.raises(TypeError, match="can't be changed: make another one"):
            change(done.plan.notes)  # nor for a policy that looks back at earlier runs
    again = replace(done.plan, notes={"parts": (done.plan.notes,)})
    assert pickle.loads(pickle.dumps(again)) == again


def test_a_tile_is_read_when_the_buffers_of_the_one_before_the_last_are_written() -> None:
    trace = layers(4, 100, 200, 400)
    slow = with_drive(write=GB // 10, cpu_rate=100 * GB)
    for tiles in (0, 1):
        done = simulate(trace, slow, "zero_infinity", tiles=tiles)
        written = {k: max(end for lane, _, _, end in copies(done, f"master{k}.new", f"m{k}.new") if lane == "write")
                   for k in range(4)}  # fmt: skip
        read = {k: min(start for lane, _, start, _ in copies(done, f"master{k}", f"m{k}") if lane == "read")
                for k in range(4)}  # fmt: skip
        later = tiles + 2  # the update that waits for the first tile's buffers; reads run so many tiles ahead of it
        (update,) = done.events.query(f"op == 'adam{later}' and why == 'run'").start_ns
        assert written[0] <= update < written[1]
        assert tiles or written[0] <= read[later] < written[1]


def test_a_drive_of_16_bytes_a_parameter_takes_no_longer_than_a_large_one_and_a_smaller_one_is_refused() -> None:
    """The new states of a tile take their space in the instant in which the old ones give theirs up."""
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    steps = 4 * sum(t.role == "weight" and t.replaces is None for t in trace.tensors)  # their counters
    held = 16 * trace.meta["parameters"] + steps
    ends, peaks = [], []
    for more in (held, 0):
        drive = load_profile("mt3000_survey_ssd", overrides={"tiers.ssd.capacity": f"{held + more} B"})
        done = simulate(trace, drive, "zero_infinity")
        ends.append(done.log.end)
        peaks.append(done.summary()["peak_by_tier"]["ssd"])
    assert ends[0] == ends[1]
    assert peaks[1] == held < peaks[0] < 1.2 * held
    small = load_profile("mt3000_survey_ssd", overrides={"tiers.ssd.capacity": f"{held - 65_536} B"})
    with pytest.raises(Infeasible):
        simulate(trace, small, "zero_infinity")


def test_on_the_host_nothing_touches_the_drive_and_weights_may_stay_on_the_device() -> None:
    trace = layers(3, 10, 20, 40)
    host = simulate(trace, with_drive(), "zero_infinity", states="host", weights="host").summary()
    assert host["moved_bytes"]["read"] == host["moved_bytes"]["write"] == 0
    assert host["peak_by_tier"]["nvme"] == 0
    auto = simulate(trace, machine(), "zero_infinity").summary()
    assert (auto["makespan_ns"], auto["moved_bytes"]["h2d"]) == (host["makespan_ns"], host["moved_bytes"]["h2d"])
    kept = simulate(trace, machine(), "zero_infinity", weights="device").log
    assert kept.end == simulate(trace, machine(), "zero_offload").log.end


def test_a_direct_link_spares_the_devices_link_and_the_host() -> None:
    trace = layers(4, 10, 20, 40)
    done = simulate(trace, with_drive(direct=GB), "zero_infinity").summary()["moved_bytes"]
    assert done["gds_write"] == 40
    assert done["gds_read"] >= 40
    assert done["h2d"] == done["d2h"] == 0


def test_a_seven_billion_model_trains_on_mt3000_with_a_drive_where_the_device_alone_cannot_hold_a_layer_s_state() -> (
    None
):
    # two of its 32 layers, on 2/32 of the memories
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2,
              "num_attention_heads": 32, "vocab_size": 2000, "max_position_embeddings": 4096}  # fmt: skip
    trace = transformer(config, batch=1, sequence=512, precision="mixed_bf16")
    platform = load_profile("mt3000_survey_ssd", overrides={"tiers.ddr.capacity": "6 GB"})
    done = simulate(trace, platform, "zero_infinity + full_recompute", budget="2 GB").summary()
    assert done["fits"]
    assert done["peak_by_tier"]["ssd"] > 14 * trace.meta["parameters"]
    with pytest.raises(Infeasible):
        simulate(trace, platform, "keep_all", budget="2 GB")


def test_what_is_wrong_is_named() -> None:
    trace = layers(2, 10, 20, 40)
    for wrong in ({"states": "nvme"}, {"weights": "nvme"}):
        with pytest.raises(PolicyError, match="toy has no tier behind 'host' for nvme"):
            simulate(trace, machine(), "zero_infinity", **wrong)
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(trace, machine(host=False), "zero_infinity")
    with pytest.raises(PolicyError, match="toy has no engine 'cpu'"):
        simulate(trace, replace(machine(), engines=machine().engines[:1]), "zero_infinity")
    with pytest.raises(Infeasible, match=r"the update 'adam0' needs 60 B of pinned memory at once; 'host' has 55 B"):
        simulate(trace, with_drive(host=55), "zero_infinity")
    assert simulate(trace, with_drive(host=60 * 2), "zero_infinity").log.complete
    with pytest.raises(Infeasible, match="needs 80 B of pinned memory at once; 'host' has 75 B"):  # both weights too
        simulate(trace, with_drive(host=75), "zero_infinity", states="nvme", weights="host")


def test_a_drive_that_writes_slowly_holds_the_reads_back_and_reading_ahead_hides_them() -> None:
    trace = layers(12, 100, 200, 400)
    # a tile is 600 B of gradient, states and new weight; its writes take ten times as long as its reads
    slow, ends = with_drive(write=GB // 10, cpu_rate=100 * GB), []
    for tiles in (0, 1, 2):
        done = simulate(trace, slow, "zero_infinity", tiles=tiles).summary()
        assert done["peak_by_tier"]["host"] <= (tiles + 4) * 600, "one is updated, two are written, one arrives"
        even = with_drive(cpu_rate=2 * GB)
        ends.append(simulate(trace, even, "zero_infinity", tiles=tiles).log.end)
    assert ends[0] > ends[1] >= ends[2]


@pytest.mark.parametrize("ranks", [2, 8])
def test_with_partitions_all_links_work_and_a_weight_arrives_in_a_part_of_the_time(ranks) -> None:
    """Section 6.1: a weight of M bytes takes M / (d x link) and the gather, where one owner's link takes M / link."""
    trace = transformer({**TINY, "n_embd": 1024}, batch=ranks, sequence=32, precision="mixed_fp16")
    one, each = (
        simulate(trace, "v100_32", "zero_infinity(states=host, weights=host)", parallel=layout)
        for layout in (None, {"dp": ranks, "zero": 3})
    )
    name, card = "h1.mlp.fc.weight", load_profile("v100_32")
    size = 2 * 4 * 1024**2
    for run, tensor, part in ((one, name, 1), (each, f"{name}.shard", ranks)):
        _, _, start, end = copies(run, tensor)[0]  # in forward, when nothing goes down
        assert end - start == card.move_ns(size // part, "host", "hbm")
    up = [run.summary()["moved_bytes"]["h2d"] for run in (one, each)]
    assert up[1] == pytest.approx(up[0] / ranks, rel=0.2)
