"""A captured step lives as PyTorch's own memory tracker sees it, to the byte, and replays with the same peak."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools import mem_tracker  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sim.analysis.peak_memory import peak_memory  # noqa: E402
from sim.errors import WorkloadError  # noqa: E402
from sim.experiment import reference_run  # noqa: E402
from sim.hardware.profile import load_profile  # noqa: E402
from sim.trace.io import load, save  # noqa: E402
from workloads import transformer  # noqa: E402
from workloads.capture import capture, capture_from_reference  # noqa: E402


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=b > 8), nn.MaxPool2d(2))
            for a, b in ((3, 8), (8, 16), (16, 32))
        )
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(functional.dropout(x.flatten(1), 0.1, self.training))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 50)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0]).flatten(0, 1)


class Tied(nn.Module):
    """The embedding is the head: its gradient is a sum."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embedding(ids)))).flatten(0, 1)


class Square(torch.autograd.Function):
    """Keeps an 8-bit copy of its input instead of the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward((x * 16).to(torch.int8))
        return x * x

    @staticmethod
    def backward(ctx, g):
        (packed,) = ctx.saved_tensors
        return 2 * g * (packed.to(g.dtype) / 16)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, x):
        return self.second(Square.apply(self.first(x)))


class LoRALinear(nn.Module):
    def __init__(self, inner, columns, rank):
        super().__init__()
        self.base = nn.Linear(inner, columns)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(rank, inner))
        self.up = nn.Parameter(torch.zeros(columns, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LoRALinear(64, 64, 4) for _ in range(3))
        self.head = LoRALinear(64, 10, 4)

    def forward(self, x):
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return self.head(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Attention(nn.Module):
    """One pre-norm layer with dropout and causal attention."""

    def __init__(self, width, heads, probability=0.1):
        super().__init__()
        self.heads, self.probability = heads, probability
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        q, k, v = (
            y.view(batch, sequence, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(width, dim=2)
        )
        p = self.probability if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.proj(y.transpose(1, 2).reshape(batch, sequence, width))
        x = x + functional.dropout(y, p, self.training)
        y = self.fc2(functional.gelu(self.fc(self.ln2(x)), approximate="tanh"))
        return x + functional.dropout(y, p, self.training)


class GPT(nn.Module):
    def __init__(self, layers=3, width=64, heads=4, vocabulary=100, positions=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.h:
            x = layer(x)
        return (self.ln_f(x) @ self.wte.weight.t()).flatten(0, 1)


class ComposedGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2(nn.Module):
    """Hugging Face's GPT-2 as far as memory goes: composed gelu, dropout behind the embeddings, a tied head."""

    class Block(Attention):
        def __init__(self, width, heads):
            super().__init__(width, heads)
            self.act = ComposedGELU()

        def forward(self, x):
            batch, sequence, width = x.shape
            qkv = self.qkv(self.ln1(x)).split(width, dim=2)
            q, k, v = (y.view(batch, sequence, self.heads, -1).transpose(1, 2) for y in qkv)
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.probability, is_causal=True)
            y = self.proj(y.transpose(1, 2).reshape(batch, sequence, width))
            x = functional.dropout(y, self.probability) + x
            return x + functional.dropout(self.fc2(self.act(self.fc(self.ln2(x)))), self.probability)

    def __init__(self, layers, width, heads, vocabulary=50257, positions=1024):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(self.Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]).unsqueeze(0))
        x = functional.dropout(x, 0.1)
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x))


def shifted_loss(logits, labels):
    logits = logits.float()
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class VGG16(nn.Sequential):
    def __init__(self):
        layers, width = [], 3
        for after in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.ReLU()] if after else [nn.MaxPool2d(2)]
            width = after or width
        hidden = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
        super().__init__(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(7), nn.Flatten(), *hidden, nn.Linear(4096, 1000))


def images():
    return torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)


def tokens():
    return torch.zeros(4, 12, dtype=torch.int64), torch.zeros(48, dtype=torch.int64)


def rows(width):
    return lambda: (torch.zeros(16, width), torch.zeros(16, dtype=torch.int64))


def adam(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def adam_loop(parameters):
    return torch.optim.AdamW(parameters, foreach=False)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


CASES = {
    "convolution": (ConvNet, images, momentum, 1),
    "recurrent": (Recurrent, tokens, adam, 1),
    "tied": (Tied, tokens, adam_loop, 1),
    "custom": (Custom, rows(64), adam, 1),
    "two_micro_batches": (ConvNet, images, momentum, 2),
    "tied_two_micro_batches": (Tied, tokens, adam, 2),
    "lora": (LoRA, rows(64), adam, 1),
    "checkpointed": (Checkpointed, rows(32), adam_loop, 1),
    "attention": (GPT, tokens, adam, 1),
    "no_optimizer": (Custom, rows(64), None, 1),
}
LOSS = functional.cross_entropy


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def captured(case, **changes):
    module, batch, optimizer, micro_batches = CASES[case]
    return capture(
        module,
        lambda: batch()[0],
        targets=lambda: batch()[1],
        loss=LOSS,
        optimizer=optimizer,
        micro_batches=micro_batches,
        **changes,
    )


class Tracker(mem_tracker.MemTracker):
    """MemTracker for modules with frozen parameters, too: without the hooks that tell gradients from temporaries."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


def tracked(case, monkeypatch, rounding):
    """Peak of the same step by PyTorch's MemTracker, its sizes rounded as asked (it rounds on CUDA only)."""
    monkeypatch.setattr(
        mem_tracker._WeakRefInfo,
        "_calculate_mem_consumed",
        lambda self: -(-self.size * self.element_size // rounding) * rounding,
    )
    module, batch, optimizer, micro_batches = CASES[case]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = module()
        x, y = batch()
        tuned = optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer else None

        tracker = Tracker()

        def iteration():
            for _ in range(micro_batches):
                tracker.reset_mod_stats()  # it refuses a second forward pass otherwise
                loss = LOSS(model(x), y)
                loss.backward()
            if tuned:
                tuned.step()
                tuned.zero_grad()

        iteration()
        model.zero_grad()
        tracker.track_external(model, x, y, *([tuned] if tuned else []))
        with tracker:
            iteration()
    (of_device,) = tracker.get_tracker_snapshot("peak").values()
    return of_device["Total"]


def replayed(trace):
    return peak_memory(reference_run(trace, load_profile("a100_80_sxm"))).bytes


@pytest.mark.parametrize("rounding", [1, 512])
def test_the_peak_is_that_of_the_memory_tracker(case, rounding, monkeypatch):
    assert replayed(captured(case, rounding=rounding)) == tracked(case, monkeypatch, rounding)


def test_a_captured_trace_survives_a_file(case, tmp_path):
    trace = captured(case)
    save(trace, tmp_path / "trace.jsonl")
    assert load(tmp_path / "trace.jsonl") == trace


def test_a_second_capture_is_the_same(case):
    assert captured(case) == captured(case)
