"""Memory budgets of compiled training: a knapsack says which expensive results to save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from sim.declared import OneOf
from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.solvers.cuts import REGIONS, RUNTIMES, Cuts, Saved, regions_of
from sim.solvers.knapsack import PICKERS
from sim.solvers.schedule import Schedule, schedule_of

STEPS = 16


@dataclass(frozen=True, kw_only=True)
class SacKnapsack(RecomputationPlanner):
    """Save the results that are most expensive to recompute, within a share of what min-cut would save.

    The whole is the bytes that a region's default cut saves beyond what enters it. If a cut without the bans that
    only serve fusion saves less than the share, it is taken; else a cut that bans only random, compute-intensive and
    reducing ops, if that does. Otherwise each op that this cut bans is an item: its cost is the gain, its bytes
    the weight. Items that the knapsack leaves out may be recomputed after all, and a last cut decides.
    Source: `activation_memory_budget` of PyTorch's compiler (torch/_functorch/partitioners.py and
        _activation_checkpointing/knapsack.py, 2.13), whose choices on its own graphs these are, node for node.
    Bounds: at `memory_budget` 1 the plan is `min_cut`'s; at 0 only what enters a region is saved. The items
        saved gain the most that fits, to a ten-thousandth per item ("dp"), or exactly ("ilp"). What the last cut
        saves may be less or more than the share: the same bytes may be saved at a view, or be needed twice.
    Departs: as `min_cut`. The compiler is given a share; the search for one that fits the platform's budget is added
        here. The peak need not fall with the share: what is recomputed is resident, too.

    memory_budget: 0 to 1; None takes the most sixteenths that bisection finds to fit the budget of the platform.
    regions: "layer" for one budget problem in each layer, as if each were compiled alone (ops outside layers run
        once), "graph" for a single one; None: "layer" where forward ops have layers.
    knapsack: "dp", "greedy" (by cost per byte) or "ilp".
    runtime: the cost of recomputing an op: "flops" (1 for all but products, convolutions and attention), "testing"
        (1 for all), or "platform", its time there in place of PyTorch's measurement of each op.
    Notes of the plan: `memory_budget`, the share taken; `kept_bytes`: bytes of the saved tensors that forward produces.
    Raises PolicyError where the trace has no backward, no layers if these are asked for, or is on several devices.
    """

    recomputes = True
    needs = frozenset({"backward"})
    solver = "dp"
    fidelity = "code"
    rarely = "the cheapest choice that fits seldom recomputes anything on nets this small"
    other_values = by_parameter(memory_budget=0.5, knapsack="greedy", regions="graph", runtime="platform")

    memory_budget: Annotated[float, Ge(0), Le(1)] | None = None
    regions: Annotated[str, OneOf(REGIONS)] | None = None
    knapsack: Annotated[str, OneOf(PICKERS)] = "dp"
    runtime: Annotated[str, OneOf(RUNTIMES)] = "flops"

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        regions = regions_of(problem, self.regions)
        cuts = Cuts(problem, "sac_knapsack", regions=regions, runtimes=self.runtime)

        def at(share: float) -> tuple[Schedule, Saved]:
            saved = cuts.saved(share, self.knapsack)
            return schedule_of(cuts.index, cuts.joint.reruns(saved.reruns), prune=True), saved

        share = self.memory_budget
        if share is None:
            low, high = 0, STEPS + 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if at(middle / STEPS)[0].peak() <= problem.budget else (low, middle)
            share = low / STEPS
        schedule, saved = at(share)
        schedule = self.finished(problem, schedule)
        return Plan(problem.trace, schedule.actions(), notes={"memory_budget": share, "kept_bytes": saved.bytes})
