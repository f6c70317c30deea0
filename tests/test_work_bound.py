"""No run falls below the least time that its ops allow, and where ops alone decide it is the time of the run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.experiment import problem_for
from sim.hardware.platform import Engine, Platform, Tier
from sim.layout import lay_out
from sim.plan import Plan
from sim.policies import load
from sim.trace import Trace, TraceBuilder
from tests.strategies import budgets, platforms, traces
from workloads import transformer

MACHINE = Platform(
    "two engines",
    (Tier("hbm", 10**6, 10**6, 10**9, device=0), Tier("host", 10**6, 10**6, 10**9)),
    (
        Engine("npu", 0, "hbm", ("hbm", "host"), {"fp32": 10**9}),
        Engine("cpu", -1, "host", ("host", "hbm"), {"fp32": 10**9}),
    ),
)


def beside(*ops: tuple[str, int, tuple[int, ...]]) -> Trace:
    """Ops, each with its engine, its nanoseconds, and the ops whose results it reads; all weigh nothing."""
    b = TraceBuilder()
    made = []
    for i, (engine, takes, reads) in enumerate(ops):
        made.append(b.tensor(f"t{i}", 0))
        b.op(f"op{i}", "other", reads=[made[op] for op in reads], writes=[made[i]], duration=takes, engine=engine)
    return b.build(outputs=made)


@pytest.mark.parametrize(
    ("trace", "least"),
    [
        (beside(("", 10, ()), ("", 20, (0,))), 30),
        # the CPU begins at 10, and is behind the device
        (beside(("", 10, ()), ("cpu", 50, (0,)), ("", 20, ())), 60),
        # at 10 and at 40, when it has been idle for 25
        (beside(("", 10, ()), ("cpu", 5, (0,)), ("", 30, ()), ("cpu", 5, (2,))), 45),
        (beside(("", 10, ()), ("cpu", 50, (0,)), ("", 30, ()), ("cpu", 5, (2,))), 65),
    ],
)
def test_what_is_drawn_by_hand(trace, least):
    problem = problem_for(trace, MACHINE)
    assert problem.least_ns(Plan(trace)) == least == replay(Plan(trace), MACHINE).end


@pytest.mark.parametrize("policy", ["keep_all", "swap_all", "full_recompute", "zero_offload", "vdnn", "dtr"])
@given(trace=traces(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_run_is_faster(policy, trace, data):
    platform = data.draw(platforms())
    problem = problem_for(trace, platform.with_budget(data.draw(budgets(trace))))
    with suppress(TiersimError):
        plan = load(policy).plan(problem)
        assert problem.least_ns(plan) <= problem.evaluate(plan).end


@pytest.mark.parametrize(
    "layout",
    [{"dp": 4, "zero": 3}, {"tp": 4}, {"pp": 2, "micro_batches": 4}, {"pp": 2, "dp": 2, "micro_batches": 2}],
    ids=str,
)
def test_what_devices_send_to_each_other_takes_none_of_their_engines(layout):
    trace, platform = lay_out(transformer("gpt2", batch=8, sequence=128, precision="bf16"), "ascend_910b", layout)
    problem = problem_for(trace, replace(platform, dispatch=()))
    device, joint = trace.op_columns.device.tolist(), {*trace.op_columns.ring, *trace.op_columns.group}
    times = [0] * trace.devices
    for op in {*range(len(trace.ops))} - joint:
        times[device[op]] += problem.cost.op_ns(op)
    assert joint
    assert problem.least_ns(Plan(trace)) == max(times) <= problem.evaluate(Plan(trace)).end
