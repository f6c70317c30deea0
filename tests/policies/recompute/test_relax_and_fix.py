"""Relax-and-fix: within the budget, at the bound or above, and near to what brute force finds."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.conformance.checker import check
from sim.errors import Infeasible, PolicyError
from sim.experiment import Prices
from sim.policies.recompute.relax_and_fix.least_bytes import least_bytes
from sim.solvers.schedule import TraceIndex, schedule_of
from tests.solvers.reruns import least_time, mixed_mirror, small_graphs, unit_mirror
from workloads import transformer
from workloads.synthetic import uniform_chain, w1


def told(run, trace, budget, **parameters):
    """A run whose log, checker and notes agree."""
    facts = run(trace, "relax_and_fix", budget, **parameters)
    notes = facts.result.plan.notes
    checked = check(facts.result.plan, Prices(trace, facts.result.platform).op_ns)
    assert (checked.peak, checked.time, checked.rerun) == (facts.peak, facts.time, notes["rerun_ns"])
    assert notes["bound_ns"] <= notes["rerun_ns"]
    assert (notes["status"] == "optimal") == (notes["bound_ns"] == notes["rerun_ns"])
    return facts


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(trace=small_graphs(), data=st.data())
def test_between_the_bound_and_the_budget_on_small_graphs(trace, data, run):
    floor = least_bytes(TraceIndex(trace))
    budget = data.draw(st.integers(max(1, floor - 1), floor + 8))
    best = least_time(trace, budget, staged=False, keep_inputs=False)
    plain = sum(op.duration or 0 for op in trace.ops)
    facts, why = None, ""
    try:
        facts = told(run, trace, budget)
    except Infeasible as refused:
        enough, why = refused.floor_bytes, str(refused)
    if facts is None:
        assert enough is not None
        assert told(run, trace, enough).peak <= enough
        assert "no plan of this class" not in why or best is None
        return
    assert best is not None
    assert facts.result.plan.notes["bound_ns"] <= best - plain <= facts.time - plain


def test_mostly_the_optimum_and_seldom_a_refusal_where_there_is_a_plan(run):
    same = more = missed = 0
    for trace in (uniform_chain(4), uniform_chain(5), unit_mirror(3), unit_mirror(4), mixed_mirror(3)[0]):
        top, floor = schedule_of(TraceIndex(trace), {}).peak(), least_bytes(TraceIndex(trace))
        for budget in range(floor, top):
            best = least_time(trace, budget)
            try:
                took = told(run, trace, budget).time
            except Infeasible:
                missed += best is not None
                continue
            same += took == best
            more += best is not None and took > best
    assert same > 2 * more
    assert missed * 5 <= same + more


SMALL = {"model_type": "gpt2", "n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 256, "vocab_size": 1000}


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_near_the_bound_on_a_transformer_and_refused_only_near_the_least_bytes(attention, run):
    trace = transformer(SMALL, batch=8, sequence=256, precision="amp_bf16", attention=attention)
    top, floor = run(trace, "keep_all").peak, least_bytes(TraceIndex(trace))
    plain = run(trace, "keep_all").time
    gaps = []
    for share in (0.05, 0.2, 0.5, 0.8):
        notes = told(run, trace, int(floor + share * (top - floor))).result.plan.notes
        gaps.append((notes["rerun_ns"] - notes["bound_ns"]) / plain)
    assert statistics.median(gaps) <= 0.0025
    assert told(run, trace, int(1.04 * floor)).peak <= 1.04 * floor


def test_what_cannot_fit_is_refused_as_proven_and_names_what_would_do(run):
    trace = w1(3)
    floor = least_bytes(TraceIndex(trace))
    with pytest.raises(Infeasible, match="no plan of this class fits") as refused:
        run(trace, "relax_and_fix", floor - 1)
    assert refused.value.floor_bytes is not None
    assert told(run, trace, refused.value.floor_bytes).peak <= refused.value.floor_bytes


def test_a_step_of_its_own_may_be_left_out(run):
    trace = transformer(SMALL, batch=8, sequence=256, precision="amp_bf16", attention="eager")
    top, floor = run(trace, "keep_all").peak, least_bytes(TraceIndex(trace))
    for share in (0.05, 0.3, 0.9):
        budget = int(floor + share * (top - floor))
        without = told(run, trace, budget, remove_unnecessary=False)
        assert told(run, trace, budget).time <= without.time


@pytest.mark.parametrize("wrong", [{"moments": 0}, {"rounds": 0}])
def test_wrong_parameters(wrong, run):
    with pytest.raises(PolicyError, match="at least 1"):
        run(uniform_chain(4), "relax_and_fix", **wrong)
