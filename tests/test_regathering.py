"""Level 3 under recomputation: what is gathered, how often, and how long it is held, beside sums over the model."""

from __future__ import annotations

from typing import Any

import pytest

from sim import iterations, simulate
from sim.experiment import problem_for
from sim.layout import lay_out
from sim.log import EventLog
from sim.plan import Plan
from sim.policies import load
from sim.regathering import gathered_once
from sim.rewrites.values import departures
from sim.trace import Trace
from workloads import transformer

LAYERS, WIDTH = 4, 256
GPT2 = {
    "model_type": "gpt2",
    "n_layer": LAYERS,
    "n_embd": WIDTH,
    "n_head": 4,
    "vocab_size": 1000,
    "n_positions": 128,
}
LAYER = 2 * (12 * WIDTH**2 + 13 * WIDTH)
"""Bytes of the weights of one layer, in 16 bits."""

CHECKPOINTS = (
    "full_recompute",
    "full_recompute(early_stop=False)",
    "selective_recompute",
    "full_recompute; checkpoints: swap_all",
)
"""Policies that recompute something of each layer that reads a weight."""

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp": 8},
    {"dp": 4, "micro_batches": 3},
    {"dp": 2, "tp": 2, "micro_batches": 2},
    {"dp": 2, "pp": 2, "micro_batches": 2, "schedule": "1f1b"},
    {"dp": 2, "cp": 2},
)


def model(**changes: Any) -> Trace:
    return transformer(GPT2, **{"batch": 48, "sequence": 64, "precision": "mixed_bf16", "dropout": 0.0, **changes})


def run(policy: str, layout: dict[str, Any], level: int = 3, **changes: Any) -> EventLog:
    return simulate(model(**changes), "a100_80_sxm", policy, parallel={**layout, "zero": level}).log


def peak(policy: str, layout: dict[str, Any], level: int = 3, **changes: Any) -> int:
    result = simulate(model(**changes), "a100_80_sxm", policy, parallel={**layout, "zero": level})
    return int(result.summary()["peak_bytes"])


def sent_of_layers(log: EventLog) -> int:
    """Bytes that gathers of layers' weights send, each time again."""
    moves = log.events.query("why == 'move' and op.str.startswith('h') and op.str.contains('all_gather')")
    return int(moves.bytes.sum())


def most_held(log: EventLog, device: int = 0) -> int:
    """The most bytes of gathered weights of layers that a device holds at once."""
    rows = log.memory
    rows = rows[rows.tensor.str.match(r"h\d+\..*\.for\.") & (rows.tier == log.platform.home(device).name)]
    return int(rows.delta_bytes.groupby(rows.time_ns).sum().cumsum().max())


@pytest.mark.parametrize("policy", CHECKPOINTS)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_weights_are_gathered_twice_and_two_layers_of_them_are_there(policy: str, layout: dict[str, Any]) -> None:
    """For forward, and once for recomputation and backward; one layer ahead."""
    log = run(policy, layout)
    ranks, parts = layout["dp"], layout.get("micro_batches", 1)
    assert sent_of_layers(log) == 2 * LAYERS * parts * LAYER * (ranks - 1) // ranks
    assert most_held(log) == 2 * LAYER


@pytest.mark.parametrize("policy", ["keep_all", *CHECKPOINTS])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["mixed_bf16", "amp_bf16"])
def test_dividing_weights_too_never_takes_more_than_gathers_ahead(
    policy: str, layout: dict[str, Any], precision: str
) -> None:
    """Beside level 2, each device holds a part of its layers' weights, and at most two layers of gathered ones."""
    whole, divided = (peak(policy, layout, level, precision=precision) for level in (2, 3))
    width = 2 if precision == "amp_bf16" else 1
    own = LAYER * width // layout.get("tp", 1)
    layers = LAYERS // layout.get("pp", 1)
    rest = 2 * width * (1000 + 128) * WIDTH  # the embeddings, which the head reads, too
    assert divided <= whole + max(0, 2 - layers + layers // layout["dp"]) * own + rest


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["full_recompute", "selective_recompute", "every_k(k=2)"])
def test_values_stay_and_the_law_holds(policy: str, layout: dict[str, Any]) -> None:
    base = model()
    divided, device = lay_out(base, "a100_80_sxm", {**layout, "zero": 3})
    plan = load(policy).plan(problem_for(divided, device))
    once = gathered_once(plan)
    assert once is not plan
    assert [d.text for d in departures(once.trace, base)] == [d.text for d in departures(divided, base)]
    assert len(once.trace.ops) < len(divided.ops)


def test_microbatches_hold_nothing_of_each_other() -> None:
    """But their tokens and labels, of 8 bytes each: all exist from the start."""
    peaks = [peak("full_recompute", {"dp": 4, "micro_batches": n}, batch=8 * n) for n in (2, 3, 4)]
    assert peaks == [peaks[0] + n * 2 * 2 * 64 * 8 for n in range(3)]


def test_some_layers_recompute_and_the_others_are_as_before() -> None:
    layout = {"dp": 8}
    names = ("full_recompute", "layers 0 2: full_recompute; rest: keep_all", "keep_all")
    every, some, none = (peak(name, layout) for name in names)
    assert every < some < none
    log = run(names[1], layout)
    assert most_held(log) == 2 * LAYER


def test_without_this_forward_copies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that it mends, planted: the copies of forward are held until they are read again."""
    monkeypatch.setattr(iterations, "gathered_once", lambda plan: plan)
    assert most_held(run("full_recompute", {"dp": 8})) > 4 * LAYER


def test_plans_that_recompute_nothing_are_left_alone() -> None:
    divided, _ = lay_out(model(), "a100_80_sxm", {"dp": 8, "zero": 3})
    plan = Plan(divided)
    assert gathered_once(plan) is plan
