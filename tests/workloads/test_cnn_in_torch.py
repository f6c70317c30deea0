"""The layers of every convolution net, run by PyTorch itself and captured: the same memory as the generator's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sim.analysis.peak_memory import peak_memory  # noqa: E402
from sim.experiment import reference_run  # noqa: E402
from sim.hardware.profile import load_profile  # noqa: E402
from sim.rewrites.batching import split_batch_ops  # noqa: E402
from workloads import cnn, convnets  # noqa: E402
from workloads.capture import capture  # noqa: E402


class ResponseNorm(torch.autograd.Function):
    """One kernel each way that keeps its input and its result, as cuDNN's."""

    @staticmethod
    def forward(ctx, x):
        out = torch.relu(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, g):
        _, out = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(g, out, 0)


class Net(nn.Module):
    """Runs a net of `convnets` with PyTorch's layers; the first run, on no data, makes them."""

    def __init__(self, name):
        super().__init__()
        self.net = convnets.NETS[name]
        self.parts = nn.ModuleDict()
        with torch.no_grad():
            self(torch.zeros(2, 3, self.net.image, self.net.image))

    def part(self, name, make):
        key = name.replace(".", "_")
        if key not in self.parts:
            self.parts[key] = make()
        return self.parts[key]

    def forward(self, x):
        return self.net.forward(self, x, 1000, self.net.dropout)


def conv(net, name, x, filters, kernel, *, stride=1, padding=0, groups=1, bias=False):
    return net.part(name, lambda: nn.Conv2d(x.shape[1], filters, kernel, stride, padding, groups=groups, bias=bias))(x)


LAYERS = {
    "conv": conv,
    "batch_norm": lambda net, name, x: net.part(name, lambda: nn.BatchNorm2d(x.shape[1]))(x),
    "dense": lambda net, name, x, columns: net.part(name, lambda: nn.Linear(x.shape[1], columns))(x),
    "max_pool": lambda net, name, x, kernel, stride, padding=0, up=False: functional.max_pool2d(
        x, kernel, stride, padding, ceil_mode=up
    ),
    "average_pool": lambda net, name, x, kernel, stride, padding: functional.avg_pool2d(x, kernel, stride, padding),
    "adaptive_pool": lambda net, name, x, size: functional.adaptive_avg_pool2d(x, size),
    "global_mean": lambda net, name, x: x.mean((2, 3), keepdim=True).flatten(1),
    "concatenate": lambda net, name, parts: torch.cat(parts, 1),
    "add_in_place": lambda net, name, x, y: x.add_(y),
    "local_response_norm": lambda net, name, x: ResponseNorm.apply(x),
    "dropout": lambda net, name, x, probability: functional.dropout(x, probability),
}


NAMES = ("alexnet", "vgg-16", "googlenet", "resnet-50", pytest.param("inception-v4", marks=pytest.mark.slow))


def relu(inplace):
    return lambda net, name, x: functional.relu(x, inplace)


def peaks(trace):
    return peak_memory(reference_run(trace, load_profile("a100_80_sxm"))).by_phase


@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "new"])
@pytest.mark.parametrize("name", NAMES)
def test_a_net_takes_the_memory_that_pytorch_takes(name, inplace, monkeypatch):
    compare(name, inplace, 0.9, monkeypatch)


def test_so_it_does_without_momentum(monkeypatch):
    compare("vgg-16", True, 0.0, monkeypatch)


def test_gradients_of_microbatches_with_statistics_of_their_own(monkeypatch):
    """PyTorch's loop over microbatches, which never sees the whole batch, and the whole batch's trace in parts."""
    compare("resnet-50", True, 0.9, monkeypatch, parts=3)


def compare(name, inplace, momentum, monkeypatch, parts=1):
    for layer, run in {**LAYERS, "relu": relu(inplace)}.items():
        monkeypatch.setattr(convnets, layer, run)
    monkeypatch.setattr(torch.Tensor, "viewed", lambda self, *shape: self.view(*shape), raising=False)
    size = convnets.NETS[name].image
    captured = capture(
        lambda: Net(name),
        torch.zeros(2, 3, size, size, device="meta"),
        targets=torch.zeros(2, dtype=torch.int64, device="meta"),
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum),
        kernels="cuda",
        micro_batches=parts,
    )
    monkeypatch.undo()
    trace = cnn(name, 2 * parts, inplace_relu=inplace, optimizer="sgd_momentum" if momentum else "sgd")
    if parts > 1:
        trace, _ = split_batch_ops(trace, parts, own_statistics=True)
    assert captured.meta["parameters"] == trace.meta["parameters"]
    if name != "alexnet":  # the counter overlooks groups in the weight's gradient
        assert captured.meta["model_flops"] == trace.meta["model_flops"]
    mine, theirs = peaks(trace), peaks(captured)
    # the capture runs the same inputs in each microbatch
    given = sum(t.bytes for t in trace.tensors if t.role == "input") // parts
    for phase in ("forward", "backward", "update"):
        # PyTorch holds the loss until the iteration is over, and the logits' operand until the forward pass is
        more = (parts - 1) * given
        assert mine[phase] - more == pytest.approx(theirs[phase], rel=1e-4 if parts == 1 else 1e-7), phase
