"""What a script draws, returns and does around its step, and how the trace of it stays one trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sim.errors import WorkloadError
from sim.trace import Trace
from workloads.capture import capture_from_reference

torch: Any = pytest.importorskip("torch", reason="captures PyTorch steps")

HEAD = """
import random
import numpy as np
import torch
from torch import nn

net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.Adam(net.parameters())


def train(x):
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


"""


def captured(tmp_path: Any, body: str) -> Trace:
    file = tmp_path / "train.py"
    file.write_text(HEAD + body)
    return capture_from_reference(f"{file}:step")


def rows(trace: Trace) -> int:
    """Of the first product: its FLOPs are two for each weight and row."""
    return next(op.flops for op in trace.ops if op.kind == "matmul") // (2 * 32 * 64)


DRAWN = {
    "lengths": (
        "x = nn.utils.rnn.pad_sequence([torch.rand(int(n), 32) for n in torch.randint(500, 1000, (8,))], True)",
        8 * 749,
    ),
    "a size": ("x = torch.rand(8, 32 * int(torch.randint(10, 20, (1,))), 32)", 8 * 32 * 14),
    "a size that is computed": ("x = torch.rand((torch.randint(10, 20, ()) * 4 + 1).item(), 32)", 14 * 4 + 1),
}


@pytest.mark.parametrize("what", DRAWN)
def test_a_drawn_size_is_the_mean_of_its_range(tmp_path, what):
    line, expected = DRAWN[what]
    trace = captured(tmp_path, f"def step():\n    {line}\n    train(x.cuda())\n")
    assert rows(trace) == expected
    assert any("the mean of those among which it is drawn" in note for note in trace.meta["assumed"])


@pytest.mark.parametrize(
    "draw",
    ["random.randint(8, 900)", "int(np.random.randint(8, 900))", "int(np.random.default_rng().integers(8, 900))"],
)
def test_what_python_and_numpy_draw_is_the_same_in_each_capture_and_nothing_is_drawn_from_the_callers_numbers(
    tmp_path, draw
):
    found = set()
    for seed in (1, 2, 3):
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), np.random.get_state()[2]
        trace = captured(tmp_path, f"def step():\n    train(torch.rand({draw}, 32).cuda())\n")
        assert (random.getstate(), np.random.get_state()[2]) == before
        found.add(rows(trace))
        assert [note for note in trace.meta["assumed"] if "seed 0" in note]
    assert len(found) == 1


def test_a_step_that_draws_nothing_is_not_said_to_have_a_seed(tmp_path):
    trace = captured(tmp_path, "def step():\n    train(torch.rand(8, 32).cuda())\n")
    assert not [note for note in trace.meta["assumed"] if "seed" in note]


def test_a_step_may_return_its_metrics_and_a_description_without_a_module_is_refused(tmp_path):
    plain = captured(tmp_path, "def step():\n    train(torch.rand(8, 32).cuda())\n")
    metrics = captured(
        tmp_path, "def step():\n    return {'loss': train(torch.rand(8, 32).cuda()).item(), 'lr': 0.1}\n"
    )
    assert [op.name for op in metrics.ops] == [op.name for op in plain.ops]
    with pytest.raises(WorkloadError, match="must return a dict with at least 'module', or the step; or be the step"):
        captured(tmp_path, "def step():\n    return {'modul': net}\n")


def test_a_second_stream_is_the_one_that_there_is(tmp_path):
    trace = captured(
        tmp_path,
        """
def step():
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x = torch.rand(8, 32).cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream())
    side.record_event(done)
    done.synchronize()
    train(x)
""",
    )
    assert rows(trace) == 8
    with pytest.raises(WorkloadError, match="a CUDA graph has no ops to see: capture it without the graph"):
        captured(tmp_path, "def step():\n    torch.cuda.CUDAGraph()\n    train(torch.rand(8, 32).cuda())\n")


def test_a_product_of_two_types_is_refused_as_pytorch_refuses_it(tmp_path):
    body = "def step():\n    train(torch.rand(8, 32, dtype=torch.bfloat16).cuda())\n"
    with pytest.raises(WorkloadError, match=r"train\.py:12 .*of the types float32 and bfloat16, which PyTorch ref"):
        captured(tmp_path, body)
    with pytest.raises(RuntimeError):
        torch.nn.Linear(32, 64)(torch.rand(8, 32, dtype=torch.bfloat16))
    autocast = body.replace("    train", "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        train")
    assert rows(captured(tmp_path, autocast)) == 8


def test_a_sum_that_a_backward_of_ones_own_makes_is_none_of_autograds(tmp_path):
    trace = captured(
        tmp_path,
        """
class Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        a, b = torch.full((1000, 1000), 1.0), torch.full((1000, 1000), 2.0)
        c = a + b
        del a, b
        return torch.zeros(8, 1) * c[0, 0]


def step():
    Wide.apply(net(torch.rand(8, 32).cuda())).backward()
""",
    )
    assert any(op.name.endswith("add") and trace.tensors[op.writes[0]].bytes == 4_000_000 for op in trace.ops)
    assert not [note for note in trace.meta["assumed"] if "two gradients meet" in note]


def test_flex_attention_is_refused_with_the_way_out(tmp_path):
    body = """
from torch.nn.attention.flex_attention import flex_attention


def step():
    q = net[0](torch.rand(2, 4, 16, 32).cuda())
    flex_attention(q, q, q).sum().backward()
"""
    with pytest.raises(WorkloadError, match=r"train\.py:\d+ .*: capture the step with scaled_dot_product_attention in"):
        captured(tmp_path, body)
