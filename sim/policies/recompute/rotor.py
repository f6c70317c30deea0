"""Rotor: the best persistent checkpointing schedule of a heterogeneous chain, by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated

import numpy as np
from annotated_types import Ge

from sim.errors import Infeasible
from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.solvers.chain_dp import INF, ChainCosts, solve
from sim.solvers.located import index_of
from sim.solvers.outcome import nothing_fits
from sim.solvers.regions import chain_of, first_backward
from sim.solvers.reversal import reruns_of
from sim.solvers.schedule import Schedule, TraceIndex, backward_slice, schedule_of
from sim.trace.chain import Chain
from sim.trace.tensor import ROLE_CODE
from sim.units import format_bytes

ATTEMPTS = 8
GAIN = 0.001
TIGHT = (1.0, 1.05, 1.25, 1.5, 2.0, 3.0)
"""Rooms to try near the floor, as parts of the least for which the model has a schedule: what lies outside the model
makes the exact peak of the tightest schedule no more the least one."""

Attempt = tuple[int, Schedule, int]
"""A plan for some room: its time, ns, the plan, and what its exact peak exceeds the budget by."""


@dataclass(frozen=True, kw_only=True)
class Rotor(RecomputationPlanner):
    """The least time of one forward and backward over a chain within the budget, by persistent schedules.

    Each time a stage runs forward it saves all that its backward needs, or keeps its input only, or
    keeps nothing. A kept input stays until its backward has used it ("persistent"); among such schedules,
    with sizes rounded up to slots, this one is proven best.
    Source: Herrmann, Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for
        heterogeneous chains", 2019, arXiv:1911.13214.
    Bounds: O(L^3 slots) time, O(L^2 slots) memory for L stages: 0.05 s at 48, 4 s and 0.5 GB at 192.
    Departs: stages come from the trace's chain view. Weights and inputs are subtracted from the budget beforehand.
        The paper has no weight gradients; here each part of the chain is checked together with those of the
        later stages. Memory outside the model (an activation that a later stage's backward
        reads, say) and bytes added by rounding show in the plan's exact peak: the model is given a larger or
        smaller budget, eight times at most, and the fastest plan that fits is taken.
        Sizes are exact, not rounded, where the budget is at most `slots` multiples of their greatest
        common divisor. An op is recomputed only where its results are read, so the plan may take
        less time than the model's. Because rounding depends on the budget, a slightly larger one may cost a
        little time, and within some per cent of the least memory a simpler policy may fit where none of
        the plans tried does: hence not `optimal`.

    slots: parts into which the budget is divided, at least 2.
    Raises PolicyError where the trace is not a chain, Infeasible where no persistent schedule is found.
    """

    recomputes = True
    needs = frozenset({"chain", "backward"})
    solver = "dp"
    fidelity = "equations"
    other_values = by_parameter(slots=20)

    slots: Annotated[int, Ge(2)] = 500

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations of the best schedule; notes: its time by the model, ns."""
        line = chain_of(problem, "rotor")
        index = index_of(problem)
        anchors = first_backward(line, "rotor")
        forward = [stage.forward for stage in line.stages]
        costs = costs_of(problem, index, line)
        plain = schedule_of(index, {})
        if plain.peak() <= problem.budget:
            return Plan(problem.trace, notes={"model_ns": sum(costs.uf) + sum(costs.ub)})

        def attempt(room: int) -> Attempt | None:
            table = solve(costs, room, self.slots) if room > 0 else None
            if table is None or table.time >= INF:
                return None
            schedule = schedule_of(index, reruns_of(index, table.schedule(), forward, anchors), prune=True)
            return table.time, schedule, schedule.peak() - problem.budget

        best = fastest_fitting(attempt, room_of(problem, line), problem.budget // self.slots)
        if best is None:
            best = self._tight(problem, costs, attempt)
        time, schedule, _ = best
        return Plan(problem.trace, self.finished(problem, schedule).actions(), notes={"model_ns": time})

    def _tight(self, problem: Problem, costs: ChainCosts, attempt: Callable[[int], Attempt | None]) -> Attempt:
        """The fastest schedule for little room that fits. Raises Infeasible naming the least peak of them."""
        floor = self._floor(costs)
        tries = [tried for part in TIGHT if (tried := attempt(int(floor * part))) is not None]
        fitting = [tried for tried in tries if tried[2] <= 0]
        if fitting:
            return min(fitting, key=itemgetter(0))
        if not tries:
            raise Infeasible(
                f"rotor finds no persistent schedule of {len(costs)} stages in {format_bytes(problem.budget)}, nor in "
                "what its model of memory says is the least"
            )
        least = problem.budget + min(excess for _, _, excess in tries)
        what = f"rotor finds no persistent schedule of {len(costs)} stages in {format_bytes(problem.budget)}"
        raise nothing_fits(problem, what, least)

    def _floor(self, costs: ChainCosts) -> int:
        """The fewest bytes that some schedule fits in by the model."""
        floor = sum(costs.x) + sum(costs.xbar) + max((*costs.of, *costs.of_saving, *costs.ob)) + max(costs.x)
        for _ in range(2):  # the second time with finer slots
            floor = solve(costs, floor, self.slots).least_bytes() or floor
        return floor


def fastest_fitting(attempt: Callable[[int], Attempt | None], room: int, step: int) -> Attempt | None:
    """The fastest plan that fits among a few tries for rooms near what the model has; None where none of them does.

    The model counts too much, by its rounding, or too little, what lies outside the chain: so the next room
    is that which would make up for the last one's exact peak, or halves what is left between the largest known to
    fit and the smallest known not to, down to `step` bytes, or until a larger room gains less than a thousandth.
    """
    low, high, best = 0, room + room // 4, None
    for _ in range(ATTEMPTS):
        tried = attempt(room)
        excess = tried[2] if tried is not None else 0
        if excess > 0:
            high = room
        else:
            low = room
            before = best
            best = min((one for one in (best, tried) if one is not None), key=itemgetter(0), default=None)
            if best is not None and before is not None and best[0] > before[0] * (1 - GAIN):
                break
        if high - low <= step:
            break
        room = room - excess if low < room - excess < high else (low + high) // 2
    return best


def costs_of(problem: Problem, index: TraceIndex, line: Chain) -> ChainCosts:
    """What the dynamic program needs of a chain."""
    stages = line.stages
    turn = []
    for stage in stages:
        by_own = {t for op in stage.backward for t in index.reads[op]}
        wanted = [t for t in stage.saved if t in by_own or t != stage.output]
        turn.append(sum(problem.cost.op_ns(op) for op in backward_slice(index, stage.forward, wanted)))
    there, grown = gradients_of(index, line)
    return ChainCosts(
        uf=[stage.uf for stage in stages],
        turn=turn,
        ub=[stage.ub for stage in stages],
        x=line.x,
        xbar=[stage.xbar for stage in stages],
        of=[stage.forward_temp for stage in stages],
        of_saving=[stage.saving_temp for stage in stages],
        ob=[stage.backward_temp for stage in stages],
        there=there,
        grown=grown,
    )


def gradients_of(index: TraceIndex, line: Chain) -> tuple[list[int], list[int]]:
    """Bytes of weight gradients just before each stage's backward, and what they add to its peak."""
    bare = TraceIndex(index.trace)
    made = (index.trace.tensor_columns.role == ROLE_CODE["gradient"]) & (index.trace.producer >= 0)
    bare.size = np.where(made, 0, index.size).tolist()
    full, less = (schedule_of(one, {}).peaks() for one in (index, bare))  # entry k is of op k - 1
    there, grown, lying = [], [], 0
    for stage in reversed(line.stages):
        more = 0
        if stage.backward:
            first, end = stage.backward[0], stage.backward[-1] + 1
            lying = full[first] - less[first]
            more = max(full[first + 1 : end + 1]) - max(less[first + 1 : end + 1])
        there.append(lying)
        grown.append(more)
    return there[::-1], grown[::-1]


def room_of(problem: Problem, line: Chain) -> int:
    """Bytes of the budget that weights, optimizer states and the like leave for a chain and its weight gradients."""
    return problem.budget - held_outside(problem, line) + line.gradients


def held_outside(problem: Problem, line: Chain) -> int:
    """Bytes of weights, optimizer states, other inputs than the first stage's, and weight gradients, on the device."""
    index = index_of(problem)
    there = sum(size for size, producer in zip(index.size, index.producer, strict=True) if producer < 0)
    return there - line.x[0] + line.gradients
