"""A trace is checked when it is made, and what it derives agrees with counting by hand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.trace import Trace, TraceBuilder
from sim.trace.columns import distinct
from tests.clocks import cpu_s, least
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
        ("'g' produces it", [A, B], [{"name": "f", "reads": [1], "writes": [0]}, {"name": "g", "writes": [1]}], {}),
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
            "not produced before it",
            [A, {"name": "b", "replaces": 0}],
            [{"name": "f", "writes": [1]}, {"name": "g", "writes": [0]}],
            {},
        ),
        ("'b' overwrites it", [A, {"name": "b", "replaces": 0}], [{"name": "f", "writes": [1]}], {"outputs": [0]}),
        ("out of range 0..0", [A], [], {"outputs": [7]}),
        ("'a' is an output twice", [A], [], {"outputs": [0, 0]}),
        ("'a' is not an output", [A, B], [], {"outputs": [], "carry": [(0, 1)]}),
        ("'a' does not exist when an iteration starts", [A], [MAKE_A], {"outputs": [0], "carry": [(0, 0)]}),
        ("another size", [A, {"name": "b", "bytes": 9}], [], {"outputs": [0], "carry": [(0, 1)]}),
        ("2**62", [{"name": "a", "bytes": 2**61}, {"name": "b", "bytes": 2**61}], [], {}),
        ("op 'f': has 2**62 FLOPs or more", [A], [{"name": "f", "writes": [0], "flops": 2**62}], {}),
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
    types, own = trace.op_types
    assert list(types) == sorted({op.dtype for op in ops})
    assert [types[i] for i in own.tolist()] == [op.dtype for op in ops]


@given(st.lists(st.integers(-(2**62), 2**62)))
def test_distinct_values_are_those_of_a_set(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))


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

    def make() -> None:
        before = b.tensor("x", 1, "input")
        for i in range(100_000):
            after = b.tensor(f"t{i}", 1, replaces=before if i % 2 else None)
            b.op(f"f{i}", reads=[before], writes=[after])
            before = after

    making = cpu_s(make)
    assert least(1.5 * making, lambda: cpu_s(lambda: b.build().content_hash)) < 1.5 * making
    assert np.array_equal(b.build().producer[1:], np.arange(100_000))


# ---- release points ---------------------------------------------------------------------------------


def _held():
    """a is read by g alone, and the program lets go of it after h; of b after h, too, behind a."""
    b = TraceBuilder()
    x, one, two, y, z = (b.tensor(name, 8, "input" if name == "x" else "activation") for name in "xabyz")
    b.op("f", reads=[x], writes=[one])
    b.op("g", reads=[one], writes=[two])
    b.op("h", reads=[two], writes=[y], releases=[one, two])
    b.op("i", reads=[y], writes=[z])
    return b


def test_a_release_point_is_no_read_and_no_edge():
    trace = _held().build(outputs=[4])
    assert trace.ops[2].releases == (1, 2)
    assert trace.readers(1) == (1,)
    assert trace.read_counts.tolist() == [1, 1, 1, 1, 0]
    assert trace.last_use.tolist() == [0, 1, 2, 3, 3]
    assert trace.released.tolist() == [-1, 2, 2, -1, -1]
    assert trace.held_until.tolist() == [0, 2, 2, 3, 3]


def test_release_points_count_in_the_hash_only_where_there_are_any():
    held, other, plain = _held(), _held(), _held()
    other._sparse["releases"][2] = (2, 1)
    plain._sparse["releases"].clear()
    hashes = {builder.build(outputs=[4]).content_hash for builder in (held, other, plain)}
    assert len(hashes) == 3
    # as it was before traces had release points
    assert plain.build(outputs=[4]).content_hash.startswith("d7b0e5c33133c265")


@pytest.mark.parametrize(("tensor", "op", "why"), [
    (0, 3, "'x': it exists from the start and is kept"),
    (3, 1, "'y': released before 'h' produces it"),
    (3, 2, "'y': released before 'i' reads it"),
    (4, 3, "'z': released, but it is an output"),
    (2, 3, "'i': tensor 'b': 'h' has released it already"),
    (9, 3, "'i': releases: a tensor id is out of range 0..4"),
])  # fmt: skip
def test_release_points_that_cannot_be(tensor, op, why):
    builder = _held()
    builder.release(tensor, op)
    with pytest.raises(TraceError, match=re.escape(why)):
        builder.build(outputs=[4])


def test_what_variables_let_go_of_is_no_use_and_counts_in_the_hash_only_where_there_is_any():
    builder, plain = _held(), _held()
    builder.note("unbinds", 2, (1,))
    trace = builder.build(outputs=[4])
    assert trace.ops[2].unbinds == (1,)
    assert trace.unbound.tolist() == [-1, 2, -1, -1, -1]
    assert trace.held_until.tolist() == plain.build(outputs=[4]).held_until.tolist()
    assert trace.content_hash != plain.build(outputs=[4]).content_hash


@pytest.mark.parametrize(("op", "tensors", "why"), [
    (1, (3,), "op 'g': tensor 'y': unbound before an op produces it"),
    (1, (0,), "op 'g': tensor 'x': unbound before an op produces it"),
    (1, (1, 1), "op 'g': tensor 'a': 'g' has let go of it already"),
    (1, (9,), "op 'g': unbinds: a tensor id is out of range 0..4"),
])  # fmt: skip
def test_variables_that_cannot_let_go(op, tensors, why):
    builder = _held()
    builder.note("unbinds", op, tensors)
    with pytest.raises(TraceError, match=re.escape(why)):
        builder.build(outputs=[4])


def test_what_something_takes_over_is_not_released():
    b = TraceBuilder()
    a = b.tensor("a", 8)
    new = b.tensor("new", 8, replaces=a)
    b.op("f", writes=[a])
    b.op("g", reads=[a], writes=[new], releases=[a])
    with pytest.raises(TraceError, match="'g': tensor 'a': released, but 'new' takes over its storage"):
        b.build(outputs=[new])


# ---- views -------------------------------------------------------------------------------------------


def viewed(size: int = 0, *, reads: str = "vx", into: str = "x", outputs: str = "", place: int = 1) -> Trace:
    """x, its view v, a view u of `into`, and an op that reads some of them."""
    b = TraceBuilder()
    ids = {"x": b.tensor("x", 8), "v": b.tensor("v", size), "u": b.tensor("u", 0), "y": b.tensor("y", 8)}
    b.op("f", writes=[ids["x"]])
    b.op("view", reads=[ids["x"]], writes=[ids["v"]], views=[0])
    b.op("again", reads=[ids["x"], ids[into]], writes=[ids["u"]], views=[place])
    b.op("g", reads=[ids[t] for t in reads], writes=[ids["y"]], views=[-1])
    return b.build(outputs=[ids[t] for t in outputs])


def test_a_view_lies_in_the_storage_that_its_op_names() -> None:
    assert viewed().view_of == {1: 0, 2: 0}
    assert [op.views for op in viewed().ops] == [(), (0,), (1,), ()]
    assert viewed(outputs="xv").outputs == (0, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 4}, "op 'view': view 'v' has 4 bytes of its own"),
        ({"into": "v"}, "op 'again': view 'u' shares the storage of 'v', which is a view itself"),
        ({"reads": "v"}, "op 'g': reads view 'v', but not 'x', whose storage it shares"),
        ({"place": 2}, "op 'again': views: (2,) does not fit 1 results and 2 reads"),
        ({"outputs": "v"}, "view 'v' is an output, but 'x', whose storage it shares, is not"),
    ],
)
def test_a_view_that_cannot_be_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        viewed(**fields)


def test_views_are_saved_and_copied_and_forgotten_where_the_reads_change() -> None:
    trace = viewed()
    b = TraceBuilder.of(trace)
    for op in trace.ops[:2]:
        b.copy_op(op)
    b.copy_op(trace.ops[2], reads=(0,))
    assert [op.views for op in b.build(outputs=[], carry=()).ops] == [(), (0,), ()]
    assert trace.content_hash != b.build(outputs=[], carry=()).content_hash
