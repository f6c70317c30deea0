"""Tensor parallelism: closed forms, every rank against the one that stands for all, and faults that the law finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import LayoutError
from sim.hardware.platform import Link, Platform, rank_link, shared_link
from sim.layout import lay_out
from sim.rewrites.async_sums import sums_beside_weight_gradients
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from sim.trace.op import Ring
from sim.trace.origin import Along, Slots
from sim.trace.phases import saved_tensors
from tests.rewrites.test_replicas import GB, line, named, op_named, peaks, reading, rebuilt
from tests.rewrites.test_schedules import FAMILIES
from workloads import transformer, with_stack

GPT = {**FAMILIES["gpt2"], "model_type": "gpt2", "activation_function": "gelu"}
LAYOUTS = [
    {"tp": 2},
    {"tp": 4, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "micro_batches": 2},
    {"tp": 2, "pp": 2, "sequence_parallel": True, "keep_gathered": True, "micro_batches": 2},
    {"tp": 2, "dp": 2, "zero": 1, "sum_each": True},
    {"tp": 2, "dp": 2, "pp": 2, "zero": 3, "schedule": "zb_h1", "micro_batches": 2},
]


@cache
def step(family: str = "gpt2") -> Trace:
    config = GPT if family == "gpt2" else {**FAMILIES[family], "model_type": family}
    return transformer(config, batch=4, sequence=16, precision="mixed_bf16", loss="fused")


def among(stages: int, replicas: int, tensor: int, context: int = 1) -> Platform:
    """`line`, with links for the rings of all axes."""
    bare = line(stages, replicas)
    rank_axes = ("tensor", tensor), ("context", context), ("data_context", context)
    axes = [axis for axis, ranks in rank_axes if ranks > 1]
    rings = [Link(rank_link(axis, i), f"hbm@{i}", f"hbm@{i}", GB) for i in range(stages) for axis in axes]
    if context > 1:  # what these ranks exchange and what they sum goes over the same wires
        rings += [Link(shared_link(i), f"hbm@{i}", f"hbm@{i}", GB) for i in range(stages)]
    return replace(bare, links=(*bare.links, *rings))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_rank_stands_for_all(layout: dict) -> None:
    """Same time, same peaks, and the same values: the law checks all ranks without knowing that they are symmetric."""
    trace, _ = lay_out(step(), "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, step())} <= {"repeated"}  # what is not divided, per microbatch
    every = all_ranks(trace)
    assert {each.what for each in departures(every, step())} == {"repeated"}
    stages, replicas, tensor = trace.devices, layout.get("dp", 1), layout["tp"]
    one = peaks(trace, among(stages, replicas, tensor))
    time, held = peaks(every, line(stages * replicas * tensor))
    assert one[0] == time
    assert [peak for peak in one[1] for _ in range(replicas * tensor)] == held


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(("fp32", "amp_bf16", "mixed_bf16", "megatron_bf16")),
    st.sampled_from(("torch", "fused", "vocab_parallel")),
    st.sampled_from(("eager", "sdpa")),
    st.fixed_dictionaries(
        {
            "sequence_parallel": st.booleans(),
            "keep_gathered": st.booleans(),
            "sum_each": st.booleans(),
            "dp": st.sampled_from((1, 2)),
            "pp": st.sampled_from((1, 2)),
            "zero": st.integers(0, 3),
            "micro_batches": st.sampled_from((1, 2)),
            "schedule": st.sampled_from(("1f1b", "gpipe", "naive", "zb_h1")),
        }
    ),
)
def test_any_transformer_in_any_layout_computes_the_same(
    family: str, precision: str, loss: str, attention: str, layout: dict
) -> None:
    config = {**FAMILIES[family], "model_type": family}
    base = transformer(config, batch=4, sequence=16, precision=precision, loss=loss, attention=attention)
    layout["keep_gathered"] &= layout["sequence_parallel"]
    layout["sum_each"] &= not layout["sequence_parallel"]
    trace, _ = lay_out(base, "a100_80_sxm", {"tp": 2, **layout})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"cp": 2, "ring_attention": True}], ids=str)
def test_repeated_keys_and_values_are_divided_by_heads_and_by_tokens(layout: dict) -> None:
    config = {**FAMILIES["llama"], "model_type": "llama"}
    base = transformer(config, batch=2, sequence=16, precision="mixed_bf16", attention="flash_repeat")
    assert any(op.name.endswith(".k.repeat") for op in base.ops)
    assert not departures(lay_out(base, "a100_80_sxm", layout)[0], base)


def test_a_product_of_two_parts_of_one_tensor_is_divided_by_heads() -> None:
    base = transformer(GPT, batch=1, sequence=16, precision="mixed_bf16", attention="eager")
    trace = divide_layers(base, 2)
    assert not departures(trace, base)
    (product,) = [op for op in trace.ops if op.name == "h0.attn.core.qk"]
    assert len(product.reads) == 1
    assert trace.tensors[product.writes[0]].bytes == 2 * 2 * 16 * 16


def test_kernels_are_fused_after_their_ops_are_divided() -> None:
    base = transformer(GPT, batch=4, sequence=16, precision="mixed_bf16", loss="fused", optimizer="adamw_fused")
    layout = {"tp": 2, "dp": 2, "micro_batches": 2, "zero": 1, "sequence_parallel": True}
    trace, _ = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack="fused"))
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert len(trace.ops) < len(lay_out(base, "a100_80_sxm", layout)[0].ops)


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach", "adamw_loop"])
@pytest.mark.parametrize("zero", [0, 1])
def test_fused_updates_of_some_weights_of_a_stage_are_those_of_the_base(optimizer: str, zero: int) -> None:
    """A kernel updates weights that ranks divide and those that they have whole; a stage has some of both."""
    layout = {"tp": 2, "pp": 2, "dp": 2, "zero": zero}
    base = transformer(GPT, batch=8, sequence=16, precision="mixed_bf16", loss="fused", optimizer=optimizer)
    fused = partial(with_stack, stack="fused")
    trace, _ = lay_out(base, "a100_80_sxm", {**layout, "micro_batches": 2}, kernels=fused)
    assert {each.what for each in departures(trace, base)} == {"repeated"}
    origin = trace.origin
    assert origin is not None
    if zero:
        return
    updates = [op for op in trace.ops if op.kind == "optimizer" and isinstance(origin.ops[op.id], Slots)]
    expr = origin.ops[updates[0].id]
    assert isinstance(expr, Slots)
    other = next(k for k in range(expr.count) if k not in expr.slots)
    wrong = [*origin.ops]
    wrong[updates[0].id] = replace(expr, slots=(*expr.slots[:-1], other))
    parts = {"outputs": trace.outputs, "carry": trace.carry, "meta": trace.meta}
    said = Trace(trace.tensor_columns, trace.op_columns, **parts, origin=replace(origin, ops=tuple(wrong)))
    assert "wrong" in {each.what for each in departures(said, base)}


# ---- closed forms ------------------------------------------------------------------------------------


def of_a_layer(trace: Trace, layer: int) -> int:
    """Bytes that forward saves of a layer, but for the statistics of its norms."""
    tensors = (trace.tensors[t] for t in saved_tensors(trace).tolist())
    return sum(t.bytes for t in tensors if t.layer == layer and not t.name.endswith((".mean", ".rstd")))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_saved_bytes_of_a_layer(ranks: int, by_tokens: bool) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)), and with sequence parallelism s b h / t (34 + 5 a s / h)."""
    s, b, h, a = 64, 3, 32, 4
    base = transformer({**GPT, "n_layer": 3}, batch=b, sequence=s, precision="bf16", attention="eager")
    trace = divide_layers(base, ranks, by_tokens)
    expected = s * b * h * (34 if by_tokens else 10 * ranks + 24) // ranks + 5 * a * s * s * b // ranks
    assert of_a_layer(trace, 1) == expected


@pytest.mark.parametrize("ranks", [2, 4])
def test_kept_inputs_are_saved_whole_and_gathered_once(ranks: int) -> None:
    """4 s b h (1 - 1 / t) more for the inputs of attention and MLP; backward gathers gradients alone."""
    s, b, h = 64, 3, 32
    base = transformer({**GPT, "n_layer": 3}, batch=b, sequence=s, precision="bf16", attention="eager")
    again, kept = divide_layers(base, ranks, True), divide_layers(base, ranks, True, keep_gathered=True)
    assert of_a_layer(kept, 1) - of_a_layer(again, 1) == 4 * s * b * h * (ranks - 1) // ranks
    assert [phase for phase, _, _ in traffic(kept, 1)] == ["forward"] * 4 + ["backward"] * 4
    inputs = [t for t in kept.tensors if ".for." in t.name and t.role == "activation" and t.saved_for]
    assert len(inputs) == 2 * 3 + 1  # and of the head
    assert {t.bytes for t in inputs} == {2 * s * b * h}


@pytest.mark.parametrize(("family", "inputs", "linears"), [("llama", 2, 5), ("gpt2", 2, 2), ("bert", 2, 4)])
def test_layers_that_sum_each_for_itself(family: str, inputs: int, linears: int) -> None:
    """A copy per layer divided by columns in place of each input that they share, and as many sums in backward."""
    size = 2 * 4 * 16 * 32
    once, each = divide_layers(step(family), 2), divide_layers(step(family), 2, sum_each=True)
    assert of_a_layer(each, 0) - of_a_layer(once, 0) == (linears - inputs) * size
    assert traffic(each, 1) == [*[("forward", 2, size)] * 2, *[("backward", 2, size)] * linears]
    copies = [op for op in each.ops if op.layer == 1 and op.name.endswith(".copy") and ".for." in op.name]
    assert [op.kind for op in copies] == ["copy"] * linears


@pytest.mark.parametrize("kept", [{"sum_each": True}, {"sequence_parallel": True, "keep_gathered": True}], ids=str)
def test_an_adapter_keeps_what_it_reads_and_not_what_the_frozen_layer_beside_it_copied(kept: dict) -> None:
    """Frozen weights have no gradient, for which an input would be kept; adapters read their own dropout's result."""
    config = {**FAMILIES["llama"], "model_type": "llama"}
    given = {"lora_rank": 2, "lora_dropout": 0.1, "lora_targets": "all-linear"}
    base = transformer(config, batch=4, sequence=16, precision="bf16", loss="fused", **given)
    trace = divide_layers(base, 2, **kept)
    copies = {t.id for t in trace.tensors if ".for." in t.name and t.role == "activation" and "lora" not in t.name}
    assert copies
    assert copies.isdisjoint(saved_tensors(trace).tolist())
    assert not any(trace.tensors[t].saved_for for t in copies)


def test_biases_are_not_copied_under_autocast() -> None:
    base = transformer(GPT, batch=2, sequence=16, precision="amp_bf16", loss="fused")
    names = [op.name for op in divide_layers(base, 2, sum_each=True).ops if op.name.endswith(".copy")]
    assert not [name for name in names if "bias" in name]


def traffic(trace: Trace, layer: int) -> list[tuple[str, int, int]]:
    """Phase, passes and bytes sent of each collective of a layer before the update."""
    ops = [op for op in trace.ops if op.ring is not None and op.layer == layer and op.phase != "update"]
    return [(op.phase, op.ring.passes, op.bytes or 0) for op in ops if op.ring is not None]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_layer_has_four_all_reduces(family: str) -> None:
    trace, size = divide_layers(step(family), 2), 2 * 4 * 16 * 32
    assert traffic(trace, 0) == [*[("forward", 2, size)] * 2, *[("backward", 2, size)] * 2]


def test_a_rank_sends_352_megabytes_per_layer_of_gpt_3() -> None:
    """b = 1, s = 2048, h = 12,288, t = 8: four all-reduces, 4 * 2 (t - 1) / t * 2 b s h bytes."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 12288, "n_head": 96, "n_positions": 2048}
    base = transformer({**config, "vocab_size": 51200}, batch=1, sequence=2048, precision="mixed_fp16", dropout=0)
    sent = sum(size for _, _, size in traffic(divide_layers(base, 8), 0))
    assert sent == 4 * 2 * 7 * 2 * 2048 * 12288 // 8 == 352_321_536
    by_tokens = traffic(divide_layers(base, 8, True), 0)
    one_pass = 7 * 2 * 2048 * 12288 // 8
    assert {size for _, _, size in by_tokens} == {one_pass}
    assert [phase for phase, _, _ in by_tokens] == ["forward"] * 4 + ["backward"] * 6  # two inputs are gathered again


def test_the_loss_exchanges_numbers_of_rows_and_no_logits() -> None:
    trace = divide_layers(step(), 2)
    (found,) = [op for op in trace.ops if op.name == "loss.rows.all_reduce"]
    assert found.bytes == 3 * 4 * (4 * 16)
    assert all("head" not in trace.tensors[t].name for op in trace.ops if op.ring for t in op.writes)


def test_work_of_the_ranks_adds_up() -> None:
    base = step("llama")
    work = {op.name: op.flops for op in base.ops}
    trace = divide_layers(base, 4 // 2)
    for op in trace.ops:
        name = op.name.removesuffix(".0").removesuffix(".1")
        if op.kind in ("matmul", "attention"):
            assert 2 * op.flops == work[name]


# ---- faults that the law finds -----------------------------------------------------------------------


def whats(trace: Trace) -> set[str]:
    return {each.what for each in departures(trace, step())}


def apart(trace: Trace, t: int) -> Trace:
    """The trace with a tensor in a storage of its own."""
    columns = replace(trace.tensor_columns, replaces=trace.tensor_columns.replaces.copy())
    columns.replaces[t] = -1
    return Trace(
        columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin
    )


def test_a_collective_without_a_member_is_wrong() -> None:
    trace = divide_layers(step(), 4)
    first = min(trace.op_columns.ring)
    assert whats(rebuilt(trace, ring={**trace.op_columns.ring, first: Ring("tensor", 3, 2)})) == {"wrong"}


def test_a_term_of_a_sum_is_not_the_sum() -> None:
    trace = divide_layers(step(), 2)
    whole, term = named(trace, "h0.attn.proj.out.summed"), named(trace, "h0.attn.proj.out")
    loose = apart(trace, whole)
    assert whats(loose) == set()
    assert "wrong" in whats(reading(loose, op_named(trace, "h0.attn.dropout"), whole, term))


def test_the_weights_of_another_layer_are_wrong() -> None:
    trace = divide_layers(step(), 2)
    mine, other = named(trace, "h0.mlp.fc.weight"), named(trace, "h1.mlp.fc.weight")
    assert "wrong" in whats(reading(trace, op_named(trace, "h0.mlp.fc"), mine, other))


def test_a_gradient_counted_twice_is_wrong() -> None:
    base = step("llama")
    trace = divide_layers(base, 2)
    add = next(op for op in trace.ops if op.name == "h0.norm1.out.grad.add")
    twice = reading(trace, add.id, add.reads[1], add.reads[0])
    assert "wrong" in {each.what for each in departures(twice, base)}


def test_the_input_of_a_block_must_be_gathered() -> None:
    trace = divide_layers(step(), 2, True)
    whole, own = named(trace, "h0.ln2.out.for.h0.mlp.fc"), named(trace, "h0.ln2.out")
    assert "wrong" in whats(reading(trace, op_named(trace, "h0.mlp.fc"), whole, own))


def test_a_loss_over_part_of_the_vocabulary_is_wrong() -> None:
    trace = divide_layers(step(), 2)
    whole, own = named(trace, "loss.rows"), named(trace, "loss.rows.own")
    loose = apart(trace, whole)
    assert "wrong" in whats(reading(loose, op_named(trace, "loss"), whole, own))


def test_a_norm_is_not_divided_by_columns() -> None:
    trace = divide_layers(step(), 2)
    assert trace.origin is not None
    ops = list(trace.origin.ops)
    norm = op_named(trace, "h0.ln1")
    ops[norm] = Along(ops[norm], "tensor", 0, 1, 2)
    trace.origin = replace(trace.origin, ops=tuple(ops))
    assert "wrong" in whats(trace)


@pytest.mark.parametrize("t", [2, 4])
def test_what_waits_for_the_gradients_of_weights(t: int) -> None:
    """Of a layer 28 s b h / t + 4 s b h bytes between backward and the weight gradients of zero-bubble schedules.

    Inputs of four layers, (2 + 2 + 2 + 8) / t, which are gathered with the weight gradients alone; gradients of what
    is divided by columns, (6 + 8) / t, and two of width h that have been gathered for the gradients of inputs.
    """
    base = step()
    trace, _ = lay_out(base, "a100_80_sxm", {"tp": t, "sequence_parallel": True, "pp": 2, "schedule": "zb_h1",
                                             "micro_batches": 2})  # fmt: skip
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    products = {f"h1.{name}.bwd.weight.mb0" for name in ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")}
    held = set()
    for op in (op for op in trace.ops if op.name in products):
        for read in op.reads[:2]:
            made = trace.ops[int(trace.producer[read])]
            late = made.ring is not None and ".bwd.weight" in made.name
            held |= set(made.reads) if late else {read}
    s, b, h = 16, 4 // 2, GPT["n_embd"]
    assert sum(trace.tensors[each].bytes for each in held) == 28 * s * b * h // t + 4 * s * b * h
    gathers = [
        op.id for op in trace.ops if op.ring is not None and ".bwd.weight" in op.name and op.name.endswith("mb0")
    ]
    last = max(op.id for op in trace.ops if op.device == 1 and op.name == "h1.attn.qkv.bwd.mb0")
    assert len(gathers) >= 2
    assert all(op > last for op in gathers if trace.ops[op].device == 1)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_sums_beside_weight_gradients(family: str, by_tokens: bool) -> None:
    """The same ops and values; a sum is issued before the products for weights, a gather before that for the input."""
    plain, trace = (divide_layers(step(family), 2, by_tokens, beside) for beside in (False, True))
    assert not departures(trace, step(family))
    assert sorted(op.name for op in trace.ops) == sorted(op.name for op in plain.ops)
    assert [op.name for op in trace.ops] != [op.name for op in plain.ops]
    place = {op.name: op.id for op in trace.ops}
    layers = {"gpt2": [["mlp.fc"], ["attn.qkv"]], "llama": [["mlp.up", "mlp.gate"], ["attn.q", "attn.k", "attn.v"]]}
    for together in layers[family]:
        weights = [place[f"h1.{name}.bwd.weight"] for name in together]
        inputs = [place[f"h1.{name}.bwd"] for name in together]
        between = [op for op in trace.ops if op.ring is not None and max(inputs) < op.id < min(weights)]
        assert len(between) == 1
        gathers = {int(trace.producer[trace.ops[op].reads[0]]) for op in weights}
        if by_tokens:
            assert len(gathers) == 1
            assert max(gathers) < min(inputs)


def test_time_of_a_layer_whose_sums_are_beside_its_weight_gradients() -> None:
    """By hand: products and a norm of 3 ms, and a sum of 2, which is hidden beside the product for the weight."""
    b = TraceBuilder({"batch": 1, "sequence": 4, "samples": 1})
    g, w, x = (b.tensor(name, 8, "input") for name in ("g", "h0.mlp.fc.weight", "x"))
    dx, summed, end = (b.tensor(name, 8, "temporary") for name in ("dx", "dx.summed", "end"))
    dw = b.tensor("w.grad", 8, "gradient")
    about = {"phase": "backward", "layer": 0, "duration": 3_000_000}
    b.op("bwd", "matmul", reads=[g, w], writes=[dx], flops=1, **about)
    b.op("bwd.weight", "matmul", reads=[x, g], writes=[dw], flops=1, **about)
    ring = {"ring": Ring("tensor", 2, 2), "bytes": 2_000_000, "group": "sum", "phase": "backward", "layer": 0}
    b.op("sum", "collective", reads=[dx], writes=[summed], **ring)
    b.op("norm.bwd", "norm", reads=[summed], writes=[end], **about)
    plain = b.build(outputs=[end, dw])
    machine = among(1, 1, 2)
    times = [peaks(trace, machine)[0] for trace in (plain, sums_beside_weight_gradients(plain))]
    assert times == [11_000_000, 9_000_000]


# ---- what cannot be divided --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "layout", "said"),
    [
        ({}, {"tp": 3}, r"tp: 3 does not divide heads and columns \(4\); nearest: 2"),
        ({"config": {**GPT, "vocab_size": 127}}, {"tp": 3}, "nearest: 2"),  # the vocabulary need not divide
        ({"sequence": 18}, {"tp": 4, "sequence_parallel": True}, "does not divide the sequence of 18; nearest: 2"),
        ({}, {"sequence_parallel": True}, "divides tokens among the ranks of tp, which is 1; nearest: tp 2"),
        ({}, {"tp": 2, "keep_gathered": True}, "keep_gathered: .* only with sequence_parallel; nearest: false"),
        ({}, {"tp": 2, "sequence_parallel": True, "keep_gathered": 1}, "keep_gathered: needs true or false, has 1"),
        (
            {"precision": "mixed_fp8"},
            {"tp": 2, "sequence_parallel": True, "keep_gathered": True},
            "keep_gathered: in FP8 .* nearest: false",
        ),
        ({}, {"sum_each": True}, "sum_each: needs tp.* nearest: false"),
        ({}, {"tp": 2, "async_sums": True, "sum_each": True}, "sum_each: needs tp.* nearest: false"),
        ({}, {"async_sums": True}, "async_sums: the ranks of tp sum .* nearest: tp 2"),
        ({"stack": "fused"}, {"tp": 2}, "build the trace eager"),
        ({}, {"tp": 0}, "tp: needs a whole number of at least 1, has 0; nearest: 1"),
        ({"config": {**FAMILIES["llama"], "model_type": "llama"}}, {"tp": 4}, r"columns \(2\); nearest: 2"),
    ],
)
def test_a_division_that_there_is_not_names_the_nearest(changes: dict, layout: dict, said: str) -> None:
    given = {"config": GPT, "batch": 4, "sequence": 16, **changes}
    with pytest.raises(LayoutError, match=said):
        lay_out(transformer(**given), "a100_80_sxm", layout)
