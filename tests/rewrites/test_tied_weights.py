"""A head that is tied to the embedding, on several stages: what each has, what they exchange, and the law."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from sim import simulate
from sim.layout import lay_out
from sim.rewrites.ranks import all_ranks
from sim.rewrites.values import departures
from sim.trace import Trace
from tests.rewrites.test_replicas import rebuilt
from workloads import transformer, with_stack

H, WORDS = 32, 128
SIZE = H * WORDS
GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": H, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": H, "intermediate_size": 64,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
           "vocab_size": WORDS, "max_position_embeddings": 64, "tie_word_embeddings": True}  # fmt: skip


@cache
def step(precision: str = "mixed_bf16", optimizer: str = "adamw_fused", **options: Any) -> Trace:
    return transformer(GPT2, batch=8, sequence=16, precision=precision, optimizer=optimizer, **options)


def state(trace: Trace) -> list[int]:
    """Bytes of the tied weight, its master and its states on each stage."""
    held = [0] * trace.devices
    for t in trace.tensors:
        readers = trace.readers(t.id)
        if trace.producer[t.id] < 0 and t.name.startswith("wte.") and not t.name.endswith(".step") and readers:
            held[trace.ops[readers[0]].device] += t.bytes
    return held


def what(trace: Trace, base: Trace) -> set[str]:
    return {each.what for each in departures(trace, base)}


@pytest.mark.parametrize("precision", ["mixed_bf16", "amp_bf16", "megatron_bf16"])
@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ({"pp": 2}, (1, 1)),
        ({"pp": 4, "micro_batches": 4}, (1, 0, 0, 1)),
        ({"pp": 2, "micro_batches": 4, "schedule": "interleaved"}, (1, 1)),
        ({"pp": 2, "micro_batches": 4, "schedule": "zb_v"}, (1, 0)),
    ],
    ids=str,
)
def test_the_first_and_the_last_stage_have_the_weight_and_its_states(
    precision: str, layout: dict, stages: tuple[int, ...]
) -> None:
    """16 bytes per parameter but for the gradient; in a V one stage has embedding and head."""
    trace, _ = lay_out(step(precision), "a100_80_sxm", layout)
    each = {"mixed_bf16": 14, "amp_bf16": 12, "megatron_bf16": 14}[precision] * SIZE
    assert state(trace) == [each * number for number in stages]
    assert not [op.name for op in trace.ops if op.kind == "send" and "wte" in op.name]


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach", "adamw_loop"])
def test_a_copy_is_updated_in_place_and_carried_to_the_next_iteration(optimizer: str) -> None:
    trace, _ = lay_out(step(optimizer=optimizer), "a100_80_sxm", {"pp": 2})
    own = [t for t in trace.tensors if trace.producer[t.id] < 0 and t.name.startswith("wte.weight.stage1")]
    assert {t.name.rpartition(".")[2] for t in own} >= {"stage1", "master", "m", "v"}
    last = {first: last for last, first in trace.carry}
    for t in own:
        assert trace.tensors[last[t.id]].replaces == t.id


def test_what_a_copy_takes_of_an_update_of_several_weights() -> None:
    """Of FLOPs and bytes of the stage's ops as much as on one device, and that of the copied weight once more."""
    base = step(optimizer="adamw_foreach")
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 2})
    flops, touched, workspace = (
        [sum(getattr(op, key) or 0 for op in each.ops if op.phase == "update") for each in (base, trace)]
        for key in ("flops", "bytes", "workspace")
    )
    share = SIZE / sum(t.bytes // 2 for t in base.tensors if t.role == "weight" and base.producer[t.id] < 0)
    for before, after in (flops, touched, workspace):
        assert after <= before * (1 + share) * 1.01 + 64


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("precision", "width"), [("mixed_bf16", 2), ("megatron_bf16", 4)])
def test_the_two_sum_their_gradients_once_in_place(dp: int, precision: str, width: int) -> None:
    """An all-reduce of two sends as many bytes as the gradient has; the peak of neither holds a term of the other.

    Megatron-LM's gradients are kept in fp32, to which each microbatch is added.
    """
    trace, platform = lay_out(step(precision), "a100_80_sxm", {"pp": 2, "dp": dp, "micro_batches": 4 // dp})
    members = [op for op in trace.ops if op.kind == "collective" and op.ring is None]
    assert [(op.device, op.bytes, len(op.reads), op.phase) for op in members] == [
        (0, width * SIZE, 1, "backward"),
        (1, width * SIZE, 1, "backward"),
    ]
    added = sorted((op.device, len(op.reads)) for op in trace.ops if op.name.startswith("wte.weight.grad.main"))
    assert added == [(stage, 1 + (k > 0)) for stage in (0, 1) for k in range(4 // dp) if width == 4]
    assert len({op.group for op in members}) == 1
    assert all(trace.tensors[op.writes[0]].replaces == op.reads[0] for op in members)
    rings = [op for op in trace.ops if op.ring is not None and "wte.weight" in op.name]
    assert sorted(op.device for op in rings) == ([0, 1] if dp > 1 else [])
    assert simulate(trace, platform).log.end


LAYOUTS = [
    {"pp": 2},
    {"pp": 4, "dp": 2, "micro_batches": 2, "zero": 1},
    {"pp": 2, "dp": 2, "micro_batches": 2, "zero": 2},
    {"pp": 2, "dp": 2, "micro_batches": 2, "zero": 3, "schedule": "zb_h1"},
    {"pp": 2, "tp": 2, "micro_batches": 2, "gradient_buffer": True},
    {"pp": 2, "dp": 2, "micro_batches": 2, "bucket": "1 KiB"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("options", "stack"),
    [
        ({"precision": "megatron_bf16"}, "fused"),
        ({"precision": "amp_bf16", "optimizer": "adamw_foreach"}, "compiled"),
        ({"optimizer": "adamw_loop"}, "eager"),
        ({"frozen": "wte,wpe"}, "eager"),
    ],
    ids=str,
)
def test_each_stage_updates_its_own_copy_to_the_same(layout: dict, options: dict, stack: str) -> None:
    base = step(**options)
    trace, platform = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack=stack))
    assert what(trace, base) <= {"repeated"}
    assert what(all_ranks(trace), base) <= {"repeated"}
    assert simulate(trace, platform).log.end


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("precision", ["mixed_bf16", "megatron_bf16"])
def test_what_ranks_of_tokens_sum_is_sent_to_the_other_stage(precision: str, zero: int) -> None:
    base = step(precision, attention="flash", dropout=0.0)
    trace, platform = lay_out(base, "a100_80_sxm", {"pp": 2, "dp": 2, "cp": 2, "zero": zero})
    assert what(trace, base) <= {"repeated"}
    assert what(all_ranks(trace), base) <= {"repeated"}
    summed = [op for op in trace.ops if op.ring and any("wte.weight" in trace.tensors[t].name for t in op.writes)]
    assert {op.ring.axis for op in summed if op.ring} == {"data_context"}
    assert simulate(trace, platform).log.end


@pytest.mark.parametrize("more", [{}, {"pp": 4, "schedule": "zb_h1", "micro_batches": 2}], ids=str)
def test_a_sum_in_a_bucket_is_copied_back_before_it_is_sent(more: dict) -> None:
    """With experts divided among replicas the first stage sends the sum, which DDP's bucket holds until then."""
    base = transformer(MIXTRAL, batch=8, sequence=16, precision="mixed_bf16")
    trace, platform = lay_out(base, "a100_80_sxm", {"pp": 2, "dp": 4, "ep": 2, "bucket": "ddp", **more})
    (sent,) = [op for op in trace.ops if op.kind == "send" and op.name.startswith("embed.weight.grad.reduced")]
    assert trace.ops[int(trace.producer[sent.reads[0]])].name == "embed.weight.grad.reduced.copy"
    into, back = ([op for op in trace.ops if op.name.endswith(end)] for end in (".bucket.copy", ".reduced.copy"))
    assert len(into) == len(back)
    assert what(trace, base) <= {"repeated"}
    assert what(all_ranks(trace), base) <= {"repeated"}
    assert simulate(trace, platform).log.end


@pytest.mark.parametrize("policy", ["optimizer_in_backward", "superoffload", "stronghold"])
@pytest.mark.parametrize("layout", [{"zero": 2}, {"zero": 3, "micro_batches": 2}, {"ep": 2}], ids=str)
def test_an_early_update_waits_until_the_first_stage_has_sent_the_sum(layout: dict, policy: str) -> None:
    """The last stage sends what the first one's backward needs before; the first one sends before it overwrites."""
    base = step()
    if "ep" in layout:
        base = transformer(MIXTRAL, batch=8, sequence=16, precision="mixed_bf16", optimizer="adamw_fused")
    run = simulate(*lay_out(base, "a100_80_sxm", {"pp": 2, "dp": 2, **layout}), policy)
    assert what(run.plan.trace, base) <= {"repeated"}


def test_a_stage_that_takes_its_own_term_for_the_sum_is_wrong() -> None:
    trace, _ = lay_out(step(), "a100_80_sxm", {"pp": 2, "micro_batches": 2})
    alone = {op: name for op, name in trace.op_columns.group.items() if not name.endswith("all_reduce")}
    assert what(rebuilt(trace, group=alone), step()) == {"wrong", "repeated"}


def test_more_bytes_than_a_gradient_has_are_wrong_but_in_a_wider_type() -> None:
    base = step("megatron_bf16")
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 2, "micro_batches": 2})
    kept = [t.id for t in trace.tensors if t.name.startswith("wte.weight.grad.part.main")]
    types = ["bf16" if t in kept else dtype for t, dtype in enumerate(trace.tensor_columns.dtype)]
    columns = replace(trace.tensor_columns, dtype=tuple(types))
    narrow = Trace(
        columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin
    )
    assert kept
    assert what(trace, base) == {"repeated"}
    assert what(narrow, base) == {"wrong", "repeated"}
