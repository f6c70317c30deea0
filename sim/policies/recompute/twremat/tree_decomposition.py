"""Tree decompositions of graphs, and the trees of balanced separators that they give.

A tree decomposition covers a graph by bags of vertices that form a tree: each edge lies in a bag, and the bags
that hold a vertex are connected. Its width is the size of the largest bag less one; the treewidth of a graph is
the least width of all its decompositions. A bag, taken away, leaves parts of the graph that no edge joins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations

ORDERS = ("min_fill", "min_degree")

Graph = Sequence[Collection[int]]
"""Per vertex, 0 … n - 1, its neighbours."""


@dataclass(frozen=True)
class Decomposition:
    """One bag a vertex: the vertex, and those of its neighbours that are eliminated after it.

    bags: per vertex. parent: per vertex the one whose bag is next in the tree, -1 for the root.
    """

    bags: Sequence[frozenset[int]]
    parent: Sequence[int]

    @property
    def width(self) -> int:
        """Size of the largest bag less one: no less than the graph's treewidth."""
        return max(map(len, self.bags), default=0) - 1


def decompose(graph: Graph, order: str = "min_fill") -> Decomposition:
    """A tree decomposition by greedy elimination: take a vertex away, and join all its neighbours.

    order: the next vertex is the one whose neighbours lack the fewest edges among them ("min_fill"), or that has the
    fewest neighbours ("min_degree"); the first of equals. Exact on forests and on chordal graphs (min_fill); else
    the width may be too large. A graph in several parts gives one tree all the same.
    """
    left = [set(beside) - {v} for v, beside in enumerate(graph)]
    price: Callable[[int], int] = (lambda v: _lacking(left, v)) if order == "min_fill" else (lambda v: len(left[v]))
    prices = [price(v) for v in range(len(left))]
    queue = [(p, v) for v, p in enumerate(prices)]
    heapify(queue)
    bags = [frozenset[int]()] * len(left)
    when = [-1] * len(left)
    taken = 0
    while queue:
        now, v = heappop(queue)
        if when[v] >= 0 or now != prices[v]:
            continue
        beside = left[v]
        bags[v], when[v] = frozenset((v, *beside)), taken
        taken += 1
        touched = set(beside)
        for a in beside:
            left[a].discard(v)
        for a, b in combinations(sorted(beside), 2):
            if b not in left[a]:
                left[a].add(b)
                left[b].add(a)
                touched |= left[a] & left[b]
        for a in touched if order == "min_fill" else beside:
            new = price(a)
            if new != prices[a]:
                prices[a] = new
                heappush(queue, (new, a))
    return Decomposition(bags, _parents(bags, when))


def _lacking(left: Sequence[set[int]], v: int) -> int:
    """How many pairs of neighbours have no edge."""
    beside = left[v]
    have = sum(len(left[a] & beside) for a in beside)
    return (len(beside) * (len(beside) - 1) - have) // 2


def _parents(bags: Sequence[frozenset[int]], when: Sequence[int]) -> list[int]:
    """Per bag the vertex of it that is eliminated next; roots hang on the last root."""
    parent = [min((a for a in bag if a != v), key=lambda a: when[a], default=-1) for v, bag in enumerate(bags)]
    roots = sorted((v for v, up in enumerate(parent) if up < 0), key=lambda v: when[v])
    for v in roots[:-1]:
        parent[v] = roots[-1]
    return parent


@dataclass(frozen=True)
class Separators:
    """A tree of separators, its nodes numbered so that those below node i are i + 1 … end[i] - 1.

    vertices: per node those of its separator that stand in none above. up: the node above, -1 for the root.
    home: per vertex the node that it stands in.
    Vertices of two nodes are joined by an edge only if one node is below the other.
    """

    vertices: Sequence[Sequence[int]]
    up: Sequence[int]
    end: Sequence[int]
    home: Sequence[int]

    def below(self, node: int, vertex: int) -> bool:
        """Whether a vertex stands in that node or below it."""
        return node <= self.home[vertex] < self.end[node]

    def children(self, node: int) -> list[int]:
        """The nodes just below a node."""
        found, at = [], node + 1
        while at < self.end[node]:
            found.append(at)
            at = self.end[at]
        return found

    @property
    def depth(self) -> int:
        """The most nodes from the root down: at most log2 n + 1 for n vertices."""
        deep = [0] * len(self.up)
        for i, up in enumerate(self.up):
            deep[i] = 1 + (deep[up] if up >= 0 else 0)
        return max(deep, default=0)


def separators(decomposition: Decomposition) -> Separators:
    """Take a bag that leaves parts of at most half the vertices each, and so on in each part.

    Of the bags that leave the smallest largest part the one with the fewest vertices is taken.
    """
    bags, count = decomposition.bags, len(decomposition.bags)
    beside: list[list[int]] = [[] for _ in bags]
    for v, up in enumerate(decomposition.parent):
        if up >= 0:
            beside[v].append(up)
            beside[up].append(v)
    vertices: list[list[int]] = []
    above: list[int] = []
    home = [-1] * count
    cut = [False] * count  # bags that have been taken away
    stack = [(v, -1) for v, up in enumerate(decomposition.parent) if up < 0]
    while stack:
        start, up = stack.pop()
        part = _reached(beside, cut, start)
        if all(home[v] >= 0 for v, _ in part):
            continue
        middle = _middle(part, bags, home)
        node = len(vertices)
        vertices.append(sorted(v for v in bags[middle] if home[v] < 0))
        above.append(up)
        for v in vertices[node]:
            home[v] = node
        cut[middle] = True
        stack += [(b, node) for b in beside[middle] if not cut[b]]
    end = list(range(1, len(vertices) + 1))
    for node in reversed(range(1, len(vertices))):
        end[above[node]] = max(end[above[node]], end[node])
    return Separators(vertices, above, end, home)


def _reached(beside: Sequence[Sequence[int]], cut: Sequence[bool], start: int) -> list[tuple[int, int]]:
    """The bags of a part with the bag that each was reached from, in an order in which that comes first."""
    found = [(start, -1)]
    for v, before in found:
        found += [(b, v) for b in beside[v] if b != before and not cut[b]]
    return found


def _middle(part: Sequence[tuple[int, int]], bags: Sequence[frozenset[int]], home: Sequence[int]) -> int:
    """The bag without which the largest remaining part of a tree has the fewest vertices."""
    weight = {v: int(home[v] < 0) for v, _ in part}
    largest = dict.fromkeys(weight, 0)
    for v, before in reversed(part):
        if before >= 0:
            weight[before] += weight[v]
            largest[before] = max(largest[before], weight[v])
    total = weight[part[0][0]]
    return min(weight, key=lambda v: (max(largest[v], total - weight[v]), sum(home[a] < 0 for a in bags[v]), v))
