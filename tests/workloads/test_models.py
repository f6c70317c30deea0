"""Named models have the sizes that were published; config.json is read under all its spellings."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import TiersimError, WorkloadError
from workloads import Config, model_names, read_config, transformer
from workloads.models import LARGEST_FILE, parse_config
from workloads.parameters import parameter_count


def test_at_least_twenty_models_are_named():
    assert len(model_names()) >= 20


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_those_published(name):
    config = read_config(name)
    assert config.published > 0
    assert len(config.source) > 20
    count = parameter_count(config)
    if name == "pangu-2.6b":  # printed with two digits only: 2.62 billion is within 0.9 %, and rounds to it
        assert round(count, -8) == config.published
    else:
        assert count == pytest.approx(config.published, rel=0.005)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("bert-base", 109_482_240 + 590_592 + 1_536 + 30_522 + 1_538),  # the encoder, and the two heads
        ("llama-1b", 1_235_814_400),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("tinyllama-1.1b", 1_100_048_384),
        ("qwen2-7b", 7_615_616_512),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-moe-16b", 16_375_728_128),
    ],
)
def test_parameters_are_those_of_the_released_weights(name, count):
    assert parameter_count(read_config(name)) == count


def test_a_model_may_be_given_by_name_dict_or_file(tmp_path):
    sizes = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "n_inner": None,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**sizes, "architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32"}))
    named = transformer("gpt2-small", batch=1, sequence=32)
    for config in (sizes, str(file), file, tmp_path):
        trace = transformer(config, batch=1, sequence=32)
        assert trace.meta["parameters"] == named.meta["parameters"]
        assert [op.flops for op in trace.ops] == [op.flops for op in named.ops]


def test_a_file_is_named_after_its_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    assert read_config(folder).name == "my-model"


LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hidden_size", "n_embd"),
        ("hidden_size", "d_model"),
        ("num_hidden_layers", "n_layer"),
        ("intermediate_size", "ffn_dim"),
    ],
)
def test_aliases_of_keys_mean_the_same(old, new):
    values = {"model_type": "llama", **LLAMA}
    renamed = {new if key == old else key: value for key, value in values.items()}
    assert parse_config(renamed, "m") == parse_config(values, "m")


def test_text_config_of_a_multimodal_model_is_read():
    nested = {"model_type": "llava", "vision": {}, "text_config": {"model_type": "llama", **LLAMA}}
    assert parse_config(nested, "m") == parse_config({"model_type": "llama", **LLAMA}, "m")


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"attention_bias": True}, 2 * 4 * 64),
        ({"mlp_bias": True}, 2 * (2 * 96 + 64)),
        ({"model_type": "qwen2"}, 2 * 3 * 64),
    ],
)
def test_biases_are_those_of_the_config(change, more):
    plain, biased = ({"model_type": "llama", **LLAMA, **extra} for extra in ({}, change))
    assert parameter_count(parse_config(biased, "m")) == parameter_count(parse_config(plain, "m")) + more


def test_experts_stand_in_the_layers_that_the_config_says():
    sizes = {**LLAMA, "num_hidden_layers": 6, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = parse_config({"model_type": "deepseek", **sizes, "first_k_dense_replace": 1, "moe_layer_freq": 2}, "m")
    assert [config.has_experts(layer) for layer in range(6)] == [False, False, True, False, True, False]


def test_a_head_of_its_own_width_is_kept():
    assert parse_config({"model_type": "llama", **LLAMA, "head_dim": 32}, "m").head == 32


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"hidden_size": None}, ["m.json", "'hidden_size'", "missing"]),
        ({"vocab_size": None}, ["m.json", "'vocab_size'", "missing"]),
        ({"model_type": None}, ["m.json", "'model_type'", "missing", "mixtral"]),
        ({"model_type": "mamba"}, ["m.json", "'mamba'", "supported", "bert", "gpt2", "llama"]),
        ({"num_hidden_layers": 0}, ["m.json", "num_hidden_layers", "at least 1", "0"]),
        ({"num_hidden_layers": "12"}, ["m.json", "num_hidden_layers", "'12'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"hidden_size": 65}, ["hidden_size", "65", "4 heads"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4 heads"]),
        ({"hidden_act": "gelu_nwe"}, ["hidden_act", "gelu_nwe", "did you mean 'gelu_new'"]),
        ({"attention_dropout": 1.5}, ["attention_dropout", "1.5"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
    ],
)
def test_a_bad_key_is_named_with_its_file(change, parts):
    with pytest.raises(WorkloadError) as error:
        parse_config({"model_type": "llama", **LLAMA, **change}, "m", "m.json")
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "gptq"}),
        ("num_local_experts", 8),
        ("n_routed_experts", 64),
        ("kv_lora_rank", 512),
        ("q_lora_rank", 1536),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("use_qk_norm", True),
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("sliding_window", "4096"),
    ],
)
def test_a_key_that_makes_another_model_is_refused_and_not_passed_over(key, value):
    with pytest.raises(WorkloadError, match=rf"m\.json: {key}: ") as error:
        parse_config({"model_type": "llama", **LLAMA, key: value}, "m", "m.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "same",
    [
        *({"torch_dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization_config": None}, {"num_local_experts": 1}),
        *({"sliding_window": None}, {"partial_rotary_factor": 1.0}, {"layer_types": ["full_attention"]}),
        *({"rope_scaling": {"type": "linear"}}, {"bos_token_id": 1}, {"transformers_version": "5.0"}),
    ],
)
def test_a_key_that_changes_no_op_changes_nothing(same):
    plain = parse_config({"model_type": "llama", **LLAMA}, "m")
    assert parse_config({"model_type": "llama", **LLAMA, **same}, "m") == plain


def test_a_window_shorter_than_the_sequence_is_refused_and_a_longer_one_is_no_window():
    config = {"model_type": "mistral", **LLAMA, "sliding_window": 32}
    assert transformer(config, batch=1, sequence=32)
    with pytest.raises(WorkloadError, match="sequence: 33 is longer than the sliding window of 32 tokens"):
        transformer(config, batch=1, sequence=33)
    assert parse_config({**config, "model_type": "qwen2"}, "m").window == 0  # switched off there unless it says so
    assert parse_config({**config, "model_type": "qwen2", "use_sliding_window": True}, "m").window == 32


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "qwen2", "mixtral"])
def test_a_head_that_is_not_the_embedding_is_a_matrix_of_its_own(kind):
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    config = {"model_type": kind, "max_position_embeddings": 16, **LLAMA, **more}
    tied, apart = ({**config, "tie_word_embeddings": on} for on in (True, False))
    matrix = config["vocab_size"] * config["hidden_size"]
    counts = [parameter_count(parse_config(each, "m")) for each in (tied, apart)]
    assert counts[1] - counts[0] == matrix
    traces = [transformer(each, batch=2, sequence=8, precision="fp32") for each in (tied, apart)]
    weights = [
        sum(t.bytes for t in trace.tensors if t.role == "weight" and trace.producer[t.id] < 0) for trace in traces
    ]
    assert weights[1] - weights[0] == 4 * matrix
    assert [trace.meta["parameters"] for trace in traces] == counts


def test_more_experts_than_there_are_cannot_be_chosen():
    with pytest.raises(WorkloadError, match="num_experts_per_tok 9 of 8"):
        parse_config({"model_type": "mixtral", **LLAMA, "num_local_experts": 8, "num_experts_per_tok": 9}, "m")


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(WorkloadError, match=r"gpt2-smal.*did you mean 'gpt2-small'"):
        read_config("gpt2-smal")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "line 1"),
        ('{"a": 1, "b": 2, "b": 3}', "key 'b' stands there twice"),
        ("[1]", "needs a JSON object, has list"),
        ("\x00", "not valid JSON"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, text, what):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(WorkloadError, match=what) as error:
        read_config(file)
    assert "bad.json" in str(error.value)


def test_a_file_may_begin_as_editors_of_windows_begin_it(tmp_path):
    file = tmp_path / "marked.json"
    file.write_text(
        '{"model_type": "gpt2", "n_embd": 8, "n_layer": 3, "n_head": 2, "vocab_size": 9, "n_positions": 8}',
        encoding="utf-8-sig",
    )
    assert read_config(file).layers == 3


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"nowhere\.json: cannot be read"):
        read_config(tmp_path / "nowhere.json")


def test_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "binary.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match=r"binary\.json: cannot be read"):
        read_config(file)


@given(
    layers=st.integers(1, 6),
    heads=st.integers(1, 4),
    group=st.integers(1, 4),
    head=st.sampled_from([2, 8, 10]),
    ffn=st.integers(1, 50),
    vocabulary=st.integers(1, 99),
    tied=st.booleans(),
)
def test_llama_parameters_follow_the_closed_form(layers, heads, group, head, ffn, vocabulary, tied):
    hidden = heads * group * head
    values = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads * group,
        "num_key_value_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    layer = 2 * hidden * hidden + 2 * hidden * heads * head + 3 * hidden * ffn + 2 * hidden
    want = layers * layer + hidden + (1 if tied else 2) * vocabulary * hidden
    assert parameter_count(parse_config(values, "m")) == want


@given(layers=st.integers(1, 6), heads=st.integers(1, 5), head=st.sampled_from([2, 8]), vocabulary=st.integers(1, 99))
def test_gpt_parameters_follow_the_closed_form(layers, heads, head, vocabulary):
    h = heads * head
    values = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": h,
        "n_head": heads,
        "n_positions": 7,
        "vocab_size": vocabulary,
    }
    want = layers * (12 * h * h + 13 * h) + vocabulary * h + 7 * h + 2 * h
    assert parameter_count(parse_config(values, "m")) == want


def test_an_object_with_to_dict_is_read_as_its_dict():
    class LikeTransformers:
        """What a configuration object of `transformers` has that is of use here."""

        def __init__(self, **values):
            self.values = values

        def to_dict(self):
            return dict(self.values)

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32, "model_type": "gpt2"}
    given = LikeTransformers(**sizes, _name_or_path="", torch_dtype=None, use_cache=True)
    assert read_config(given) == read_config(sizes)
    asked = {"batch": 2, "sequence": 8}
    assert transformer(given, **asked).content_hash == transformer(sizes, **asked).content_hash


@pytest.mark.parametrize("what", [None, 3, ["gpt2"]])
def test_what_is_no_configuration_is_refused(what):
    with pytest.raises(WorkloadError, match="expected a name"):
        read_config(what)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_hiden_layers", "num_hidden_layers"),
        ("hidden_sizes", "hidden_size"),
        ("intermediate_sise", "intermediate_size"),
        ("num_key_values_heads", "num_key_value_heads"),
        ("tie_word_embedding", "tie_word_embeddings"),
        ("atention_bias", "attention_bias"),
        ("slidding_window", "sliding_window"),
        ("kv_lora_rnk", "kv_lora_rank"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(key, meant):
    with pytest.raises(WorkloadError, match=rf"m\.json: there is no key '{key}' \(did you mean '{meant}'\?\)"):
        parse_config({"model_type": "llama", **LLAMA, key: 2}, "m", "m.json")


def test_a_table_of_the_package_has_no_keys_but_those_that_are_read(monkeypatch):
    from workloads import models

    for name in model_names():
        read_config(name)
    tables = {"mine": {"model_type": "llama", **LLAMA, "rope_theta": 1e4}}
    monkeypatch.setattr(models, "_tables", lambda: tables)
    with pytest.raises(WorkloadError, match=r"mine: .* 'rope_theta' among those .*: activation_function, "):
        read_config("mine")
    tables["mine"] = {"model_type": "llama", **LLAMA, "hidden_sizes": 64}
    with pytest.raises(WorkloadError, match=r"mine: there is no key 'hidden_sizes' \(did you mean 'hidden_size'\?\)"):
        read_config("mine")


PUBLISHED = """
    return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss is_decoder max_length
    cross_attention_hidden_size tie_encoder_decoder min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate prefix
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens architectures finetuning_task id2label label2id tokenizer_class bos_token_id pad_token_id
    eos_token_id sep_token_id decoder_start_token_id task_specific_params problem_type _attn_implementation_autoset
    transformers_version layer_norm_epsilon initializer_range summary_type summary_use_proj summary_activation
    summary_first_dropout summary_proj_to_labels scale_attn_weights use_cache scale_attn_by_inverse_layer_idx
    layer_norm_eps classifier_dropout gradient_checkpointing rms_norm_eps pretraining_tp rope_theta rope_scaling
    rope_parameters max_window_layers output_router_logits router_aux_loss_coef router_jitter_noise n_group
    topk_group topk_method norm_topk_prob scoring_func seq_aux aux_loss_alpha ep_size routed_scaling_factor auto_map
    rope_interleave torch_dtype dtype num_labels attn_implementation
"""
"""Keys that published configurations have beside those that say what is computed."""


AS_PUBLISHED = {
    **dict.fromkeys(("output_hidden_states", "output_attentions", "is_decoder", "output_router_logits"), False),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "gradient_checkpointing"), False),
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "dtype": "torch.float16",
    "pretraining_tp": 1,
    "router_jitter_noise": 0.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
"""What they say where another value would be another model."""
CHANGED = {
    "architectures": ["LlamaForSequenceClassification"],
    "torch_dtype": "float8_e4m3fn",
    "dtype": "int4",
    **{key: {"partial_rotary_factor": 0.5} for key in ("rope_scaling", "rope_parameters")},
    "pretraining_tp": 2,
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gpt2", "bert", "mixtral", "nemotron"])
def test_what_published_configurations_say_beside_is_read_without_a_word(kind):
    sizes = {
        **LLAMA,
        "model_type": kind,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    if kind != "mixtral":
        del sizes["num_local_experts"], sizes["num_experts_per_tok"]
    published = {**dict.fromkeys(PUBLISHED.split(), 7), **AS_PUBLISHED}
    assert parse_config({**sizes, **published}, "m") == parse_config(sizes, "m")


@pytest.mark.parametrize("key", AS_PUBLISHED)
def test_those_that_would_change_it_are_read_by_their_value(key):
    with pytest.raises(WorkloadError, match=rf"m: {key}: value .* means .*: not modelled"):
        parse_config({"model_type": "llama", **LLAMA, key: CHANGED.get(key, True)}, "m")


def test_every_key_is_known_or_refused_by_its_name():
    config = {"model_type": "llama", **LLAMA}
    with pytest.raises(WorkloadError, match="no key 'gated_residual' that is known for model_type 'llama'"):
        parse_config({**config, "gated_residual": True}, "m")
    assert parse_config({**config, "gated_residual": None, "_private": 3}, "m") == parse_config(config, "m")


@pytest.mark.parametrize(
    ("kind", "key", "neutral", "changing"),
    [
        ("gpt2", "num_key_value_heads", 4, 2),
        ("gpt2", "head_dim", 16, 32),
        ("gpt2", "moe_intermediate_size", None, 32),
        ("llama", "resid_pdrop", 0.0, 0.1),
        ("llama", "type_vocab_size", 0, 2),
        ("llama", "num_experts_per_tok", 1, 2),
        ("llama", "moe_layer_freq", None, 2),
        ("mistral", "attention_bias", False, True),
        ("mixtral", "mlp_bias", False, True),
    ],
)
def test_a_key_of_another_family_is_refused_unless_it_changes_nothing(kind, key, neutral, changing):
    sizes = {**LLAMA, "model_type": kind, "max_position_embeddings": 64}
    if kind == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert parse_config({**sizes, key: neutral}, "m") == parse_config(sizes, "m")
    with pytest.raises(WorkloadError, match=rf"m: {key}: ") as error:
        parse_config({**sizes, key: changing}, "m")
    assert kind in str(error.value)


def deep(levels=100_000):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "key",
    [
        *("model_type", "hidden_size", "hidden_act", "attention_dropout", "tie_word_embeddings", "sliding_window"),
        *(
            "layer_types",
            "kv_lora_rank",
            "architectures",
            "dtype",
            "rope_scaling",
            "num_local_experts",
            "_name_or_path",
        ),
        *("published_parameters", "source", "attention_bias", "experts_implementation"),
        *("gated_residual", "k" * 10**6),
    ],
)
def test_a_hostile_value_has_one_clear_line_or_does_no_harm(key):
    numbers = (10**5000, -(10**5000), 1 << 63, float("nan"), float("inf"))
    for value in (["silu"], {"a": 1}, *numbers, "x" * 10**6, deep(), b"\0", object()):
        config = {"model_type": "llama", **LLAMA, key: value}
        for read in (partial(parse_config, config, "m"), partial(read_config, config)):
            try:
                assert isinstance(read(), Config)
            except WorkloadError as error:
                said = str(error)
            else:
                said = ""
            assert "\n" not in said
            assert len(said) < 400


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "vocab_size", "n_positions", "n_inner", "n_head"])
def test_a_size_beyond_all_reason_is_refused_at_once(key):
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 50, "n_positions": 32}
    for size in (10**9, 1 << 40, 1 << 63, 10**4000):
        config = {**sizes, key: size, **({"n_head": 1} if key == "n_embd" else {})}
        try:
            trace = transformer(config, batch=1, sequence=8)
        except TiersimError as error:
            said = str(error)
        else:
            said = ""
            assert key != "n_layer"
            assert trace.meta["parameters"] < 1 << 63
        assert "\n" not in said
        assert len(said) < 400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2", "attention_bias": False}, "linear layers without a bias"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention without biases"),
        ({"qkv_bias": True}, "biases that another model has"),
        ({"attention_chunk_size": 8192}, "attention in chunks"),
        ({"shared_expert_intermediate_size": 64}, "shared experts"),
    ],
)
def test_a_key_that_changes_memory_is_refused(change, said):
    with pytest.raises(WorkloadError, match=said):
        parse_config({"model_type": "llama", **LLAMA, **change}, "m", "m.json")


def test_a_file_without_end_is_refused_before_it_is_read(tmp_path):
    """Found by 100,000 cases of the fuzzer: /dev/zero as a model took all memory."""
    os.mkfifo(tmp_path / "config.json")
    for path in ("/dev/zero", tmp_path / "config.json"):
        with pytest.raises(WorkloadError, match="is not a regular file"):
            read_config(path)
    long = tmp_path / "long.json"
    with long.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(WorkloadError, match="has more than 67,108,864 bytes"):
        read_config(long)
