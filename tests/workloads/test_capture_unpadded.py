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


# ---- packed sequences ----------------------------------------------------------------------------

PACKED = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(ROWS, -1)
ONE = torch.arange(LENGTH).expand(ROWS, -1)


class Packed(Decoder):
    def forward(self, input_ids, position_ids):
        x = self.table(input_ids).view(ROWS, LENGTH, 4, 16).transpose(1, 2)
        packed = sys.modules["transformers.masking_utils"].find_packed_sequence_indices(position_ids)
        mask = None
        if packed is not None:
            mask = (packed[:, None, :, None] == packed[:, None, None, :]) if packed.shape[1] == LENGTH else None
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if mask is None else mask
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None).float().sum()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("positions", "kernel", "assumed"),
    [
        (PACKED, "memory-efficient attention", None),
        (ONE, "flash attention", {"batches without padding": 1}),
        (PACKED.to("meta"), "flash attention", {"batches without padding": 1}),
    ],
)
def test_positions_that_start_again_keep_their_mask(masking, positions, kernel, assumed, nested):
    inputs = {"input_ids": IDS, "position_ids": positions}

    class Given(Packed):
        def forward(self, **given):
            return super().forward(**(given["batch"] if nested else given))

    trace = capture(Given, {"batch": inputs} if nested else inputs)
    assert trace.meta["mapped"] == {kernel: 1}
    assert trace.meta.get("assumed") == assumed


def test_attention_over_packed_sequences_is_priced_within_its_tokens():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    heads, width, lengths = 4, 16, (40, 88)

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(heads * width, 3 * heads * width, dtype=torch.bfloat16)

        def forward(self, x, ends):
            q, k, v = self.mix(x).view(-1, 3, heads, width).unbind(1)
            return varlen.varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths)).float().mean()

    def flops(*lengths):
        tokens, ends = sum(lengths), torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        trace = capture(Attention, (torch.zeros(tokens, heads * width, dtype=torch.bfloat16), ends))
        assert trace.meta["assumed"] == {"packed sequences are as long as the longest may be": 2}
        return [op.flops for op in trace.ops if "varlen" in op.name]

    def exact(products, *lengths):
        return sum(products * 2 * heads * width * length**2 for length in lengths)

    # with sequences of the same length the bound is what they take; with others it holds
    lengths = (64, 64)
    assert flops(64, 64) == [exact(2, 64, 64), exact(5, 64, 64)]
    lengths = (40, 88)
    assert all(exact(n, 40, 88) < found < exact(n, 88, 88) for n, found in zip((2, 5), flops(40, 88), strict=True))
