"""Three kinds of checkpoint round the blocks of small nets: peaks of PyTorch's steps on this machine, and ours."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import cache, partial

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402

from sim.experiment import simulate  # noqa: E402
from tests.validation.oracle import machine, peaks_of  # noqa: E402
from workloads.capture import capture  # noqa: E402


class Live(TorchDispatchMode):
    """Bytes of all storages that live, and the most of each phase after an op."""

    def __init__(self):
        super().__init__()
        self.live, self.known, self.phase, self.peaks = 0, {}, "", {}

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.live += size
            self.known[key] = weakref.ref(storage, lambda _: self.release(key, size))

    def release(self, key, size):
        del self.known[key]
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        self.peaks[self.phase] = max(self.live, self.peaks.get(self.phase, 0))
        return out


class Experts(nn.Module):
    """A loop over experts: `index_add_` saves what it adds for its shape alone."""

    def __init__(self, width=32, count=4):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.up = nn.ParameterList(nn.Parameter(torch.randn(width, 2 * width)) for _ in range(count))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(2 * width, width)) for _ in range(count))

    def forward(self, x):
        y = self.norm(x)
        shares = self.router(y).softmax(-1)
        sums = torch.zeros_like(y)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows = torch.arange(i, len(x), len(self.up))
            sums.index_add_(0, rows, (F.gelu(y[rows] @ up) @ down) * shares[rows, i : i + 1])
        return x + sums


class Attention(nn.Module):
    """Separate attention ops and an MLP; a mask enters beside the activations."""

    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        y = self.norm1(x)
        scores = self.q(y) @ self.k(y).transpose(-2, -1)
        scores = scores + mask
        scores = scores.softmax(-1)
        y = scores @ self.v(y)
        y = self.o(y)
        x = x + y
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    """Two convolutions with batch norm, and a relu whose backward reads the block's result."""

    def __init__(self, channels=8):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Dense(nn.Module):
    """A convolution of all that came before."""

    def __init__(self, channels):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, *features):
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class Gated(nn.Module):
    """Two results; the second argument is read for the second result alone, which backward does not read."""

    def __init__(self, width=24):
        super().__init__()
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, total):
        gate = torch.sigmoid(self.gate(x))
        y = F.relu(self.up(x), inplace=True)
        y = torch.where(gate > 0.5, y, x)
        gate = y * gate
        return gate, total + y


class Mixed(nn.Module):
    """A product of two types and two shapes, whose node casts one gradient and sums the other, holding what it saved.

    Checkpoints hand it what they recomputed for its own kernels alone.
    """

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.router = nn.Linear(width, 1)

    def forward(self, x):
        return x + self.down(self.up(x).to(torch.bfloat16) * self.router(x))


class Gate(nn.Module):
    """A gate and the root of a mean square: two variables hold what autograd saves, and what is squared has a node of
    three kernels."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        up, gate = self.up(x), self.gate(x)
        hidden = up * F.silu(gate)
        mean = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(mean + 1e-6)
        return x + self.down(hidden)


class Net(nn.Module):
    """A first layer, blocks, and a last layer."""

    def __init__(self, first, blocks, last, kind):
        super().__init__()
        self.first, self.parts, self.last, self.kind = first, nn.ModuleList(blocks), last, kind

    def forward(self, x):
        x = self.first(x)
        if self.kind == "dense":
            features = [x]
            for part in self.parts:
                features.append(part(*features))
            x = torch.cat(features, 1)
        elif self.kind == "masked":
            mask = torch.ones(x.shape[-2], x.shape[-2]).tril().log()
            for part in self.parts:
                x = part(x, mask)
        elif self.kind == "gated":
            total = x
            for part in self.parts:
                x, total = part(x, total)
            x = x + total
        else:
            for part in self.parts:
                x = part(x)
        return self.last(x).square().mean()


def flat(kind, block):
    return Net(nn.Linear(32, 32), [block() for _ in range(2)], nn.Linear(32, 8), kind)


def image(kind, blocks, channels):
    return Net(nn.Conv2d(3, 8, 3), blocks, nn.Conv2d(channels, 4, 1), kind)


NETS = {
    "experts": (lambda: flat("", Experts), (64, 32)),
    "attention": (lambda: flat("masked", Attention), (4, 96, 32)),
    "gated": (lambda: Net(nn.Linear(24, 24), [Gated() for _ in range(3)], nn.Linear(24, 4), "gated"), (40, 24)),
    "gate": (lambda: flat("", Gate), (64, 32)),
    "mixed": (lambda: flat("", Mixed), (64, 32)),
    "residual": (lambda: image("", [Residual(), Residual()], 8), (2, 3, 18, 18)),
    "dense": (lambda: image("dense", [Dense(8 + 4 * i) for i in range(3)], 20), (2, 3, 18, 18)),
}
WAYS = {
    "non-reentrant": {},
    "to its end": {"early_stop": False},
    "reentrant": {"reentrant": True},
}


ROUGH = {("dense", "reentrant"): 0.04, ("gated", "reentrant"): 0.04}
"""There PyTorch copies each part of the gradient of a concatenation, and the gradient that a sum passes on, since it is
to be the `grad` of an argument."""


def measured(net, way):
    """The highest points of a step's forward and backward pass."""
    make, shape = NETS[net]
    model, x = make(), torch.zeros(shape)
    for part in model.parts:
        part.forward = partial(checkpoint, part.forward, use_reentrant=way == "reentrant")
    tuned = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(ledger):
        with nullcontext() if way != "to its end" else set_checkpoint_early_stop(False):
            ledger.phase = "forward"
            loss = model(x)
            ledger.phase = "backward"
            loss.backward()
            ledger.phase = "update"
            tuned.step()
            tuned.zero_grad(set_to_none=True)

    step(Live())
    gc.collect()
    ledger = Live()
    state = [tensor for one in tuned.state.values() for tensor in one.values()]
    for tensor in (*model.parameters(), *model.buffers(), *state, x):
        ledger.add(tensor)
    gc.disable()
    try:
        with ledger:
            step(ledger)
    finally:
        gc.enable()
    return ledger.peaks["forward"], ledger.peaks["backward"]


@cache
def trace_of(net):
    make, shape = NETS[net]
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return capture(make, torch.zeros(shape, device="meta"), optimizer=sgd, kernels="cpu")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("net", NETS)
def test_a_checkpointed_step_holds_what_pytorchs_holds(net, way):
    found = peaks_of(simulate(trace_of(net), machine(), "full_recompute", **WAYS[way]).log, unit=1)
    forward, backward = measured(net, way)
    assert found.total("forward") == pytest.approx(forward, rel=0.002)
    assert found.total("backward") == pytest.approx(backward, rel=ROUGH.get((net, way), 0.002))
