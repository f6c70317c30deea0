"""The checker and the engine say the same of any plan that drops and recomputes; what is illegal is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.conformance.checker import Checked, check
from sim.errors import IllegalPlan
from sim.experiment import Prices, problem_for, simulate
from sim.hardware.platform import Engine, Platform, Tier
from sim.plan import Drop, Move, Plan, Recompute
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace, TraceBuilder
from tests.strategies import traces
from workloads.synthetic import random_dag, uniform_chain

BIG = 1 << 60
HBM, NPU = Tier("hbm", BIG, BIG, 10**9, device=0), Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9})
TOY = Platform("toy", (HBM,), (NPU,), ())


def agrees(plan: Plan) -> None:
    checked = check(plan, Prices(plan.trace, TOY).op_ns)
    log = problem_for(plan.trace, TOY).evaluate(plan)
    assert log.counters["implicit_recomputes"] == log.counters["ignored_actions"] == 0
    assert checked.peak == int(np.cumsum(log.change("delta")).max(initial=0))
    assert checked.time == log.end


@settings(max_examples=60)
@given(traces(cpu=False), st.integers(0, 2**32))
def test_checker_and_engine_agree_on_random_plans(trace, seed):
    draw = random.Random(seed)
    index = TraceIndex(trace)
    reruns = {t: [i for i in range(t) if draw.random() < 0.2] for t in range(len(trace.ops)) if draw.random() < 0.5}
    agrees(Plan(trace, schedule_of(index, reruns).actions()))


@pytest.mark.parametrize("policy", ["keep_all", "full_recompute", "chen", "rotor"])
def test_checker_and_engine_agree_on_policies(policy):
    trace = uniform_chain(9, 7, 5) if policy != "full_recompute" else random_dag(12, 3)
    agrees(simulate(trace, TOY, policy).plan)


def test_outputs_that_are_still_there_are_held_twice_while_they_are_made_again():
    b = TraceBuilder({"model": "three"})
    t = [b.tensor(name, size) for name, size in (("large", 10), ("small", 1), ("last", 1))]
    b.op("a", writes=[t[0]], duration=2)
    b.op("b", reads=[t[0]], writes=[t[1]], duration=3)
    b.op("c", reads=[t[0], t[1]], writes=[t[2]], duration=4)
    trace = b.build(outputs=(t[2],), carry=())
    plan = Plan(trace, (Recompute("a", before="c"),))
    agrees(plan)
    assert check(plan, Prices(trace, TOY).op_ns) == Checked(peak=21, time=11, rerun=2, reruns=(0,))
    assert check(Plan(trace), Prices(trace, TOY).op_ns) == Checked(peak=12, time=9, rerun=0, reruns=())


def rectified() -> Trace:
    """conv makes a, relu_ writes b over it; next and late read b."""
    b = TraceBuilder({"model": "rectified"})
    x, a, c = b.tensor("x", 10, "input"), b.tensor("a", 50), b.tensor("c", 10)
    over, end = b.tensor("b", 50, replaces=a), b.tensor("end", 10)
    b.op("conv", reads=[x], writes=[a], duration=10)
    b.op("relu_", reads=[a], writes=[over], duration=5)
    b.op("next", reads=[over], writes=[c], duration=20)
    b.op("late", reads=[over, c], writes=[end], duration=1)
    return b.build(outputs=[end], carry=())


@pytest.mark.parametrize(("drops", "peak"), [((Drop("b", after="next"),), 80), ((), 120)], ids=["dropped", "there"])
def test_an_op_in_place_overwrites_again_what_was_made_again(drops, peak):
    plan = Plan(rectified(), (*drops, Recompute("conv", before="late"), Recompute("relu_", before="late")))
    agrees(plan)
    assert check(plan, Prices(plan.trace, TOY).op_ns) == Checked(peak=peak, time=51, rerun=15, reruns=(0, 1))


def test_what_was_overwritten_is_not_there():
    with pytest.raises(IllegalPlan, match="op 'relu_': tensor 'a' is not resident"):
        check(Plan(rectified(), (Recompute("relu_", before="late"),)), lambda op: 1)


@pytest.mark.parametrize(("actions", "message"), [
    ((Drop("f0.out", after="f2"),), "op 'b1': tensor 'f0.out' is not resident"),
    ((Drop("b0.out", before="b1"),), "has not been produced yet"),
    ((Recompute("b1", before="f1"), ), "op 'b1': Recompute before it has run"),
    ((Move("f0.out", "host", after="f2"),), "only plans that drop and recompute"),
    ((Drop("f0.out"),), "either before or after"),
    ((Drop("b0.out", after="b0"),), "output tensor 'b0.out' is not resident at the end"),
])  # fmt: skip
def test_illegal_plans_are_refused(actions, message):
    with pytest.raises(IllegalPlan, match=message):
        check(Plan(uniform_chain(3), actions), lambda op: 1)
