"""PaddleNLP's GPT: queries, keys and values by three products or one; the same parts in plain PyTorch."""

from __future__ import annotations

import pytest

from sim.errors import WorkloadError
from workloads import read_config, transformer

GPT = {
    "model_type": "gpt",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 176,
    "max_position_embeddings": 64,
    "vocab_size": 160,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "type_vocab_size": 16,  # which the class reads nowhere
    "initializer_range": 0.02,
}


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_saved_bytes_flops_and_peak_are_those_of_the_same_parts_in_pytorch(fused):
    torch = pytest.importorskip("torch")
    from tests.workloads.megatron_model import GPTModel, Layer, assert_same_in_pytorch

    class Three(torch.nn.Module):
        """One after the other, as three products."""

        def __init__(self, one):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            return Results([part(x) for part in self.parts])

    class Results(list):
        def split(self, sizes, dim):
            return self

    class Model(GPTModel):
        def __init__(self, a):
            super().__init__(a)
            for layer in self.layers:
                assert isinstance(layer, Layer)
                layer.qkv = layer.qkv if fused else Three(layer.qkv)

    ours = transformer({**GPT, "fuse_attention_qkv": fused}, batch=2, sequence=24, attention="eager")
    arguments = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "padded_vocab_size": 160,
        "ffn_hidden_size": 176,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    }
    assert_same_in_pytorch(ours, lambda: Model(arguments).train())


def test_by_default_there_are_three_products():
    assert not read_config(GPT).joint
    names = {op.name for op in transformer(GPT, batch=1, sequence=8).ops}
    assert {"h0.attn.q", "h0.attn.k", "h0.attn.v"} <= names
    assert "h0.attn.qkv" in {
        op.name for op in transformer({**GPT, "fuse_attention_qkv": True}, batch=1, sequence=8).ops
    }


@pytest.mark.parametrize("target", ["q_proj", "linear1,linear2", "all-linear"])
def test_paddles_names_of_layers_are_known_to_adapters(target):
    trace = transformer(GPT, batch=1, sequence=8, lora_rank=2, lora_targets=target)
    assert trace.meta["trainable_parameters"] < trace.meta["parameters"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fuse_attention_qkv": 1}, "fuse_attention_qkv: needs true or false, has 1"),
        ({"fuse_attention_qk": True}, "did you mean 'fuse_attention_qkv'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: model_type 'gpt' has no such key"),
        ({"num_experts": 8}, "experts, which model_type 'gpt' does not have"),
    ],
)
def test_keys_of_other_models_are_refused(changes, said):
    with pytest.raises(WorkloadError, match=said):
        read_config({**GPT, **changes})


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(WorkloadError, match="longer than the 64 positions"):
        transformer(GPT, batch=1, sequence=65)
