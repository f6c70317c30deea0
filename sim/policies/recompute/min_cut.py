"""Min-cut partitioning: save for backward what weighs least, recompute cheap ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sim.declared import OneOf
from sim.plan import Plan, Problem
from sim.policies.base import PlansFrom, by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.sharing import shared
from sim.solvers.cuts import REGIONS, Cuts
from sim.solvers.partition import AGGRESSIVE, Bans
from sim.solvers.schedule import schedule_of


@dataclass(frozen=True, kw_only=True)
class MinCut(RecomputationPlanner):
    """Cut the joint forward-backward graph where the tensors that cross weigh least.

    A tensor weighs its bytes times 1.1 for each op between it and backward (at most 100), twice that where no kernel
    of its own writes it; weights are free. Only ops that are cheap by kind are recomputed. Of these, none is that
    reduces its input to less than a quarter, whose result backward reads in a kernel of its own, that ends a chain
    of a hundred fused ops, or that reads a value last used far before. What backward needs is recomputed just before
    its use.
    Source: PyTorch's `min_cut_rematerialization_partition` (torch/_functorch/partitioners.py, 2.13), whose cuts on
        its own graphs these are, node for node.
    Bounds: what is saved weighs no more than under any other choice of the ops that may be recomputed; each is
        recomputed at most once. Planning takes well under a second for thousands of ops.
    Departs: the compiler cuts its own decomposed graph, where views are nodes. On a trace without them a value lies
        fewer steps from backward (what is kept differs by up to 4 % of the default cut on the graphs tried), and kinds
        stand for ops: of a norm, softmax or loss each result is a node of its own, as if decomposed. What backward
        computes without its gradient (a mask) the compiler may move into forward in order to save it; here it stays
        where it is. What writes in place runs once, where the compiler's graph has no such ops. Ops are not fused, so
        recomputing a cheap one costs its time. The platform's budget plays no part.

    aggressive: ban only random and compute-intensive ops and reductions (`aggressive_recomputation`).
    regions: "graph" for one cut, "layer" for one in each layer, as if each were compiled alone.
    Notes of the plan: `kept_bytes`: bytes of the saved tensors that forward ops produce.
    Raises PolicyError where no backward op reads a forward result, or on several devices.
    """

    recomputes = True
    needs = frozenset({"backward"})
    solver = "max-flow"
    fidelity = "code"
    other_values = by_parameter(aggressive=True, regions="layer")

    aggressive: bool = False
    regions: Annotated[str, OneOf(REGIONS)] = "graph"

    @property
    def plans_from(self) -> PlansFrom:  # type: ignore[override]
        """What is kept after all depends on the budget."""
        return "problem" if self.remove_unnecessary else "machine"

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        cuts = Cuts(problem, "min_cut", regions=self.regions, bans=AGGRESSIVE if self.aggressive else Bans())
        saved = cuts.saved()
        schedule = self.finished(problem, schedule_of(cuts.index, cuts.joint.reruns(saved.reruns), prune=True))
        return Plan(problem.trace, schedule.actions(), notes={"kept_bytes": saved.bytes})
