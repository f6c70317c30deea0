"""Rotor: the best persistent checkpointing schedule of a heterogeneous chain, by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim.errors import Infeasible, PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.solvers.chain_dp import INF, ChainCosts, ChainTable, solve
from sim.solvers.regions import chain_of, first_backward
from sim.solvers.reversal import again_of
from sim.solvers.runs import Ledger, Runs, backward_slice, runs
from sim.trace.chain import Chain
from sim.units import format_bytes

ATTEMPTS = 8
TIGHT = (1.0, 1.05, 1.25, 1.5, 2.0, 3.0)
"""Rooms to try near the floor, as parts of the least for which the model has a schedule: what lies outside the model
makes the exact peak of the tightest schedule no more the least one."""

Attempt = tuple[ChainTable, Runs, int]
"""The model's answer for some room, the plan that it gives, and what its exact peak exceeds the budget by."""


@dataclass(frozen=True, kw_only=True)
class Rotor(Policy):
    """The least time of one forward and backward over a chain within the budget.

    Each time a stage runs forward it saves all that its backward needs, or keeps its input only, or
    keeps nothing. A kept input stays until its backward has used it ("persistent"); among such schedules,
    with sizes rounded up to slots, this one is proven best.
    Source: Herrmann, Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for
        heterogeneous chains", 2019, arXiv:1911.13214.
    Bounds: O(L^3 slots) time, O(L^2 slots) memory for L stages: 0.05 s at 48, 4 s and 0.5 GB at 192.
    Departs: stages come from the trace's chain view. Weights and inputs are taken off the budget beforehand.
        Weight gradients, and what else the chain does not count (an activation that a later stage's
        backward reads, say), show in the plan's exact peak only: where a plan would pass the budget, the
        room that the model is given is bisected. Sizes are exact, not rounded, where the budget is at
        most `slots` multiples of their greatest common divisor. An op that runs again runs only where
        its results are read, so the plan may take less time than the model's. Because rounding depends
        on the budget, a little more of it may cost a little time: hence not `optimal`.

    slots: parts into which the budget is divided, at least 2.
    Raises PolicyError where the trace is no chain, Infeasible where no persistent schedule is found.
    """

    recomputes = True
    needs = frozenset({"chain", "backward"})
    solver = "dp"

    slots: int = 500

    def __post_init__(self) -> None:
        if self.slots < 2:
            raise PolicyError(f"policy 'rotor': slots is {self.slots}; it must be at least 2")

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations of the best schedule; notes: its time by the model, ns."""
        line = chain_of(problem, "rotor")
        ledger = Ledger(problem.trace)
        anchors = first_backward(line, "rotor")
        forward = [stage.forward for stage in line.stages]
        costs = costs_of(problem, ledger, line)
        plain = runs(ledger, {})
        if plain.peak() <= problem.budget:
            return Plan(problem.trace, notes={"model_ns": sum(costs.uf) + sum(costs.ub)})
        outside = held_outside(problem, line)

        def attempt(room: int) -> Attempt | None:
            """The best schedule for that much room by the model, and what its exact peak exceeds the budget by."""
            table = solve(costs, room, self.slots) if room > 0 else None
            if table is None or table.time >= INF:
                return None
            found = runs(ledger, again_of(ledger, table.schedule(), forward, anchors), prune=True)
            return table, found, found.peak() - problem.budget

        # weight gradients come while activations go: hope that none adds to the peak, then make sure
        room = high = problem.budget - outside + line.gradients
        low, best = 0, None
        for _ in range(ATTEMPTS):
            tried = attempt(room)
            excess = tried[2] if tried is not None else 0
            if tried is not None and excess <= 0:
                low = room
                best = tried if best is None else min(best, tried, key=lambda one: one[0].time)
                if high - low < max(1, problem.budget // self.slots):
                    break
                room = (low + high) // 2
            else:
                high = room
                room = room - excess if excess and room - excess > low else (low + high) // 2
        if best is None:
            best = self._tight(problem, costs, attempt)
        table, found, _ = best
        return Plan(problem.trace, found.actions(), notes={"model_ns": table.time})

    def _tight(self, problem: Problem, costs: ChainCosts, attempt: Callable[[int], Attempt | None]) -> Attempt:
        """The fastest schedule for little room that fits. Raises Infeasible naming the least peak of them."""
        floor = self._floor(costs)
        tries = [tried for part in TIGHT if (tried := attempt(int(floor * part))) is not None]
        fitting = [tried for tried in tries if tried[2] <= 0]
        if fitting:
            return min(fitting, key=lambda one: one[0].time)
        least = problem.budget + min(excess for _, _, excess in tries)
        raise Infeasible(
            f"rotor finds no persistent schedule of {len(costs)} stages in {format_bytes(problem.budget)}; "
            f"{format_bytes(least, digits=None)} would do",
            floor_bytes=least,
        )

    def _floor(self, costs: ChainCosts) -> int:
        """The fewest bytes that some schedule fits in by the model."""
        floor = sum(costs.x) + sum(costs.xbar) + max((*costs.of, *costs.of_saving, *costs.ob)) + max(costs.x)
        for _ in range(2):  # the second time with finer slots
            floor = solve(costs, floor, self.slots).least_bytes() or floor
        return floor


def costs_of(problem: Problem, ledger: Ledger, line: Chain) -> ChainCosts:
    """What the dynamic program needs of a chain."""
    stages = line.stages
    turn = []
    for stage in stages:
        by_own = {t for op in stage.backward for t in ledger.reads[op]}
        wanted = [t for t in stage.saved if t in by_own or t != stage.output]
        turn.append(sum(problem.cost.op_ns(op) for op in backward_slice(ledger, stage.forward, wanted)))
    return ChainCosts(
        uf=[stage.uf for stage in stages],
        turn=turn,
        ub=[stage.ub for stage in stages],
        x=line.x,
        xbar=[stage.xbar for stage in stages],
        of=[stage.forward_temp for stage in stages],
        of_saving=[stage.saving_temp for stage in stages],
        ob=[stage.backward_temp for stage in stages],
    )


def held_outside(problem: Problem, line: Chain) -> int:
    """Bytes of weights, optimizer states, other inputs than the first stage's, and weight gradients."""
    size = problem.trace.tensor_columns.bytes
    return int(size[problem.trace.producer < 0].sum()) - line.x[0] + line.gradients
