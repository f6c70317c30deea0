"""Revolve: the binomial schedule that reverses a chain with a given number of kept states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.solvers.located import index_of
from sim.solvers.regions import chain_of, first_backward
from sim.solvers.reversal import binomial_reversal, reruns_of
from sim.solvers.schedule import Schedule, schedule_of


@dataclass(frozen=True, kw_only=True)
class Revolve(RecomputationPlanner):
    """Reverse the chain with at most `slots` stage inputs kept, in the fewest forward steps.

    A stage runs forward to reach a later one, or once more right before its backward, saving what that needs.
    Source: Griewank, Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000.
    Bounds: t(l, c) = r l - C(c+r, c+1) stage runs beyond one each, with the least r such that
        l <= C(c+r, c): optimal for equal stages, among schedules that keep stage inputs alone; no stage runs
        more than r + 1 times. Planning is linear in the number of runs.
    Departs: stages are those of the trace's chain view, taken as equal although they are not. An input is
        freed as soon as no later run reads it, and an op is recomputed only where its results are read.

    slots: stage inputs kept at once, the first stage's included, at least 1; None takes the most that
        fit the budget, found by bisection over the plans' exact peaks.
    Raises PolicyError where the trace is not a chain or has no backward.
    """

    recomputes = True
    needs = frozenset({"chain", "backward"})
    fidelity = "equations"
    other_values = by_parameter(slots=3)

    slots: Annotated[int, Ge(1)] | None = None

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations; notes: the number of slots."""
        line = chain_of(problem, "revolve")
        index = index_of(problem)
        anchors = first_backward(line, "revolve")
        forward = [stage.forward for stage in line.stages]

        def with_slots(slots: int) -> Schedule:
            return schedule_of(
                index, reruns_of(index, binomial_reversal(len(line), slots), forward, anchors), prune=True
            )

        slots = self.slots
        if slots is None:
            slots, too_many = 1, len(line) + 1
            while too_many - slots > 1:
                middle = (slots + too_many) // 2
                if with_slots(middle).peak() <= problem.budget:
                    slots = middle
                else:
                    too_many = middle
        schedule = self.finished(problem, with_slots(slots))
        return Plan(problem.trace, schedule.actions(), notes={"slots": slots})
