"""A stack at other sizes: what it has made of one trace is followed where its decisions hold, and only there."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.rewrites.compared import Compared
from sim.rewrites.fuse import fuse
from sim.rewrites.resized import Resized
from sim.rewrites.stack import stream_groups
from sim.trace import Trace, TraceBuilder
from workloads import sizes, transformer, with_stack
from workloads.stacks import STACKS, as_workload

OTHERS = tuple(stack for stack in STACKS if stack != "eager")
SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 512, "vocab_size": 256}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
STEPS = (
    {"model": SMALL, "precision": "amp_bf16"},
    {"model": SMALL, "precision": "fp32", "optimizer": "sgd", "attention": "eager", "dropout": 0.1},
    {"model": LLAMA, "precision": "mixed_fp16", "optimizer": "adamw_fused", "attention": "flash"},
    {"model": LLAMA, "precision": "megatron_bf16", "micro_batches": 2, "attention": "flash"},
)
PAIRS = ((2, 4), (2, 2), (16, 4), (2, 256), (4, 256), (6, 512), (4, 384), (2, 17), (4, 64))
"""Such at which there are as many tokens as columns, or fewer, and ordinary ones."""


def alone(trace: Trace) -> Trace:
    """The same trace, which shares nothing."""
    return pickle.loads(pickle.dumps(trace))


def in_full(trace: Trace) -> tuple[object, ...]:
    return trace.hashed_anew(), trace.outputs, trace.carry, dict(trace.meta), trace.origin


def built(step: dict[str, object], batch: int, sequence: int, stack: str = "eager") -> Trace:
    step = dict(step)
    return transformer(step.pop("model"), batch=batch, sequence=sequence, stack=stack, **step)


def differing(step: dict[str, object], stack: str) -> list[tuple[int, int]]:
    """The sizes at which a stack makes something else of a trace with others of its structure than of it alone."""
    sizes._known.clear()
    found = []
    for batch, sequence in PAIRS:
        trace = built(step, batch, sequence)
        workload = built(step, batch, sequence, stack)
        want = with_stack(alone(trace), stack)
        if in_full(with_stack(trace, stack)) != in_full(want) or workload.hashed_anew() != want.hashed_anew():
            found.append((batch, sequence))
    return found


@pytest.mark.parametrize("stack", OTHERS)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["precision"])
def test_a_stack_is_the_same_beside_other_sizes_and_alone(step, stack):
    followed = []
    over = Resized.over
    with patch.object(Resized, "over", lambda self, trace: followed.append(trace) or over(self, trace)):
        assert not differing(step, stack)
    assert len(followed) >= 4  # of those built by formulas most, twice each


@pytest.mark.parametrize("stack", OTHERS)
def test_a_stack_that_asks_no_sizes_is_found_out(stack):
    with patch.object(Compared, "is_alike", lambda self, trace: True):
        assert differing(STEPS[0], stack)


def like(trace: Trace, bytes: object = None, **columns: object) -> Trace:
    """The trace with other sizes of its tensors or ops."""
    tensors = trace.tensor_columns if bytes is None else replace(trace.tensor_columns, bytes=bytes)
    ops = replace(trace.op_columns, **columns)
    return Trace(tensors, ops, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, like=trace)


def between_products(made: int) -> Trace:
    """By hand: a product makes `made` bytes, of which an element-wise op makes 64, which backward reads."""
    b = TraceBuilder()
    x, s, y = b.tensor("x", 64, "input"), b.tensor("s", made, shape=(64,)), b.tensor("y", 64)
    z, out, g, d, e = (b.tensor(name, 64) for name in ("z", "out", "g", "d", "e"))
    b.op("s", "matmul", reads=[x], writes=[s], flops=1)
    b.op("y", "elementwise", reads=[s], writes=[y], flops=1)
    b.op("z", "elementwise", reads=[y], writes=[z], flops=1)
    b.op("out", "matmul", reads=[z], writes=[out], flops=1)
    b.op("g", "matmul", reads=[out], writes=[g], phase="backward", flops=1)
    b.op("d", "elementwise", reads=[g, y], writes=[d], phase="backward", flops=1)
    b.op("e", "elementwise", reads=[d], writes=[e], phase="backward", flops=1)
    return b.build(outputs=[out, e], carry=())


def saved(trace: Trace, stack: str) -> list[str]:
    """What the last kernel of backward reads of forward."""
    new = with_stack(trace, stack)
    (last,) = (op for op in new.ops if op.name == "e")
    return [new.tensors[t].name for t in last.reads if new.tensors[t].name in "sy"]


@pytest.mark.parametrize("stack", ["compiled", "fused"])
def test_what_is_saved_is_found_for_each_size(stack):
    """The smaller of the two is saved, whatever was for other sizes: by a cut, and by what enters a kernel."""
    first = between_products(32)
    traces = [like(first, bytes=between_products(made).tensor_columns.bytes) for made in (32, 16, 48, 1024, 8)]
    assert all(trace.structure is first.structure for trace in traces)
    assert [saved(trace, stack) for trace in traces] == [["s"], ["s"], ["s"], ["y"], ["s"]]


def test_kernels_are_found_for_each_size():
    """By hand: f, g and h are one kernel where all go through as many elements, else those that do."""
    b = TraceBuilder()
    t = [b.tensor(name, 64, "input" if name == "w" else "activation") for name in "wxyz"]
    for op, (x, y) in zip("fgh", pairwise(t), strict=True):
        b.op(op, "elementwise", reads=[x], writes=[y], flops=1)
    first = b.build(outputs=[t[-1]], carry=())
    sizes = [64, 64, 64, 64], [16, 16, 16, 16], [64, 64, 64, 128], [128, 64, 64, 64], [8, 8, 8, 8]
    found = [[op.name for op in with_stack(like(first, bytes=np.array(each)), "fused").ops] for each in sizes]
    assert found == [["h"], ["h"], ["g", "h"], ["f", "h"], ["h"]]


def test_of_two_ops_the_larger_may_be_either():
    """By hand: a norm and what follows are one kernel where one goes through a multiple of the other's elements."""
    b = TraceBuilder()
    x, y, z, u, v, w = (b.tensor(n, 8, "input" if n in "xu" else "activation") for n in "xyzuvw")
    for name, kind, read, made in (("a", "norm", x, y), ("b", "elementwise", y, z)):
        b.op(name, kind, reads=[read], writes=[made], flops=1)
    for name, read, made in (("c", u, v), ("d", v, w)):
        b.op(name, "elementwise", reads=[read], writes=[made], flops=1)
    first = b.build(outputs=[z, w], carry=())
    sizes = [6, 6, 16, 8, 8, 8], [6, 6, 16, 4, 4, 4], [16, 8, 8, 8, 8, 8], [4, 4, 16, 8, 8, 8]
    found = [[op.name for op in with_stack(like(first, bytes=np.array(each)), "fused").ops] for each in sizes]
    assert found == [["a", "b", "d"], ["a", "b", "d"], ["b", "d"], ["b", "d"]]


def test_scalars_count_nothing_of_an_update_where_they_are_scalars():
    """By hand: a gradient, and a weight and a moment before and after, of 32 B; and 4 B of steps, which count with a
    shape of (1,)."""
    b = TraceBuilder()
    x, y, z, g, w = (b.tensor(n, 32, r) for n, r in zip("xyzgw", ("input", *2 * ["activation"], "gradient", "weight")))
    steps = b.tensor("steps", 4, "optimizer_state", shape=())
    new = b.tensor("new", 32, "weight", replaces=w)
    b.op("f", "elementwise", reads=[x], writes=[y], flops=1)
    b.op("h", "elementwise", reads=[y], writes=[z], flops=1)
    b.op("g", "matmul", reads=[z], writes=[g], phase="backward", flops=1)
    before = b.tensor("m", 32, "optimizer_state")
    after = b.tensor("m1", 32, "optimizer_state", replaces=before)
    b.op("moment", "optimizer", reads=[g, before], writes=[after], phase="update", flops=1)
    b.op("step", "optimizer", reads=[after, w, steps], writes=[new], phase="update", flops=1)
    first = b.build()

    def with_steps(shape: tuple[int, ...]) -> Trace:
        tensors = replace(first.tensor_columns, shape={steps: shape})
        return Trace(tensors, first.op_columns, outputs=first.outputs, carry=first.carry, meta=first.meta, like=first)

    found = [with_stack(with_steps(shape), "fused").ops[-1].bytes for shape in ((), (), (1,), ())]
    assert found == [160, 160, 164, 160]


def test_all_stacks_of_a_structure_are_kept_in_turn():
    sizes._known.clear()
    followed = []
    over = Resized.over
    with patch.object(Resized, "over", lambda self, trace: followed.append(trace) or over(self, trace)):
        for batch in (2, 4, 6, 8):
            trace = built(STEPS[2], batch, 256)
            for stack in OTHERS:
                with_stack(trace, stack)
                as_workload(trace, stack)
    assert len(followed) == 2 * 2 * len(OTHERS)  # of the first two batches they are made


def test_a_workload_of_a_stack_shares_its_structure_with_those_of_other_sizes():
    sizes._known.clear()
    made = [built(STEPS[2], batch, 256, "fused") for batch in (2, 4, 6, 8)]
    assert made[1].structure is not made[0].structure  # the first is built without formulas
    assert made[1].structure is made[2].structure is made[3].structure
    assert all(trace.origin is None for trace in made)


def chain(count: int, flops: int, *, rows: int = 4) -> TraceBuilder:
    """Element-wise ops, one after the other, of so many FLOPs each."""
    b = TraceBuilder()
    last = b.tensor("x", 4 * rows * 8, "input", shape=(rows, 8), dtype="fp32")
    for i in range(count):
        new = b.tensor(f"y{i}", 4 * rows * 8, shape=(rows, 8), dtype="fp32")
        b.op(f"f{i}", "elementwise", reads=[last], writes=[new], flops=flops)
        last = new
    return b


def test_flops_that_no_number_holds_are_refused_and_not_wrapped():
    for count, power in ((3, 62), (5, 63)):
        trace = chain(count, 2**61).build()
        with pytest.raises(TraceError, match=rf"2\*\*{power}"):
            fuse(trace, stream_groups(trace), streams=True)
    fits = chain(3, 2**60).build()
    assert [op.flops for op in fuse(fits, stream_groups(fits), streams=True).ops] == [3 * 2**60]


def test_ops_that_compute_nothing_decide_the_type_of_a_kernel():
    """By hand: fp16 with FLOPs and fp32 without computes in fp16; with FLOPs in both, in fp32."""
    b = TraceBuilder()
    x, y, z = (b.tensor(name, 64, role) for name, role in (("x", "input"), ("y", "activation"), ("z", "activation")))
    b.op("half", "elementwise", reads=[x], writes=[y], flops=32, dtype="fp16")
    b.op("cast", "copy", reads=[y], writes=[z], flops=0, dtype="fp32")
    trace = b.build(outputs=[z], carry=())
    first = like(trace, flops=trace.op_columns.flops * 2)
    assert first.structure is trace.structure
    assert [op.dtype for op in with_stack(first, "fused").ops] == ["fp16"]
    assert [(op.dtype, op.flops) for op in with_stack(trace, "fused").ops] == [("fp16", 32)]
    both = like(trace, flops=np.array([32, 1]))
    assert [(op.dtype, op.flops) for op in with_stack(both, "fused").ops] == [("fp32", 33)]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40)), min_size=3, max_size=6))
def test_random_sizes_of_one_model(pairs):
    sizes._known.clear()
    for batch, sequence in pairs:
        trace = transformer({**SMALL, "n_layer": 1, "n_embd": 8, "n_head": 2}, batch=batch, sequence=sequence)
        for stack in OTHERS:
            assert in_full(with_stack(trace, stack)) == in_full(with_stack(alone(trace), stack))
