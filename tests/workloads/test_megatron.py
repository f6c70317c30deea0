"""Transformers as Megatron-LM configures them: its arguments, closed forms, and the same parts in plain PyTorch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import WorkloadError
from sim.trace.phases import saved_tensors
from workloads import read_config, transformer
from workloads.parameters import parameter_count

GPT = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "padded_vocab_size": 160,
    "ffn_hidden_size": 176,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
}
ROPE = {"position_embedding_type": "rope"}
MIXTURES = {
    "of GPT-2's parts": {},
    "groups of queries": {"group_query_attention": True, "num_query_groups": 2},
    "SwiGLU": {"swiglu": True},
    "squared ReLU, half of each head rotated": {"squared_relu": True, **ROPE, "rotary_percent": 0.5},
    "of Llama's parts": {
        **ROPE,
        "swiglu": True,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    "RMSNorm and SwiGLU, the rest by default": {
        "swiglu": True,
        "normalization": "RMSNorm",
        "group_query_attention": True,
        "num_query_groups": 2,
    },
    "no positions, wide heads, biases of queries, keys and values": {
        "position_embedding_type": "none",
        "kv_channels": 32,
        "disable_bias_linear": True,
        "add_qkv_bias": True,
    },
}


def config(**arguments):
    return read_config({"model_type": "megatron", **GPT, **arguments})


# ---- PyTorch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", MIXTURES)
def test_parameters_saved_bytes_flops_and_peak_are_those_of_the_same_parts_in_pytorch(mixture):
    pytest.importorskip("torch")
    from tests.workloads.megatron_model import GPTModel, assert_same_in_pytorch

    arguments = {**GPT, **MIXTURES[mixture]}
    ours = transformer({"model_type": "megatron", **arguments}, batch=2, sequence=24, attention="eager")
    assert_same_in_pytorch(ours, lambda: GPTModel(arguments).train())


# ---- closed forms ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    layers=st.integers(1, 5),
    groups=st.integers(1, 3),
    queries=st.integers(1, 3),
    head=st.sampled_from([4, 10]),
    grouped=st.booleans(),
    swiglu=st.booleans(),
    rms=st.booleans(),
    rope=st.booleans(),
    biases=st.booleans(),
    tied=st.booleans(),
)
def test_parameters_follow_the_closed_form(
    layers, groups, queries, head, grouped, swiglu, rms, rope, biases, tied
) -> None:
    heads, ffn, words, positions = groups * queries, 24, 50, 12
    h = heads * head
    values = {
        "model_type": "megatron",
        "num_layers": layers,
        "hidden_size": h,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "padded_vocab_size": words,
        "max_position_embeddings": positions,
        "group_query_attention": grouped,
        "num_query_groups": groups if grouped else 1,
        "swiglu": swiglu,
        "normalization": "RMSNorm" if rms else "LayerNorm",
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "disable_bias_linear": not biases,
        "untie_embeddings_and_output_weights": not tied,
    }
    qkv, first = h + 2 * (groups if grouped else heads) * head, 2 * ffn if swiglu else ffn
    norm = h if rms else 2 * h
    layer = h * qkv + h * h + h * first + ffn * h + 2 * norm + (qkv + h + first + h if biases else 0)
    want = layers * layer + norm + (1 if tied else 2) * words * h + (0 if rope else positions * h)
    assert parameter_count(read_config(values)) == want


@pytest.mark.parametrize("rope", [0.0, 0.25, 1.0])
def test_saved_bytes_of_a_layer_in_megatrons_fused_kernels(rope):
    """Per token in 16 bits: inputs and results of both norms (4 h), the joint product, of which v alone or q, k and v
    are views, q and k where they are rotated, the result of attention, gate and up, and what the last product reads."""
    h, heads, groups, ffn, tokens = 64, 4, 2, 176, 2 * 24
    learned = {"position_embedding_type": "learned_absolute"}
    arguments = {"num_query_groups": groups, **({"rotary_percent": rope} if rope else learned)}
    mixture = {"model_type": "megatron", **GPT, **MIXTURES["of Llama's parts"], **arguments}
    sizes = {"batch": 2, "sequence": 24, "precision": "bf16", "attention": "flash", "stack": "fused"}
    trace = transformer(mixture, **sizes)
    saved = [trace.tensors[t] for t in saved_tensors(trace).tolist()]
    joint, keys = h + 2 * groups * (h // heads), groups * (h // heads)
    per_token = 4 * h + joint + (h + keys if rope else 0) + h + 3 * ffn
    assert sum(t.bytes for t in saved if t.layer == 1 and t.dtype == "bf16") == 2 * tokens * per_token


# ---- arguments ---------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_script():
    """pretrain_gpt.py with sizes alone: biases, a tied head, learned positions, dropout, LayerNorm, GeLU, 4 h."""
    least = {key: GPT[key] for key in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")}
    c = read_config({"model_type": "megatron", **least, "vocab_size": 50257})
    assert (c.norm, c.activation, c.gated, c.learned, c.rotary) == ("layer_norm", "gelu", False, True, 0.0)
    assert (c.tied, c.biases, c.kv_heads) == (True, {"qkv", "proj", "mlp"}, 4)
    assert (c.ffn, c.vocabulary) == (4 * 64, 50304)
    assert {c.embedding_dropout, c.attention_dropout, c.residual_dropout} == {0.1}


def test_a_gate_makes_the_default_width_two_thirds_rounded_down_to_64():
    least = {key: value for key, value in GPT.items() if key != "ffn_hidden_size"}
    values = {"model_type": "megatron", **least, "hidden_size": 512, "num_attention_heads": 8, "swiglu": True}
    assert read_config(values).ffn == 1344  # 4 * 512 * 2 / 3 = 1365.3


@pytest.mark.parametrize(("tensor", "multiple", "rows"), [(1, 128, 131200), (4, 128, 131584), (2, 1, 131074)])
def test_the_vocabulary_is_padded_for_the_ranks(tensor, multiple, rows):
    values = {key: value for key, value in GPT.items() if key != "padded_vocab_size"}
    values |= {"vocab_size": 131073, "make_vocab_size_divisible_by": multiple, "tensor_model_parallel_size": tensor}
    assert read_config({"model_type": "megatron", **values}).vocabulary == rows


def test_arguments_may_be_spelt_as_on_the_command_line():
    dashed = {f"--{key.replace('_', '-')}": value for key, value in {**GPT, "swiglu": True}.items()}
    assert read_config({"model_type": "megatron", **dashed}) == config(swiglu=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_query_groups": 2}, "num_query_groups: has an effect only with group_query_attention: true"),
        ({"num_query_groups": 3, "group_query_attention": True}, "num_query_groups 3 does not divide 4 heads"),
        ({"swiglu": True, "squared_relu": True}, "swiglu and squared_relu are both given"),
        ({"normalization": "rmsnorm"}, "normalization: 'rmsnorm' is unknown .did you mean 'RMSNorm'"),
        ({"position_embedding_type": "alibi"}, "'alibi' is unknown .valid: 'learned_absolute', 'none', 'rope'"),
        ({"swiglu": "yes"}, "swiglu: needs true or false, has 'yes'"),
        ({"num_layer": 3}, "no key 'num_layer' .did you mean 'num_layers'"),
        ({"num_experts": 8}, "no key 'num_experts' that is known for model_type 'megatron'"),
        ({"num-layers": 2}, "'num-layers' is given twice"),
        ({**ROPE, "rotary_percent": 0.2}, "rotary_percent: 0.2 of a head of 16 is 3, .* nearest: 0.125"),
        ({**ROPE, "rotary_percent": 0.0}, "rotary_percent: needs a number over 0 up to 1, has 0.0"),
        ({"hidden_dropout": 1}, "hidden_dropout: needs a number from 0 up to 1, has 1"),
        ({"max_position_embeddings": None}, "key 'max_position_embeddings' is missing"),
    ],
)
def test_a_bad_argument_has_one_clear_line(changes, said):
    with pytest.raises(WorkloadError, match=said) as raised:
        config(**changes)
    assert "\n" not in str(raised.value)


def test_a_sequence_longer_than_the_table_is_refused_and_with_rotary_positions_is_none():
    with pytest.raises(WorkloadError, match="65 is longer than the 64 positions"):
        transformer({"model_type": "megatron", **GPT}, batch=1, sequence=65)
    transformer({"model_type": "megatron", **GPT, **ROPE}, batch=1, sequence=65)


def test_a_tokens_passes_and_adapters_have_the_same_parts():
    mixture = {"model_type": "megatron", **GPT, **MIXTURES["RMSNorm and SwiGLU, the rest by default"]}
    generated = transformer(mixture, batch=2, sequence=8, generate=3)
    assert generated.meta["parameters"] == parameter_count(read_config(mixture))
    adapted = transformer(mixture, batch=2, sequence=8, lora_rank=2)
    ends = (64 + 128) + (64 + 64) + (64 + 2 * 176) + (176 + 64)  # inputs and results of the four linear layers
    assert adapted.meta["trainable_parameters"] == 3 * 2 * ends
    one = transformer(mixture, batch=2, sequence=8, lora_rank=2, lora_targets="linear_fc1")
    assert one.meta["trainable_parameters"] == 3 * 2 * (64 + 2 * 176)


def test_groups_without_their_number_are_one():
    assert config(group_query_attention=True).kv_heads == 1


def test_positions_that_are_left_out_are_not_learned():
    with pytest.raises(WorkloadError, match="not with position_embedding_type 'learned_absolute'"):
        config(no_position_embedding=True)
    assert not config(no_position_embedding=True, **ROPE).learned
