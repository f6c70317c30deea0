"""Rockmate: integer programs for the inside of stages, a dynamic program over the chain of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.rockmate.option_dp import Line, OptionTable, Step
from sim.policies.recompute.rockmate.options import Menu
from sim.policies.recompute.rotor import Attempt, costs_of, fastest_fitting, room_of
from sim.solvers.chain_dp import INF
from sim.solvers.located import index_of
from sim.solvers.outcome import nothing_fits, planned, rerun_ns
from sim.solvers.regions import chain_of, first_backward
from sim.solvers.schedule import schedule_of
from sim.trace.chain import Chain
from sim.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Rockmate(RecomputationPlanner):
    """Rotor's schedules, where a stage may also save a part of its inside and recompute the rest in its backward.

    Source: Zhao, Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an Efficient, Fast, Automatic and
        Generic Tool for Re-materialization in PyTorch", ICML 2023: options of a block from Checkmate-like
        programs for a grid of limits, identical blocks solved once, Rotor's dynamic program over options.
    Bounds: at most Rotor's time by the model; `levels` squared programs for each distinct stage, then
        O(L^2 (L + options) slots) time for L stages.
    Departs: blocks are the stages of the trace's chain. Options come from this package's program (see
        `checkmate`), op by op, with limits on what is resident between the stage's forward and backward and on
        its peak; a forward that saves nothing runs all its ops in order. Once the plan's exact peak
        is known, the program is solved for a larger or smaller budget, as in `rotor`.

    slots: parts into which the budget is divided, at least 2.
    levels: number of limits of either kind, at least 1.
    exact_ops: for stages of more ops, forward and backward together, options come from rounding the
        relaxation alone.
    max_ops: stages of more ops save all or nothing.
    node_limit: search nodes of each stage's program.
    time_limit: seconds of each stage's program.
    Notes: `status` is always "feasible"; `rerun_ns`, `limit`, `time_limited`; see `checkmate`.
    Raises PolicyError where the trace is not a chain or has no backward, Infeasible where no schedule is found.
    """

    recomputes = True
    needs = frozenset({"chain", "backward"})
    solver = "milp+dp"
    fidelity = "equations"
    slow = True
    rarely = "the cheapest plan that fits seldom recomputes anything on nets this small"
    other_values = by_parameter(slots=10, levels=1, exact_ops=2, max_ops=2, node_limit=1, time_limit=1e-6)
    unseen = by_parameter(node_limit="stages this small are solved at the root")

    slots: Annotated[int, Ge(2)] = 500
    levels: Annotated[int, Ge(1)] = 5
    exact_ops: Annotated[int, Ge(0)] = 24
    max_ops: Annotated[int, Ge(0)] = 100
    node_limit: Annotated[int, Ge(1)] = 200
    time_limit: Annotated[float, Gt(0)] = 20.0

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        chain = chain_of(problem, "rockmate")
        index = index_of(problem)
        anchors = first_backward(chain, "rockmate")
        plain = schedule_of(index, {})
        if plain.peak() <= problem.budget:
            return planned(problem, plain, status="feasible", bound=None)
        menu = Menu(
            problem,
            index,
            levels=self.levels,
            exact_ops=self.exact_ops,
            node_limit=self.node_limit,
            time_limit=self.time_limit,
        )
        costs = costs_of(problem, index, chain)
        options = [menu.of(stage, turn, self.max_ops) for stage, turn in zip(chain.stages, costs.turn, strict=True)]
        line = Line(costs.uf, costs.ub, costs.x, costs.of, options, costs.there, costs.grown)

        def attempt(room: int) -> Attempt | None:
            table = OptionTable(line, room, self.slots) if room > 0 else None
            if table is None or table.time >= INF:
                return None
            schedule = schedule_of(index, reruns_of(chain, line, table.schedule(), anchors), prune=True)
            return rerun_ns(problem, schedule), schedule, schedule.peak() - problem.budget

        best = fastest_fitting(attempt, room_of(problem, chain), problem.budget // self.slots)
        least = problem.budget
        if best is None:
            room = _least_room(line, self.slots)
            best = attempt(room)
            least += best[2] if best is not None else room - room_of(problem, chain)
        if best is None or least > problem.budget:
            what = f"rockmate finds no schedule of {len(chain)} stages in {format_bytes(problem.budget)}"
            raise nothing_fits(problem, what, least)
        limit = "time" if "time" in menu.limits else "nodes" if menu.limits else ""
        return planned(problem, self.finished(problem, best[1]), status="feasible", bound=None, limit=limit)


def reruns_of(chain: Chain, line: Line, schedule: Sequence[Step], anchors: Sequence[int]) -> dict[int, list[int]]:
    """Per op the ops recomputed before it: of stages that run forward once more, and by the options of stages."""
    ran: set[int] = set()
    waiting: list[int] = []
    reruns: dict[int, list[int]] = {}
    for kind, i, o in schedule:
        stage = chain.stages[i]
        if kind == "F":
            if i in ran:
                waiting += stage.forward
            ran.add(i)
        elif anchors[i] >= 0:
            reruns.setdefault(anchors[i], []).extend(waiting)
            waiting = []
            ops = (*stage.forward, *stage.backward)
            for op, inside in zip(stage.backward, line.options[i][o].reruns, strict=True):
                reruns.setdefault(op, []).extend(ops[k] for k in inside)
    return {anchor: ops for anchor, ops in reruns.items() if ops}


def _least_room(line: Line, slots: int) -> int:
    """The fewest bytes that some schedule fits in by the model."""
    every = [options[0] for options in line.options]
    room = sum(line.x) + sum(o.xbar for o in every) + max(max(o.saving, o.undoing) for o in every)
    room += max(line.x) + max(line.temp)
    for _ in range(2):  # the second time with finer slots
        room = OptionTable(line, room, slots).least_bytes() or room
    return room
