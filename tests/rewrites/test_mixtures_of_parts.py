"""Decoders of other parts than GPT-2's and Llama's, in layouts and stacks, compute what they compute on one device."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from sim.layout import lay_out
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers
from sim.rewrites.values import departures
from sim.trace import Trace
from workloads import transformer, with_stack

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 128}
GATED = {"swiglu": True, "ffn_hidden_size": 48}
GROUPS = {"group_query_attention": True, "num_query_groups": 2}
HALF = {"position_embedding_type": "rope", "rotary_percent": 0.5}
MIXTURES: dict[str, dict[str, Any]] = {
    "groups of queries, untied": {**GROUPS, "untie_embeddings_and_output_weights": True},
    "SwiGLU, LayerNorm, learned": {**GATED, **GROUPS},
    "SwiGLU, RMSNorm, half rotated": {**GATED, **HALF, "normalization": "RMSNorm", "disable_bias_linear": True},
    "squared ReLU, half rotated": {**HALF, "squared_relu": True, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}
NEMOTRON = {
    "model_type": "nemotron", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 128,
}  # fmt: skip
LAYOUTS = [
    {"dp": 2, "zero": 3},
    {"tp": 2, "cp": 2},
    {"tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "micro_batches": 2},
    {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2},
    {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "micro_batches": 2},
]
RUNS = [
    {"precision": "amp_bf16", "loss": "fused"},
    {"precision": "megatron_fp8", "loss": "vocab_parallel", "attention": "flash"},
]


@cache
def step(mixture: str, run: int) -> Trace:
    config = NEMOTRON if mixture == "nemotron" else {"model_type": "megatron", **SIZES, **MIXTURES[mixture]}
    return transformer(config, batch=4, sequence=16, optimizer="adamw_fused", **RUNS[run])  # type: ignore[arg-type]


def found(trace: Trace, base: Trace) -> set[str]:
    return {each.what for each in departures(trace, base)} - {"repeated"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("run", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mixture", [*MIXTURES, "nemotron"])
def test_values_are_those_of_one_device(mixture: str, run: int, layout: dict[str, Any]) -> None:
    base = step(mixture, run)
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    assert not found(trace, base)
    assert not found(all_ranks(trace), base)
    if layout.keys() >= {"tp", "pp"}:
        return  # there a fused update is divided again among stages, of which the law has no words
    fused, _ = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack="fused"))
    assert not found(fused, base)


@pytest.mark.parametrize("stack", ["compiled", "compiled_layers", "fused"])
@pytest.mark.parametrize("mixture", [*MIXTURES, "nemotron"])
def test_stacks_keep_values_and_launch_less(mixture: str, stack: str) -> None:
    for run in range(len(RUNS)):
        base = step(mixture, run)
        trace = with_stack(base, stack)
        assert not found(trace, base)
        assert len(trace.ops) < len(base.ops)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_a_rank_follow_the_closed_form(ranks: int) -> None:
    """Columns and their biases, and the vocabulary, are divided; norms, positions, and biases after a sum are not."""
    h, ffn, heads, groups, words, positions = 32, 48, 4, 2, 128, 64
    base = transformer(
        {"model_type": "megatron", **SIZES, **MIXTURES["SwiGLU, LayerNorm, learned"]}, batch=4, sequence=16
    )
    trace = divide_layers(base, ranks)
    held = {t.name: t.bytes for t in trace.tensors if t.role == "weight" and trace.producer[t.id] < 0}
    joint = h + 2 * groups * h // heads
    divided = words * h + 2 * (h * joint + joint + h * h + h * 2 * ffn + 2 * ffn + ffn * h)
    whole = positions * h + 2 * h + 2 * (4 * h + 2 * h)
    assert sum(held.values()) == 4 * (divided // ranks + whole)


def test_adapters_beside_16_bit_weights_under_autocast_are_divided_among_replicas_when_fused() -> None:
    """The copies of a norm's weights in another type are the same for all samples, and no part of its kernel."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    base = transformer(config, batch=4, sequence=16, precision="amp_bf16", lora_rank=4, frozen_dtype="bf16")
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 2, "zero": 1}, kernels=partial(with_stack, stack="fused"))
    assert not found(trace, base)
