"""Min-cut partitioning: the lightest set to keep, against all subsets; and what PyTorch says of it."""

from __future__ import annotations

from itertools import chain as joined
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import PolicyError
from sim.solvers.cuts import CHEAP, Joint
from sim.solvers.runs import Ledger
from sim.trace import TraceBuilder
from workloads import transformer
from workloads.synthetic import random_dag, uniform_chain


def weight_kept(joint: Joint, again) -> float:
    return sum(joint.weight(t) for t in joint.kept(again))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ops=st.integers(2, 9))
def test_kept_tensors_weigh_least_among_all_choices(seed, ops):
    joint = Joint(Ledger(random_dag(ops, seed, weights=0.3)))
    banned = joint.dear(aggressive=True)
    free = [op for op in joint.forward if op not in banned]
    subsets = joined.from_iterable(combinations(free, n) for n in range(len(free) + 1))
    best = min(weight_kept(joint, subset) for subset in subsets)
    # weights are rounded to a 2**29-th of their sum
    assert weight_kept(joint, joint.cut(banned)) == pytest.approx(best, rel=1e-4, abs=1)


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
        assert all(op.kind in CHEAP and not op.random and op.phase == "forward" for op in ops)


def test_less_is_kept_than_autograd_saves_and_less_still_when_aggressive(run):
    trace = transformer("gpt2-small", batch=2, sequence=512, dropout=0.1, attention="eager")
    saved = Joint(Ledger(trace)).kept_bytes(())
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
    joint = Joint(Ledger(trace))
    # b3 reads f2's result, b2 f1's, b1 f0's; nobody reads f3's
    assert [joint.distance.get(trace.tensor_id(f"f{i}.out")) for i in range(4)] == [1, 1, 1, None]
    assert [trace.op_columns.name[op] for op in joint.forward] == ["f0", "f1", "f2"]


def test_no_backward_is_refused(run):
    b = TraceBuilder()
    y = b.tensor("y", 1)
    b.op("alone", writes=[y])
    with pytest.raises(PolicyError, match="backward"):
        run(b.build(outputs=[y]), "min_cut")
