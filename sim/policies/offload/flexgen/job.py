"""An inference trace as FlexGen sees it: batches, the layers that each visits, its cache, what passes between layers.

A *batch* is what can be computed on its own: ops that share nothing but weights. It *visits* a layer for each run of
its ops there. Its *cache* is what a visit makes and later visits of the same layer read; *hidden* is what a visit makes
for the next visit alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sim.errors import PolicyError
from sim.hardware.cost import ns_on
from sim.plan import Problem
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.layers import layer_runs, op_layers
from sim.trace.phases import FORWARD


@dataclass
class Batch:
    """What can be computed on its own.

    visits: the ops of each visit of a layer, in order.
    layers: the layer of each visit.
    step: per visit how often its layer was visited before: 0 in prefill.
    cache, hidden: tensors, with the visits in which they are made and read, in order.
    peak: most bytes of its own that live at once, its cache left out.
    """

    visits: list[list[int]]
    layers: list[int]
    step: list[int]
    cache: dict[int, list[int]] = field(default_factory=dict)
    hidden: dict[int, list[int]] = field(default_factory=dict)
    peak: int = 0


class Job:
    """The batches of a trace. Raises PolicyError for one with several devices or more than a forward phase."""

    def __init__(self, problem: Problem) -> None:
        trace = self.trace = problem.trace
        if (trace.op_columns.phase != FORWARD).any():
            raise PolicyError("flexgen: is for inference; the trace has a backward or update phase")
        if trace.devices > 1:
            raise PolicyError(f"flexgen: runs on one device; the trace has {trace.devices}")
        self.problem = problem
        self.size = trace.tensor_columns.bytes.tolist()
        self.batches = [_batch(trace, ops) for ops in independent(trace)]
        for batch in self.batches:
            batch.peak = self._peak(batch)

    @cached_property
    def weights(self) -> dict[int, list[int]]:
        """Per layer the weights whose first reader is there."""
        layer, found = op_layers(self.trace).tolist(), dict[int, list[int]]()
        columns = self.trace.tensor_columns
        for t in range(len(columns.name)):
            if columns.role[t] in PERSISTENT and self.trace.producer[t] < 0 and self.trace.readers(t):
                found.setdefault(layer[self.trace.readers(t)[0]], []).append(t)
        return found

    def weight_bytes(self, batch: Batch) -> list[int]:
        """Per visit the bytes of the weights that it reads."""
        own = {t for weights in self.weights.values() for t in weights}
        read = ({t for op in ops for t in self.trace.reads(op)} & own for ops in batch.visits)
        return [sum(self.size[t] for t in weights) for weights in read]

    def attention(self, batch: Batch) -> list[int]:
        """The ops of later visits that read the cache, and can run where it is."""
        late = (op for ops, step in zip(batch.visits, batch.step, strict=True) if step for op in ops)
        return [op for op in late if any(t in batch.cache for t in self.trace.reads(op))]

    def op_ns(self, op: int) -> int:
        """The time of an op on the device."""
        return self.problem.cost.op_ns(op)

    def cpu_ns(self, ops: Sequence[int], engine: int) -> int:
        """The time of ops on the host's processor, what they read there."""
        import numpy as np

        return sum(int(ns_on(self.trace, np.array([op]), self.problem.platform, engine)[0]) for op in ops)

    def _peak(self, batch: Batch) -> int:
        trace, own = self.trace, {op for ops in batch.visits for op in ops}
        last: dict[int, int] = {}
        for op in sorted(own):
            last.update(dict.fromkeys((*trace.reads(op), *trace.writes(op)), op))
        weights = {t for found in self.weights.values() for t in found}
        kept, live, peak = set(trace.outputs), 0, 0
        ends: dict[int, list[int]] = {}
        for t, op in last.items():
            if t not in weights and t not in batch.cache and t not in kept:
                ends.setdefault(op, []).append(t)
        live = sum(self.size[t] for ts in ends.values() for t in ts if trace.producer[t] < 0)
        for op in sorted(own):
            made = [t for t in trace.writes(op) if t not in batch.cache and trace.tensor_columns.replaces[t] < 0]
            live += sum(self.size[t] for t in made)
            peak = max(peak, live + int(trace.op_columns.workspace[op]))
            live -= sum(self.size[t] for t in ends.get(op, ()) if trace.replaced_by[t] < 0)
        return peak


def independent(trace: Trace) -> list[list[int]]:
    """Ops in groups that share nothing but weights and states, in order of their first ops."""
    role = trace.tensor_columns.role
    group = list(range(len(trace.ops)))

    def root(op: int) -> int:
        while group[op] != op:
            group[op] = group[group[op]]
            op = group[op]
        return op

    first: dict[int, int] = {}
    for op in range(len(trace.ops)):
        for t in (*trace.reads(op), *trace.writes(op)):
            if role[t] in PERSISTENT and trace.producer[t] < 0 and trace.replaced_by[t] < 0:
                continue
            other = root(first.setdefault(t, op))
            replaced = int(trace.tensor_columns.replaces[t])
            mine = root(op)
            group[max(mine, other)] = min(mine, other)
            if replaced in first:
                other, mine = root(first[replaced]), root(op)
                group[max(mine, other)] = min(mine, other)
    found: dict[int, list[int]] = {}
    for op in range(len(trace.ops)):
        found.setdefault(root(op), []).append(op)
    return list(found.values())


def _batch(trace: Trace, ops: list[int]) -> Batch:
    layer = op_layers(trace).tolist()
    visits = layer_runs(trace, ops)
    layers = [layer[visit[0]] for visit in visits]
    seen: dict[int, int] = {}
    step = []
    for one in layers:
        step.append(seen.get(one, 0))
        seen[one] = step[-1] + 1
    batch = Batch(visits, layers, step)
    where = {op: v for v, visit in enumerate(visits) for op in visit}
    kept = set(trace.outputs)
    for v, visit in enumerate(visits):
        for t in dict.fromkeys(t for op in visit for t in trace.writes(op)):
            later = sorted({where[op] for op in trace.readers(t)} - {v})
            if not later or t in kept or trace.replaced_by[t] >= 0 or trace.tensor_columns.replaces[t] >= 0:
                continue
            if {layers[u] for u in later} == {layers[v]}:
                batch.cache[t] = [v, *later]
            elif later == [v + 1]:
                batch.hidden[t] = [v, v + 1]
    return batch
