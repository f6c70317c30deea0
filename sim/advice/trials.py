"""Runs candidates within the time of the search, in processes of their own, and keeps every row."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

from sim.advice.bench import STOPPED, Bench
from sim.advice.question import OPEN, Question
from sim.limits import TooLong, limited
from sim.policies import is_shipped
from sim.sweeps.cell import Outcome
from sim.sweeps.execute import Job, timed_out
from sim.sweeps.pool import FEW, Local, usable_cpus
from sim.sweeps.study import Cell

Row = Mapping[str, Any]
OnRow = Callable[[Row, int, int], None]

SHARE = 0.5
"""The part of the search's time that one run may take at most."""
LEAST_S = 1.0
SMALL = 1000
"""A few runs of traces of so many ops are made in this process: they take less time than a process needs to start."""
BENCH = "sim.advice.bench:Bench"
EQUAL = 0.005
"""Speeds that differ by no more than this fraction count as equal, so that the simpler policy is taken."""
WORTH = 0.015
"""What cannot be faster than the best found by more than this fraction is not run: with `EQUAL`, 2 % in all."""


NOTHING: Mapping[str, Any] = MappingProxyType({})
BOUND: Mapping[str, Any] = MappingProxyType({"bound": True})
"""The key of a task whose row says how near the run is to the least time that any plan of a class takes."""


class Planned(NamedTuple):
    """A cell, further keys of its row, and whether this process may run it: of a small trace, by a shipped policy."""

    cell: Cell
    tags: Mapping[str, Any]
    may_run_here: bool


class Trials:
    """The runs of one search.

    seconds: wall-clock time of the search. A run that has not ended then is stopped; none starts that is known not to
        end in time, since a part of it alone has taken longer than what is left.
    jobs: processes; None for one per processor.
    on_row: called with each new row, how many runs of this round have ended, and how many it has.
    began: when its time began, as `time.monotonic` says it; None for now.
    """

    def __init__(
        self, seconds: float, jobs: int | None = None, on_row: OnRow | None = None, began: float | None = None
    ) -> None:
        self.began = time.monotonic() if began is None else began
        self.seconds = seconds
        self._pool: Local | None = None
        self._bench = Bench()
        self._jobs = usable_cpus() if jobs is None else jobs
        self.on_row = on_row
        self.rows: dict[str, Row] = {}
        self._took: dict[tuple[str, str], float] = {}
        self._ops: dict[str, int] = {}
        self._groups: dict[str, str] = {}
        self._late: set[str] = set()
        self.skipped_variants = 0

    @property
    def skipped(self) -> int:
        """How many runs were wanted to the end, and had no time."""
        return self.skipped_variants + sum(id not in self.rows for id in self._late)

    @property
    def left_s(self) -> float:
        """Seconds left, 0 if none."""
        return max(0.0, self.seconds - self.used_s)

    @property
    def used_s(self) -> float:
        """Seconds since its time began."""
        return time.monotonic() - self.began

    def extend(self, seconds: float) -> None:
        """Let the search last that long since it began."""
        self.seconds = seconds

    def run(
        self,
        asked: Question,
        policies: Iterable[str],
        *,
        task: Mapping[str, Any] = NOTHING,
        apart: bool = False,
        **tags: Any,
    ) -> list[Row]:
        """The rows of these policies, in their order; those for which no time was left are missing.

        A row has the labels of a cell (`policy`, `batch`, …), `status`, and where it ran the figures of a summary.
        task: further keys of the tasks: `pace`, see `sim.advice.bench`, or `bound`, as studies have it.
        apart: whether these keys make other runs of the same cells, so that those known already do not stand for them.
        tags: further keys of the rows.
        """
        return self.run_all([(asked, policies, tags)], task, apart=apart)

    def run_all(
        self,
        asked: Iterable[tuple[Question, Iterable[str], Mapping[str, Any]]],
        task: Mapping[str, Any] = NOTHING,
        *,
        apart: bool = False,
    ) -> list[Row]:
        """As `run`, for several questions at once."""
        cells = self._cells(asked, task, apart=apart)
        for _ in self._each(cells, lambda labels: True):
            pass
        return [self.rows[id] for id in cells if id in self.rows]

    def each(
        self,
        asked: Iterable[tuple[Question, Iterable[str], Mapping[str, Any]]],
        wanted: Callable[[Mapping[str, Any]], bool],
        task: Mapping[str, Any] = NOTHING,
        *,
        stop_s: float | None = None,
    ) -> Iterator[Row]:
        """The rows of several questions as they are found: one of each, then the next of each.

        wanted: whether a run may still matter, by the labels of its cell; asked just before it would start.
        task: as for `run`.
        stop_s: processor time after which a run is stopped for now: it has no row, and may be tried with more. What
            is known to take so long is not started. None for no such time.
        """
        task = task if stop_s is None else {**task, "stop_s": stop_s}
        each = [[*self._cells([one], task).items()] for one in asked]
        turns = dict(filter(None, chain.from_iterable(zip_longest(*each))))
        yield from self._each(turns, wanted, stop_s)

    def _cells(
        self,
        asked: Iterable[tuple[Question, Iterable[str], Mapping[str, Any]]],
        task: Mapping[str, Any],
        *,
        apart: bool = False,
    ) -> dict[str, Planned]:
        """The cells of several questions, by their ids."""
        limit = max(LEAST_S, self.seconds * SHARE)
        cells: dict[str, Planned] = {}
        for question, policies, tags in asked:
            names = list(policies)
            for cell in question.cells(names, limit_s=limit) if names else ():
                id = f"{cell.id} with {', '.join(task)}" if apart else cell.id
                changed = replace(cell, id=id, task={**cell.task, **task, "id": id}) if task else cell
                may_run_here = self._ops_of(question) <= SMALL and is_shipped(str(cell.task["policy"]))
                cells[id] = Planned(changed, tags, may_run_here)
        return cells

    def _ops_of(self, asked: Question) -> int:
        """How many ops a question's trace has, which no figure of the machine changes."""
        key = self._key(asked)
        if key not in self._ops:
            self._ops[key] = asked.ops
        return self._ops[key]

    @staticmethod
    def _key(asked: Question) -> str:
        """What a question's trace is made of."""
        return repr((dict(asked.workload), asked.profile, dict(asked.parallel or {})))

    def at_any_rate(self, asked: Question, policy: str) -> Row:
        """The row of a policy that is known to fit, whatever time is left, and though it was ended for lack of it."""
        ((id, each),) = self._cells([(asked, [policy], {})], NOTHING).items()
        if self.rows.get(id, {"status": "timed_out"})["status"] == "timed_out":
            outcome = self._bench.run({**each.cell.task, "time_limit_s": None})
            self.rows[id] = {**each.cell.labels, **outcome["row"], **outcome["ran"]}
        return self.rows[id]

    def _each(
        self,
        cells: Mapping[str, Planned],
        wanted: Callable[[Mapping[str, Any]], bool],
        stop_s: float | None = None,
    ) -> Iterator[Row]:
        """The rows of cells; see `each`."""
        yield from [self.rows[id] for id in cells if id in self.rows]
        left = {id: each for id, each in cells.items() if id not in self.rows}
        if not left:
            return
        waiting, done = {*left}, 0

        def starts(job: Job) -> bool:
            least_s = self._least_s(job.group, str(job.task["policy"]))
            is_postponed = stop_s is not None and least_s >= stop_s
            if is_postponed or not wanted(left[job.id].cell.labels):
                waiting.discard(job.id)
                return False
            return least_s < self.left_s

        if self.left_s:
            with closing(self._outcomes([*left.values()], starts)) as outcomes:  # ends what still runs
                for id, outcome in outcomes:
                    cell, tags, _ = left[id]
                    took = float(outcome["ran"].get("wall_s", 0.0))
                    self._took[cell.group, str(cell.labels["policy"])] = max(took, outcome["ran"].get(STOPPED, 0.0))
                    waiting.discard(id)
                    if STOPPED in outcome["ran"]:
                        continue
                    self.rows[id] = {**cell.labels, **tags, **outcome["row"], **outcome["ran"]}
                    done += 1
                    if self.on_row:
                        self.on_row(self.rows[id], done, done + len(waiting))
                    yield self.rows[id]
                    if not self.left_s:
                        break
        self._late -= {*left}
        self._late |= {id for id in waiting if wanted(left[id].cell.labels)}

    def _outcomes(
        self, cells: Sequence[Planned], wanted: Callable[[Job], bool]
    ) -> Generator[tuple[str, Outcome], None, None]:
        """The outcomes of cells that are wanted: a few of small traces from this process, others from a pool."""
        jobs = [Job(each.cell.task, each.cell.group) for each in cells]
        if self._pool is None and all(each.may_run_here for each in cells) and (self._jobs == 1 or len(jobs) <= FEW):
            yield from ((job.id, self._here(job)) for job in jobs if wanted(job))
            return
        self._pool = self._pool or Local(self._jobs, bench=BENCH, keeps=True)
        yield from self._pool.run(jobs, wanted, until=self.began + self.seconds)

    def _here(self, job: Job) -> Outcome:
        """The outcome of a job in this process."""
        limit = min(self.left_s, job.limit_s or self.left_s)
        try:
            with limited(limit):
                return self._bench.run(job.task)
        except TooLong:
            return timed_out(limit)

    def least_s(self, asked: Question, policy: str) -> float:
        """Seconds that a run takes at least, as far as its parts alone, or the whole, have shown."""
        key = self._key(asked)
        if key not in self._groups:
            self._groups[key] = asked.cells([policy])[0].group
        return self._least_s(self._groups[key], policy)

    def _least_s(self, group: str, policy: str) -> float:
        return max(self._took.get((group, name), 0.0) for name in (policy, *policy.split(" + ")))

    @property
    def of_the_job(self) -> list[Row]:
        """The rows so far that are runs of the job itself, not of a changed one, nor estimates of pace."""
        return [row for row in self.rows.values() if not {"pace", "assumed", "change"} & {*row}]

    def stop(self) -> None:
        """End the processes, and let no further run start."""
        self.close()
        self.extend(0.0)

    def close(self) -> None:
        """End the processes."""
        if self._pool:
            self._pool.close()


def fits(row: Row) -> bool:
    """Whether a run completed within the budget."""
    return bool(row["status"] == "ok")


def speed(row: Row) -> float:
    """Samples per second of a run, or iterations where the workload does not say how many samples it has."""
    samples = row.get("samples_per_s")
    return float(samples) if samples else 1e9 / max(1, row["makespan_ns"])


def micro_batches(row: Mapping[str, Any]) -> int:
    """In how many micro-batches a run, or a workload, takes its batch."""
    return int(row.get("micro_batches") or 1)


def setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a search may choose of a row's workload, or of a workload, beside its batch, and its layout over devices."""
    return micro_batches(row), row.get("parallel"), *(row.get(name) or usual for name, usual in OPEN.items())


def way(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a run from others of the same job: its policies, and what of its workload the search may choose."""
    return str(row["policy"]), *setting(row)


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest run; of those within `EQUAL` of it that of fewest policies, without recomputation, of least peak.

    A plan whose peak is less than that of none at all by no more than `EQUAL` is not worth having.
    """
    fitting = [row for row in rows if fits(row)]
    if not fitting:
        return None
    top = max(map(speed, fitting))
    near = [row for row in fitting if speed(row) >= top * (1 - EQUAL)]
    least = min(near, key=effort)
    alike = (row for row in near if row["policy"] == "keep_all" and effort(row)[:2] == effort(least)[:2])
    return next((row for row in alike if least["peak_bytes"] >= row["peak_bytes"] * (1 - EQUAL)), least)


def effort(row: Row) -> tuple[Any, ...]:
    """What comes with a run besides its time, the simplest first: policies, recomputation, memory, any plan at all."""
    parts = len(re.findall(r"[+;]", str(row["policy"]))) + (micro_batches(row) > 1)
    return parts, bool(row["recompute_ns"]), row["peak_bytes"], row["policy"] != "keep_all"
