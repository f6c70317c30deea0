"""Griewank, Walther 2000: the table t(l, c) of forward steps, as the engine counts them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import comb

import pytest

from sim.errors import PolicyError
from sim.solvers.reversal import binomial_reversal, binomial_split, extra_steps, repetitions
from workloads.synthetic import chain, w1

TABLE = [
    (4, 2, 4),
    (10, 2, 20),
    (10, 3, 15),
    (20, 3, 45),
    (32, 4, 75),
    (50, 5, 122),
    (56, 3, 210),
    (64, 6, 156),
    (96, 8, 233),
    (100, 3, 490),
    (100, 10, 222),
]


@cache
def least(steps: int, slots: int) -> int:
    """The recurrence over all splits."""
    if steps == 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(j + least(steps - j, slots - 1) + least(j, slots) for j in range(1, steps))


def unit_chain(steps: int):
    return chain([1] * steps, [2] * steps, [1] * (steps + 1), [1] * steps)


@pytest.mark.parametrize(("steps", "slots", "extra"), TABLE)
def test_engine_counts_the_printed_number_of_steps(steps, slots, extra, run):
    facts = run(unit_chain(steps), "revolve", slots=slots)
    assert len(facts.rerun) == extra == extra_steps(steps, slots)
    assert facts.time == 3 * steps + extra


def test_closed_form_equals_the_recurrence():
    for steps in range(1, 60):
        for slots in range(1, 10):
            assert extra_steps(steps, slots) == least(steps, slots)


def test_every_split_is_optimal():
    for steps in range(2, 60):
        for slots in range(2, 9):
            j = binomial_split(steps, slots)
            assert j + least(steps - j, slots - 1) + least(j, slots) == least(steps, slots)


@pytest.mark.parametrize(("steps", "slots"), [(10, 2), (35, 4), (50, 5), (7, 1), (5, 9)])
def test_schedule_holds_no_more_states_than_slots_and_repeats_no_step_too_often(steps, slots):
    schedule = binomial_reversal(steps, slots)
    kept, where = {0}, 0
    reruns: Counter[int] = Counter()
    for at, (kind, i) in enumerate(schedule):
        if kind == "B":
            kept.discard(i)
            continue
        if i != where:  # restored from a kept state
            assert i in kept
        reruns[i] += 1
        where = i + 1
        # the state before `where` is kept if a later run begins there, and it is not reached again before
        later = [step for kind, step in schedule[at + 1 :] if kind == "F"]
        if later[:1] == [where]:
            later = later[1:]
        if where in later and i not in later[: later.index(where)]:
            kept.add(where)
        assert len(kept) <= slots
    # one advance per repetition, and the run that saves
    assert max(reruns.values()) <= repetitions(steps, slots) + 1
    assert [i for kind, i in schedule if kind == "B"] == list(reversed(range(steps)))


@pytest.mark.parametrize(("slots", "r"), [(2, 3), (3, 3), (4, 2), (5, 2)])
def test_full_tables_cost_r_l_c_over_c_plus_1(slots, r):
    steps = comb(slots + r, slots)
    assert extra_steps(steps, slots) * (slots + 1) == r * steps * slots


def test_fewer_slots_take_less_memory_and_more_time(run):
    found = [run(unit_chain(40), "revolve", slots=c) for c in (1, 2, 3, 5, 8, 40)]
    peaks, times = [f.peak for f in found], [f.time for f in found]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    assert times == sorted(times, reverse=True)


def test_one_slot_holds_one_stage(run):
    # x0, the input and output of the step that is undone, and two gradients or a gradient and a state
    assert run(unit_chain(30), "revolve", slots=1).peak == 4


def test_without_slots_the_most_that_fit_the_budget_are_taken(run):
    trace = unit_chain(40)
    for budget in (5, 8, 12, 30):
        facts = run(trace, "revolve", budget)
        slots = facts.result.plan.notes["slots"]
        assert facts.peak <= budget
        assert run(trace, "revolve", slots=slots + 1).peak > budget


def test_a_transformer_like_stack_falls_to_few_activations(run):
    plain, facts = run(w1(6), "keep_all"), run(w1(6), "revolve", slots=3)
    assert facts.peak < plain.peak / 2


def test_wrong_parameters_and_missing_backward_are_refused(run):
    with pytest.raises(PolicyError, match="slots is 0"):
        run(unit_chain(4), "revolve", slots=0)
    from sim.trace import TraceBuilder

    b = TraceBuilder()
    t = b.tensor("x", 1, "input")
    for i in range(3):
        new = b.tensor(f"y{i}", 1)
        b.op(f"f{i}", reads=[t], writes=[new])
        t = new
    with pytest.raises(PolicyError, match="backward"):
        run(b.build(outputs=[t]), "revolve", slots=1)
