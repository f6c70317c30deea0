"""Selective recomputation: Megatron's attention core, and PyTorch's list of operations whose results stay."""

from __future__ import annotations

import pytest

from sim.errors import PolicyError
from sim.rewrites.values import departures
from workloads import transformer
from workloads.synthetic import w1

# PyTorch 2.13 with transformers 5.23 under fake tensors, `create_selective_checkpoint_contexts` round every layer,
# measured for this project: largest sum of live storages in one iteration, and repeated kernels (0: not compared)
MEASURED = [
    ("gpt2-small", "eager", 4, 1024, 0.1, "amp_bf16", "adamw_foreach", 6_193_538_560, 0),
    ("gpt2-small", "eager", 4, 1024, 0.1, "fp32", "adamw_foreach", 8_085_569_536, 0),
    ("gpt2-small", "sdpa", 4, 1024, 0.1, "amp_bf16", "adamw_foreach", 4_971_173_376, 300),
    ("gpt2-small", "sdpa", 4, 1024, 0.1, "fp32", "adamw_foreach", 5_655_244_800, 156),
    ("gpt2-medium", "sdpa", 4, 1024, 0.1, "amp_bf16", "adamw_foreach", 9_492_299_264, 600),
    ("gpt2-medium", "sdpa", 4, 1024, 0.1, "bf16", "adamw_foreach", 6_841_158_656, 312),
    ("llama-1b", "sdpa", 2, 2048, 0.0, "bf16", "adamw_foreach", 17_418_942_464, 0),
    ("llama-1b", "sdpa", 8, 1024, 0.0, "bf16", "adamw_fused", 27_422_243_840, 0),
]


@pytest.mark.parametrize(
    ("model", "attention", "batch", "sequence", "dropout", "precision", "optimizer", "peak", "kernels"), MEASURED
)
def test_peak_and_kernels_equal_what_pytorch_was_measured_to_need(
    run, model, attention, batch, sequence, dropout, precision, optimizer, peak, kernels
):
    trace = transformer(
        model,
        batch=batch,
        sequence=sequence,
        attention=attention,
        dropout=dropout,
        precision=precision,
        optimizer=optimizer,
    )
    facts = run(trace, "selective_recompute")
    assert facts.peak == pytest.approx(peak, rel=1e-4)
    if kernels:  # else the trace joins some small kernels in one op
        assert len(facts.rerun) == kernels


def gpt2(**changes):
    settings = {"batch": 2, "sequence": 512, "attention": "eager", "dropout": 0.1, "precision": "bf16"}
    return transformer("gpt2-small", **{**settings, **changes})


def test_core_frees_the_matrices_of_sequence_by_sequence(run):
    trace = gpt2()
    facts = run(trace, "selective_recompute", recompute="attention_core")
    size = trace.tensor_columns.bytes
    matrix = 2 * 12 * 512 * 512  # one byte an entry: batch, heads, sequence, sequence
    log = facts.result.log
    drops = [int(t) for t in log.change("tensor")[log.change("cause") == 3]]
    assert drops
    # of every layer go the softmax's result, what dropout leaves, and its mask: 5 bytes an entry in 16 bits
    per_layer = sum(int(size[t]) for t in drops if size[t] >= matrix) / 12
    assert per_layer >= 5 * matrix


def test_core_runs_products_softmax_and_dropout_again_and_nothing_else(run):
    facts = run(gpt2(), "selective_recompute", recompute="attention_core")
    assert all(".attn.core." in name for name in facts.rerun)
    for layer in range(12):
        mine = [name for name in facts.rerun if name.startswith(f"h{layer}.")]
        assert [n.rsplit(".", 1)[1] for n in mine if n.endswith((".qk", ".softmax", ".av"))] == ["qk", "softmax", "av"]


def test_core_costs_two_products_a_layer(run):
    trace = gpt2()
    facts = run(trace, "selective_recompute", recompute="attention_core")
    products = [op for op in map(trace.op_id, facts.rerun) if trace.ops[op].kind == "matmul"]
    flops = sum(int(trace.op_columns.flops[op]) for op in products)
    assert flops == 12 * 4 * 2 * 512**2 * 768  # 4 b s^2 h a layer
    early = run(trace, "selective_recompute", recompute="attention_core", early_stop=True)
    assert not any(name.endswith(".av") for name in early.rerun)
    assert early.peak == facts.peak


def test_all_three_ways_are_ordered_by_memory_and_by_time(run):
    trace = gpt2(sequence=1024)
    facts = [
        run(trace, "keep_all"),
        run(trace, "selective_recompute", recompute="attention_core"),
        run(trace, "selective_recompute"),
        run(trace, "full_recompute"),
    ]
    assert [f.peak for f in facts] == sorted((f.peak for f in facts), reverse=True)
    assert facts[0].time < min(facts[1].time, facts[2].time)
    assert max(facts[1].time, facts[2].time) < facts[3].time


def test_every_second_product_of_a_deep_stack_is_recomputed(run):
    trace = transformer(
        {
            "model_type": "llama",
            "num_hidden_layers": 300,
            "hidden_size": 16,
            "num_attention_heads": 1,
            "intermediate_size": 32,
            "max_position_embeddings": 8,
            "vocab_size": 32,
        },
        batch=1,
        sequence=8,
    )
    facts = run(trace, "selective_recompute", recompute="every_second_product")
    assert facts.rerun


def test_products_are_never_made_twice(run):
    for trace in (gpt2(), w1(4)):
        facts = run(trace, "selective_recompute")
        assert facts.rerun
        assert {trace.ops[trace.op_id(name)].kind for name in facts.rerun}.isdisjoint({"matmul", "attention", "conv"})


def test_rewritten_trace_computes_the_same_and_takes_no_more_time(run):
    trace = transformer("gpt2-small", batch=1, sequence=128, dropout=0.0, attention="sdpa")
    facts = run(trace, "selective_recompute")
    new = facts.result.plan.trace
    assert new != trace  # the last product of every layer stays in the cache
    assert list(departures(new, trace)) == []
    again = sum(facts.result.log.interval("end")[facts.result.log.interval("why") == 1])
    again -= sum(facts.result.log.interval("start")[facts.result.log.interval("why") == 1])
    assert facts.time == run(trace, "keep_all").time + again


def test_fused_attention_and_nets_without_attention_are_refused(run):
    with pytest.raises(PolicyError, match=r"'h0\.attn\.core' is fused"):
        run(gpt2(attention="sdpa"), "selective_recompute", recompute="attention_core")
    with pytest.raises(PolicyError, match="no op is named"):
        run(w1(2), "selective_recompute", recompute="attention_core")


def test_unknown_mode_is_refused_with_the_nearest(run):
    with pytest.raises(PolicyError, match="attention_core"):
        run(gpt2(), "selective_recompute", recompute="attention_cor")
