"""Treewidth-based rematerialisation: schedules from balanced separators of any graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from sim.declared import OneOf
from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.twremat.separator_schedule import Needs, separator_schedule
from sim.policies.recompute.twremat.tree_decomposition import ORDERS, Separators, decompose, separators
from sim.solvers.located import index_of
from sim.solvers.outcome import refused, rerun_ns
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of
from sim.trace.chain import FORWARD, before_update
from sim.trace.kept import kept

LONGEST = 20  # reruns an op, on average: a schedule of more is given up


@dataclass(frozen=True, kw_only=True)
class Twremat(RecomputationPlanner):
    """Hold the results of a balanced separator while the parts that it leaves are computed, and recurse into each part.

    The graph of ops gets a tree decomposition of small width. A bag of it that leaves parts of at most half the
    ops each is computed op by op and held; an input that an op of the bag needs from a part is computed there by the
    same rule, and may be freed afterwards. No chain is needed.
    Source: Kumar, Purohit, Svitkina, Vee, Wang, "Efficient Rematerialization for Deep Networks", NeurIPS 2019.
    Bounds: n ops in a decomposition of width k give a tree of at most log2 n + 1 levels; at any time at
        most k + 1 results per level and the inputs of one op per level are resident; at most n (k + 2)^levels runs.
        The width is that of a greedy order, not the treewidth. Planning takes tenths of a second for thousands of ops.
    Departs: a reconstruction: the recursion and the passes after it follow the method's public implementation
        by others (the one that Rockmate calls), not the paper's text. First runs stay in program order; an op
        whose results no other reads runs with the first op of a separator that follows it, not at the end. A tensor
        that may be freed stays until its bytes are needed; the least time per byte is freed first. Afterwards
        recomputations whose results can stay within the budget are removed, in six passes, with exact sizes. Backward
        ops and receives run once; an op in place is recomputed together with the value that it overwrites, if nothing
        else reads that, else it runs once. A schedule of more than 20 recomputations per op is given up.

    order: elimination order, "min_fill" or "min_degree".
    eager: free at once everything that may be freed, and remove no recomputation: the schedule of least memory,
        whatever the budget.
    Notes: `width` of the decomposition, `levels` of separators, `rerun_ns`.
    Raises PolicyError on several devices and where an eager schedule is given up, Infeasible naming a budget
        that would do.
    """

    recomputes = True
    fidelity = "reconstruction"
    rarely = "nets this small seldom leave room between what it needs and keeping all"
    other_values = by_parameter(remove_unnecessary=False, order="min_degree", eager=True)

    remove_unnecessary: bool = True
    order: Annotated[str, OneOf(ORDERS)] = "min_fill"
    eager: bool = False

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        trace, budget = problem.trace, problem.budget
        if trace.devices > 1:
            raise PolicyError(f"policy 'twremat' needs a trace on one device; this one has {trace.devices}")
        index = index_of(problem)
        width, tree = kept(trace.structure, "separators", self.order, lambda: _separators(index, self.order))
        cost = [problem.cost.op_ns(op) for op in range(len(trace.ops))]
        needs = cache(lambda: _needs(index))  # that all is kept often does

        def within(limit: int) -> Schedule | None:
            reruns = separator_schedule(needs(), tree, cost, limit, LONGEST * len(trace.ops))
            return None if reruns is None else schedule_of(index, reruns, prune=True)

        fits, least = self._eager(within(0), budget) if self.eager else _search(within, index, budget)
        if fits is None:
            raise refused(problem, "twremat", least, proven=False, smallest=False)
        if not self.eager:
            fits = self.finished(problem, fits)
        notes = {"width": width, "levels": tree.depth, "rerun_ns": rerun_ns(problem, fits)}
        return Plan(trace, fits.actions(), notes=notes)

    def _eager(self, schedule: Schedule | None, budget: int) -> tuple[Schedule | None, Schedule]:
        if schedule is None:
            raise PolicyError(f"policy 'twremat': the eager schedule has over {LONGEST} reruns an op; take eager=False")
        return (schedule if schedule.peak() <= budget else None), schedule


def _search(
    within: Callable[[int], Schedule | None], index: TraceIndex, budget: int
) -> tuple[Schedule | None, Schedule]:
    """Runs that fit the budget, else none; and of those that do not depend on it the ones of least peak."""
    least = schedule_of(index, {})
    top = least.peak()
    if top <= budget:
        return least, least
    for limit in (budget, 0, top // 4, top // 2, top * 3 // 4):
        schedule = within(limit)
        if schedule is not None and schedule.peak() <= budget:
            return schedule, schedule
        if schedule is not None and limit != budget:
            least = min(least, schedule, key=Schedule.peak)
    return None, least


def _separators(index: TraceIndex, order: str) -> tuple[int, Separators]:
    """The width of the decomposition, and its tree of separators: no size has a part in them."""
    decomposition = decompose(_needs(index).graph(), order)
    return decomposition.width, separators(decomposition)


def _needs(index: TraceIndex) -> Needs:
    """The ops before the update; of these the forward ops may be recomputed."""
    never = index.gradient_ops.union(index.trace.op_columns.group)
    count = before_update(index.trace)
    allowed = [index.phase[op] == FORWARD and op not in never for op in range(count)]
    return Needs(index, count, allowed)
