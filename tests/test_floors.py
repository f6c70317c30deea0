"""Floors: one replay tells that of a plan that ignores the budget; state that is too large by itself needs none."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pytest

from sim import compare, load_policy, load_profile
from sim.errors import Infeasible
from sim.experiment import reference_run
from sim.floors import State, left_in_place, state_in, too_small
from sim.plan import Plan
from sim.policies.base import Policy
from sim.search import fits, smallest_budget
from workloads import transformer

PLATFORM = load_profile("a100_40_pcie")
TRACE = transformer("gpt2", batch=1, sequence=64)
KEPT = reference_run(TRACE, PLATFORM)


def drawn_state():
    """Bytes of state before each op and after the last, from the trace alone: weights and states stay, gradients come
    and go."""
    trace, role = TRACE, [tensor.role for tensor in TRACE.tensors]
    always = sum(t.bytes for t in trace.tensors if t.role in ("weight", "optimizer_state") and t.replaces is None)
    live, most = 0, 0
    for op in trace.ops:
        live += sum(trace.tensors[t].bytes for t in op.writes if role[t] == "gradient")
        most = max(most, live)
        dead = {t for t in {*op.reads, *op.writes} if role[t] == "gradient" and last(t) == op.id}
        live -= sum(trace.tensors[t].bytes for t in dead)
    return always, always + most


def last(tensor):
    return int(TRACE.last_use[tensor])


def test_state_is_what_the_trace_says_counted_by_hand():
    (hbm,) = (each for each in state_in(KEPT) if each.tier == PLATFORM.home(0).name)
    assert (hbm.placed_bytes, hbm.bytes) == drawn_state()
    parameters = sum(t.bytes for t in TRACE.tensors if t.role == "weight" and t.replaces is None)
    assert hbm.placed_bytes >= 3 * parameters  # weights and Adam's two states, all FP32
    assert hbm.bytes >= 4 * parameters  # and all gradients before the update


@dataclass(frozen=True, kw_only=True)
class Reorders(Policy):
    """May change how long gradients live."""

    rewrites = True

    def plan(self, problem):
        return Plan(problem.trace)


@pytest.mark.parametrize(
    ("policy", "share"),
    [
        ("keep_all", "bytes"),
        ("swap_all", "bytes"),
        (Reorders(), "placed_bytes"),
        ("zero_offload", None),
        ("zero_offload(weights=host)", None),
        ("weight_streaming", None),
        ("optimizer_in_backward", None),
        ("zero_offload + full_recompute", None),
        ("layers 0-3: full_recompute; rest: swap_all", "bytes"),
    ],
)
def test_only_policies_that_declare_to_leave_all_state_are_refused_for_it(policy, share):
    loaded, state = load_policy(policy), State("hbm", bytes=70, placed_bytes=60)
    if loaded.rewrites and share == "bytes":
        share = "placed_bytes"
    assert left_in_place(loaded, state) == (getattr(state, share) if share else 0)


def test_what_is_refused_for_its_state_fits_no_budget_below_it_and_the_first_above_may():
    (hbm,) = (each for each in state_in(KEPT) if each.tier == PLATFORM.home(0).name)
    for name in ("keep_all", "chen", "swap_all"):
        policy = load_policy(name)
        below = PLATFORM.with_budget(hbm.bytes - 1)
        assert too_small(policy, [hbm], below) == hbm
        assert not fits(TRACE, below, policy)
        assert too_small(policy, [hbm], PLATFORM.with_budget(hbm.bytes)) is None
    moved = PLATFORM.with_budget(hbm.placed_bytes)
    assert too_small(load_policy("zero_offload"), [hbm], moved) is None
    assert fits(TRACE, moved, "zero_offload")  # so that a refusal of it would have been wrong


@dataclass(frozen=True, kw_only=True)
class Counted(Policy):
    """Keeps everything, and counts how often it is asked."""

    def plan(self, problem):
        asked.append(problem.budget)
        return Plan(problem.trace)


@dataclass(frozen=True, kw_only=True)
class Heeds(Counted):
    """Looks at the budget: below some it declines."""

    def plan(self, problem):
        plan = super().plan(problem)
        return plan if problem.budget > 1 << 59 else Plan(plan.trace, notes={"tight": True}, keep_dead=True)


asked: list[int] = []


def test_a_plan_that_ignores_the_budget_is_made_thrice_and_its_floor_is_exact():
    asked.clear()
    floor = smallest_budget(TRACE, PLATFORM, Counted())
    assert len(asked) == 3
    assert asked[2] == floor - 1
    assert fits(TRACE, PLATFORM, "keep_all", budget=floor)
    assert not fits(TRACE, PLATFORM, "keep_all", budget=floor - 1)


def test_a_plan_that_has_run_is_not_made_again_for_its_floor():
    asked.clear()
    (row,) = compare(TRACE, PLATFORM, Counted(), budget=int(smallest_budget(TRACE, PLATFORM, "keep_all") - 1)).rows
    assert row["floor_bytes"] == smallest_budget(TRACE, PLATFORM, "keep_all")
    assert len(asked) == 3  # for the budget, for unlimited memory, and just below the floor


@dataclass(frozen=True, kw_only=True)
class GivesUp(Policy):
    """Recomputes where that is necessary and fits; else keeps everything, and the run says what is short."""

    recomputes = True

    def plan(self, problem):
        for name in ("keep_all", "full_recompute"):
            plan = load_policy(name).plan(problem)
            with suppress(Infeasible):
                problem.evaluate(plan)
                return plan
        return Plan(problem.trace)


def test_the_floor_of_a_policy_that_gives_up_is_not_what_keeping_everything_takes():
    trace = transformer("gpt2", batch=8, sequence=256)
    floor = smallest_budget(trace, PLATFORM, "full_recompute")
    assert floor < 0.9 * smallest_budget(trace, PLATFORM, "keep_all")
    assert smallest_budget(trace, PLATFORM, GivesUp(), search=False) is None
    assert floor <= smallest_budget(trace, PLATFORM, GivesUp()) < 1.01 * floor


def test_a_policy_that_heeds_the_budget_is_searched_on_request_alone():
    asked.clear()
    assert smallest_budget(TRACE, PLATFORM, Heeds(), search=False) is None
    assert len(asked) == 2
    assert smallest_budget(TRACE, PLATFORM, Heeds()) is not None
    assert smallest_budget(TRACE, PLATFORM, "dtr", search=False) is None


@pytest.mark.parametrize("name", ["zero_offload", "swap_all", "weight_streaming"])
def test_the_floor_of_a_fixed_plan_that_moves_is_a_boundary(name):
    floor = smallest_budget(TRACE, PLATFORM, name, tolerance=0.02)
    assert fits(TRACE, PLATFORM, name, budget=floor)
    assert floor <= smallest_budget(TRACE, PLATFORM, "keep_all")
