"""PipeDream's partition against every partition there is, and against cases worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.rewrites import stage_partition
from sim.rewrites.schedules import device_of
from sim.rewrites.stage_partition import LayerCost, cost_of, partition, shared

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


# ---- devices that hold several parts -----------------------------------------------------------------


def slowest(layers: list[LayerCost], sizes: tuple[int, ...], device: list[int], rate: int) -> Fraction:
    """What the slowest device takes, or its links, in ns."""
    computes, sends = dict.fromkeys(device, Fraction(0)), dict.fromkeys(device, Fraction(0))
    first = 0
    for q, size in enumerate(sizes):
        own = layers[first : first + size]
        first += size
        computes[device[q]] += sum(each.time for each in own)
        if q + 1 < len(sizes) and device[q + 1] != device[q]:
            sends[device[q]] += Fraction(2 * own[-1].sent * SECOND, rate)
    return max(*computes.values(), *sends.values())


held = st.sampled_from([("interleaved", 2, 2), ("zb_v", 2, 2), ("dualpipe_v", 3, 2), ("interleaved", 3, 2)])


def devices(schedule: str, stages: int, chunks: int) -> list[int]:
    return [device_of(part, stages, schedule) for part in range(stages * chunks)]


@settings(max_examples=60, deadline=None)
@given(st.lists(layer_costs, min_size=4, max_size=9), held, st.integers(1, 4))
def test_no_sizes_make_devices_with_several_parts_faster(layers, how, rate) -> None:
    device = devices(*how)
    if len(device) > len(layers):
        with pytest.raises(TraceError, match=f"{len(layers)} layers do not make {len(device)} stages; nearest"):
            shared(layers, device, rate * SECOND)
        return
    found = shared(layers, device, rate * SECOND)
    every = compositions(len(layers), len(device), len(device))
    assert slowest(layers, found, device, rate * SECOND) == min(
        slowest(layers, sizes, device, rate * SECOND) for sizes in every
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(6, 11), st.integers(1, 20), st.integers(0, 60), st.integers(0, 60), held)
def test_layers_go_from_part_to_part_until_no_device_is_faster(n, time, embedding, head, how) -> None:
    """Where there are too many partitions to try all: the best of layers as equal as a transformer's."""
    times = [time + embedding, *[time] * (n - 2), time + head]
    layers, device = [LayerCost(each, 0) for each in times], devices(*how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_partition, "ALL", 0)
        found = shared(layers, device, SECOND)
    every = compositions(n, len(device), len(device))
    assert slowest(layers, found, device, SECOND) == min(slowest(layers, each, device, SECOND) for each in every)


@settings(max_examples=60, deadline=None)
@given(st.lists(layer_costs, min_size=6, max_size=12), held, st.integers(1, 4))
def test_it_is_never_slower_than_where_each_part_is_balanced_by_itself(layers, how, rate) -> None:
    device = devices(*how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_partition, "ALL", 0)
        found = shared(layers, device, rate * SECOND)
    alone = partition(layers, len(device), rate * SECOND, len(device), replicated=False).layers
    assert sum(found) == len(layers)
    assert min(found) >= 1
    assert slowest(layers, found, device, rate * SECOND) <= slowest(layers, alone, device, rate * SECOND)


def test_the_device_with_embedding_and_head_gets_fewer_layers() -> None:
    """In a V device 0 holds the first and the last part: of 16 layers of 10 and a head of 40 more, 2 in place of 4."""
    layers = [LayerCost(10, 0)] * 15 + [LayerCost(50, 0)]
    device = devices("zb_v", 4, 2)
    found = shared(layers, device, SECOND)
    assert slowest(layers, found, device, SECOND) == 60
    assert found[0] + found[-1] == 2
    alone = partition(layers, 8, SECOND, 8, replicated=False).layers
    assert slowest(layers, alone, device, SECOND) > 60
