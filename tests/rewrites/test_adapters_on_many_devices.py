"""LoRA's adapters on many devices: what a rank holds and sends in closed form, the law, and a fault that it finds."""

from __future__ import annotations

from functools import cache

import pytest

from sim.layout import lay_out
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers
from sim.rewrites.values import departures
from sim.trace import Trace
from tests.rewrites.test_replicas import line, peaks, rebuilt
from tests.rewrites.test_schedules import FAMILIES
from workloads import transformer

RANK, BATCH, TOKENS = 4, 4, 16
H, KV, FFN = 32, 16, 64
COLUMNS = {"attn.q": (H, H), "attn.k": (H, KV), "attn.v": (H, KV), "mlp.gate": (H, FFN), "mlp.up": (H, FFN)}
ROWS = {"attn.proj": (H, H), "mlp.down": (FFN, H)}
"""Inputs and outputs of the linear layers of the small Llama here."""


@cache
def step(family: str = "llama", targets: str = "all-linear", frozen: str | None = None) -> Trace:
    config = {**FAMILIES[family], "model_type": family}
    given = {"precision": "mixed_bf16", "attention": "flash", "loss": "fused", "optimizer": "adamw_fused"}
    adapters = {"lora_rank": RANK, "lora_targets": targets, "lora_dropout": 0.1, "frozen_dtype": frozen}
    return transformer(config, batch=BATCH, sequence=TOKENS, **given, **adapters)


@pytest.mark.parametrize(
    ("family", "frozen", "layout"),
    [
        ("llama", None, {"tp": 2, "sequence_parallel": True, "pp": 2, "micro_batches": 2, "schedule": "zb_h1"}),
        ("llama", None, {"cp": 2, "tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True}),
        ("llama", "nf4", {"tp": 2, "dp": 2, "zero": 3}),
        ("llama", "nf4", {"cp": 2}),  # whose 64 tokens are as many as a dequantised weight has rows
        ("gpt2", None, {"tp": 2, "dp": 2, "zero": 2, "micro_batches": 2}),
        ("bert", None, {"tp": 4, "sequence_parallel": True}),
    ],
)
def test_adapters_compute_the_same(family: str, frozen: str | None, layout: dict) -> None:
    base = step(family, frozen=frozen)
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize(
    "layout", [{"dp": 2}, {"dp": 4}, {"dp": 2, "micro_batches": 2}, {"dp": 2, "prefetch": 0}], ids=str
)
@pytest.mark.parametrize("tuning", [{"lora_rank": RANK}, {"lora_rank": RANK, "frozen_dtype": "bf16"}, {}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_rank_stands_for_all_under_autocast(family: str, tuning: dict, layout: dict) -> None:
    """Weights that level 3 gathers for what has casts of them are held as long by each rank that is written out."""
    config = {**FAMILIES[family], "model_type": family}
    base = transformer(config, batch=8, sequence=TOKENS, precision="amp_bf16", loss="fused", **tuning)
    trace, _ = lay_out(base, "a100_80_sxm", {**layout, "zero": 3})
    ranks = layout["dp"]
    time, (peak,) = peaks(trace, line(1, ranks))
    assert peaks(all_ranks(trace), line(ranks)) == (time, [peak] * ranks)


@pytest.mark.parametrize("t", [2, 4])
def test_weights_that_a_rank_holds(t: int) -> None:
    """Of an adapter of k inputs and q outputs r (k + q / t) beside a layer divided by columns, else r (k / t + q)."""
    trace = divide_layers(step(), t)
    held = {x.name: x.bytes for x in trace.tensors if x.role == "weight" and trace.producer[x.id] < 0}
    for name, (inputs, outputs) in (COLUMNS | ROWS).items():
        own = [held[f"h0.{name}.lora_{which}.weight"] for which in "AB"]
        by_columns = name in COLUMNS
        assert own == [2 * RANK * inputs // (1 if by_columns else t), 2 * RANK * outputs // (t if by_columns else 1)]
        assert held[f"h0.{name}.weight"] == 2 * inputs * outputs // t


@pytest.mark.parametrize("t", [2, 4])
def test_bytes_that_adapters_send(t: int) -> None:
    """An all-reduce of r numbers per token: of two layers divided by rows in forward, of the other five in backward."""
    trace = divide_layers(step(), t)
    sent: dict[str, list[int]] = {"forward": [], "backward": []}
    for op in trace.ops:
        if op.ring is not None and op.layer == 1 and "lora" in op.name and op.phase in sent:
            assert op.ring.passes == 2
            sent[op.phase].append(op.bytes or 0)
    each = 2 * (t - 1) * 2 * BATCH * TOKENS * RANK // t
    assert sent == {"forward": [each] * len(ROWS), "backward": [each] * len(COLUMNS)}


@pytest.mark.parametrize("t", [2, 4])
def test_work_of_adapters(t: int) -> None:
    """The half that is divided falls by t; the other one every rank does, by tokens with sequence parallelism."""
    base = {op.name: op.flops for op in step().ops}
    for by_tokens in (False, True):
        own = {op.name: op.flops for op in divide_layers(step(), t, by_tokens).ops}
        for name in COLUMNS | ROWS:
            divided, other = ("B", "A") if name in COLUMNS else ("A", "B")
            assert own[f"h0.{name}.lora_{divided}"] * t == base[f"h0.{name}.lora_{divided}"]
            assert own[f"h0.{name}.lora_{other}"] * (t if by_tokens else 1) == base[f"h0.{name}.lora_{other}"]


def test_an_adapters_term_taken_for_the_sum_is_wrong() -> None:
    trace = divide_layers(step(), 2)
    assert not departures(trace, step())
    summed = next(op.id for op in trace.ops if op.ring is not None and op.name.startswith("h0.mlp.down.lora_A.out"))
    alone = {op: ring for op, ring in trace.op_columns.ring.items() if op != summed}
    assert {each.what for each in departures(rebuilt(trace, ring=alone), step())} == {"wrong"}
