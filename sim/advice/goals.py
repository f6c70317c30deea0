"""The three searches: the fastest batch, the least memory, the largest batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from sim.advice.candidates import candidates, lean, space
from sim.advice.ceiling import ceiling
from sim.advice.narrowing import STOPS, Search, by_ceiling, divisions, names_within
from sim.advice.question import Question
from sim.advice.state import state_of
from sim.advice.trials import BOUND, EQUAL, NOTHING, Row, Trials, best, fits, micro_batches, setting, speed
from sim.policies import load
from sim.search import most_tried

FLAT = 1.01
"""A doubled batch that brings less than this factor in speed, even with unlimited memory, is not worth more of them."""
FEW = 3
MEMORY_STEP = 0.01
SOME = 24
"""So many candidates are tried at one sample more than fits so far, before the next of them are chosen."""
MISSES = 2
"""So many further divisions into micro-batches that need no less memory end their search: the first keeps gradients."""


def at_one_batch(asked: Question, trials: Trials) -> list[Row]:
    """Whatever may be the fastest of all that the question leaves open, and all candidates; `sim.advice.narrowing`."""
    if asked.policies is None:
        return Search(asked, trials).run()
    rows: list[Row] = []
    for whole in by_ceiling(asked.variants, trials):
        for each in divisions(whole):
            if ceiling(each).speed <= _top(rows):
                break
            rows += trials.run(each, asked.policies, task=BOUND)
    return rows


def of_each_variant(search: Callable[[Question, Trials], list[Row]]) -> Callable[[Question, Trials], list[Row]]:
    """A search made for each combination of what the question leaves open, each with its part of the time left."""

    def searched(asked: Question, trials: Trials) -> list[Row]:
        rows: list[Row] = []
        ends, variants = trials.seconds, by_ceiling(asked.variants, trials)
        for i, each in enumerate(variants):
            trials.extend(trials.used_s + max(0.0, ends - trials.used_s) / (len(variants) - i))
            rows += search(each, trials)
        trials.extend(ends)
        return rows

    return searched


def fastest_batch(asked: Question, trials: Trials) -> list[Row]:
    """Powers of two with a few candidates each, then what lies around the best, then all candidates at the best.

    Where none of the few fits one sample, more candidates are run for that, and those that fit, by speed, take their
    place from there on. A batch is left out that could not win even with unlimited memory. Ends where nothing fits, or
    where another doubling would bring less than `FLAT` even with unlimited memory. Last the largest batch that fits.
    """
    rows: list[Row] = []
    unit = _unit(asked)
    names, _ = candidates_for(asked.changed(batch=unit))
    batch, above = unit, 0.0
    while batch <= most_tried(unit) and trials.left_s:
        each = asked.changed(batch=batch)
        most = ceiling(each).speed
        if most > _top(rows):
            new = _few(each, trials, most, names)
            if batch == unit and not any(map(fits, new)):
                first, rest = candidates_for(each)
                new = trials.run(each, first)
                new = new if any(map(fits, new)) else trials.run(each, rest)
                names = [str(row["policy"]) for row in sorted(filter(fits, new), key=speed, reverse=True)]
            rows += new
            if not any(map(fits, new)):
                break
        if most <= above * FLAT:
            break
        batch, above = batch * 2, most
    found = best(rows)
    if found is not None:
        around = {part // (4 * unit) * unit for part in (found["batch"] * 3, found["batch"] * 6)}
        for near in sorted(around - {row["batch"] for row in rows}):
            each = asked.changed(batch=near)
            if near and (most := ceiling(each).speed) > _top(rows):
                rows += _few(each, trials, most, names)
        found = best(rows)
        assert found is not None
        rows += at_one_batch(asked.changed(batch=found["batch"]), trials)
        first, rest = candidates_for(asked.changed(batch=found["batch"]))
        rows += _up(asked, trials, lean([*first, *rest]), found["batch"])[0]
    return rows


def _unit(asked: Question) -> int:
    """What batches are multiples of: the micro-batches that are asked for."""
    return micro_batches(asked.workload)


def _few(asked: Question, trials: Trials, most: float, names: Sequence[str]) -> list[Row]:
    """The first of these candidates, and the next `FEW` unless that is as fast as with unlimited memory."""
    rows = trials.run(asked, names[:1]) if names else []
    if _top(rows) >= most * (1 - EQUAL) or len(names) < 2:
        return rows
    return rows + trials.run(asked, names[1 : 1 + FEW])


def largest_batch(asked: Question, trials: Trials) -> list[Row]:
    """Doubling, then bisection, with the candidates that are likely to need the least memory; then all of the space.

    Each step tries those that fitted the batch below. Where the largest batch of some is known, others are tried at one
    more, `SOME` at a time, and what fits that goes on from there; what shares its parts with those that fit the most so
    far comes first. Policies that split the batch themselves are left out unless they are named: as with micro-batches,
    no batch is too large for them. What plans for long waits until all others have been tried; those that are likely to
    be fast run at the largest.
    """
    one = asked.changed(batch=_unit(asked))
    every = _every(one)
    split = {name for name in every if load(name).splits_batch} if asked.policies is None else set()
    quick = STOPS[0] * trials.seconds
    first = lean([name for part in candidates_for(one) for name in part])
    rows, most = _up(asked, trials, [name for name in first if name not in split], 0, quick)
    for stop_s in (quick, None):
        tried = {str(row["policy"]) for row in rows} | split
        left = [name for name in every if name not in tried]
        while left and trials.left_s:
            left = _like_the_largest(left, rows, most)
            more, most = _up(asked, trials, left[:SOME], most, stop_s)
            rows, left = rows + more, left[SOME:]
    if most:
        at = asked.changed(batch=most)
        ran = {row["policy"] for row in rows if row["batch"] == most}
        rows += trials.run(at, [name for name in candidates_for(at)[0] if name not in ran | split])
    return rows


def _like_the_largest(names: Sequence[str], rows: Sequence[Row], most: int) -> list[str]:
    """Some candidates; those first of which the last part, or the others, fit the largest batch so far elsewhere."""
    parts = [str(row["policy"]).rpartition(" + ") for row in rows if fits(row) and row["batch"] == most]
    bases, others = {base for base, _, _ in parts if base}, {other for _, _, other in parts}

    def unlike(name: str) -> int:
        base, _, other = name.rpartition(" + ")
        return -2 * (other in others) - (base in bases)

    return sorted(names, key=unlike)


def _up(
    asked: Question, trials: Trials, names: Sequence[str], fitting: int, stop_s: float | None = None
) -> tuple[list[Row], int]:
    """From a batch that fits: the largest that one of these candidates fits, by doubled steps, then bisection.

    stop_s: as for `Trials.each`.
    """
    rows: list[Row] = []
    unit = _unit(asked)
    most = most_tried(unit)
    step, failing = unit, most + unit
    while names and failing - fitting > unit and trials.left_s:
        middle = (fitting + failing) // (2 * unit) * unit
        batch = min(fitting + step, middle) if failing <= most else min(fitting + step, most)
        new = list(trials.each([(asked.changed(batch=batch), names, NOTHING)], lambda labels: True, stop_s=stop_s))
        rows += new
        held = [str(row["policy"]) for row in new if fits(row)]
        if held:
            names, fitting, step = held, batch, step * 2
        elif len(new) < len(names):  # for lack of time
            break
        else:
            failing = batch
    return rows, fitting


def least_memory(asked: Question, trials: Trials) -> list[Row]:
    """Bisection with the candidates that are likely to need the least memory; then all of the space; then what is slow.

    The first are tried with ever more micro-batches until these bring nothing `MISSES` times in a row, the others with
    as many as have needed the least. Each step tries those that fitted the budget above. Where the least of some is
    known, others are tried at a little less, and what fits that goes on from there. What plans for long waits until all
    others have been tried.
    """
    rows: list[Row] = []
    quick = STOPS[0] * trials.seconds
    ways, missed = divisions(asked), 0
    least = ways[-1]
    for each in ways:
        lower = _below(each, rows)
        found = _down(lower, trials, lean([name for part in candidates_for(lower) for name in part]), quick)
        rows += found
        if any(map(fits, found)):
            least, missed = each, 0
        elif any(map(fits, rows)):
            missed += 1
        if missed == MISSES or not trials.left_s:
            break
    others = [] if any(map(fits, rows)) else ways[:-1]
    for each, stop_s in product((least, *others), (quick, None)):
        lower = _below(each, rows)
        tried = {str(row["policy"]) for row in rows if setting(row) == setting(each.workload)}
        left = [name for name in _every(lower) if name not in tried]
        rows += _down(lower, trials, _by_state(left, rows), stop_s)
    return rows


def _by_state(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Some candidates, those first that share their policies of state with what has needed the least so far."""
    least: dict[str, int] = {}
    for row in filter(fits, rows):
        state = str(row["policy"]).rpartition(" + ")[0]
        least[state] = min(least.get(state, int(row["peak_bytes"])), int(row["peak_bytes"]))
    return sorted(names, key=lambda name: least.get(name.rpartition(" + ")[0], float("inf")))


def _below(asked: Question, rows: Sequence[Row]) -> Question:
    """The question with a little less memory than the least that has been found so far."""
    peaks = [int(row["peak_bytes"]) for row in rows if fits(row)]
    return replace(asked, budget=int(min(peaks) * (1 - MEMORY_STEP))) if peaks else asked


def _every(asked: Question) -> list[str]:
    """The candidates, and all else that a search at one batch is over."""
    first, rest = candidates_for(asked)
    if asked.policies is not None:
        return [*first, *rest]
    names = names_within(space(), state_of(asked.trace, asked.limited))
    return list(dict.fromkeys([*first, *rest, *(name for each in names.values() for name in each.values())]))


def _down(asked: Question, trials: Trials, names: Sequence[str], stop_s: float | None) -> list[Row]:
    """From a budget: the least in which one of these candidates runs, by bisection. stop_s: as for `Trials.each`."""
    rows: list[Row] = []
    budget, low = asked.limited.home(0).capacity, 0
    while names and trials.left_s and budget > low:
        new = list(trials.each([(replace(asked, budget=budget), names, NOTHING)], lambda labels: True, stop_s=stop_s))
        rows += new
        held = [row for row in new if fits(row)]
        if held:
            names, least = [str(row["policy"]) for row in held], min(int(row["peak_bytes"]) for row in held)
        elif len(rows) == len(new) or len(new) < len(names):  # nothing fits, or for lack of time
            break
        else:
            low = budget
        if least - low <= MEMORY_STEP * least:
            break
        budget = (low + least) // 2
    return rows


def candidates_for(asked: Question) -> tuple[list[str], list[str]]:
    """The candidates to try first, and the rest: those that were named, or all that may help."""
    if asked.policies is not None:
        return list(asked.policies), []
    return candidates(state_of(asked.trace, asked.limited))


def _top(rows: Sequence[Row]) -> float:
    return max((speed(row) for row in rows if fits(row)), default=0.0)
