"""Keys of a `config.json` that describe a different model from the one that would be built.

An unknown key may be harmless (a token id, a seed, a generation setting), so that configurations can be read as
published. A key that changes the ops, their shapes or the number of parameters is either read (`models.ALIASES`,
sliding windows) or refused, never ignored. `torch_dtype` and `dtype` say how a checkpoint is stored; the type of the
computation is `precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from sim.errors import WorkloadError, near


def _is_set(value: Any) -> bool:
    return value not in (None, False, 0, [], {}, "")


def _is_not(neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != neutral


def _more_than_one(value: Any) -> bool:
    return value is not None and value not in (0, 1)


REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "quantization_config": (_is_set, "quantised weights"),
    "q_lora_rank": (_is_set, "latent attention (MLA)"),
    "kv_lora_rank": (_is_set, "latent attention (MLA)"),
    "qk_rope_head_dim": (_is_set, "latent attention (MLA)"),
    "qk_nope_head_dim": (_is_set, "latent attention (MLA)"),
    "v_head_dim": (_is_set, "values of another width than keys"),
    "attn_logit_softcapping": (_is_set, "soft caps of attention"),
    "final_logit_softcapping": (_is_set, "soft caps of logits"),
    "qk_norm": (_is_set, "norms of queries and keys"),
    "use_qk_norm": (_is_set, "norms of queries and keys"),
    "qk_layernorm": (_is_set, "norms of queries and keys"),
    "partial_rotary_factor": (_is_not(1.0), "rotary positions of a part of the head"),
    "parallel_attn": (_is_set, "attention beside the MLP"),
    "use_parallel_residual": (_is_set, "attention beside the MLP"),
    "alibi": (_is_set, "linear biases as positions"),
    "num_nextn_predict_layers": (_is_set, "layers that predict further tokens"),
    "add_cross_attention": (_is_set, "cross-attention"),
    "is_encoder_decoder": (_is_set, "an encoder and a decoder"),
    "position_embedding_type": (_is_not("absolute"), "relative positions"),
    "reorder_and_upcast_attn": (_is_set, "attention scores in fp32"),
    "chunk_size_feed_forward": (_is_set, "an MLP in chunks"),
    "pruned_heads": (_is_set, "pruned heads"),
    "vision_config": (_is_set, "a vision encoder"),
    "audio_config": (_is_set, "an audio encoder"),
    "lora_rank": (_is_set, "adapters"),
    "qkv_bias": (_is_not(None), "biases that another model has"),
    "use_bias": (_is_not(None), "biases that another model has"),
    "lm_head_bias": (_is_set, "a bias of the head"),
    "rotary_pct": (_is_not(1.0), "rotary positions of a part of the head"),
    "embedding_size": (_is_set, "embeddings of another width"),
    "attention_chunk_size": (_is_set, "attention in chunks"),
    "sliding_window_pattern": (_is_set, "windows in some of the layers"),
    "mlp_only_layers": (_is_set, "layers without experts"),
    "shared_expert_intermediate_size": (_is_set, "shared experts of another width"),
    "num_hidden_groups": (_more_than_one, "layers that share parameters"),
}
"""For each key, which of its values describe a different model, and what that model has."""

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


HARMLESS = frozenset(("tie_encoder_decoder",))
"""Published keys that look like another and change nothing here."""

ALIKE = 0.86
"""From which similarity on an unknown key counts as a misspelt one: one letter in seven, or two in fourteen."""


def refuse_misspelt(values: Mapping[str, Any], read: Iterable[str], where: str, own: bool) -> None:
    """Raise WorkloadError for a key that is not known and nearly one that is read, naming that.

    own: whether every key that is not read is a mistake, as in a table of one's own; a published `config.json` has
    dozens of them.
    """
    known = [*read, *REFUSED]
    for key in values:
        if key in known or key in HARMLESS or not isinstance(key, str):
            continue
        is_alike = any(SequenceMatcher(None, key, each).ratio() >= ALIKE for each in known)
        if is_alike or own:
            hint = (
                near(key, known) if is_alike else f" among those that change what is built: {', '.join(sorted(read))}"
            )
            raise WorkloadError(f"{where}: there is no key {key!r}{hint}")


def refuse_other_models(values: Mapping[str, Any], kind: str, family: str, where: str) -> None:
    """Raise WorkloadError, naming key and value, for a configuration of a model that is not supported."""
    refused = dict(REFUSED)
    if family in ("gpt2", "bert"):
        always = (_is_not(True), f"linear layers without a bias, which model_type {kind!r} does not have")
        refused |= {"attention_bias": always, "mlp_bias": always}
    elif kind == "qwen2":
        refused |= {
            "attention_bias": (_is_not(True), "attention without biases, which model_type 'qwen2' does not have")
        }
    if family != "mixtral":
        refused |= dict.fromkeys(EXPERTS, (_more_than_one, f"experts, which model_type {kind!r} does not have"))
    for key, (changes, feature) in refused.items():
        if key in values and changes(values[key]):
            shown = repr(values[key])
            raise WorkloadError(
                f"{where}: {key}: value {shown if len(shown) <= 60 else shown[:59] + '…'} means {feature}: not modelled"
            )
    layers = values.get("layer_types")
    other = sorted({str(each) for each in layers} - {"full_attention"}) if isinstance(layers, list) else []
    if other and other != ["sliding_attention"]:
        raise WorkloadError(f"{where}: layer_types: value {other[0]!r}: not modelled; only 'full_attention' is")
