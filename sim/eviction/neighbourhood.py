"""The cost of recomputing a tensor while its neighbours are evicted too.

A `Price` keeps in `ScoreTable.weight` a lower bound of each candidate's cost and computes the exact one when
asked. Evictions only raise costs, so bounds stay valid; a recomputed tensor lowers the costs of few others, which are
found without a search. So a choice evaluates exactly only the few candidates that could win.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import ClassVar, Protocol

from sim.eviction.evictable import Kin, ScoreTable
from sim.native import mypyc_attr


class Price(Protocol):
    """Costs in ns of recomputing candidates."""

    def exact(self, tensor: int, limit: float) -> tuple[int, int] | None:
        """Cost, and time of the last access to what it counts; None if the cost is above `limit`.

        Either way `ScoreTable.weight` of that tensor is a lower bound afterwards.
        """

    def went(self, tensor: int) -> None:
        """Its last copy was dropped."""

    def came(self, tensor: int) -> None:
        """It was recomputed; all inputs of its producer are resident."""

    def vanished(self, tensor: int) -> None:
        """An evicted tensor does not belong to the graph any more."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Neighbourhood:
    """e*: the evicted tensors reached through evicted parents only, and through evicted children only.

    Exact costs come from a search that stops once they pass a limit. `holders` remembers, per evicted
    tensor, whose bound counts it.
    """

    def __init__(self, kin: Kin, table: ScoreTable, evicted: list[bool], *, children: bool = True) -> None:
        self._kin = kin
        self._table = table
        self._evicted = evicted
        self._down = children
        self._holders: dict[int, dict[int, int]] = {}
        self._stamp = [0] * len(kin.cost)

    def exact(self, tensor: int, limit: float) -> tuple[int, int] | None:
        """See `Price`."""
        evicted, holders, cost = self._evicted, self._holders, self._kin.cost
        parents, children = self._kin.parents, self._kin.children
        self._stamp[tensor] = stamp = self._stamp[tensor] + 1
        total, latest = cost[tensor], 0.0
        access = self._table.accesses
        for down in (False, True) if self._down else (False,):
            seen: set[int] = set()
            stack = [tensor]
            while stack:
                here = stack.pop()
                for other in children[here] if down else parents[here]:
                    if evicted[other] and other not in seen:
                        seen.add(other)
                        stack.append(other)
                        total += cost[other]
                        latest = max(latest, access[other])
                        if other in holders:
                            holders[other][tensor] = stamp
                        else:
                            holders[other] = {tensor: stamp}
                if total > limit:
                    self._table.weights[tensor] = total
                    return None
        self._table.weights[tensor] = total
        return total, int(latest)

    def went(self, tensor: int) -> None:
        """See `Price`."""
        self._stamp[tensor] += 1

    def came(self, tensor: int) -> None:
        """See `Price`. What its producer reads is there, so that only that can have reached it from above.

        Through a view it may have other parents: then whoever reached it may have reached others over it.
        """
        if tensor in self._kin.joined:
            for holder in self._holders.get(tensor, ()):
                self._reset(holder)
        self.vanished(tensor)
        self._reset(tensor)
        for parent in self._kin.parents[tensor]:
            self._reset(parent)

    def vanished(self, tensor: int) -> None:
        """See `Price`."""
        cost = self._kin.cost[tensor]
        for holder, stamp in self._holders.pop(tensor, {}).items():
            if self._stamp[holder] == stamp:
                self._table.weights[holder] -= cost

    def _reset(self, tensor: int) -> None:
        self._stamp[tensor] += 1
        self._table.weights[tensor] = self._kin.cost[tensor]


@mypyc_attr(allow_interpreted_subclasses=True)
class CostClasses:
    """Union-find components of adjacent evicted tensors; a candidate counts each component it touches.

    A recomputed tensor takes its cost out of its component; what remains stays one component, so that costs
    are a little too high. A bound leaves a 64th of a component's cost as slack; each component has a heap
    of how much may leave it before whose bound is void.
    """

    SLACK: ClassVar[int] = 6

    def __init__(self, kin: Kin, table: ScoreTable, evicted: list[bool]) -> None:
        self._kin = kin
        self._table = table
        self._evicted = evicted
        self._node: dict[int, int] = {}
        self._parent: list[int] = []
        self._value: list[int] = []
        self._left: list[int] = []  # cost that has left the class
        self._watch: list[list[tuple[int, int, int]] | None] = []  # None where no bound counts the class
        self._full = 1024  # entries of one heap before what is void in it is thrown out
        self._stamp = [0] * len(kin.cost)

    def cost(self, tensor: int) -> int:
        """Its own cost and that of every class that it touches."""
        roots = {self._root(self._node[n]) for n in self._neighbours(tensor)}
        return self._kin.cost[tensor] + sum(self._value[root] for root in roots)

    def exact(self, tensor: int, limit: float) -> tuple[int, int] | None:
        """See `Price`."""
        nodes, parent, values = self._node, self._parent, self._value
        self._stamp[tensor] = stamp = self._stamp[tensor] + 1
        total = bound = self._kin.cost[tensor]
        seen: list[int] = []
        for other in self._neighbours(tensor):
            root = nodes[other]
            if parent[root] != root:
                root = self._root(root)
            if root not in seen:
                seen.append(root)
                value = values[root]
                slack = max(value, 0) >> self.SLACK
                total += value
                bound += value - slack
                self._watch_for(root, slack, tensor, stamp)
        self._table.weights[tensor] = bound
        return total, 0

    def went(self, tensor: int) -> None:
        """See `Price`."""
        self._stamp[tensor] += 1
        nodes, parent, evicted, node = self._node, self._parent, self._evicted, -1
        for other in self._adjacent(tensor):
            if evicted[other] and other != tensor:
                root = nodes[other]
                if parent[root] != root:
                    root = self._root(root)
                if node < 0:
                    node = root
                elif root != node:
                    node = self._merge(node, root)
        if node < 0:  # it is a class of its own
            node = len(parent)
            parent.append(node)
            self._value.append(0)
            self._left.append(0)
            self._watch.append(None)
        nodes[tensor] = node
        self._value[node] += self._kin.cost[tensor]

    def came(self, tensor: int) -> None:
        """See `Price`."""
        self.vanished(tensor)
        self._reset(tensor)

    def vanished(self, tensor: int) -> None:
        """See `Price`. What touched a class through this tensor alone does not any more."""
        root = self._root(self._node.pop(tensor))
        cost = self._kin.cost[tensor]
        self._value[root] -= cost
        self._left[root] += cost
        watch = self._watch[root]
        while watch and watch[0][0] < self._left[root]:
            _, holder, stamp = heappop(watch)
            if self._stamp[holder] == stamp:
                self._reset(holder)
        for other in self._kin.around[tensor]:
            self._reset(other)

    def _reset(self, tensor: int) -> None:
        self._stamp[tensor] += 1
        self._table.weights[tensor] = self._kin.cost[tensor]

    def _adjacent(self, tensor: int) -> tuple[int, ...]:
        """The tensors whose classes one joins or counts, where they are evicted."""
        return self._kin.around[tensor]

    def _neighbours(self, tensor: int) -> list[int]:
        evicted = self._evicted
        return [n for n in self._adjacent(tensor) if evicted[n]]

    def _root(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def _watch_for(self, root: int, slack: int, tensor: int, stamp: int) -> None:
        """Void a tensor's bound once more than the slack has left a class that it counts."""
        watch = self._watch[root]
        if watch is None:
            watch = self._watch[root] = []
        heappush(watch, (self._left[root] + slack, tensor, stamp))
        if len(watch) > self._full:
            self._thin(watch)

    def _thin(self, watch: list[tuple[int, int, int]]) -> None:
        watch[:] = [row for row in watch if self._stamp[row[1]] == row[2]]
        heapify(watch)
        self._full = max(self._full, 2 * len(watch))

    def _merge(self, a: int, b: int) -> int:
        """Join two classes, given by their roots; the root of both."""
        watch, other = self._watch[a], self._watch[b]
        if len(watch or ()) < len(other or ()):
            a, b, watch, other = b, a, other, watch
        self._parent[b] = a
        self._value[a] += self._value[b]
        if watch is not None and other is not None:
            shift = self._left[a] - self._left[b]
            for trigger, tensor, stamp in other:
                if self._stamp[tensor] == stamp:
                    heappush(watch, (trigger + shift, tensor, stamp))
        self._watch[b] = None
        return a
