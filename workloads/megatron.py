"""Transformers as Megatron-LM configures them: the arguments of its `pretrain_gpt.py`, with their defaults.

A dict with `model_type: "megatron"` has them as keys, as the command line spells them (`--num-layers`, `num-layers`) or
as Python does (`num_layers`); a flag is true. Norm, MLP, positions, biases, groups of queries and the tying of the head
are chosen one by one, so that mixtures which no other family has can be built: without `--disable-bias-linear`,
`--untie-embeddings-and-output-weights`, `--position-embedding-type rope`, and dropouts of 0, they are those of GPT-2.
Queries, keys and values come from one product, gate and up of SwiGLU from another.

Source: Megatron-LM, megatron/training/arguments.py (`_add_network_size_args`, `_add_regularization_args`,
`validate_args`) and megatron/core/transformer/, core 0.6.0. `--apply-layernorm-1p` changes no op: kernels add the 1.
How a model is divided and trained is said by other arguments; the one of tensor parallelism is read here, since the
vocabulary is padded for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.errors import WorkloadError
from workloads.families import FAMILIES, LAYER_NORM, RMS_NORM, Config
from workloads.keys import Reader
from workloads.other_models import refuse_unknown, shown

ARGUMENTS = {
    "hidden": ("hidden_size",),
    "layers": ("num_layers",),
    "heads": ("num_attention_heads",),
    "grouped": ("group_query_attention",),
    "kv_heads": ("num_query_groups",),
    "head": ("kv_channels",),
    "ffn": ("ffn_hidden_size",),
    "vocabulary": ("padded_vocab_size",),
    "words": ("vocab_size",),
    "multiple": ("make_vocab_size_divisible_by",),
    "tensor": ("tensor_model_parallel_size",),
    "positions": ("max_position_embeddings",),
    "position": ("position_embedding_type",),
    "rope": ("use_rotary_position_embeddings",),
    "rotary": ("rotary_percent",),
    "norm": ("normalization",),
    "gated": ("swiglu",),
    "squared": ("squared_relu",),
    "biased": ("add_bias_linear",),
    "unbiased": ("disable_bias_linear",),
    "qkv_bias": ("add_qkv_bias",),
    "untied": ("untie_embeddings_and_output_weights",),
    "hidden_dropout": ("hidden_dropout",),
    "attention_dropout": ("attention_dropout",),
}
"""The arguments that are read, by field."""

NORMS = {"LayerNorm": LAYER_NORM, "RMSNorm": RMS_NORM}
POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": ""}

_HARMLESS = """
    add_position_embedding apply_layernorm_1p apply_query_key_layer_scaling apply_rope_fusion attention_backend
    attention_softmax_in_fp32 bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion init_method_std
    layernorm_epsilon masked_softmax_fusion model_type name no_position_embedding norm_epsilon persist_layer_norm
    published_parameters rope_scaling_factor rotary_base rotary_interleaved rotary_seq_len_interpolation_factor seed
    seq_length source tokenizer_model tokenizer_type transformer_impl use_flash_attn use_mcore_models use_rope_scaling
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Arguments beside them that change no op, no shape and no number of parameters."""


def megatron(values: Mapping[str, Any], name: str, where: str) -> Config:
    """The model that arguments of Megatron-LM describe.

    values: the arguments. name: of the model. where: how errors refer to them.

    Raises WorkloadError for an argument that is missing, impossible, given twice, or not known to leave the model as
    it is.
    """
    given = _underscored(values, where)
    arguments = [key for keys in ARGUMENTS.values() for key in keys]
    refuse_unknown(given, arguments, "megatron", where, beside=HARMLESS)
    read, has = Reader(given, where, ARGUMENTS), FAMILIES["megatron"]
    grouped = read.flag("grouped", False)
    if not grouped and read.raw("kv_heads") not in (None, 1):  # 1 is the default there, and has no effect
        raise WorkloadError(f"{where}: {read.key('kv_heads')}: has an effect only with group_query_attention: true")
    hidden, heads, kv_heads, head = read.heads(grouped=grouped)
    kv_heads = 1 if grouped and read.raw("kv_heads") is None else kv_heads
    gated, squared = read.flag("gated", False), read.flag("squared", False)
    if gated and squared:
        raise WorkloadError(f"{where}: swiglu and squared_relu are both given: an MLP has one activation")
    position = "rotary" if read.flag("rope", False) else read.choice("position", POSITIONS, "learned_absolute")
    if position == "learned" and (given.get("no_position_embedding") or given.get("add_position_embedding") is False):
        raise WorkloadError(f"{where}: no_position_embedding: not with position_embedding_type 'learned_absolute'")
    return Config(
        name=name,
        family="megatron",
        hidden=hidden,
        layers=read.size("layers"),
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        # as validate_args has it: with a gate two thirds, rounded down to 64
        ffn=read.size("ffn", int(4 * hidden * 2 / 3 / 64) * 64 or None if gated else has.ffn * hidden),
        vocabulary=_vocabulary(read),
        positions=read.size("positions"),
        activation="silu" if gated else "relu2" if squared else has.activation,
        tied=not read.flag("untied", False),
        biases=_biases(read),
        embedding_dropout=read.share("hidden_dropout", has.dropout),
        attention_dropout=read.share("attention_dropout", has.dropout),
        residual_dropout=read.share("hidden_dropout", has.dropout),
        published=read.published(),
        source=read.source(),
        norm=read.choice("norm", NORMS, "LayerNorm"),
        gated=gated,
        learned=position == "learned",
        rotary=read.part("rotary", 1.0, head) if position == "rotary" else 0.0,
        joint=has.joint,
    )


def _underscored(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments under the names that Python has for them."""
    given: dict[str, Any] = {}
    for key, value in values.items():
        plain = key.lstrip("-").replace("-", "_") if isinstance(key, str) and not key.startswith("_") else key
        if plain in given:
            raise WorkloadError(f"{where}: {shown(key)} is given twice")
        given[plain] = value
    return given


def _vocabulary(read: Reader) -> int:
    """Rows of the embedding: padded, so that every rank of tensor parallelism has as many."""
    if read.raw("vocabulary") is not None:
        return read.size("vocabulary")
    multiple = read.size("multiple", 128) * read.size("tensor", 1)
    return -(-read.size("words") // multiple) * multiple


def _biases(read: Reader) -> frozenset[str]:
    if read.flag("biased", True) and not read.flag("unbiased", False):
        return frozenset(("qkv", "proj", "mlp"))
    return frozenset(("qkv",) if read.flag("qkv_bias", False) else ())
