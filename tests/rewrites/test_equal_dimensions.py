"""Dimensions of equal size are told apart: what a rank holds and sends is the polynomial of sizes that differ.

Of a fixed model and batch the bytes of all tensors, and those sent, are polynomials of degree 2 in the sequence, and of
degree 1 in the vocabulary. They are determined at sizes that no other dimension has, and must hold where one has.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.layout import lay_out
from sim.rewrites.batching import batched
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from sim.trace.io import load, save
from workloads import transformer

HIDDEN, HEADS, INNER, VOCABULARY, EXPERTS = 64, 8, 160, 200, 16
APART = (400, 528, 656)
"""Sequences that, whole or divided by 2, 4 or 8, are equal to no other dimension."""
COMMON = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCABULARY, "n_layer": 2, "n_positions": 4096},
    "bert": {**COMMON, "intermediate_size": INNER, "max_position_embeddings": 4096},
    "llama": {**COMMON, "intermediate_size": INNER, "num_key_value_heads": 8},
    "mixtral": {
        **COMMON,
        "intermediate_size": INNER,
        "num_key_value_heads": 8,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 1,
    },
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"cp": 2},
    {"cp": 2, "ring_attention": True},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": True, "cp": 2},
    {"cp": 2, "dp": 2, "zero": 1},
)
EQUAL = {"hidden": HIDDEN, "heads": HEADS, "inner": INNER, "half the tokens are hidden": 2 * HIDDEN}
FLASH = {"precision": "amp_bf16", "attention": "flash"}


def build(family: str, sequence: int, batch: int = 2, vocabulary: int = VOCABULARY, **given: Any) -> Trace:
    config = {**CONFIGS[family], "model_type": family, "vocab_size": vocabulary}
    return transformer(config, batch=batch, sequence=sequence, **{**FLASH, **given})


def totals(trace: Trace, layout: dict[str, Any]) -> dict[str, int]:
    """Bytes of all tensors by role, and those that collectives send."""
    divided, _ = lay_out(trace, "a100_80_sxm", layout)
    found = {
        "sent": sum(op.bytes or 0 for op in divided.ops if op.kind == "collective"),
        "counted": int(divided.counted_flops.sum()),
    }
    for t in divided.tensors:
        found[t.role] = found.get(t.role, 0) + t.bytes
    return found


def through(points: dict[int, int], at: int) -> Fraction:
    """The value of the polynomial through some points (Lagrange)."""
    total = Fraction(0)
    for x, y in points.items():
        term = Fraction(y)
        for other in points:
            if other != x:
                term *= Fraction(at - other, x - other)
        total += term
    return total


@cache
def apart(family: str, layout: int, batch: int, options: tuple[tuple[str, str], ...]) -> dict[int, dict[str, int]]:
    given: dict[str, Any] = dict(options)
    return {s: totals(build(family, s, batch, **given), LAYOUTS[layout]) for s in APART}


def check(family: str, sequence: int, layout: dict[str, Any], batch: int = 2, **options: Any) -> None:
    known = apart(family, LAYOUTS.index(layout), batch, tuple(options.items()))
    found = totals(build(family, sequence, batch, **options), layout)
    for key, value in found.items():
        assert value == through({s: each.get(key, 0) for s, each in known.items()}, sequence), key


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("equal", EQUAL)
def test_a_sequence_as_long_as_another_dimension(family: str, layout: dict[str, Any], equal: str) -> None:
    check(family, EQUAL[equal], layout)


@pytest.mark.parametrize("options", [{"attention": "eager", "precision": "mixed_bf16"}, {"precision": "mixed_fp8"}])
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_so_with_other_kernels(family: str, options: dict[str, Any]) -> None:
    for sequence in (HIDDEN, 8, 16, INNER):
        check(family, sequence, {"tp": 2, "sequence_parallel": True}, **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("loss", ["torch", "fused", "vocab_parallel"])
def test_a_vocabulary_as_large_as_there_are_tokens(family: str, layout: dict[str, Any], loss: str) -> None:
    """Of all samples, of one, or of a rank's."""
    sequence = 400
    values = {v: totals(build(family, sequence, 2, v, loss=loss), layout) for v in (1000, 1200)}
    for equal in (2 * sequence, sequence, sequence // 2):
        for key, value in totals(build(family, sequence, 2, equal, loss=loss), layout).items():
            assert value == through({v: each.get(key, 0) for v, each in values.items()}, equal), key


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["gpt2", "bert", "llama"]),
    st.sampled_from(LAYOUTS),
    st.sampled_from([1, 2, 8, 64]),
    st.sampled_from([8, 16, 24, 32, 64, 96, 160, 192, 200, 256]),
)
def test_whatever_is_equal(family: str, layout: dict[str, Any], batch: int, sequence: int) -> None:
    if batch % layout.get("dp", 1) == 0:
        check(family, sequence, layout, batch)


@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "mixtral"])
def test_values_are_those_of_one_device(family: str, layout: dict[str, Any]) -> None:
    """Hidden, heads, experts, or the vocabulary as large as the sequence; of a mixture with one expert per token."""
    for sequence in (HIDDEN, EXPERTS, 8, VOCABULARY // 2):
        trace = build(family, sequence)
        divided, _ = lay_out(trace, "a100_80_sxm", layout)
        assert not departures(divided, trace)


def test_a_mixture_with_one_expert_per_token_is_divided_by_tokens() -> None:
    """Its rows sorted by expert are as many as its tokens, and every rank has all of them."""
    trace = build("mixtral", 48)
    divided, _ = lay_out(trace, "a100_80_sxm", {"tp": 2, "sequence_parallel": True})
    size = {t.name: t.bytes for t in divided.tensors}
    before = {t.name: t.bytes for t in trace.tensors}
    assert size["h0.mlp.dispatch.out"] == before["h0.mlp.dispatch.out"]
    assert size["h0.attn.proj.out.summed"] * 2 == before["h0.attn.proj.out"]


def test_what_a_trace_says_of_its_axes_is_kept_in_its_file(tmp_path: Any) -> None:
    trace = build("bert", HIDDEN)
    save(trace, tmp_path / "trace.jsonl")
    again = load(tmp_path / "trace.jsonl")
    assert dict(again.tensor_columns.axes) == dict(trace.tensor_columns.axes)
    pooled = again.tensors[again.tensor_id("pooler.out")]
    assert pooled.shape == (2, HIDDEN)
    assert pooled.axes is None
    assert again.tensors[again.tensor_id("h0.mlp.fc.out")].axes == ("", "tokens", "")


@pytest.mark.parametrize(
    ("axes", "message"),
    [('["","token"]', "axes: 'token' is unknown"), ('["tokens"]', "axes: 1 names for the 2 axes of its shape")],
)
def test_axes_that_are_none_are_refused(tmp_path: Any, axes: str, message: str) -> None:
    b = TraceBuilder()
    b.tensor("x", 8, "input", shape=(1, 2), axes=("", "tokens"))
    save(b.build(), tmp_path / "trace.jsonl")
    text = (tmp_path / "trace.jsonl").read_text()
    (tmp_path / "trace.jsonl").write_text(text.replace('["","tokens"]', axes))
    with pytest.raises(TraceError, match=message):
        load(tmp_path / "trace.jsonl")


def test_a_trace_that_says_nothing_of_its_axes_is_divided_by_size() -> None:
    """What is imported or captured, where sizes differ, is divided as what states its axes."""
    trace = build("llama", 400)
    columns = replace(trace.tensor_columns, axes={})
    silent = Trace(columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta)
    assert silent == trace
    for layout in LAYOUTS:
        one, other = (lay_out(each, "a100_80_sxm", layout)[0] for each in (trace, silent))
        assert one == other


@pytest.mark.parametrize("rows", [8, 64])
def test_a_gradient_of_a_weight_as_large_as_its_input_has_no_rows(rows: int) -> None:
    """One op computes both, as fused kernels do: of (rows, 8) and (8, 8) the names of axes tell which is which."""
    b = TraceBuilder({"batch": 8})
    x = b.tensor("x", 4 * rows * 8, "input", shape=(rows, 8), axes=("tokens", ""))
    w = b.tensor("w", 256, "weight", shape=(8, 8))
    copy = b.tensor("w.copy", 256, shape=(8, 8))
    b.op("cast", "copy", reads=[w], writes=[copy])
    y, g = (b.tensor(name, 4 * rows * 8, shape=(rows, 8), axes=("tokens", "")) for name in ("y", "g"))
    dx = b.tensor("dx", 4 * rows * 8, shape=(rows, 8), axes=("tokens", ""))
    dw = b.tensor("dw", 256, shape=(8, 8))
    b.op("product", "matmul", reads=[x, copy], writes=[y], flops=1, splits=("batch",))
    b.op("slope", "elementwise", reads=[y], writes=[g], phase="backward", splits=("batch",))
    b.op("back", "matmul", reads=[g, x, copy], writes=[dx, dw], phase="backward", flops=1, splits=("batch",))
    assert np.flatnonzero(batched(b.build())).tolist() == [x, y, g, dx]
