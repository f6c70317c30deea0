"""Compares policies on one trace, platform and budget: one row per policy, whether it fits or not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sim.arguments import explained
from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import TiersimError, closest
from sim.experiment import Result, budget_of, check_iterations, check_replay, check_trace, to_platform
from sim.hardware.platform import Platform
from sim.layout import Layout, lay_out
from sim.least_time import LowerBound, lower_bound
from sim.parallel import BENCH, Request, answers
from sim.policies import label as label_of
from sim.policies import load, names
from sim.policies.base import Policy
from sim.report.cells import bound_lines
from sim.rows import Answer, Row, Setting, refused_for_state, states_of
from sim.rows import answer as answer_to
from sim.trace.graph import Trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from sim.sweeps.pool import Local

Asked = str | tuple[str, Mapping[str, Any]] | Policy | type[Policy]

LITTLE = 10_000
"""Policies times ops: what takes less time than the start of other processes."""

KEY_COLUMNS = (
    *("policy", "fits", "peak_bytes", "makespan_ns", "overhead", "above_bound", "recompute_ns", "saved_fraction"),
    *("floor_bytes", "fidelity", "error"),
)
"""The columns that a notebook shows; `Comparison.to_frame` has all of them."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison of policies.

    trace, platform: the inputs, the same for all policies.
    rows: one record per policy: `policy`, `fits` (None where the policy does not apply or failed), `fidelity`,
        `manages`, and the keys of `Result.summary`; for a policy that does not fit `refusal` (its kind), `error`,
        `holders` and `floor_bytes`, the smallest budget found to fit, None for none.
    results: the results of the policies that fit, by label.
    attempts: of those that do not what ran until then, by label, where anything ran.
    left_out: policies that were not run -> the reason.
    notes: what to know of how they were run, a line each.
    views: saved views of runs (`sim.views`), by label, where other processes have made them.
    bound: the least time that any plan of a class takes; None where it was not asked for. Rows that fit have
        `bound_ns`, `above_bound`, by how much a run of that class exceeds it, and `outside_bound`, why another is none.
    """

    trace: Trace
    platform: Platform
    rows: tuple[Mapping[str, Any], ...]
    results: Mapping[str, Result] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bound: LowerBound | None = None
    attempts: Mapping[str, Result] = field(default_factory=dict)
    views: Mapping[str, bytes] = field(default_factory=dict)

    def __repr__(self) -> str:
        fitting = sum(row["fits"] is True for row in self.rows)
        return f"<Comparison of {len(self.rows)} policies on {self.platform.name}, {self.trace!r}: {fitting} fit>"

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        shown: str = frame[[key for key in KEY_COLUMNS if key in frame]].to_html(index=False, na_rep="")
        return shown

    @property
    def failed(self) -> bool:
        """Whether some policy neither fitted nor was refused: it did not apply or failed."""
        return any(row["fits"] is None for row in self.rows)

    @property
    def bounds(self) -> tuple[str, ...]:
        """The bound on all plans of a class, and what it is not about; then a line per policy with its own proof.

        A policy that takes less time than every op once does so by what it declares to save, a line each.
        """
        once = self.bound.ops_ns if self.bound else 0
        faster = {name: result for name, result in self.results.items() if result.log.end < once}
        return (
            *bound_lines(self.bound.text() if self.bound else "", self.rows),
            *(f"{name}: {line}" for name, result in self.results.items() for line in result.bounds),
            *(f"{name}: {line}" for name, result in faster.items() for line in result.policy.saving_lines()),
        )

    @property
    def idle_parts(self) -> tuple[str, ...]:
        """A line for each part of a composition that does nothing."""
        return tuple(f"{name}: {line}" for name, result in self.results.items() for line in result.idle_parts)

    @property
    def fastest(self) -> str | None:
        """The label of the fastest policy, of equal ones the simplest by its traits, then the first; None for none."""

        def mechanisms(policy: Policy) -> int:
            return policy.recomputes + policy.moves + policy.rewrites + policy.online + bool(policy.solver)

        def rank(label: str) -> tuple[int, int, int]:
            result = self.results[label]
            return result.log.end, mechanisms(result.policy), result.policy.warm_up

        return min(self.results, key=rank, default=None)

    def to_frame(self) -> pd.DataFrame:
        """The rows as a DataFrame; nested figures become columns such as `stall_ns.transfer`."""
        import pandas as pd

        return pd.json_normalize([dict(row) for row in self.rows])

    def plot(self) -> Figure:
        """Figure of time against peak memory, one marker per policy; see `sim.report.plot.plot_comparison`."""
        from sim.report.plot import plot_comparison

        return plot_comparison(self.rows, budget=next((r.platform.budget for r in self.results.values()), None))

    def report(self, path: str | os.PathLike[str], *, command: str = "") -> Path:
        """Write a report page with these rows and every run: one HTML file; see `Result.report`."""
        from sim.pages import report_comparison

        return report_comparison(self, path, command=command)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a comparison.

    comparison: the rows so far, in the order asked; `left_out` names the rest.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        super().__init__(f"interrupted after {len(comparison.rows)} policies")


@dataclass(frozen=True)
class Progress:
    """How far a comparison is.

    done, total: policies.
    label: the policy that has just been answered.
    row: its row.
    left_s: seconds that the rest will take if it takes as long as what has run, None before anything has.
    """

    done: int
    total: int
    label: str
    row: Row
    left_s: float | None


@explained
def compare(
    trace: Trace,
    platform: Platform | str | os.PathLike[str],
    policies: Asked | Sequence[Asked] | None = None,
    *,
    budget: float | str | None = None,
    seed: int = 0,
    iterations: int | None = None,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
    find_floor: bool | None = None,
    jobs: int | None = 1,
    on_progress: Callable[[Progress], None] | None = None,
    parallel: Layout | Mapping[str, Any] | None = None,
    bound: bool = True,
    time_limit_s: float | None = None,
    most_actions: int | None = None,
    views: bool = False,
) -> Comparison:
    """Run policies on one trace, platform and budget.

    Policies that declare to leave weights, gradients and optimizer state in a tier that is too small for them are
    refused before any policy runs.

    trace: the trace to run.
    platform: a platform, or the name or file of a profile.
    policies: a list of names, `(name, parameters)` pairs, policies or their classes, or a single one of these; None for
        all that apply and plan quickly. A name may have parameters: "checkmate(method=rounding)".
    budget, seed, iterations, recompute_limit: see `simulate`.
    find_floor: whether to find the smallest feasible budget of policies that do not fit: None for those whose plan
        ignores the budget, which takes a replay; True for all, by searching; False for none.
    jobs: how many processes; None for one per processor, or this one alone where there is little to do. The rows are
        the same. Policies that another process cannot load, such as those of a notebook, run in this one; `notes` says
        so.
    on_progress: called for each policy that has been answered.
    parallel: see `simulate`.
    bound: whether to say how near each run is to the least time that any plan of a class takes (`sim.lower_bound`).
    time_limit_s: processor time that each policy may take, None for no limit; one that takes more has failed. With a
        limit, policies by file, and registered ones, run in another process, which is ended if they take no
        interruption.
    most_actions: how many actions its plan may have, None for 10,000 and 50 per op.
    views: whether other processes also prepare what report pages show of each run, as saving the comparison needs it.

    Raises PolicyError for an unknown name or parameter, or a wrong number of iterations, TiersimError for fewer than
    one process or a wrong seed or limit, before anything runs; Interrupted on Ctrl-C, with the rows so far.
    """
    check_trace(trace)
    check_replay(seed, recompute_limit)
    if iterations is not None:
        check_iterations(iterations)
    if jobs is not None and jobs < 1:
        raise TiersimError(f"jobs: value {jobs}: expected at least 1{closest(jobs, 1)}")
    trace, machine = (trace, to_platform(platform)) if parallel is None else lay_out(trace, platform, parallel)
    budget = None if budget is None else budget_of(budget, trace, machine)
    setting = Setting(
        trace, machine, budget, seed, iterations, recompute_limit, find_floor, time_limit_s, most_actions, views
    )
    asked = _listed(policies)
    with _workers(jobs, len(asked) * len(trace.op_columns.name), len(asked)) as workers:
        requests = [_request(each) for each in asked]
        work = _Work(setting, requests, apply_all=policies is not None, on_progress=on_progress, bound=bound)
        try:
            work.refuse()
            work.run(jobs, workers)
        except KeyboardInterrupt:
            raise Interrupted(work.comparison(interrupted=True)) from None
    found = work.comparison()
    return bounded(found, setting.limited, work.bound) if bound else found


@contextmanager
def _workers(jobs: int | None, work: int, most: int) -> Iterator[Local | None]:
    """Processes that get ready while this one loads policies, None for a comparison that may need none.

    work: policies times ops. most: how many can have something to do.
    """
    if jobs == 1 or (jobs is None and work <= LITTLE):
        yield None
        return
    from sim.sweeps.pool import Local, usable_cpus

    count = min(usable_cpus() if jobs is None else jobs, most)
    workers = Local(count, bench=BENCH)
    if count > 1:
        workers.start()
    try:
        yield workers if count > 1 else None
    finally:
        workers.close()


def bounded(comparison: Comparison, limited: Platform, bound: LowerBound | None = None) -> Comparison:
    """A comparison with the least time that any plan takes, and in each row how near it is to that.

    limited: the machine with the budget. bound: that time, where it is known already.
    """
    try:
        bound = bound or lower_bound(comparison.trace, limited)
    except TiersimError:  # what keeps every policy from running has been said by each
        return comparison
    rows = []
    for row in comparison.rows:
        result = comparison.results.get(row["policy"])
        rows.append({**row, **(bound.record(result.log) if result else {})})
    return replace(comparison, rows=tuple(rows), bound=bound)


class _Work:
    """A comparison under way: requests by position, and their answers so far.

    bound: the least time that any plan takes, where another process has computed it.
    """

    def __init__(
        self,
        setting: Setting,
        requests: Sequence[Request],
        *,
        apply_all: bool,
        on_progress: Callable[[Progress], None] | None,
        bound: bool,
    ) -> None:
        self.setting = setting
        self.requests = requests
        self.apply_all = apply_all
        self.on_progress = on_progress
        self.wants_bound = bound
        self.bound: LowerBound | None = None
        self.answers: dict[int, Answer] = {}
        self.notes: list[str] = []
        self.slow = {i for i, each in enumerate(requests) if not apply_all and each.policy.slow}
        self.began = time.monotonic()
        self.refused = 0

    @property
    def open(self) -> list[int]:
        """Positions without an answer."""
        return [i for i in range(len(self.requests)) if i not in self.answers and i not in self.slow]

    def refuse(self) -> None:
        """Answer for the policies that leave too much state in place."""
        setting, limited = self.setting, self.setting.limited
        states = states_of(setting.trace, setting.platform)
        for i in self.open:
            row = refused_for_state(self.requests[i].label, self.requests[i].policy, states, limited, setting)
            if row is not None:
                self.refused += 1
                self.note(i, Answer(row))

    def run(self, jobs: int | None, workers: Local | None = None) -> None:
        """Answer for all others: in other processes, then here for those that these could not load.

        Where one process is enough, only what may keep one from going on has another, and comes last.

        workers: processes that are getting ready.
        """
        todo = self.open
        if jobs is None:
            from sim.sweeps.pool import usable_cpus  # brings what sweeps need with it

            is_little = len(todo) * len(self.setting.trace.op_columns.name) <= LITTLE
            jobs = 1 if is_little else usable_cpus()
        count = min(jobs, len(todo))
        if count <= 1:
            apart = [i for i in todo if self.setting.time_limit_s and self.requests[i].may_stick]
            self.answer(i for i in todo if i not in apart)
            todo = apart
        if todo:
            todo.sort(key=lambda i: -_effort(self.requests[i].policy))  # what takes long must not begin last
            from sim.sweeps.execute import stopping
            from sim.sweeps.pool import Local

            asked, wants_bound = [self.requests[i] for i in todo], self.wants_bound and count > 1
            chosen = workers if workers is not None and count > 1 else Local(count, bench=BENCH)
            with stopping(answers(asked, self.setting, chosen, bound=wants_bound)) as found:
                for position, answer, why in found:
                    if isinstance(answer, LowerBound):
                        self.bound = answer
                    elif answer is None:
                        self.notes.append(f"{self.requests[todo[position]].label}: ran in this process: {why}")
                    else:
                        self.note(todo[position], answer)
        self.answer(self.open)

    def answer(self, positions: Iterable[int]) -> None:
        """Answer in this process."""
        for i in positions:
            self.note(i, answer_to(self.requests[i].label, self.requests[i].policy, self.setting))

    def note(self, i: int, answer: Answer) -> None:
        """One more answer."""
        self.answers[i] = answer
        if self.on_progress is not None:
            total, ran = len(self.requests) - len(self.slow), len(self.answers) - self.refused
            left = (time.monotonic() - self.began) / ran * (total - len(self.answers)) if ran else None
            self.on_progress(Progress(len(self.answers), total, self.requests[i].label, answer.row, left))

    def comparison(self, *, interrupted: bool = False) -> Comparison:
        """The answers in the order asked."""
        rows: list[Row] = []
        results: dict[str, Result] = {}
        attempts: dict[str, Result] = {}
        views: dict[str, bytes] = {}
        left_out: dict[str, str] = {}
        for i, request in enumerate(self.requests):
            answer = self.answers.get(i)
            if i in self.slow:
                left_out[request.label] = request.policy.too_long(self.setting.trace) or SLOWLY
            elif answer is None:
                assert interrupted
                left_out[request.label] = "interrupted before it ended"
            elif answer.does_not_apply and not self.apply_all:
                left_out[request.label] = str(answer.row["error"])
            else:
                rows.append(answer.row)
                if answer.result is not None:
                    results[request.label] = answer.result
                if answer.attempt is not None:
                    attempts[request.label] = answer.attempt
                if answer.view is not None:
                    views[request.label] = answer.view
        setting, notes = self.setting, tuple(sorted(self.notes))
        return Comparison(
            setting.trace, setting.platform, tuple(rows), results, left_out, notes, attempts=attempts, views=views
        )


SLOWLY = "plans slowly: name it to run it"


def _effort(policy: Policy) -> int:
    """How much longer than others a policy takes, as far as its traits tell: what it measures first, and solves."""
    return policy.warm_up + bool(policy.solver) + policy.online


def _listed(policies: Asked | Sequence[Asked] | None) -> Sequence[Asked]:
    """The requests as a list; a single one may be given without."""
    if policies is None:
        return names()
    is_pair = isinstance(policies, tuple) and len(policies) == 2 and isinstance(policies[1], Mapping)
    is_one = is_pair or isinstance(policies, (str, Policy, type))
    return cast("Sequence[Asked]", (policies,) if is_one else policies)


def _request(asked: Asked) -> Request:
    """A request with its label and its policy. Raises PolicyError."""
    if isinstance(asked, str):
        return Request(asked, asked, {}, load(asked))
    if isinstance(asked, (Policy, type)):
        policy = load(asked)
        return Request(label_of(policy), policy, {}, policy)
    name, parameters = asked
    arguments = ", ".join(f"{key}={value}" for key, value in parameters.items())
    label = f"{name}({arguments})" if arguments else name
    return Request(label, name, parameters, load(name, **parameters))
