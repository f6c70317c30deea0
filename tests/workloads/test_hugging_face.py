"""Models that `transformers` builds from a configuration, with random weights."""

from __future__ import annotations

import json

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
