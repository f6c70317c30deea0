"""Traces from formulas of batch and sequence are those that are built for these sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.errors import WorkloadError
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads import sizes, transformer
from workloads.sizes import Size, Symbols, at_sizes, of_sizes

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_positions": 512, "vocab_size": 100, "n_layer": 2,
        "activation_function": "gelu_new",
    },
    "bert": {
        "model_type": "bert", "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100,
        "max_position_embeddings": 512, "num_hidden_layers": 2, "type_vocab_size": 2, "hidden_act": "gelu",
    },
    "llama": {
        "model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512, "num_hidden_layers": 2,
        "hidden_act": "silu",
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512, "num_hidden_layers": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_known", type(sizes._known)())


def plain(**arguments: Any) -> Trace:
    """The trace as it is built the first time."""
    sizes._known.clear()
    trace = transformer(**arguments)
    sizes._known.clear()
    return trace


def same(one: Trace, other: Trace) -> bool:
    """Whether two traces are equal, facts included."""
    return one.content_hash == other.content_hash and dict(one.meta) == dict(other.meta)


batches = st.integers(1, 9)
sequences = st.sampled_from([1, 2, 31, 32, 33, 127, 128, 129, 250, 256, 300, 384])


@settings(max_examples=12, deadline=None)
@given(
    model=st.sampled_from(sorted(SMALL)),
    at=st.lists(st.tuples(batches, sequences), min_size=3, max_size=5),
    precision=st.sampled_from(["fp32", "amp_bf16", "mixed_bf16", "megatron_fp8"]),
    attention=st.sampled_from(["eager", "sdpa"]),
    loss=st.sampled_from(["torch", "fused", "vocab_parallel", "chunked"]),
    optimizer=st.sampled_from(["adamw_foreach", "adamw_fused", "sgd"]),
    parts=st.sampled_from([1, 2, 3]),
    stack=st.sampled_from(["eager", "compiled", "fused"]),
)
@example("gpt2", [(2, 250), (3, 250), (1, 250), (4, 33)], "amp_bf16", "sdpa", "torch", "sgd", 1, "eager")
@example("llama", [(4, 128), (4, 129), (2, 129), (6, 256)], "fp32", "sdpa", "chunked", "sgd", 2, "fused")
def test_any_sizes(
    model: str,
    at: list[tuple[int, int]],
    precision: str,
    attention: str,
    loss: str,
    optimizer: str,
    parts: int,
    stack: str,
) -> None:
    step = {"precision": precision, "attention": attention, "loss": loss, "optimizer": optimizer, "stack": stack}
    asked = [{"config": SMALL[model], "batch": b * parts, "sequence": s, "micro_batches": parts, **step} for b, s in at]
    try:
        expected = [plain(**each) for each in asked]
    except WorkloadError:
        return  # a stack that the precision does not have, …
    assert all(same(transformer(**each), trace) for each, trace in zip(asked, expected, strict=True))


@pytest.mark.parametrize("model", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_formulas_serve_other_sizes(model: str, attention: str) -> None:
    """One set of formulas for all batches of three samples or more, and sequences longer than a block of attention."""
    for batch, sequence in ((3, 200), (5, 256), (4, 300), (16, 512), (7, 129)):
        transformer(SMALL[model], batch=batch, sequence=sequence, precision="amp_bf16", attention=attention)
    (known,) = sizes._known.values()
    assert len(known.formulas) == 1
    assert known.hits == 3


def test_other_structures_have_formulas_of_their_own() -> None:
    for batch in (4, 5, 1, 6, 1, 7):
        transformer(SMALL["gpt2"], batch=batch, sequence=200, precision="amp_bf16")
    (known,) = sizes._known.values()
    assert len(known.formulas) == 2
    assert known.hits == 3


def test_what_has_none_is_not_tried_for_ever() -> None:
    """How many rows each expert has is drawn, so that no two sizes are alike."""
    for batch in range(2, 8):
        transformer(SMALL["mixtral"], batch=batch, sequence=64)
    (known,) = sizes._known.values()
    assert known.closed
    assert known.hits == 0
    assert len(known.formulas) == sizes.FORMULAS_WITHOUT_USE


def test_errors_are_those_of_any_build() -> None:
    for batch in (2, 3, 4):
        transformer(SMALL["gpt2"], batch=batch, sequence=8)
    with pytest.raises(WorkloadError, match=r"2\*\*6[23]"):
        transformer(SMALL["gpt2"], batch=10**15, sequence=8)


# ---- a number that depends on sizes ------------------------------------------------------------


def test_arithmetic_is_noted_and_decisions_are_conditions() -> None:
    symbols = Symbols()
    n = symbols.size(6)
    half: Any = (n * 3 + 4 - n) // 2
    assert type(half) is Size
    assert symbols.evaluated([10]) is not None
    assert symbols.evaluated([10])[half.place] == 12  # type: ignore[index]
    assert half > 7
    assert symbols.evaluated([3]) is None
    assert symbols.evaluated([8]) is not None


@pytest.mark.parametrize(
    "use",
    [
        lambda n: list(range(n)),
        lambda n: f"layer{n}",
        lambda n: {n: "key"},
        lambda n: n / 2,
        lambda n: int(n),
        lambda n: "x" * n,
        lambda n: str(n),
        lambda n: float(n),
    ],
)
def test_what_cannot_be_noted_holds_for_that_size_alone(use: Any) -> None:
    symbols = Symbols()
    n = symbols.size(6)
    use(n)
    assert symbols.evaluated([6]) is not None
    assert symbols.evaluated([7]) is None


def test_a_function_of_sizes_is_one_operation() -> None:
    @of_sizes
    def loop(count: int, *, step: int) -> int:
        return sum(range(0, count, step))

    symbols = Symbols()
    n = symbols.size(6)
    assert loop(10, step=3) == 18
    total: Any = loop(n, step=n // 3)  # type: ignore[arg-type]
    assert not symbols.conditions
    assert symbols.evaluated([9])[total.place] == loop(9, step=3)  # type: ignore[index]


def test_an_argument_that_is_none_stays_none() -> None:
    @of_sizes
    def tokens(count: int, other: int | None = 1, *, more: int = 0) -> int:
        return count + (100 if other is None else other) + more

    symbols = Symbols()
    n = symbols.size(6)
    total: Any = tokens(n, None, more=n + 1)  # type: ignore[arg-type]
    assert symbols.evaluated([9])[total.place] == tokens(9, None, more=10) == 119  # type: ignore[index]


def test_a_division_that_a_condition_rules_out_is_left_to_the_generator() -> None:
    def build(builder: TraceBuilder, batch: int, sequence: int) -> Trace:
        builder.tensor("x", sequence // (batch - 1) if batch > 1 else 7, "input")
        return builder.build()

    traces = [at_sizes("divided", build, batch, 12) for batch in (3, 4, 5, 1, 7)]
    assert [trace.tensors[0].bytes for trace in traces] == [6, 4, 3, 7, 2]


def test_a_row_that_is_copied_has_no_formula() -> None:
    """Then the trace is built as ever, for each size."""

    def build(builder: TraceBuilder, batch: int, sequence: int) -> Trace:
        x = builder.tensor("x", batch * sequence, "input")
        builder.repeat_tensor(x, "y", batch * sequence, None)
        return builder.build()

    traces = [at_sizes("copied", build, batch, 4) for batch in (1, 2, 3)]
    assert [trace.tensors[1].bytes for trace in traces] == [4, 8, 12]
    assert sizes._known["copied"].closed
