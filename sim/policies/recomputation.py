"""What offline recomputation planners have in common: one step that any of them may end with."""

from __future__ import annotations

from dataclasses import dataclass

from sim.plan import Problem
from sim.policies.base import Policy, by_parameter
from sim.solvers.schedule import Schedule
from sim.solvers.unnecessary import remove_unnecessary


@dataclass(frozen=True, kw_only=True)
class RecomputationPlanner(Policy):
    """A policy whose plan is a recomputation schedule made before the iteration.

    remove_unnecessary: keep a tensor resident instead of dropping and recomputing it where the budget allows, most
        time per byte first (`sim.solvers.unnecessary`). Never slower, and within the budget if the plan without it
        is. Off where the published system has no such step.
    """

    other_values = by_parameter(remove_unnecessary=True)

    remove_unnecessary: bool = False

    def finished(self, problem: Problem, schedule: Schedule) -> Schedule:
        """The schedule as it leaves the planner."""
        if not self.remove_unnecessary:
            return schedule
        cost = [problem.cost.op_ns(op) for op in range(len(schedule.index.reads))]
        return remove_unnecessary(schedule, cost, problem.budget)
