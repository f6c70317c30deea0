"""Ranks that share states but not weights (ZeRO 1 and 2): the host updates a rank's part, and only parts cross."""

from __future__ import annotations

from functools import cache

import pytest

from sim.experiment import Result, simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.rewrites.values import departures
from sim.rewrites.weight_parts import with_weight_parts
from sim.trace import Trace
from workloads import transformer

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 128}
MIXED = {"precision": "mixed_fp16", "optimizer": "adamw_fused"}
STATES = ("zero_offload", "zero_infinity(states=host)", "superoffload(on_device=0)", "stronghold", "patrickstar")


@cache
def job(**options: str) -> Trace:
    return transformer(TINY, batch=4, sequence=64, **(options or MIXED))


@cache
def machine(ranks: int, name: str = "a100_80_sxm") -> Platform:
    return load_profile(name, overrides={"devices": str(ranks)})


@cache
def laid_out(ranks: int, level: int) -> Result:
    return simulate(job(), machine(ranks), "keep_all", parallel={"dp": ranks, "zero": level})


@cache
def done(policy: str, ranks: int, level: int, share: float = 1.0) -> Result:
    budget = int(share * laid_out(ranks, level).summary()["peak_bytes"])
    return simulate(job(), machine(ranks), policy, parallel={"dp": ranks, "zero": level}, budget=budget)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_offload_copies_its_part_of_gradients_down_and_of_weights_up_and_nothing_else(level, ranks) -> None:
    """2M bytes each way over all ranks, as its paper counts them: the link of one carries 1 / ranks of that."""
    moved = done("zero_offload", ranks, level).summary()["moved_bytes"]
    elements = job().meta["parameters"]
    rounded = len(job().tensors)  # a part is rounded down to whole bytes
    assert moved["d2h"] == pytest.approx(2 * elements / ranks, abs=rounded)
    assert moved["h2d"] == pytest.approx(2 * elements / ranks, abs=rounded)


@pytest.mark.parametrize("policy", STATES)
@pytest.mark.parametrize("level", [1, 2])
def test_no_policy_for_states_moves_anything_that_it_did_not_plan(level, policy) -> None:
    run = done(policy, 2, level, 0.95 if policy == "patrickstar" else 1.0)
    counters = run.log.counters
    assert (counters["implicit_moves"], counters["returned_moves"], counters["ignored_actions"]) == (0, 0, 0)
    assert run.summary()["moved_bytes"]["d2h"] > 0
    assert not departures(run.plan.trace, job())


def test_the_cpu_s_update_touches_a_rank_s_part_of_what_it_touches_alone() -> None:
    alone, shared = (
        sum(op.bytes for op in run.plan.trace.ops if op.engine == "cpu")
        for run in (simulate(job(), machine(1), "zero_offload"), done("zero_offload", 4, 2))
    )
    assert shared == pytest.approx(alone / 4, rel=1e-3)


def test_the_host_keeps_no_more_than_a_rank_s_part() -> None:
    """States of 12 bytes, a 16-bit gradient, and the 16-bit weight twice: as it was, and on its way up."""
    peak = done("zero_offload", 4, 2).summary()["peak_by_tier"]["host"]
    assert 12 * job().meta["parameters"] / 4 <= peak <= 18.1 * job().meta["parameters"] / 4


def test_an_update_in_one_precision_reads_the_part_that_it_made_an_iteration_before() -> None:
    trace = job(precision="fp32", optimizer="adamw_fused")
    card = machine(2)
    run = simulate(trace, card, "zero_offload", parallel={"dp": 2, "zero": 2})
    whole = run.plan.trace
    parts = [t for t in whole.tensors if t.name.endswith(".part")]
    assert len(parts) == len([t for t in trace.tensors if t.role == "weight" and trace.producer[t.id] < 0])
    begins = {first: last for last, first in whole.carry}
    for part in parts:
        (reader,) = whole.readers(part.id)
        assert whole.ops[reader].engine == "cpu"
        assert whole.producer[begins[part.id]] == reader
    assert not departures(whole, trace)


def test_without_shared_states_nothing_is_rewritten() -> None:
    trace = job()
    updates = [op.id for op in trace.ops if op.phase == "update"]
    assert with_weight_parts(trace, updates) is trace
    shared = laid_out(2, 3).plan.trace
    assert with_weight_parts(shared, [op.id for op in shared.ops if op.phase == "update"]) is shared
    assert with_weight_parts(laid_out(2, 2).plan.trace, []) is laid_out(2, 2).plan.trace
