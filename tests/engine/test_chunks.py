"""Chunks of collectives in a row: the engine's one event for many, against the reference's event for each."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from sim.engine.event_path import groups
from sim.engine.replay import replay
from sim.hardware.platform import Link, Platform
from sim.plan import Plan
from sim.trace import TraceBuilder
from tests.engine.differential import difference
from tests.engine.reference import computing
from tests.machines import GB, machine

CHUNK = 8
MANY = 100


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(groups, "COLLECTIVE_CHUNK", CHUNK)
    monkeypatch.setattr(computing, "CHUNK", CHUNK)


def mesh(draw: Random) -> Platform:
    """Three devices, a link from each to each of the others."""
    fixed, engines = draw.choice((0, 0, 3)), draw.choice((1, 1, 2))
    rates = [draw.choice((GB, GB, GB // 2, GB // 3)) for _ in range(6)]
    links = [
        Link(f"{a}to{b}", f"hbm@{a}", f"hbm@{b}", rate, fixed, engines)
        for (a, b), rate in zip(permutations(range(3), 2), rates)
    ]
    return replace(machine(devices=3, rate=None), links=tuple(links))


def collectives(draw: Random) -> Plan:
    """Ops of a few nanoseconds among collectives of several chunks, of any priority, in flight at the same time."""
    b = TraceBuilder()
    for number in range(draw.randint(6, 16)):
        members = draw.sample(range(3), draw.choice((1, 2, 2, 3)))
        if len(members) == 1:
            duration = draw.choice((0, 0, 1, 5, CHUNK, CHUNK, 2 * CHUNK, 19))
            b.op(f"f{number}", duration=duration, device=members[0], writes=[b.tensor(f"y{number}", 1)])
            continue
        size, priority = draw.choice((0, 5, CHUNK, 3 * CHUNK, 50, 11 * CHUNK)), draw.choice((0, 0, -1, 1, 2))
        for device in sorted(members):
            b.op(f"c{number}.{device}", "collective", writes=[b.tensor(f"z{number}.{device}", 1)], bytes=size,
                 device=device, group=f"c{number}", priority=priority)  # fmt: skip
    return Plan(b.build(outputs=(), carry=()))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.usefixtures("small_chunks")
def test_who_comes_between_chunks_comes_when_a_chunk_ends(part):
    found = {}
    for seed in range(part * MANY, (part + 1) * MANY):
        draw = Random(seed)
        if where := difference(collectives(draw), mesh(draw)):
            found[seed] = where
    assert found == {}


@pytest.mark.usefixtures("small_chunks")
def test_an_urgent_collective_waits_for_the_present_chunk_alone():
    b = TraceBuilder()
    for name, start, size, priority in (("long", 0, 10 * CHUNK, 1), ("urgent", 3, CHUNK, 0)):
        for d in range(2):
            b.op(f"{name}.before.{d}", duration=start, device=d, writes=[b.tensor(f"{name}.x{d}", 1)])
            b.op(
                f"{name}.{d}",
                "collective",
                writes=[b.tensor(f"{name}{d}", 1)],
                bytes=size,
                device=d,
                group=name,
                priority=priority,
            )
    log = replay(Plan(b.build(outputs=(), carry=())), machine(devices=2))
    ends = {
        log.trace.op_columns.name[op]: end for op, end in zip(log.interval("op").tolist(), log.interval("end").tolist())
    }
    assert (ends["urgent.1"], ends["long.1"]) == (2 * CHUNK, 11 * CHUNK)
