"""Small models of many kinds with a step each, built from torch.nn: what exported plans are tried on."""

from __future__ import annotations

import copy
from functools import partial
from types import ModuleType

import torch
from torch import nn

from sim.measure.gpt2 import Gpt2, plain
from sim.measure.llama import Llama
from tests.validation.test_checkpoints import NETS
from workloads.capture import capture

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Stack(nn.Module):
    """A first part, blocks in a list, a last part; the loss is the mean square."""

    def __init__(self, first, blocks, last):
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class Language(nn.Module):
    """A language model of this package, called plainly."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, ids):
        return self.body(ids, ids, plain)


class Mixer(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, tokens=16, width=24):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 4 * tokens), nn.GELU(), nn.Linear(4 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Patches(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, stride=4)

    def forward(self, x):
        return self.cut(x).flatten(2).transpose(1, 2)


class Shared(nn.Module):
    """One layer, called three times."""

    def __init__(self):
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(8, 32), nn.ModuleList([encoder()]), nn.Linear(32, 8)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.layers[0](x)
        return self.last(x).square().mean()


class Mixed(nn.Module):
    """A layer of experts by `einsum`, which copies its weights in another order."""

    def __init__(self):
        super().__init__()
        self.norm, self.route = nn.LayerNorm(64), nn.Linear(64, 4)
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 4) for shape in ((4, 64, 64), (4, 64, 64)))

    def forward(self, x):
        y = self.norm(x)
        parts = torch.einsum("teh,ehd->ted", torch.einsum("td,edh->teh", y, self.up).relu(), self.down)
        return x + (parts * self.route(y).softmax(-1)[..., None]).sum(1)


class Mixture(nn.Module):
    """Six such layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixed() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Siamese(nn.Module):
    """The same layers, called for each of two inputs."""

    def __init__(self):
        super().__init__()
        block = (nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32), nn.LayerNorm(32))
        self.layers = nn.ModuleList(nn.Sequential(*copy.deepcopy(block)) for _ in range(3))

    def forward(self, x):
        a, b = (self.encoded(y) for y in (x, x.flip(0)))
        return (a * b).sum(-1).square().mean()

    def encoded(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Recurrent(nn.Module):
    """Cells that are called at each time step in turn."""

    def __init__(self, cells=2):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(16, 16) for _ in range(cells))

    def forward(self, x):
        state = [torch.zeros_like(x[:, 0])] * len(self.cells)
        for t in range(x.shape[1]):
            step = x[:, t]
            for k, cell in enumerate(self.cells):
                step = state[k] = cell(step, state[k])
        return step.square().mean()


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 24}
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 80, "vocab_size": 101, "tie_word_embeddings": True,
}  # fmt: skip


def encoder(dropout=0.0, **options):
    return nn.TransformerEncoderLayer(32, 4, 96, dropout=dropout, batch_first=True, **options)


def mlp():
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32), nn.Tanh())


MODELS = {
    "gpt2": (lambda: Language(Gpt2(GPT2, attention="sdpa", dropout=0.0)), (3, 24)),
    "gpt2, eager": (lambda: Language(Gpt2(GPT2, attention="eager", dropout=0.0)), (3, 24)),
    "llama": (lambda: Language(Llama(LLAMA, attention="sdpa")), (3, 24)),
    "encoder": (lambda: Stack(nn.Linear(8, 32), [encoder() for _ in range(2)], nn.Linear(32, 8)), (2, 20, 8)),
    "vision": (
        lambda: Stack(
            Patches(), [encoder(0.2, norm_first=True, activation="gelu") for _ in range(2)], nn.Linear(32, 10)
        ),
        (2, 3, 16, 16),
    ),
    "mixer": (lambda: Stack(nn.Linear(8, 24), [Mixer() for _ in range(2)], nn.Linear(24, 8)), (2, 16, 8)),
    "mlp": (lambda: Stack(nn.Linear(8, 32), [mlp() for _ in range(4)], nn.Linear(32, 8)), (400, 8)),
    "deep mlp": (lambda: Stack(nn.Linear(8, 32), [mlp() for _ in range(9)], nn.Linear(32, 8)), (400, 8)),
    "shared": (Shared, (2, 12, 8)),
    "einsum": (Mixture, (64, 64)),
    "siamese": (Siamese, (16, 32)),
    "recurrent": (Recurrent, (8, 5, 16)),
    **{f"{name} net": NETS[name] for name in ("experts", "attention", "residual", "dense", "gated")},
}
"""Per model: a function that builds it, and the shape of its input (of token ids where it has two numbers)."""


def is_language(name):
    return name in ("gpt2", "gpt2, eager", "llama")


def batch(name):
    """An input with values."""
    shape = MODELS[name][1]
    torch.manual_seed(1)
    return torch.randint(101, shape) if is_language(name) else torch.randn(shape)


def trace_of(name, **options):
    kind = torch.int64 if is_language(name) else torch.float32
    x = torch.empty(MODELS[name][1], dtype=kind, device="meta")
    return capture(MODELS[name][0], x, optimizer=SGD, kernels="cpu", **options)


def module_from(text):
    """An exported file, imported."""
    module = ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), vars(module))
    return module


def trained(name, apply):
    """Loss and gradients of a step of a model with values, after `apply`."""
    torch.manual_seed(0)
    model = apply(MODELS[name][0]())
    loss = model(batch(name))
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in model.named_parameters()}
