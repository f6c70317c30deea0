"""Traces of transformers: their structure, their FLOPs, their precisions, optimizers and losses."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import WorkloadError
from tests.clocks import cpu_s, least
from workloads import model_names, read_config, transformer
from workloads.experts import routing
from workloads.losses import LOSSES

TINY = {
    "gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 101},
    "bert": {
        "model_type": "bert",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "vocab_size": 101,
    },
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 101,
    },
    "qwen2": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 101,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 101,
    },
    "deepseek": {
        "model_type": "deepseek",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "experts_implementation": "loop",
        "vocab_size": 101,
    },
}


@cache
def tiny(family, **options):
    return transformer(TINY[family], **{"batch": 2, "sequence": 16, **options})


every_family = pytest.mark.parametrize("family", TINY)


VARIANTS = (
    {"precision": "bf16"},
    {"precision": "fp32", "loss": "fused", "batch": 1},
    {"precision": "fp32", "attention": "eager", "dropout": 0.1, "loss": "chunked", "batch": 1},
    {"precision": "amp_bf16", "attention": "eager", "dropout": 0.1},
    {"precision": "amp_fp16", "loss": "fused", "micro_batches": 2},
    {"precision": "mixed_bf16", "loss": "chunked", "micro_batches": 2, "optimizer": "adamw_loop"},
    {"precision": "mixed_fp16", "optimizer": "sgd_momentum"},
    {"precision": "fp16", "optimizer": "adamw_fused"},
    {"precision": "mixed_bf16", "optimizer": "adafactor"},
    {"precision": "amp_bf16", "optimizer": "adamw_8bit"},
)
every_variant = pytest.mark.parametrize(
    ("family", "options"), [(family, options) for family in TINY for options in VARIANTS], ids=str
)


# ---- structure ---------------------------------------------------------------------------------


@every_variant
def test_every_weight_gets_one_gradient_of_its_size_and_is_replaced_once(family, options):
    trace = tiny(family, **options)
    tensors = list(trace.tensors)
    final = Counter()
    replaced = {t.replaces for t in tensors if t.replaces is not None}
    for t in tensors:
        if t.role == "gradient" and t.id not in replaced and ".grad.part" not in t.name:  # a part is added to another
            name = t.name.split(".grad")[0]
            assert t.bytes == trace.tensors[trace.tensor_id(name)].bytes
            final[name] += 1
    weights = [t.name for t in tensors if t.role == "weight" and t.replaces is None]
    assert final == Counter(weights)
    assert {t.name for t in tensors if t.role == "weight" and t.replaces is not None} == {f"{w}.new" for w in weights}


@every_variant
def test_what_is_marked_saved_is_what_backward_reads(family, options):
    trace = tiny(family, **options)
    forward = {t for op in trace.ops if op.phase == "forward" for t in op.writes}
    read = {t for op in trace.ops if op.phase == "backward" for t in op.reads}
    loss = {t.id for t in trace.tensors if t.role == "activation" and t.bytes <= 4}  # the loss starts the backward pass
    inputs = {t.id for t in trace.tensors if t.role == "input"}
    marked = {t.id for t in trace.tensors if t.saved_for}
    assert (read & (forward | inputs)) - loss == marked - loss


@every_variant
def test_a_layer_can_be_run_again_from_its_input(family, options):
    # what a layer makes forward is read outside it only as its output; what it reads was made by the layer
    # before, or is shared by all
    trace = tiny(family, **options)
    ops = list(trace.ops)
    for part in range(options.get("micro_batches", 1)):
        prefix = f"mb{part}." if "micro_batches" in options else ""
        for layer in range(3):
            inside = [o for o in ops if o.phase == "forward" and o.layer == layer and o.name.startswith(prefix)]
            made = {t for o in inside for t in o.writes}
            readers = {t: {ops[r].layer for r in trace.readers(t)} for t in made}
            leaving = [trace.tensors[t].name for t in made if readers[t] - {layer}]
            assert leaving == [f"{prefix}h{layer}.{'ln2' if family == 'bert' else 'mlp.add'}.out"]
            for t in {t for o in inside for t in o.reads} - made:
                tensor = trace.tensors[t]
                assert tensor.role == "weight" or tensor.layer == -1 or tensor.layer == layer - 1


@every_variant
def test_phases_follow_one_another_and_every_op_has_a_dtype_that_platforms_know(family, options):
    trace = tiny(family, **options)
    order = [("forward", "backward", "update").index(op.phase) for op in trace.ops]
    if "micro_batches" not in options:
        assert order == sorted(order)
    assert order[-1] == 2
    assert {op.dtype for op in trace.ops} <= {"", "fp32", "bf16", "fp16"}
    assert all(op.dtype for op in trace.ops if op.flops and op.kind in ("matmul", "attention", "optimizer"))


@every_family
def test_layers_are_numbered_and_the_rest_is_minus_one(family):
    trace = tiny(family, precision="amp_bf16")
    for op in trace.ops:
        head = op.name.split(".")[0]
        numbered = head[0] == "h" and head[1:].isdigit()
        if ".grad.add" not in op.name:  # runs where the second gradient arrives: in the layer that read it
            assert op.layer == (int(head[1:]) if numbered else -1), op.name
        if op.phase == "update":
            assert op.layer == -1


@every_family
def test_gradients_of_activations_are_temporary_and_die_in_the_backward_pass(family):
    trace = tiny(family)
    for t in trace.tensors:
        last = trace.ops[int(trace.last_use[t.id])]
        if t.role == "temporary" and ".denominator" not in t.name:
            assert last.phase == "backward", t.name
        if t.role == "activation":
            assert last.phase in ("forward", "backward")


@every_family
def test_the_eager_core_is_named_and_the_fused_one_is_one_op(family):
    eager = [o.name for o in tiny(family, attention="eager", dropout=0.1).ops if ".attn.core." in o.name]
    for step in ("qk", "scale", "softmax", "dropout", "av"):
        assert f"h1.attn.core.{step}" in eager
    fused = [o for o in tiny(family, precision="bf16").ops if o.kind == "attention" and o.phase == "forward"]
    assert [o.name for o in fused] == [f"h{i}.attn.core" for i in range(3)]


def test_only_dropout_and_attention_with_dropout_are_random():
    trace = tiny("gpt2", dropout=0.1)
    assert {o.name.split(".", 1)[-1] for o in trace.ops if o.random} == {
        "dropout",
        "attn.core",
        "attn.dropout",
        "mlp.dropout",
    }
    assert not any(o.random for o in tiny("gpt2", dropout=0).ops)


def test_the_same_arguments_make_the_same_trace():
    again = transformer(TINY["mixtral"], batch=2, sequence=16, routing_skew=1.0, routing_seed=3)
    same = transformer(TINY["mixtral"], batch=2, sequence=16, routing_skew=1.0, routing_seed=3)
    other = transformer(TINY["mixtral"], batch=2, sequence=16, routing_skew=1.0, routing_seed=4)
    assert again.content_hash == same.content_hash != other.content_hash


def test_the_trace_says_what_it_stands_for():
    meta = tiny("gpt2", precision="amp_bf16", micro_batches=2).meta
    assert meta["tokens"] == 32
    assert meta["samples"] == 2
    want = {"family": "gpt2", "batch": 2, "sequence": 16, "precision": "amp_bf16", "attention": "sdpa", "loss": "torch"}
    assert {k: meta[k] for k in want} == want
    assert {"model", "optimizer", "parameters", "model_flops", "source"} <= set(meta)


# ---- FLOPs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in model_names() if "mix" not in n and "deepseek" not in n])
def test_flops_are_6_n_a_token_plus_attention(name):
    config = read_config(name)
    sequence = min(config.positions, 2048)
    trace = transformer(name, batch=1, sequence=sequence)
    # parameters that multiply: all but tables that are looked up (a tied table multiplies as the head)
    looked_up = 0 if config.tied else config.vocabulary * config.hidden
    if config.family in ("gpt2", "bert"):
        looked_up += config.positions * config.hidden
    dense = 6 * (trace.meta["parameters"] - looked_up) * sequence
    attention = 12 * config.layers * config.heads * config.head * sequence**2
    assert trace.meta["model_flops"] == pytest.approx(dense + attention, rel=0.02)


def test_experts_cost_what_is_active():
    trace = transformer("mixtral-8x7b", batch=1, sequence=2048, precision="bf16")
    idle = 32 * 6 * 3 * 4096 * 14336  # six of eight experts of each layer
    table = 32000 * 4096
    dense = 6 * (trace.meta["parameters"] - idle - table) * 2048
    assert trace.meta["model_flops"] == pytest.approx(dense + 12 * 32 * 4096 * 2048**2, rel=0.02)


@every_family
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_backward_takes_twice_the_products_of_forward(family, precision):
    trace = tiny(family, precision=precision, attention="eager")
    flops = Counter()
    for op in trace.ops:
        if op.kind == "matmul":
            flops[op.phase] += op.flops
    assert flops["backward"] == 2 * flops["forward"]
    assert sum(flops.values()) == trace.meta["model_flops"]


def test_every_loss_has_the_same_model_flops():
    assert len({tiny("llama", loss=loss).meta["model_flops"] for loss in LOSSES}) == 1


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_microbatches_do_the_same_work_and_hold_less(parts):
    trace = transformer(TINY["gpt2"], batch=4, sequence=16, micro_batches=parts)
    whole = transformer(TINY["gpt2"], batch=4, sequence=16)
    assert trace.meta["model_flops"] == whole.meta["model_flops"]
    assert saved_bytes(trace, "mb0." if parts > 1 else "") * parts == pytest.approx(saved_bytes(whole, ""), rel=0.01)


def saved_bytes(trace, prefix):
    return sum(t.bytes for t in trace.tensors if t.saved_for and t.name.startswith(prefix))


# ---- precisions and optimizers -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "weight", "gradient", "state"),
    [
        ("fp32", 4, 4, 8),
        ("bf16", 2, 2, 4),
        ("fp16", 2, 2, 4),
        ("amp_bf16", 4, 4, 8),
        ("amp_fp16", 4, 4, 8),
        ("mixed_bf16", 2, 2, 12),
        ("mixed_fp16", 2, 2, 12),
        ("megatron_bf16", 2, 4, 12),
    ],
)
def test_bytes_a_parameter(precision, weight, gradient, state):
    trace = tiny("gpt2", precision=precision)
    n = trace.meta["parameters"]
    start = [t for t in trace.tensors if trace.producer[t.id] < 0]
    assert sum(t.bytes for t in start if t.role == "weight") == weight * n
    assert sum(t.bytes for t in start if t.role == "optimizer_state") == state * n
    whole = [t for t in trace.tensors if t.role == "gradient" and ".grad.part" not in t.name]
    assert sum(t.bytes for t in whole) == gradient * n


def test_main_gradients_are_summed_in_fp32_and_read_by_the_optimizer_as_they_are():
    """Megatron-LM's main_grad: no 16-bit gradient outlives its addition, and no copy is made for the update."""
    for parts in (1, 3):
        trace = tiny("llama", batch=3, precision="megatron_bf16", micro_batches=parts)
        parts_of = [t for t in trace.tensors if t.role == "gradient" and ".grad.part" in t.name]
        assert {t.dtype for t in parts_of} == {"bf16"}
        assert not any(trace.ops[op].phase == "update" for t in parts_of for op in trace.readers(t.id))
        read = {t for op in trace.ops if op.phase == "update" for t in op.reads if trace.tensors[t].role == "gradient"}
        assert {trace.tensors[t].dtype for t in read} == {"fp32"}
        assert len(read) == len([t for t in trace.tensors if t.role == "weight" and t.replaces is None])


def test_autocast_copies_a_weight_once_and_an_activation_for_each_product():
    trace = tiny("llama", precision="amp_bf16")
    copies = [
        o.name for o in trace.ops if o.phase == "forward" and o.name.startswith("h1.") and o.name.endswith(".cast")
    ]
    weights = [
        f"h1.{m}.weight.cast" for m in ("attn.q", "attn.k", "attn.v", "attn.proj", "mlp.gate", "mlp.up", "mlp.down")
    ]
    inputs = [f"h1.{m}.input.cast" for m in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")]
    rotated = ["h1.attn.q.cast", "h1.attn.k.cast"]  # rotary positions are fp32
    assert Counter(copies) == Counter(weights + inputs + rotated)


def test_a_cached_copy_of_a_weight_is_made_again_in_the_next_microbatch():
    names = [o.name for o in tiny("gpt2", precision="amp_bf16", micro_batches=2).ops]
    assert "mb0.h1.mlp.fc.weight.cast" in names
    assert "mb1.h1.mlp.fc.weight.cast" in names


def test_a_tied_weight_sums_two_gradients_out_of_place():
    trace = tiny("gpt2")
    op = trace.ops[trace.op_id("wte.weight.grad.add")]
    assert [trace.tensors[t].role for t in op.reads] == ["gradient", "gradient"]
    assert [trace.tensors[t].role for t in op.writes] == ["gradient"]
    assert trace.tensors[op.writes[0]].replaces is None


def test_accumulation_adds_in_place():
    trace = tiny("gpt2", micro_batches=2)
    op = trace.ops[trace.op_id("mb1.h1.mlp.fc.weight.grad.accumulate")]
    total = trace.tensors[op.writes[0]]
    assert total.replaces == op.reads[0]
    assert trace.tensors[op.reads[1]].role == "gradient"


# ---- losses ------------------------------------------------------------------------------------


def logits_saved(loss, precision):
    trace = transformer(TINY["gpt2"], batch=4, sequence=32, precision=precision, loss=loss)
    rows = 4 * 32
    return sum(t.bytes for t in trace.tensors if t.saved_for and t.shape and t.shape[-1] == 101) // (rows * 101)


@pytest.mark.parametrize(
    ("loss", "precision", "bytes_each"),
    [("torch", "fp32", 4), ("torch", "bf16", 4), ("fused", "fp32", 4), ("fused", "bf16", 2), ("chunked", "bf16", 0)],
)
def test_what_a_loss_keeps_of_the_logits(loss, precision, bytes_each):
    assert logits_saved(loss, precision) == bytes_each


def test_chunks_cover_all_tokens():
    trace = transformer(TINY["gpt2"], batch=40, sequence=64, loss="chunked")
    chunks = [o for o in trace.ops if o.name.startswith("head.chunk") and o.kind == "matmul" and "bwd" not in o.name]
    assert len(chunks) == 3  # 2560 tokens, 1024 at a time
    assert sum(o.flops for o in chunks) == 2 * 2560 * 32 * 101


# ---- experts -----------------------------------------------------------------------------------


@given(
    tokens=st.integers(1, 500),
    experts=st.integers(1, 12),
    chosen=st.integers(1, 12),
    seed=st.integers(0, 99),
    skew=st.floats(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_loads_sum_to_tokens_times_k_and_no_expert_has_more_than_all_tokens(tokens, experts, chosen, seed, skew):
    chosen = min(chosen, experts)
    config = read_config({**TINY["mixtral"], "num_local_experts": experts, "num_experts_per_tok": chosen})
    loads = routing(config, tokens, seed=seed, skew=skew)
    assert set(loads) == {0, 1, 2}
    for load in loads.values():
        assert len(load) == experts
        assert sum(load) == tokens * chosen
        assert max(load) <= tokens


def test_skew_makes_loads_uneven_and_the_seed_moves_them():
    config = read_config("mixtral-8x7b")
    even, skewed = (routing(config, 4096, seed=0, skew=skew)[0] for skew in (0.0, 1.5))
    assert np.std(even) < 0.1 * np.mean(even)
    assert np.std(skewed) > 0.5 * np.mean(skewed)
    assert skewed != routing(config, 4096, seed=1, skew=1.5)[0]


def test_each_expert_of_a_loop_multiplies_its_own_rows():
    trace = tiny("deepseek", routing_skew=1.0)
    loads = trace.meta["expert_loads"][0]
    assert set(loads) == {"1", "2"}  # the first layer is dense
    for layer, load in loads.items():
        for expert, rows in enumerate(load):
            ops = [o for o in trace.ops if o.name == f"h{layer}.mlp.expert{expert}.gate"]
            assert [o.flops for o in ops] == ([2 * rows * 32 * 24] if rows else [])


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": 0}, "batch: needs an integer of at least 1, has 0; nearest: 1"),
        ({"batch": 2.5}, "batch: needs an integer of at least 1, has 2.5; nearest: 2"),
        ({"batch": True}, "batch: needs an integer of at least 1, has True"),
        ({"sequence": -4}, "sequence: needs an integer of at least 1, has -4; nearest: 1"),
        ({"sequence": 65}, "sequence: 65 is longer than the 64 positions of 'gpt2'; nearest: 64"),
        ({"micro_batches": 3}, "micro_batches: 3 does not divide batch 2; nearest: 2"),
        ({"precision": "amp_bf61"}, "precision 'amp_bf61' is unknown (did you mean 'amp_bf16'?)"),
        ({"attention": "egaer"}, "attention 'egaer' is unknown (did you mean 'eager'?)"),
        ({"optimizer": "adamw_forech"}, "optimizer 'adamw_forech' is unknown (did you mean 'adamw_foreach'?)"),
        ({"loss": "chunkd"}, "loss 'chunkd' is unknown (did you mean 'chunked'?)"),
        ({"dropout": 1}, "dropout: needs a number from 0 up to 1, has 1; nearest: 0.99"),
        ({"routing_skew": -1.0}, "routing_skew: needs a number of at least 0, has -1.0"),
    ],
)
def test_a_bad_argument_is_named_with_the_nearest_good_one(change, text):
    with pytest.raises(WorkloadError) as error:
        transformer(TINY["gpt2"], **{"batch": 2, "sequence": 16, **change})
    assert str(error.value) == text


def test_flash_attention_in_fp32_is_refused():
    with pytest.raises(WorkloadError, match="attention 'flash' computes in 16 bits"):
        tiny("gpt2", attention="flash")


def test_integers_of_numpy_are_integers():
    trace = transformer(TINY["gpt2"], batch=np.int64(2), sequence=np.int32(16))
    assert trace == tiny("gpt2")


# ---- speed -------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize(("name", "seconds"), [("gpt2-xl", 1.5), ("gpt3-175b", 3.0)])
def test_large_traces_are_built_in_seconds(name, seconds):
    assert (
        least(seconds, lambda: cpu_s(lambda: transformer(name, batch=1, sequence=1024, precision="amp_bf16"))) < seconds
    )


@pytest.mark.parametrize(("name", "precision"), [("gpt2-xl", "amp_bf16"), ("gpt3-175b", "mixed_fp16")])
def test_large_traces_have_an_op_count_that_grows_with_layers_only(name, precision):
    small, large = (transformer(name, batch=1, sequence=s, precision=precision) for s in (64, 1024))
    assert len(small.ops) == len(large.ops) < 6000


def test_experts_without_tokens_keep_their_weights_and_states() -> None:
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "experts_implementation": "loop",
    }
    trace = transformer(config, batch=1, sequence=2, precision="bf16")
    (load,) = trace.meta["expert_loads"][0].values()
    idle = [expert for expert, tokens in enumerate(load) if not tokens]
    assert idle
    for t in trace.tensors:
        if ".expert" in t.name and t.role in ("weight", "optimizer_state", "gradient"):
            used = not any(f".expert{expert}." in t.name for expert in idle)
            assert bool(trace.readers(t.id)) or trace.producer[t.id] >= 0 or not used
            assert used or (t.role != "gradient" and not trace.readers(t.id) and trace.replaced_by[t.id] < 0)
    held = sum(t.bytes for t in trace.tensors if t.role == "optimizer_state" and t.replaces is None)
    assert held == 2 * sum(t.bytes for t in trace.tensors if t.role == "weight" and t.replaces is None)


def test_an_expert_that_no_token_of_the_first_microbatch_chose_has_a_gradient_all_the_same():
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 150,
        "max_position_embeddings": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    }
    trace = transformer(config, batch=4, sequence=1, micro_batches=4)
    loads = [layers["0"] for layers in trace.meta["expert_loads"]]
    assert 0 in loads[0]
    assert any(not first and any(later) for first, *later in zip(*loads, strict=True))
    read = {trace.tensors[t].name for op in trace.ops if op.phase == "update" for t in op.reads}
    for expert, chosen in enumerate(zip(*loads, strict=True)):
        name = f"h0.mlp.expert{expert}.down.weight"
        sums = [op for op in trace.ops if op.name.endswith(f"{name}.grad.accumulate")]
        assert len([each for each in read if f"{name}.grad" in each]) == any(chosen)
        assert len(sums) == max(0, sum(load > 0 for load in chosen) - 1)
