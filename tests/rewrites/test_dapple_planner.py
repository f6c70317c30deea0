"""DAPPLE's planner: its latency against pipelines of known length, and its choice against every choice there is."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import simulate
from sim.errors import LayoutError, TraceError
from sim.rewrites.dapple_planner import LayerTimes, Machines, Stage, latency, placements, plan
from workloads import transformer

FREE = 10**18
GB = 10**9


def line(count: int) -> Machines:
    return Machines((1,) * count, FREE, FREE)


@pytest.mark.parametrize(("stages", "micro_batches", "expected"), [(4, 8, 33), (4, 2, 15), (8, 32, 117), (1, 5, 15)])
def test_latency_of_equal_stages_is_that_of_1f1b(stages: int, micro_batches: int, expected: int) -> None:
    """(m + p - 1) (F + B) with F = 1, B = 2."""
    layers = [LayerTimes(1, 2, 0)] * stages
    one_each = [Stage(1, tuple(int(k == s) for k in range(stages))) for s in range(stages)]
    assert latency(layers, one_each, line(stages), micro_batches) == expected


def test_the_slowest_stage_is_the_pivot() -> None:
    """F, B = 1, 2 and 3, 6 and 1, 2; m = 4: up to the second stage and back 4 + 8, three more of 9, and a first sum."""
    layers = [LayerTimes(1, 2, 0), LayerTimes(3, 6, 0), LayerTimes(1, 2, 0)]
    stages = [Stage(1, (1, 0, 0)), Stage(1, (0, 1, 0)), Stage(1, (0, 0, 1))]
    assert latency(layers, stages, line(3), 4) == 4 + 3 * 9 + 8


def test_gradients_of_a_late_stage_are_summed_while_earlier_ones_still_compute() -> None:
    """Two stages of two devices; 8 GB of gradients take 8 s at 1 GB/s, of which 4 s are beside backward."""
    second = 10**9
    layers = [LayerTimes(2 * second, 8 * second, 0), LayerTimes(2 * second, 8 * second, 0, 8 * GB)]
    stages = [Stage(1, (2, 0)), Stage(1, (0, 2))]
    plain = 2 * (1 + 4)  # of halves
    assert latency(layers, stages, Machines((2, 2), GB, GB), 1) == (plain - 4 + 8) * second
    assert latency(layers, stages, Machines((2, 2), 8 * GB, GB), 1) == plain * second


def test_what_is_sent_is_a_stage_of_its_own() -> None:
    """1 GB at 1 GB/s, there and back, once per iteration; and it may be the slowest stage."""
    second = 10**9
    layers = [LayerTimes(second // 4, second // 4, GB), LayerTimes(second // 4, second // 4, 0)]
    stages = [Stage(1, (1, 0)), Stage(1, (0, 1))]
    assert latency(layers, stages, Machines((1, 1), GB, GB), 1) == 3 * second
    assert latency(layers, stages, Machines((1, 1), GB, GB), 3) == (second * 5 // 2) + 2 * 2 * second


def test_each_exchange_goes_over_the_innermost_network_that_joins_its_machines() -> None:
    """Four machines in two racks: 0.1 GB per second between racks, 0.5 within one."""
    second, racks = 10**9, Machines((1,) * 4, GB, GB // 10, ((2, GB // 2),))
    layers = [LayerTimes(1, 1, GB // 100)] * 3 + [LayerTimes(1, 1, 0)]
    one_each = [Stage(1, tuple(int(k == s) for k in range(4))) for s in range(4)]
    sends = 2 * second * (Fraction(1, 50) + Fraction(1, 10) + Fraction(1, 50))
    assert latency(layers, one_each, racks, 1) == 8 + sends
    # of 1 GB in two replicas each: half of it each way
    halves = [LayerTimes(2, 2, 0, GB)]
    assert latency(halves, [Stage(1, (1, 1, 0, 0))], racks, 1) == 2 + 2 * second
    assert latency(halves, [Stage(1, (0, 1, 1, 0))], racks, 1) == 2 + 10 * second
    # four replicas: half within a rack, then what is left of it, halved again, between the two
    assert latency([LayerTimes(4, 4, 0, GB)], [Stage(1, (1, 1, 1, 1))], racks, 1) == 2 + 2 * second + 5 * second


def test_placements_of_the_paper() -> None:
    """Two of four devices are in use on the first of three machines."""
    machines = Machines((4, 4, 4), GB, GB)
    assert set(placements((2, 0, 0), 4, machines)) == {(0, 4, 0), (2, 2, 0), (2, 1, 1)}
    assert list(placements((2, 0, 0), 11, machines)) == []


def every_plan(layers: int, machines: Machines, stages: int, replicas: int) -> Iterator[list[Stage]]:
    """All partitions, replicas and placements."""
    total = sum(machines.devices)

    def extend(left: int, used: tuple[int, ...], so_far: list[Stage]) -> Iterator[list[Stage]]:
        complete = len(so_far) == stages if stages and replicas else sum(used) == total
        if left == 0:
            if complete and stages in (0, len(so_far)):
                yield so_far
            return
        for count in (replicas,) if replicas else range(1, total - sum(used) + 1):
            for devices in placements(used, count, machines):
                now = tuple(a + b for a, b in zip(used, devices, strict=True))
                for size in range(1, left + 1):
                    yield from extend(left - size, now, [*so_far, Stage(size, devices)])

    yield from extend(layers, (0,) * len(machines.devices), [])


LAYERS = st.builds(LayerTimes, *[st.integers(1, 9)] * 2, st.integers(0, 4), st.integers(0, 12))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(LAYERS, min_size=1, max_size=5),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (3,), (1, 1, 1), (4,)]),
    st.integers(1, 6),
    st.sampled_from([(0, 0), (2, 0), (2, 1), (0, 1)]),
    st.sampled_from([GB, 3 * GB]),
)
def test_no_other_plan_is_faster(layers: list, devices: tuple, m: int, asked: tuple, inside: int) -> None:
    machines = Machines(devices, inside, GB, ((2, 2 * GB),) if len(devices) > 2 else ())
    stages, replicas = asked
    known = [latency(layers, each, machines, m) for each in every_plan(len(layers), machines, stages, replicas)]
    if not known:
        with pytest.raises(TraceError):
            plan(layers, machines, m, stages=stages, replicas=replicas)
        return
    found = plan(layers, machines, m, stages=stages, replicas=replicas)
    assert latency(layers, found, machines, m) == min(known)


def test_gradients_that_are_costly_to_sum_make_a_pipeline_and_cheap_ones_replicas() -> None:
    """What the paper shows: between slow links large weights are divided, small ones replicated."""
    machines = Machines((1, 1), GB, GB)
    heavy, light = ([LayerTimes(10**9, 2 * 10**9, 10**6, size)] * 2 for size in (8 * GB, 1000))
    assert [sum(stage.devices) for stage in plan(heavy, machines, 8)] == [1, 1]
    assert [stage.devices for stage in plan(light, machines, 8)] == [(1, 1)]


def test_latency_is_a_fraction_of_equal_devices() -> None:
    assert latency([LayerTimes(1, 1, 0)], [Stage(1, (3,))], Machines((3,), FREE, FREE), 1) == Fraction(2, 3)


@pytest.mark.parametrize(("stages", "replicas"), [(3, 1), (2, 2)])
def test_too_many_stages_name_the_nearest(stages: int, replicas: int) -> None:
    with pytest.raises(TraceError, match=r"do not make \d stages; nearest: "):
        plan([LayerTimes(1, 1, 0)] * 2, line(3), 2, stages=stages, replicas=replicas)


# ---- as a layout -------------------------------------------------------------------------------------


def test_stages_of_a_layout_are_faster_than_equal_ones() -> None:
    """A head of 50,257 columns takes as long as several of these layers."""
    config = {"model_type": "gpt2", "n_layer": 8, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 50257}
    wide = transformer(config, batch=4, sequence=128, precision="fp32")
    times = {}
    for layers in ((), "dapple"):
        found = simulate(wide, "mt3000_cluster", parallel={"pp": 4, "micro_batches": 4, "layers": layers})
        times[layers] = found.summary()["makespan_ns"]
    assert times["dapple"] < 0.95 * times[()]


def test_a_schedule_with_several_parts_per_device_is_refused() -> None:
    base = transformer("gpt2", batch=4, sequence=16)
    with pytest.raises(LayoutError, match="layers: 'dapple' plans for one part per device, not for 2"):
        simulate(base, "mt3000_cluster", parallel={"pp": 2, "schedule": "zb_v", "micro_batches": 4, "layers": "dapple"})
