"""What a stall waited for, on timelines worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from sim.analysis.waits import waits
from sim.engine.replay import replay
from sim.plan import Move, Plan
from sim.trace import TraceBuilder
from tests.machines import machine

ROOM = 1 << 40


def late():
    """Seven ops of 10 ns: `a` makes x of 40 bytes, `z` reads it, and the five between them hand on 10 bytes, f0 20."""
    b = TraceBuilder()
    start = b.tensor("start", 10, "input")
    x = b.tensor("x", 40)
    b.op("a", reads=[start], writes=[x], duration=10)
    last = start
    for i in range(5):
        out = b.tensor(f"m{i}", 10 if i else 20)
        b.op(f"f{i}", reads=[last], writes=[out], duration=10)
        last = out
    b.op("z", reads=[x, last], writes=[b.tensor("end", 10)], duration=10, phase="backward")
    return b.build()


def there_and_back():
    return Plan(late(), [Move("x", "host", after="a"), Move("x", "hbm", after="f4")])


def test_a_wait_for_a_copy_names_its_tensor_and_link():
    # at a byte a ns x leaves from 10 to 50 and returns from 60 to 100, where z could start at 60
    log = replay(there_and_back(), machine(host=ROOM))
    (row,) = waits(log).to_dict("records")
    assert row == {"cause": "transfer", "link": "h2d", "tensor": "x", "op": "z", "stall_ns": 40, "stalls": 1}
    assert log.end == 110


def test_a_wait_for_space_names_the_copy_that_gives_it():
    # start, x and m0 are 70 bytes: of 75, f1 has its 10 once x has left, at 50 instead of 20
    log = replay(there_and_back(), machine(75, host=ROOM))
    rows = waits(log).set_index("cause")
    assert rows.loc["space", ["link", "tensor", "op", "stall_ns"]].to_list() == ["d2h", "x", "f1", 30]
    assert rows.loc["transfer", ["link", "tensor", "op", "stall_ns"]].to_list() == ["h2d", "x", "z", 40]
    assert log.end == 140


def test_a_wait_for_another_engine_names_its_result_and_where_that_ran():
    # the CPU makes u from 0 to 30 beside a and f, which end at 20: r, which reads it, waits for 10 ns
    b = TraceBuilder()
    start = b.tensor("start", 10, "input")
    u, v = b.tensor("u", 10), b.tensor("v", 10)
    b.op("c", reads=[start], writes=[v, u], duration=30, engine="cpu")
    last = b.tensor("m", 10)
    b.op("a", reads=[start], writes=[last], duration=20)
    b.op("r", reads=[u, last], writes=[b.tensor("end", 10)], duration=10)
    platform = machine(host=ROOM)
    cpu = replace(platform.engines[0], name="cpu", device=-1, main=False)
    log = replay(Plan(b.build()), replace(platform, engines=(*platform.engines, cpu)))
    (row,) = waits(log).to_dict("records")
    assert row == {"cause": "engine", "link": "cpu", "tensor": "u", "op": "r", "stall_ns": 10, "stalls": 1}
