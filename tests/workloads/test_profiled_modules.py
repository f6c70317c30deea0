"""Layers of a profiler's trace, from the modules whose calls it has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim import load_profile, save_trace, simulate
from sim.errors import TraceError
from sim.trace.graph import Trace
from workloads import load_trace

BACKWARD = "autograd::engine::evaluate_function: "


class Recording:
    """Events of a profile, written as calls within calls; each op takes 10 us and allocates 512 bytes that stay."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 0
        self.count: Counter[str] = Counter()

    def _span(self, category: str, name: str, inside: Callable[[], None], **args: Any) -> None:
        start = self.now
        self.now += 1
        inside()
        self.now += 1
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": self.now - start}
        self.events.append({**event, "args": args})

    def module(self, name: str, *parts: Any) -> Callable[[], None]:
        """A call of a module, in which these run in turn."""
        return lambda: self._span("python_function", f"nn.Module: {name}", lambda: self.run(*parts))

    def op(self, name: str = "aten::mul", sequence: int | None = None) -> Callable[[], None]:
        """A call of an op."""
        known = {} if sequence is None else {"Sequence number": sequence}

        def take() -> None:
            self.now += 8
            size, args = 512, {"Device Type": 0, "Device Id": -1}
            args |= {"Bytes": size, "Addr": self.now, "Total Allocated": size * (1 + self.count["allocations"])}
            self.count["allocations"] += 1
            self.events.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": self.now, "args": args})

        return lambda: self._span("cpu_op", name, take, **known)

    def backward(self, sequence: int, *parts: Any) -> Callable[[], None]:
        """What the autograd engine runs for the forward op of this number."""
        name = f"{BACKWARD}MulBackward0"
        return lambda: self._span("cpu_op", name, lambda: self.run(*parts), **{"Sequence number": sequence})

    def run(self, *parts: Callable[[], None]) -> None:
        """Run these in turn."""
        for part in parts:
            part()

    def trace(self, folder: Path, *parts: Callable[[], None]) -> Trace:
        """What is read of a recording of these."""
        self.run(*parts)
        path = folder / "t.json"
        path.write_text(json.dumps({"traceEvents": self.events}), encoding="utf-8")
        return load_trace(path)


def layers(trace: Trace, phase: str = "forward") -> list[int]:
    return [op.layer for op in trace.ops if op.phase == phase]


@pytest.fixture
def r() -> Recording:
    return Recording()


def test_blocks_of_one_class_are_layers_and_backward_ops_are_in_that_of_their_forward_op(r, tmp_path):
    blocks = [r.module(f"Block_{i}", r.module(f"Linear_{i}", r.op(sequence=i)), r.op()) for i in range(2)]
    net = r.module("Net_0", r.op(), *blocks, r.module("Linear_2", r.op(sequence=2)))
    inner = "aten::mul_backward"
    back = [r.backward(2, r.op(inner)), r.backward(1, r.op(inner)), r.op(f"{BACKWARD}AccumulateGrad")]
    back += [r.backward(1, r.op(inner)), r.backward(0, r.op(inner))]
    trace = r.trace(tmp_path, net, *back)
    assert trace.meta["layer_names"] == ["Block_0", "Block_1"]
    assert trace.meta["layers"] == 2
    assert layers(trace) == [-1, 0, 0, 1, 1, -1]
    # what backward runs between two ops of a layer is in it
    assert layers(trace, "backward") == [-1, 1, 1, 1, 0]
    assert all(trace.tensors[t].layer == op.layer for op in trace.ops for t in op.writes)


def test_the_blocks_of_stages_in_sequences_are_layers_and_the_stages_are_not(r, tmp_path):
    def stage(first: int, count: int) -> list[Callable[[], None]]:
        extra = r.module(f"Sequential_{first + 90}", r.module(f"Conv_{first + 90}", r.op()))
        names = range(first, first + count)
        return [r.module(f"Block_{i}", r.module(f"Conv_{i}", r.op()), *([extra] if i == first else [])) for i in names]

    # of the second stage no two blocks are alike, but they have the class of the first stage's
    net = r.module("Net_0", r.module("Sequential_0", *stage(0, 3)), r.module("Sequential_1", *stage(3, 2)))
    assert r.trace(tmp_path, net).meta["layer_names"] == [f"Block_{i}" for i in range(5)]


def test_an_encoder_and_a_decoder_of_one_class_are_no_layers_but_their_blocks_are(r, tmp_path):
    def stack(number: int, *more: str) -> Callable[[], None]:
        blocks = range(2 * number, 2 * number + 2)
        parts = [[r.module(f"{kind}_{i}", r.op()) for kind in ("Attention", *more)] for i in blocks]
        return r.module(f"Stack_{number}", *(r.module(f"Block_{i}", *inner) for i, inner in zip(blocks, parts)))

    net = r.module("Net_0", stack(0), stack(1, "Cross"))
    assert r.trace(tmp_path, net).meta["layer_names"] == [f"Block_{i}" for i in range(4)]


def test_each_call_of_a_shared_layer_is_one(r, tmp_path):
    block = r.module("Block_0", r.module("Linear_0", r.op()))
    twin = r.module("Block_1", r.module("Linear_1", r.op()))
    trace = r.trace(tmp_path, r.module("Net_0", block, twin, block))
    assert trace.meta["layer_names"] == ["Block_0", "Block_1", "Block_0"]
    assert layers(trace) == [0, 1, 2]


def test_what_backward_recomputes_is_in_the_layer_of_the_first_time(r, tmp_path):
    blocks = [r.module(f"Block_{i}", r.module(f"Linear_{i}", r.op(sequence=i))) for i in range(2)]
    inner = "aten::mul_backward"
    back = [r.backward(1, blocks[1], r.op(inner)), r.backward(0, blocks[0], r.op(inner))]
    trace = r.trace(tmp_path, r.module("Net_0", *blocks), *back)
    assert trace.meta["layer_names"] == ["Block_0", "Block_1"]
    assert layers(trace, "backward") == [1, 1, 0, 0]


def test_simple_parts_of_a_sequence_are_layers_where_nothing_else_repeats(r, tmp_path):
    parts = [r.module(f"Conv2d_{i}", r.op()) for i in range(3)]
    trace = r.trace(tmp_path, r.module("Net_0", r.module("Sequential_0", *parts), r.module("Linear_0", r.op())))
    assert layers(trace) == [0, 1, 2, -1]


def test_a_cell_that_is_called_repeatedly_is_a_layer_for_each_call(r, tmp_path):
    cell = r.module("Cell_0", r.module("Linear_0", r.op()))
    trace = r.trace(tmp_path, r.module("Net_0", cell, cell, r.module("Linear_1", r.op())))
    assert layers(trace) == [0, 1, -1]


def test_a_recording_without_modules_has_no_layers(r, tmp_path):
    trace = r.trace(tmp_path, r.op(), r.op())
    assert "layers" not in trace.meta
    assert layers(trace) == [-1, -1]


def test_thousands_of_modules_in_each_other_are_read_in_time(r, tmp_path):
    nested: list[dict[str, Any]] = []
    for i in range(20_000):
        span = {"ts": i, "dur": 60_000 - 2 * i}
        nested.append({"ph": "X", "cat": "python_function", "name": f"nn.Module: C{i}_0", "pid": 1, "tid": 1, **span})
    r.now = 25_000
    r.events = nested
    assert layers(r.trace(tmp_path, r.op())) == [-1]


class Small:
    """A network of four blocks, its input, and a step as a script would have it."""

    def __init__(self) -> None:
        self.torch = torch = pytest.importorskip("torch", reason="a recording by PyTorch")
        nn = torch.nn

        class Block(nn.Module):
            def __init__(self, width: int) -> None:
                super().__init__()
                wide = 4 * width
                self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

            def forward(self, x: Any) -> Any:
                return x + self.mlp(x)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Block(64) for _ in range(4))
                self.head = nn.Linear(64, 10)

            def forward(self, x: Any) -> Any:
                for block in self.blocks:
                    x = block(x)
                return self.head(x).sum()

        self.build, self.net = Net, Net()
        self.x = torch.randn(512, 64)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)

    def step(self) -> None:
        self.net(self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def recorded(self, folder: Path) -> Path:
        """A profile of one step after another."""
        from torch.profiler import ProfilerActivity, profile

        self.step()
        known = {"profile_memory": True, "record_shapes": True, "with_stack": True}
        with profile(activities=[ProfilerActivity.CPU], **known) as prof:
            self.step()
        path = folder / "t.json"
        prof.export_chrome_trace(str(path))
        return path

    def captured(self) -> Trace:
        """The same step, captured."""
        from workloads.capture import capture

        adamw = lambda parameters: self.torch.optim.AdamW(parameters, fused=True)  # noqa: E731
        return capture(self.build, (self.x,), loss=lambda out: out, optimizer=adamw, kernels="cpu")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Small, Path, Trace]:
    net = Small()
    return net, net.recorded(tmp_path_factory.mktemp("profile")), net.captured()


def products(trace: Trace, phase: str) -> list[tuple[int, int]]:
    return sorted((op.layer, op.flops) for op in trace.ops if op.flops and op.phase == phase)


def weights_read(trace: Trace, phase: str, *kinds: str) -> list[tuple[int, str]]:
    return [
        (op.layer, trace.tensors[t].name)
        for op in trace.ops
        if op.phase == phase and op.kind in kinds
        for t in sorted(op.reads, key=lambda t: trace.tensors[t].name)
        if trace.tensors[t].role == "weight"
    ]


def test_the_layers_of_a_real_profile_are_those_of_a_capture(small):
    _, path, captured = small
    trace = load_trace(path)
    assert trace.meta["layers"] == captured.meta["layers"] == 4
    for phase in ("forward", "backward"):  # all products, though the copy of a bias takes longer than a small one
        assert products(trace, phase) == products(captured, phase)
    machine = load_profile("a100_40_pcie")
    kept, recomputed = (simulate(trace, machine, policy).summary() for policy in ("keep_all", "full_recompute"))
    assert recomputed["peak_bytes"] < 0.75 * kept["peak_bytes"]


def test_weights_and_states_of_a_profile_come_from_its_module_and_are_read_as_in_a_capture(small):
    net, path, captured = small
    trace = load_trace(path, module=net.net, optimizer=net.optimizer)
    for phase in ("forward", "backward"):
        ours = weights_read(trace, phase, "matmul", "norm")
        assert len(ours) >= 13
        assert ours == weights_read(captured, phase, "matmul", "norm")
    for role in ("weight", "gradient", "optimizer_state"):
        theirs, ours = (
            sum(t.bytes for t in some.tensors if t.role == role and t.replaces is None) for some in (captured, trace)
        )
        assert ours == theirs > 0
    assert len(trace.carry) == 4 * 26, "26 parameters, each with two moments and a counter"
    assert not any(t.role == "weight" for t in load_trace(path).tensors)
    machine = load_profile("a100_40_pcie")
    batch = net.x.numel() * 4  # which was there before the recording, too
    for policy in ("keep_all", "zero_offload"):
        ours, theirs = (simulate(some, machine, policy).summary()["peak_bytes"] for some in (trace, captured))
        assert ours + batch == pytest.approx(theirs, rel=0.005)


def test_what_is_no_module_and_an_optimizer_without_state_are_refused(small, tmp_path):
    net, path, _ = small
    with pytest.raises(TraceError, match=r"module: expected a torch\.nn\.Module, not str"):
        load_trace(path, module="net")
    with pytest.raises(TraceError, match="optimizer: give its module, too"):
        load_trace(path, optimizer=net.optimizer)
    with pytest.raises(TraceError, match=r"optimizer: expected a torch\.optim\.Optimizer, not int"):
        load_trace(path, module=net.net, optimizer=3)
    with pytest.raises(TraceError, match="no parameter of the module: give it with its own module"):
        load_trace(path, module=net.build(), optimizer=net.optimizer)
    with pytest.raises(TraceError, match="no state for any parameter of the module: give it after a step"):
        load_trace(path, module=net.net, optimizer=net.torch.optim.AdamW(net.net.parameters()))
    save_trace(load_trace(path), tmp_path / "mine.jsonl")
    with pytest.raises(TraceError, match=r"mine\.jsonl: module: only a profiler's Chrome JSON"):
        load_trace(tmp_path / "mine.jsonl", module=net.net)
    with pytest.raises(TraceError, match="step 1: only a profiler's Chrome JSON has steps; this is a tiersim trace"):
        load_trace(tmp_path / "mine.jsonl", step=1)
