"""checkpointVLAD: bisection costs (l/2) log2 l steps, holds log l snapshots, and needs no chain."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import PolicyError
from sim.solvers.reversal import bisection_reversal, extra_steps
from workloads.synthetic import chain, random_dag, unet


def unit_chain(steps: int):
    return chain([1] * steps, [2] * steps, [1] * (steps + 1), [1] * steps)


@pytest.mark.parametrize(("steps", "extra"), [(8, 12), (16, 32), (64, 192), (1024, 5120)])
def test_engine_counts_the_closed_form_of_bisection(steps, extra, run):
    facts = run(unit_chain(steps), "vlad", base=1)
    assert len(facts.rerun) == extra
    # x0 and one snapshot a halving, the step that is undone, and its gradients
    assert facts.peak <= math.ceil(math.log2(steps)) + 4


@pytest.mark.parametrize(("steps", "slots"), [(10, 2), (20, 3), (50, 5)])
def test_binomial_splits_equal_revolve(steps, slots, run):
    facts = run(unit_chain(steps), "vlad", snapshots=slots)
    assert len(facts.rerun) == extra_steps(steps, slots)
    assert facts.peak == run(unit_chain(steps), "revolve", slots=slots).peak


def test_memory_of_a_net_with_skips_falls(run):
    trace = unet(5)
    plain = run(trace, "keep_all")
    peaks = [run(trace, "vlad", base=base).peak for base in (100, 4, 2)]
    assert peaks[0] == plain.peak
    assert peaks[-1] < plain.peak


def test_coarsest_base_that_fits_is_taken(run):
    trace = unit_chain(64)
    facts = run(trace, "vlad", 24)
    base = facts.result.plan.notes["base"]
    assert 1 < base < 64
    assert run(trace, "vlad", base=2 * base).peak > 24
    assert run(trace, "vlad", 200).rerun == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), ops=st.integers(2, 40), base=st.integers(1, 10))
def test_any_graph_is_reversed_and_only_forward_ops_run_again(run, seed, ops, base):
    trace = random_dag(ops, seed)
    facts, plain = run(trace, "vlad", base=base), run(trace, "keep_all")
    again = [trace.ops[trace.op_id(name)] for name in facts.rerun]
    assert all(op.phase == "forward" for op in again)
    assert facts.time == plain.time + sum(op.duration or 0 for op in again)


def test_schedule_undoes_each_step_once_from_the_last():
    for steps in (1, 2, 3, 7, 30):
        for base in (1, 2, 5):
            backward = [i for kind, i in bisection_reversal(steps, base) if kind == "B"]
            assert backward == list(reversed(range(steps)))


@pytest.mark.parametrize("wrong", [{"base": 0}, {"snapshots": 0}, {"base": 1, "snapshots": 2}])
def test_wrong_parameters_are_refused(wrong, run):
    with pytest.raises(PolicyError, match="vlad"):
        run(unit_chain(4), "vlad", **wrong)
