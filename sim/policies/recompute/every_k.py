"""Uniform checkpointing: keep the input of every k-th layer or chain stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from sim.plan import Plan, Problem
from sim.policies.base import PlansFrom, by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.sharing import shared
from sim.solvers.checkpoints import rerun_regions
from sim.solvers.regions import chain_of, layer_regions, stage_regions
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace.layers import has_layers


@dataclass(frozen=True, kw_only=True)
class EveryK(RecomputationPlanner):
    """Keep the input of every k-th layer; recompute k layers together before their backward.

    A trace whose forward ops have no layers is cut into a chain, and `k` counts its stages.
    Source: Megatron-LM's `--recompute-method uniform --recompute-num-layers k`;
        `torch.utils.checkpoint.checkpoint_sequential` with n/k segments.
    Bounds: on n equal layers n/k inputs and the activations of k layers; at most one more forward pass.
    Departs: the recomputation of a group stops at the last op that backward needs (see `full_recompute`).

    k: layers or stages that are recomputed together, at least 1.
    skip_last: do not recompute the last k, whose backward follows their forward at once, as
        `checkpoint_sequential` does.
    Raises PolicyError where the trace has no layers and is not a chain.
    """

    recomputes = True
    fidelity = "code"
    other_values = by_parameter(k=3, skip_last=True)

    k: Annotated[int, Ge(1)] = 2
    skip_last: bool = False

    @property
    def plans_from(self) -> PlansFrom:  # type: ignore[override]
        """What is kept after all depends on times and on the budget."""
        return "problem" if self.remove_unnecessary else "structure"

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations, k layers at a time."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        trace = problem.trace
        index = TraceIndex(trace)
        if has_layers(trace):
            regions = layer_regions(index, "every_k", self.k)
        else:
            line = chain_of(problem, "every_k")
            regions = stage_regions(line, range(self.k - 1, len(line), self.k))
        schedule = schedule_of(index, rerun_regions(index, regions, skip_last=self.skip_last))
        return Plan(trace, self.finished(problem, schedule).actions())
