"""Collectives: one op that stands for all ranks, and an op for each of them, take the same time, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest

from sim.engine.replay import replay
from sim.errors import TraceError
from sim.hardware.nodes import placed
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.layout import lay_out
from sim.plan import Plan
from sim.rewrites.ranks import all_ranks
from sim.trace import Trace, TraceBuilder
from sim.trace.op import Ring
from tests.rewrites.test_replicas import line, step

FIXED, RATE = 1000, 10**9
SENT = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1, "neighbour": 1}
"""How often each rank sends (p - 1) / p of the tensor, or all of it to its neighbour."""
AXIS = {"all-to-all": "expert", "neighbour": "neighbour"}


def ring_of(collective: str, ranks: int) -> Ring:
    return Ring(AXIS.get(collective, "data"), ranks, SENT[collective])


def by_hand(collective: str, ranks: int, sent: int) -> int:
    """A ring waits at each of its steps; what all send at once, or each to the next, waits once."""
    steps = 1 if collective in AXIS else SENT[collective] * (ranks - 1)
    return steps * FIXED + ceil(Fraction(sent * 10**9, RATE))


def exchange(devices: int, sent: int, ring: Ring | None) -> Trace:
    b = TraceBuilder({})
    for device in range(devices):
        x, y = b.tensor(f"x{device}", 8, "gradient"), b.tensor(f"y{device}", 8, "gradient")
        b.op(f"c{device}", "collective", reads=[x], writes=[y], device=device, group="c", bytes=sent, ring=ring)
    return b.build(outputs=[], carry=[])


def node(ranks: int) -> Platform:
    """Devices of which each reaches each."""
    platform = line(ranks)
    return replace(platform, links=tuple(replace(link, fixed=FIXED, rate=RATE) for link in platform.links))


@pytest.mark.parametrize("sent", [0, 1, 12_345_678])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("collective", SENT)
def test_an_op_for_all_ranks_and_one_for_each_take_the_same_time(collective: str, ranks: int, sent: int) -> None:
    ring, machine = ring_of(collective, ranks), node(ranks)
    experts = ranks if ring.axis == "expert" else 1
    context = ranks if ring.axis == "neighbour" else 1
    one = placed(machine, 1, 1 if context > 1 else ranks, experts=experts, context=context, neighbours=context > 1)
    expected = by_hand(collective, ranks, sent)
    assert replay(Plan(exchange(ranks, sent, ring)), machine).end == expected
    assert replay(Plan(exchange(1, sent, ring)), one).end == expected
    if SENT[collective] == 1 and ring.axis == "data":  # what nothing is said of goes round once
        assert replay(Plan(exchange(ranks, sent, None)), machine).end == expected


@pytest.mark.parametrize("slow", range(3))
def test_the_slowest_hop_sets_the_pace_of_each_step(slow: int) -> None:
    machine = node(3)
    links = tuple(
        replace(link, fixed=5000) if link.name == f"l{slow}.{(slow + 1) % 3}" else link for link in machine.links
    )
    assert replay(Plan(exchange(3, 0, Ring("data", 3, 2))), replace(machine, links=links)).end == 4 * 5000


def test_a_shipped_node_makes_a_ring_as_fast_as_its_devices_written_out() -> None:
    """Eight A100s: 14 steps of an all-reduce, and 14/8 of the bytes."""
    machine, size = load_profile("a100_80_sxm", overrides={"devices": "8"}), 800_000
    ring = Ring("data", 8, 2)
    one = replay(Plan(exchange(1, 2 * 7 * size // 8, ring)), placed(machine, 1, 8)).end
    assert one == replay(Plan(exchange(8, 2 * 7 * size // 8, ring)), machine).end


LAYOUTS = [
    {"dp": 2, "zero": 1},
    {"dp": 4, "zero": 3},
    {"dp": 2, "pp": 2, "micro_batches": 2, "zero": 2},
    {"tp": 4},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "zero": 1},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_on_links_with_latency_take_as_long_with_all_their_ranks(layout: dict) -> None:
    """Each link takes its time once per step, the one that stands for a network (p - 1) of them per pass."""
    trace, _ = lay_out(step(), "a100_80_sxm", layout)
    tensor, ranks = layout.get("tp", 1), layout.get("dp", 1)
    stages, per_stage = trace.devices, tensor * ranks
    own = line(stages)
    links = [replace(link, fixed=FIXED) for link in own.links]
    for i in range(stages):
        home = f"hbm@{i}"
        for axis, count in (("tensor", tensor), ("data", ranks)):
            one = replace(line(2).links[0], name=f"{axis}@{i}", source=home, target=home, fixed=(count - 1) * FIXED)
            links += [one] if count > 1 else []
    alone = replay(Plan(trace), replace(own, links=tuple(links))).end
    among = line(stages * per_stage)
    among = replace(among, links=tuple(replace(link, fixed=FIXED) for link in among.links))
    assert replay(Plan(all_ranks(trace)), among).end == alone


@pytest.mark.parametrize(
    "rings", [(Ring("data", 3, 2),) * 2, (Ring("data", 2, 2), Ring("data", 2, 1)), (Ring("data", 2, 2), None)]
)
def test_members_say_the_same_and_are_all_there(rings: tuple[Ring | None, ...]) -> None:
    b = TraceBuilder({})
    for device, ring in enumerate(rings):
        x = b.tensor(f"x{device}", 8, "gradient")
        b.op(f"c{device}", "collective", writes=[x], device=device, group="c", bytes=8, ring=ring)
    with pytest.raises(TraceError, match=r"group 'c': its 2 ops need one and the same ring, of 2 ranks; 'c0' has"):
        replay(Plan(b.build(outputs=[], carry=[])), node(2))
