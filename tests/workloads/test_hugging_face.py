"""Models that `transformers` builds from a configuration, with random weights."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from sim.errors import WorkloadError
from workloads import training_step, transformer
from workloads.steps import captures

pytest.importorskip("torch")
pytest.importorskip("transformers")

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERSIM_CACHE", str(tmp_path / "cache"))


def test_a_config_that_no_family_has_is_captured_once(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3))
    trace = training_step(str(file), batch=2, sequence=8, precision="amp_bf16")
    h, inner, q, kv, head = 32, 48, 4 * 16, 2 * 16, 16
    layer = h * (q + 2 * kv) + q * h + 2 * head + 3 * h * inner + 2 * h
    assert trace.meta["parameters"] == 2 * 64 * h + 2 * layer + h
    assert trace.meta["layers"] == 2
    assert (trace.meta["samples"], trace.meta["tokens"]) == (2, 16)
    assert "uncounted" not in trace.meta

    def again(*_, **__):
        raise AssertionError("captured a second time")

    monkeypatch.setattr("workloads.hugging_face.hugging_face", again)
    assert training_step(str(file), batch=2, sequence=8, precision="amp_bf16").content_hash == trace.content_hash
    with pytest.raises(AssertionError, match="second time"):
        training_step(str(file), batch=3, sequence=8, precision="amp_bf16")
    next(captures().iterdir()).write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="second time"):
        training_step(str(file), batch=2, sequence=8, precision="amp_bf16")


def test_a_family_and_the_library_build_the_same_model():
    from workloads.hugging_face import hugging_face

    native = transformer(GPT2, batch=2, sequence=16, precision="fp32", dropout=0.0)
    captured = hugging_face(GPT2, "gpt2", "gpt2", batch=2, sequence=16, dropout=0.0)
    assert captured.meta["parameters"] == native.meta["parameters"]
    assert captured.meta["layers"] == 2


LLAMA = {key: value for key, value in QWEN3.items() if key != "head_dim"} | {"model_type": "llama"}
QWEN2, MISTRAL = {**LLAMA, "model_type": "qwen2"}, {**LLAMA, "model_type": "mistral", "sliding_window": None}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
BERT = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 64, "max_position_embeddings": 32, "architectures": ["BertForMaskedLM"],
}  # fmt: skip
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ALL_AT_ONCE = {"head_dim": 16, "tie_word_embeddings": True, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
VARIANTS = {
    "llama, all at once": {**LLAMA, **ALL_AT_ONCE, "attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1},
    "qwen2, all at once": {**QWEN2, **ALL_AT_ONCE, "num_labels": 7},
    "mixtral": {**MIXTRAL, "norm_topk_prob": False},
    "gpt2": {**GPT2, "tie_word_embeddings": False, "n_inner": 80, "activation_function": "relu"},
    "bert": BERT,
    "linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **BANDS}},
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "no key for the head": {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"},
    "biases of attention": {**LLAMA, "attention_bias": True},
    "biases of the MLP": {**LLAMA, "mlp_bias": True},
    "one head of keys": {**LLAMA, "num_key_value_heads": 1},
    "wide heads": {**LLAMA, "head_dim": 16},
    "classes that are not used": {**LLAMA, "num_labels": 5},
    "relu": {**LLAMA, "hidden_act": "relu"},
    "gelu": {**LLAMA, "hidden_act": "gelu_pytorch_tanh"},
    "qwen2": QWEN2,
    "a window in some layers": {**QWEN2, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "mistral": MISTRAL,
    "mistral, a long window": {**MISTRAL, "sliding_window": 64},
    "more experts": {**MIXTRAL, "num_local_experts": 8, "num_experts_per_tok": 1},
    "gpt2, untied": {**GPT2, "tie_word_embeddings": False},
    "gpt2, scores as they are": {**GPT2, "scale_attn_weights": False},
    "bert, more segments": {**BERT, "type_vocab_size": 4},
    "bert, another activation": {**BERT, "hidden_act": "gelu_new"},
}
AT_EVERY_CHANGE = 5


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[] if i < AT_EVERY_CHANGE else [pytest.mark.slow])
        for i, (name, config) in enumerate(VARIANTS.items())
    ],
)
def test_a_family_has_the_parameters_and_the_peak_that_the_library_has(config):
    from scripts.zoo_page.measure import machine
    from sim import simulate
    from sim.analysis.peak_memory import home_peak
    from workloads.hugging_face import hugging_face

    sizes = {"batch": 2, "sequence": 24, "precision": "fp32", "attention": "sdpa", "dropout": 0.0}
    native = transformer(config, optimizer="adamw_foreach", **sizes)
    built = hugging_face(config, "model", "model", **sizes)
    assert native.meta["parameters"] == built.meta["parameters"]
    peaks = [home_peak(simulate(trace, machine()).log) for trace in (native, built)]
    assert peaks[0] == pytest.approx(peaks[1], rel=2e-3)


NEMOTRON = {**LLAMA, "model_type": "nemotron", "vocab_size": 600}
EIGHTH = {
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.125},
}
NEMOTRONS = {
    "as published": NEMOTRON,
    "an eighth of each head": {**NEMOTRON, **EIGHTH},
    "all of each head": {**NEMOTRON, "partial_rotary_factor": 1.0},
    "biases, a tied head": {**NEMOTRON, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "dropout": {**NEMOTRON, "attention_dropout": 0.1},
    "GeLU": {**NEMOTRON, "hidden_act": "gelu"},
}


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("variant", NEMOTRONS)
def test_nemotron_saves_what_the_library_saves(variant, precision):
    """To the byte, but for mean and deviation of each row, which 16-bit norms of PyTorch on a CPU have in 16 bits."""
    from scripts.zoo_page.measure import machine
    from sim import simulate
    from sim.analysis.peak_memory import home_peak
    from sim.trace.phases import saved_tensors
    from workloads.hugging_face import hugging_face

    config, axes = NEMOTRONS[variant], {"batch": 2, "sequence": 24, "precision": precision, "attention": "eager"}
    native = transformer(config, optimizer="adamw_foreach", **axes)
    built = hugging_face(config, "model", "model", **axes)
    assert native.meta["parameters"] == built.meta["parameters"]
    saved = [sum(trace.tensors[t].bytes for t in saved_tensors(trace).tolist()) for trace in (native, built)]
    norms, rows = 2 * config["num_hidden_layers"] + 1, 2 * 24
    assert saved[0] - saved[1] == (0 if precision == "fp32" else norms * rows * 2 * 2)
    peaks = [home_peak(simulate(trace, machine()).log) for trace in (native, built)]
    assert peaks[0] == pytest.approx(peaks[1], rel=2e-3)


ONE_HEAD = {"num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("config", "attention", "precision", "batch"),
    [
        (NEMOTRON, "sdpa", "amp_bf16", 2),
        ({**NEMOTRON, "partial_rotary_factor": 1.0}, "sdpa", "bf16", 2),
        ({**LLAMA, **ONE_HEAD}, "eager", "amp_bf16", 1),
        ({**NEMOTRON, **ONE_HEAD}, "eager", "fp32", 1),
        pytest.param({**LLAMA, **ONE_HEAD}, "eager", "bf16", 2, marks=pytest.mark.slow),
        pytest.param({**LLAMA, **ONE_HEAD}, "sdpa", "fp32", 1, marks=pytest.mark.slow),
    ],
)
def test_results_of_attention_and_shared_keys_are_copied_where_the_library_copies_them(
    config, attention, precision, batch
):
    """Joined heads lie by head, and so does flash attention's result; one head of one sample is a view for all."""
    from sim.trace.phases import saved_tensors
    from workloads.hugging_face import hugging_face

    axes = {"batch": batch, "sequence": 24, "precision": precision, "attention": attention}
    native, built = transformer(config, **axes), hugging_face(config, "model", "model", **axes)
    wide = {t.bytes for t in native.tensors if t.name == "embed.out"}
    counted = [
        Counter(size for t in saved_tensors(trace).tolist() if (size := trace.tensors[t].bytes) * 8 >= min(wide))
        for trace in (native, built)
    ]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("name", ["gelu_fast", "quick_gelu", "gelu_10"])
def test_an_activation_that_no_family_has_is_the_librarys_business(name):
    """`gelu_fast` is five ops there, and saves what they save."""
    from workloads.models import read_config
    from workloads.other_models import NotBuiltIn

    with pytest.raises(NotBuiltIn, match="activation_function"):
        read_config({**GPT2, "activation_function": name})
    assert training_step({**GPT2, "activation_function": name}, batch=2, sequence=8).meta["built_by"]


@pytest.mark.parametrize(
    ("changes", "axes", "named"),
    [
        ({"quantization_config": {"bits": 4}}, {}, "quantised weights"),
        ({"hiden_size": 32}, {}, "did you mean 'hidden_size'"),
        ({"model_type": "qwen3x"}, {}, "unknown to transformers too"),
        ({}, {"lora_rank": 4}, "lora_rank: only models that are built in"),
        ({}, {"attention": "flash"}, "valid: sdpa, eager"),
        ({}, {"batch": 3, "micro_batches": 2}, "does not divide"),
    ],
)
def test_what_the_library_cannot_build_is_refused(changes, axes, named):
    with pytest.raises(WorkloadError, match=named):
        training_step({**QWEN3, **changes}, **{"batch": 1, "sequence": 8, **axes})


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("workloads.hugging_face.library_versions", lambda: ("2", ""))
    with pytest.raises(WorkloadError, match=r"tiersim\[huggingface\]"):
        training_step(QWEN3, batch=1, sequence=8)


def test_a_decoder_whose_first_token_is_not_stated_starts_with_padding():
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    trace = training_step({"model_type": "t5", **sizes}, batch=1, sequence=4, precision="fp32")
    assert "the decoder's first token is that of padding" in trace.meta["assumed"]
    assert trace.meta["layers"] == 2  # one of each stack


def test_of_several_classes_the_first_is_built():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    trace = training_step({"model_type": "deit", **sizes, "image_size": 32}, batch=1, sequence=1, precision="fp32")
    assert trace.meta["layers"] == 1


def test_positions_beyond_a_table_are_refused():
    config = {**GPT2, "model_type": "gpt_neo", "attention_types": [[["global"], 2]], "max_position_embeddings": 32}
    config = {key: value for key, value in config.items() if not key.startswith("n_")}
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
    with pytest.raises(WorkloadError, match="64 is longer than the 32 positions"):
        training_step({**config, **sizes}, batch=1, sequence=64)


def test_a_classifier_without_a_token_of_padding_takes_several_samples():
    asked = {"architectures": ["GPT2ForSequenceClassification"], "num_labels": 3}
    trace = training_step({**GPT2, **asked}, batch=2, sequence=8, precision="fp32")
    assert "the token of padding is 0" in trace.meta["assumed"]
    stated = training_step({**GPT2, **asked, "pad_token_id": 7}, batch=2, sequence=8, precision="fp32")
    assert "the token of padding is 0" not in stated.meta["assumed"]
    assert [op.name for op in stated.ops] == [op.name for op in trace.ops]
