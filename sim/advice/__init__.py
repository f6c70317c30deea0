"""What should I do with this model on this machine? A search over policies and compositions, and its answer.

    from sim.advice import advise

    print(advise("gpt2-xl", "mt3000_survey", batch=1).text())

The candidates are all policies that plan quickly, and compositions of those that manage state with those that manage
activations (`candidates`). Each is run as a cell of a sweep, in a process of its own and within the time of the search.
Nothing is estimated: whatever the answer names has been simulated.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from sim.advice.answer import Advice, Choice
from sim.advice.ceiling import ceiling
from sim.advice.goals import at_one_batch, fastest_batch, largest_batch, least_memory, of_each_variant
from sim.advice.layouts import Devices, with_layout
from sim.advice.narrowing import divisions
from sim.advice.question import GOALS, Question, question
from sim.advice.reasons import Change, Flip, changes, flips
from sim.advice.state import State, state_of
from sim.advice.trials import BOUND, EQUAL, OnRow, Row, Trials, best, fits, micro_batches, speed, way
from sim.arguments import explained
from sim.errors import TiersimError, closest
from sim.layout_search import Found
from sim.policies import load
from sim.trace.graph import Trace
from sim.units import parse_bytes

__all__ = ["GOALS", "Advice", "Change", "Devices", "Flip", "Question", "State", "advise"]


LAYOUTS = 0.5
"""The part of the search's time that goes to layouts over several devices."""
ASIDE = 0.25
"""The part of the search's time that is kept for the reasons: what would change the answer, or make it fit.

Where an op alone holds more than the memory, the other part is kept: few policies split ops, so that a change of the
job is the likely answer."""


@explained
def advise(
    workload: str | os.PathLike[str] | Trace | Callable[[int], Trace],
    platform: str | os.PathLike[str],
    *,
    goal: str = "throughput",
    batch: int | None = None,
    budget: int | str | None = None,
    figures: Mapping[str, str] | None = None,
    policies: Sequence[str] | None = None,
    seconds: float = 60.0,
    jobs: int | None = None,
    seed: int = 0,
    on_row: OnRow | None = None,
    on_state: Callable[[State], None] = lambda state: None,
    devices: int = 1,
    **axes: Any,
) -> Advice:
    """Search for the policy, or composition, to use for a workload on a machine.

    workload: the name of a model, the path of a Hugging Face `config.json`, a trace, or a function that makes the
        trace of a batch, as of `largest_batch`: `lambda batch: capture(...)`.
    platform: the name or file of a hardware profile.
    goal: `throughput`: the most samples per second, at `batch` or, where none is given, at the best batch.
        `memory`: the least memory in which the job runs. `batch`: the largest batch that fits.
    budget: bytes of each device, as an int, text such as "7 GB", or a part of the unconstrained peak ("80%").
    figures: figures of the profile to change, by path.
    policies: names of policies and compositions, the only ones to try; None for all that may help.
    seconds: wall-clock time of the search; runs that were started may take half as long again.
    jobs: processes; None for one per processor.
    seed: of policies that draw random numbers.
    on_row: called with each finished run, how many of its round have ended, and how many it has.
    on_state: called with what of the job is there before any activation, before anything has run.
    devices: how many are used. With several `batch` is that of all of them; the first part of the search's time goes to
        layouts (`sim.layout_search`), the rest to the policies in the best of them, and the goal is `throughput`.
    axes: options of `workloads.transformer`: `sequence`, `precision`, … Several values of `precision` or `optimizer`,
        with commas between them, or `any`, leave these to the search, which never changes them otherwise.

    Raises PolicyError for an unknown policy; TiersimError for an unknown goal, or several devices without a batch;
    LayoutError where no layout has so many; ProfileError, WorkloadError, UnitError, StudyError for other mistakes;
    Interrupted on Ctrl-C, with the answer so far, where some run fits.
    """
    if not 0 < seconds < float("inf"):
        raise TiersimError(f"seconds: value {seconds:g}: expected a finite number above 0{closest(seconds, 1)}")
    if jobs is not None and jobs < 1:
        raise TiersimError(f"jobs: value {jobs}: expected at least 1{closest(jobs, 1)}")
    if callable(workload) and (batch is not None or goal == "memory"):
        workload, batch = workload(1 if batch is None else batch), None
    fixed = isinstance(workload, Trace) or batch is not None or goal == "memory"
    if goal == "batch" and (isinstance(workload, Trace) or batch is not None):
        raise TiersimError(
            "goal 'batch': expected a model by name, or a function of the batch, and no batch: the search chooses it"
        )
    if devices < 1:
        raise TiersimError(f"devices: value {devices}: expected at least 1{closest(devices, 1)}")
    for each in policies or ():
        load(each)
    if devices > 1 and (goal != "throughput" or not fixed):
        raise TiersimError(f"devices: for {devices} of them give the batch of all, and goal 'throughput'")
    if not isinstance(workload, Trace):
        axes = {**axes, "batch": micro_batches(axes) if batch is None else batch}
    elif batch is not None:
        axes = {**axes, "batch": batch}  # refused, with a word
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tiersim-advice-") as folder:
        rest = {"goal": goal, "seed": seed, "policies": None if policies is None else tuple(policies)}
        asked = question(workload, platform, Path(folder), axes=axes, figures=figures or {}, **rest)
        if budget is not None:
            asked = _limited(asked, budget, fixed)
        over = None
        if devices > 1:
            asked, over = with_layout(asked, devices, LAYOUTS * seconds)
            seconds = max(seconds / 2, seconds - (time.monotonic() - began))
            began = time.monotonic()
        first = [asked.variants[0]] if over is not None else asked.variants
        state = min((state_of(each.trace, each.limited) for each in first), key=lambda state: state.bytes)
        on_state(state)
        search = {"batch": of_each_variant(largest_batch), "memory": of_each_variant(least_memory)}.get(
            goal, at_one_batch if fixed else of_each_variant(fastest_batch)
        )
        aside = 1 - ASIDE if all(divisions(each)[-1].exceeds for each in asked.variants) else ASIDE
        with closing(Trials((1 - aside) * seconds, jobs, on_row, began)) as trials:
            try:
                if over is not None and over.is_stopped:
                    raise KeyboardInterrupt  # the search over layouts kept what it had; the answer is made of that
                rows = search(asked, trials)
                if not (rows or trials.left_s or trials.skipped):
                    trials.skipped_variants += 1  # not even the first run had time
                rows += _of_the_layout(first[0], over, rows, trials)
                trials.extend(min(seconds, trials.used_s + ASIDE * seconds) if any(map(fits, rows)) else seconds)
                answer = _answer(asked, state, list({id(row): row for row in rows}.values()), trials)
                return replace(answer, devices=over)
            except KeyboardInterrupt:
                trials.stop()
                _of_the_layout(first[0], over, trials.of_the_job, trials)
                rows = trials.of_the_job
                if not any(map(fits, rows)):
                    raise
                answer = _answer(asked, state, rows, trials)
                raise Interrupted(replace(answer, devices=over, stopped=True)) from None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search of which some run fits.

    advice: the answer from the runs so far.
    """

    def __init__(self, advice: Advice) -> None:
        self.advice = advice
        super().__init__(f"interrupted after {len(advice.rows)} runs")


def _of_the_layout(asked: Question, over: Devices | None, rows: Sequence[Row], trials: Trials) -> list[Row]:
    """The run that the search over layouts found to be the fastest, where none of the rows is as fast; else nothing."""
    found = None if over is None else over.search.best
    return [trials.at_any_rate(asked, found.policy)] if found is not None and _is_slower(best(rows), found) else []


def _is_slower(row: Row | None, found: Found) -> bool:
    """Whether a run, if there is one, is slower than what a search over layouts has found."""
    return row is None or (found.makespan_ns is not None and row["makespan_ns"] > (1 + EQUAL) * found.makespan_ns)


def _limited(asked: Question, budget: int | str, fixed: bool) -> Question:
    if isinstance(budget, str) and budget.strip().endswith("%"):
        if not fixed:
            raise TiersimError(f"budget {budget!r}: a part of the unconstrained peak needs a batch")
        share = float(budget.strip().removesuffix("%")) / 100
        return replace(asked, budget=int(share * ceiling(asked).peak))
    return replace(asked, budget=parse_bytes(budget) if isinstance(budget, str) else int(budget))


def _answer(asked: Question, state: State, rows: Sequence[Row], trials: Trials) -> Advice:
    """The best of the rows by the goal, and the reasons."""
    winner = _winner(asked, rows)
    if winner is None:
        is_tried = rows or not trials.skipped or asked.exceeds  # else nothing is known yet
        is_known = asked.parallel is None and is_tried
        found, least = changes(asked, trials) if is_known else ([], None)
        return Advice(asked, state, tuple(rows), None, None, ceiling(asked), changes=tuple(found), least=least,
                      skipped=trials.skipped, elapsed_s=trials.used_s)  # fmt: skip
    if asked.layouts:
        asked = next(each for each in asked.variants if each.layout == winner["parallel"])
    picked = {name: winner[name] for name in asked.open}
    whole = asked if asked.is_fixed else asked.changed(batch=winner["batch"], **picked)
    chosen = whole.changed(micro_batches=winner["micro_batches"]) if micro_batches(winner) > 1 else whole
    others = [row for row in rows if way(row) != way(winner) and row.get("batch") == winner.get("batch")
              and row["budget"] == winner["budget"]]  # fmt: skip
    skipped = trials.skipped
    near = _near(chosen, winner, trials)
    flipped, tried, known = flips(chosen, winner, rows, trials) if asked.goal == "throughput" else ([], 0, 0)
    return Advice(
        question=whole,
        state=state_of(whole.trace, whole.limited) if whole.open or whole.parallel else state,
        rows=tuple(rows),
        best=winner,
        runner_up=best(others),
        ceiling=ceiling(whole),
        flips=tuple(flipped),
        choices=tuple(_choices(whole, rows)),
        figures_tried=tried,
        figures_all=known,
        skipped=skipped,
        near=near,
        elapsed_s=trials.used_s,
    )


def _choices(asked: Question, rows: Sequence[Row]) -> Iterator[Choice]:
    """What was found with each combination of what the question leaves open, at the batch that was chosen."""
    for each in asked.variants if asked.open else ():
        options = {name: str(each.workload[name]) for name in asked.open}
        same = (row for row in rows if row.get("batch") == asked.workload.get("batch")
                and all(row[name] == value for name, value in options.items()))  # fmt: skip
        yield Choice(options, ceiling(each), best(same))


def _near(chosen: Question, winner: Row, trials: Trials) -> str:
    """How near the best is to the least that any plan takes; "" where no time was left to tell."""
    if "above_bound" not in winner and winner["wall_s"] < trials.left_s:
        found = trials.run(chosen, [str(winner["policy"])], task=BOUND, apart=True)
        winner = found[0] if found else winner
    if "above_bound" not in winner or chosen.bound is None:
        return ""
    return chosen.bound.line_of(winner["above_bound"], winner["outside_bound"])


def _winner(asked: Question, rows: Sequence[Row]) -> Row | None:
    fitting = [row for row in rows if fits(row)]
    if asked.goal == "batch" and fitting:
        largest = max(row["batch"] for row in fitting)
        return best(row for row in fitting if row["batch"] == largest)
    if asked.goal == "memory" and fitting:
        least = min(row["peak_bytes"] for row in fitting)
        return min((row for row in fitting if row["peak_bytes"] <= least * 1.001), key=lambda row: -speed(row))
    return best(fitting)
