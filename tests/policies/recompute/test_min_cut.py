"""Min-cut partitioning: the lightest set to keep, against all subsets; and what PyTorch says of it."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from itertools import chain as joined
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import PolicyError
from sim.solvers.cuts import Joint
from sim.solvers.flow import Flow
from sim.solvers.joint_graph import CHEAP, INTENSIVE, NEVER_NEEDED, JointGraph, joint_graph
from sim.solvers.partition import AGGRESSIVE, Bans, Partitioner
from sim.solvers.schedule import TraceIndex
from sim.trace import Trace, TraceBuilder
from workloads import transformer
from workloads.synthetic import random_dag, uniform_chain


def whole(trace) -> JointGraph:
    index = TraceIndex(trace)
    joint = Joint(index)
    return joint_graph(index, joint.forward, set(joint.backward))


def weight_saved(partitioner: Partitioner, again: Collection[int]) -> int | None:
    """What it weighs to recompute just these nodes; None where one that can't be saved would have to be."""
    graph = partitioner.graph
    readers = {*again, *(i for i, backward in enumerate(graph.backward) if backward)}
    saved = {a for i in readers for a in graph.nodes[i].arguments if a not in readers}
    return None if any(graph.nodes[i].tensor < 0 for i in saved) else sum(map(partitioner.weight, saved))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ops=st.integers(2, 9), bans=st.sampled_from((Bans(), AGGRESSIVE)))
def test_saved_tensors_weigh_least_among_all_choices(seed, ops, bans):
    partitioner = Partitioner(whole(random_dag(ops, seed, weights=0.3)))
    saved, banned = partitioner.cut(bans)
    nodes = partitioner.graph.nodes
    free = [i for i in range(len(nodes)) if i not in banned and not partitioner.graph.backward[i]]
    subsets = joined.from_iterable(combinations(free, n) for n in range(len(free) + 1))
    weights = [weight for subset in subsets if (weight := weight_saved(partitioner, subset)) is not None]
    assert sum(map(partitioner.weight, saved)) == min(weights)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_minimum_cut_costs_the_least_of_all_cuts(seed):
    """Against all ways to divide the nodes; capacities of more than 64 bits; the sink's side is the smallest."""
    draw = random.Random(seed)
    count = draw.randint(3, 8)
    edges = [(a, b, draw.choice((1, 2, 3)) << 70) for a, b in permutations(range(count), 2) if draw.random() < 0.5]
    flow = Flow(count)
    for edge in edges:
        flow.add(*edge)
    side = flow.sink_side()
    cost = {}
    for inner in joined.from_iterable(combinations(range(2, count), n) for n in range(count - 1)):
        sink = {1, *inner}
        cost[frozenset(sink)] = sum(c for a, b, c in edges if a not in sink and b in sink)
    least = min(cost.values())
    smallest = frozenset.intersection(*(sink for sink, price in cost.items() if price == least))
    assert {i for i, there in enumerate(side) if there} == smallest


def test_what_must_not_be_cut_anywhere_is_refused():
    flow = Flow(3)
    flow.add(0, 2, None)
    flow.add(2, 1, None)
    with pytest.raises(OverflowError, match="never cut"):
        flow.sink_side()


def at_sizes(trace: Trace, **sizes: list[int]) -> Trace:
    """The trace with other bytes of its tensors, or FLOPs."""
    tensors = replace(trace.tensor_columns, bytes=np.array(sizes["tensors"]))
    ops = replace(trace.op_columns, flops=np.array(sizes["flops"]))
    return Trace(tensors, ops, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, like=trace)


@pytest.mark.parametrize("runtimes", [None, lambda op: op + 2.0])
def test_a_graph_at_other_sizes_is_that_of_the_trace(runtimes):
    """A join, as large as what it reads, a product, and a norm of two results, which read it."""
    b = TraceBuilder()
    x, y = b.tensor("x", 40, "input"), b.tensor("y", 60, "input")
    made = [b.tensor(name, 100) for name in ("joined", "product", "rows", "deviations", "out")]
    b.op("join", "copy", reads=[x, y], writes=made[:1])
    b.op("product", "matmul", reads=made[:1], writes=made[1:2], flops=5)
    b.op("norm", "norm", reads=made[1:2], writes=made[2:4], flops=7, random=True)
    b.op("out", "elementwise", reads=[made[2], made[3]], writes=made[4:], phase="backward", flops=1)
    trace = b.build(outputs=made[4:], carry=())

    def graph(trace: Trace) -> JointGraph:
        index = TraceIndex(trace)
        joint = Joint(index)
        return joint_graph(index, joint.forward, set(joint.backward), runtimes)

    first = graph(trace)
    first.users, first.distance  # noqa: B018 (kept for those that follow)
    other = at_sizes(trace, tensors=[10, 20, 30, 7, 8, 9, 11], flops=[0, 2**40, 3, 4])
    new, want = first.at(TraceIndex(other), runtimes), graph(other)
    assert new is not None
    assert new.users is first.users
    for name in ("nodes", "backward", "leaves", "size", "runtime", "users", "distance", "order", "entering"):
        assert getattr(new, name) == getattr(want, name)
    assert new.size != first.size
    apart = at_sizes(trace, tensors=[10, 20, 31, 7, 8, 9, 11], flops=[0, 2, 3, 4])  # no longer all that it reads
    assert first.at(TraceIndex(apart), runtimes) is None


def cheap_net(count: int):
    """Elementwise ops on one input, each of which backward needs."""
    b = TraceBuilder()
    x = b.tensor("x", 100, "input")
    made, last = [], x
    for i in range(count):
        made.append(b.tensor(f"y{i}", 100))
        b.op(f"f{i}", "elementwise", reads=[last], writes=[made[-1]], duration=1)
        last = made[-1]
    g = b.tensor("g", 100, "temporary")
    b.op("loss", "elementwise", phase="backward", reads=[last], writes=[g], duration=1)
    for i in reversed(range(count)):
        new = b.tensor(f"g{i}", 100, "temporary")
        b.op(f"b{i}", "elementwise", phase="backward", reads=[g, made[i]], writes=[new], duration=1)
        g = new
    return b.build(outputs=[g], carry=())


def test_a_net_of_cheap_ops_keeps_its_inputs_only(run):
    # an input lies twice as far from backward as what a kernel writes: chains of a few ops alone are recomputed
    facts = run(cheap_net(5), "min_cut")
    assert facts.result.plan.notes["kept_bytes"] == 0
    assert sorted(facts.rerun) == [f"f{i}" for i in range(5)]


def test_each_op_runs_again_at_most_once_and_only_cheap_ones_do(run):
    trace = transformer("gpt2-small", batch=1, sequence=128, dropout=0.1, attention="eager")
    for aggressive in (False, True):
        facts = run(trace, "min_cut", aggressive=aggressive)
        ops = [trace.ops[trace.op_id(name)] for name in facts.rerun]
        assert ops
        assert len(set(facts.rerun)) == len(facts.rerun)
        assert all(not op.random and op.phase == "forward" and op.kind not in INTENSIVE for op in ops)
        assert aggressive or all(op.kind in CHEAP for op in ops)


def test_less_is_kept_than_autograd_saves_and_less_still_when_aggressive(run):
    trace = transformer("gpt2-small", batch=2, sequence=512, dropout=0.1, attention="eager")
    joint = Joint(TraceIndex(trace))
    saved = joint.from_saved(joint.wanted).bytes
    usual, more = run(trace, "min_cut"), run(trace, "min_cut", aggressive=True)
    kept = [saved, *(f.result.plan.notes["kept_bytes"] for f in (usual, more))]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] < kept[0]
    assert more.peak < usual.peak < run(trace, "keep_all").peak


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), ops=st.integers(2, 25))
def test_time_is_the_plain_runs_and_that_of_what_runs_again(run, seed, ops):
    trace = random_dag(ops, seed)
    facts = run(trace, "min_cut", aggressive=True)
    again = sum(trace.ops[trace.op_id(name)].duration or 0 for name in facts.rerun)
    assert facts.time == run(trace, "keep_all").time + again


def test_distance_counts_ops_to_the_nearest_backward_op():
    trace = uniform_chain(4)
    graph = whole(trace)
    name = trace.tensor_columns.name
    distance = {name[node.tensor]: graph.distance[i] for i, node in enumerate(graph.nodes) if not graph.backward[i]}
    # b3 reads f2's result, b2 f1's, b1 f0's; nobody reads f3's
    assert [distance[f"f{i}.out"] for i in range(4)] == [1, 1, 1, NEVER_NEEDED]


def test_no_backward_is_refused(run):
    b = TraceBuilder()
    y = b.tensor("y", 1)
    b.op("alone", writes=[y])
    with pytest.raises(PolicyError, match="backward"):
        run(b.build(outputs=[y]), "min_cut")
