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

    remove_unnecessary: where a tensor can stay resident within the budget, do not drop and recompute it; most
        time per byte first (`sim.solvers.unnecessary`). Never slower, and never more than the budget if the plan
        without it keeps to that. Off where what is published has no such step.
    """

    other_values = by_parameter(remove_unnecessary=True)

    remove_unnecessary: bool = False

    def finished(self, problem: Problem, found: Schedule) -> Schedule:
        """The schedule as it leaves the planner."""
        if not self.remove_unnecessary:
            return found
        cost = [problem.cost.op_ns(op) for op in range(len(found.index.reads))]
        return remove_unnecessary(found, cost, problem.budget)
