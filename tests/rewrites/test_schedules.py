"""Pipeline schedules against closed forms and printed numbers: time, idle time, microbatches in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.engine.replay import replay
from sim.errors import TraceError
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.layout import lay_out
from sim.log import EventLog
from sim.plan import Plan
from sim.rewrites.pipeline import pipeline
from sim.rewrites.schedules import FOLDED, SCHEDULES, device_of, parts_per_device, unit_orders
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from sim.trace.origin import Slots
from workloads import transformer
from workloads.optimizers import OPTIMIZERS

UNIT = 1_000_000
"""Nanoseconds of one unit of time."""
HELD = 1000
"""Bytes of what one forward of one microbatch saves."""


def model(parts: int, n: int, forward: int, inputs: int, weights: int = 0, unit: int = UNIT) -> Trace:
    """Parts of equal times per microbatch. weights: of the weight gradients, 0 for a backward in one piece."""
    b = TraceBuilder({"batch": n, "samples": n})
    x, saved, gradients = b.tensor("x", n, "input"), [], []
    w = [b.tensor(f"w{i}", 1, "weight", layer=i) for i in range(parts)] if weights else []
    for i in range(parts):
        y = b.tensor(f"y{i}", n, "temporary", layer=i)
        kept = b.tensor(f"saved{i}", HELD * n, layer=i)
        b.op(
            f"f{i}", reads=[x, *w[i : i + 1]], writes=[y, kept], layer=i, duration=unit * n * forward, splits=["batch"]
        )
        saved.append(kept)
        x = y
    g = b.tensor("g", n, "temporary")
    b.op("loss", reads=[x], writes=[g], duration=0, splits=["batch"])
    for i in reversed(range(parts)):
        new = b.tensor(f"g{i}", n, "temporary", layer=i)
        fields = {"phase": "backward", "layer": i}
        b.op(f"b{i}", reads=[g, saved[i]], writes=[new], duration=unit * n * inputs, splits=["batch"], **fields)
        if weights:
            t = b.tensor(f"w{i}.grad", 1, "gradient", layer=i)
            took = unit * n * weights
            b.op(f"b{i}.weight", reads=[g, saved[i]], writes=[t], duration=took, splits=["batch_sum"], **fields)
            gradients.append(t)
        g = new
    return b.build(outputs=gradients, carry=())


def line(devices: int, send: int = 0) -> Platform:
    """Devices whose additions take no time, and whose links take `send` ns for a message and none for its bytes."""
    which = range(devices)
    return Platform(
        "line",
        tuple(Tier(f"hbm@{i}", 1 << 40, 1 << 40, 10**15, device=i) for i in which),
        tuple(Engine(f"gpu@{i}", i, f"hbm@{i}", (f"hbm@{i}",), {"fp32": 10**15}) for i in which),
        tuple(Link(f"l{i}.{j}", f"hbm@{i}", f"hbm@{j}", 10**15, send) for i in which for j in which if i != j),
    )


def run(trace: Trace, send: int = 0) -> EventLog:
    return replay(Plan(trace), line(trace.devices, send))


def spans(log: EventLog, unit: int = UNIT) -> list[tuple[int, int]]:
    """Per device the time from its first to its last op, and its idle part, in units."""
    lane, start, end = (log.interval(name) for name in ("lane", "start", "end"))
    op = log.interval("op")
    found = []
    for device in range(log.trace.devices):
        real = (lane == device) & (op >= 0) & (end - start >= unit)
        busy, length = int((end - start)[real].sum()), int(end[real].max() - start[real].min())
        found.append((round(length / unit), round((length - busy) / unit)))
    return found


def in_flight(trace: Trace, log: EventLog) -> list[float]:
    """Per device the most that it saves at once, in forwards of one microbatch of one part."""
    tensor, delta, tier = (log.change(name) for name in ("tensor", "delta", "tier"))
    most = []
    for device in range(trace.devices):
        level = highest = 0
        for t, d, at in zip(tensor.tolist(), delta.tolist(), tier.tolist(), strict=True):
            if at == device and t >= 0 and trace.tensor_columns.name[t].startswith("saved"):
                level += d
                highest = max(highest, level)
        most.append(highest / HELD)
    return most


def scheduled(schedule: str, stages: int, n: int, times: tuple[int, ...], chunks: int = 1) -> tuple[Trace, EventLog]:
    base = model(stages * chunks, n, *times)
    trace = pipeline(base, list(range(stages * chunks)), n, schedule, chunks)
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    return trace, run(trace)


@pytest.mark.parametrize(
    ("schedule", "stages", "n", "time", "most"),
    [
        ("naive", 4, 2, 24, [1, 1, 1, 1]),
        ("gpipe", 4, 8, 33, [8, 8, 8, 8]),
        ("1f1b", 4, 8, 33, [4, 3, 2, 1]),
        ("1f1b", 4, 2, 15, [2, 2, 2, 1]),
        ("1f1b", 8, 32, 117, [8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_time_and_stash_of_a_schedule(schedule: str, stages: int, n: int, time: int, most: list[int]) -> None:
    trace, log = scheduled(schedule, stages, n, (1, 2))
    assert round(log.end / UNIT, 1) == time
    assert in_flight(trace, log) == most


@pytest.mark.parametrize(("chunks", "time", "most"), [(2, 57, [11, 9, 7, 5]), (4, 105, [19, 17, 15, 13])])
def test_interleaving_divides_the_idle_time_by_the_parts_of_a_device(chunks: int, time: int, most: list[int]) -> None:
    trace, log = scheduled("interleaved", 4, 8, (1, 2), chunks)
    assert round(log.end / UNIT, 1) == time
    assert round(log.end / UNIT - 8 * 3 * chunks, 1) == 9  # (S - 1) (F + B), of parts
    assert in_flight(trace, log) == most


@pytest.mark.parametrize(
    ("stages", "n", "times", "idle"),
    [(4, 8, (1, 1, 1), 3), (8, 24, (1, 1, 1), 7), (4, 8, (4, 5, 3), 18), (8, 24, (4, 5, 3), 42)],
)
def test_a_divided_backward_leaves_a_third_of_the_idle_time(
    stages: int, n: int, times: tuple[int, int, int], idle: int
) -> None:
    trace, log = scheduled("zb_h1", stages, n, times)
    assert max(length for length, _ in spans(log)) == n * sum(times) + idle
    assert idle == (stages - 1) * (times[0] + times[1] - times[2])
    if times == (1, 1, 1):
        assert in_flight(trace, log) == [stages] * stages  # what backward reads stays to the weight gradients
        assert round(log.end / UNIT, 1) == {4: 27, 8: 79}[stages]


ZERO_BUBBLE = [
    *((8, *row) for row in [
        (24, 18522, 18086, 9337, 601, 0.2431, 0.1585),
        (32, 18513, 18086, 9331, 626, 0.1985, 0.1242),
        (64, 18546, 18097, 9321, 762, 0.1240, 0.0674),
        (24, 29718, 29444, 19927, 527, 0.2347, 0.1323),
        (32, 29802, 29428, 19530, 577, 0.1898, 0.1045),
        (64, 29935, 29621, 19388, 535, 0.1091, 0.0554),
    ]),
    (16, 48, 11347, 11248, 8132, 377, 0.2552, 0.1397),
    (16, 64, 11307, 11254, 8101, 379, 0.2082, 0.1088),
    (32, 96, 10419, 10207, 7715, 408, 0.2646, 0.1421),
]  # fmt: skip
"""Stages, microbatches, microseconds of F, B, W and a send, and the bubble rates of 1F1B and ZB-H1: tables 9 and 5 of
Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024."""


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row[:2] == (8, 24) else pytest.mark.slow) for row in ZERO_BUBBLE], ids=str
)
def test_bubble_rates_that_were_printed(row: tuple[int, int, int, int, int, int, float, float]) -> None:
    """(cost - n (F + B + W)) / cost, cost being the longest time from a stage's first to its last op: four digits."""
    stages, n, forward, inputs, weights, send, *printed = row
    work = n * (forward + inputs + weights)
    for schedule, rate in zip(("1f1b", "zb_h1"), printed, strict=True):
        times = (inputs + weights, 0) if schedule == "1f1b" else (inputs, weights)  # its backward is one piece
        base = model(stages, n, forward, *times, unit=1000)
        log = run(pipeline(base, list(range(stages)), n, schedule), send * 1000)
        cost = max(length for length, _ in spans(log, unit=1000))
        assert round((cost - work) / cost, 4) == rate


@pytest.mark.parametrize(("stages", "n", "time", "most"), [(4, 8, 51, 8), (8, 24, 151, 16)])
def test_a_v_of_two_parts_per_device_leaves_no_idle_time(stages: int, n: int, time: int, most: int) -> None:
    """ZB-V: 2 S parts in flight on every device, as many as 1F1B has on its first (Qi et al. 2024)."""
    trace, log = scheduled("zb_v", stages, n, (1, 1, 1), 2)
    assert round(log.end / UNIT, 1) == time
    assert [idle for _, idle in spans(log)] == [0] * stages
    assert in_flight(trace, log) == [most] * stages


@pytest.mark.parametrize(("stages", "n", "time"), [(4, 8, 51), (4, 12, 75), (8, 16, 103)])
def test_forwards_beside_backwards_in_a_v_hold_one_part_more(stages: int, n: int, time: int) -> None:
    """DualPipeV: 2 S + 1 parts in flight; its blocks one op after the other leave S - 1 of idle time."""
    trace, log = scheduled("dualpipe_v", stages, n, (1, 1, 1), 2)
    assert round(log.end / UNIT, 1) == time == 6 * n + stages - 1
    assert in_flight(trace, log) == [2 * stages + 1] * stages


def test_parts_at_both_ends_may_have_no_layers() -> None:
    """Of four parts on two devices, drawn by hand: the layers are the second, on device 1, and the third, on device 0.

    Device 1 runs forwards in 0-1 and 1-2, device 0 in 1-2 and 2-3 and its backwards in 3-4 and 4-5, device 1 in 4-5 and
    5-6; the loss takes no time.
    """
    base = model(2, 2, 1, 1)
    trace = pipeline(base, {0: 1, 1: 2}, 2, "interleaved", 2, parts=4)
    assert round(replay(Plan(trace), line(2)).end / UNIT) == 6
    assert not departures(trace, base)
    where = {op.name: op.device for op in trace.ops}
    assert [where[f"{name}.mb0"] for name in ("f0", "f1", "loss", "b1", "b0")] == [1, 0, 1, 0, 1]
    with pytest.raises(TraceError, match="without a gap"):
        pipeline(base, {0: 1, 1: 3}, 2, "interleaved", 2, parts=6)


def test_the_stages_of_llama_3_405b_in_small() -> None:
    """Its 126 layers on 128 parts of 16 stages: the first and the last one have the embedding and the loss alone."""
    config = {**FAMILIES["llama"], "model_type": "llama", "num_hidden_layers": 14}
    base = transformer(config, batch=4, sequence=8, precision="bf16")
    layers = (0, *[1] * 14, 0)
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 4, "schedule": "interleaved", "chunks": 4, "micro_batches": 4,
                                             "layers": layers})  # fmt: skip
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    held = [{op.layer for op in trace.ops if op.device == s and op.kind == "matmul"} - {-1} for s in range(4)]
    assert held == [{3, 7, 11}, {0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10}]
    assert {op.device for op in trace.ops if op.name.startswith("embed.mb")} == {0}
    assert {op.device for op in trace.ops if op.name.startswith("head.mb")} == {3}


def test_every_unit_is_scheduled_once() -> None:
    for schedule in SCHEDULES:
        chunks = 3 if schedule == "interleaved" else parts_per_device(schedule)
        for stages, n in [(1, 1), (1, 3), (2, 2), (3, 6), (4, 8)]:
            if schedule == "dualpipe_v" and n < 2 * stages:
                continue
            orders = unit_orders(schedule, stages, chunks, n)
            for s, order in enumerate(orders):
                parts = [q for q in range(stages * chunks) if device_of(q, stages, schedule) == s]
                assert len(set(order)) == len(order)
                assert len(parts) == chunks
                for phase in ("forward", "backward", *(["weight"] if schedule in FOLDED else [])):
                    every = {(q, phase, k) for q in parts for k in range(n)}
                    assert {unit for unit in order if unit[1] == phase} == every


def test_a_schedule_names_the_nearest_number_that_it_has_an_order_for() -> None:
    with pytest.raises(TraceError, match="multiple of its 4 stages, not 6; nearest: 8"):
        unit_orders("interleaved", 4, 2, 6)
    with pytest.raises(TraceError, match="did you mean 'interleaved'"):
        unit_orders("interleave", 4, 2, 8)
    with pytest.raises(TraceError, match="interleaved needs at least 2 parts per device; nearest: 2, or 1f1b"):
        unit_orders("interleaved", 4, 1, 8)
    with pytest.raises(TraceError, match="gpipe has one part per device, not 2"):
        unit_orders("gpipe", 4, 2, 8)


FAMILIES = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 128},
    "bert": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 64, "vocab_size": 128, "type_vocab_size": 2,
    },
    "llama": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "optimizer", "schedule"),
    [
        *((family, "adamw_foreach", "zb_h1") for family in FAMILIES),
        *(("gpt2", each, "1f1b") for each in OPTIMIZERS),
    ],
)
def test_every_family_and_optimizer_runs_in_a_pipeline(family: str, optimizer: str, schedule: str) -> None:
    """Embedding, head and last norm share ops of the optimizer with each other, and lie on different stages."""
    config = {"model_type": family, **FAMILIES[family]}
    n = 2 if schedule == "zb_h1" else 1
    base = transformer(config, batch=n, sequence=16, optimizer=optimizer, precision="mixed_bf16")
    trace = pipeline(base, [0, 1], n, schedule)
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    for op in trace.ops:
        for t in op.reads:
            producer = int(trace.producer[t])
            assert producer < 0 or trace.ops[producer].device == op.device


def test_a_slot_that_reads_another_parameters_gradient_is_wrong() -> None:
    base = transformer({"model_type": "gpt2", **FAMILIES["gpt2"]}, batch=2, sequence=16, optimizer="adamw_fused")
    trace = pipeline(base, [0, 1], 1)
    assert trace.origin is not None
    ops = list(trace.origin.ops)
    divided = next(op for op, expr in enumerate(ops) if isinstance(expr, Slots))
    expr = ops[divided]
    assert isinstance(expr, Slots)
    other = tuple(k for k in range(expr.count) if k not in expr.slots)
    ops[divided] = Slots(expr.of, other, expr.count)
    trace.origin = replace(trace.origin, ops=tuple(ops))
    assert "wrong" in {each.what for each in departures(trace, base)}
