"""A profile with its module is what the capture of the same step is: weights, gradients, layers, what policies save."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sim import load_profile, simulate
from sim.collecting import uncollected
from sim.errors import TraceError
from sim.trace.graph import Trace
from workloads import load_trace

torch: Any = pytest.importorskip("torch", reason="recordings by PyTorch")
nn, F = torch.nn, torch.nn.functional


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = self.run(block, x)
        return x

    def run(self, block: Any, x: Any) -> Any:
        return block(x)


class Checkpointed(Blocks):
    def run(self, block: Any, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


class CheckpointedOnceMore(Blocks):
    def run(self, block: Any, x: Any) -> Any:
        x = x if x.requires_grad else x.clone().requires_grad_()
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)


class NormsFirst(nn.Module):
    """Has its parts in another order than it calls them; biases are as long as the vectors of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.products = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = norm(product(x))
        return x


class Cells(nn.Module):
    """A cell with two matrices of one shape, which is called repeatedly, behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(50, 32), nn.GRUCell(32, 32)

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        state = torch.zeros(len(ids), 32)
        for i in range(ids.shape[1]):
            state = self.cell(x[:, i], state)
        return state


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, stride=1 + i, padding=1) for i in range(2))

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = F.relu(part(x), inplace=True)
        return x


class Frozen(Blocks):
    """The first two blocks have no gradients, so that their ops have the sequence number of what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


class Adapters(nn.Module):
    """Low-rank adapters beside frozen products: gradients of wide activations meet, and more is held at no other op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128).requires_grad_(False), nn.Linear(128, 32).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((32, 2), (2, 128), (128, 2), (2, 32)))

    def forward(self, x: Any) -> Any:
        first, second, third, fourth = self.adapters
        h = torch.relu(self.up(x) + second(first(x)))
        return x + self.down(h) + fourth(third(h))


@dataclass(frozen=True)
class Case:
    """A step: of a class, on a batch, with an optimizer."""

    build: Callable[[], Any]
    batch: Callable[[], Any] = lambda: torch.randn(64, 32)
    optimizer: Callable[[Any], Any] | None = lambda p: torch.optim.SGD(p, lr=0.1)
    micro_batches: int = 1
    set_to_none: bool = True
    autocast: bool = False
    clip: bool = False

    def step(self, model: Any, tuned: Any, batch: Any) -> None:
        for _ in range(self.micro_batches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                loss = model(batch).float().pow(2).mean()
            loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if tuned is not None:
            tuned.step()
        (model if tuned is None else tuned).zero_grad(set_to_none=self.set_to_none)


ADAMW = lambda p: torch.optim.AdamW(p, fused=True)  # noqa: E731
CASES = {
    "SGD": Case(Blocks),
    "AdamW": Case(Blocks, optimizer=ADAMW, clip=True),
    "16 bits, foreach": Case(
        lambda: Blocks().bfloat16(),
        lambda: torch.randn(64, 32).bfloat16(),
        lambda p: torch.optim.AdamW(p, foreach=True),
    ),
    "no optimizer": Case(Blocks, optimizer=None),
    "frozen": Case(Frozen, optimizer=lambda p: torch.optim.SGD([each for each in p if each.requires_grad], lr=0.1)),
    "microbatches": Case(Blocks, micro_batches=2),
    "gradients that stay": Case(Blocks, set_to_none=False),
    "autocast": Case(Blocks, autocast=True),
    "checkpoints": Case(Checkpointed),
    "re-entrant checkpoints": Case(CheckpointedOnceMore),
    "norms first": Case(NormsFirst, optimizer=ADAMW),
    "cells": Case(Cells, lambda: torch.randint(0, 50, (8, 3))),
    "convolutions": Case(Convolutions, lambda: torch.randn(2, 3, 8, 8)),
}


SEVERAL = "of these, one of several that fit"
WITHOUT_WORKSPACE = ("SGD", "AdamW", "no optimizer", "microbatches", "norms first")


def recorded(folder: Path, case: Case, **known: Any) -> tuple[Any, Any, Any, Path]:
    """A model, its optimizer, a batch, and the profile of their second step.

    The profiler's total includes what an earlier profile of this process has recorded and what is still held: that is
    taken off, and nothing of it is freed meanwhile.
    """
    from torch.profiler import ProfilerActivity, profile

    def taken(do: Callable[[], Any], path: Path, **options: Any) -> list[dict[str, Any]]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, **options) as prof:
            do()
        prof.export_chrome_trace(str(path))
        return [each["args"] for each in json.loads(path.read_text())["traceEvents"] if each["name"] == "[memory]"]

    model, batch, path = case.build(), case.batch(), folder / "t.json"
    tuned = None if case.optimizer is None else case.optimizer(model.parameters())
    case.step(model, tuned, batch)
    gc.collect()
    with uncollected():
        first = taken(lambda: torch.empty(1), path)[0]
        taken(lambda: case.step(model, tuned, batch), path, **{"record_shapes": True, "with_stack": True, **known})
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        if event["name"] == "[memory]":
            event["args"]["Total Allocated"] -= first["Total Allocated"] - first["Bytes"]
    path.write_text(json.dumps(document))
    return model, tuned, batch, path


def of_role(trace: Trace, role: str) -> int:
    return sum(t.bytes for t in trace.tensors if t.role == role and t.replaces is None)


def at_start(trace: Trace, role: str) -> int:
    return sum(t.bytes for t in trace.tensors if t.role == role and trace.producer[t.id] < 0)


def reads(trace: Trace, phase: str) -> Counter[tuple[int, str]]:
    """How often each weight is read in each layer."""
    return Counter(
        (op.layer, trace.tensors[t].name)
        for op in trace.ops
        if op.phase == phase
        for t in op.reads
        if trace.tensors[t].role == "weight"
    )


def peak(trace: Trace, policy: str = "keep_all") -> int:
    return int(simulate(trace, load_profile("a100_40_pcie"), policy).summary()["peak_bytes"])


QUICK = ("SGD", "frozen", "microbatches", "gradients that stay", "autocast", "checkpoints", "norms first", "cells")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_profile_with_its_module_is_what_the_capture_of_the_step_is(name, tmp_path):
    from workloads.capture import capture

    case = CASES[name]
    model, tuned, batch, path = recorded(tmp_path, case)
    ours = load_trace(path, module=model, optimizer=tuned)
    theirs = capture(case.build, batch, step=case.step, optimizer=case.optimizer, kernels="cpu")
    assert ours.meta.get("layer_names", []) == theirs.meta["layer_names"] or name == "cells"
    for phase in ("forward", "backward"):
        assert reads(ours, phase) == reads(theirs, phase)
        counts = [sum(op.flops for op in trace.ops if op.phase == phase) for trace in (ours, theirs)]
        assert counts[0] == counts[1]
    for role in ("weight", "optimizer_state", "gradient"):
        assert at_start(ours, role) == at_start(theirs, role)
    assert (at_start(ours, "gradient") > 0) == (not case.set_to_none)
    if name in WITHOUT_WORKSPACE:
        assert of_role(ours, "gradient") == pytest.approx(of_role(theirs, "gradient"), rel=0.01)
    if tuned is not None:
        assert len(ours.carry) >= sum(p.requires_grad for p in model.parameters())
    given = batch.numel() * batch.element_size()  # a batch was allocated before the recording, too
    for policy in ("keep_all", "full_recompute") if name in (*WITHOUT_WORKSPACE, "gradients that stay") else ():
        assert peak(ours, policy) + given == pytest.approx(peak(theirs, policy), rel=0.001)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_norm_writes_for_itself_is_not_one_of_its_statistics(tmp_path, threads):
    """With one thread its gradients' partial sums have the bytes of the statistics, and are freed at once."""
    from workloads.capture import capture

    case, before = CASES["norms first"], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model, tuned, batch, path = recorded(tmp_path, case)
    finally:
        torch.set_num_threads(before)
    ours = load_trace(path, module=model, optimizer=tuned)
    theirs = capture(case.build, batch, step=case.step, optimizer=case.optimizer, kernels="cpu")
    given = batch.numel() * batch.element_size()
    assert peak(ours, "full_recompute") + given == peak(theirs, "full_recompute")
    matched, several = (ours.meta["assumed"][key] for key in ("inputs matched by size", SEVERAL))
    assert 0 < several < matched


@pytest.mark.parametrize(("build", "meets"), [(Adapters, 64 * 128 * 4), (Blocks, 0), (NormsFirst, 0)])
def test_a_capture_says_where_a_real_run_adds_gradients_in_place(tmp_path, build, meets):
    from workloads.capture import capture

    trained = lambda p: torch.optim.SGD([each for each in p if each.requires_grad], lr=0.1)  # noqa: E731
    case = Case(lambda: nn.Sequential(build(), build()), optimizer=trained)
    model, tuned, batch, path = recorded(tmp_path, case)
    theirs = capture(case.build, batch, step=case.step, optimizer=case.optimizer, kernels="cpu")
    real = peak(load_trace(path, module=model, optimizer=tuned)) + batch.numel() * batch.element_size()
    assert peak(theirs) - real == meets
    notes = [note for note in theirs.meta.get("assumed", ()) if "two gradients meet" in note]
    assert [f"{meets:,} bytes" in note for note in notes] == ([True] if meets else [])


def test_a_module_that_was_not_recorded_is_refused_and_so_is_a_recording_without_shapes(tmp_path):
    model, _, _, path = recorded(tmp_path, CASES["SGD"])
    with pytest.raises(
        TraceError, match="module: no op reads a weight of its shapes and types: give the one that was rec"
    ):
        load_trace(path, module=nn.Linear(7, 3))
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        event.get("args", {}).pop("Input Dims", None)
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError, match="module: it has no shapes to match weights by: record with record_shapes=Tr"):
        load_trace(path, module=model)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: nn.Linear, "expected a torch.nn.Module, not the class Linear"),
        (lambda: [nn.Linear(3, 3)], "expected a torch.nn.Module, not list"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "'0.weight' has no shape yet: give the module after a step"),
    ],
)
def test_what_has_no_weights_is_refused_in_one_line(module, message, tmp_path):
    with pytest.raises(TraceError, match=f"^module: {message}$"):
        load_trace(tmp_path / "t.json", module=module())


def test_several_optimizers_of_a_step_have_the_state_of_each(tmp_path):
    def optimizers(model: Any) -> list[Any]:
        first, second = (list(each.parameters()) for each in model)
        return [torch.optim.AdamW(first, fused=True), torch.optim.SGD(second, lr=0.1, momentum=0.9)]

    class Two(Case):
        def step(self, model: Any, tuned: Any, batch: Any) -> None:
            for each in model:
                each(batch).pow(2).mean().backward()
            for optimizer in self.tuned:
                optimizer.step()
                optimizer.zero_grad()

    model = nn.ModuleList([Blocks(), NormsFirst()])
    case = Two(lambda: model, optimizer=None)
    object.__setattr__(case, "tuned", optimizers(model))
    _, _, _, path = recorded(tmp_path, case)
    sizes = [sum(p.numel() * p.element_size() for p in each.parameters()) for each in model]
    steps = 4 * len(list(model[0].parameters()))  # a number for each parameter of AdamW
    trace = load_trace(path, module=model, optimizer=case.tuned)
    assert at_start(trace, "optimizer_state") == 2 * sizes[0] + steps + sizes[1]
    alone = load_trace(path, module=model, optimizer=case.tuned[1])
    assert at_start(alone, "optimizer_state") == sizes[1]
    for given in ([case.tuned[0], 3], 0):
        with pytest.raises(TraceError, match=r"optimizer: expected a torch\.optim\.Optimizer, not int"):
            load_trace(path, module=model, optimizer=given)


def test_an_optimizer_of_more_than_the_module_is_noted(tmp_path):
    model, tuned, _, path = recorded(tmp_path, CASES["AdamW"])
    trace = load_trace(path, module=model.blocks[0], optimizer=tuned)
    assert trace.meta["left_out"]["parameters of the optimizer that the module does not have"] == 12


def test_a_part_that_no_step_calls_has_weights_that_no_op_reads(tmp_path):
    model, tuned, _, path = recorded(tmp_path, CASES["SGD"])
    model.apart = nn.Linear(7, 3)
    trace = load_trace(path, module=model, optimizer=tuned)
    assert trace.meta["left_out"]["weights that no op reads"] == 2
    assert of_role(trace, "gradient") == sum(4 * p.numel() for p in model.blocks.parameters())


def test_a_profile_without_a_stack_has_the_weights_of_its_module_all_the_same(tmp_path):
    model, tuned, _, path = recorded(tmp_path, CASES["SGD"], with_stack=False)
    trace = load_trace(path, module=model, optimizer=tuned)
    assert reads(trace, "forward") == Counter((-1, name) for name, _ in model.named_parameters())
    assert at_start(trace, "weight") == sum(4 * p.numel() for p in model.parameters())


def test_a_call_round_a_product_that_took_long_leaves_the_weight_to_the_product(tmp_path):
    """The layer's own call is an op, since it took longer than the product: backward finds what the product read."""

    def call(name: str, start: int, span: int, *dims: list[int], number: int | None = None) -> dict[str, Any]:
        args = {"Input type": ["float"] * len(dims), "Input Dims": [*dims]}
        args |= {} if number is None else {"Sequence number": number}
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": span, "args": args}

    made = {"Bytes": 512, "Addr": 1, "Total Allocated": 512, "Device Type": 0, "Device Id": -1}
    events = [
        call("aten::linear", 0, 90, [4, 8], [16, 8], number=1),
        call("aten::mm", 60, 10, [4, 8], [8, 16], number=2),
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 61, "args": made},
        call("autograd::engine::evaluate_function: MmBackward0", 100, 50, number=2),
        call("aten::mm", 110, 20, [4, 16], [16, 8]),
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = load_trace(path, module=nn.Linear(8, 16, bias=False))
    assert [sorted(reads(trace, phase)) for phase in ("forward", "backward")] == [[(-1, "weight")]] * 2
    assert [op.kind for op in trace.ops] == ["other", "matmul", "matmul"]
    assert "uncounted" not in trace.meta
