"""PipeDream's weight stashing: versions, staleness and rate of its closed forms, and faults that the law finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.errors import LayoutError, TraceError
from sim.layout import lay_out
from sim.policies import load
from sim.rewrites.pipeline import pipeline
from sim.rewrites.steps import consecutive_steps
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder, io
from sim.trace.origin import Same
from tests.rewrites.test_schedules import FAMILIES, HELD, UNIT, in_flight, run, spans
from tests.strategies import traces
from workloads import transformer

WEIGHT = 10_000
"""Bytes of a stage's weights."""
CONFIG = {"model_type": "gpt2", **FAMILIES["gpt2"]}


def model(stages: int, n: int, forward: list[int], backward: list[int]) -> Trace:
    """A weight per stage, which forward and backward read, and its update in no time."""
    b = TraceBuilder({"batch": n, "samples": n})
    x, saved, gradients, updated = b.tensor("x", n, "input"), [], [], []
    w = [b.tensor(f"w{i}", WEIGHT, "weight", layer=i) for i in range(stages)]
    for i in range(stages):
        y, kept = b.tensor(f"y{i}", n, "temporary", layer=i), b.tensor(f"saved{i}", HELD * n, layer=i)
        took = UNIT * n * forward[i]
        b.op(f"f{i}", reads=[x, w[i]], writes=[y, kept], layer=i, duration=took, splits=["batch"])
        saved.append(kept)
        x = y
    g = b.tensor("g", n, "temporary")
    b.op("loss", reads=[x], writes=[g], duration=0, splits=["batch"])
    for i in reversed(range(stages)):
        new, t = b.tensor(f"g{i}", n, "temporary", layer=i), b.tensor(f"w{i}.grad", WEIGHT, "gradient", layer=i)
        fields = {"phase": "backward", "layer": i, "splits": ["batch"], "duration": UNIT * n * backward[i]}
        b.op(f"b{i}", reads=[g, saved[i], w[i]], writes=[new], **fields)
        fields |= {"splits": ["batch_sum"], "duration": 0}
        b.op(f"b{i}.weight", reads=[g, saved[i]], writes=[t], **fields)
        gradients.append((i, t))
        g = new
    for i, t in gradients:
        updated.append(b.tensor(f"w{i}.new", WEIGHT, "weight", layer=i, replaces=w[i]))
        b.op(f"u{i}", "optimizer", reads=[w[i], t], writes=[updated[-1]], phase="update", layer=i, duration=0)
    return b.build(outputs=updated, carry=[(new, w[i]) for (i, _), new in zip(gradients, updated, strict=True)])


def versions(trace: Trace, log) -> list[float]:
    """Per device the most bytes of weights at once, in weights of a stage."""
    tensor, delta, tier = (log.change(name).tolist() for name in ("tensor", "delta", "tier"))
    role, most = [t.role for t in trace.tensors], []
    for device in range(trace.devices):
        level = highest = 0
        for t, d, at in zip(tensor, delta, tier, strict=True):
            if at == device and t >= 0 and role[t] == "weight":
                level += d
                highest = max(highest, level)
        most.append(highest / WEIGHT)
    return most


@pytest.mark.parametrize(("stages", "n"), [(1, 3), (2, 6), (4, 12), (8, 24)])
def test_versions_stashes_and_staleness(stages: int, n: int) -> None:
    """Stage s of S keeps S - s versions and as many stashes, and its forward runs on weights S - 1 - s updates old."""
    base = model(stages, n, [1] * stages, [2] * stages)
    trace = pipeline(base, list(range(stages)), n, "pipedream")
    assert {each.what for each in departures(trace, base)} <= {"delayed"}
    log = run(trace)
    descending = list(range(stages, 0, -1))
    assert versions(trace, log) == in_flight(trace, log) == descending
    for op in trace.ops:
        read = [trace.tensors[t].name for t in op.reads if trace.tensors[t].role == "weight"]
        if op.kind not in ("send", "recv", "optimizer") and read:
            s, k = op.device, int(op.name.rpartition(".mb")[2])
            made_by = -1 if ".new." not in read[0] else int(read[0].rpartition(".mb")[2])
            assert read[0].startswith(f"w{s}")
            assert made_by == max(k - (stages - 1 - s), 0) - 1
    assert round(log.end / UNIT) == (n + stages - 1) * 3  # it fills and drains once
    assert all(idle == 0 for _, idle in spans(log)[-1:])


def test_the_slowest_stage_sets_the_rate() -> None:
    forward, backward = [1, 2, 1, 1], [2, 3, 1, 2]
    ends = []
    for n in (8, 12):
        base = model(4, n, forward, backward)
        ends.append(run(pipeline(base, [0, 1, 2, 3], n, "pipedream")).end / UNIT)
    assert round(ends[1] - ends[0]) == 4 * 5


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(traces(update=True, cpu=False), st.integers(1, 4), st.integers(1, 4))
def test_random_traces_are_only_late(base: Trace, stages: int, n: int) -> None:
    layers = 1 + max(op.layer for op in base.ops)
    assume(layers >= stages)
    try:
        trace = pipeline(base, [i * stages // layers for i in range(layers)], n, "pipedream")
    except TraceError as error:  # of an op that needs all samples
        assume(not any(text in str(error) for text in ("may not be split", "does not divide")))
        raise
    assert {each.what for each in departures(trace, base)} <= {"delayed"}
    again = consecutive_steps(base, n).trace
    assert not departures(again, base)


def step() -> Trace:
    return transformer(CONFIG, batch=4, sequence=16, precision="mixed_bf16", optimizer="adamw_fused")


def laid_out() -> Trace:
    return lay_out(step(), "a100_80_sxm", {"pp": 2, "micro_batches": 4, "schedule": "pipedream"})[0]


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "mixed_bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_run_on_late_weights_and_are_otherwise_the_same(family: str, precision: str, tmp_path) -> None:
    """Tied embeddings, too: the last stage has the versions of the first. Each stage computes its rotary tables."""
    config = {"model_type": family, **FAMILIES[family]}
    base = transformer(config, batch=4, sequence=16, precision=precision)
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 2, "micro_batches": 4, "schedule": "pipedream"})
    found = departures(trace, base)
    assert {each.what for each in found if each.what != "repeated"} == {"delayed"}
    assert {each.op for each in found if each.what == "repeated"} == ({"rotary"} if family == "llama" else set())
    io.save(trace, tmp_path / "t.jsonl")
    assert io.load(tmp_path / "t.jsonl").origin == trace.origin


@pytest.mark.parametrize("policy", ["keep_all", "full_recompute", "swap_all", "weight_streaming"])
def test_policies_run_on_stashed_weights(policy: str) -> None:
    base = step()
    layout = {"pp": 2, "micro_batches": 4, "schedule": "pipedream"}
    trace, platform = lay_out(base, "a100_80_sxm", layout)
    ran = run_policy(load(policy), trace, platform)
    assert ran.done, ran.error
    assert {each.what for each in departures(ran.plan.trace, base)} <= {"delayed", "repeated"}
    laws = ("capacity", "ops", "order", "tiling", "outcome")
    assert not [text for law in laws if (text := breaks(CHECKS[law], ran))]


# ---- faults that the law finds -----------------------------------------------------------------------


def other_version(trace: Trace, op: int, to_step: int) -> Trace:
    """The trace where an op reads another version of its weight, kept in storage of its own."""
    names = {t.name: t.id for t in trace.tensors}
    old = next(t for t in trace.reads(op) if trace.tensors[t].role == "weight")
    word = trace.tensors[old].name.partition(".new")[0]
    new = names[word if to_step < 0 else f"{word}.new.mb{to_step}"]
    assert new != old
    ids = trace.op_columns.read_ids.copy()
    start, stop = trace.op_columns.read_start[op : op + 2]
    ids[start:stop][ids[start:stop] == old] = new
    tensors = replace(trace.tensor_columns, replaces=trace.tensor_columns.replaces * 0 - 1)
    ops = replace(trace.op_columns, read_ids=ids)
    return Trace(tensors, ops, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin)


def named(trace: Trace, name: str) -> int:
    return next(op.id for op in trace.ops if op.name == name)


def toy() -> tuple[Trace, Trace]:
    base = model(3, 6, [1] * 3, [1] * 3)
    return base, pipeline(base, [0, 1, 2], 6, "pipedream")


@pytest.mark.parametrize(
    ("op", "to_step"),
    [
        ("f2.mb4", 2),  # the last stage is never late
        ("f0.mb4", 0),  # later than the first stage says
        ("b0.mb3", 1),  # another version than its forward had
        ("b1.mb1", 0),  # a weight that is not stashed: the newest there is
    ],
)
def test_a_version_that_the_op_does_not_declare_is_stale(op: str, to_step: int) -> None:
    base, trace = toy()
    found = departures(other_version(trace, named(trace, op), to_step), base)
    assert [(each.what, each.op) for each in found if each.what != "delayed"] == [("stale", op)]


def test_a_late_weight_that_is_said_to_be_new_is_stale() -> None:
    base, trace = toy()
    op, origin = named(trace, "f0.mb4"), trace.origin
    assert origin is not None
    assert origin.ops[op] == Same(0, 4, 2)
    claims = (*origin.ops[:op], Same(0, 4), *origin.ops[op + 1 :])
    trace.origin = replace(origin, ops=claims)
    assert ("stale", "f0.mb4") in {(each.what, each.op) for each in departures(trace, base)}


def test_the_weights_of_another_stage_are_wrong() -> None:
    base, trace = toy()
    op = named(trace, "f1.mb0")
    ids = trace.op_columns.read_ids.copy()
    start, stop = trace.op_columns.read_start[op : op + 2]
    names = {t.name: t.id for t in trace.tensors}
    ids[start:stop][ids[start:stop] == names["w1"]] = names["w0"]
    columns = replace(trace.op_columns, read_ids=ids)
    tensors = replace(trace.tensor_columns, replaces=trace.tensor_columns.replaces * 0 - 1)
    wrong = Trace(tensors, columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin)
    assert ("wrong", "f1.mb0") in {(each.what, each.op) for each in departures(wrong, base)}


def test_one_step_of_samples_that_do_not_divide_is_the_whole() -> None:
    base = transformer(CONFIG, batch=1, sequence=8, stack="compiled")
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 2, "schedule": "pipedream"})
    assert {each.what for each in departures(trace, base)} <= {"repeated", "delayed"}


def test_replicas_are_refused_with_the_nearest_layout() -> None:
    with pytest.raises(LayoutError, match="dp: pipedream updates after each microbatch of one pipeline; nearest: 1"):
        lay_out(step(), "a100_80_sxm", {"dp": 2, "pp": 2, "micro_batches": 2, "schedule": "pipedream"})
    with pytest.raises(LayoutError, match=r"zero: pipedream keeps several versions of each weight.*; nearest: 0"):
        lay_out(step(), "a100_80_sxm", {"pp": 2, "cp": 2, "zero": 1, "schedule": "pipedream"})
