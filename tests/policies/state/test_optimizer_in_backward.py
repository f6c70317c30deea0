"""The update in the backward pass: the order by hand, what it must wait for, whose gradients are resident at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.errors import PolicyError
from sim.experiment import simulate
from sim.policies import load
from sim.rewrites.rewrite import unroll
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine
from workloads.optimizers import OPTIMIZERS
from workloads.transformer import transformer

SMALL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 512}


def chain(layers: int = 3, *, clipped: bool = False, held: bool = True) -> Trace:
    """Layers of 10 bytes of weight; one update each, which overwrites the weight; gradients held to the end."""
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    w = [b.tensor(f"w{i}", 10, "weight", layer=i) for i in range(layers)]
    g, above = [], b.tensor("d", 1, "temporary")
    b.op("loss", "loss", reads=[x], writes=[above], phase="backward", duration=1)
    for i in reversed(range(layers)):
        below, gradient = b.tensor(f"d{i}", 1, "temporary"), b.tensor(f"g{i}", 10, "gradient", layer=i)
        b.op(f"b{i}.w", "matmul", reads=[above, x], writes=[gradient], phase="backward", layer=i, duration=1)
        b.op(f"b{i}", "matmul", reads=[above, w[i]], writes=[below], phase="backward", layer=i, duration=1)
        g, above = [gradient, *g], below
    norm = [b.tensor("norm", 1, "temporary")] if clipped else []
    if clipped:
        b.op("clip", "reduce", reads=g, writes=norm, phase="update", duration=1)
    new, last = [], 0
    for i in range(layers):
        new.append(b.tensor(f"w{i}.new", 10, "weight", layer=i, replaces=w[i]))
        last = b.op(f"u{i}", "optimizer", reads=[w[i], g[i], *norm], writes=[new[i]], phase="update", duration=1)
    if held:
        for gradient in g[:-1]:
            b.release(gradient, last)
    return b.build(outputs=new, carry=list(zip(new, w, strict=True)))


def order(trace: Trace) -> list[str]:
    return list(load("optimizer_in_backward").plan(_problem(trace)).trace.op_columns.name)


def _problem(trace: Trace):
    from sim.experiment import problem_for

    return problem_for(trace, machine())


def test_an_update_follows_its_gradient_and_the_last_reader_of_its_weight():
    assert order(chain()) == ["loss", "b2.w", "b2", "u2", "b1.w", "b1", "u1", "b0.w", "b0", "u0"]


def test_one_gradient_is_resident_at_once():
    # x, d, d', three weights of 10, and three gradients of 10, or one
    assert simulate(chain(), machine(), "keep_all").summary()["peak_bytes"] == 1 + 2 + 30 + 30
    assert simulate(chain(), machine(), "optimizer_in_backward").summary()["peak_bytes"] == 1 + 2 + 30 + 10


def test_a_norm_of_all_gradients_keeps_the_update_behind_the_last_gradient():
    trace = chain(clipped=True)
    assert order(trace) == ["loss", "b2.w", "b2", "b1.w", "b1", "b0.w", "clip", "u1", "u2", "b0", "u0"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("iterations", [1, 2])
def test_values_are_those_of_the_plain_step(optimizer, iterations):
    step = transformer(SMALL, batch=1, sequence=16, optimizer=optimizer)
    trace = unroll(step, iterations) if iterations > 1 else step
    plan = load("optimizer_in_backward").plan(_problem(trace))
    assert plan.notes["moved"]
    assert not departures(plan.trace, step)
    assert sorted(plan.trace.op_columns.name) == sorted(trace.op_columns.name)


def test_gradients_at_once_are_one_parameters_with_a_loop_and_one_layers_with_kernels_over_layers():
    def most(optimizer: str, policy: str) -> int:
        trace = transformer(SMALL, batch=1, sequence=8, optimizer=optimizer)
        return simulate(trace, machine(), policy).summary()["peak_bytes"]

    for optimizer in ("adamw_loop", "adafactor", "sgd"):
        assert most(optimizer, "optimizer_in_backward") < most(optimizer, "keep_all")
    # with kernels over layers, too, but the embedding's, which is tied and comes last, waits for both of its parts
    assert most("adamw_foreach", "optimizer_in_backward") <= most("adamw_foreach", "keep_all")


def test_with_accumulation_only_the_last_microbatch_is_followed_by_updates():
    trace = transformer(SMALL, batch=4, sequence=8, micro_batches=2, optimizer="adamw_loop")
    names = order(trace)
    first = next(i for i, name in enumerate(names) if name.startswith("optimizer."))
    assert not any(name.startswith("mb1.") and ".bwd" not in name and "grad" not in name for name in names[first:])
    assert any(name.startswith("mb1.") for name in names[first:])


def test_it_joins_with_recomputation_and_not_with_another_owner_of_gradients():
    trace = transformer(SMALL, batch=2, sequence=64, optimizer="adamw_loop")
    both = simulate(trace, machine(), "optimizer_in_backward + full_recompute").summary()["peak_bytes"]
    assert both < simulate(trace, machine(), "full_recompute").summary()["peak_bytes"]
    with pytest.raises(PolicyError, match="two owners"):
        simulate(trace, "mt3000_survey", "optimizer_in_backward + zero_offload")


def test_what_an_earlier_update_gains_on_an_engine_of_its_own_is_a_freedom_and_no_saving():
    """Found by `tiersim check --examples 1000`: an update fills the gap in which its engine waits for the other one."""
    b = TraceBuilder()
    w = [b.tensor(f"w{i}", 8, "weight") for i in (1, 2)]
    g = [b.tensor(f"g{i}", 8, "gradient") for i in (1, 2)]
    new = [b.tensor(f"w{i}.new", 8, "weight", replaces=old) for i, old in zip((1, 2), w, strict=True)]
    d, e = (b.tensor(name, 8, "temporary") for name in "de")
    b.op("b2", "matmul", reads=[w[1]], writes=[g[1], d], phase="backward", duration=10)
    b.op("more", "matmul", reads=[d], writes=[e], phase="backward", duration=30)
    b.op("b1", "matmul", reads=[e, w[0]], writes=[g[0]], phase="backward", engine="beside", duration=10)
    for i in (1, 0):
        b.op(f"u{i}", "optimizer", reads=[w[i], g[i]], writes=[new[i]], phase="update", engine="beside", duration=20)
    trace = b.build()
    platform = machine(1000)
    platform = replace(platform, engines=(*platform.engines, replace(platform.engines[0], name="beside", main=False)))
    plain, early = (simulate(trace, platform, name) for name in ("keep_all", "optimizer_in_backward"))
    assert (plain.log.end, early.log.end) == (90, 70)
    summary = early.summary()
    assert (summary["overhead"], summary["unlimited_run"]) == (0, "updates in the backward pass")
