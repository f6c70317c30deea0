"""How a microbatch's gradient joins those before: PyTorch's kernels, Megatron-LM's, and their bytes in closed form."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from sim.layout import lay_out
from sim.rewrites.ranks import all_ranks
from sim.rewrites.values import departures
from sim.trace import Trace
from sim.trace.origin import Microbatch, Same
from tests.rewrites.test_expert_parallel import MIXTRAL, claiming
from tests.rewrites.test_schedules import FAMILIES
from workloads import transformer, with_stack

GPT2 = {**FAMILIES["gpt2"], "model_type": "gpt2"}
MATRICES = re.compile(r"h\d+\.(attn\.(qkv|proj)|mlp\.(fc|proj))\.weight")
BATCH, TOKENS = 8, 16


def base(config: dict[str, Any] = GPT2, precision: str = "megatron_bf16") -> Trace:
    return transformer(config, batch=BATCH, sequence=TOKENS, precision=precision, loss="fused", optimizer="adamw_fused")


def divided(trace: Trace, layout: dict[str, Any], stack: str = "eager") -> Trace:
    return lay_out(trace, "a100_80_sxm", layout, kernels=partial(with_stack, stack=stack))[0]


def elements(trace: Trace) -> dict[str, int]:
    return {t.name: t.bytes // 2 for t in trace.tensors if t.role == "weight" and MATRICES.fullmatch(t.name)}


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("stack", ["eager", "compiled"])
def test_a_hook_adds_the_16_bit_gradient_to_the_one_in_fp32(stack: str, n: int) -> None:
    """The first is copied, 2 bytes read and 4 written; each later one is read with the sum: 2 + 4, and 4 written."""
    whole = base()
    trace = divided(whole, {"micro_batches": n}, stack)
    for name, count in elements(whole).items():
        ops = [op.id for op in trace.ops if op.name.startswith(f"{name}.grad") and op.phase == "backward"]
        assert len(ops) == n
        assert sum(int(trace.touched[op]) for op in ops) == (6 + 10 * (n - 1)) * count


@pytest.mark.parametrize("n", [1, 2, 8])
def test_megatrons_product_adds_to_the_gradient_in_fp32(n: int) -> None:
    """Of g rows of c columns, their input of k, it reads g (c + k) numbers of 2 bytes and the sum, and writes it."""
    whole = base()
    trace = divided(whole, {"micro_batches": n}, "fused")
    for name, count in elements(whole).items():
        ops = [op for op in trace.ops if any(trace.tensors[t].name.startswith(f"{name}.grad") for t in op.writes)]
        assert [op.kind for op in ops if op.phase == "backward"] == ["matmul"] * n
        assert {op.dtype for op in ops if op.phase == "backward"} == {"bf16"}
        rows = BATCH * TOKENS
        k, c = next(t.shape for t in whole.tensors if t.name == name) or ()
        touched = sum(int(trace.touched[op.id]) for op in ops if op.phase == "backward")
        assert touched == 2 * rows * (c + k) + (4 + 8 * (n - 1)) * count
        assert sum(op.flops for op in ops if op.phase == "backward") == 2 * rows * count


@pytest.mark.parametrize(("precision", "casts", "adds"), [("amp_bf16", 1, 1), ("bf16", 0, 1), ("megatron_bf16", 0, 1)])
def test_kernels_per_gradient_are_those_of_pytorch(precision: str, casts: int, adds: int) -> None:
    """From the second microbatch on; counted in PyTorch where a linear layer accumulates its gradient."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and isinstance(args[0], torch.Tensor) and args[0].shape == (7, 5):
                seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    stored = torch.float32 if precision == "amp_bf16" else torch.bfloat16
    layer = torch.nn.Linear(5, 7, bias=False, dtype=stored)
    main = torch.zeros(7, 5)
    x = torch.ones(3, 5, dtype=stored)
    for k in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16"):
            y = layer(x)
        seen.clear()
        with Counting():
            y.backward(torch.ones_like(y))
            if precision == "megatron_bf16":  # Megatron-LM's hook after each gradient
                main.add_(layer.weight.grad)
                layer.weight.grad = None
        if k and precision != "megatron_bf16":
            assert (seen["_to_copy"], seen["add_"] + seen["add"]) == (casts, adds)
        if precision == "megatron_bf16":
            assert (seen["_to_copy"], seen["add_"]) == (casts, adds)
    trace = divided(base(precision=precision), {"micro_batches": 4})
    name = "h0.mlp.fc.weight"
    of_last = [
        op for op in trace.ops if op.name.startswith(name) and op.name.endswith(".mb3") and op.phase == "backward"
    ]
    summed = [op for op in of_last if any(trace.tensors[t].replaces is not None for t in op.writes)]
    assert (len(of_last) - len(summed), len(summed)) == (casts, adds)


LAYOUTS = [
    {"dp": 2, "micro_batches": 2},
    {"dp": 2, "tp": 2, "micro_batches": 2, "zero": 1, "gradient_buffer": True},
    {"cp": 2, "micro_batches": 4},
    {"pp": 2, "micro_batches": 4, "schedule": "zb_h1"},
    {"pp": 2, "dp": 2, "micro_batches": 2, "zero": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("stack", ["eager", "compiled", "fused"])
def test_values_are_those_of_one_device(stack: str, layout: dict[str, Any]) -> None:
    whole = transformer(GPT2, batch=8, sequence=16, precision="megatron_bf16", attention="flash", loss="fused")
    trace = divided(whole, layout, stack)
    assert {each.what for each in departures(trace, whole)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), whole)} <= {"repeated"}


@pytest.mark.parametrize(
    "layout", [{"dp": 4, "ep": 2, "micro_batches": 2}, {"dp": 2, "ep": 2, "micro_batches": 4}], ids=str
)
@pytest.mark.parametrize("stack", ["eager", "fused"])
def test_so_with_experts_that_replicas_divide(stack: str, layout: dict[str, Any]) -> None:
    whole = base(MIXTRAL)
    trace = divided(whole, layout, stack)
    assert {each.what for each in departures(trace, whole)} <= {"repeated"}


@pytest.mark.parametrize("stack", ["eager", "fused"])
def test_a_sum_that_lacks_a_microbatch_or_has_one_twice_is_wrong(stack: str) -> None:
    whole = base()
    trace = divided(whole, {"micro_batches": 4}, stack)
    op = next(op for op in trace.ops if op.name == "h0.mlp.fc.weight.grad.main.mb2")
    assert trace.origin is not None
    claim = trace.origin.ops[op.id]
    assert isinstance(claim, Microbatch)
    for first in (1, 3):
        wrong = claiming(trace, op.id, replace(claim, first=first, stop=first + 1))
        assert "wrong" in {each.what for each in departures(wrong, whole)}
    (total,) = op.writes
    tensors = list(trace.origin.tensors)
    assert tensors[total] != Same(0)
    tensors[total] = replace(tensors[total], stop=4)  # type: ignore[type-var]
    origin = replace(trace.origin, tensors=tuple(tensors))
    more = Trace(
        trace.tensor_columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=origin
    )
    assert "wrong" in {each.what for each in departures(more, whole)}
