"""Schedules from separators: bounds that follow from the tree, and plans that run as they stand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.conformance.checker import check
from sim.experiment import Prices
from sim.hardware.platform import Engine, Platform, Tier
from sim.plan import Plan
from sim.policies.recompute.twremat.separator_schedule import Needs, parts_in_place, separator_schedule
from sim.policies.recompute.twremat.tree_decomposition import decompose, separators
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of
from sim.trace import Trace, TraceBuilder
from tests.solvers.reruns import small_graphs
from workloads.synthetic import random_dag, uniform_chain

ROOMY = 1 << 60
HBM, NPU = Tier("hbm", ROOMY, ROOMY, 10**9, device=0), Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9})
TOY = Platform("toy", (HBM,), (NPU,), ())


def scheduled(trace: Trace, limit: int, longest: int = 10**6) -> tuple[Schedule | None, int, int]:
    """The runs of a schedule in which all ops may be recomputed; the width and the levels it is made from."""
    index = TraceIndex(trace)
    needs = Needs(index, len(trace.ops), [True] * len(trace.ops))
    decomposition = decompose(needs.graph())
    tree = separators(decomposition)
    reruns = separator_schedule(needs, tree, [1] * len(trace.ops), limit, longest)
    return (None if reruns is None else schedule_of(index, reruns)), decomposition.width, tree.depth


@settings(max_examples=80)
@given(trace=small_graphs(), share=st.floats(0, 1.2))
def test_every_schedule_runs_as_it_stands(trace, share):
    plain = schedule_of(TraceIndex(trace), {}).peak()
    found, _, _ = scheduled(trace, int(share * plain))
    assert found is not None
    checked = check(Plan(trace, found.actions()), Prices(trace, TOY).op_ns)
    assert checked.peak == found.peak()
    assert len(checked.reruns) == found.rerun_count()


@given(trace=small_graphs())
def test_nothing_runs_again_where_everything_can_stay(trace):
    found, _, _ = scheduled(trace, ROOMY)
    assert found is not None
    assert found.rerun_count() == 0


def unit_dag(ops: int, seed: int, width: int) -> Trace:
    """A random graph with its backward in which every result has one byte, and only the last one is kept."""
    drawn = random_dag(ops, seed, width=width, weights=0, update=False)
    b = TraceBuilder()
    new = [b.tensor(t.name, 1, t.role) for t in drawn.tensors]
    for op in drawn.ops:
        b.op(op.name, phase=op.phase, reads=[new[t] for t in op.reads], writes=[new[t] for t in op.writes], duration=1)
    return b.build(outputs=(new[drawn.ops[-1].writes[0]],), carry=())


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_at_most_a_separator_a_level_and_what_an_op_reads_lies_there(seed, width):
    # our own account of the recursion: k + 1 results held, and one op's reads and results, at each level
    trace = unit_dag(60, seed, width)
    found, k, levels = scheduled(trace, 0)
    assert found is not None
    touched = max(len({*op.reads, *op.writes}) for op in trace.ops)
    inputs = sum(maker < 0 for maker in TraceIndex(trace).producer)
    assert found.peak() <= levels * (k + 1 + touched) + inputs
    assert found.rerun_count() <= len(trace.ops) * (k + 2) ** levels


@pytest.mark.parametrize("steps", [16, 64, 256, 1024])
def test_a_chain_takes_the_memory_and_no_more_runs_than_bisection(steps):
    """Extra steps of bisection: (l / 2) log2 l (Siskind and Pearlmutter 2018; our own count in `test_vlad`)."""
    found, k, _ = scheduled(uniform_chain(steps), 0)
    assert found is not None
    assert k == 2  # a ladder of forward and backward
    halvings = steps.bit_length() - 1
    assert found.peak() <= 2 * halvings + 2
    assert found.rerun_count() <= steps // 2 * halvings


def test_a_schedule_that_grows_too_long_is_given_up():
    trace = uniform_chain(64)
    found, _, _ = scheduled(trace, 0)
    assert found is not None
    count = found.rerun_count()
    assert scheduled(trace, 0, longest=count)[0] is not None
    assert scheduled(trace, 0, longest=count - 1)[0] is None


def test_what_may_go_stays_while_there_is_room_and_the_cheapest_bytes_go_first():
    b = TraceBuilder()
    dear, cheap = b.tensor("dear", 4), b.tensor("cheap", 4)
    wide = b.tensor("wide", 4)
    end = b.tensor("end", 1)
    b.op("long", writes=[dear], duration=9)
    b.op("make cheap", writes=[cheap], duration=1)
    b.op("make wide", reads=[], writes=[wide], duration=5)
    small = b.tensor("small", 1)
    b.op("shrink", reads=[wide], writes=[small], duration=1)
    b.op("join", reads=[dear, cheap, small], writes=[end], duration=1)
    trace = b.build(outputs=(end,), carry=())
    index = TraceIndex(trace)
    needs = Needs(index, 5, [True] * 5)
    tree = separators(decompose(needs.graph()))
    reruns = separator_schedule(needs, tree, [9, 1, 5, 1, 1], 10, 100)
    assert reruns == {4: [1]}
    assert schedule_of(index, reruns or {}).peak() == 10
    assert schedule_of(index, {}).peak() == 13


def test_needs_end_where_no_later_run_can_ask():
    trace = uniform_chain(3)  # f0 f1 f2 b2 b1 b0
    index = TraceIndex(trace)
    forward = [op.phase == "forward" for op in trace.ops]
    needs = Needs(index, 6, forward)
    # b1 reads f0's result, b2 f1's, which is made of f0's; nobody reads f2's
    assert [needs.until[t] for t in range(3)] == [4, 3, 2]
    assert needs.may_rerun == [True, True, True, False, False, False]
    assert needs.until[trace.tensor_id("b0.out")] == 6


def test_what_could_not_be_made_again_in_time_never_goes():
    b = TraceBuilder()
    w = b.tensor("w", 1, "input")
    a, c, new, end = b.tensor("a", 5), b.tensor("c", 5), b.tensor("new", 1, replaces=w), b.tensor("end", 1)
    b.op("read", reads=[w], writes=[a], duration=1)
    b.op("derive", reads=[a], writes=[c], duration=1)
    b.op("overwrite", reads=[w], writes=[new], duration=1)
    b.op("join", reads=[a, c, new], writes=[end], duration=1)
    trace = b.build(outputs=(end,), carry=())
    needs = Needs(TraceIndex(trace), 4, [True] * 4)
    assert needs.may_rerun == [False, True, False, False]
    found, _, _ = scheduled(trace, 0)
    assert found is not None
    assert {op for op, anchor in found.steps if anchor >= 0} <= {1}


def test_an_op_in_place_is_one_part_with_what_makes_what_it_overwrites():
    """A norm, its statistics, a sum in place over its result, a ReLU over that; then a result that two ops read."""
    b = TraceBuilder()
    x = b.tensor("x", 5, "input")
    mean, other, count = b.tensor("mean", 1), b.tensor("other", 5), b.tensor("count", 1)
    norm, twice = b.tensor("norm", 5), b.tensor("twice", 5)
    total = b.tensor("total", 5, replaces=norm)
    out, over = b.tensor("out", 5, replaces=total), b.tensor("over", 5, replaces=twice)
    end = b.tensor("end", 1)
    b.op("norm", reads=[x], writes=[norm, mean], duration=1)
    b.op("statistics", reads=[mean], writes=[count], duration=1)
    b.op("shortcut", reads=[x], writes=[other], duration=1)
    b.op("add_", reads=[norm, other], writes=[total], duration=1)
    b.op("relu_", reads=[total], writes=[out], duration=1)
    b.op("twice", reads=[x], writes=[twice], duration=1)
    b.op("look", reads=[twice], writes=[b.tensor("seen", 1)], duration=1)
    b.op("over_", reads=[twice], writes=[over], duration=1)
    b.op("join", reads=[out, over, mean, count], writes=[end], duration=1)
    trace = b.build(outputs=(end,), carry=())
    index = TraceIndex(trace)
    name = trace.op_columns.name
    needs = Needs(index, len(name), [True] * len(name))
    parts = [["shortcut"], ["norm", "add_", "relu_"], ["statistics"], ["twice"], ["look"], ["over_"], ["join"]]
    assert [[name[op] for op in part] for part in needs.parts] == parts
    assert needs.may_rerun == [True, True, True, False, True, False, False]
    assert [needs.fresh[1], needs.space[1]] == [6, 0]  # the result and the mean
    assert parts_in_place(index, len(name), [False] * len(name)) == [[op] for op in range(len(name))]
