"""What can't be planned is refused in one line that says what, and what would do; held against the registry."""

from __future__ import annotations

import sys

import pytest

from sim.errors import Infeasible, PolicyError
from sim.policies import names, policy_class
from sim.trace import Trace, TraceBuilder
from workloads.synthetic import chain, uniform_chain

CHAINS = [name for name in names() if "chain" in policy_class(name).needs]
BUDGETED = ["rotor", "rockmate", "checkmate", "colossal_auto"]


def crossed() -> Trace:
    """The last forward op reads across the one before: no two stages can be told apart."""
    b = TraceBuilder({"model": "crossed"})
    x = b.tensor("x", 1, "input")
    t = [b.tensor(f"t{i}", 1, layer=0) for i in range(4)]
    b.op("f0", reads=[x], writes=t[:2], layer=0, duration=1)
    b.op("f1", reads=t[:1], writes=t[2:3], layer=0, duration=1)
    b.op("f2", reads=t[1:3], writes=t[3:], layer=0, duration=1)
    gradient = b.tensor("d", 1, "temporary")
    b.op("b2", phase="backward", reads=[t[1], t[3]], writes=[gradient], layer=0, duration=1)
    return b.build(outputs=(gradient,), carry=())


@pytest.mark.parametrize("name", CHAINS)
def test_a_trace_that_is_no_chain_names_the_op_that_breaks_it(name, run):
    with pytest.raises(PolicyError, match=r"not a chain: op 'f2' reads 't1', which 'f0' produced") as refused:
        run(crossed(), name, 4)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("trace", [
    uniform_chain(7), chain([1, 3, 2, 4], [2, 6, 4, 8], [1, 2, 1, 3, 1], [5, 4, 6, 3]),
], ids=["unit", "mixed"])  # fmt: skip
def test_a_budget_below_the_smallest_names_it(name, trace, run):
    with pytest.raises(Infeasible) as refused:
        run(trace, name, 1)
    floor = refused.value.floor_bytes
    assert floor is not None
    assert f"{floor} B" in str(refused.value)
    assert run(trace, name, floor).peak <= floor
    with pytest.raises(Infeasible):
        run(trace, name, floor - 1)


def test_a_missing_solver_is_named_with_what_installs_it(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    for name in names():
        if policy_class(name).solver == "cp":
            with pytest.raises(PolicyError, match=r"pip install 'tiersim\[solvers\]'"):
                run(uniform_chain(4), name, 3)


def test_a_search_that_ends_before_any_plan_says_which_limit_it_met(run):
    pytest.importorskip("ortools", reason="the extra `solvers` (OR-Tools) is not installed")
    with pytest.raises(PolicyError, match="no plan before it met its limit of work; raise work_limit"):
        run(uniform_chain(12), "moccasin", 5, work_limit=1e-6)


def test_a_search_that_ends_early_keeps_what_is_known_and_says_how_far_it_is_from_the_bound(run):
    notes = run(uniform_chain(12), "checkmate", 5, time_limit=1e-6).result.plan.notes
    assert (notes["status"], notes["limit"], notes["time_limited"]) == ("feasible", "time", True)
    assert 0 < notes["bound_ns"] < notes["rerun_ns"]
