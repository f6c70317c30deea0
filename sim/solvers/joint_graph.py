"""Forward and backward as one graph of values, as PyTorch's partitioner sees it: what it may save is a node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sim.solvers.schedule import TraceIndex
from sim.trace.chain import BACKWARD, FORWARD
from sim.trace.graph import PERSISTENT
from sim.trace.op import KINDS
from sim.trace.tensor import ROLE_CODE

CHEAP = ("elementwise", "norm", "softmax", "loss", "copy", "codec", "reduce")
"""Kinds of op that the compiler fuses, and that are worth recomputing: they are bound by memory, not by arithmetic."""

INTENSIVE = ("matmul", "conv", "attention")
"""Kinds of op that are bound by arithmetic, and that alone have FLOPs in PyTorch's count."""

TRAITS = [(kind in CHEAP, kind in INTENSIVE, kind == "copy", kind == "reduce", kind == "loss") for kind in KINDS]
"""Per kind of op whether it is cheap, compute-intensive, a copy, a reduction, a loss."""

OUTSIDE = -1
"""The user of what leaves the graph."""

NEVER_NEEDED = 10**9
"""The distance of what backward does not need."""


@dataclass(slots=True)
class Node:
    """A value: a tensor, or all results of an op of several.

    op: the op that produces it, -1 for a value that enters the graph.
    tensor: the tensor, -1 for several results.
    arguments: the nodes it is computed from.
    allowed: cheap to recompute.
    fusible: may be one kernel with a fusible producer or user.
    intensive: compute-intensive.
    random: draws random numbers.
    view: costs nothing.
    joins: a concatenation, into which any producer fuses.
    part: one of several results of a node.
    copies: what an op makes that only copies.
    fixed: may never be recomputed.
    static: resident anyway (a weight).
    """

    op: int
    tensor: int
    arguments: Sequence[int] = ()
    allowed: bool = True
    fusible: bool = True
    intensive: bool = False
    random: bool = False
    view: bool = False
    joins: bool = False
    part: bool = False
    copies: bool = False
    fixed: bool = False
    static: bool = False

    @property
    def enters(self) -> bool:
        """Whether it comes from outside."""
        return self.op < 0


@dataclass(eq=False)
class JointGraph:
    """Nodes in program order.

    backward: whether a node depends on the gradient that enters.
    leaves: whether it is a result of the forward pass, or of what the backward pass returns.
    size: of each its bytes, of several results all. runtime: what to recompute it costs, in any unit.
    """

    nodes: Sequence[Node]
    backward: Sequence[bool]
    leaves: Sequence[bool]
    size: Sequence[int]
    runtime: Sequence[float]

    def at(self, index: TraceIndex, runtimes: Callable[[int], float] | None) -> JointGraph | None:
        """The graph for another trace of the structure, runtimes as for `joint_graph`; None where sizes decide what a
        node is."""
        copies = {node.op: node for node in self.nodes if node.copies}
        if any(_copy_of(index, op) != (node.view, node.joins) for op, node in copies.items()):
            return None
        new = replace(self, size=_sizes(self.nodes, index), runtime=_runtimes(self.nodes, index, runtimes))
        known = ("users", "required", "inner_users", "order", "distance", "entering")  # no size has a part in them
        vars(new).update((name, vars(self)[name]) for name in known if name in vars(self))
        return new

    @cached_property
    def users(self) -> list[list[int]]:
        """Per node its users, once each, in program order, and `OUTSIDE` last."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            arguments = node.arguments
            for argument in arguments if len(arguments) < 2 else dict.fromkeys(arguments):
                found[argument].append(i)
        for i, leaves in enumerate(self.leaves):
            if leaves:
                found[i].append(OUTSIDE)
        return found

    @cached_property
    def required(self) -> list[bool]:
        """Per node whether the forward pass computes it whatever is saved: its results depend on it, or it enters.

        What may never be recomputed (it overwrites its operand, as the slices of a chunked loss do) is computed there.
        """
        found = [node.enters and not backward for node, backward in zip(self.nodes, self.backward)]
        for i in reversed(range(len(self.nodes))):
            if not self.backward[i] and (self.leaves[i] or found[i] or self.nodes[i].fixed):
                found[i] = True
                for argument in self.nodes[i].arguments:
                    found[argument] = True
        return found

    @cached_property
    def inner_users(self) -> list[list[int]]:
        """Per node its users that are required."""
        required = [*self.required, False]  # the last is `OUTSIDE`
        return [[user for user in users if required[user]] for users in self.users]

    @cached_property
    def order(self) -> dict[int, int]:
        """The place of each required node among them."""
        return {i: place for place, i in enumerate(i for i, needed in enumerate(self.required) if needed)}

    @cached_property
    def distance(self) -> list[int]:
        """Per node how many steps lie between it and what the forward pass does not compute."""
        found = [NEVER_NEEDED if needed else 0 for needed in self.required]
        for i in reversed(range(len(self.nodes))):
            if self.required[i]:
                found[i] = min([found[u] + 1 for u in self.users[i] if u != OUTSIDE] + [NEVER_NEEDED])
        return found

    @cached_property
    def entering(self) -> list[int]:
        """The nodes that enter: weights, inputs, what earlier regions made; those that no op reads, too."""
        return [i for i, node in enumerate(self.nodes) if node.enters and not self.backward[i]]


def joint_graph(
    index: TraceIndex,
    forward: Collection[int],
    backward: Collection[int],
    runtimes: Callable[[int], float] | None = None,
    unread: Collection[int] = (),
) -> JointGraph:
    """The graph of some forward ops of a trace and the backward ops that undo them.

    An op with several results that the compiler takes apart (a norm: its output, its mean and deviation) is a node
    per result; any other is a node that can't be saved, and a node per result behind it. A `copy` that touches no
    bytes is a view. What reads the results of several such ops is joined: a `copy` as large as all that it reads.
    runtimes: what an op costs to recompute; None for its FLOPs where the compiler counts them, else 1. unread:
    weights and inputs that no op reads, but that the compiled module takes.
    """
    return _Builder(index, forward, backward, runtimes, unread).graph


def _sizes(nodes: Sequence[Node], index: TraceIndex) -> list[int]:
    size, writes = index.size, index.writes
    return [size[node.tensor] if node.tensor >= 0 else sum([size[t] for t in writes[node.op]]) for node in nodes]


def _runtimes(nodes: Sequence[Node], index: TraceIndex, runtimes: Callable[[int], float] | None) -> list[float]:
    flops = index.counted_flops
    if runtimes is None:
        return [float(max(flops[node.op], 1)) if node.intensive and not node.part else 1.0 for node in nodes]
    return [1.0 if node.enters or node.part else float(runtimes(node.op)) for node in nodes]


def _copy_of(index: TraceIndex, op: int) -> tuple[bool, bool]:
    """Whether a copy is a view, and whether it joins what it reads."""
    reads, writes = index.trace.reads(op), index.writes[op]  # one that it reads twice counts twice
    view = index.trace.op_columns.bytes[op] == 0 and len(index.reads[op]) == 1
    made = sum(index.size[t] for t in writes)
    return bool(view), len(reads) > 1 and len(writes) == 1 and made == sum(index.size[t] for t in reads)


class _Builder:
    def __init__(
        self,
        index: TraceIndex,
        forward: Collection[int],
        backward: Collection[int],
        runtimes: Callable[[int], float] | None,
        unread: Collection[int],
    ) -> None:
        self.index, self.trace = index, index.trace
        self.nodes: list[Node] = []
        self.is_backward: list[bool] = []
        self.leaves: list[bool] = []
        self.node_of: dict[int, int] = {}
        self.inside = {*forward, *backward}
        self.first, self.last = min(backward, default=len(index.reads)), max(backward, default=len(index.reads))
        ops = sorted(self.inside)
        read = {t for op in ops for t in index.reads[op] if index.producer[t] not in self.inside}
        for t in sorted(read.union(unread)):  # as declared: parameters, buffers, inputs
            self._enter(t, backward)
        for op in ops:
            self._add(op, op in backward)
        sizes = _sizes(self.nodes, index), _runtimes(self.nodes, index, runtimes)
        self.graph = JointGraph(self.nodes, self.is_backward, self.leaves, *sizes)

    def _enter(self, t: int, backward: Collection[int]) -> None:
        """What comes from outside: a gradient that nothing in forward reads belongs to backward."""
        index = self.index
        role, producer = index.role[t], index.producer[t]
        gradient = role == ROLE_CODE["gradient"] or (producer >= 0 and index.phase[producer] == BACKWARD)
        readers = [r for r in self.trace.readers(t) if r in self.inside]
        self.node_of[t] = len(self.nodes)
        entering = bool(gradient and all(r in backward for r in readers))
        self._append(Node(-1, t, static=bool(role in PERSISTENT)), entering, False)

    def _add(self, op: int, backward: bool) -> None:
        index, inside, node_of = self.index, self.inside, self.node_of
        cheap_kind, intensive, copies, reduces, loses = TRAITS[index.kind[op]]
        random, writes = index.random[op], index.writes[op]
        reads = [node_of[t] for t in index.reads[op]]
        view, joins = _copy_of(index, op) if copies else (False, False)
        cheap = cheap_kind and not random and not joins
        until = index.recomputable_until[op]
        fixed = until <= op or until < self.last or op in index.communicating
        traits = cheap, cheap or random, intensive, random, view, joins, False, copies, fixed
        whole = len(writes) > 1 and (not cheap or view or reduces)
        readers_of = [self.trace.readers(t) for t in writes]
        unread = not backward and not any(readers_of)
        if whole:
            self._append(Node(op, -1, reads, *traits), backward, False)
            reads = [len(self.nodes) - 1]
        for t, readers in zip(writes, readers_of):
            leaves = unread or t in index.outputs
            if not leaves and not inside.issuperset(readers):
                leaves = any(r not in inside and index.phase[r] == FORWARD for r in readers)
            if loses and not backward and readers and readers[0] >= self.first:
                leaves = True
            if whole and not readers and not leaves:
                continue
            node_of[t] = len(self.nodes)
            node = Node(op, t, reads, part=True) if whole else Node(op, t, reads, *traits)
            self._append(node, backward, leaves)

    def _append(self, node: Node, backward: bool, leaves: bool) -> None:
        self.nodes.append(node)
        self.is_backward.append(backward)
        self.leaves.append(leaves)
