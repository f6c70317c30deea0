"""What one device overwrites in place another must have come to make, or to read, before; else the trace is refused."""

from __future__ import annotations

import pytest

from sim.engine.replay import replay
from sim.errors import TraceError
from sim.plan import Plan
from sim.trace import TraceBuilder
from tests.engine.test_timeline import machine


def trace_with(link: str, *, ns: int = 10, engine: str = ""):
    """Device 1 reads x, device 0 overwrites it; `link` says what stands between the two."""
    b = TraceBuilder()
    x, y = b.tensor("x", 8, "weight"), b.tensor("y", 8)
    b.op("read", reads=[x], writes=[y], device=1, duration=ns, engine=engine)
    reads = [x]
    if link == "send":
        z = b.tensor("z", 8)
        b.op("send", "send", reads=[y], group="p2p", device=1)
        b.op("recv", "recv", writes=[z], group="p2p", device=0)
        reads.append(z)
    elif link == "send not awaited":
        z = b.tensor("z", 8)
        b.op("send", "send", reads=[y], group="p2p", device=1)
        b.op("recv", "recv", writes=[z], group="p2p", device=0)
    elif link == "send the other way":
        s, z = b.tensor("s", 8, "input"), b.tensor("z", 8)
        b.op("send", "send", reads=[s], group="p2p", device=0)
        b.op("recv", "recv", writes=[z], group="p2p", device=1)
    elif link == "collective":
        z = b.tensor("z", 8)
        b.op("all1", "collective", reads=[y], bytes=8, group="all", device=1)
        b.op("all0", "collective", writes=[z], bytes=8, group="all", device=0)
        reads.append(z)
    elif link == "collective, members the other way round":
        z = b.tensor("z", 8)
        b.op("all0", "collective", writes=[z], bytes=8, group="all", device=0)
        reads.append(z)
    elif link == "read":
        reads.append(y)
    new = b.tensor("x'", 8, "weight", replaces=x)
    b.op("write", reads=reads, writes=[new], device=0, duration=10)
    if link == "collective, members the other way round":
        b.op("all1", "collective", reads=[y], bytes=8, group="all", device=1)
    return b.build(outputs=[new], carry=[])


@pytest.mark.parametrize("link", ["", "send the other way", "send not awaited"])
def test_an_overwrite_that_nothing_orders_is_refused_with_names(link):
    with pytest.raises(TraceError, match=r"op 'write' on device 0 overwrites tensor 'x' .*op 'read' on device 1 reads"):
        trace_with(link)


@pytest.mark.parametrize("link", ["send", "collective", "collective, members the other way round", "read"])
@pytest.mark.parametrize("ns", [0, 1, 10, 1000])
def test_an_ordered_overwrite_is_a_trace_and_runs_whatever_ops_take(link, ns):
    log = replay(Plan(trace_with(link, ns=ns)), machine(devices=2))
    assert log.complete
    runs = log.events.query("why == 'run'").set_index("op")
    assert runs.loc["write", "start_ns"] >= runs.loc["read", "end_ns"]
    assert log.counters["implicit_recomputes"] == 0


def test_a_reader_on_another_engine_holds_its_operand_until_it_has_ended():
    b = TraceBuilder()
    x, y, z = b.tensor("x", 8, "weight"), b.tensor("y", 8), b.tensor("z", 8)
    b.op("slow", reads=[x], writes=[y], device=1, engine="cpu", duration=500)
    b.op("after", writes=[z], device=1, duration=10)
    new = b.tensor("x'", 8, "weight", replaces=x)
    b.op("write", reads=[x, z], writes=[new], device=0, duration=10)
    log = replay(Plan(b.build(outputs=[new], carry=[])), machine(devices=2, cpu="host"))
    runs = log.events.query("why == 'run'").set_index("op")
    assert runs.loc["write", "start_ns"] >= runs.loc["slow", "end_ns"]


def test_one_device_alone_is_in_order_of_its_own():
    b = TraceBuilder()
    x, y = b.tensor("x", 8, "weight"), b.tensor("y", 8)
    b.op("read", reads=[x], writes=[y], duration=10)
    new = b.tensor("x'", 8, "weight", replaces=x)
    b.op("write", reads=[x], writes=[new], duration=10)
    assert replay(Plan(b.build()), machine()).complete


def unread(link: str):
    """Device 1 makes x, device 0 writes over it without a look; `link` says what stands between the two."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 8), b.tensor("y", 8), b.tensor("z", 8)
    b.op("make", writes=[x, y], device=1, duration=10)
    reads = []
    if link == "send":
        b.op("send", "send", reads=[y], group="p2p", device=1)
        b.op("recv", "recv", writes=[z], group="p2p", device=0)
        reads.append(z)
    elif link == "read":
        reads.append(y)
    new = b.tensor("x'", 8, replaces=x)
    b.op("write", reads=reads, writes=[new], device=0, duration=5)
    return b.build(outputs=[new], carry=[])


def test_a_value_is_not_overwritten_by_a_device_that_may_come_before_it_is_made():
    with pytest.raises(
        TraceError, match=r"op 'write' on device 0 overwrites tensor 'x' .*op 'make' on device 1 produces"
    ):
        unread("")


@pytest.mark.parametrize("link", ["send", "read"])
def test_a_value_that_nobody_reads_is_overwritten_once_it_has_been_made(link):
    log = replay(Plan(unread(link)), machine(devices=2))
    runs = log.events.query("why == 'run'").set_index("op")
    assert runs.loc["write", "start_ns"] >= runs.loc["make", "end_ns"]
