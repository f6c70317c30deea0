"""Leaving reruns out: by hand, against all subsets, and never against the plan or the budget."""

from __future__ import annotations

import random
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.solvers.schedule import Schedule, TraceIndex, schedule_of
from sim.solvers.unnecessary import remove_unnecessary
from sim.trace import TraceBuilder
from tests.solvers.reruns import small_graphs
from workloads.synthetic import uniform_chain


def time_of(found: Schedule, cost) -> int:
    return sum(cost[op] for op, anchor in found.steps if anchor >= 0)


def draw_runs(trace, seed: int) -> Schedule:
    draw = random.Random(seed)
    reruns = {t: [i for i in range(t) if draw.random() < 0.4] for t in range(len(trace.ops)) if draw.random() < 0.5}
    return schedule_of(TraceIndex(trace), reruns, prune=True)


@settings(max_examples=150)
@given(trace=small_graphs(), seed=st.integers(0, 2**32), share=st.floats(0.3, 1.3))
def test_never_slower_and_never_above_both_the_budget_and_the_plan(trace, seed, share):
    found, cost = draw_runs(trace, seed), [op.duration or 0 for op in trace.ops]
    budget = int(share * found.peak())
    better = remove_unnecessary(found, cost, budget)
    assert time_of(better, cost) <= time_of(found, cost)
    assert better.peak() <= max(found.peak(), budget)
    if budget >= schedule_of(found.index, {}).peak():
        assert better.rerun_count() == 0


def test_what_is_held_leaves_no_room():
    """`held` is read once, but the program lets it go only at `narrow`: `kept` cannot lie beside it and `wide`."""
    b = TraceBuilder({"model": "held"})
    sizes = {"kept": 4, "held": 4, "used": 1, "wide": 5, "narrow": 1, "end": 1}
    kept, held, used, wide, narrow, end = (b.tensor(name, size) for name, size in sizes.items())
    b.op("keep", writes=[kept], duration=1)
    b.op("hold", writes=[held], duration=1)
    b.op("use", reads=[held], writes=[used], duration=1)
    b.op("widen", reads=[used], writes=[wide], duration=1)
    b.op("narrow", reads=[wide], writes=[narrow], duration=1, releases=[held])
    b.op("join", reads=[kept, narrow], writes=[end], duration=1)
    index = TraceIndex(b.build(outputs=(end,), carry=()))
    reruns = {5: [0]}
    assert (schedule_of(index, {}).peak(), schedule_of(index, reruns).peak()) == (14, 10)
    assert remove_unnecessary(schedule_of(index, reruns), [1] * 6, 13).peak() == 10
    assert remove_unnecessary(schedule_of(index, reruns), [1] * 6, 14).rerun_count() == 0


def test_an_operand_does_not_take_the_place_of_what_is_made_from_it():
    """Both `a` and `b` are recomputed for `end`; one fits beside `other`, and `b` alone is needed."""
    b = TraceBuilder({"model": "operand"})
    first, second, other, end = (b.tensor(name, 1) for name in ("a", "b", "other", "end"))
    b.op("a", writes=[first], duration=0)
    b.op("b", reads=[first], writes=[second], duration=0)
    b.op("other", writes=[other], duration=0)
    b.op("end", reads=[second], writes=[end], duration=0)
    index = TraceIndex(b.build(outputs=(end,), carry=()))
    twice = schedule_of(index, {3: [0, 1]}, prune=True)
    assert twice.rerun_count() == 2
    assert remove_unnecessary(twice, [0] * 4, 2).rerun_count() == 0


def test_nearly_always_the_best_subset_of_the_reruns_is_left():
    best = worse = 0
    for seed in range(60):
        trace = uniform_chain(6) if seed % 2 else _fan(seed)
        cost = [op.duration or 0 for op in trace.ops]
        found = draw_runs(trace, seed)
        reruns = [(op, anchor) for op, anchor in found.steps if anchor >= 0]
        if not 0 < len(reruns) <= 8:
            continue
        least, most = sorted((found.peak(), schedule_of(found.index, {}).peak()))
        budget = (least + most) // 2
        times = []
        for count in range(len(reruns) + 1):
            for kept in combinations(reruns, count):
                subset: dict[int, list[int]] = {}
                for op, anchor in kept:
                    subset.setdefault(anchor, []).append(op)
                some = schedule_of(found.index, subset, prune=True)
                if some.peak() <= max(budget, found.peak()):
                    times.append(time_of(some, cost))
        mine = time_of(remove_unnecessary(found, cost, budget), cost)
        assert mine >= min(times)
        best += mine == min(times)
        worse += mine > min(times)
    assert best > 15
    assert best > 3 * worse


def _fan(seed: int):
    """Results of several sizes that a last op reads all together."""
    draw = random.Random(seed)
    b = TraceBuilder()
    made: list[int] = []
    for i in range(7):
        t = b.tensor(f"t{i}", draw.randint(1, 6))
        b.op(f"o{i}", reads=made[-1:], writes=[t], duration=draw.randint(1, 9))
        made.append(t)
    end = b.tensor("end", 1)
    b.op("join", reads=made, writes=[end], duration=1)
    return b.build(outputs=(end,), carry=())


def test_of_two_that_would_fit_singly_the_dearer_byte_stays():
    b = TraceBuilder()
    sizes = {"cheap": 4, "dear": 4, "wide": 6, "end": 1}
    cheap, dear, wide, end = (b.tensor(name, size) for name, size in sizes.items())
    b.op("make cheap", writes=[cheap], duration=2)
    b.op("long", writes=[dear], duration=7)
    b.op("make wide", reads=[cheap, dear], writes=[wide], duration=1)
    small = b.tensor("small", 1)
    b.op("shrink", reads=[wide], writes=[small], workspace=5, duration=1)
    b.op("join", reads=[cheap, dear, small], writes=[end], duration=1)
    trace = b.build(outputs=(end,), carry=())
    found = schedule_of(TraceIndex(trace), {4: [0, 1]})
    cost = [op.duration or 0 for op in trace.ops]
    # while `shrink` runs: wide 6, small 1, workspace 5, and what stays
    assert found.peak() == 14  # `make wide`
    assert remove_unnecessary(found, cost, 15).steps == found.steps
    assert time_of(remove_unnecessary(found, cost, 16), cost) == 2
    assert time_of(remove_unnecessary(found, cost, 20), cost) == 0


def test_what_ran_again_only_for_what_stays_is_left_out_with_it():
    trace = uniform_chain(8)
    index = TraceIndex(trace)
    # f0, f1, f2 for f2's result alone
    found = schedule_of(index, {trace.op_id("b3"): [0, 1, 2]}, prune=True)
    assert found.rerun_count() == 3
    kept = remove_unnecessary(found, [1] * 16, 8)
    assert kept.rerun_count() == 0
