"""Layers of models of timm are what timm puts its checkpoints round."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402

from sim.errors import WorkloadError  # noqa: E402
from workloads.capture import capture  # noqa: E402


class Block(nn.Module):
    """Parts of simple parts alone, so that the tree alone shows stages and no blocks."""

    def __init__(self):
        super().__init__()
        self.conv, self.mlp = nn.Conv2d(8, 8, 3, padding=1), nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1))

    def forward(self, x):
        return x + self.mlp(self.conv(x))


class Staged(nn.Module):
    """Stages of blocks behind a convolution each, as timm writes them; the last is checkpointed as one."""

    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(Stage(2), Stage(3), Stage(1))
        self.last, self.grad_checkpointing = Block(), False

    def set_grad_checkpointing(self, enable=True):
        self.grad_checkpointing = enable
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def forward(self, x):
        x = self.stages(x)
        return (checkpoint(self.last, x) if self.grad_checkpointing else self.last(x)).square().mean()


class Stage(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.grad_checkpointing = False
        self.down, self.blocks = nn.Conv2d(8, 8, 1), nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x):
        x = self.down(x)
        return checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)


def checkpoint(*_, **__):
    raise AssertionError("the step runs without checkpoints")


def checkpoint_seq(*_, **__):
    raise AssertionError("the step runs without checkpoints")


checkpoint.__module__ = checkpoint_seq.__module__ = "timm.models._manipulate"
TIMM_BLOCKS = [
    "stages.0.blocks.0",
    "stages.0.blocks.1",
    *(f"stages.1.blocks.{i}" for i in range(3)),
    "stages.2.blocks.0",
    "last",
]


def test_layers_of_timm_are_what_it_checkpoints():
    trace = capture(Staged, torch.zeros(1, 8, 6, 6), optimizer=torch.optim.SGD)
    assert trace.meta["layer_names"] == TIMM_BLOCKS
    assert "recomputed" not in trace.meta
    # layers that are asked for, and a model whose checkpoints are on, are left as they are
    asked = capture(Staged, torch.zeros(1, 8, 6, 6), layers="Stage")
    assert asked.meta["layer_names"] == ["stages.0", "stages.1", "stages.2"]


def test_timm_is_left_as_it_was_when_a_step_fails():
    made = []

    class Failing(Staged):
        def forward(self, x):
            made.append((self, checkpoint, self.grad_checkpointing))
            raise ValueError("no")

    with pytest.raises(WorkloadError, match="no"):
        capture(Failing, torch.zeros(1, 8, 6, 6))
    module, exchanged, was_on = made[0]
    assert was_on
    assert exchanged is not checkpoint
    assert not module.grad_checkpointing
    with pytest.raises(AssertionError, match="without checkpoints"):
        checkpoint_seq()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "blocks"), [("convnextv2_atto", 12), ("coatnet_0_rw_224", 14), ("vit_tiny_patch16_224", 12)]
)
def test_models_of_timm_have_a_layer_for_each_checkpoint(name, blocks):
    timm = pytest.importorskip("timm")
    x, y = torch.empty(1, 3, 224, 224, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    trace = capture(lambda: timm.create_model(name), x, targets=y, loss=nn.functional.cross_entropy)
    assert trace.meta["layers"] == blocks
