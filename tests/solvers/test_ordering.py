"""What theory says of the planners among each other, each plan replayed by the same engine at the same budget."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import Infeasible
from sim.experiment import problem_for, simulate
from sim.policies.recompute.moccasin.retention import Retention
from sim.policies.recompute.relax_and_fix.least_bytes import least_bytes
from sim.solvers.chain_dp import INF, ChainCosts, solve
from sim.solvers.granularity import by_op
from sim.solvers.milp import Program
from sim.solvers.outcome import Answer
from sim.solvers.reversal import extra_steps
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace
from tests.machines import machine
from tests.solvers.reruns import least_time, mixed_mirror, small_graphs, unit_mirror
from workloads.synthetic import chain, uniform_chain

needs_cp = pytest.mark.skipif(find_spec("ortools") is None, reason="the extra `solvers` (OR-Tools) is not installed")

ORDER = ("checkmate", "rockmate", "rotor")
"""Classes of plans, the widest first; Chen's, which knows no budget, lies in Rotor's."""


def time_of(policy: str, trace: Trace, budget: int, **parameters) -> float:
    """Nanoseconds of a replay; infinite where nothing fits."""
    try:
        return simulate(trace, machine(budget), policy, **parameters).log.end
    except Infeasible:
        return float("inf")


def stage_chain(seed: int, stages: int, largest: int = 4) -> Trace:
    """One forward and one backward op a stage, with sizes 1 … `largest` and temporaries."""
    draw = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [draw.randint(low, high) for _ in range(stages)]

    x = [draw.randint(1, largest) for _ in range(stages + 1)]
    saved = [size + more for size, more in zip(x[1:], some(0, largest), strict=True)]
    beside = [size + more for size, more in zip(x, some(0, largest), strict=False)]  # the gradient and more
    return chain(some(1, 5), some(1, 9), x, saved, some(0, largest), beside)


def budgets(trace: Trace) -> tuple[int, list[int]]:
    """Chen's peak, and some budgets round it, from too small to roomy."""
    plan = simulate(trace, machine(INF), "chen").plan
    chen = problem_for(trace, machine(INF)).evaluate(plan).change("delta").cumsum().max()
    top = schedule_of(TraceIndex(trace), {}).peak()
    return int(chen), sorted({int(chen), int(chen) - 2, (int(chen) + top) // 2, top - 1})


# ---- Checkmate <= Rockmate <= Rotor <= Chen --------------------------------------------------------


def in_order(trace: Trace) -> int:
    """Check all of it; returns how many of the comparisons were strict."""
    peak, tried = budgets(trace)
    chen, strict = time_of("chen", trace, INF), 0
    for budget in tried:
        times = [time_of(policy, trace, budget) for policy in ORDER]
        if budget >= peak:
            times.append(chen)
        assert times == sorted(times), (budget, times)
        strict += len(set(times)) - 1
    return strict


@pytest.mark.parametrize("seed", range(6))
def test_wider_classes_of_plans_are_never_slower_on_stage_chains(seed):
    in_order(stage_chain(seed, 4 + seed % 3))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9), stages=st.integers(2, 5))
def test_wider_classes_of_plans_are_never_slower_on_any_stage_chain(seed, stages):
    in_order(stage_chain(seed, stages))


def test_the_order_is_strict_somewhere():
    # Checkmate drops a saved inside alone, or a checkpoint before its use; Rotor saves all or nothing
    assert sum(in_order(stage_chain(seed, 5)) for seed in (3, 11, 12)) > 3


def breaks(trace: Trace, budget: int, known: float, slots: int) -> int:
    """How many of Rockmate <= Rotor and Rotor <= a known time do not hold with so many slots."""
    rotor = time_of("rotor", trace, budget, slots=slots)
    return (time_of("rockmate", trace, budget, slots=slots) > rotor) + (rotor > known)


def test_where_sizes_are_no_multiples_of_the_slot_rounding_breaks_the_order_and_nothing_else():
    """Sizes are rounded up, each in its own sums: what then seems to be needed hides Chen's plan, or one of Rotor's."""
    broken = {8: 0, 30: 0}
    compared = 0
    for seed in range(12):
        trace = stage_chain(seed, 6, largest=97)
        peak, tried = budgets(trace)
        chen = time_of("chen", trace, INF)
        for budget in tried:
            known = chen if budget >= peak else float("inf")
            compared += 2
            for slots in broken:
                broken[slots] += breaks(trace, budget, known, slots)
            assert breaks(trace, budget, known, slots=budget) == 0  # slots of one byte
    assert compared / 2 > broken[8] > broken[30] > 0, broken


# ---- revolve is Rotor where nothing but inputs can be kept -----------------------------------------


@pytest.mark.parametrize("slots", range(1, 7))
def test_rotor_restricted_to_checkpoints_takes_revolves_steps(slots):
    # whoever saves a stage's inside has no space for another's: only inputs stay, `slots` of them with the first
    inside = 1000
    for steps in (2, 3, 5, 10, 17, 24):
        c = ChainCosts([1] * steps, [1] * steps, [0] * steps, [1] * (steps + 1), [inside] * steps, *[[0] * steps] * 3)
        budget = slots + inside + 2  # the input of the stage that turns, and the gradient of its output
        assert solve(c, budget, slots=budget).time == steps + extra_steps(steps, slots)


@pytest.mark.parametrize(("steps", "slots"), [(4, 2), (10, 2), (10, 3), (20, 3), (24, 6)])
def test_engine_takes_the_same_time_for_revolve_and_so_restricted_rotor(steps, slots):
    inside = 200
    trace = chain([1] * steps, [2] * steps, [1] * (steps + 1), [inside] * steps, None, [0] * steps)
    budget = slots + inside + 2
    rotor = time_of("rotor", trace, budget)
    assert rotor == time_of("revolve", trace, budget, slots=slots) == 3 * steps + extra_steps(steps, slots)


# ---- the two exact models ------------------------------------------------------------------------


def both(trace: Trace, budget: int, most: int) -> tuple[Answer, Answer]:
    """What the mixed-integer program and the constraint program, with `most` runs an op, come to."""
    problem = problem_for(trace, machine(budget))
    nodes = by_op(problem, TraceIndex(trace), "test")
    room = budget - nodes.outside
    milp = Program(nodes, room).minimise(node_limit=10_000, time_limit=60)
    return milp, Retention(nodes, room, most, "test").solve(work_limit=30.0, time_limit=60, seed=0)


def agree(trace: Trace, budget: int, most: int) -> None:
    milp, cp = both(trace, budget, most)
    assert milp.status == cp.status
    assert milp.status in ("optimal", "infeasible")
    assert milp.bound == cp.bound


@needs_cp
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(trace=small_graphs(), less=st.integers(0, 5))
def test_both_exact_models_agree_on_random_graphs(trace, less):
    agree(trace, max(0, schedule_of(TraceIndex(trace), {}).peak() - less), most=8)


@needs_cp
@pytest.mark.parametrize("seed", range(4))
def test_both_exact_models_agree_on_stage_chains(seed):
    trace = stage_chain(seed, 4)
    for budget in budgets(trace)[1]:
        agree(trace, budget, most=5)


@needs_cp
@pytest.mark.parametrize(("trace", "budget"), [(unit_mirror(10), 6), (unit_mirror(14), 8), mixed_mirror(10)])
def test_both_exact_models_agree_beyond_what_brute_force_can_do(trace, budget):
    agree(trace, budget, most=2)


@needs_cp
def test_too_few_runs_an_op_make_the_constraint_program_worse_or_infeasible():
    milp, cp = both(uniform_chain(8), 4, most=2)
    assert (milp.status, milp.bound, cp.status) == ("optimal", 5, "infeasible")
    milp, cp = both(uniform_chain(6), 4, most=2)
    assert (milp.bound, cp.bound) == (2, 2)


# ---- what is said of budgets -----------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(trace=small_graphs(), policy=st.sampled_from(["checkmate", *(["moccasin"] if find_spec("ortools") else [])]))
def test_a_budget_called_the_smallest_is_the_smallest_of_its_class(trace, policy):
    """By brute force over that class; one that no plan needs to keep to, since an input may be dropped."""
    try:
        simulate(trace, machine(1), policy, **({"runs": 8} if policy == "moccasin" else {}))
    except Infeasible as refused:
        floor, said = refused.floor_bytes, str(refused)
        assert floor is not None
        assert least_time(trace, floor) is not None
        assert "of plans that keep weights, inputs" in said
        if "is the smallest budget" in said:
            assert least_time(trace, floor - 1) is None
        below = least_bytes(TraceIndex(trace)) - 1
        assert below < floor
        assert below < 0 or least_time(trace, below, staged=False, keep_inputs=False) is None
