"""Keys of a `config.json` that make another model of it than the one that is built here.

A key that is not known may be harmless (a token's id, a seed, what generation does), so that configurations are read as
they are published. One that changes the ops, their shapes or the number of parameters is either read (`models.ALIASES`,
sliding windows) or refused, never passed over. `torch_dtype` and `dtype` say how a checkpoint is stored; what training
computes in is `precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sim.errors import WorkloadError


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
}
"""Per key, which values of it make another model, and what that model has."""

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


def refuse_other_models(values: Mapping[str, Any], kind: str, family: str, where: str) -> None:
    """Raise WorkloadError, naming key and value, where a configuration is of a model that is not built here."""
    refused = dict(REFUSED)
    if family != "mixtral":
        refused |= dict.fromkeys(EXPERTS, (_more_than_one, f"experts, which model_type {kind!r} does not have"))
    for key, (changes, what) in refused.items():
        if key in values and changes(values[key]):
            shown = repr(values[key])
            raise WorkloadError(
                f"{where}: {key}: value {shown if len(shown) <= 60 else shown[:59] + '…'} means {what}: not modelled"
            )
    layers = values.get("layer_types")
    other = sorted({str(each) for each in layers} - {"full_attention"}) if isinstance(layers, list) else []
    if other and other != ["sliding_attention"]:
        raise WorkloadError(f"{where}: layer_types: value {other[0]!r}: not modelled; there is 'full_attention'")
