"""Runs candidates within the time of the search, in processes of their own, and keeps every row."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from typing import Any

from sim.advice.question import Question
from sim.sweeps.cell import Bench, Outcome
from sim.sweeps.execute import Job
from sim.sweeps.pool import Local, usable_cpus
from sim.sweeps.study import Cell

Row = Mapping[str, Any]
OnRow = Callable[[Row, int, int], None]

SHARE = 0.25
"""The part of the search's time that one run may take at most."""
LEAST_S = 1.0
SMALL = 1000
"""Traces of so many ops are run in this process: quick policies plan them in less time than a process starts."""
EQUAL = 0.005
"""Speeds that differ by no more than this fraction count as equal, so that the simpler policy is taken."""


class Trials:
    """The runs of one search.

    seconds: wall-clock time of the search. No run starts after it; one that was started may end later by `SHARE` of it.
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
        self._small: set[str] = set()
        self.skipped = 0

    @property
    def left_s(self) -> float:
        """Seconds left, 0 if none."""
        return max(0.0, self.seconds - (time.monotonic() - self.began))

    def extend(self, seconds: float) -> None:
        """Let the search last that long since it began."""
        self.seconds = seconds

    def run(self, asked: Question, policies: Iterable[str], **tags: Any) -> list[Row]:
        """The rows of these policies, in their order; those for which no time was left are missing.

        A row has the labels of a cell (`policy`, `batch`, …), `status`, and where it ran the figures of a summary.
        tags: further keys of the rows.
        """
        return self.run_all([(asked, policies, tags)])

    def run_all(self, asked: Iterable[tuple[Question, Iterable[str], Mapping[str, Any]]]) -> list[Row]:
        """As `run`, for several questions at once."""
        limit = max(LEAST_S, self.seconds * SHARE)
        cells: dict[str, tuple[Cell, Mapping[str, Any]]] = {}
        for question, policies, tags in asked:
            names = list(policies)
            found = question.cells(names, limit_s=limit) if names else []
            cells |= {cell.id: (cell, tags) for cell in found}
            if question.ops <= SMALL:
                self._small |= {cell.id for cell in found}
        wanted = [id for id in cells if id not in self.rows]
        done = 0
        if wanted and self.left_s:
            jobs = [Job(cells[id][0].task, cells[id][0].group) for id in wanted]
            with closing(self._outcomes(jobs)) as outcomes:  # ends what still runs
                for id, outcome in outcomes:
                    cell, tags = cells[id]
                    self.rows[id] = _fullest({**cell.labels, **tags, **outcome["row"], **outcome["ran"]})
                    done += 1
                    if self.on_row:
                        self.on_row(self.rows[id], done, len(wanted))
                    if not self.left_s:
                        break
        self.skipped += len(wanted) - done
        return [self.rows[id] for id in cells if id in self.rows]

    def _outcomes(self, jobs: list[Job]) -> Generator[tuple[str, Outcome], None, None]:
        """The outcomes of jobs: of small traces from this process, of others from a pool."""
        small = [job for job in jobs if job.id in self._small]
        for job in small:
            yield job.id, self._bench.run(job.task)
        if len(small) < len(jobs):
            self._pool = self._pool or Local(self._jobs, keeps=True)
            yield from self._pool.run([job for job in jobs if job.id not in self._small])

    def close(self) -> None:
        """End the processes."""
        if self._pool:
            self._pool.close()


def _fullest(row: Row) -> Row:
    """The row with the peak of the fullest of several devices as its peak."""
    return {**row, "peak_bytes": row["fullest_bytes"]} if row.get("fullest_bytes") is not None else row


def fits(row: Row) -> bool:
    """Whether a run completed within the budget."""
    return bool(row["status"] == "ok")


def speed(row: Row) -> float:
    """Samples per second of a run, or iterations where the workload does not say how many samples it has."""
    samples = row.get("samples_per_s")
    return float(samples) if samples else 1e9 / max(1, row["makespan_ns"])


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest run; of those within `EQUAL` of it that of fewest policies, without recomputation, of least peak."""
    fitting = [row for row in rows if fits(row)]
    if not fitting:
        return None
    top = max(map(speed, fitting))
    return min((row for row in fitting if speed(row) >= top * (1 - EQUAL)), key=effort)


def effort(row: Row) -> tuple[Any, ...]:
    """What comes with a run besides its time, the simplest first: policies, recomputation, memory, any plan at all."""
    parts = len(re.findall(r"[+;]", str(row["policy"])))
    return parts, bool(row["recompute_ns"]), row["peak_bytes"], row["policy"] != "keep_all"
