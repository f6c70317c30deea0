"""Iteration time under checkpointing, predicted from the plain run's op times, against real PyTorch runs.

Four small GPTs, fp32, one CPU thread. Known to the prediction: the configuration, the ops of the plain run with
their median times, and how long its phases took. The trace comes from the configuration, the policies are ours,
the engine replays them.
"""

from __future__ import annotations

import pytest

from sim.errors import TraceError
from sim.trace import TraceBuilder
from tests.validation import oracle_time
from tests.validation.oracle_time import CASES, matched, ops_of, predict, truth
from workloads.measured import MeasuredOp, with_measured


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["full_ckpt", "selective_ckpt"])
def test_time_under_checkpointing_is_predicted_within_five_percent_or_noise(case, policy):
    found = predict(case, policy)
    assert abs(found.error) <= max(0.05, found.noise)


@pytest.mark.parametrize("case", CASES)
def test_what_recomputation_adds_is_predicted_not_only_the_whole(case):
    """The plain run is given; so the error is put against the time that was added, too."""
    plain, full = truth()[case]["none"]["total"]["median_us"], predict(case, "full_ckpt")
    ours = full.ours / 1000 - predict(case, "none").ours / 1000
    assert ours == pytest.approx(full.measured / 1000 - plain, rel=0.12)


@pytest.mark.parametrize("case", CASES)
def test_order_of_the_policies_is_that_of_the_measurement(case):
    policies = ("none", "selective_ckpt", "full_ckpt")
    assert sorted(policies, key=lambda p: predict(case, p).ours) == sorted(
        policies, key=lambda p: truth()[case][p]["total"]["median_us"]
    )


@pytest.mark.parametrize("case", CASES)
def test_plain_run_takes_the_time_that_was_given(case):
    """No op's time is lost when the measured list is laid on the trace."""
    found, iteration = matched(case), oracle_time.given(case)["given"]["iteration"]
    total = sum(iteration[phase]["median_us"] for phase in oracle_time.PHASES) * 1000
    assert sum(op.duration for op in found.trace.ops) == pytest.approx(total, abs=len(found.trace.ops))
    assert sum(found.runs) == len(ops_of(case))
    assert found.matched >= 0.94 * len(found.trace.ops)
    layers = [op for op in found.trace.ops if op.layer >= 0 and op.phase == "forward"]
    assert all(found.runs[op.id] for op in layers)


def test_times_go_to_the_op_of_the_same_kind_and_layer_and_views_to_the_next():
    b = TraceBuilder()
    x = b.tensor("x", 8, "input")
    for i in range(2):
        y, z = b.tensor(f"y{i}", 8), b.tensor(f"z{i}", 8)
        b.op(f"norm{i}", "norm", reads=[x], writes=[y], layer=i)
        b.op(f"mm{i}", "matmul", reads=[y], writes=[z], layer=i)
        x = z
    trace = b.build(outputs=[x], carry=())
    rows = [
        MeasuredOp("norm", "forward", 0, 10),
        MeasuredOp("elementwise", "forward", 0, 3, view=True),
        MeasuredOp("matmul", "forward", 0, 100),
        MeasuredOp("norm", "forward", 1, 20),
        MeasuredOp("matmul", "forward", 1, 200),
        MeasuredOp("elementwise", "forward", 1, 5, view=True),
    ]
    found = with_measured(trace, rows)
    assert [op.duration for op in found.trace.ops] == [10, 103, 20, 205]
    assert (found.matched, found.carried, found.untimed, found.runs) == (4, 8, 0, (1, 2, 1, 2))
    # 398 ns for ops of 338: 10 ns more for each of six
    spread = with_measured(trace, rows, phase_ns={"forward": 398})
    assert [op.duration for op in spread.trace.ops] == [20, 123, 30, 225]
    # ops that took longer alone than together are shortened alike
    assert sum(op.duration for op in with_measured(trace, rows, phase_ns={"forward": 169}).trace.ops) in (168, 169, 170)
    assert [op.duration for op in with_measured(trace, rows, extra_ns=1).trace.ops] == [11, 105, 21, 207]


def test_what_cannot_be_laid_on_a_trace_is_refused():
    b = TraceBuilder()
    x, y = b.tensor("x", 8, "input"), b.tensor("y", 8)
    b.op("mm", "matmul", reads=[x], writes=[y])
    trace = b.build(outputs=[y], carry=())
    for row, words in (
        (MeasuredOp("matmul", "recompute", -1, 1), "'recompute'"),
        (MeasuredOp("mm", "forward", -1, 1), "'mm'"),
        (MeasuredOp("matmul", "backward", -1, 1), "1 ops in the trace, 0 measured"),
        (MeasuredOp("matmul", "forward", 4, 1), "layer 4"),
    ):
        with pytest.raises(TraceError, match=words):
            with_measured(trace, [row])
