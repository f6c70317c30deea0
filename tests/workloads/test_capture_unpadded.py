"""Attention masks that a model would leave out if it could look at them are left out of a capture."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch.nn import functional  # noqa: E402

from workloads.capture import capture  # noqa: E402

ROWS, LENGTH = 2, 16
IDS = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
FULL = torch.ones(ROWS, LENGTH, dtype=torch.int64)
SHORT = torch.tensor([[1] * LENGTH, [1] * 3 + [0] * (LENGTH - 3)])


@pytest.fixture
def masking(monkeypatch):
    """The part of Hugging Face's module that decides on masks, in a few lines."""
    module = ModuleType("transformers.masking_utils")

    def look(padding_mask, length, window=None):
        if padding_mask is not None and hasattr(padding_mask, "fake_mode"):
            return False  # it can't look
        return padding_mask is None or bool((padding_mask != 0).all())

    module._ignore_causal_mask_sdpa = look
    module.find_packed_sequence_indices = lambda positions: (torch.diff(positions, dim=-1) != 1).cumsum(-1)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 64, dtype=torch.bfloat16)

    def forward(self, input_ids, attention_mask=None):
        x = self.table(input_ids).view(ROWS, LENGTH, 4, 16).transpose(1, 2)
        positions = torch.arange(LENGTH).expand(ROWS, -1)
        masking = sys.modules["transformers.masking_utils"]
        packed = masking.find_packed_sequence_indices(positions)
        mask = None
        if packed is not None or not masking._ignore_causal_mask_sdpa(attention_mask, LENGTH):
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & (attention_mask[:, None, None] != 0)
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None).float().sum()


@pytest.mark.parametrize("mask", [None, FULL, FULL.to("meta")])
def test_a_batch_without_padding_needs_no_mask(masking, mask):
    inputs = {"input_ids": IDS} if mask is None else {"input_ids": IDS, "attention_mask": mask}
    trace = capture(Decoder, inputs)
    assert trace.meta["mapped"] == {"flash attention": 1}
    assert trace.meta["assumed"] == {"batches without padding": 1 if mask is None else 2}


def test_a_mask_with_padding_stays(masking):
    masking.find_packed_sequence_indices = lambda positions: None
    trace = capture(Decoder, {"input_ids": IDS, "attention_mask": SHORT})
    assert trace.meta["mapped"] == {"memory-efficient attention": 1}
    assert "assumed" not in trace.meta


def test_nothing_of_it_is_left_after_a_capture(masking):
    before = dict(vars(masking))
    capture(Decoder, {"input_ids": IDS})
    assert vars(masking) == before


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("mask", [None, FULL])
def test_hugging_faces_llama_runs_flash_attention(mask, cached):
    models = pytest.importorskip("transformers")
    config = models.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=50,
        use_cache=cached,
    )
    inputs = {"input_ids": IDS, "labels": IDS} | ({} if mask is None else {"attention_mask": mask})
    trace = capture(lambda: models.LlamaForCausalLM(config).bfloat16(), inputs)
    assert trace.meta["mapped"]["flash attention"] == 2
