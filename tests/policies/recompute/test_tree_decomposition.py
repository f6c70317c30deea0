"""Widths against exact treewidth, decompositions and separators against what defines them."""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.policies.recompute.twremat.tree_decomposition import ORDERS, Decomposition, decompose, separators


def graph(count: int, edges) -> list[set[int]]:
    beside: list[set[int]] = [set() for _ in range(count)]
    for a, b in edges:
        beside[a].add(b)
        beside[b].add(a)
    return beside


def treewidth(beside: list[set[int]]) -> int:
    """Exactly, over all elimination orders: what a vertex meets is reached through those eliminated before it.

    Bodlaender, Fomin, Koster, Kratsch, Thilikos, "On exact algorithms for treewidth", ESA 2006, section 3.
    """

    def meets(gone: frozenset[int], v: int) -> int:
        seen, stack = {v}, [v]
        while stack:
            for b in beside[stack.pop()] - seen:
                seen.add(b)
                if b in gone:
                    stack.append(b)
        return len(seen - gone - {v})

    @cache
    def width(gone: frozenset[int]) -> int:
        return min((max(width(gone - {v}), meets(gone - {v}, v)) for v in gone), default=-1)

    return width(frozenset(range(len(beside))))


@st.composite
def graphs(draw: st.DrawFn, most: int = 8) -> list[set[int]]:
    count = draw(st.integers(1, most))
    pairs = list(combinations(range(count), 2))
    return graph(count, draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else ())


def is_valid(beside: list[set[int]], d: Decomposition) -> None:
    for v, others in enumerate(beside):
        holding = {b for b, bag in enumerate(d.bags) if v in bag}
        tops = [b for b in holding if d.parent[b] not in holding]
        assert len(tops) == 1  # the bags that hold a vertex are connected
        assert all(any({v, o} <= bag for bag in d.bags) for o in others)
    roots = [b for b, up in enumerate(d.parent) if up < 0]
    assert len(roots) == min(1, len(beside))
    for b in range(len(beside)):
        seen = set()
        while b >= 0:
            assert b not in seen
            seen.add(b)
            b = d.parent[b]


@pytest.mark.parametrize("order", ORDERS)
@given(beside=graphs())
def test_decompositions_are_valid_and_never_narrower_than_the_treewidth(beside, order):
    d = decompose(beside, order)
    is_valid(beside, d)
    assert d.width >= treewidth(beside)


PETERSEN = [(i, (i + 1) % 5) for i in range(5)] + [(i, i + 5) for i in range(5)]
PETERSEN += [(i + 5, (i + 2) % 5 + 5) for i in range(5)]


def grid(n: int):
    across = [(n * i + j, n * i + j + 1) for i in range(n) for j in range(n - 1)]
    return [*across, *((n * i + j, n * i + n + j) for i in range(n - 1) for j in range(n))]


@pytest.mark.parametrize(("count", "edges", "width"), [
    (1, [], 0),
    (10, [(i, i + 1) for i in range(9)], 1),
    (9, [((i - 1) // 2, i) for i in range(1, 9)], 1),
    (8, [(i, (i + 1) % 8) for i in range(8)], 2),
    (6, list(combinations(range(6), 2)), 5),
    (8, [(a, b) for a in range(3) for b in range(3, 8)], 3),
    (9, grid(3), 3),
    (10, PETERSEN, 4),
])  # fmt: skip
@pytest.mark.parametrize("order", ORDERS)
def test_known_treewidths_are_met(count, edges, width, order):
    # a path, a tree, a cycle, a clique, K(3,5), the 3 x 3 grid, the Petersen graph: textbook values, and exact search
    beside = graph(count, edges)
    assert decompose(beside, order).width == width == treewidth(beside)


@given(seed=st.randoms(use_true_random=False), k=st.integers(1, 4), count=st.integers(5, 40))
def test_width_of_a_chordal_graph_is_exact(seed, k, count):
    cliques = [tuple(range(min(k, count)))]
    edges = list(combinations(cliques[0], 2))
    for v in range(len(cliques[0]), count):
        base = seed.choice(cliques)
        edges += [(v, b) for b in base]
        cliques += [tuple({*base, v} - {b}) for b in base]
    assert decompose(graph(count, edges)).width == k


@given(beside=graphs(30))
def test_parts_between_separators_hold_at_most_half_and_no_edge_joins_them(beside):
    d = decompose(beside)
    tree = separators(d)
    size = [sum(tree.below(node, v) for v in range(len(beside))) for node in range(len(tree.up))]
    assert sorted(v for vertices in tree.vertices for v in vertices) == list(range(len(beside)))
    for node, up in enumerate(tree.up):
        assert len(tree.vertices[node]) <= d.width + 1
        assert up < 0 or size[node] <= size[up] / 2
        assert tree.children(node) == [other for other, above in enumerate(tree.up) if above == node]
    for v, others in enumerate(beside):
        assert all(tree.below(tree.home[v], o) or tree.below(tree.home[o], v) for o in others)
    assert tree.depth <= math.log2(len(beside)) + 1


def test_a_path_is_halved():
    tree = separators(decompose(graph(15, [(i, i + 1) for i in range(14)])))
    assert len(tree.vertices[0]) <= 2
    assert tree.depth <= 4
    assert 6 <= min(tree.vertices[0]) <= 8


def test_nothing_has_a_decomposition_of_nothing():
    assert decompose([]).width == -1
    assert separators(decompose([])).depth == 0
