"""Layers are what repeats, wherever it stands, or what one says they are."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sim import simulate  # noqa: E402
from sim.analysis.peak_memory import peaks_by_phase  # noqa: E402
from sim.errors import TraceError, WorkloadError  # noqa: E402
from sim.measure.tracked import Tracked  # noqa: E402
from sim.measure.validate import roomy  # noqa: E402
from sim.trace.chain import chain  # noqa: E402
from sim.trace.layers import blocks  # noqa: E402
from workloads.capture import capture  # noqa: E402
from workloads.capturing.layers import layer_paths  # noqa: E402

W = 8


class Block(nn.Module):
    """Its parts are numbered, as those of torchvision's vision transformer are."""

    def __init__(self, parts=2):
        super().__init__()
        self.mlp = nn.Sequential(*(nn.Linear(W, W) for _ in range(parts)))
        self.parts = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.mlp(x)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(W, W)

    def forward(self, x):
        return x + self.project(x)


class Down(Inner):
    """A part that stands between blocks."""


def run(module, x):
    for part in module.children():
        x = part(x)
    return x


def net(**parts):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part())

        def forward(self, x):
            return run(self, x)

    return Net


class Stack(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        return run(self.layers, x)


def named(blocks):
    """A sequence of named parts."""
    whole = nn.Sequential()
    for i in range(blocks):
        whole.add_module(f"encoder_layer_{i}", Block())
    return whole


@pytest.mark.parametrize(
    ("build", "paths"),
    [
        (net(stem=Inner, layers=partial(named, 3), head=Inner), [f"layers.encoder_layer_{i}" for i in range(3)]),
        (net(one=Stack, head=partial(nn.Linear, W, W)), ["one.layers.0", "one.layers.1"]),
        (net(one=partial(Stack, 1)), ["one.layers.0"]),  # a list of one is a list
        (net(encoder=Stack, decoder=Stack), [f"{x}.layers.{i}" for x in ("encoder", "decoder") for i in (0, 1)]),
        (net(a=Inner, b=Inner, c=Inner, d=Down), ["a", "b", "c", "d"]),  # a network of modules as attributes
        (net(a=Inner, b=Inner, c=nn.Identity), ["a", "b"]),
        (
            lambda: nn.Sequential(nn.Sequential(Inner(), Inner()), Down(), nn.Sequential(Inner()), Down()),
            ["0.0", "0.1", "1", "2.0", "3"],
        ),
        (lambda: nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W)), ["0", "1", "2"]),
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(W, W), nn.ReLU()), nn.Linear(W, W)), ["0", "1"]),
        (net(only=partial(nn.Linear, W, W)), []),
        (  # simple parts of a list are layers beside others
            net(layers=partial(named, 2), up=lambda: nn.ModuleList(nn.Linear(W, W) for _ in range(2))),
            ["layers.encoder_layer_0", "layers.encoder_layer_1", "up.0", "up.1"],
        ),
    ],
)
def test_layers_are_what_repeats(build, paths):
    assert list(layer_paths(build())) == paths


@pytest.mark.parametrize("key", ["_no_split_modules", "_repeated_blocks"])
def test_a_model_may_say_what_its_layers_are(key):
    model = nn.Sequential(nn.Sequential(Block(), Block()), Down(), Down())
    assert list(layer_paths(model)) == ["0.0", "0.1", "1", "2"]
    setattr(model, key, ["Block", "Embeddings"])
    assert list(layer_paths(model)) == ["0.0", "0.1"]


@pytest.mark.parametrize(
    ("wanted", "paths"),
    [
        (
            "Inner",
            ["stem", "one.layers.0.parts.0", "one.layers.0.parts.1", "one.layers.1.parts.0", "one.layers.1.parts.1"],
        ),
        ("Block", ["one.layers.0", "one.layers.1"]),
        (["stem", "one.layers.[1-9]"], ["stem", "one.layers.1"]),
        (("Block", "Inner"), ["stem", "one.layers.0", "one.layers.1"]),  # the outermost
    ],
)
def test_one_may_say_what_the_layers_are(wanted, paths):
    trace = capture(net(stem=Inner, one=Stack), torch.zeros(2, W), loss=torch.sum, layers=wanted)
    assert trace.meta["layer_names"] == paths
    inside = {op.name: op.layer for op in trace.ops if op.phase == "forward" and op.kind == "matmul"}
    for name, layer in inside.items():
        assert layer == next((i for i, path in enumerate(paths) if name.startswith(f"{path}.")), -1)


def test_what_is_no_part_is_refused_with_the_nearest():
    with pytest.raises(WorkloadError, match=r"layers: 'Blok' is neither a class nor a path .*did you mean 'Block'"):
        capture(Stack, torch.zeros(2, W), loss=torch.sum, layers="Blok")


def test_each_layer_is_one_block_of_the_trace():
    trace = capture(net(stem=Inner, layers=partial(named, 3)), torch.zeros(2, W), loss=torch.sum)
    assert trace.meta["layers"] == 3
    assert [block.layer for block in blocks(trace) if block.layer >= 0] == [0, 1, 2]
    assert all(block.backward for block in blocks(trace))


class Loop(nn.Module):
    """Calls its parts in turn, twice; with `checkpoints`, under PyTorch's own."""

    def __init__(self, *, checkpoints=False, **parts):
        super().__init__()
        self.checkpoints = checkpoints
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        for _ in range(2):
            for part in self.children():
                called = partial(checkpoint, part, use_reentrant=False) if self.checkpoints else part
                for single in part if isinstance(part, nn.ModuleList) else [called]:
                    x = single(x)
        return x


def layers_of(trace, phase, kind="matmul"):
    return [op.layer for op in trace.ops if op.phase == phase and op.kind == kind]


def test_each_call_of_a_layer_is_a_layer():
    trace = capture(lambda: Loop(blocks=nn.ModuleList([Inner(), Inner()])), torch.zeros(2, W), loss=torch.sum)
    assert trace.meta["layer_names"] == ["blocks.0", "blocks.1"] * 2
    assert layers_of(trace, "forward") == [0, 1, 2, 3]
    products = layers_of(trace, "backward")
    assert products == sorted(products, reverse=True)
    assert set(products) == {0, 1, 2, 3}
    # the weights and their gradients belong to the first call, which is the last to add to them
    assert {t.layer for t in trace.tensors if t.role == "weight"} == {0, 1}


@pytest.mark.parametrize("checkpoints", [False, True])
def test_without_a_list_what_is_called_repeatedly_is_a_layer(checkpoints):
    def model():
        return Loop(cell=nn.GRUCell(W, W), checkpoints=checkpoints)

    trace = capture(model, torch.zeros(2, W), loss=torch.sum, micro_batches=2)
    assert trace.meta["layer_names"] == ["cell", "cell"]  # a microbatch is not a further call
    forward = layers_of(trace, "forward")
    assert forward == [0] * (len(forward) // 4) + [1] * (len(forward) // 4) + forward[: len(forward) // 2]
    backward = layers_of(trace, "backward")[: len(layers_of(trace, "backward")) // 2]
    assert backward == sorted(backward, reverse=True)
    assert len(set(backward)) == 2


def test_a_step_that_recomputes_says_so_where_it_is_no_chain():
    def step(checkpoints):
        return capture(
            lambda: Loop(blocks=nn.GRUCell(W, W), checkpoints=checkpoints), torch.zeros(2, W), loss=torch.sum
        )

    assert "recomputed" not in step(False).meta
    again = step(True)
    inside = sum(op.layer >= 0 for op in again.ops if op.phase == "forward")
    assert again.meta["recomputed"] == inside - 2 * 2  # each call stops when it has what backward needs
    with pytest.raises(TraceError, match=r"recomputes \d+ ops under checkpoints of its own: capture it without them"):
        chain(again, [1] * len(again.ops), least=99)
    with pytest.raises(TraceError, match=r"(?<!without them)$"):
        chain(step(False), [1] * len(again.ops), least=99)


def test_what_is_called_once_or_has_no_weights_is_no_layer():
    trace = capture(lambda: Loop(act=nn.ReLU()), torch.zeros(2, W, requires_grad=True), loss=torch.sum)
    assert trace.meta["layer_names"] == []
    assert capture(Inner, torch.zeros(2, W), loss=torch.sum).meta["layer_names"] == []


@pytest.mark.parametrize(
    ("name", "count"), [("vit_b_16", 12), ("densenet121", 7), ("resnet50", 16), ("swin_t", 15), ("inception_v3", 17)]
)
def test_torchvisions_models_have_the_layers_of_their_papers(name, count):
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        assert len(layer_paths(getattr(models, name)())) == count


# ---- stages of a class of their own, and what a library wraps ------------------------------------


class Stage(nn.Sequential):
    """As in torchvision's RegNet: it only runs its blocks in turn."""


class Normed(nn.Sequential):
    """As torchvision's convolution with norm and activation: a block that happens to be a sequence."""

    def __init__(self):
        super().__init__(nn.Linear(W, W), nn.LayerNorm(W), nn.ReLU())


def test_a_class_for_a_sequence_of_like_blocks_is_not_a_layer():
    trunk = nn.Sequential(Stage(Inner(), Inner(), Inner()), Stage(Inner()))
    assert layer_paths(net(trunk=lambda: trunk)()) == ("trunk.0.0", "trunk.0.1", "trunk.0.2", "trunk.1.0")


def test_a_block_that_is_a_sequence_stays_a_layer():
    assert layer_paths(net(features=lambda: nn.Sequential(Normed(), Normed(), Normed()))()) == tuple(
        f"features.{i}" for i in range(3)
    )


def test_how_a_weight_is_computed_is_no_layer():
    conv = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(W, W, 3))
    assert layer_paths(net(embed=lambda: conv, blocks=lambda: nn.ModuleList(Inner() for _ in range(2)))()) == (
        "blocks.0",
        "blocks.1",
    )


class Mixed(nn.Module):
    """A stage of diffusers' kind: of its two parts the library's checkpoints are put round the first."""

    def __init__(self, width):
        super().__init__()
        self.residual = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.attention = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.gradient_checkpointing = False

    def forward(self, x, time):
        if self.gradient_checkpointing:
            x = self._gradient_checkpointing_func(self.residual, x + time)
        else:
            x = self.residual(x + time)
        return self.attention(x)


class Stages(nn.Module):
    _supports_gradient_checkpointing = True

    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.stages = nn.ModuleList(Mixed(width) for _ in range(3))

    def forward(self, x, t):
        time = self.time(t)
        for stage in self.stages:
            x = stage(x, time)
        return x.square().mean()

    def enable_gradient_checkpointing(self, gradient_checkpointing_func=None):
        function = gradient_checkpointing_func or partial(checkpoint, use_reentrant=False)
        for stage in self.stages:
            stage.gradient_checkpointing, stage._gradient_checkpointing_func = True, function

    def disable_gradient_checkpointing(self):
        for stage in self.stages:
            stage.gradient_checkpointing = False


def given():
    return torch.randn(64, 32), torch.randn(64, 1)


def test_layers_are_what_the_library_puts_its_checkpoints_round():
    trace = capture(Stages, given)
    assert trace.meta["layer_names"] == [f"stages.{i}.residual" for i in range(3)]
    tracker = Tracked("checkpoint")
    capture(Stages, given, observer=tracker)
    assert tracker.whose == "Stages"
    log = simulate(trace, roomy(10**9, 10**9), "full_recompute").log
    assert max(peaks_by_phase(log).values()) == pytest.approx(max(tracker.highest.values()), rel=1e-3)
    whole = capture(Stages, given, layers="Mixed")  # the stages, as it was: it would save more than the library does
    log = simulate(whole, roomy(10**9, 10**9), "full_recompute").log
    assert max(peaks_by_phase(log).values()) != pytest.approx(max(tracker.highest.values()), rel=0.02)


def test_a_model_whose_checkpoints_are_on_is_left_so():
    model = Stages()
    model.enable_gradient_checkpointing()
    trace = capture(model, given)
    assert trace.meta["recomputed"] > 0
    assert trace.meta["layer_names"] == [f"stages.{i}" for i in range(3)]


def test_asking_a_library_leaves_its_checkpoints_off():
    assert "recomputed" not in capture(Stages, given).meta


def test_a_gradient_that_waits_for_another_is_not_held_by_the_tracker():
    tracker = Tracked("none")
    trace = capture(Stages, given, observer=tracker)
    assert peaks_by_phase(simulate(trace, roomy(10**9, 10**9)).log) == tracker.highest
