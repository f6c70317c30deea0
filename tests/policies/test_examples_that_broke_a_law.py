"""Examples on which policies once broke a law; each was found by the suite, and drawn smaller by hand."""

from __future__ import annotations

import pytest

from sim.analysis.peak_memory import home_peak
from sim.conformance import CHECKS, run_policy
from sim.conformance.suite import breaks
from sim.errors import Infeasible, PolicyError
from sim.experiment import simulate
from sim.plan import Drop, Recompute
from sim.policies import load
from sim.policies.hybrid.hybrid.drafts import use_at_ops
from sim.policies.offload.offload_activations import OffloadActivations
from sim.policies.offload.save_on_cpu import SaveOnCpu
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


def layers_with_workspace() -> Trace:
    """Two layers whose forward ops take workspace; recomputing one takes it beside more than keeping everything."""
    b = TraceBuilder()
    x, w = b.tensor("x", 16, "input"), [b.tensor(f"w{i}", 4, "weight") for i in range(2)]
    y, m = ([b.tensor(f"{name}{i}", size) for i in range(2)] for name, size in (("y", 7), ("m", 2)))
    d, g = [b.tensor(f"d{i}", 7, "temporary") for i in (2, 1)], [b.tensor(f"dw{i}", 4, "gradient") for i in range(2)]
    b.op("f0", "matmul", reads=[x, w[0]], writes=[y[0], m[0]], layer=0, workspace=30, duration=0)
    b.op("f1", "matmul", reads=[y[0], w[1]], writes=[y[1], m[1]], layer=1, workspace=30, duration=0)
    b.op("loss", "loss", phase="backward", reads=[y[1]], writes=[d[0]], layer=1, duration=1)
    back = {"phase": "backward", "duration": 0}
    b.op("f1.bwd", "matmul", reads=[d[0], y[0], y[1], m[1], w[1]], writes=[d[1], g[1]], layer=1, **back)
    b.op("f0.bwd", "matmul", reads=[d[1], x, y[0], m[0], w[0]], writes=[g[0]], layer=0, **back)
    return b.build(outputs=g, carry=())


def workspace_beside() -> Trace:
    """An op of the CPU with workspace, which takes nothing from the device."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 16, "input"), b.tensor("y", 16), b.tensor("z", 16)
    d, end = b.tensor("d", 16, "temporary"), b.tensor("end", 16, "temporary")
    b.op("aside", reads=[x], writes=[y], workspace=30, duration=30, engine="cpu")
    b.op("f", reads=[y], writes=[z], duration=10)
    b.op("loss", "loss", phase="backward", reads=[z], writes=[d], duration=1)
    b.op("f.bwd", phase="backward", reads=[d, z], writes=[end], duration=20)
    return b.build(outputs=[z, end], carry=())


def state_beside() -> Trace:
    """An update on the CPU, whose state is none of the device's memory."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 16, "input"), b.tensor("y", 16), b.tensor("z", 16)
    w, m = b.tensor("w", 9, "weight"), b.tensor("m", 18, "optimizer_state")
    d, end, g = b.tensor("d", 16, "temporary"), b.tensor("end", 16, "temporary"), b.tensor("dw", 9, "gradient")
    new = [b.tensor(f"{name}.new", size, role, replaces=old) for name, size, role, old in
           (("w", 9, "weight", w), ("m", 18, "optimizer_state", m))]  # fmt: skip
    b.op("f0", "elementwise", reads=[x], writes=[y], layer=0, duration=10)
    b.op("f1", "matmul", reads=[y, w], writes=[z], layer=0, duration=10)
    b.op("loss", "loss", phase="backward", reads=[z], writes=[d], layer=0, duration=1)
    b.op("f1.bwd", "matmul", phase="backward", reads=[d, y, w], writes=[end, g], layer=0, duration=20)
    step = {"phase": "update", "duration": 10, "engine": "cpu", "releases": [y, z, d, end, g]}
    b.op("step", "optimizer", reads=[w, g, m], writes=new, **step)
    return b.build(outputs=new, carry=[(new[0], w), (new[1], m)])


def gradient_beside_another_result() -> Trace:
    """The op that makes a weight's gradient is cheap, and makes what the next one reads."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 16, "input"), b.tensor("y", 16), b.tensor("z", 0)
    w, g = [b.tensor(f"w{i}", size, "weight") for i, size in ((0, 9), (1, 1))], b.tensor("dw1", 1, "gradient")
    d, end, other = b.tensor("d", 0, "temporary"), b.tensor("d1", 16, "temporary"), b.tensor("dw0", 9, "gradient")
    new = [b.tensor(f"w{i}.new", size, "weight", replaces=w[i]) for i, size in ((0, 9), (1, 1))]
    b.op("f0", "matmul", reads=[x, w[0]], writes=[y], workspace=8, duration=10)
    b.op("f1", "matmul", reads=[y, w[1]], writes=[z], duration=1)
    b.op("loss", "loss", phase="backward", reads=[z], writes=[d], duration=1)
    b.op("f1.bwd", "matmul", phase="backward", reads=[d, z, w[1]], writes=[end, g], duration=2)
    b.op("f0.bwd", "matmul", phase="backward", reads=[end, y, w[0]], writes=[other], duration=20)
    b.op("step1", "optimizer", phase="update", reads=[w[1], g], writes=[new[1]], duration=10)
    b.op("step0", "optimizer", phase="update", reads=[w[0], other], writes=[new[0]], duration=10)
    return b.build(outputs=new, carry=zip(new, w, strict=True))


def gradient_before_a_large_workspace() -> Trace:
    """The op that makes a weight's gradient also makes what is read only after an op with a large workspace."""
    b = TraceBuilder()
    x, y, z, w = b.tensor("x", 10, "input"), b.tensor("y", 1), b.tensor("z", 1), b.tensor("w", 5, "weight")
    d, g, other = b.tensor("d", 40, "temporary"), b.tensor("dw", 5, "gradient"), b.tensor("other", 1, "temporary")
    end, new = b.tensor("end", 1, "temporary"), b.tensor("w.new", 5, "weight", replaces=w)
    b.op("f", "matmul", reads=[x, w], writes=[y], duration=10)
    b.op("loss", "loss", phase="backward", reads=[y], writes=[z], duration=1)
    b.op("f.bwd", "matmul", phase="backward", reads=[z, x, w], writes=[d, g], duration=2)
    b.op("beside", phase="backward", reads=[z], writes=[other], workspace=40, duration=10)
    b.op("next", phase="backward", reads=[d, other], writes=[end], duration=10)
    b.op("step", "optimizer", phase="update", reads=[w, g], writes=[new], duration=10)
    return b.build(outputs=[new, end], carry=[(new, w)])


def viewed_and_saved_twice() -> Trace:
    """A tensor of which forward makes a view, both of them read by the backward of two ops."""
    b = TraceBuilder()
    x, y, v = b.tensor("x", 40, "input"), b.tensor("y", 40), b.tensor("v", 0)
    z, d = [b.tensor(f"z{i}", 40) for i in range(2)], [b.tensor(f"d{i}", 40, "temporary") for i in range(3)]
    b.op("f", reads=[x], writes=[y], layer=0, duration=10)
    b.op("view", reads=[y], writes=[v], views=[0], layer=0, duration=0)
    b.op("g0", "matmul", reads=[y, v], writes=[z[0]], layer=1, duration=10)
    b.op("g1", "matmul", reads=[z[0], y, v], writes=[z[1]], layer=2, duration=10)
    b.op("loss", "loss", phase="backward", reads=[z[1]], writes=[d[2]], duration=10)
    b.op("g1.bwd", "matmul", phase="backward", reads=[d[2], z[0], y, v], writes=[d[1]], layer=2, duration=10)
    b.op("g0.bwd", "matmul", phase="backward", reads=[d[1], y, v], writes=[d[0]], layer=1, duration=10)
    return b.build(outputs=[d[0]], carry=())


@pytest.mark.parametrize("policy", [OffloadActivations(min_offload_size=0), SaveOnCpu()], ids=["streams", "hooks"])
def test_a_view_of_forward_is_one_of_the_tensor_that_backward_reads(policy):
    run = run_policy(policy, viewed_and_saved_twice(), hand_machine())
    for law, check in CHECKS.items():
        assert breaks(check, run) == "", law
    assert run.done, run.error or run.crash


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


@pytest.mark.parametrize(
    ("name", "trace", "machine"),
    [
        ("tso", layers_with_workspace(), hand_machine()),
        ("tso", state_beside(), hand_machine(cpu="host")),
        ("autotm", workspace_beside(), hand_machine(cpu="host")),
    ],
    ids=["tso", "tso-cpu", "autotm"],
)
def test_what_fits_without_a_policy_fits_with_it(name, trace, machine):
    peak = home_peak(simulate(trace, machine).log)
    assert home_peak(simulate(trace, machine, name, budget=peak).log) <= peak


def test_a_gradient_is_not_dropped_where_its_op_may_run_again():
    trace, machine = gradient_beside_another_result(), hand_machine()
    peak = home_peak(simulate(trace, machine).log)
    with pytest.raises(Infeasible, match=f"{peak} B would do"):
        simulate(trace, machine, "relax_and_fix", budget=peak - 1)


def test_a_gradient_stays_where_its_op_runs_again_for_another_result():
    trace = gradient_before_a_large_workspace()
    run = run_policy(load("relax_and_fix"), trace, hand_machine().with_budget(90))
    assert {law: breaks(check, run) for law, check in CHECKS.items()} == dict.fromkeys(CHECKS, "")
    dropped = [trace.tensors[action.tensor].name for action in run.plan.actions if isinstance(action, Drop)]
    again = [trace.ops[action.op].name for action in run.plan.actions if isinstance(action, Recompute)]
    assert (dropped, again) == (["d"], ["f.bwd"])


def test_nothing_is_in_use_on_a_device_where_nothing_was_allocated():
    b = TraceBuilder()
    b.op("f", reads=[b.tensor("x", 40, "input")], writes=[y := b.tensor("y", 40)], duration=10)
    b.op("aside", duration=10, device=1)
    log = simulate(b.build(outputs=[y], carry=()), hand_machine(devices=2)).log
    assert (use_at_ops(log, 0), use_at_ops(log, 1)) == ({0: 80}, {1: 0})


@pytest.mark.parametrize("name", ["checkmate", "joint_optimal", "moccasin"])
def test_the_least_makespan_on_two_devices_is_the_busier_ones(name):
    if name == "moccasin":
        pytest.importorskip("ortools", reason="the extra `solvers` (OR-Tools) is not installed")
    b = TraceBuilder()
    for device, duration in enumerate((10, 7)):
        x, y = b.tensor(f"x{device}", 40, "input"), b.tensor(f"y{device}", 40, "temporary")
        b.op(f"f{device}", reads=[x], writes=[y], device=device, duration=duration)
        b.op(f"sum{device}", "collective", reads=[y], bytes=0, device=device, group="sum", duration=5)
    run = run_policy(load(name), b.build(carry=()), hand_machine(devices=2))
    if run.plan is not None:
        assert run.plan.notes["makespan_bound_ns"] == run.log.end == 10
    else:
        assert "one device" in str(run.error)
