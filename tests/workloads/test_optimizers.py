"""Optimizer steps: their states, what they touch and compute, and how they replace weights."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest

from tests.workloads.test_transformer import tiny
from workloads import transformer
from workloads.optimizers import OPTIMIZERS

PRECISIONS = ("fp32", "bf16", "amp_fp16", "mixed_bf16")


class PerParameter(NamedTuple):
    """What an optimizer takes per parameter in fp32, counted by hand from its published rule or its kernels.

    state: bytes kept, None where they depend on the shape: a test of its own counts them.
    touched: bytes read and written by its kernels.
    flops: arithmetic.
    """

    state: int | None
    touched: int | None
    flops: int


EXPECTED = {
    "adamw_foreach": PerParameter(state=8, touched=80, flops=14),
    "adamw_fused": PerParameter(state=8, touched=28, flops=14),
    "adamw_loop": PerParameter(state=8, touched=80, flops=14),
    "adamw_8bit": PerParameter(state=None, touched=None, flops=36),
    "adafactor": PerParameter(state=None, touched=68, flops=15),
    "lion": PerParameter(state=4, touched=20, flops=10),
    "sgd": PerParameter(state=0, touched=12, flops=2),
    "sgd_momentum": PerParameter(state=4, touched=32, flops=4),
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def starts(trace, role):
    """The tensors of a role as the iteration finds them."""
    return [t for t in trace.tensors if t.role == role and t.replaces is None]


def updates(trace):
    return [op for op in trace.ops if op.phase == "update"]


# ---- every optimizer -----------------------------------------------------------------------------


def test_every_optimizer_is_expected_to_take_something():
    assert set(EXPECTED) == set(OPTIMIZERS)


@every_optimizer
def test_states_bytes_and_flops_are_those_counted_by_hand(optimizer):
    trace, expected = tiny("gpt2", optimizer=optimizer), EXPECTED[optimizer]
    parameters, counters = trace.meta["parameters"], 4 * len(starts(trace, "weight")) * (optimizer == "adamw_fused")
    if expected.state is not None:
        state = sum(t.bytes for t in starts(trace, "optimizer_state"))
        assert state == expected.state * parameters + counters  # the fused kernel counts its steps on the device
    if expected.touched is not None:
        assert sum(op.bytes for op in updates(trace)) == expected.touched * parameters
    assert sum(op.flops for op in updates(trace)) == expected.flops * parameters


@pytest.mark.parametrize("precision", PRECISIONS)
@every_optimizer
def test_every_weight_and_state_is_read_and_replaced_once_by_the_update(optimizer, precision):
    trace = tiny("gpt2", optimizer=optimizer, precision=precision)
    kept = [*starts(trace, "weight"), *starts(trace, "optimizer_state")]
    replaced = Counter[int]()
    for op in updates(trace):
        for new in (trace.tensors[t] for t in op.writes):
            if new.replaces is not None:
                assert new.replaces in op.reads
                assert new.bytes == trace.tensors[new.replaces].bytes
                replaced[new.replaces] += 1
    assert replaced == {t.id: 1 for t in kept}


@pytest.mark.parametrize("precision", PRECISIONS)
@every_optimizer
def test_an_update_touches_at_least_what_it_replaces(optimizer, precision):
    trace = tiny("gpt2", optimizer=optimizer, precision=precision)
    kept = [*starts(trace, "weight"), *starts(trace, "optimizer_state")]
    assert sum(op.bytes for op in updates(trace)) >= sum(t.bytes for t in kept)


# ---- Lion ----------------------------------------------------------------------------------------


class Counted:
    """A number that counts what is computed with it and its like; constants are computed beforehand."""

    flops = 0

    def _one(self, *_: object) -> Counted:
        Counted.flops += 1
        return Counted()

    __add__ = __sub__ = __mul__ = __rmul__ = sign = _one


def test_flops_of_lion_are_those_of_the_published_program():
    p, g, m = Counted(), Counted(), Counted()
    beta1, beta2, rate, decay = 0.9, 0.99, 1e-4, 0.1
    Counted.flops = 0
    update = (beta1 * m + (1 - beta1) * g).sign()
    p = p * (1 - rate * decay) - rate * update
    m = beta2 * m + (1 - beta2) * g
    assert Counted.flops == EXPECTED["lion"].flops


def test_lion_in_place_of_adam_saves_the_second_moment_and_its_bytes():
    adam, lion = (transformer("gpt2", batch=1, sequence=16, optimizer=name) for name in ("adamw_fused", "lion"))
    count, weights = adam.meta["parameters"], len(starts(adam, "weight"))
    states = [sum(t.bytes for t in starts(trace, "optimizer_state")) for trace in (adam, lion)]
    assert states[0] - states[1] == 4 * count + 4 * weights
    assert sum(op.bytes for op in updates(adam)) - sum(op.bytes for op in updates(lion)) == 8 * count


# ---- others --------------------------------------------------------------------------------------


def test_adafactor_keeps_a_value_per_row_and_per_column():
    trace = tiny("gpt2", optimizer="adafactor")
    weights = [t for t in trace.tensors if t.role == "weight" and t.replaces is None]
    values = sum(sum(t.shape) if len(t.shape) == 2 else t.shape[0] for t in weights)
    assert sum(t.bytes for t in trace.tensors if t.role == "optimizer_state" and t.replaces is None) == 4 * values


def test_8_bit_adam_takes_a_byte_and_a_share_of_a_scale_per_moment_where_a_parameter_is_large():
    trace = tiny("gpt2", optimizer="adamw_8bit")
    state = {t.name: t for t in trace.tensors if t.role == "optimizer_state" and t.replaces is None}
    for weight in (t for t in trace.tensors if t.role == "weight" and t.replaces is None):
        count = weight.bytes // 4
        moments = [state[f"{weight.name}.{moment}.8bit"] for moment in "mv"]
        scales = [state[name] for moment in "mv" if (name := f"{weight.name}.{moment}.scale") in state]
        assert [t.bytes for t in moments] == [count if count >= 4096 else 4 * count] * 2
        assert [t.bytes for t in scales] == ([4 * -(-count // 256)] * 2 if count >= 4096 else [])
    large = transformer("gpt2", batch=1, sequence=16, optimizer="adamw_8bit", precision="bf16")
    total = sum(t.bytes for t in large.tensors if t.role == "optimizer_state" and t.replaces is None)
    assert total / large.meta["parameters"] == pytest.approx(2 + 8 / 256, rel=4e-3)


def test_a_loop_holds_the_gradients_of_a_layer_without_reading_them():
    for optimizer in ("adamw_loop", "adafactor"):
        trace = tiny("gpt2", optimizer=optimizer)
        for op in trace.ops:
            if op.kind == "optimizer":
                assert sum(trace.tensors[t].role == "gradient" for t in op.reads) == 1
        held = {t for op in trace.ops for t in op.releases}
        assert held
        assert {trace.tensors[t].role for t in held} == {"gradient"}


def test_foreach_makes_all_denominators_before_it_uses_one():
    trace = tiny("llama")
    made = [o.id for o in trace.ops if o.name.endswith(".sqrt") and o.phase == "update"]
    used = [o.id for o in trace.ops if o.name.endswith(".step")]
    assert max(made) < min(used)
    size = sum(t.bytes for t in trace.tensors if t.name.endswith(".denominator"))
    assert size == 4 * trace.meta["parameters"]
