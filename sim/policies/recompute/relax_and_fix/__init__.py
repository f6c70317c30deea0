"""Relax-and-fix: linear programs at moments of the schedule say what stays resident; with a bound for all plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.relax_and_fix.least_bytes import least_bytes
from sim.policies.recompute.relax_and_fix.moment_search import LEVELS, MomentSearch
from sim.solvers.located import index_of
from sim.solvers.nodes import body
from sim.solvers.outcome import planned, refused, rerun_ns
from sim.solvers.schedule import Schedule, schedule_of

PLANS = "drop and recompute on one device, move nothing, and keep weight gradients"
"""The plans that the bound is about."""
CLOSE = 1000  # a plan within this part of the iteration's time above the bound ends the search
WIDER = (1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
"""Budgets that are tried in order to name one that does, as parts of the least bytes of any plan."""


@dataclass(frozen=True, kw_only=True)
class RelaxAndFix(RecomputationPlanner):
    """Decide what is resident when the op of largest footprint runs, then wherever that plan still exceeds the budget.

    A linear program of that one moment says what is resident then and what is recomputed afterwards, for the least
    time. It is rounded, at three thresholds, and each op is recomputed just before its result is read. The op at
    which such a plan exceeds the budget becomes the next moment: the decisions before it are fixed, and a program for
    that moment is solved, until a plan fits. In the end, recomputation that proved unnecessary is removed.
    Source: this project. The conditions are Checkmate's (Jain et al., MLSys 2020) at a few ops instead of all; fixing
        one part of a program after the other is known as relax-and-fix.
    Bounds: `bound_ns` is proven for every plan on one device that only drops and recomputes and keeps weight gradients
        once they are produced, offline or online, in any order and however often; it is taken over the first `moments`
        moments together. Each program has a variable per op and tensor and takes hundredths of a second for thousands
        of ops; mostly there is one program per rounding, near the least memory tens.
    Departs: from no paper. Removing unnecessary recomputation is part of it, and on by default.

    moments: number of moments in the program of the bound, at least 1.
    rounds: programs in all before the search is given up.
    Notes of the plan: `status` is "optimal" only where its recomputation is no longer than the bound; `bound_ns`,
        `rerun_ns`.
    Raises Infeasible where no plan was found, naming a budget that does, and saying so where it is proven that there
        is none; PolicyError on several devices or engines.
    """

    recomputes = True
    solver = "lp"
    fidelity = "equations"
    slow = True
    rarely = "the cheapest plan that fits seldom recomputes anything on nets this small"
    other_values = by_parameter(remove_unnecessary=False, moments=1, rounds=1)
    unseen = by_parameter(moments="it changes what is proven, not the plan; see its own tests")

    remove_unnecessary: bool = True
    moments: Annotated[int, Ge(1)] = 3
    rounds: Annotated[int, Ge(1)] = 60

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        body(problem, "relax_and_fix")
        index = index_of(problem)
        plain = schedule_of(index, {})
        if plain.peak() <= problem.budget:
            return planned(problem, plain, status="optimal", bound=0, plans=PLANS)
        search = MomentSearch(index, [problem.cost.op_ns(op) for op in range(len(index.reads))])
        floor = least_bytes(index)
        schedule, bound = self._best(problem, search, problem.budget)
        if schedule is None:
            impossible = bound is None or problem.budget < floor
            enough = self._enough(problem, search, max(floor, problem.budget), plain.peak())
            raise refused(problem, "relax_and_fix", enough, proven=impossible, smallest=False, plans=PLANS)
        status = "optimal" if rerun_ns(problem, schedule) == bound else "feasible"
        return planned(problem, schedule, status=status, bound=bound, plans=PLANS)

    def _best(
        self, problem: Problem, search: MomentSearch, budget: int, levels: Sequence[float] = LEVELS
    ) -> tuple[Schedule | None, int | None]:
        """The cheapest plan of some roundings, and the bound; None where there is none."""
        bound = search.bound([search.first], budget)
        if bound is None:
            return None, None
        best: Schedule | None = None
        close, left = sum(search.cost) // CLOSE, self.rounds
        for level in levels:
            dive = search.dive(budget, level, left)
            left -= dive.programs
            if level == levels[0] and len(dive.moments) > 1:
                bound = search.bound(dive.moments[: self.moments], budget)
            if bound is None:
                return None, None
            if dive.schedule is not None:
                schedule = self.finished(problem, dive.schedule)
                if best is None or rerun_ns(problem, schedule) < rerun_ns(problem, best):
                    best = schedule
            if best is not None and rerun_ns(problem, best) <= bound + close:
                break
        return best, bound

    def _enough(self, problem: Problem, search: MomentSearch, least: int, most: int) -> int:
        """The smallest budget tried for which there is a plan."""
        for part in WIDER:
            budget = int(least * part)
            if budget < most and self._best(problem, search, budget, LEVELS[:1])[0] is not None:
                return budget
        return most
