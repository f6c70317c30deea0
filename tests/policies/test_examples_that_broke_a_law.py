"""Examples on which policies once broke a law; each was found by the suite, and drawn smaller by hand."""

from __future__ import annotations

import pytest

from sim.conformance import CHECKS, run_policy
from sim.conformance.suite import breaks
from sim.errors import PolicyError
from sim.policies import load
from sim.trace import Trace, TraceBuilder
from tests.engine.test_timeline import machine as hand_machine


def layer_on_two_engines() -> Trace:
    """A layer with an op that the CPU runs while the device comes to the layer's backward."""
    b = TraceBuilder()
    x, y, z, g = b.tensor("x", 40, "input"), b.tensor("y", 40), b.tensor("z", 40), b.tensor("g", 40, "temporary")
    b.op("aside", reads=[x], writes=[y], layer=0, duration=100, engine="cpu")
    b.op("main", reads=[x], writes=[z], layer=0, duration=5)
    b.op("back", phase="backward", reads=[y, z], writes=[g], layer=0, duration=10)
    return b.build(outputs=[g], carry=())


def product_overwritten() -> Trace:
    """A layer whose product is overwritten in place before the layer's backward."""
    b = TraceBuilder()
    x, y, g = b.tensor("x", 40, "input"), b.tensor("y", 40), b.tensor("g", 40, "temporary")
    over, z = b.tensor("y.relu", 40, replaces=y), b.tensor("z", 40)
    b.op("product", "matmul", reads=[x], writes=[y], layer=0, duration=10)
    b.op("relu_", "elementwise", reads=[y], writes=[over], layer=0, duration=10)
    b.op("another", "matmul", reads=[over], writes=[z], layer=0, duration=10)
    b.op("back", "matmul", phase="backward", reads=[z, x], writes=[g], layer=0, duration=10)
    return b.build(outputs=[g], carry=())


def overwritten_elsewhere() -> Trace:
    """Device 1 overwrites what device 0 makes, and may make once more for its own backward at the same time."""
    b = TraceBuilder()
    x, y, m = b.tensor("x", 40, "input"), b.tensor("y", 40), b.tensor("m", 40)
    over, d, end = b.tensor("y.relu", 40, replaces=y), b.tensor("d", 40, "temporary"), b.tensor("end", 40, "temporary")
    b.op("f", reads=[x], writes=[y, m], layer=0, duration=30)
    b.op("relu_", reads=[y], writes=[over], layer=1, duration=10, device=1)
    b.op("relu.bwd", phase="backward", reads=[over], writes=[d], layer=1, duration=10, device=1)
    b.op("f.bwd", phase="backward", reads=[d, x, m], writes=[end], layer=0, duration=10)
    return b.build(outputs=[end], carry=())


FOUND = {
    "engines": (layer_on_two_engines(), hand_machine(cpu="host")),
    "overwritten": (product_overwritten(), hand_machine()),
    "devices": (overwritten_elsewhere(), hand_machine(devices=2)),
}


@pytest.mark.parametrize("case", FOUND)
@pytest.mark.parametrize("name", ["full_recompute", "every_k", "mimose", "selective_recompute"])
def test_examples_that_once_broke_a_law_keep_them_all(name, case):
    trace, machine = FOUND[case]
    run = run_policy(load(name), trace, machine)
    for law, check in CHECKS.items():
        assert breaks(check, run) == "", law
    assert run.done or isinstance(run.error, PolicyError)


def test_what_a_cache_of_products_holds_is_what_lies_in_their_storage():
    run = run_policy(load("selective_recompute"), product_overwritten(), hand_machine())
    trace = run.plan.trace
    assert trace.released[trace.tensor_id("y.relu")] == trace.op_id("back")
