"""What may be recomputed, against the definition: everything read is there, or its producer can run just before."""

from __future__ import annotations

from functools import cache

import pytest

from sim.eviction.evictable import lineage_of
from sim.experiment import problem_for
from sim.trace import Trace, TraceBuilder
from sim.trace.index import OverwriteTracker, TraceIndex
from tests.policies.recompute.dtr_runs import one_tier
from workloads.synthetic import random_dag, unet, w1
from workloads.transformer import transformer


def overwriting() -> Trace:
    """v, made from y, and what r makes of it in place: once q has overwritten y, nothing brings either back."""
    b = TraceBuilder()
    y, x, v, w = b.tensor("y", 1, "input"), b.tensor("x", 1, "input"), b.tensor("v", 4), b.tensor("w", 2)
    y1, v1 = b.tensor("y1", 1, "input", replaces=y), b.tensor("v1", 4, replaces=v)
    u, z = b.tensor("u", 4), b.tensor("z", 1)
    u1 = b.tensor("u1", 4, replaces=u)
    for name, reads, writes in (
        ("f", [y], [v]),
        ("g", [x], [u]),
        ("s", [v], [w]),
        ("h", [u], [u1]),
        ("q", [y], [y1]),
        ("r", [v], [v1]),
        ("late", [v1, u1, w], [z]),
    ):
        b.op(name, reads=reads, writes=writes, duration=10)
    return b.build(outputs=[y1, z], carry=())


def filled() -> Trace:
    """An op that overwrites y without a look at it."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 1, "input"), b.tensor("y", 4), b.tensor("z", 1)
    y1 = b.tensor("y1", 4, replaces=y)
    for name, reads, writes in (("f", [x], [y]), ("fill", [x], [y1]), ("late", [y1], [z])):
        b.op(name, reads=reads, writes=writes, duration=10)
    return b.build(outputs=[z], carry=())


def traces() -> list[Trace]:
    """In place and not, with updates; one whose inputs are overwritten, one whose overwritten value is not read."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    gpt = transformer(config, batch=1, sequence=8, optimizer="adamw_foreach")
    return [
        overwriting(),
        filled(),
        gpt,
        unet(3, update=True),
        w1(3),
        *(random_dag(12, seed) for seed in range(5)),
    ]


@pytest.mark.parametrize("trace", traces(), ids=repr)
def test_an_op_can_be_recomputed_as_long_as_what_it_reads_can_be_had(trace):
    index = TraceIndex(trace)
    producer = trace.producer.tolist()
    overwriter = [int(producer[new]) if new >= 0 else len(trace.ops) for new in trace.replaced_by.tolist()]

    @cache
    def can_be_had(op: int, anchor: int) -> bool:
        """Whether all that an op reads is there just before the anchor, or can be recomputed."""
        return all(
            overwriter[t] >= anchor or (producer[t] >= 0 and can_be_had(producer[t], anchor)) for t in trace.reads(op)
        )

    last = index.recomputable_until
    for op in range(len(trace.ops)):
        known = {anchor for anchor in range(op + 1, len(trace.ops) + 1) if can_be_had(op, anchor)}
        assert known == set(range(op + 1, last[op] + 1))
        at_once = {anchor for anchor in known if OverwriteTracker(index, anchor).can_run(op)}
        alone = {anchor for anchor in known if index.can_recompute(op, anchor)}
        in_place = any(index.replaces[t] >= 0 for t in index.writes[op])
        assert alone == (set() if in_place else at_once)


@pytest.mark.parametrize("trace", traces(), ids=repr)
def test_an_evictor_may_have_recomputed_what_a_planner_may(trace):
    index, line = TraceIndex(trace), lineage_of(problem_for(trace, one_tier(1 << 50)))
    kept = {op for op, view in enumerate(trace.ops) if view.phase == "update" or view.group}
    possible = index.recomputable_among(op for op in range(len(trace.ops)) if op not in kept)
    assert [op >= 0 and possible.get(op, 0) > op for op in line.producer] == line.counts


def received_and_reduced() -> Trace:
    """Device 1 receives r and computes a, then b from it; c from x; d from c and from what all devices reduced."""
    b = TraceBuilder()
    s, r, x = b.tensor("s", 1), b.tensor("r", 1), b.tensor("x", 1, "input")
    own, summed, other = b.tensor("own", 1), b.tensor("summed", 1), b.tensor("other", 1)
    made = {name: b.tensor(name, 1) for name in "abcde"}
    b.op("source", writes=[s], duration=1, device=0)
    b.op("send", "send", reads=[s], group="p2p", device=0)
    b.op("recv", "recv", writes=[r], group="p2p", device=1)
    b.op("f.a", reads=[r], writes=[made["a"]], duration=1, device=1)
    b.op("f.b", reads=[made["a"], x], writes=[made["b"]], duration=1, device=1)
    b.op("f.c", reads=[x], writes=[made["c"]], duration=1, device=1)
    b.op("sum0", "collective", reads=[s], writes=[other], group="sum", device=0)
    b.op("sum1", "collective", reads=[made["c"]], writes=[summed], group="sum", device=1)
    b.op("f.d", reads=[made["c"], summed], writes=[made["d"]], duration=1, device=1)
    b.op("f.e", reads=[made["c"]], writes=[own], duration=1, device=1)
    return b.build(outputs=(), carry=())


def test_what_was_received_or_reduced_is_no_input_to_recompute_from():
    trace = received_and_reduced()
    index = TraceIndex(trace)
    alone = {trace.ops[op].name for op, until in enumerate(index.recomputable_from_inputs) if until}
    assert alone == {"source", "f.c", "f.e"}
    together = {trace.ops[op].name for op, until in enumerate(index.recomputable_until) if until}
    assert together - alone >= {"f.a", "f.b", "f.d"}  # as long as r and the sum are kept


@pytest.mark.parametrize("trace", traces(), ids=repr)
def test_on_one_device_everything_is_recomputed_from_inputs(trace):
    index = TraceIndex(trace)
    assert index.recomputable_from_inputs == index.recomputable_until
