"""What fused attention executes under a causal mask, and what is counted: by closed forms, brute force, PyTorch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sim.errors import TraceError, WorkloadError
from sim.hardware.cost import op_times
from sim.hardware.profile import load_profile
from sim.rewrites.batching import split_batch
from sim.rewrites.tensor_parallel import divide_layers
from sim.trace.builder import TraceBuilder
from sim.trace.io import load, save
from workloads import transformer
from workloads.costs import pairs
from workloads.importers.aten import executed_of, is_causal

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 1 << 20,
}  # fmt: skip
BERT = {
    "model_type": "bert", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 2048,
}  # fmt: skip


def cores(config=LLAMA, **options):
    """The ops of the attention core, forward first."""
    given = {"batch": 2, "sequence": 1024, "precision": "bf16", "attention": "flash", **options}
    return [op for op in transformer(config, **given).ops if op.kind == "attention"]


def seen(queries, keys, window):
    """Which key each query sees."""
    i, j = np.ogrid[:queries, :keys]
    return (j <= i) & ((j > i - window) if window else True)


@pytest.mark.parametrize(
    ("queries", "keys", "tile"), [(1, 1, 1), (7, 7, 3), (8, 5, 4), (5, 9, 2), (23, 6, 2), (30, 11, 3), (29, 40, 4)]
)
@pytest.mark.parametrize("window", [0, 1, 3, 7, 20])
def test_pairs_are_those_of_the_blocks_that_are_not_all_masked(queries, keys, tile, window):
    mask, found = seen(queries, keys, window), 0
    for first in range(0, queries, tile):
        rows = mask[first : first + tile]
        at = np.flatnonzero(rows.any(axis=0))
        # from the first block with a key to the last query, which is the diagonal's end
        stop = min(first + len(rows), keys)
        found += len(rows) * (stop - at[0] // tile * tile) if len(at) else 0
    assert pairs(queries, keys, causal=True, window=window, tile=tile) == found
    assert mask.sum() <= found <= queries * keys == pairs(queries, keys)


def test_they_are_counted_at_once_however_many_there_are():
    many = 2**40
    assert pairs(many, many, causal=True) == many * (many + 128) // 2
    with pytest.raises(WorkloadError, match="2\\*\\*63 or more"):
        transformer({**LLAMA, "max_position_embeddings": many}, batch=1, sequence=many)


@pytest.mark.parametrize("sequence", [128, 1024, 16384])
def test_flash_attention_executes_the_half_and_its_diagonal(sequence):
    """n (n + 128) / 2 pairs of 4 d FLOPs a head, backward 5 products for 2; grouped queries change nothing."""
    forward, backward = cores(sequence=sequence)
    assert forward.flops == 2 * 4 * 4 * 16 * sequence * (sequence + 128) // 2
    assert backward.flops == forward.flops * 5 // 2
    counted = 2 * 4 * 4 * 16 * sequence**2
    assert forward.counted in (counted, None)  # one block is computed in full
    assert (forward.counted or forward.flops, backward.counted or backward.flops) == (counted, counted * 5 // 2)


def test_what_has_no_causal_mask_or_no_fused_kernel_computes_all_scores():
    assert [op.counted for op in cores(BERT)] == [None, None]
    composed = transformer(LLAMA, batch=2, sequence=1024, precision="bf16", attention="eager")
    products = [op for op in composed.ops if op.name.endswith((".core.qk", ".core.av"))]
    assert [op.flops for op in products] == [2 * 2 * 4 * 16 * 1024**2] * 2
    assert not composed.op_columns.counted


def test_the_memory_efficient_kernel_has_smaller_blocks():
    forward, _ = cores({**LLAMA, "num_key_value_heads": 4}, precision="fp32", attention="sdpa")
    assert forward.flops == 2 * 4 * 4 * 16 * 1024 * (1024 + 64) // 2


def test_a_sliding_window_is_a_band():
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 256}
    forward, _ = cores(config, sequence=4096)
    # the first two blocks see 128 and 256 keys, each further one 3 blocks: its own, the one before, a part of a third
    assert forward.flops == 2 * 4 * 4 * 16 * 128 * (128 + 256 + 30 * 384)
    with pytest.raises(WorkloadError, match="flash"):
        cores(config, sequence=4096, attention="sdpa")


def test_a_prompt_is_masked_and_a_token_sees_all():
    ops = cores(sequence=1024, generate=3)
    assert ops[0].flops == 2 * 4 * 4 * 16 * 1024 * (1024 + 128) // 2
    assert [op.flops for op in ops[1:]] == [2 * 4 * 4 * 16 * 1025, 2 * 4 * 4 * 16 * 1026]


def test_time_follows_what_is_executed_and_model_flops_what_is_counted():
    trace = transformer(LLAMA, batch=2, sequence=16384, precision="bf16", attention="flash")
    op = next(op for op in trace.ops if op.kind == "attention")
    unit = load_profile("a100_80_sxm").engines[0]
    rate = unit.peak["bf16"] * unit.efficiency["attention"]
    memory = trace.touched[op.id] / (unit.bandwidth_share.get("attention", unit.bandwidth_share[""]) * 2039e9)
    seconds = op_times(trace, load_profile("a100_80_sxm")).total[op.id] / 1e9
    assert seconds == pytest.approx(unit.launch / 1e9 + op.flops / rate + memory, rel=0.01)
    dense = 3 * 2 * 2 * 16384 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 64 * 97)
    assert trace.meta["model_flops"] == dense + 3 * 2 * 4 * 4 * 16 * 16384**2
    products = np.isin(trace.op_columns.kind, [0, 1])
    assert trace.counted_flops[products].sum() == trace.meta["model_flops"] + 2 * 2 * 4 * 16 * 16384**2  # recomputed


def test_rewrites_divide_both_alike():
    whole = transformer(LLAMA, batch=2, sequence=1024, precision="bf16", attention="flash")
    for half in (divide_layers(whole, 2), split_batch(whole, 2)):
        for op in half.ops:
            if op.kind == "attention":
                assert op.counted / op.flops == pytest.approx(2 * 1024 / (1024 + 128))
        ranks = 2 if half.origin.tensor == 2 else 1
        both = [sum(op.counted or 0 for op in trace.ops) for trace in (whole, half)]
        assert both[0] == ranks * both[1]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_files_keep_both_and_old_ones_load(tmp_path, suffix):
    trace = transformer(LLAMA, batch=2, sequence=1024, precision="bf16", attention="flash")
    path = tmp_path / f"trace{suffix}"
    save(trace, path)
    again = load(path)
    assert again == trace
    assert dict(again.op_columns.counted) == dict(trace.op_columns.counted) != {}


def test_fewer_counted_than_executed_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    head = {"format": "tiersim trace", "version": 1}
    lines = [
        head,
        {"tensor": "x", "bytes": 8},
        {"op": "f", "kind": "attention", "writes": ["x"], "flops": 9, "counted": 8},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError, match=r"line 3: op 'f': .*counted is 8, fewer than its 9 FLOPs"):
        load(path)
    with pytest.raises(TraceError, match="counted is 8"):
        TraceBuilder().op("f", flops=9, counted=8)


def test_counted_flops_belong_to_the_content():
    def made(counted):
        b = TraceBuilder()
        b.op("f", "attention", flops=9, counted=counted)
        return b.build()

    assert made(None) == made(9) != made(18)


def test_a_captured_attention_says_whether_it_is_causal():
    torch = pytest.importorskip("torch")
    from workloads.capture import capture

    attention = torch.nn.functional.scaled_dot_product_attention

    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Parameter(torch.empty(2, 4, 512, 16))

        def forward(self, mask):
            half = self.q.bfloat16()
            masked = attention(self.q, self.q, self.q, attn_mask=mask)
            return masked.sum() + attention(half, half, half).sum() + attention(half, half, half, is_causal=True).sum()

    full, causal = 4 * 2 * 4 * 16 * 512**2, 4 * 2 * 4 * 16 * 512 * (512 + 128) // 2
    trace = capture(Attends, (torch.empty(512, 512),), kernels="cuda")
    ops = [op for op in trace.ops if op.kind == "attention"]
    for phase, products in (("forward", 2), ("backward", 5)):
        flops = sorted(op.flops for op in ops if op.phase == phase)
        assert flops == [each * products // 2 for each in (causal, full, full)]
    assert trace.meta["model_flops"] == 3 * full * 7 // 2


def test_recorded_calls_say_it_where_pytorchs_schema_has_it():
    torch = pytest.importorskip("torch")
    from workloads.importers.aten import CAUSAL

    for name, place in CAUSAL.items():
        assert getattr(torch.ops.aten, name).default._schema.arguments[place].name == "is_causal"
    name = "aten::_scaled_dot_product_flash_attention"
    for value, yes in ((True, True), ("True", True), (False, False), ("", False), ([], False)):
        assert is_causal(name, [0, 0, 0, 0.0, value]) is yes
    assert not is_causal("aten::_scaled_dot_product_attention_math", [0, 0, 0, 0, 0, True])
    assert executed_of(name, [(1, 1, 256, 8)] * 3, 4 * 256**2 * 8, True) == 4 * 256 * 384 // 2 * 8


@pytest.mark.parametrize("shared", [2, 1])
def test_repeated_keys_and_values_are_saved_as_pytorch_saves_them(shared):
    """Where keys and values are expanded before the kernel, as torchtune and torchtitan do, it saves the copies.

    One head for all of them is expanded by a view.
    """
    torch = pytest.importorskip("torch")
    batch, heads, sequence, head = 2, 4, 128, 16
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    q, k, v = (
        torch.randn(batch, n, sequence, head, dtype=torch.bfloat16, requires_grad=True) for n in (heads, shared, shared)
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        k, v = (x.unsqueeze(2).expand(-1, -1, heads // shared, -1, -1).flatten(1, 2) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.grad_fn is not None

    config = {**LLAMA, "num_key_value_heads": shared}
    trace = transformer(config, batch=batch, sequence=sequence, precision="bf16", attention="flash_repeat")
    forward, backward = cores(config, batch=batch, sequence=sequence, attention="flash_repeat")
    sizes = trace.tensor_columns.bytes
    both = [*forward.reads, *(t for t in forward.writes if t in backward.reads)]
    assert sum(int(sizes[t]) for t in both) == sum(saved.values()) + 24  # PyTorch keeps the seed and its offset on CUDA
    assert [op.flops for op in cores(attention="flash_repeat")] == [op.flops for op in cores()]


@pytest.mark.parametrize(
    ("config", "options"), [({**LLAMA, "num_key_value_heads": 4}, {}), (BERT, {})], ids=["llama", "bert"]
)
def test_with_as_many_heads_of_keys_nothing_is_repeated(config, options):
    flash, repeat = (
        transformer(config, batch=2, sequence=128, precision="bf16", attention=name, **options)
        for name in ("flash", "flash_repeat")
    )
    assert [op.name for op in flash.ops] == [op.name for op in repeat.ops]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"precision": "fp32"}, "computes in 16 bits"), ({"precision": "bf16", "generate": 2}, "nearest: 'flash'")],
)
def test_repeating_is_refused_where_no_flash_attention_trains(options, message):
    with pytest.raises(WorkloadError, match=message):
        transformer(LLAMA, batch=1, sequence=16, attention="flash_repeat", **options)
