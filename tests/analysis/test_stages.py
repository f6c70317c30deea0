"""Stages, on a log of two devices drawn by hand."""

from __future__ import annotations

from sim.analysis.stages import stages
from sim.analysis.summary import summarize
from sim.trace.builder import TraceBuilder
from tests.analysis.conftest import log_of, machine


def test_a_wait_for_another_device_is_exposed_while_bytes_are_under_way_and_bubble_before() -> None:
    """f on device 0, sent to device 1, where g reads it; device 1 waits from the start.

    ns     0    100        140   200
    gpu0   f               (drain: 10)
    out         ----------->
    gpu1   stall: peer           g, then idle to 210
    """
    b = TraceBuilder()
    x, y, z = b.tensor("x", 40), b.tensor("y", 40), b.tensor("z", 10)
    b.op("f", writes=[x])
    b.op("x.send", "send", reads=[x], group="x")
    b.op("x.recv", "recv", writes=[y], group="x", device=1)
    b.op("g", reads=[y], writes=[z], device=1)
    rows = [
        (0, 100, 0, 0, "run", 0, -1, "", 0),
        (100, 110, 0, 0, "stall", 1, -1, "drain", 0),
        (100, 140, 0, 3, "move", 2, -1, "", 40),
        (5, 140, 1, 1, "stall", 3, -1, "peer", 0),
        (140, 200, 1, 1, "run", 3, -1, "", 0),
    ]
    changes = [(0, 0, 40, x, 0, "made"), (140, 1, 40, y, 2, "made")]
    log = log_of(b.build(), machine(devices=2), rows, changes, end=210)
    first, second = stages(log)
    assert (first.busy_ns, first.stall_ns, first.exposed_ns, first.bubble_ns) == (100, 10, 0, 100)
    assert (second.busy_ns, second.stall_ns, second.exposed_ns, second.bubble_ns) == (60, 0, 40, 110)
    assert (first.peak_bytes, second.peak_bytes) == (40, 40)
    figures = summarize(log).as_dict()
    assert figures["bubble"] == (100 + 110) / (2 * 210)
    assert figures["exposed_ns"] == 40
    assert figures["binding_device"] == "time: 0, memory: 0"
