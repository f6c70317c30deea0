"""GPT-2 in PyTorch, with the same ops as Hugging Face's class, so that memory and times are those of the model."""

# mypy: allow-subclassing-any

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Layered = Callable[[Tensor], Tensor]
Run = Callable[[Layered, Tensor], Tensor]
"""How a layer is called: plainly, or under a checkpoint."""

EXPENSIVE = (
    *("mm", "addmm", "bmm", "baddbmm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)
"""ATen ops whose results selective checkpointing keeps: matrix products and fused attention."""


class Product(nn.Module):
    """x W + b with W stored input first, like GPT-2's `Conv1D`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """One `addmm` over rows. (batch, seq, inputs) -> (batch, seq, outputs)."""
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], -1)


class Layer(nn.Module):
    """Pre-norm attention and MLP. (batch, seq, hidden) -> the same."""

    def __init__(self, hidden: int, heads: int, attention: str, dropout: float) -> None:
        super().__init__()
        self.heads, self.attention, self.p = heads, attention, dropout
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = Product(hidden, 3 * hidden), Product(hidden, hidden)
        self.fc, self.out = Product(hidden, 4 * hidden), Product(4 * hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Both halves, each added to its input."""
        x = F.dropout(self.proj(self.attend(self.ln1(x), mask)), self.p, self.training) + x
        return x + F.dropout(self.out(gelu_new(self.fc(self.ln2(x)))), self.p, self.training)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Causal attention over all heads, fused or as separate ops."""
        batch, seq, hidden = x.shape
        shape = (batch, seq, self.heads, hidden // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=2))
        p = self.p if self.training else 0.0
        if self.attention == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) * (shape[-1] ** -0.5) + mask
            y = torch.matmul(F.dropout(F.softmax(scores, dim=-1).to(v.dtype), p, self.training), v)
        return y.transpose(1, 2).reshape(batch, seq, hidden)


def gelu_new(x: Tensor) -> Tensor:
    """GPT-2's activation as separate ops: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Gpt2(nn.Module):
    """The model with its loss. config: keys of a Hugging Face `config.json` of GPT-2."""

    def __init__(self, config: Mapping[str, Any], *, attention: str, dropout: float) -> None:
        super().__init__()
        hidden = config["n_embd"]
        self.p, self.attention = dropout, attention
        self.wte = nn.Embedding(config["vocab_size"], hidden)
        self.wpe = nn.Embedding(config["n_positions"], hidden)
        self.layers = nn.ModuleList(
            Layer(hidden, config["n_head"], attention, dropout) for _ in range(config["n_layer"])
        )
        self.ln_f = nn.LayerNorm(hidden)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor, run: Run) -> Tensor:
        """Mean cross-entropy of the next token. ids, labels: (batch, seq)."""
        x = self.body(ids, run)
        return next_token_loss(F.linear(x, self.wte.weight), labels)

    def body(self, ids: Tensor, run: Run) -> Tensor:
        """The input of the head. (batch, seq) -> (batch, seq, hidden)."""
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = F.dropout(self.wte(ids) + self.wpe(positions), self.p, self.training)
        mask = causal_mask(ids, x.dtype) if self.attention == "eager" else None
        for layer in self.layers:
            x = run(layer, x) if mask is None else run(partial(layer, mask=mask), x)
        normal: Tensor = self.ln_f(x)
        return normal


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in fp32; 16-bit logits stay resident meanwhile, as in Hugging Face's models."""
    wide = logits.float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(wide.view(-1, wide.size(-1)), shifted.view(-1))


def causal_mask(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a token may attend, the lowest number elsewhere. (batch, 1, seq, seq)."""
    batch, seq = ids.shape
    positions = torch.arange(seq, device=ids.device)
    visible = (positions[None, :] <= positions[:, None]).expand(batch, 1, seq, seq)
    return torch.where(visible, torch.zeros((), dtype=dtype, device=ids.device), torch.finfo(dtype).min)


# ---- policies ------------------------------------------------------------------------------------


def plain(layer: Layered, x: Tensor) -> Tensor:
    """Call a layer."""
    return layer(x)


def checkpointed(layer: Layered, x: Tensor) -> Tensor:
    """Call a layer under a non-reentrant checkpoint."""
    result: Tensor = checkpoint(layer, x, use_reentrant=False)
    return result


def selective(layer: Layered, x: Tensor) -> Tensor:
    """Call a layer under a checkpoint that keeps the results of expensive ops."""

    def choose(_context: Any, op: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
        keeps = getattr(op, "_opname", "") in EXPENSIVE
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, choose)
    result: Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    return result


@contextmanager
def saved_on_host() -> Iterator[None]:
    """Offload saved tensors to pageable host memory and fetch them in backward."""
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        yield
