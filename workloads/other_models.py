"""Keys of a `config.json` that describe a different model from the one that would be built.

The list is closed: a key is read (`models.ALIASES`, sliding windows), harmless (a token id, a generation setting), or
refused, where its value or the key itself is not known to leave the model as it is. None and what is empty stand for
no value.
`torch_dtype` and `dtype` say how a checkpoint is stored; the type of the computation is `precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from sim.errors import WorkloadError


class NotBuiltIn(WorkloadError):
    """A configuration of a model that no family here has; the library that published it may."""


def shown(value: Any, most: int = 60) -> str:
    """A value as an error shows it: one line of at most so many characters, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, brackets without end
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= most else text[: most - 1] + "…"


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_not(neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != neutral


def _is_no_type(value: Any) -> bool:
    return value is not None and str(value).removeprefix("torch.") not in STORED if isinstance(value, str) else True


def _is_partial(value: Any) -> bool:
    factor = value.get("partial_rotary_factor") if isinstance(value, Mapping) else None
    return factor is not None and factor != 1.0


def _has_another_head(value: Any) -> bool:
    """Whether a list of classes names one without the head that is built: that of a language model."""
    names = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(name, str) and not name.endswith(HEADS) for name in names)


def _more_than_one(value: Any) -> bool:
    return value is not None and value not in (0, 1)


STORED = ("float32", "bfloat16", "float16", "float64", "float", "half", "double", "auto")
"""Types in which a checkpoint may be stored."""

HEADS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining", "Model")
"""How the names of classes end that have a language model's head, or none; BERT is built with both of its heads unless
only `ForMaskedLM` is named."""

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
    "architectures": (_has_another_head, "another head than a language model's"),
    "dtype": (lambda value: value is not None and _is_no_type(value), "weights of a type that is not known"),
    "torch_dtype": (lambda value: value is not None and _is_no_type(value), "weights of a type that is not known"),
    "quantization": (_is_set, "quantised weights"),
    "rope_scaling": (_is_partial, "rotary positions of a part of the head"),
    "rope_parameters": (_is_partial, "rotary positions of a part of the head"),
    "pretraining_tp": (_more_than_one, "linear layers in slices"),
    "gradient_checkpointing": (_is_set, "recomputation, which is a policy here (full_recompute)"),
    "output_attentions": (_is_set, "attention weights as a result"),
    "output_hidden_states": (_is_set, "all layers' activations as a result"),
    "output_router_logits": (_is_set, "a loss of the router"),
    "router_jitter_noise": (_is_set, "noise in the router"),
    "scale_attn_by_inverse_layer_idx": (_is_set, "attention scores scaled by layer"),
    "use_mrope": (_is_set, "rotary positions in several dimensions"),
    "is_decoder": (_is_set, "an encoder that is used as a decoder"),
}
"""For each key, which of its values describe a different model, and what that model has."""

ROTARY = ("partial_rotary_factor", "rope_scaling", "rope_parameters")
"""Of these the keys that Nemotron, whose positions rotate a part of each head, has."""

BIASES = {
    "llama": ("attention_bias", "mlp_bias"),
    "nemotron": ("attention_bias", "mlp_bias"),
    "deepseek": ("attention_bias",),
}
"""The keys of biases that a `model_type` has."""

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


_HARMLESS = """
    aux_loss_alpha auto_map bad_words_ids begin_suppress_tokens bos_token_id classifier_dropout
    cross_attention_hidden_size decoder_start_token_id directionality diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size eos_token_id ep_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range label2id layer_norm_eps layer_norm_epsilon
    length_penalty max_length max_sequence_length max_window_layers min_length model_max_length n_group name norm_eps
    no_repeat_ngram_size norm_topk_prob num_beam_groups num_beams num_labels num_return_sequences
    original_max_position_embeddings output_scores pad_token_id pooler_fc_size pooler_num_attention_heads
    pooler_num_fc_layers pooler_size_per_head pooler_type prefix problem_type remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate rms_norm_eps rope_interleave rope_theta routed_scaling_factor
    router_aux_loss_coef scale_attn_weights scoring_func sep_token_id seq_aux summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature text_config tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p topk_group topk_method
    torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    attn_implementation rope_type
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Published keys that change no op, no shape and no number of parameters of the models that are built."""

ALIKE = 0.86
"""From which similarity on an unknown key counts as a misspelt one: one letter in seven, or two in fourteen."""

LONGEST = 80
"""The longest key that is compared with others."""


def misspelt(key: str, known: Collection[str]) -> str:
    """The known key that an unknown one is probably a misspelling of, "" where there is none."""
    return next(iter(get_close_matches(key[:LONGEST], known, n=1, cutoff=ALIKE)), "")


def refuse_unknown(
    values: Mapping[str, Any],
    read: Collection[str],
    kind: str,
    where: str,
    *,
    beside: Collection[str],
    own: bool = False,
) -> None:
    """Raise WorkloadError for a key that nothing is known of.

    read: the keys that are read.
    beside: those that are harmless, or known to describe another model.
    own: whether the table is one's own, where harmless keys are mistakes, too; a published `config.json` has dozens.
    """
    known = {*read, *beside}
    for key, value in values.items():
        if key in known or (isinstance(key, str) and key.startswith("_") and not own):
            continue
        if not isinstance(key, str) or len(key) > LONGEST:
            raise WorkloadError(f"{where}: there is no key {shown(key)}")
        if alike := misspelt(key, known):
            hint = f" (did you mean {alike!r}?)"
        elif own:
            hint = f" among those that change what is built: {', '.join(sorted(read))}"
        elif value is None or (isinstance(value, (str, list, tuple, Mapping)) and not value):
            continue
        else:
            hint = f" that is known for model_type {kind!r}: it may change the model; remove it if it does not"
        raise WorkloadError(f"{where}: there is no key {key!r}{hint}")


def refuse_unused(values: Mapping[str, Any], unused: Mapping[str, Collection[Any]], kind: str, where: str) -> None:
    """Raise WorkloadError for a key of another model.

    unused: the keys that models of this kind do not have, and the values of each that leave them as they are.
    """
    for key, neutral in unused.items():
        value = values.get(key)
        if value is not None and not any(value == each for each in neutral):
            raise WorkloadError(f"{where}: {key}: model_type {kind!r} has no such key (value {shown(value)})")


def refuse_other_models(values: Mapping[str, Any], kind: str, family: str, where: str) -> None:
    """Raise WorkloadError, naming key and value, for a configuration of a model that is not supported."""
    refused = {key: rule for key, rule in REFUSED.items() if kind != "nemotron" or key not in ROTARY}
    biases = BIASES.get(kind, ())
    refused |= {
        key: (_is_set, f"biases, which model_type {kind!r} does not have")
        for key in ("attention_bias", "mlp_bias")
        if key not in biases
    }
    if family in ("gpt2", "bert", "gpt"):
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
            raise NotBuiltIn(f"{where}: {key}: value {shown(values[key])} means {feature}: not modelled")
    _refuse_layer_types(values, where)


def _refuse_layer_types(values: Mapping[str, Any], where: str) -> None:
    layers = values.get("layer_types")
    types = layers if isinstance(layers, (list, tuple)) else [] if layers is None else [layers]
    for each in types:
        if each not in ("full_attention", "sliding_attention"):
            raise NotBuiltIn(f"{where}: layer_types: value {shown(each)}: not modelled; only 'full_attention' is")
