"""Microbatches that follow from two before them are what they would be if each were made by itself."""

from __future__ import annotations

from typing import Any

import pytest

from sim.layout import lay_out
from sim.rewrites import batching
from sim.rewrites.batching import split_batch
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.origin import Along, Microbatch, Same, continued
from workloads import transformer

DENSE = {
    "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256, "n_layer": 4,
    "activation_function": "gelu_new",
}  # fmt: skip
MIXTURE = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "micro_batches": 8},
    {"dp": 4, "micro_batches": 8},
    {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 8, "schedule": "gpipe"},
    {"dp": 2, "zero": 3, "micro_batches": 8},
    {"pp": 2, "micro_batches": 8, "chunks": 2, "schedule": "zb_v"},
    {"cp": 2, "dp": 2, "micro_batches": 8},
]


def followed(monkeypatch: pytest.MonkeyPatch, n: int) -> list[int]:
    """How many microbatches each split has had follow, as a list that grows."""
    found: list[int] = []
    go_on = batching._Split._go_on

    def counted(self: Any, *args: Any) -> int:
        found.append(go_on(self, *args))
        return found[-1]

    monkeypatch.setattr(batching._Split, "_go_on", counted)
    return found


def same(one: Trace, other: Trace) -> bool:
    """Whether two traces and their claims are equal, names and ids included."""
    return one.content_hash == other.content_hash and one.origin == other.origin


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_in_layouts(config: dict[str, Any], layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    base = transformer(config, batch=32, sequence=16, precision="mixed_bf16")
    with monkeypatch.context() as patch:
        patch.setattr(batching, "ALIKE", 100)
        each, _ = lay_out(base, "a100_80_sxm", layout)
    counts = followed(monkeypatch, 8)
    assert same(lay_out(base, "a100_80_sxm", layout)[0], each)
    assert counts == [3]


@pytest.mark.parametrize(("batch", "n"), [(6, 6), (12, 6), (20, 5), (7, 7), (33, 11)])
def test_alone(batch: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = transformer(DENSE, batch=batch, sequence=16, precision="amp_bf16")
    with monkeypatch.context() as patch:
        patch.setattr(batching, "ALIKE", 100)
        each = split_batch(base, n)
    assert same(split_batch(base, n), each)


def test_slices_of_unequal_size_do_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = TraceBuilder()
    x = builder.tensor("x", 1000, "input")
    y = builder.tensor("y", 1000)
    builder.op("double", "elementwise", reads=[x], writes=[y], splits=["batch"])
    counts = followed(monkeypatch, 7)
    split = split_batch(builder.build(outputs=[y]), 7)
    assert counts == [0]
    sizes = [t.bytes for t in split.tensors if t.name.startswith("x.mb")]
    assert sizes == [142, 143, 143, 143, 143, 143, 143]


def blocks(*reads: int, name: str = "op.{}", size: int = 8) -> TraceBuilder:
    """Two blocks of a tensor and an op that reads, in the second block, one of these."""
    builder = TraceBuilder()
    builder.tensor("w", 8, "weight")
    builder.marks = []  # type: ignore[attr-defined]
    for k, read in enumerate(reads, 1):
        builder.marks.append(builder.mark())  # type: ignore[attr-defined]
        t = builder.tensor(f"t.{k}", 8 if k == 1 else size)
        builder.op(name.format(k), "elementwise", reads=[read], writes=[t])
    return builder


def test_ids_in_the_blocks_grow_and_others_stay() -> None:
    kept = blocks(0, 0)
    assert kept.continue_series(*kept.marks, number=2, count=2)  # type: ignore[attr-defined]
    assert [op.reads for op in kept.build().ops] == [(0,)] * 4
    chained = blocks(0, 1)
    assert chained.continue_series(*chained.marks, number=2, count=2)  # type: ignore[attr-defined]
    trace = chained.build()
    assert [op.reads for op in trace.ops] == [(0,), (1,), (2,), (3,)]
    assert [op.name for op in trace.ops] == ["op.1", "op.2", "op.3", "op.4"]


@pytest.mark.parametrize("builder", [blocks(0, 2), blocks(0, 0, name="op"), blocks(0, 0, size=16)])
def test_no_series(builder: TraceBuilder) -> None:
    """A read of what neither stays nor grows, a name without its number, another size."""
    assert not builder.continue_series(*builder.marks, number=2, count=2)  # type: ignore[attr-defined]
    assert builder.ops == 2


def test_claims_that_go_on() -> None:
    a, b = Microbatch(Same(3), 2, 3, 9), Microbatch(Same(3), 3, 4, 9)
    assert continued(a, b, 2) == [Microbatch(Same(3), 4, 5, 9), Microbatch(Same(3), 5, 6, 9)]
    total = continued(Microbatch(Same(3), 0, 3, 9), Microbatch(Same(3), 0, 4, 9), 1)
    assert total == [Microbatch(Same(3), 0, 5, 9)]
    assert continued(Along(a, "heads", 0, 1, 2), Along(b, "heads", 0, 1, 2), 1) == [
        Along(Microbatch(Same(3), 4, 5, 9), "heads", 0, 1, 2)
    ]
    assert continued(Same(1), Same(2), 1) == []
    assert continued(a, Microbatch(Same(4), 3, 4, 9), 1) == []
