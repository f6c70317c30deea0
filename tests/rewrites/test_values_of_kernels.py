"""Law 2 on kernels that a layout divides: those that join blocks of keys, and updates of some parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from sim.layout import lay_out
from sim.rewrites.values import departures
from sim.trace import Trace
from sim.trace.origin import Fused, Slots
from tests.rewrites.test_expert_parallel import claiming
from tests.rewrites.test_schedules import FAMILIES
from workloads import transformer, with_stack

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 96,
}  # fmt: skip


def divided(layout: dict[str, Any], stack: str, **options: Any) -> tuple[Trace, Trace]:
    base = transformer(LLAMA, **{"batch": 2, "sequence": 16, **options})
    return lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack=stack))[0], base


@pytest.mark.parametrize("stack", ["compiled", "compiled_layers", "fused"])
def test_kernels_that_join_blocks_of_keys_hold_values(stack: str) -> None:
    trace, base = divided({"cp": 2, "ring_attention": True}, stack, precision="bf16", attention="flash", loss="fused")
    assert {each.what for each in departures(trace, base)} <= {"repeated"}


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "adamw_foreach"), ("mixed_bf16", "sgd")])
def test_one_kernel_updates_the_parameters_of_a_stage(precision: str, optimizer: str) -> None:
    trace, base = divided({"pp": 2}, "fused", precision=precision, optimizer=optimizer)
    assert {each.what for each in departures(trace, base)} <= {"repeated"}


@pytest.mark.parametrize(
    "layout", [{"dp": 2}, {"dp": 2, "micro_batches": 2}, {"dp": 2, "tp": 2}, {"dp": 4, "zero": 2}], ids=str
)
@pytest.mark.parametrize("stack", ["compiled", "compiled_layers", "fused"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_bias_has_a_gradient_of_its_size_on_each_replica(family: str, stack: str, layout: dict[str, Any]) -> None:
    """Also before its cast to fp32, beside the gradient of the activation in one kernel: two bytes per element."""
    base = transformer({**FAMILIES[family], "model_type": family}, batch=8, sequence=16, precision="amp_bf16")
    trace, _ = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack=stack))
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    elements = {t.name: t.bytes // 4 for t in base.tensors if t.role == "weight" and t.name.endswith("mlp.fc.bias")}
    casts = {t.name: t.bytes for t in trace.tensors if ".bias.cast.out.grad" in t.name}
    for name, count in elements.items():
        own = [size for cast, size in casts.items() if cast.startswith(f"{name}.cast")]
        assert own
        assert set(own) == {2 * count // layout.get("tp", 1)}


def test_a_kernel_that_claims_other_parameters_is_caught() -> None:
    trace, base = divided({"pp": 2}, "fused", optimizer="adamw_foreach")
    assert trace.origin is not None
    op = next(i for i, expr in enumerate(trace.origin.ops) if isinstance(expr, Slots) and isinstance(expr.of, Fused))
    expr = trace.origin.ops[op]
    assert isinstance(expr, Slots)
    others = tuple(k for k in range(expr.count) if k not in expr.slots)
    wrong = claiming(trace, op, replace(expr, slots=others))
    assert {each.what for each in departures(wrong, base)} & {"wrong", "missing"}
