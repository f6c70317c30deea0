"""Memory budgets of compiled training: a knapsack says which dear results to keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.errors import PolicyError, near
from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.solvers.cuts import Joint, joint_of
from sim.solvers.regions import layer_regions
from sim.solvers.runs import Runs, runs

SOLVERS = ("dp", "greedy")
QUANTA = 1000
STEPS = 16


@dataclass(frozen=True, kw_only=True)
class SacKnapsack(Policy):
    """Keep the results that take longest to make again, within a share of what min-cut would keep.

    Between its layers the trace is cut as by `min_cut`. Inside, each op that is too dear to run again is
    an item: its time is the gain, its results' bytes the weight. Those that the knapsack has no room for
    may run again after all, and a second cut decides what does.
    Source: `activation_memory_budget` of PyTorch's compiler (torch/_functorch/partitioners.py, 2.4 on).
    Bounds: at `memory_budget` 1 no dear op runs again; at 0 only what enters layers is kept. The items kept
        gain the most that fits ("dp": to a thousandth of the room an item).
    Departs: a layer takes the place of a compiled region. Times are those of the platform, where PyTorch
        counts FLOPs. The peak need not fall with the share: what is run again lies there, too.

    memory_budget: share of the items' bytes, 0 to 1; None takes the most sixteenths that bisection finds
    to fit the budget of the platform. knapsack: "dp" or "greedy" (by time per byte).
    Raises PolicyError where the trace has no layers or no backward, or is on several devices.
    """

    recomputes = True
    needs = frozenset({"layers", "backward"})
    solver = "dp"
    fidelity = "reconstruction"

    memory_budget: float | None = None
    knapsack: str = "dp"

    def __post_init__(self) -> None:
        if self.memory_budget is not None and not 0 <= self.memory_budget <= 1:
            raise PolicyError(f"policy 'sac_knapsack': memory_budget is {self.memory_budget}; it lies in 0 … 1")
        if self.knapsack not in SOLVERS:
            raise PolicyError(f"policy 'sac_knapsack': knapsack is {self.knapsack!r}{near(self.knapsack, SOLVERS)}")

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations; notes: the share, and the bytes kept from forward to backward."""
        joint = joint_of(problem, "sac_knapsack")
        borders = self._borders(joint)
        dear = joint.dear() | borders
        ledger = joint.ledger
        items = sorted(op for op in dear - borders if ledger.until[op] > joint.backward[-1])
        weights = [sum(ledger.size[t] for t in ledger.writes[op]) for op in items]
        gains = [problem.cost.op_ns(op) for op in items]

        def at(share: float) -> tuple[Runs, int]:
            room = int(share * sum(weights))
            chosen = (best_items if self.knapsack == "dp" else densest_items)(weights, gains, room)
            again = joint.cut(dear - {op for op, keep in zip(items, chosen, strict=True) if not keep})
            return runs(ledger, joint.again(again), prune=True), joint.kept_bytes(again)

        share = self.memory_budget
        if share is None:
            low, high = 0, STEPS + 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if at(middle / STEPS)[0].peak() <= problem.budget else (low, middle)
            share = low / STEPS
        found, kept_bytes = at(share)
        return Plan(problem.trace, found.actions(), notes={"memory_budget": share, "kept_bytes": kept_bytes})

    def _borders(self, joint: Joint) -> set[int]:
        """Ops that no cut runs again: those outside layers, and those whose results leave their layer."""
        inside: dict[int, int] = {}
        for i, region in enumerate(layer_regions(joint.ledger, "sac_knapsack")):
            inside.update(dict.fromkeys(region.forward, i))
        found = set()
        for op in joint.forward:
            readers = [r for t in joint.ledger.writes[op] for r in joint.ledger.trace.readers(t) if r < joint.first]
            if op not in inside or any(inside.get(r) != inside[op] for r in readers):
                found.add(op)
        return found


def best_items(weights: list[int], gains: list[int], room: int) -> list[bool]:
    """Which items gain most within a room: dynamic programming over thousandths of it, weights rounded up."""
    if room >= sum(weights):
        return [True] * len(weights)
    scaled = [-(-weight * QUANTA // room) if room else QUANTA + 1 for weight in weights]
    scaled = [0 if weight == 0 else units for weight, units in zip(weights, scaled, strict=True)]
    best = np.zeros(QUANTA + 1, np.int64)
    taken = np.zeros((len(weights), QUANTA + 1), np.bool_)
    for i, (units, gain) in enumerate(zip(scaled, gains, strict=True)):
        if units > QUANTA:
            continue
        better = np.zeros(QUANTA + 1, np.bool_)
        better[units:] = best[: QUANTA + 1 - units] + gain > best[units:]
        best[units:] = np.maximum(best[units:], best[: QUANTA + 1 - units] + gain)
        taken[i] = better
    chosen, left = [False] * len(weights), QUANTA
    for i in reversed(range(len(weights))):
        if taken[i, left]:
            chosen[i], left = True, left - scaled[i]
    return chosen


def densest_items(weights: list[int], gains: list[int], room: int) -> list[bool]:
    """Items by falling gain per byte, as long as they fit."""
    order = sorted(range(len(weights)), key=lambda i: (-gains[i] / max(weights[i], 1), i))
    chosen = [False] * len(weights)
    for i in order:
        if weights[i] <= room:
            chosen[i], room = True, room - weights[i]
    return chosen
