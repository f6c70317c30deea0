"""Llama in PyTorch, with the same ops as Hugging Face's class, so that memory and times are those of the model."""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sim.measure.gpt2 import Run, causal_mask, next_token_loss

Rotary = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """RMSNorm in fp32, cast back to the type of x, then multiplied by the weight."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) -> the same."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normal.to(x.dtype)


class Layer(nn.Module):
    """Pre-norm attention with rotary positions and grouped queries, and SwiGLU. (batch, seq, hidden) -> the same."""

    def __init__(self, config: Mapping[str, Any], attention: str) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.heads, self.kv_heads, self.head = heads, config["num_key_value_heads"], config["head_dim"]
        self.attention = attention
        linear = partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.q, self.proj = linear(hidden, heads * self.head), linear(heads * self.head, hidden)
        self.k, self.v = (linear(hidden, self.kv_heads * self.head) for _ in range(2))
        self.gate, self.up = (linear(hidden, config["intermediate_size"]) for _ in range(2))
        self.down = linear(config["intermediate_size"], hidden)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        """Both halves, each added to its input."""
        x = x + self.proj(self.attend(self.norm1(x), rotary, mask))
        normal = self.norm2(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))

    def attend(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        """Causal attention over all heads, fused or as separate ops."""
        batch, seq, _ = x.shape
        q, k, v = (
            part(x).view(batch, seq, count, self.head).transpose(1, 2)
            for part, count in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        if self.attention == "sdpa":
            grouped = self.heads != self.kv_heads
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            k, v = (repeated(part, self.heads // self.kv_heads) for part in (k, v))
            scores = torch.matmul(q, k.transpose(2, 3)) * self.head**-0.5 + mask
            y = torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)
        return y.transpose(1, 2).reshape(batch, seq, -1)


class Llama(nn.Module):
    """The model with its loss. config: keys of a Hugging Face `config.json` of Llama."""

    def __init__(self, config: Mapping[str, Any], *, attention: str) -> None:
        super().__init__()
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self.attention, self.head = attention, config["head_dim"]
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(config, attention) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        for weight in (part.weight for part in self.modules() if isinstance(part, (nn.Embedding, nn.Linear))):
            nn.init.normal_(weight, std=0.02)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor, run: Run) -> Tensor:
        """Mean cross-entropy of the next token. ids, labels: (batch, seq)."""
        x = self.body(ids, run)
        return next_token_loss(self.lm_head(x), labels)

    def body(self, ids: Tensor, run: Run) -> Tensor:
        """The input of the head. (batch, seq) -> (batch, seq, hidden)."""
        x = self.embed(ids)
        mask = causal_mask(ids, x.dtype) if self.attention == "eager" else None
        rotary = self.rotary(ids.shape[1], x)
        for layer in self.layers:
            x = run(partial(layer, rotary=rotary, mask=mask), x)
        normal: Tensor = self.norm(x)
        return normal

    def rotary(self, seq: int, x: Tensor) -> Rotary:
        """Cosines and sines of all positions in the type of x, (1, 1, seq, head)."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            steps = torch.arange(0, self.head, 2, device=x.device).float() / self.head
            angles = torch.outer(torch.arange(seq, device=x.device).float(), 10000.0**-steps)
            angles = torch.cat((angles, angles), dim=-1)[None, None]
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x cos + rotate_half(x) sin. (batch, heads, seq, head) -> the same."""
    cos, sin = rotary
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def repeated(x: Tensor, times: int) -> Tensor:
    """Repeat each key or value for every query head of its group."""
    if times == 1:
        return x
    batch, heads, seq, head = x.shape
    return x[:, :, None].expand(batch, heads, times, seq, head).reshape(batch, heads * times, seq, head)
