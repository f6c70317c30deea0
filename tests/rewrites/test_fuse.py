"""One kernel of several: it computes the same values, touches each operand once, and never makes a cycle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.rewrites.rewrite import fuse, unroll
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from sim.trace.io import load, save
from sim.trace.origin import Fused, Origin, Same, leaves
from tests.strategies import traces


def adam() -> Trace:
    """Moments, a root and a step for a weight of 4 bytes; a log of the second moment reads beside them."""
    b = TraceBuilder()
    g, w, m, v = (b.tensor(n, 4, role) for n, role in zip("gwmv", ("input", "weight", *["optimizer_state"] * 2)))
    m1, v1 = (b.tensor(f"{n}1", 4, "optimizer_state", replaces=old) for n, old in (("m", m), ("v", v)))
    b.op("moments", "optimizer", reads=[g, m, v], writes=[m1, v1], phase="update", flops=8, workspace=3, duration=7)
    root, w1 = b.tensor("root", 4, "temporary"), b.tensor("w1", 4, "weight", replaces=w)
    b.op("sqrt", "optimizer", reads=[v1], writes=[root], phase="update", flops=1, bytes=100)
    b.op("step", "optimizer", reads=[m1, root, w], writes=[w1], phase="update", flops=5)
    return b.build()


def test_a_fused_op_touches_each_operand_once_and_knows_its_temporaries_alone() -> None:
    trace = adam()
    fused = fuse(trace, [[0, 1, 2]])
    (op,) = fused.ops
    names = [t.name for t in fused.tensors]
    assert (op.name, op.flops, op.bytes, op.workspace, op.duration) == ("step", 14, 28, 3, None)
    assert [names[t] for t in op.reads] == ["g", "m", "v", "w"]
    assert [names[t] for t in op.writes] == ["m1", "v1", "w1"]
    assert "root" not in names
    assert fused.origin.ops == (Fused((Same(0), Same(1), Same(2))),)
    assert not departures(fused, trace)
    assert not departures(fuse(unroll(trace, 2), [[0, 1, 2], [3, 4, 5]]), trace)  # over a rewrite


def test_what_a_chain_of_overwrites_ends_as_takes_over_what_it_began_as() -> None:
    b = TraceBuilder()
    x = [b.tensor("x0", 4, "weight")]
    for i in range(3):
        x.append(b.tensor(f"x{i + 1}", 4, "weight", replaces=x[-1]))
        b.op(f"op{i}", "optimizer", reads=[x[i]], writes=[x[-1]])
    fused = fuse(b.build(), [[0, 1, 2]])
    assert [(t.name, t.replaces) for t in fused.tensors] == [("x0", None), ("x3", 0)]
    assert fused.carry == ((1, 0),)


def test_an_op_between_cuts_the_group_and_makes_no_cycle() -> None:
    b = TraceBuilder()
    x = [b.tensor(f"x{i}", 4, "weight") for i in range(1)]
    for i, kind in enumerate(("optimizer", "copy", "optimizer", "optimizer")):
        x.append(b.tensor(f"x{i + 1}", 4))
        b.op(f"op{i}", kind, reads=[x[-2]], writes=[x[-1]])
    trace = b.build(outputs=[x[-1]])
    fused = fuse(trace, [[0, 2, 3]])
    assert [len(leaves(expr)) for expr in fused.origin.ops] == [1, 1, 2]
    assert [op.name for op in fused.ops] == ["op0", "op1", "op3"]
    assert not departures(fused, trace)


def test_what_is_overwritten_beside_a_group_is_read_before() -> None:
    b = TraceBuilder()
    w, y, z = b.tensor("w", 4, "weight"), b.tensor("y", 4), b.tensor("z", 4)
    new = b.tensor("new", 4, "weight", replaces=w)
    b.op("reads", "optimizer", reads=[w], writes=[y])
    b.op("overwrites", "copy", reads=[], writes=[new])
    b.op("later", "optimizer", reads=[y], writes=[z])
    trace = b.build(outputs=[z, new])
    fused = fuse(trace, [[0, 2]])
    assert [op.name for op in fused.ops] == ["reads", "overwrites", "later"]
    assert not departures(fused, trace)


def test_groups_run_in_the_order_in_which_they_begin() -> None:
    b = TraceBuilder()
    for name in ("a0", "b0", "b1", "a1"):
        b.op(name, "optimizer", writes=[b.tensor(f"{name}.out", 4)])
    assert [op.name for op in fuse(b.build(), [[1, 2], [0, 3]]).ops] == ["a1", "b1"]


def test_a_kernel_touches_no_more_than_its_ops_did() -> None:
    """A loss picks one logit per row of 16: what follows it in its kernel adds no other."""
    b = TraceBuilder()
    logits, picked, scaled = b.tensor("logits", 256, "input"), b.tensor("picked", 16), b.tensor("scaled", 16)
    b.op("pick", "loss", reads=[logits], writes=[picked], bytes=32)
    b.op("scale", "elementwise", reads=[picked], writes=[scaled])
    (op,) = fuse(b.build(outputs=[scaled]), [[0, 1]], streams=True).ops
    assert op.bytes == 32 + 32


@pytest.mark.parametrize("place", [0, 1])
def test_a_kernel_draws_random_numbers_where_one_of_its_ops_does(place: int) -> None:
    b = TraceBuilder()
    x, y, z = b.tensor("x", 8, "input"), b.tensor("y", 8), b.tensor("z", 8)
    b.op("first", "elementwise", reads=[x], writes=[y], random=place == 0)
    b.op("second", "elementwise", reads=[y], writes=[z], random=place == 1)
    (op,) = fuse(b.build(outputs=[z]), [[0, 1]], streams=True).ops
    assert op.random


def test_a_product_keeps_its_type_whatever_its_epilogue_computes_in() -> None:
    """Tensor cores multiply bf16 and add in fp32; `wgrad_gemm_accum_fp32` takes no longer than a product in bf16."""
    b = TraceBuilder()
    x, g = b.tensor("x", 8, "input", dtype="bf16"), b.tensor("g", 8, dtype="bf16")
    main = b.tensor("main", 16, "gradient", dtype="fp32")
    added = b.tensor("added", 16, "gradient", dtype="fp32", replaces=main)
    b.op("product", "matmul", reads=[x], writes=[g], flops=64, dtype="bf16")
    b.op("add", "elementwise", reads=[g, main], writes=[added], flops=4, dtype="fp32")
    (op,) = fuse(b.build(outputs=[added]), [[0, 1]], streams=True).ops
    assert (op.kind, op.dtype, op.flops) == ("matmul", "bf16", 68)


@pytest.mark.parametrize(("flops", "expected"), [(4, "bf16"), (0, "fp32")])
def test_what_only_moves_bytes_has_no_say_in_the_type_of_a_kernel(flops: int, expected: str) -> None:
    """A cast to fp32 computes nothing: where another op does, its type is the kernel's."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 8, "input"), b.tensor("y", 16), b.tensor("z", 16)
    b.op("cast", "copy", reads=[x], writes=[y], dtype="fp32")
    b.op("scale", "elementwise", reads=[y], writes=[z], flops=flops, dtype="bf16")
    (op,) = fuse(b.build(outputs=[z]), [[0, 1]], streams=True).ops
    assert op.dtype == expected


@pytest.mark.parametrize(
    ("ways", "kept", "expected"),
    [
        ((("batch",), ("batch",)), (1,), ("batch",)),
        ((("batch",), ("batch_sum",)), (0, 1), ("batch",)),  # rows are written beside the sum
        ((("batch",), ("batch_sum",)), (1,), ("batch_sum",)),  # the rows stay in the kernel
        ((("batch_sum",), ("batch_sum",)), (0, 1), ("batch_sum",)),
        ((("batch",), ("batch_own",)), (1,), ("batch_own",)),
        ((("batch",), ()), (1,), ()),
        ((("heads", "rows"), ("rows",)), (1,), ("rows",)),
        ((("batch",), ("rows",)), (1,), ()),
    ],
    ids=str,
)
def test_a_kernel_is_split_as_all_its_ops_may_be(ways: tuple, kept: tuple, expected: tuple) -> None:
    b = TraceBuilder()
    x, *made = b.tensor("x", 8, "input"), b.tensor("y", 8), b.tensor("z", 8)
    for i, splits in enumerate(ways):
        b.op(f"op{i}", "elementwise", reads=[(x, *made)[i]], writes=[made[i]], splits=splits)
    (op,) = fuse(b.build(outputs=[made[i] for i in kept]), [[0, 1]], streams=True).ops
    assert op.splits == expected


def test_a_false_claim_to_be_fused_is_found() -> None:
    trace = adam()
    fused = fuse(trace, [[0, 1, 2]])

    def claims(*parts: int) -> set[str]:
        origin = Origin(fused.origin.base, fused.origin.tensors, (Fused(tuple(map(Same, parts))),))
        liar = Trace(fused.tensor_columns, fused.op_columns, outputs=fused.outputs, carry=fused.carry, origin=origin)
        return {departure.what for departure in departures(liar, trace)}

    assert claims(0, 1, 2) == set()
    assert "missing" in claims(0, 2)  # the root that the step reads is not there either
    assert "wrong" in claims(0, 2)
    assert "wrong" in claims(2, 1, 0)  # in the wrong order
    assert claims(0, 1, 2, 2) == {"repeated"}


def test_a_fused_trace_is_saved_and_loaded(tmp_path) -> None:
    fused = fuse(adam(), [[0, 1, 2]])
    save(fused, tmp_path / "t.jsonl")
    assert load(tmp_path / "t.jsonl").origin == fused.origin


def test_what_cannot_be_one_op_is_named() -> None:
    b = TraceBuilder()
    b.op("a", "optimizer", writes=[b.tensor("x", 4)])
    b.op("b", "copy", writes=[b.tensor("y", 4)])
    for groups in ([[0, 1]], [[0], [0]]):
        with pytest.raises(TraceError, match=r"fuse: op '.' cannot be in one op with 'a'"):
            fuse(b.build(), groups)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_fused_ops_compute_what_their_parts_computed(data: st.DataObject) -> None:
    trace = data.draw(traces(update=data.draw(st.booleans())))
    c = trace.op_columns
    alike: dict[tuple, list[int]] = {}
    for op in range(len(trace.ops)):
        if op not in c.group:
            key = (int(c.device[op]), c.engine.get(op, ""), int(c.kind[op]), int(c.phase[op]))
            alike.setdefault((*key, data.draw(st.integers(0, 2))), []).append(op)
    fused = fuse(trace, list(alike.values()))
    assert not departures(fused, trace)
    assert fused.op_columns.flops.sum() == c.flops.sum()
    # by running both: a value is the op and what it read
    plain: dict[int, object] = {}
    mine: dict[int, object] = {}
    for values, todo in (
        (plain, range(len(trace.ops))),
        (mine, [leaf.id for e in fused.origin.ops for leaf in leaves(e)]),
    ):
        over: set[int] = set()
        for op in todo:
            read = hash((op, *(values.get(t, t) for t in trace.reads(op))))
            assert over.isdisjoint(trace.reads(op))
            values.update({t: hash((read, k)) for k, t in enumerate(trace.writes(op))})
            over.update(int(trace.tensor_columns.replaces[t]) for t in trace.writes(op))
    assert plain == mine
    used = {int(t) for t in np.unique(np.concatenate([fused.op_columns.read_ids, fused.op_columns.write_ids]))}
    assert {t for t in range(len(fused.tensors)) if fused.producer[t] >= 0} <= used


def test_of_no_ops_there_are_no_kernels():
    b = TraceBuilder()
    b.tensor("x", 8, "weight")
    trace = b.build()
    assert not fuse(trace, []).ops
