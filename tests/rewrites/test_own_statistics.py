"""Batch norm in parts of a batch: each microbatch and replica has its own statistics, as in PyTorch without SyncBN."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sim import load_profile
from sim.analysis.peak_memory import peak_bytes
from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.engine.replay import replay
from sim.experiment import reference_run
from sim.layout import lay_out
from sim.plan import Plan
from sim.policies import load
from sim.rewrites.batching import split_batch_ops
from sim.rewrites.ranks import all_ranks
from sim.rewrites.values import Departure, check_origin, departures
from sim.trace import Trace
from sim.trace.origin import Microbatch, Same
from tests.rewrites.test_replicas import line, named, op_named, reading, rebuilt
from workloads import cnn

NORMS = 53  # of ResNet-50
MACHINE = load_profile("a100_40_pcie")
LAYOUTS = [
    {"dp": 2},
    {"micro_batches": 8},
    {"dp": 2, "micro_batches": 2},
    {"dp": 2, "micro_batches": 2, "zero": 2},
    {"dp": 4, "micro_batches": 2, "zero": 3},
    {"dp": 2, "barrier": False},
    {"dp": 2, "gradient_buffer": True},
    {"pp": 2, "micro_batches": 4, "layers": "balanced"},
    {"pp": 2, "dp": 2, "micro_batches": 2, "layers": "balanced", "zero": 1},
]


def step(batch: int = 8, **options: object) -> Trace:
    return cnn("resnet-50", batch, 32, **options)


def found(trace: Trace, base: Trace) -> Counter[str]:
    return Counter(each.what for each in departures(trace, base))


def peak(trace: Trace) -> int:
    return int(np.cumsum(reference_run(trace, MACHINE).change("delta")).max())


@pytest.mark.parametrize("stack", ["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_statistics_are_those_of_parts(layout: dict, stack: str) -> None:
    base = step(stack=stack)
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    counted = found(trace, base)
    assert counted.keys() == {"own"}
    steps = 2 if layout.get("barrier") is False else 1
    if stack == "eager":  # norm, its backward, and its running statistics
        assert counted["own"] == 3 * NORMS * layout.get("micro_batches", 1) * steps
    assert found(all_ranks(trace), base).keys() <= {"own", "repeated"}


def test_a_rewrite_that_does_not_allow_for_it_is_refused() -> None:
    base = step(2)
    with pytest.raises(Exception, match=r"rewrite: own: op 'stem.norm.mb0' has statistics of microbatch 0-1/2 of"):
        check_origin(split_batch_ops(base, 2, own_statistics=True)[0], base)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_they_take_what_microbatches_built_one_by_one_take(parts: int, precision: str) -> None:
    """Eight of them are a series, of which the last ones are not written op by op."""
    mine, _ = split_batch_ops(step(precision=precision), parts, passes=True, own_statistics=True)
    other = step(precision=precision, micro_batches=parts)
    assert peak(mine) == peak(other)
    assert len(mine.ops) == len(other.ops)
    assert reference_run(mine, MACHINE).end == pytest.approx(reference_run(other, MACHINE).end, rel=0.02)
    statistics = [sum(op.flops for op in t.ops if "statistics" in op.name) for t in (mine, other)]
    assert statistics[0] == statistics[1]  # each microbatch renews all of them


@pytest.mark.parametrize("parts", [2, 8])
def test_kernels_that_a_compiler_fuses_divide_as_eager_ones(parts: int) -> None:
    """All work but that of the running statistics, which is as much for each part."""
    base = step(stack="compiled")
    trace, _ = split_batch_ops(base, parts, own_statistics=True)
    sums = sum(op.flops for op in trace.ops if ".sum.add.mb" in op.name)
    done, whole = sum(op.flops for op in trace.ops) - sums, sum(op.flops for op in base.ops)
    assert whole <= done <= whole + parts * NORMS * 4 * 2048


def test_replicas_exchange_gradients_and_no_statistics() -> None:
    base, d = step(), 4
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": d})
    sent = sum(op.bytes or 0 for op in trace.ops if op.ring is not None)
    rings = sum(op.ring is not None for op in trace.ops)
    assert 0 <= sent - 2 * (d - 1) * 4 * base.meta["parameters"] // d <= rings  # each rounds up
    read = {trace.tensors[t].name for op in trace.ops if op.ring is not None for t in op.reads}
    assert all(".grad" in name for name in read)


def test_every_replica_simulated_is_as_the_one_that_stands_for_all() -> None:
    """With free links: these take no time, and each device holds as much."""
    base, layout = step(), {"dp": 4, "micro_batches": 2}
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    one, all_of_them = replay(Plan(trace), line(1, 4)), replay(Plan(all_ranks(trace)), line(4))
    held = peak_bytes(all_of_them)
    assert {held[f"hbm@{i}"] for i in range(4)} == {peak_bytes(one)["hbm@0"]}


def test_sharded_weights_leave_running_statistics_whole() -> None:
    base, d = step(), 4
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": d, "zero": 3})
    size = {t.name: t.bytes for t in base.tensors}
    start = [t for t in trace.tensors if trace.producer[t.id] < 0 and t.role == "weight"]
    buffers = [t for t in start if t.name.endswith(("running_mean", "running_var", "batches"))]
    assert len(buffers) == 3 * NORMS
    assert all(t.bytes == size[t.name] for t in buffers)
    others = [t for t in start if t not in buffers]
    assert all(t.bytes == size[t.name.removesuffix(".shard")] // d for t in others)


def test_running_statistics_are_renewed_in_turn_and_in_place() -> None:
    trace, _ = split_batch_ops(step(4), 4, own_statistics=True)
    renewed = [op for op in trace.ops if op.name.startswith("stem.norm.statistics")]
    assert [op.name for op in renewed] == [f"stem.norm.statistics.mb{k}" for k in range(4)]
    for before, after in pairwise(renewed):
        assert after.reads[:3] == before.writes
        assert tuple(trace.tensors[t].replaces for t in after.writes) == before.writes
    for k, op in enumerate(renewed):
        assert [trace.tensors[t].name for t in op.reads[3:]] == [f"stem.norm.{s}.mb{k}" for s in ("mean", "rstd")]


@pytest.mark.parametrize("stack", ["eager", "compiled"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_per_microbatch_has_a_batch_of_its_own(stages: int, stack: str) -> None:
    """Under `pipedream` nothing is other than in four steps of two samples, but how old the weights are."""
    base = step(8, stack=stack)
    layout = {"pp": stages, "micro_batches": 4, "schedule": "pipedream"}
    trace, _ = lay_out(base, "a100_80_sxm", layout | ({"layers": "balanced"} if stages > 1 else {}))
    assert found(trace, base).keys() == ({"delayed"} if stages > 1 else set())
    if stack == "eager":
        own = [op for op in trace.ops if op.name.startswith("stem.norm.statistics")]
        for before, after in pairwise(own):
            assert after.reads[:3] == before.writes
        few = {op.name: op.flops for op in step(2).ops}
        assert all(op.flops == few[op.name.rpartition(".mb")[0]] for op in trace.ops if ".norm" in op.name)


# ---- faults that the law finds -----------------------------------------------------------------------


def wrong(trace: Trace, base: Trace) -> list[Departure]:
    return [each for each in departures(trace, base) if each.what not in ("own", "repeated")]


def test_the_statistics_of_another_microbatch_are_wrong() -> None:
    base = step(4)
    trace, _ = split_batch_ops(base, 2, own_statistics=True)
    op = op_named(trace, "stem.norm.bwd.mb1")
    mixed = reading(trace, op, *(named(trace, f"stem.norm.rstd.mb{k}") for k in (1, 0)))
    assert {(each.op, each.tensor) for each in wrong(mixed, base)} >= {("stem.norm.bwd.mb1", "stem.norm.rstd")}


def test_a_microbatch_whose_running_statistics_are_lost_is_found() -> None:
    """The third starts from what was there before the second, as if it had been copied."""
    base = step(4)
    trace, _ = split_batch_ops(base, 4, own_statistics=True)
    assert trace.origin is not None
    t = named(trace, "stem.norm.running_mean.new.mb1")
    claims = list(trace.origin.tensors)
    claims[t] = Microbatch(claims[t].of, 2, 3, 4)  # type: ignore[union-attr]
    lost = rebuilt(trace)
    object.__setattr__(lost, "origin", replace(trace.origin, tensors=tuple(claims)))
    assert {each.op for each in wrong(lost, base)} >= {"stem.norm.statistics.mb1", "stem.norm.statistics.mb2"}


def test_means_do_not_add_up_to_the_mean_of_all() -> None:
    base = step(4)
    trace, _ = split_batch_ops(base, 2, own_statistics=True)
    assert trace.origin is not None
    mean = next(t.id for t in base.tensors if t.name == "stem.norm.mean")
    claims = list(trace.origin.tensors)
    claims[named(trace, "stem.norm.mean.mb0")] = Same(mean)
    summed = rebuilt(trace)
    object.__setattr__(summed, "origin", replace(trace.origin, tensors=tuple(claims)))
    assert "stem.norm.mb0" in {each.op for each in wrong(summed, base)}


@pytest.mark.parametrize("policy", ["full_recompute", "swap_all", "dtr", "capuchin"])
@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[7]], ids=str)
def test_policies_run_inside(policy: str, layout: dict) -> None:
    base = step()
    ran = run_policy(load(policy), *lay_out(base, "a100_80_sxm", layout))
    assert ran.done, ran.error
    assert found(ran.plan.trace, base).keys() <= {"own", "repeated"}
    assert not [text for law in ("capacity", "ops", "order", "tiling", "outcome") if (text := breaks(CHECKS[law], ran))]
