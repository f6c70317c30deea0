"""Microbatches of a layout beside a loop that is built microbatch by microbatch: the same peaks and times."""

from __future__ import annotations

from functools import partial

import pytest

from sim import simulate
from sim.layout import lay_out
from workloads import transformer, with_stack

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 1000, "n_positions": 128}


def both(count: int, stack: str = "eager", **options: str) -> list[tuple[int, int]]:
    """(peak, makespan) of the layout and of the loop."""
    given = {"batch": 8, "sequence": 128, "loss": "fused", "attention": "sdpa", "precision": "mixed_bf16", **options}
    kernels = None if stack == "eager" else partial(with_stack, stack=stack)
    trace, device = lay_out(transformer(GPT2, **given), "a100_80_sxm", {"micro_batches": count}, kernels=kernels)  # type: ignore[arg-type]
    loop = transformer(GPT2, micro_batches=count, stack=stack, **given)  # type: ignore[arg-type]
    return [(run.summary()["peak_bytes"], run.log.end) for run in (simulate(trace, device), simulate(loop, device))]


@pytest.mark.parametrize("stack", ["eager", "compiled", "fused"])
@pytest.mark.parametrize("precision", ["mixed_bf16", "amp_bf16", "bf16", "megatron_bf16"])
@pytest.mark.parametrize("count", [2, 4])
def test_kernels_are_fused_within_a_microbatch(stack: str, precision: str, count: int) -> None:
    """Kernels over several would hold the gradients of all of them."""
    layout, loop = both(count, stack, precision=precision)
    assert layout[0] == pytest.approx(loop[0], rel=1e-3)
    # autocast: the casts of bias gradients are kernels of their own in a loop
    assert layout[1] == pytest.approx(loop[1], rel=0.04 if precision == "amp_bf16" else 0.01)


@pytest.mark.parametrize("optimizer", ["adamw_loop", "adamw_fused", "adamw_foreach", "adafactor", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_last_part_of_a_gradient_is_freed_when_it_has_been_added(optimizer: str, precision: str) -> None:
    """Whatever the optimizer holds: it holds the sum."""
    layout, loop = both(4, precision=precision, optimizer=optimizer)
    assert layout[0] == pytest.approx(loop[0], rel=1e-3)
