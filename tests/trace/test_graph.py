"""A trace is checked when it is made, and what it derives agrees with counting by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings

from sim.errors import TraceError
from sim.trace import Trace, TraceBuilder
from tests.strategies import traces


def two_ops(**last: object) -> Trace:
    b = TraceBuilder()
    x, w = b.tensor("x", 8, "input"), b.tensor("w", 4, "weight")
    y, v = b.tensor("y", 8), b.tensor("v", 4, "weight", replaces=w)
    b.op("f", reads=[x, w], writes=[y])
    b.op("u", "optimizer", phase="update", reads=[w, y], writes=[v])
    return b.build(**last)


def test_weights_are_kept_and_carried_by_default() -> None:
    trace = two_ops()
    assert [trace.tensors[t].name for t in trace.outputs] == ["v"]
    assert trace.carry == ((3, 1),)


def test_derived_columns_of_a_small_trace() -> None:
    trace = two_ops()
    assert trace.producer.tolist() == [-1, -1, 0, 1]
    assert trace.last_use.tolist() == [0, 1, 1, 1]
    assert trace.readers(1) == (0, 1)
    assert trace.touched.tolist() == [20, 16]
    assert trace.replaced_by.tolist() == [-1, 3, -1, -1]


def refused(text: str, tensors: list[dict], ops: list[dict], **ends: object) -> None:
    b = TraceBuilder()
    for fields in tensors:
        b.tensor(**{"bytes": 8, **fields})
    for fields in ops:
        b.op(**fields)
    with pytest.raises(TraceError) as caught:
        b.build(**ends)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


A, B, C = {"name": "a"}, {"name": "b"}, {"name": "c"}
MAKE_A = {"name": "f", "writes": [0]}


@pytest.mark.parametrize(
    ("text", "tensors", "ops", "ends"),
    [
        ("'g' makes it", [A, B], [{"name": "f", "reads": [1], "writes": [0]}, {"name": "g", "writes": [1]}], {}),
        ("reads its own output", [A], [{"name": "f", "reads": [0], "writes": [0]}], {}),
        ("two producers: 'f', 'g'", [A], [MAKE_A, {"name": "g", "writes": [0]}], {}),
        ("bytes is negative (-1)", [{"name": "a", "bytes": -1}], [], {}),
        ("workspace is negative", [A], [{**MAKE_A, "workspace": -5}], {}),
        ("two tensors are called 'a'", [A, A], [], {}),
        ("two ops are called 'f'", [A, B], [MAKE_A, {"name": "f", "writes": [1]}], {}),
        ("out of range 0..0", [A], [{"name": "f", "reads": [1]}], {}),
        ("out of range 0..0", [A], [{"name": "f", "reads": [-1]}], {}),
        ("no op writes it", [A, {"name": "b", "replaces": 0}], [], {}),
        ("another size", [A, {"name": "b", "bytes": 9, "replaces": 0}], [{"name": "f", "writes": [1]}], {}),
        (
            "op 'g': tensor 'a': read after 'f' overwrote it",
            [A, {"name": "b", "replaces": 0}],
            [{"name": "f", "writes": [1]}, {"name": "g", "reads": [0]}],
            {},
        ),
        (
            "'a' is overwritten twice",
            [A, {"name": "b", "replaces": 0}, {"name": "c", "replaces": 0}],
            [{"name": "f", "writes": [1]}, {"name": "g", "writes": [2]}],
            {},
        ),
        (
            "not made before it",
            [A, {"name": "b", "replaces": 0}],
            [{"name": "f", "writes": [1]}, {"name": "g", "writes": [0]}],
            {},
        ),
        ("'b' overwrites it", [A, {"name": "b", "replaces": 0}], [{"name": "f", "writes": [1]}], {"outputs": [0]}),
        ("out of range 0..0", [A], [], {"outputs": [7]}),
        ("'a' is an output twice", [A], [], {"outputs": [0, 0]}),
        ("'a' is no output", [A, B], [], {"outputs": [], "carry": [(0, 1)]}),
        ("'a' is not there when an iteration starts", [A], [MAKE_A], {"outputs": [0], "carry": [(0, 0)]}),
        ("another size", [A, {"name": "b", "bytes": 9}], [], {"outputs": [0], "carry": [(0, 1)]}),
        ("2**62", [{"name": "a", "bytes": 2**61}, {"name": "b", "bytes": 2**61}], [], {}),
    ],
)
def test_what_cannot_be_computed_is_refused(text: str, tensors: list, ops: list, ends: dict) -> None:
    refused(text, tensors, ops, **ends)


def test_unknown_words_name_the_nearest() -> None:
    b = TraceBuilder()
    with pytest.raises(TraceError, match="did you mean 'weight'"):
        b.tensor("w", 1, "wieght")
    with pytest.raises(TraceError, match="did you mean 'matmul'"):
        b.op("f", "matmull")
    with pytest.raises(TraceError, match="did you mean 'x'"):
        two_ops().tensor_id("xx")


def test_a_number_that_does_not_fit_is_refused_not_wrapped() -> None:
    b = TraceBuilder()
    b.op("f", layer=2**40)
    with pytest.raises(TraceError, match="does not fit"):
        b.build()


def test_columns_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        two_ops().op_columns.flops[0] = 1


@settings(max_examples=50, deadline=None)
@given(traces())
def test_derived_columns_agree_with_counting(trace: Trace) -> None:
    ops, count = list(trace.ops), len(trace.tensors)
    for t in range(count):
        readers = [op.id for op in ops if t in op.reads]
        makers = [op.id for op in ops if t in op.writes]
        assert trace.readers(t) == tuple(readers)
        assert trace.read_counts[t] == len(readers)
        assert trace.producer[t] == (makers[0] if makers else -1)
        assert trace.last_use[t] == max(readers + makers, default=-1)


@settings(max_examples=50, deadline=None)
@given(traces())
def test_equal_traces_have_equal_hashes_and_any_change_shows(trace: Trace) -> None:
    def rebuilt(**changes: int) -> Trace:
        b = TraceBuilder.of(trace)
        for op in trace.ops:
            b.copy_op(op, **(changes if op.id == 0 else {}))
        return b.build(outputs=trace.outputs, carry=trace.carry)

    assert rebuilt() == trace
    assert rebuilt(flops=trace.ops[0].flops + 1) != trace
    assert rebuilt(splits=("heads",)) != trace
    assert rebuilt(priority=1) != trace


@pytest.mark.alone
def test_checking_a_hundred_thousand_ops_takes_a_fraction_of_making_them() -> None:
    b = TraceBuilder()
    started = time.process_time()
    before = b.tensor("x", 1, "input")
    for i in range(100_000):
        after = b.tensor(f"t{i}", 1, replaces=before if i % 2 else None)
        b.op(f"f{i}", reads=[before], writes=[after])
        before = after
    making = time.process_time() - started
    started = time.process_time()
    trace = b.build()
    assert len(trace.content_hash) == 64
    assert time.process_time() - started < 1.5 * making
    assert np.array_equal(trace.producer[1:], np.arange(100_000))
