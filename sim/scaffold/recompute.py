"""Drop a share of the activations, the largest first, and recompute each when backward needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace.chain import backward_ops, saved_tensors


@dataclass(frozen=True, kw_only=True)
class ScaffoldRecompute(Policy):
    """Recompute the largest activations just before their first backward reader, up to a share of the bytes.

    An activation is passed over where its producer reads another one that is recomputed, or reads what would have to
    be kept for it alone.
    Source: none; this is what `tiersim policies --new` starts from.
    Bounds: every op runs at most twice. Time O(n log n) for n tensors.
    Departs: from nothing that was published.

    share: of the bytes that backward reads of forward's results, the most that is recomputed.
    """

    recomputes = True
    needs = frozenset({"backward"})
    fidelity = "reconstruction"
    other_values = by_parameter(share=0.9)

    share: Annotated[float, Ge(0), Le(1)] = 0.5

    def plan(self, problem: Problem) -> Plan:
        """Choose the activations; when each is dropped follows from when it is recomputed."""
        trace = problem.trace
        index = TraceIndex(trace)
        size, backward = index.size, set(backward_ops(trace).tolist())
        saved = [t for t in saved_tensors(trace).tolist() if size[t]]
        available = {*saved, *(t for t, producer in enumerate(index.producer) if producer < 0)}
        remaining = int(self.share * sum(size[t] for t in saved))
        chosen: set[int] = set()
        needed: set[int] = set()
        reruns: dict[int, list[int]] = {}
        for t in sorted(saved, key=lambda t: (-size[t], t)):
            producer = index.producer[t]
            reads = index.reads[producer]
            anchor = next(op for op in trace.readers(t) if op in backward)
            if size[t] > remaining or t in needed or not chosen.isdisjoint(reads) or not available.issuperset(reads):
                continue
            if not index.droppable[t] or not index.can_recompute(producer, anchor):
                continue
            remaining -= size[t]
            chosen.add(t)
            needed.update(reads)
            reruns.setdefault(anchor, []).append(producer)
        return Plan(trace, schedule_of(index, reruns).actions())
