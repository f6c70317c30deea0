"""ZeRO-Offload: 2M bytes down, 2M up, the update on the CPU, and weights that are right, or one step late."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.offload_page.published import LARGEST, TFLOPS, largest, ten_billion, tflops
from sim.errors import OutOfMemory, PolicyError
from sim.experiment import simulate
from sim.hardware.profile import load_profile
from sim.policies import load
from sim.rewrites.rewrite import reorder
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, facts, machine
from tests.strategies import budgets, platforms, traces
from workloads.transformer import transformer

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 512}


def layers(count: int, weight: int, forward: int, backward: int, *, carried: bool = True) -> Trace:
    """Layers with a 16-bit weight of `weight` bytes, an fp32 master and state of twice that; one update each.

    An update reads gradient, master and state and writes master, state and weight: 10 `weight` bytes, whatever
    is stated of the accelerator's kernel.
    """
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    weights, activations = [], [x]
    for i in range(count):
        weights.append(b.tensor(f"w{i}", weight, "weight", layer=i, dtype="fp16"))
        activations.append(b.tensor(f"y{i}", 1, layer=i))
        b.op(f"f{i}", "matmul", reads=[activations[i], weights[i]], writes=[activations[-1]], layer=i, duration=forward)
    above = b.tensor("d", 1, "temporary")
    b.op("loss", "loss", reads=[activations[-1]], writes=[above], phase="backward", duration=0)
    gradients = []
    for i in reversed(range(count)):
        below, gradient = b.tensor(f"d{i}", 1, "temporary"), b.tensor(f"g{i}", weight, "gradient", layer=i)
        b.op(
            f"f{i}.bwd",
            "matmul",
            reads=[above, activations[i], weights[i]],
            writes=[below, gradient],
            phase="backward",
            layer=i,
            duration=backward,
        )
        above = below
        gradients.append(gradient)
    for i, gradient in enumerate(reversed(gradients)):
        states = [b.tensor(f"{what}{i}", 2 * weight, "optimizer_state", dtype="fp32") for what in ("master", "m")]
        fresh = [b.tensor(f"{what}{i}.new", 2 * weight, "optimizer_state", replaces=old)
                 for what, old in zip(("master", "m"), states)]  # fmt: skip
        fresh.append(b.tensor(f"w{i}.new", weight, "weight", replaces=weights[i]))
        # a duration measured on the accelerator, which says nothing about the CPU
        b.op(f"adam{i}", "optimizer", reads=[gradient, *states], writes=fresh, phase="update", bytes=99 * weight,
             duration=1)  # fmt: skip
    return b.build() if carried else b.build(carry=())


def test_every_copy_and_update_runs_when_the_hand_drawn_timeline_says(run) -> None:
    # 3 layers, weights of 10 bytes, links of 1 B/ns, the CPU at 4 B/ns: an update takes 25 ns, a copy 10
    done = run(layers(3, 10, 20, 40), "zero_offload", on=machine(cpu_rate=4 * GB))
    assert done.moves == [
        ("d2h", "g2", 100, 110),
        ("d2h", "g1", 140, 150),
        ("d2h", "g0", 180, 190),
        ("h2d", "w0.new", 215, 225),
        ("h2d", "w1.new", 240, 250),
        ("h2d", "w2.new", 265, 275),
    ]
    assert done.ran("f0", "f2.bwd", "adam0", "adam1", "adam2") == [
        (0, 20),
        (60, 100),
        (190, 215),
        (215, 240),
        (240, 265),
    ]
    assert done.time == 275
    assert done.result.log.counters["implicit_moves"] == 0
    assert done.result.log.counters["returned_moves"] == 0


def test_the_first_update_waits_for_all_gradients_and_not_for_its_own_alone(run) -> None:
    trace = layers(3, 10, 20, 40)
    *others, first, second, third = range(len(trace.ops))
    done = run(reorder(trace, [*others, third, second, first]), "zero_offload", on=machine(cpu_rate=4 * GB))
    assert [move for move in done.moves if move[1] == "g2"] == [("d2h", "g2", 100, 110)]
    assert done.ran("adam2", "adam1", "adam0") == [(190, 215), (215, 240), (240, 265)]


@pytest.mark.parametrize("cpu_rate", [1, 3, 12, 100])
@pytest.mark.parametrize("link", [1, 2, 10])
@pytest.mark.parametrize("backward", [5, 40])
def test_time_is_forward_backward_tail_and_the_longer_of_updates_and_copies_up(cpu_rate, link, backward, run) -> None:
    count, weight = 5, 60
    on = machine(rate=link * GB, cpu_rate=cpu_rate * GB)
    done = run(layers(count, weight, 20, backward), "zero_offload", on=on)
    copy, adam = -(-weight // link), -(-10 * weight // cpu_rate)
    compute = count * (20 + backward)
    # gradients queue behind each other on the link; the last one's end is the tail
    down = 0
    for i in range(count):
        down = max(down, count * 20 + (i + 1) * backward) + copy
    tail = down - compute
    assert done.time == compute + tail + max(count * adam + copy, adam + count * copy)


@pytest.mark.parametrize("cpu_rate", [1, 3, 12, 100])
@pytest.mark.parametrize("backward", [5, 40, 400])
def test_a_delayed_update_runs_beside_forward_and_backward(cpu_rate, backward, run) -> None:
    count, weight = 5, 60
    on = machine(cpu_rate=cpu_rate * GB)
    trace = layers(count, weight, 20, backward)
    done = run(trace, "zero_offload", on=on, delayed=True)
    copy, adam = weight, -(-10 * weight // cpu_rate)
    down = 0
    for i in range(count):
        down = max(down, count * 20 + (i + 1) * backward) + copy
    # nothing waits: the last gradient is down, and the last weight is up, beside the device's work
    assert done.time == max(down, max(count * adam + copy, adam + count * copy))
    assert done.ran(f"f{count - 1}", "f0.bwd")[1][1] == count * (20 + backward)
    assert done.time <= run(trace, "zero_offload", on=on).time


def test_a_step_of_a_transformer_copies_2m_bytes_down_and_2m_up(run) -> None:
    for optimizer in ("adamw_fused", "adamw_foreach", "adamw_loop", "sgd_momentum"):
        trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer=optimizer)
        elements = trace.meta["parameters"]
        done = run(trace, "zero_offload")
        assert sum(done.out.values()) == sum(done.back.values()) == 2 * elements
        assert done.result.log.counters["implicit_moves"] == 0
        assert not departures(done.result.plan.trace, trace)
    delayed = run(transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused"),
                  "zero_offload", delayed=True)  # fmt: skip
    assert sum(delayed.out.values()) == sum(delayed.back.values()) == 2 * elements


ADAMS = ("adamw_foreach", "adamw_loop", "adamw_fused")


@pytest.mark.parametrize(("precision", "each"), [("fp32", 28), ("mixed_fp16", 28), ("amp_bf16", 28), ("bf16", 14)])
@pytest.mark.parametrize("delayed", [False, True])
def test_the_cpu_s_adam_takes_28_bytes_a_parameter_whatever_the_optimizer_was_decomposed_into(
    precision, each, delayed, run
) -> None:
    # 4 B/ns and no arithmetic: the time is the bytes, rounded up once a tile
    config = {**TINY, "tie_word_embeddings": True}
    times = set()
    for optimizer in ADAMS:
        trace = transformer(config, batch=1, sequence=32, precision=precision, optimizer=optimizer)
        done = run(trace, "zero_offload", on=machine(cpu_rate=4 * GB), delayed=delayed)
        rows = done.result.events.query("lane == 'cpu'")
        assert len(rows) == TINY["n_layer"] + 1  # a tile a layer, and one for what is in none
        spent = int((rows.end_ns - rows.start_ns).sum())
        assert 0 <= spent - each * trace.meta["parameters"] / 4 <= len(rows)
        times.add((spent, done.time, tuple(sorted(done.out.values())), tuple(sorted(done.back.values()))))
    assert len(times) == 1


def test_a_momentum_of_sgd_takes_20_bytes_a_parameter(run) -> None:
    for precision in ("fp32", "mixed_fp16"):
        trace = transformer(TINY, batch=1, sequence=32, precision=precision, optimizer="sgd_momentum")
        update = [op for op in run(trace, "zero_offload").result.plan.trace.ops if op.engine == "cpu"]
        assert sum(op.bytes for op in update) == 20 * trace.meta["parameters"]


def test_arithmetic_and_launches_come_on_top_as_the_platform_says() -> None:
    platform = load_profile("a100_40_pcie")
    for optimizer in ADAMS:
        trace = transformer(TINY, batch=1, sequence=32, precision="mixed_fp16", optimizer=optimizer)
        rows = simulate(trace, platform, "zero_offload").events.query("lane == 'cpu'")
        count, tiles = trace.meta["parameters"], TINY["n_layer"] + 1
        # 10 us per launch, 14 FLOPs per parameter at 2.5 TFLOP/s, 28 bytes at 0.35 of 120 GB/s
        expected = tiles * 10_000 + count * (14 / 2500 + 28 / 42)
        assert abs((rows.end_ns - rows.start_ns).sum() - expected) <= 2 * tiles


def test_a_captured_step_costs_the_same_in_every_form_of_its_optimizer(run) -> None:
    torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")
    from workloads.capture import capture

    times = set()
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        adam = torch.optim.AdamW(net.parameters(), **options)
        trace = capture(net, (torch.zeros(8, 16),), loss=lambda y: y.sum(), optimizer=adam)
        done = run(trace, "zero_offload", on=machine(cpu_rate=GB))
        assert not departures(done.result.plan.trace, trace)
        rows = done.result.events.query("lane == 'cpu'")
        times.add(int((rows.end_ns - rows.start_ns).sum()))
    assert times == {28 * (16 * 32 + 32 + 32 * 4 + 4)}


def test_the_device_holds_16_bit_weights_and_no_more_of_the_model(run) -> None:
    trace = transformer(TINY, batch=1, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    elements, inputs = trace.meta["parameters"], 2 * 32 * 8  # token ids and labels, int64
    done = run(trace, "zero_offload")
    changes = done.result.memory.query("tier == 'hbm'")
    start = changes[(changes.time_ns == 0) & (changes.cause == "placed")]
    assert start.delta_bytes.sum() == 2 * elements + inputs
    assert changes.used_bytes.iloc[-1] == 2 * elements + inputs
    assert run(trace, "keep_all").peak - done.peak >= 12 * elements


@pytest.mark.parametrize(
    ("precision", "optimizer", "delayed", "each"),
    [
        ("mixed_fp16", "adamw_fused", False, 14),  # 12 of states, 2 of gradients or of the new weights in their place
        ("mixed_fp16", "adamw_foreach", False, 14),
        ("mixed_fp16", "lion", False, 10),
        ("mixed_fp16", "adamw_fused", True, 16),  # the gradients of this step beside those of the last one
        ("megatron_bf16", "adamw_fused", False, 18),  # 4 of gradients, and 2 of new weights beside them
        ("fp32", "adamw_fused", False, 20),  # without masters: the weights that are updated, and copies of the new ones
    ],
)
def test_the_host_holds_the_published_bytes_of_each_parameter(run, precision, optimizer, delayed, each) -> None:
    trace = transformer(TINY, batch=1, sequence=32, precision=precision, optimizer=optimizer)
    counters = sum(t.bytes for t in trace.tensors if t.shape == () and trace.producer[t.id] < 0)
    done = run(trace, "zero_offload", delayed=delayed)
    assert done.host_peak == each * trace.meta["parameters"] + counters
    assert sum(done.out.values()) == (4 if precision in ("fp32", "megatron_bf16") else 2) * trace.meta["parameters"]


def test_a_bucket_leaves_when_it_is_full_and_the_last_one_at_the_end(run) -> None:
    on = machine(cpu_rate=4 * GB)
    done = run(layers(3, 10, 20, 40), "zero_offload", on=on, bucket="20 B")
    assert done.moves[:3] == [("d2h", "g2", 140, 150), ("d2h", "g1", 150, 160), ("d2h", "g0", 180, 190)]
    whole = run(layers(3, 10, 20, 40), "zero_offload", on=on, bucket=1000)
    assert [move[2:] for move in whole.moves[:3]] == [(180, 190), (190, 200), (200, 210)]
    assert whole.time == done.time + 20


def test_final_weights_are_those_of_the_plain_run(run) -> None:
    trace = layers(3, 10, 20, 40)
    assert not departures(run(trace, "zero_offload").result.plan.trace, trace)
    assert load("zero_offload").lossless
    assert not load("zero_offload", delayed=True).lossless


def test_a_delayed_update_departs_in_its_updates_alone(run) -> None:
    trace = layers(3, 10, 20, 40)
    found = departures(run(trace, "zero_offload", delayed=True).result.plan.trace, trace)
    assert sorted(d.op for d in found if d.op) == ["adam0", "adam1", "adam2"]
    assert {d.what for d in found if d.op} == {"stale"}


def test_delayed_weights_are_those_of_gradients_one_step_late(run) -> None:
    trace = layers(3, 10, 20, 40)
    rewritten = run(trace, "zero_offload", delayed=True).result.plan.trace
    names = list(rewritten.tensor_columns.name)
    state = {t: f"start of {names[t].removesuffix('.cpu')}" for t in range(len(names)) if rewritten.producer[t] < 0}
    # by hand: gradients of step k from the weights of step k, updates of step k with gradients of step k - 1
    weights: dict[str, str] = {f"w{i}": f"start of w{i}" for i in range(3)}
    states = {f"{what}{i}": f"start of {what}{i}" for what in ("master", "m") for i in range(3)}
    before = {f"g{i}": f"start of g{i}.before" for i in range(3)}
    for _ in range(4):
        values = _values(rewritten, state)
        state = {**state, **{first: values[last] for last, first in rewritten.carry}}
        known = _values(trace, {t: {**weights, **states, "x": "start of x"}.get(trace.tensors[t].name, "") for t in
                                range(len(trace.tensors)) if trace.producer[t] < 0})  # fmt: skip
        late = {trace.tensor_id(name): value for name, value in before.items()}
        updated = _values(trace, known, late)
        before = {name: known[trace.tensor_id(name)] for name in before}
        weights = {name: updated[trace.tensor_id(f"{name}.new")] for name in weights}
        states = {name: updated[trace.tensor_id(f"{name}.new")] for name in states}
        for name, value in weights.items():
            assert values[names.index(f"{name}.new")] == value


def _values(trace: Trace, start: Mapping[int, str], given: Mapping[int, str] | None = None) -> dict[int, str]:
    """What each tensor is: a hash of the name of its op and of what that read. given: what no op may change."""
    values = dict(start) | dict(given or {})
    for op in trace.ops:
        read = hashlib.sha256(" ".join([op.name, *(values[t] for t in op.reads)]).encode()).hexdigest()
        for t in op.writes:
            if t not in (given or {}):
                # the copy that goes up is the new weight
                values[t] = f"{trace.tensors[t].name.removesuffix('.up')}:{read}"
    return values


def test_weights_that_nothing_carries_go_up_all_the_same(run) -> None:
    done = run(layers(2, 10, 20, 40, carried=False), "zero_offload")
    assert done.back == {"w0.new": 10, "w1.new": 10}


def test_a_trace_without_update_is_left_alone(run) -> None:
    b = TraceBuilder()
    w, y = b.tensor("w", 10, "weight"), b.tensor("y", 10)
    b.op("f", "matmul", reads=[w], writes=[y], duration=10)
    trace = b.build()
    assert run(trace, "zero_offload").result.plan.trace is trace


def test_what_is_wrong_is_named() -> None:
    trace = layers(2, 10, 20, 40)
    with pytest.raises(PolicyError, match="bucket"):
        simulate(trace, machine(), "zero_offload", bucket="50 MBit")
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(trace, machine(host=False), "zero_offload")
    alone = replace(machine(), engines=machine().engines[:1])
    with pytest.raises(PolicyError, match="toy has no engine 'cpu'"):
        simulate(trace, alone, "zero_offload")
    b = TraceBuilder()
    g, scale, w = b.tensor("g", 4, "gradient"), b.tensor("scale", 4), b.tensor("w", 4, "weight")
    b.op("backward", "matmul", reads=[w], writes=[g], phase="backward")
    b.op("clip", "reduce", reads=[g], writes=[scale], phase="update")
    new = b.tensor("w.new", 4, "weight", replaces=w)
    b.op("step", "optimizer", reads=[g, scale, w], writes=[new], phase="update")
    with pytest.raises(PolicyError, match=r"delayed: update 'step' reads what 'clip' makes"):
        simulate(b.build(), machine(), "zero_offload", delayed=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_keeps_any_budget_and_what_it_sends_is_what_the_update_needs(data: st.DataObject) -> None:
    trace, platform = data.draw(traces(cpu=False, update=True)), data.draw(platforms(host=True))
    delayed, bucket = data.draw(st.booleans()), data.draw(st.sampled_from([0, 600, 1 << 20]))
    budget = data.draw(st.one_of(st.just(ROOMY), budgets(trace)))
    try:
        result = simulate(trace, platform, "zero_offload", budget=budget, delayed=delayed, bucket=bucket)
    except OutOfMemory:
        return
    done = facts(result)
    if not delayed:
        assert not departures(result.plan.trace, trace)
    size = trace.tensor_columns.bytes
    updates = [op for op in trace.ops if op.phase == "update"]
    down = {
        t
        for op in updates
        for t in op.reads
        if trace.ops[trace.producer[t]].phase == "backward" and trace.producer[t] >= 0
    }
    up = {t for op in updates for t in op.writes if trace.tensors[t].role == "weight"}
    assert sum(done.out.values()) == sum(int(size[t]) for t in down)
    assert sum(done.back.values()) == sum(int(size[t]) for t in up)
    assert result.log.counters["implicit_moves"] == 0


def test_about_thirteen_billion_parameters_fit_a_v100_bound_by_its_own_memory() -> None:
    """Published: 13 B (65 layers of 4096) on one V100 of 32 GB with 1.5 TB of host; with checkpoints, batch 4."""
    found = largest()
    assert abs(found["hbm_parameters"] / LARGEST - 1) < 0.15
    assert found["host_parameters"] > 4 * found["hbm_parameters"], "the device binds, not the host"
    # what a layer takes of the device: its weights in 16 bits, and one checkpoint
    assert found["hbm_layer_bytes"] == 2 * found["layer_parameters"] + 2 * 4 * 1024 * 4096


def test_ten_billion_parameters_reach_the_published_throughput_within_a_quarter() -> None:
    """Published: 40 TFLOP/s, whether with what is recomputed is not said; the step ends when its parts say."""
    row = ten_billion()
    assert row["parameters"] == pytest.approx(10e9, rel=0.03)
    for recomputed in (True, False):
        assert tflops(row, recomputed=recomputed) == pytest.approx(TFLOPS, rel=0.25)
    # by hand: 6 FLOPs per weight of a layer and token, 12 per query, key and channel; the logits; a quarter of forward
    # and backward comes again, but for the logits; CPU Adam reads and writes 28 bytes per parameter at 0.35 of 115 GB/s
    layer = 12 * 4096**2
    forward = 2 * 10_240 * (50 * layer + 2 * 50 * 1024 * 4096)
    logits = 2 * 10_240 * 4096 * 50257
    assert row["flops"] == pytest.approx(3 * (forward + logits), rel=2e-3)
    assert row["recomputed_flops"] == pytest.approx(forward, rel=2e-3)
    assert row["update_ns"] == pytest.approx(28 * row["parameters"] / (0.35 * 115), rel=0.01)
    # gradients leave beside backward, and weights come up beside the update: nothing else takes a hundredth
    assert row["own_ns"] + row["recompute_ns"] + row["update_ns"] == pytest.approx(row["time_ns"], rel=0.01)
