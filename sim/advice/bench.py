"""What runs the cells of a search: as a sweep does, but for two things that only a search asks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sim.errors import Infeasible
from sim.experiment import Result, problem_for, simulate, unlimited
from sim.hardware.platform import Platform
from sim.iterations import run_iteration
from sim.limits import TooLong, limited
from sim.log import EventLog
from sim.plan import Plan, Problem
from sim.policies import load
from sim.policies.base import Policy
from sim.policies.composition import Composition
from sim.search import are_same
from sim.sweeps import cell
from sim.trace.graph import Trace

STOPPED = "stopped_s"
"""The key of an outcome that says after how much processor time its run was stopped for now."""


class Bench(cell.Bench):
    """Runs tasks as `sim.sweeps.cell.Bench` does; see there.

    A task with `pace` runs what `pace_of` says instead. One with `stop_s` is stopped after so much processor time, and
    this process goes on with all that it has cached. Runs of compositions are compared with everything kept, not
    with their own parts' freedoms in unlimited memory, which would plan each of them a second time.
    """

    def _answer(self, task: cell.Task) -> tuple[dict[str, Any], dict[str, Any]]:
        stop_s = task.get("stop_s")
        if stop_s is None:
            return super()._answer(task)
        try:
            with limited(stop_s, more=""):
                return super()._answer(task)
        except TooLong as error:
            return {"status": "timed_out", "fits": None, "error": str(error)}, {STOPPED: stop_s}

    def _simulated(self, task: cell.Task, trace: Trace, limited: Platform, policy: Policy) -> Result:
        if task.get("pace"):
            return pace_of(trace, limited, load(task["policy"], **task["parameters"]), task["seed"])
        return super()._simulated(task, trace, limited, policy)

    def _unlimited(
        self, policy: Policy, traces: Sequence[Trace], platform: Platform, kept: EventLog, result: Result
    ) -> tuple[int, str]:
        if isinstance(policy, Composition):
            return kept.end, "keep_all"
        return super()._unlimited(policy, traces, platform, kept, result)


def pace_of(trace: Trace, limited: Platform, policy: Policy, seed: int = 0) -> Result:
    """The run that stands for the least time of a policy beside any other within a budget.

    In a composition a first part plans on the trace as it is, and evaluates what it plans alone, within the budget;
    what varies is the budget that it is told. Where that changes nothing of the plan, every composition carries out
    this plan, and it is run in unlimited memory with nothing beside it. Where it does, the policy plans for unlimited
    memory, too.

    Raises what `simulate` raises.
    """
    ample = unlimited(limited)
    began = time.perf_counter()
    plan = None if policy.online or policy.warm_up else _fixed(problem_for(trace, limited, seed=seed), ample, policy)
    if plan is None:
        return simulate(trace, ample, policy, seed=seed)
    planned_s = time.perf_counter() - began
    log = run_iteration(trace, plan, ample).log
    nominal = limited.home(0).capacity
    return Result(policy, policy.__class__.__name__, ample, plan, log, nominal, plan_s=planned_s, trace=trace)


def _fixed(problem: Problem, ample: Platform, policy: Policy) -> Plan | None:
    """What a policy plans, whatever budget it is told, where that is one plan; None otherwise."""
    replayed: list[tuple[Plan, EventLog | Infeasible]] = []

    def evaluate(plan: Plan, budget: int | None = None) -> EventLog:
        """One replay of each plan."""
        if budget is not None:
            return problem.evaluate(plan, budget)
        known = next((found for other, found in replayed if other is plan), None)
        if known is None:
            try:
                known = problem.evaluate(plan)
            except Infeasible as error:
                known = error
            replayed.append((plan, known))
        if isinstance(known, Infeasible):
            raise known
        return known

    told: Mapping[str, Any] = {"platform": ample, "cost": problem.cost.over(problem.trace, ample)}
    try:
        plan = policy.plan(replace(problem, evaluate=evaluate))
        other = policy.plan(replace(problem, evaluate=evaluate, **told))
    except Infeasible:
        return None
    return plan if isinstance(plan, Plan) and isinstance(other, Plan) and are_same(plan, other) else None
