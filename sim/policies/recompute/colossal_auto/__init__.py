"""Colossal-Auto on one device: Rotor's schedule of the chain, together with weights offloaded to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from sim.errors import Infeasible
from sim.hardware.platform import Tier
from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.colossal_auto.weight_offload import Pager, offloaded, units_of
from sim.policies.recompute.rotor import Rotor, costs_of, held_outside
from sim.solvers.chain_dp import INF, solve
from sim.solvers.located import index_of
from sim.solvers.outcome import nothing_fits, rerun_ns
from sim.solvers.regions import chain_of, first_backward
from sim.solvers.reversal import reruns_of
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of
from sim.trace.chain import Chain
from sim.units import format_bytes

COARSE = 16  # activation budgets that are tried where none of the likely ones has led to a plan


@dataclass(frozen=True, kw_only=True)
class ColossalAuto(RecomputationPlanner):
    """The fastest pair of a checkpointing schedule and a set of stages whose weights are offloaded to the host.

    For several activation budgets Rotor's dynamic program finds the best schedule of the chain; for each,
    weights are offloaded, stage by stage, until the rest fits. The pairs are replayed, and the fastest is kept.
    Source: Liu, Li, Fang, Shao, Yao, You, "Colossal-Auto: Unified Automation of Parallelization and Activation
        Checkpoint for Large-scale Models", 2023, arXiv:2302.02599; the greedy choice of what to offload follows the
        authors' code.
    Bounds: never slower than Rotor with the same slots. The dynamic program runs about twice, as for Rotor; each
        pair then takes O(stages * window * steps) and one replay.
    Departs: the search over parallel layouts is not part of this. There checkpointing and offload are separate
        passes; here activation budgets join them, as they join layouts and checkpointing there. Stages that
        share a weight are offloaded together. A stage's weights are fetched for each run of it, so that a recomputed
        stage pays for more copies, which the code, without recomputation there, counts as two (four if shared).
        `window` also holds in forward, where the code looks one stage ahead, and several copies may start at one
        stage. Any stage may be offloaded, the last one included. The update stays on the
        device: weights are fetched for it and their new values written back, gradients and optimizer states stay.

    slots: parts into which memory is divided, at least 2.
    levels: number of activation budgets, at least 1.
    offload: "asynchronous": copies start up to `window` visits ahead, no more than hide them; "synchronous":
        when the stage is reached; "none": Rotor. Without a host tier nothing is offloaded either.
    window: visits of stages that a copy may start ahead, at least 1.
    share: the part of the budget that the greedy choice aims at, above 0 and at most 1 (0.95 in
        the code, whose estimate of the peak may be off); where it can't be met, the whole budget.
    Notes: `offloaded_bytes`, of weights that begin on the host.
    Raises PolicyError where the trace is not a chain or has no backward, Infeasible, naming a budget that does, where
        no pair fits.
    """

    recomputes = True
    moves = True
    needs = frozenset({"chain", "backward"})
    solver = "dp"
    manages = ("activations", "weights")
    fidelity = "reconstruction"
    rarely = "weights leave only where that is faster than recomputing ops"
    other_values = by_parameter(slots=20, levels=1, offload="none", window=1, share=0.5)

    slots: Annotated[int, Ge(2)] = 500
    levels: Annotated[int, Ge(1)] = 8
    offload: Literal["asynchronous", "synchronous", "none"] = "asynchronous"
    window: Annotated[int, Ge(1)] = 3
    share: Annotated[float, Gt(0), Le(1)] = 1.0

    def plan(self, problem: Problem) -> Plan:
        """Drops, recomputations and copies of weights."""
        line = chain_of(problem, "colossal_auto")
        index = index_of(problem)
        first_backward(line, "colossal_auto")
        plain = schedule_of(index, {})
        if plain.peak() <= problem.budget:
            return Plan(problem.trace, notes={"offloaded_bytes": 0})
        search = _Search(self, problem, line)
        try:
            alone = Rotor(slots=self.slots, remove_unnecessary=self.remove_unnecessary)
            search.note(replace(alone.plan(problem), notes={"offloaded_bytes": 0}))
        except Infeasible as error:
            search.floor = error.floor_bytes
        host = problem.platform.host
        if host is not None and search.units and self.offload != "none":
            search.pair(plain, host)
            outside = held_outside(problem, line) - line.gradients
            schedules = _Schedules(problem, line, index, plain.peak() - outside, self.slots)
            weights = sum(unit.bytes for unit in search.units)
            for schedule in schedules.within(np.linspace(0, weights, self.levels) + problem.budget - outside):
                search.pair(self.finished(problem, schedule), host)
            if search.best is None:
                for schedule in schedules.within((schedules.table.least_bytes() or 0) * np.geomspace(1, 4, COARSE)):
                    search.pair(self.finished(problem, schedule), host)
        if search.best is None:
            raise nothing_fits(
                problem,
                f"policy 'colossal_auto' finds no schedule of {len(line)} stages in {format_bytes(problem.budget)}, "
                "weights offloaded or not",
                search.floor,
            )
        return search.best


class _Search:
    """The fastest plan so far, and, while there is none, the smallest budget that one of those tried would fit in."""

    def __init__(self, policy: ColossalAuto, problem: Problem, line: Chain) -> None:
        self.problem, self.line, self.units = problem, line, units_of(problem, line)
        self.window = policy.window if policy.offload == "asynchronous" else 0
        self.target = int(policy.share * problem.budget)
        self.once = sum(problem.cost.op_ns(op) for op in range(len(problem.trace.ops)))
        self.best: Plan | None = None
        self.end = 0
        self.floor: int | None = None

    def pair(self, schedule: Schedule, host: Tier) -> None:
        """Offload beside a schedule, greedily; its own time is the least that the pair takes."""
        if self.best is not None and self.once + rerun_ns(self.problem, schedule) >= self.end:
            return
        pager = Pager(self.problem, self.line, schedule, host)
        chosen = offloaded(pager, self.units, budget=self.problem.budget, target=self.target, window=self.window)
        if chosen is None:
            least = int((pager.peaks - sum(pager.absent(unit, 0) for unit in self.units)).max())
            self.floor = least if self.floor is None else min(self.floor, least)
            return
        place = {t: host.name for unit, _ in chosen for t in unit.weights}
        notes = {"offloaded_bytes": sum(unit.bytes for unit, _ in chosen)}
        self.note(Plan(self.problem.trace, pager.actions(chosen), place=place, notes=notes))

    def note(self, plan: Plan) -> None:
        """Replay a plan; keep it if it is the fastest."""
        try:
            end = self.problem.evaluate(plan).end
        except Infeasible:  # the host is full
            return
        if self.best is None or end < self.end:
            self.best, self.end = plan, end


class _Schedules:
    """The best schedules of a chain for any activation budget up to `most` bytes, from one table."""

    def __init__(self, problem: Problem, line: Chain, index: TraceIndex, most: int, slots: int) -> None:
        self.index, self.anchors = index, first_backward(line, "colossal_auto")
        self.forward = [stage.forward for stage in line.stages]
        self.table = solve(costs_of(problem, index, line), max(most, 1), slots)
        fits = np.flatnonzero(self.table.best[len(line)][0] < INF)
        self.least = int(fits[0]) + self.table.x[0] if len(fits) else self.table.slots + 1
        self.seen: set[int] = set()

    def within(self, rooms: Iterable[float]) -> Iterator[Schedule]:
        """One for each budget not asked for before, the roomiest first; too small a one is raised to the least."""
        for room in sorted(rooms, reverse=True):
            slots = min(max(int(room / self.table.slot), self.least), self.table.slots)
            if slots >= self.least and slots not in self.seen:
                self.seen.add(slots)
                reversal = replace(self.table, slots=slots).schedule()
                yield schedule_of(self.index, reruns_of(self.index, reversal, self.forward, self.anchors), prune=True)
