"""What a trace saves from forward to backward, by the rules of a compiler's partitioner, and what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from sim.errors import PolicyError
from sim.plan import Problem
from sim.solvers.joint_graph import JointGraph, joint_graph
from sim.solvers.knapsack import PICKERS
from sim.solvers.located import index_of
from sim.solvers.partition import Bans, Partitioner
from sim.solvers.regions import Region, layer_regions
from sim.solvers.schedule import TraceIndex
from sim.trace.chain import BACKWARD, FORWARD
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.layers import has_layers, op_layers
from sim.trace.tensor import ROLE_CODE

REGIONS = ("graph", "layer")
MOST_SIZES = 2
"""For how many sizes that decide differently what a node is graphs are kept with a structure."""
RUNTIMES = ("flops", "testing", "platform")
TAKEN = tuple(ROLE_CODE[role] for role in ("weight", "input"))


class Joint:
    """The forward results on which backward depends, and which of them it reads first where.

    backward: ids of the backward ops; first: the first of them. wanted: forward results that they read.
    """

    def __init__(self, index: TraceIndex) -> None:
        c = index.trace.op_columns
        self.index = index
        self.backward: list[int] = np.flatnonzero(c.phase == BACKWARD).tolist()
        self.forward: list[int] = np.flatnonzero(c.phase == FORWARD).tolist()
        self.first = self.backward[0] if self.backward else len(index.reads)
        self.wanted = {
            t
            for op in self.backward
            for t in index.reads[op]
            if index.producer[t] >= 0 and c.phase[index.producer[t]] == FORWARD
        }

    def reruns(self, chosen: Collection[int]) -> dict[int, list[int]]:
        """Recompute each chosen op once, just before the first backward op that needs it, for `schedule_of`."""
        index, ran, left = self.index, set[int](), set(chosen)
        found: dict[int, list[int]] = {}
        for op in self.backward:
            stack = [index.producer[t] for t in index.reads[op]]
            needed: set[int] = set()
            while stack:
                producer = stack.pop()
                if producer in left and producer not in ran and producer not in needed:
                    needed.add(producer)
                    stack += [index.producer[t] for t in index.reads[producer]]
            if needed:
                found[op] = sorted(needed)
                ran |= needed
        return found

    def from_saved(self, saved: Collection[int]) -> Saved:
        """What backward reads of the saved tensors, and the ops that produce the rest of what it needs."""
        kept, reruns = set[int](), set[int]()
        stack = list(self.wanted)
        while stack:
            t = stack.pop()
            producer = self.index.producer[t]
            if producer < 0 or t in saved:
                kept.add(t)
            elif producer not in reruns:
                reruns.add(producer)
                stack += self.index.reads[producer]
        return Saved(kept, reruns, sum(self.index.size[t] for t in kept if self.index.producer[t] >= 0))


@dataclass(frozen=True)
class Saved:
    """What backward finds saved.

    kept: the tensors that stay from forward to backward.
    reruns: the ops that are recomputed in backward.
    bytes: of the kept tensors that an op produces.
    """

    kept: Collection[int]
    reruns: Collection[int]
    bytes: int


class Cuts:
    """What the regions of a trace save: the whole graph as one, or each layer for itself, as if compiled alone.

    What lies outside all layers saves what its backward reads, and runs once. runtimes: see `runtimes_of`.
    Raises PolicyError where there is no backward, on several devices, and for layers where there are none.
    """

    def __init__(
        self, problem: Problem, policy: str, *, regions: str, bans: Bans | None = None, runtimes: str = "flops"
    ) -> None:
        if problem.trace.devices > 1:
            raise PolicyError(f"policy {policy!r} needs a trace on one device; this one has {problem.trace.devices}")
        self.index = index = index_of(problem)
        self.joint = joint = Joint(index)
        if not joint.wanted:
            raise PolicyError(f"policy {policy!r} needs a trace with a backward phase that reads what forward makes")
        self.graphs, self.eager = graphs_of(index, joint, policy, regions, runtimes_of(problem, runtimes))
        self.partitioners = [Partitioner(graph, bans) for graph in self.graphs]

    def saved(self, budget: float = 1.0, knapsack: str = "dp") -> Saved:
        """What stays and what is recomputed for a memory budget of 0 to 1."""
        kept = set(self.eager)
        for graph, partitioner in zip(self.graphs, self.partitioners, strict=True):
            kept.update(graph.nodes[i].tensor for i in partitioner.saved(budget, PICKERS[knapsack]))
        return self.joint.from_saved(kept)


def graphs_of(
    index: TraceIndex, joint: Joint, policy: str, regions: str, runtimes: Callable[[int], float] | None = None
) -> tuple[list[JointGraph], set[int]]:
    """The graphs that are compiled, and what the ops outside them save: what their backward reads, or they write.

    regions: as for `Cuts`; runtimes: as for `joint_graph`. Raises PolicyError for layers where there are none.
    """
    structure = index.trace.structure
    if not structure.is_shared:
        return _graphs_of(index, joint, policy, regions, runtimes)
    known: list[tuple[list[JointGraph], set[int]]] = kept(structure, "joint_graphs", regions, list)
    for graphs, eager in known:
        found = [at for graph in graphs if (at := graph.at(index, runtimes)) is not None]
        if len(found) == len(graphs):
            return found, set(eager)
    made = _graphs_of(index, joint, policy, regions, runtimes)
    if len(known) < MOST_SIZES:
        known.append(made)
    return made[0], set(made[1])


def _graphs_of(
    index: TraceIndex, joint: Joint, policy: str, regions: str, runtimes: Callable[[int], float] | None
) -> tuple[list[JointGraph], set[int]]:
    trace = index.trace
    parts, unread = [Region(tuple(joint.forward), joint.backward)], [unread_of(trace)]
    if regions == "layer":
        parts, layer, by_layer = layer_regions(index, policy), op_layers(trace), dict[int, list[int]]()
        for t in unread[0]:
            by_layer.setdefault(int(trace.tensor_columns.layer[t]), []).append(t)
        unread = [by_layer.get(int(layer[one.forward[0]]), []) for one in parts]
    graphs = [
        joint_graph(index, set(one.forward), set(one.backward), runtimes, idle)
        for one, idle in zip(parts, unread, strict=True)
    ]
    inside = {op for one in parts for op in one.forward}
    undoing = {op for one in parts for op in one.backward}
    eager = {t for op in joint.forward if op not in inside for t in index.writes[op]}
    return graphs, eager | {t for op in joint.backward if op not in undoing for t in index.reads[op]}


def unread_of(trace: Trace) -> list[int]:
    """The weights and inputs that no op reads: a module takes them all the same, and a compiler counts them among what
    enters."""
    idle = (trace.producer < 0) & (trace.last_use < 0) & np.isin(trace.tensor_columns.role, TAKEN)
    return np.flatnonzero(idle).tolist()


def runtimes_of(problem: Problem, mode: str) -> Callable[[int], float] | None:
    """What an op costs to recompute: its FLOPs ("flops", None), 1 ("testing"), or its ns on this platform."""
    if mode == "flops":
        return None
    return (lambda op: 1.0) if mode == "testing" else problem.cost.op_ns


def regions_of(problem: Problem, regions: str | None) -> str:
    """The regions asked for; None for layers where forward ops have one, else the whole graph."""
    return regions or ("layer" if has_layers(problem.trace) else "graph")
