"""Divide-and-conquer checkpointing of any program, not only of chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.solvers.located import index_of
from sim.solvers.reversal import ReversalSchedule, binomial_reversal, bisection_reversal, reruns_of
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of
from sim.trace.chain import backward_ops, forward_ops


@dataclass(frozen=True, kw_only=True)
class Vlad(RecomputationPlanner):
    """Reverse the forward ops half by half: run to the middle, reverse the second half, then the first.

    A step is one forward op, and a snapshot the set of tensors that are live between two ops, so the
    trace may be any graph.
    Source: Siskind, Pearlmutter, "Divide-and-conquer checkpointing for arbitrary programs with no user
        annotation", Optimization Methods and Software 33(4-6), 2018, arXiv:1708.06799 (checkpointVLAD).
    Bounds: bisection holds ceil(log2 l) snapshots and recomputes (l/2) log2 l steps for l a power of two.
    Departs: steps are ops, not interpreter steps. A backward op belongs to the last step whose result it
        reads. An op is recomputed only where its results are read. The stop rules of the paper (snapshots,
        or a time factor) become `base` and `snapshots`.

    base: ops that are reversed as one, with all they save; None takes the fewest halvings that fit the
        budget, and the finest where none does.
    snapshots: split binomially with this many snapshots instead (the order of `revolve`), op by op.
    Raises PolicyError on several devices or without backward.
    """

    recomputes = True
    needs = frozenset({"backward"})
    fidelity = "equations"
    rarely = "it recomputes ops only where a chain of them is long enough"
    other_values = by_parameter(base=6, snapshots=2)

    base: Annotated[int, Ge(1)] | None = None
    snapshots: Annotated[int, Ge(1)] | None = None

    def __post_init__(self) -> None:
        if self.base is not None and self.snapshots is not None:
            raise PolicyError("policy 'vlad': base and snapshots exclude each other")

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        trace = problem.trace
        if trace.devices > 1:
            raise PolicyError(f"policy 'vlad' needs a trace on one device; this one has {trace.devices}")
        index = index_of(problem)
        steps = forward_ops(trace).tolist()
        anchors = self._anchors(index, steps)
        if max(anchors, default=-1) < 0:
            raise PolicyError("policy 'vlad' needs a trace with a backward phase that reads what forward makes")

        def along(reversal: ReversalSchedule) -> Schedule:
            return schedule_of(index, reruns_of(index, reversal, [(op,) for op in steps], anchors), prune=True)

        if self.snapshots is not None:
            schedule = along(binomial_reversal(len(steps), self.snapshots))
            return Plan(trace, self.finished(problem, schedule).actions())
        base = self.base or len(steps)
        schedule = along(bisection_reversal(len(steps), base))
        while self.base is None and base > 1 and schedule.peak() > problem.budget:
            base = -(-base // 2)
            schedule = along(bisection_reversal(len(steps), base))
        return Plan(trace, self.finished(problem, schedule).actions(), notes={"base": base})

    def _anchors(self, index: TraceIndex, steps: list[int]) -> list[int]:
        """Per forward op the backward op before which its results must be there; these fall with the steps."""
        place = {op: i for i, op in enumerate(steps)}
        anchors = [-1] * len(steps)
        for op in reversed(backward_ops(index.trace).tolist()):
            made = [place[index.producer[t]] for t in index.reads[op] if index.producer[t] in place]
            if made:
                anchors[max(made)] = op
        latest = -1
        for i in reversed(range(len(steps))):
            if anchors[i] >= 0:
                anchors[i] = latest = max(anchors[i], latest)
        return anchors
