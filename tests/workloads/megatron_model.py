"""A GPT of Megatron-LM's parts in plain PyTorch, from its arguments: what `workloads.megatron` is compared with.

Order and shapes are those of megatron/core/transformer (core 0.6.0) without its fused kernels: one product for queries,
keys and values, one for gate and up, rotary positions of the first elements of each head.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from scripts.zoo_page.measure import machine
from sim import simulate
from sim.analysis.peak_memory import home_peak
from sim.trace.phases import saved_tensors
from workloads import capture


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotated(x, tables):
    cos, sin = tables
    turned = cos.shape[-1]
    first, rest = (x, None) if turned == x.shape[-1] else (x[..., :turned], x[..., turned:])
    low, high = first[..., : turned // 2], first[..., turned // 2 :]
    first = (first * cos) + (torch.cat((-high, low), dim=-1) * sin)
    return first if rest is None else torch.cat((first, rest), dim=-1)


class Layer(nn.Module):
    def __init__(self, a):
        super().__init__()
        width, self.heads = a["hidden_size"], a["num_attention_heads"]
        self.groups = a["num_query_groups"] if a.get("group_query_attention") else self.heads
        self.head, self.a = a.get("kv_channels") or width // self.heads, a
        bias = not a.get("disable_bias_linear")
        inner = a["ffn_hidden_size"]
        norm = RMSNorm if a.get("normalization") == "RMSNorm" else nn.LayerNorm
        self.sizes = [n * self.head for n in (self.heads, self.groups, self.groups)]
        self.norm1 = norm(width)
        self.qkv = nn.Linear(width, sum(self.sizes), bias=bias or bool(a.get("add_qkv_bias")))
        self.proj = nn.Linear(self.heads * self.head, width, bias=bias)
        self.norm2 = norm(width)
        self.fc1 = nn.Linear(width, 2 * inner if a.get("swiglu") else inner, bias=bias)
        self.fc2 = nn.Linear(inner, width, bias=bias)

    def attention(self, x, tables, mask):
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, -1, self.head).transpose(1, 2) for part in self.qkv(x).split(self.sizes, dim=-1)
        )
        if tables is not None:
            q, k = rotated(q, tables), rotated(k, tables)
        if self.groups < self.heads:
            k, v = (
                x[:, :, None]
                .expand(batch, self.groups, self.heads // self.groups, length, self.head)
                .reshape(batch, self.heads, length, self.head)
                for x in (k, v)
            )
        weights = functional.softmax(torch.matmul(q, k.transpose(2, 3)) * self.head**-0.5 + mask, dim=-1)
        weights = functional.dropout(weights, self.a["attention_dropout"])
        return self.proj(torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, length, -1))

    def mlp(self, x):
        x = self.fc1(x)
        if self.a.get("swiglu"):
            gate, up = x.chunk(2, dim=-1)
            x = functional.silu(gate) * up
        elif self.a.get("squared_relu"):
            x = torch.pow(functional.relu(x), 2)
        else:
            x = functional.gelu(x)
        return self.fc2(x)

    def forward(self, x, tables, mask):
        x = x + functional.dropout(self.attention(self.norm1(x), tables, mask), self.a["hidden_dropout"])
        return x + functional.dropout(self.mlp(self.norm2(x)), self.a["hidden_dropout"])


class GPTModel(nn.Module):
    """Maps tokens and labels, both (batch, length), to the mean loss. a: arguments, under Python's names for them."""

    def __init__(self, a):
        super().__init__()
        self.a, width, words = a, a["hidden_size"], a["padded_vocab_size"]
        self.words = nn.Embedding(words, width)
        kind = a.get("position_embedding_type", "learned_absolute")
        self.positions = nn.Embedding(a["max_position_embeddings"], width) if kind == "learned_absolute" else None
        self.turned = 0
        if kind == "rope":
            head = a.get("kv_channels") or width // a["num_attention_heads"]
            self.turned = int(head * a.get("rotary_percent", 1.0))
        self.layers = nn.ModuleList(Layer(a) for _ in range(a["num_layers"]))
        self.norm = (RMSNorm if a.get("normalization") == "RMSNorm" else nn.LayerNorm)(width)
        self.head = nn.Linear(width, words, bias=False)
        if not a.get("untie_embeddings_and_output_weights"):
            self.head.weight = self.words.weight

    def forward(self, ids, labels):
        batch, length = ids.shape
        x = self.words(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=ids.device).unsqueeze(0))
        tables = None
        if self.turned:
            angles = torch.zeros(1, 1, length, self.turned, device=ids.device)
            tables = angles.cos(), angles.sin()
        mask = torch.zeros(batch, 1, length, length, device=ids.device)
        x = functional.dropout(x, self.a["hidden_dropout"])
        for layer in self.layers:
            x = layer(x, tables, mask)
        logits = self.head(self.norm(x))
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), shifted.view(-1))


def assert_same_in_pytorch(ours, model):
    """A trace of two samples of 24 tokens has the parameters, saved bytes, FLOPs and peak of a model that PyTorch runs.

    model: makes it, see `capture`.
    """
    ids = torch.zeros(2, 24, dtype=torch.int64)
    theirs = capture(model, (ids, ids), optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=True))
    assert ours.meta["parameters"] == theirs.meta["parameters"]
    saved = [sum(trace.tensors[t].bytes for t in saved_tensors(trace).tolist()) for trace in (ours, theirs)]
    assert saved[0] == saved[1]
    products = [
        sum(op.flops for op in trace.ops if op.kind == "matmul" and op.phase == "forward") for trace in (ours, theirs)
    ]
    assert products[0] == products[1]
    peaks = [home_peak(simulate(trace, machine()).log) for trace in (ours, theirs)]
    assert peaks[0] == pytest.approx(peaks[1], rel=2e-3)
