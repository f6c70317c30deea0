"""List scheduling and software pipelining against figures worked out by hand, and all orders of small blocks."""

from __future__ import annotations

import random
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.experiment import simulate
from sim.rewrites.list_scheduling import (
    Instruction,
    Weights,
    dependences,
    issues_in_order,
    list_scheduled,
    schedule,
    unrolled,
)
from sim.rewrites.software_pipelining import Dependence, least_interval, modulo_schedule
from sim.rewrites.values import departures
from sim.trace import TraceBuilder
from tests.machines import machine
from tests.strategies import traces
from workloads import w1

PIPELINE = 4
"""Stages: the last result is there so many cycles after its issue."""

BLOCK = [
    Instruction("i1", ("t1", "t2"), ("t0",)),
    Instruction("i2", ("t0", "t1"), ("t1",)),
    Instruction("i3", ("t2", "t4"), ("t3",)),
    Instruction("i4", ("t1", "t2"), ("t0",)),
    Instruction("i5", ("t3", "t4"), ("t5",)),
    Instruction("i6", ("t2", "t7"), ("t6",)),
]
"""The block of a lecture on target-dependent code optimisation (2025)."""


def cycles(issue):
    return max(issue) + PIPELINE


def test_the_lectures_block_takes_ten_cycles_instead_of_twelve():
    edges = dependences(BLOCK)
    assert set(edges) == {(0, 1), (0, 3), (1, 3), (2, 4)}
    assert cycles(issues_in_order(range(6), edges)) == 12
    assert cycles(issues_in_order([2, 4, 0, 1, 3, 5], edges)) == 15  # a topological order without weights
    issue = schedule(6, edges)
    assert sorted(range(6), key=issue.__getitem__) == [0, 2, 5, 1, 4, 3]
    assert sorted(issue) == [0, 1, 2, 3, 4, 6]  # a stall at 5
    assert cycles(issue) == 10
    assert min(cycles(each) for each in legal(edges, 6)) == 10  # no order is faster


def legal(edges, count, width=1):
    """The issues of all orders that keep the dependences."""
    for order in permutations(range(count)):
        place = {each: i for i, each in enumerate(order)}
        if all(place[a] < place[b] for a, b in edges):
            yield issues_in_order(order, edges, width)


def test_latency_is_a_parameter():
    edges = dependences(BLOCK, Weights(read_after_write=1, write_after_write=1))
    assert cycles(schedule(6, edges)) == 5 + PIPELINE  # one each cycle: nothing to gain
    assert dependences(BLOCK[:2], Weights(write_after_read=0)) == {(0, 1): 3}


REGISTERS = st.lists(st.sampled_from("abcd"), max_size=2, unique=True).map(tuple)
BLOCKS = st.lists(
    st.builds(Instruction, st.just("i"), REGISTERS, REGISTERS, latency=st.none() | st.integers(1, 4)),
    min_size=1, max_size=5,
)  # fmt: skip


@given(BLOCKS, st.integers(1, 2))
def test_a_schedule_keeps_every_dependence_and_is_near_the_best_order(block, width):
    edges = dependences(block)
    issue = schedule(len(block), edges, width={"": width})
    assert all(issue[b] - issue[a] >= weight for (a, b), weight in edges.items())
    assert all(issue.count(cycle) <= width for cycle in issue)
    best = min(max(each) for each in legal(edges, len(block), width))
    assert best <= max(issue) <= 2 * best + 1  # Graham: at most twice the best
    for order in (sorted(range(len(block)), key=issue.__getitem__),):
        assert [block[i].name for i in order]


@given(BLOCKS)
def test_dependences_are_those_of_registers(block):
    """Run the block in any order that keeps the dependences: every instruction reads the same values."""

    def reads(order):
        held, seen = {}, {}
        for i in order:
            seen[i] = tuple(held.get(register) for register in block[i].reads)
            held.update(dict.fromkeys(block[i].writes, i))
        return seen, held

    edges = dependences(block)
    place = range(len(block))
    for order in permutations(place):
        if all(order.index(a) < order.index(b) for a, b in edges):
            assert reads(order) == reads(place)


def test_an_order_that_breaks_a_dependence_is_refused():
    with pytest.raises(TraceError, match="the order puts 1 before 0, which it depends on"):
        issues_in_order([1, 0, 2, 3, 4, 5], dependences(BLOCK))


def test_an_unrolled_loop_overlaps_its_iterations():
    loop = [Instruction("load", ("p",), ("x",)), Instruction("add", ("x", "k"), ("y",)), Instruction("store", ("y",))]
    once = max(schedule(3, dependences(loop))) + 1
    assert once == 7  # two latencies of 3
    block = [
        Instruction(each.name, tuple(f"{r}{n}" for r in each.reads), tuple(f"{w}{n}" for w in each.writes))
        for n in range(3)
        for each in loop
    ]
    assert max(schedule(9, dependences(block))) + 1 == 9  # three in the time of one and two stores
    assert [each.name for each in unrolled(loop, 2)] == ["load.0", "add.0", "store.0", "load.1", "add.1", "store.1"]
    # without registers of their own iterations wait for each other
    assert max(schedule(9, dependences(unrolled(loop, 3)))) + 1 > 9


# ---- traces ------------------------------------------------------------------------------------


def test_two_engines_work_at_once_where_order_lets_them():
    b = TraceBuilder()
    start = b.tensor("start", 8, "input")
    names = []
    for i in range(2):  # in program order the device waits for the host twice
        host, out = b.tensor(f"h{i}", 8), b.tensor(f"d{i}", 8)
        b.op(f"host{i}", reads=[start], writes=[host], duration=10, engine="cpu")
        b.op(f"device{i}", reads=[host], writes=[out], duration=10)
        names += [f"host{i}", f"device{i}"]
    b.op("own", reads=[start], writes=[b.tensor("o", 8)], duration=10)
    trace = b.build()
    platform = machine(host=1 << 30, cpu="hbm")
    better = list_scheduled(trace, platform)
    assert sorted(op.name for op in better.ops) == sorted([*names, "own"])
    assert simulate(trace, platform).log.end == 50
    assert simulate(better, platform).log.end == 30


@settings(max_examples=40)
@given(traces())
def test_every_trace_is_still_the_same_computation(trace):
    better = list_scheduled(trace, machine(host=1 << 40, cpu="host"))
    assert departures(better, trace) == ()
    assert len(better.ops) == len(trace.ops)


def test_a_chain_on_one_engine_keeps_its_order():
    trace = w1(4)
    better = list_scheduled(trace, machine())
    assert simulate(better, machine()).log.end == simulate(trace, machine()).log.end


# ---- software pipelining -------------------------------------------------------------------------


def test_a_hundred_iterations_of_four_cycles_take_103():
    pipelined = modulo_schedule([Dependence(0, 1, 1), Dependence(1, 2, 1), Dependence(2, 3, 1)], [1] * 4, list("abcd"))
    assert (pipelined.interval, pipelined.length) == (1, 4)
    assert pipelined.cycles(100) == 103
    assert 100 * pipelined.length == 400
    assert pipelined.stages == 4
    assert pipelined.copies(made=1, last_read=4) == 3


def test_units_and_recurrences_bound_the_interval():
    assert least_interval([], ["mem"] * 5, {"mem": 2}) == 3
    assert least_interval([Dependence(0, 1, 3), Dependence(1, 0, 2, distance=1)], ["a", "b"]) == 5
    assert least_interval([Dependence(0, 1, 3), Dependence(1, 0, 2, distance=2)], ["a", "b"]) == 3
    with pytest.raises(TraceError, match="form a cycle"):
        least_interval([Dependence(0, 1, 1), Dependence(1, 0, 1)], ["a", "b"])


@st.composite
def loops(draw):
    count = draw(st.integers(1, 5))
    units = [draw(st.sampled_from("ab")) for _ in range(count)]
    latency = [draw(st.integers(1, 3)) for _ in range(count)]
    arcs = []
    for _ in range(draw(st.integers(0, 6))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        arcs.append(Dependence(a, b, latency[a], 0 if a < b else draw(st.integers(1, 2))))
    return arcs, latency, units


@given(loops())
def test_a_pipeline_keeps_its_dependences_in_every_iteration_and_no_smaller_interval_is_possible(loop):
    arcs, latency, units = loop
    found = modulo_schedule(arcs, latency, units)
    for d in arcs:
        assert found.issue[d.after] + found.interval * d.distance >= found.issue[d.before] + d.cycles
    for unit in "ab":  # six iterations laid out: no unit is used twice in a cycle
        own = [at for at, its in zip(found.issue, units, strict=True) if its == unit]
        used = [at + n * found.interval for n in range(6) for at in own]
        assert len(used) == len(set(used))
    last = max(at + 5 * found.interval + took for at, took in zip(found.issue, latency, strict=True))
    assert found.cycles(6) == last
    assert found.interval >= least_interval(arcs, units)
    assert _smallest(arcs, units) <= found.interval <= max(sum(latency), 1) * 2


def test_the_smallest_interval_is_found_nearly_always():
    draw, found = random.Random(1), []
    for _ in range(150):
        count = draw.randint(1, 5)
        units, latency = [draw.choice("ab") for _ in range(count)], [draw.randint(1, 3) for _ in range(count)]
        pairs = [(draw.randrange(count), draw.randrange(count)) for _ in range(draw.randint(0, 6))]
        arcs = [Dependence(a, b, latency[a], 0 if a < b else draw.randint(1, 2)) for a, b in pairs]
        found.append(modulo_schedule(arcs, latency, units).interval == _smallest(arcs, units))
    assert sum(found) >= 0.9 * len(found)


def _smallest(arcs, units):
    """The smallest interval for which the instructions have places: all residues are tried."""
    interval = 1
    while True:
        for rest in product(range(interval), repeat=len(units)):
            if len(set(zip(units, rest, strict=True))) == len(units) and _solvable(arcs, rest, interval):
                return interval
        interval += 1


def _solvable(arcs, rest, interval):
    """Whether instructions with these residues can be put into iterations: longest paths in whole intervals."""
    stage = [0] * len(rest)
    for _ in range(len(rest) + 1):
        changed = False
        for d in arcs:
            earliest = (stage[d.before] - d.distance) * interval + rest[d.before] + d.cycles
            least = -((rest[d.after] - earliest) // interval)
            if least > stage[d.after]:
                stage[d.after], changed = least, True
        if not changed:
            return True
    return False
