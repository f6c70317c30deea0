"""FLOPs of single ops: PyTorch's counter where it knows one, the textbook by hand, and what shapes alone tell."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from workloads.capturing.arithmetic import flops_of as dispatched  # noqa: E402
from workloads.importers.aten import flops_of as told_by_shapes  # noqa: E402


def t(*shape):
    return torch.zeros(shape, requires_grad=True)


def recurrent(kind):
    layer = kind(4, 6)
    return lambda: layer(t(5, 2, 4))[0]


OPS = {
    "mm": lambda: t(5, 3) @ t(3, 4),
    "bmm": lambda: torch.bmm(t(2, 5, 3), t(2, 3, 4)),
    "mv": lambda: torch.mv(t(3, 4), t(4)),
    "dot": lambda: torch.dot(t(3), t(3)),
    "vdot": lambda: torch.vdot(t(3), t(3)),
    "addmm": lambda: torch.addmm(t(3, 5), t(3, 4), t(4, 5)),
    "addmv": lambda: torch.addmv(t(3), t(3, 4), t(4)),
    "addbmm": lambda: torch.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "baddbmm": lambda: torch.baddbmm(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "multi_dot": lambda: torch.linalg.multi_dot([t(3, 5), t(5, 4), t(4, 5)]),
    "einsum": lambda: torch.einsum("bi,oij,bj->bo", t(2, 5), t(4, 5, 3), t(2, 3)),
    "tensordot": lambda: torch.tensordot(t(2, 5, 3), t(5, 3, 7), dims=2),
    "inner": lambda: torch.inner(t(2, 3), t(4, 3)),
    "kron": lambda: torch.kron(t(2, 3), t(4, 5)),
    "outer": lambda: torch.outer(t(5), t(7)),
    "addr": lambda: torch.addr(t(5, 7), t(5), t(7)),
    "matmul": lambda: t(2, 1, 3, 4) @ t(5, 4, 6),
    "matmul with a vector": lambda: t(4) @ t(5, 4, 6),
    "linear": lambda: F.linear(t(2, 5, 4), t(6, 4), t(6)),
    "cdist": lambda: torch.cdist(t(30, 4), t(40, 4)),
    "conv1d": lambda: F.conv1d(t(2, 4, 9), t(6, 4, 3), padding=1),
    "conv2d": lambda: F.conv2d(t(2, 4, 9, 9), t(6, 4, 3, 3), stride=2),
    "conv2d, square": lambda: F.conv2d(t(2, 4, 9, 9), t(4, 4, 3, 3), stride=2),
    "conv2d, groups": lambda: F.conv2d(t(2, 4, 9, 9), t(6, 2, 3, 3), groups=2),
    "conv2d, depthwise": lambda: F.conv2d(t(2, 4, 9, 9), t(4, 1, 3, 3), groups=4),
    "conv3d": lambda: F.conv3d(t(2, 4, 5, 5, 5), t(6, 4, 3, 3, 3)),
    "transposed 1d": lambda: F.conv_transpose1d(t(2, 4, 9), t(4, 6, 3), stride=2),
    "transposed 2d": lambda: F.conv_transpose2d(t(2, 4, 9, 9), t(4, 6, 3, 3), stride=2),
    "transposed, square": lambda: F.conv_transpose2d(t(2, 4, 9, 9), t(4, 4, 3, 3), stride=2),
    "transposed, groups": lambda: F.conv_transpose2d(t(2, 4, 9, 9), t(4, 3, 3, 3), stride=2, groups=2),
    "transposed 3d": lambda: F.conv_transpose3d(t(2, 4, 5, 5, 5), t(4, 6, 3, 3, 3), stride=2),
    "attention": lambda: F.scaled_dot_product_attention(t(2, 3, 8, 16), t(2, 3, 8, 16), t(2, 3, 8, 16)),
    "attention, longer keys": lambda: F.scaled_dot_product_attention(t(2, 3, 8, 16), t(2, 3, 10, 16), t(2, 3, 10, 16)),
    "multi-head attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True)(t(2, 5, 8), t(2, 5, 8), t(2, 5, 8))[
        0
    ],
    "embedding bag": lambda: F.embedding_bag(torch.tensor([1, 2, 0]), t(9, 5), torch.tensor([0, 2])),
    "RNN cell": lambda: nn.RNNCell(4, 6)(t(2, 4)),
}


class Calls(TorchDispatchMode):
    """Every dispatched op: its name, shapes in and out, our FLOPs, and those of PyTorch's counter (None: unknown)."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        known = flop_registry.get(func._overloadpacket)
        theirs = None if known is None else known(*args, **kwargs, out_val=out)
        shapes = [[list(x.shape) for x in each if isinstance(x, torch.Tensor)] for each in (args, made_by(out))]
        ours = dispatched(flop_registry, func, args, kwargs, out)
        groups = args[9] if "convolution_backward" in str(func) else 1
        self.rows.append((str(func), *shapes, ours, theirs if groups == 1 else None))
        return out


def made_by(out):
    return out if isinstance(out, (tuple, list)) else [out]


def calls(make):
    with Calls() as seen:
        made = make()
        made.sum().backward()
    return seen.rows


@pytest.mark.parametrize("name", OPS)
def test_all_ways_to_count_agree_forward_and_backward(name):
    for func, inputs, outputs, ours, theirs in calls(OPS[name]):
        assert theirs in (None, ours), func  # grouped convolutions are left out: the counter multiplies by the groups
        if "_linalg" not in func:
            assert told_by_shapes(func.replace("aten.", "aten::", 1), inputs, outputs) == ours, func


@pytest.mark.parametrize(
    ("make", "forward"),
    [
        # each pixel of the input is multiplied by every filter of its group
        (OPS["transposed 2d"], 2 * (2 * 4 * 9 * 9) * (6 * 3 * 3)),
        (OPS["transposed, square"], 2 * (2 * 4 * 9 * 9) * (4 * 3 * 3)),
        (OPS["transposed, groups"], 2 * (2 * 4 * 9 * 9) * (3 * 3 * 3)),
        (OPS["conv2d, depthwise"], 2 * (2 * 4 * 7 * 7) * (3 * 3)),
        (OPS["addbmm"], 2 * 2 * 3 * 4 * 5),
    ],
)
def test_by_hand(make, forward):
    """Forward by the textbook; backward has twice as much, in gradients of both operands."""
    counts = [ours for *_, ours, _ in calls(make)]
    assert sum(counts) == 3 * forward
    assert forward in counts


def test_a_bilinear_form_is_two_products_and_each_of_its_gradients_is():
    """x W (5 x 3 by 3 x 4, for each of 6 outputs), then with y; then the same for what each of the three reads."""
    b, i, j, o = 5, 3, 4, 6
    rows = calls(lambda: F.bilinear(t(b, i), t(b, j), t(o, i, j), t(o)))
    forward, *backward = [ours for func, *_, ours, _ in rows if "_trilinear" in func]
    assert forward == 2 * b * o * i * j + 2 * b * o * j
    assert sum(backward) > 0
    assert len([row for row in rows if row[3]]) >= 2
