"""One instant: what happens at a nanosecond is settled once, and something unrelated at it changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.analysis import peak_bytes, traffic
from sim.engine.replay import replay
from sim.hardware.platform import Engine, Platform, Tier
from sim.plan import Drop, Move, Plan, Wait
from sim.trace import TraceBuilder
from tests.engine.random_plans import planned
from tests.engine.test_timeline import GB, chain, machine, spans
from tests.engine.unrelated_device import beside, instants, outcome, without_unrelated

some = settings(
    max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def there_and_back() -> Plan:
    """A weight leaves after one op and is called back before the next, at the same nanosecond."""
    b = TraceBuilder()
    x, w = b.tensor("x", 10, "input"), b.tensor("w", 50, "input")
    y, z = b.tensor("y", 10), b.tensor("z", 10)
    b.op("a", reads=[x, w], writes=[y], duration=100)
    b.op("b", reads=[y, w], writes=[z], duration=100)
    return Plan(b.build(), [Move(w, "host", after="a"), Move(w, "hbm", before="b")])


def two_devices() -> Plan:
    """Both in step: sends, releases and demands for space fall on the same nanoseconds."""
    b = TraceBuilder()
    ends = []
    for d in range(2):
        x, y = b.tensor(f"x{d}", 40, "input"), b.tensor(f"y{d}", 40)
        b.op(f"a{d}", reads=[x], writes=[y], device=d, duration=100)
        ends.append(y)
    there = b.tensor("there", 40)
    b.op("send", "send", reads=[ends[0]], group="p2p", device=0)
    b.op("recv", "recv", writes=[there], group="p2p", device=1)
    z = [b.tensor(f"z{d}", 40) for d in range(2)]
    b.op("b0", reads=[ends[0]], writes=[z[0]], device=0, duration=100)
    b.op("b1", reads=[there, ends[1]], writes=[z[1]], device=1, duration=60)
    moves = [Move("x0", "host", after="a0"), Move("x1", "host", after="a1"), Wait("x1", before="b1")]
    return Plan(b.build(), [*moves, Move("x0", "hbm@0", after="b0"), Drop("y0", after="b0")])


def crowded() -> Plan:
    """Space is freed and asked for at the same nanosecond, by an op, a copy that waits outside and a demand."""
    b = TraceBuilder()
    w, v = b.tensor("w", 60, "input"), b.tensor("v", 60, "input")
    last = b.tensor("x", 10, "input")
    for i in range(4):
        out = b.tensor(f"y{i}", 40)
        b.op(f"op{i}", reads=[last, w] if i % 2 else [last, v], writes=[out], duration=60)
        last = out
    moves = [Move(w, "host", before="op0"), Move(w, "hbm", after="op0"), Move(v, "host", after="op0")]
    return Plan(b.build(), [*moves, Move(v, "hbm", before="op2"), Move(w, "host", after="op1")])


def one_memory() -> tuple[Plan, Platform]:
    """Two devices over one memory: the small request of one fits behind the large one of the other."""
    b = TraceBuilder()
    y = [b.tensor("y0", 40), b.tensor("y1", 40)]
    large, small = b.tensor("large", 60), b.tensor("small", 10)
    b.op("a0", writes=[y[0]], device=0, duration=10)
    b.op("b0", reads=[y[0]], writes=[large], device=0, duration=10)
    b.op("a1", writes=[y[1]], device=1, duration=20)
    b.op("b1", reads=[y[1]], writes=[small], device=1, duration=10)
    b.op("c1", reads=[small], device=1, duration=10)
    engines = tuple(Engine(f"npu@{d}", d, "hbm", ("hbm",), {"fp32": GB}) for d in range(2))
    return Plan(b.build()), Platform("one", (Tier("hbm", 100, 100, GB, device=0),), engines)


CASES = {
    "there and back": (there_and_back(), machine()),
    "a copy of its own length": (Plan(chain(("a", 10), ("b", 10)), [Move("x", "host", after="a")]), machine()),
    "two devices": (two_devices(), machine(devices=2)),
    "little space": (crowded(), machine(hbm=230)),
    "one memory": one_memory(),
}


def test_a_move_called_back_at_the_same_nanosecond_never_starts():
    log = replay(*CASES["there and back"])
    assert spans(log, "move") == []
    assert [link.bytes for link in traffic(log)] == [0, 0]


@pytest.mark.parametrize(("op", "start"), [("b1", 20), ("b0", 40)])
def test_a_request_that_fits_passes_one_that_nothing_under_way_can_serve(op, start):
    log = replay(*one_memory())
    assert next(row[2] for row in spans(log, "run") if row[1] == op) == start


@pytest.mark.parametrize("ns", [99, 100, 101])
def test_an_unrelated_copy_that_ends_beside_it_changes_nothing(ns):
    plan, platform = CASES["there and back"]
    b = TraceBuilder.of(plan.trace)
    for op in plan.trace.ops:
        b.copy_op(op)
    b.tensor("other", ns, "input")
    trace = b.build(outputs=plan.trace.outputs, carry=plan.trace.carry)
    log = replay(Plan(trace, [Move("other", "host", before="a"), *plan.actions]), platform)
    assert spans(log, "move") == [("d2h", "other", 0, ns)]
    # the space on the host is asked for and given back within the instant; the peak leaves out what never was copied
    host = log.changes[log.change("tier") == log.platform.tier_ids["host"]]
    assert np.cumsum(host[:, 2]).max() == ns + 50
    assert peak_bytes(log)["host"] == ns


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_nothing_unrelated_at_any_nanosecond_changes_a_small_run(case, copies):
    plan, platform = CASES[case]
    base = replay(plan, platform)
    expected = without_unrelated(base)
    last = max(instants(base))
    for times in [range(1, last + 1), *([t] for t in range(1, last + 1))]:
        log = replay(*beside(plan, platform, times, copies=copies and max(times) < last, pooled=False))
        assert without_unrelated(log) == expected, times


@pytest.mark.parametrize("online", [False, True], ids=["offline", "online"])
def test_nothing_unrelated_changes_a_random_run(online):
    @some
    @given(planned(online=online), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 2**16))
    def check(case, shift, copies, pooled, chosen):
        example, plan = case
        what, log = outcome(plan, example.platform)
        if log is None or what.startswith("Thrashing"):  # its limit is in the time of all ops, unrelated ones as well
            return
        at = instants(log)
        # some or all instants, the nanosecond before, or the one after
        times = [t + shift - 1 for i, t in enumerate(at) if chosen & 1 or chosen >> i % 16 & 1]
        times = [t for t in times if 0 < t <= at[-1] - copies]
        if not times:
            return
        other, longer = outcome(*beside(plan, example.platform, times, copies=copies, pooled=pooled))
        assert other == what
        assert without_unrelated(longer) == without_unrelated(log)

    check()
