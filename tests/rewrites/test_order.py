"""What must precede an op, by hand; ops that run as early as that allows."""

from __future__ import annotations

from sim.rewrites.order import as_early, must_precede
from sim.trace import TraceBuilder


def test_a_write_in_place_follows_the_producer_and_all_readers_of_the_old_value():
    b = TraceBuilder()
    x, y = b.tensor("x", 1, "input"), b.tensor("y", 1)
    other, again = b.tensor("other", 1), b.tensor("again", 1)
    new = b.tensor("y.new", 1, replaces=y)
    b.op("make", reads=[x], writes=[y])
    b.op("read", reads=[y], writes=[other])
    b.op("apart", reads=[x], writes=[again])
    b.op("overwrite", reads=[y, again], writes=[new])
    trace = b.build(outputs=[new], carry=())
    assert [must_precede(trace, op) for op in range(4)] == [set(), {0}, set(), {0, 1, 2}]


def test_early_ops_run_at_once_and_the_others_keep_their_order():
    waits = {3: {0}, 4: {3, 1}, 5: set()}
    assert list(as_early(6, waits)) == [0, 3, 5, 1, 4, 2]
