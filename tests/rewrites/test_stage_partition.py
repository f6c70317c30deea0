"""PipeDream's partition against every partition there is, and against cases worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.rewrites.stage_partition import LayerCost, cost_of, partition

SECOND = 10**9


def compositions(total: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered sum of `least` to `most` numbers of at least 1."""
    if total == 0 and least <= 0:
        yield ()
    if most > 0:
        for first in range(1, total + 1):
            for rest in compositions(total - first, least - 1, most - 1):
                yield (first, *rest)


layer_costs = st.builds(LayerCost, st.integers(0, 20), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=60)
@given(st.lists(layer_costs, min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 4))
def test_no_partition_is_faster(layers: list[LayerCost], machines: int, rate: int) -> None:
    """Over all sizes of stages and all numbers of machines per stage."""
    found = partition(layers, machines, rate * SECOND)
    every = [
        cost_of(layers, sizes, each, rate * SECOND)
        for stages in range(1, min(len(layers), machines) + 1)
        for sizes in compositions(len(layers), stages, stages)
        for each in compositions(machines, stages, stages)
    ]
    assert found.slowest == min(every)
    assert cost_of(layers, found.layers, found.machines, rate * SECOND) == found.slowest
    assert sum(found.machines) == machines


@settings(max_examples=40)
@given(st.lists(layer_costs, min_size=1, max_size=8), st.integers(1, 4))
def test_no_straight_pipeline_is_faster(layers: list[LayerCost], stages: int) -> None:
    if stages > len(layers):
        with pytest.raises(TraceError, match=f"{len(layers)} layers do not make {stages} stages; nearest"):
            partition(layers, stages, SECOND, replicated=False)
        return
    found = partition(layers, stages, SECOND, stages, replicated=False)
    ones = (1,) * stages
    every = [cost_of(layers, sizes, ones, SECOND) for sizes in compositions(len(layers), stages, stages)]
    assert found.slowest == min(every)
    assert found.machines == ones


def test_a_heavy_layer_gets_machines_of_its_own() -> None:
    """VGG's picture: convolutions replicated, the fully connected end, whose weights are costly to sum, alone."""
    layers = [LayerCost(6, 1, 1), LayerCost(6, 1, 1), LayerCost(4, 1, 1000)]
    found = partition(layers, 4, 100 * SECOND)
    assert (found.layers, found.machines, found.slowest) == ((2, 1), (3, 1), 4)


def test_what_is_sent_binds_where_links_are_slow() -> None:
    layers = [LayerCost(2, 9), LayerCost(2, 1), LayerCost(2, 9), LayerCost(2, 9)]
    found = partition(layers, 2, SECOND, 2, replicated=False)
    assert (found.layers, found.slowest) == ((2, 2), Fraction(4))
