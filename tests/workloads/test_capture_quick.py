"""Ops that run without PyTorch's own bookkeeping have the results that they have with it."""

from __future__ import annotations

from importlib import import_module

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from workloads.capture import capture  # noqa: E402
from workloads.capturing import recorder  # noqa: E402
from workloads.capturing.quick import QuickDispatch  # noqa: E402

aten = torch.ops.aten


class Scan(nn.Module):
    """A recurrence over positions, as state-space models write it."""

    def __init__(self):
        super().__init__()
        self.inner, self.decay, self.out = nn.Linear(8, 6), nn.Parameter(torch.ones(6)), nn.Linear(6, 8)

    def forward(self, x):
        y, state, seen = self.inner(x), x.new_zeros(x.shape[0], 6), []
        for i in range(x.shape[1]):
            state = torch.exp(self.decay) * state + y[:, i, :] * 2
            seen.append(state)
        return self.out(torch.stack(seen, dim=1)).transpose(1, 2).contiguous()


class Images(nn.Module):
    """Convolutions, norms, an LSTM and attention: kernels with more than one result, and layouts."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.rows = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LSTM(8, 8)
        self.mix, self.drop = nn.MultiheadAttention(8, 2, batch_first=True), nn.Dropout(0.1)

    def forward(self, x):
        y = self.drop(torch.relu(self.norm(self.conv(x.to(memory_format=torch.channels_last)))))
        y, _ = self.rows(y.flatten(2).permute(0, 2, 1))
        return self.mix(y, y, y)[0].square()


class Plain:
    """PyTorch's own way."""

    def __call__(self, func, args, kwargs):
        return func(*args, **kwargs)

    def made(self, *wanted):
        return QuickDispatch().made(*wanted)


@pytest.mark.parametrize(("net", "shape"), [(Scan, (2, 7, 8)), (Images, (2, 3, 6, 6))])
def test_a_capture_is_the_same_with_and_without_it(net, shape, monkeypatch):
    def step():
        return capture(net, torch.zeros(shape), loss=lambda y: y.mean(), optimizer=torch.optim.AdamW)

    quick = step()
    monkeypatch.setattr(recorder, "QuickDispatch", Plain)
    assert quick.content_hash == step().content_hash


CALLS = {
    "a product of two types": (aten.mul.Tensor, ((3, 4), (3, 1)), (torch.float32, torch.float16), ()),
    "a whole number": (aten.add.Scalar, ((3, 4),), (torch.int64,), (1,)),
    "a number that is equal, and none": (aten.add.Scalar, ((3, 4),), (torch.int64,), (1.0,)),
    "a truth that is equal": (aten.add.Scalar, ((3, 4),), (torch.bool,), (True,)),
    "a sum over an axis": (aten.sum.dim_IntList, ((3, 4),), (torch.float16,), ([1], True)),
    "a slice": (aten.slice.Tensor, ((6, 4),), (torch.float32,), (0, 1, 5, 2)),
    "a place": (aten.select.int, ((6, 4),), (torch.float32,), (1, 2)),
    "another place": (aten.select.int, ((6, 4),), (torch.float32,), (1, 3)),
    "the gradient of a place in another": (aten.select_backward.default, ((6,),), (torch.float32,), ([6, 5], 1, 2)),
    "the gradient of a place elsewhere": (aten.select_backward.default, ((6,),), (torch.float32,), ([5, 6], 0, 2)),
    "the gradient of a slice": (aten.slice_backward.default, ((2, 4),), (torch.float32,), ([6, 4], 0, 1, 5, 2)),
    "the gradient of a longer one": (aten.slice_backward.default, ((2, 4),), (torch.float32,), ([8, 4], 0, 1, 5, 2)),
    "a detached view": (aten.detach.default, ((6, 4),), (torch.float32,), ()),
    "another name": (aten.alias.default, ((6, 4),), (torch.float32,), ()),
    "its gradient": (aten.select_backward.default, ((6,),), (torch.float32,), ([6, 4], 1, 2)),
    "a broadcast view": (aten.expand.default, ((3, 1),), (torch.float32,), ([3, 5],)),
    "nothing": (aten.mul.Tensor, ((0, 4), (0, 4)), (torch.float32,) * 2, ()),
    "a view that no schema tells": (aten._unsafe_view.default, ((6, 4),), (torch.float32,), ([24],)),
    "a comparison": (aten.lt.Tensor, ((3, 4), (4,)), (torch.float32,) * 2, ()),
    "a matrix product": (aten.mm.default, ((3, 4), (4, 5)), (torch.bfloat16,) * 2, ()),
}


def facts(x):
    return x.shape, x.stride(), x.dtype, x.storage_offset(), x.untyped_storage().nbytes()


@pytest.mark.parametrize("transposed", [False, True])
def test_results_are_those_of_real_tensors(transposed):
    """One object runs all of them, and each twice, so that what it keeps of one is offered to the next."""
    quick, mode = QuickDispatch(), FakeTensorMode()
    for func, shapes, types, rest in [*CALLS.values(), *CALLS.values()]:
        real = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]
        if transposed:  # the same sizes, other strides
            real = [x.t().contiguous().t() for x in real]
        try:
            theirs = func(*real, *rest)
        except RuntimeError:  # a view that these strides do not allow
            continue
        with mode:
            fake = [mode.from_tensor(x) for x in real]
            ours = quick(func, (*fake, *rest), {})
        assert facts(ours) == facts(theirs), func
        shares = [
            any(x.untyped_storage()._cdata == given.untyped_storage()._cdata for given in operands)
            for x, operands in ((ours, fake), (theirs, real))
        ]
        assert shares[0] == shares[1], func


def test_a_result_has_the_attributes_of_pytorchs_own_fake_tensor():
    quick, mode = QuickDispatch(), FakeTensorMode()
    with mode:
        x = torch.zeros(3, 4)
        for func, rest in ((aten.exp.default, ()), (aten.t.default, ())):
            theirs = func(x, *rest)
            for ours in [quick(func, (x, *rest), {}) for _ in range(3)]:
                assert type(ours) is type(theirs)
                assert vars(ours) == vars(theirs)
                assert ours.device == theirs.device
                assert ours.requires_grad == theirs.requires_grad
                assert not mode.in_kernel_invocation


def test_a_scan_dispatches_nothing_through_pytorchs_fake_tensors_per_position(monkeypatch):
    """What each position would otherwise ask of them takes most of the time of a long sequence."""
    fake = import_module("torch._subclasses.fake_tensor")
    calls = []
    plain = fake.FakeTensorMode.dispatch
    monkeypatch.setattr(fake.FakeTensorMode, "dispatch", lambda *args: calls.append(args) or plain(*args))
    asked = []
    for length in (8, 24):
        calls.clear()
        capture(Scan, torch.zeros(2, length, 8), loss=lambda y: y.mean())
        asked.append(len(calls))
    assert asked[1] - asked[0] < 16
