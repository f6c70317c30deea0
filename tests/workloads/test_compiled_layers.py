"""Layers that are compiled alone: what they save is what PyTorch's compiler saves of each, the rest runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.errors import WorkloadError
from sim.experiment import simulate
from sim.trace import Trace, TraceBuilder
from workloads import transformer, with_stack

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 4096, "max_position_embeddings": 128,
}  # fmt: skip


def built(stack: str, **axes: Any) -> Trace:
    return transformer(LLAMA, batch=4, sequence=64, precision="bf16", attention="flash", stack=stack, **axes)


def saved(trace: Trace) -> list[int]:
    """Bytes of each result of forward that backward reads."""
    made = {t: op.phase for op in trace.ops for t in op.writes}
    read = {t for op in trace.ops if op.phase == "backward" for t in op.reads if made.get(t) == "forward"}
    return sorted(trace.tensors[t].bytes for t in read)


def test_what_lies_outside_layers_runs_as_in_the_eager_stack():
    eager, layers, whole = (built(stack, loss="torch") for stack in ("eager", "compiled_layers", "compiled"))
    outside = [[(op.name, op.bytes, op.workspace) for op in t.ops if op.layer < 0] for t in (eager, layers, whole)]
    assert outside[0] == outside[1] != outside[2]
    inside = [[(op.name, op.bytes) for op in t.ops if op.layer == 0] for t in (eager, layers)]
    assert len(inside[1]) < len(inside[0])
    runs = [simulate(t, "a100_80_sxm", "keep_all").summary() for t in (eager, layers, whole)]
    for key in ("peak_bytes", "makespan_ns"):
        assert runs[0][key] > runs[1][key] > runs[2][key]


def test_a_trace_without_layers_cannot_be_compiled_by_layer():
    b = TraceBuilder()
    x, y, z = b.tensor("x", 8, "input"), b.tensor("y", 8), b.tensor("z", 8)
    b.op("y", "elementwise", reads=[x], writes=[y])
    b.op("z", "elementwise", reads=[y], writes=[z])
    trace = b.build(outputs=[z], carry=())
    assert len(with_stack(trace, "compiled").ops) == 1
    with pytest.raises(
        WorkloadError, match="'compiled_layers' compiles layers, and this trace has none; 'compiled' com"
    ):
        with_stack(trace, "compiled_layers")


def blocks() -> dict[str, Callable[[], Any]]:
    torch: Any = pytest.importorskip("torch", reason="compiled layers of PyTorch")
    nn, F = torch.nn, torch.nn.functional

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.down = nn.RMSNorm(64), nn.Linear(256, 64, bias=False)
            self.up, self.gate = (nn.Linear(64, 256, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            h = self.norm(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Any) -> Any:
            u = self.up(self.norm(x))
            return x + self.down(torch.tanh(u) * torch.sigmoid(u) + u.exp()).sigmoid()

    class Net(nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
            self.blocks = nn.ModuleList(block() for _ in range(3))

        def forward(self, ids: Any) -> Any:
            x = self.table(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return {"gated": lambda: Net(Gated), "chain": lambda: Net(Chain)}


@pytest.mark.parametrize("name", ["gated", "chain"])
def test_a_layer_saves_what_pytorchs_compiler_saves_of_it(name):
    build = blocks()[name]
    import torch
    import torch.nn.functional as F

    from workloads.capture import capture

    ids = torch.randint(0, 100, (2, 32))

    def loss(logits: Any, target: Any) -> Any:
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

    model: Any = build()
    for block in model.blocks:
        block.compile(backend="aot_eager_decomp_partition")
    given = {t.untyped_storage().data_ptr() for t in (ids, *model.parameters())}
    kept: dict[int, Any] = {}

    def pack(t: Any) -> Any:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss(model(ids), ids).backward()
    theirs = sorted(t.untyped_storage().nbytes() for at, t in kept.items() if at not in given)

    eager = capture(build, ids, targets=ids, loss=loss, kernels="cpu")
    ours = saved(with_stack(eager, "compiled_layers"))
    ours.remove(4)  # the loss itself
    assert ours == theirs
    assert sum(ours) < sum(saved(eager)) - 3 * 2 * 32 * 256 * 4  # a wide result less in each layer
