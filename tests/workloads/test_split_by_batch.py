"""Transformers and convolution nets say how their ops split by batch, so that `split_batch` makes microbatches of them.

Second source: `transformer(micro_batches=…)`, which builds the same iteration microbatch by microbatch.
"""

from __future__ import annotations

import numpy as np
import pytest

from sim import load_profile
from sim.errors import TraceError
from sim.experiment import reference_run
from sim.rewrites.batching import batch_ops, batched, split_batch
from sim.rewrites.values import departures
from sim.trace.io import load, save
from workloads import cnn, transformer

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 48, "n_head": 2, "vocab_size": 40, "n_positions": 64}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
MACHINE = load_profile("a100_40_pcie")

CASES = [
    (config, options)
    for config in (GPT2, LLAMA, BERT, MIXTRAL)
    for options in (
        {},
        {"precision": "amp_bf16"},
        {"attention": "eager", "precision": "bf16"},
        {"loss": "fused", "precision": "mixed_bf16", "optimizer": "sgd_momentum"},
    )
]


def peak(trace) -> int:
    return int(np.cumsum(reference_run(trace, MACHINE).change("delta")).max())


@pytest.mark.parametrize(("config", "options"), CASES)
@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_compute_what_the_whole_batch_does(config, options, parts):
    whole = transformer(config, batch=4, sequence=32, **options)
    parted = split_batch(whole, parts)
    assert departures(parted, whole) == ()
    glue = sum(op.flops for op in parted.ops if ".sum.add.mb" in op.name)
    assert sum(op.flops for op in parted.ops) == sum(op.flops for op in whole.ops) + glue
    assert peak(parted) < peak(whole)


@pytest.mark.parametrize(("config", "options"), CASES)
def test_they_take_what_microbatches_built_one_by_one_take(config, options):
    mine = split_batch(transformer(config, batch=4, sequence=64, **options), 2)
    other = transformer(config, batch=4, sequence=64, micro_batches=2, **options)
    # those make the small constants again for each microbatch, and autocast's copies of weights
    again = {"amp_bf16": 0.1}.get(options.get("precision", ""), 0.02)
    assert reference_run(mine, MACHINE).end == pytest.approx(reference_run(other, MACHINE).end, rel=again)
    # autograd adds up the gradients of experts after both products of a node; here it follows the first
    exact = "precision" not in options and config is not MIXTRAL
    assert peak(mine) == pytest.approx(peak(other), rel=1e-4 if exact else 0.02)


def test_gradients_of_weights_and_the_loss_are_sums_and_the_rest_has_rows():
    trace = transformer(GPT2, batch=4, sequence=32, precision="amp_bf16")
    rows, by_batch = batched(trace), batch_ops(trace)
    for t in trace.tensors:
        maker = int(trace.producer[t.id])
        if maker < 0 or not by_batch[maker]:
            assert rows[t.id] == (maker < 0 and t.role == "input")
        elif rows[t.id]:
            assert t.shape is None or t.shape[0] % 4 == 0, t.name
            assert ".weight.grad" not in t.name or "cast" in t.name, t.name
        elif t.role == "temporary":  # a part of a gradient that is added up, or the loss's own gradient
            assert any(word in t.name for word in (".weight", ".bias", "wpe.out", "loss.out")), t.name


def test_what_is_no_row_of_a_batch_is_not_cut():
    trace = transformer(GPT2, batch=2, sequence=32)
    rows = batched(trace)
    for name in ("wpe.out", "wpe.out.grad", "wte.weight.grad", "loss.out", "positions", "h0.attn.core.offset"):
        assert not rows[trace.tensor_id(name)], name
    for name in ("wte.out", "dropout.out.grad", "h0.attn.qkv.out", "h1.mlp.fc.out.grad", "loss.log_softmax.out"):
        assert rows[trace.tensor_id(name)], name


def test_the_ways_survive_a_file(tmp_path):
    trace = transformer(GPT2, batch=2, sequence=16)
    save(trace, tmp_path / "trace.jsonl")
    assert load(tmp_path / "trace.jsonl") == trace
    assert {way for ways in trace.op_columns.splits.values() for way in ways} == {"batch", "batch_sum", "rows"}


@pytest.mark.parametrize(("config", "options"), [
    (GPT2, {"loss": "chunked"}),
    (GPT2, {"micro_batches": 2}),
])  # fmt: skip
def test_what_divides_its_tokens_otherwise_is_refused(config, options):
    with pytest.raises(TraceError, match="may not be split by batch"):
        split_batch(transformer(config, batch=4, sequence=16, **options), 2)


def test_rows_of_experts_that_run_one_after_another_are_split_though_no_multiples_of_the_samples():
    whole = transformer({**MIXTRAL, "experts_implementation": "loop"}, batch=4, sequence=16)
    assert any(rows % 4 for rows in whole.meta["expert_loads"][0]["0"])
    assert departures(split_batch(whole, 4), whole) == ()


@pytest.mark.parametrize("name", ["alexnet", "googlenet"])
def test_convolution_nets_split_by_batch_with_the_choices_of_their_convolutions(name):
    whole = cnn(name, 128)
    parted = split_batch(whole, 2)
    assert departures(parted, whole) == ()
    assert peak(parted) < peak(whole)
    # a whole batch's choices are those of a net of that batch; filters, which both have, are a small part of it
    half = cnn(name, 64)
    for op, choices in half.op_columns.alternatives.items():
        mine = {a.name: a for a in parted.ops[parted.op_id(f"{half.ops[op].name}.mb1")].alternatives}
        assert mine.keys() == {a.name for a in choices}
        assert all(0.5 * a.workspace <= mine[a.name].workspace <= a.workspace for a in choices)


@pytest.mark.parametrize("name", ["resnet-50", "inception-v4"])
def test_batch_norm_cannot_be_split_where_nobody_allows_for_statistics_of_parts(name):
    trace = cnn(name, 4)
    whole = {op.name for op in trace.ops if op.phase != "update" and op.splits in ((), ("batch_own",))}
    assert whole == {op.name for op in trace.ops if "norm" in op.name and op.phase != "update"}
    with pytest.raises(TraceError, match=r"norm' reads .*, but may not be split by batch"):
        split_batch(trace, 2)


def test_a_microbatch_has_the_mask_of_its_own_samples() -> None:
    trace = split_batch(transformer(GPT2, batch=4, sequence=16, attention="eager"), 2)
    masks = [t.bytes for t in trace.tensors if t.name.startswith("mask.out")]
    assert masks == [2 * 16 * 16 * 4] * 2
