"""Executors, which run cells: their interface, and the one that runs them in this process.

One protocol: tasks in, `(id, outcome)` out as they finish. Tasks and outcomes are JSON values, so that an executor
may be on another machine; each gives the same rows. `pool` runs cells in processes of this machine, `cluster` on
those of a Dask scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sim.errors import TiersimError
from sim.limits import CELL_SECONDS
from sim.sweeps.cell import Bench, Outcome

T = TypeVar("T")
TRIES = 3
"""How many processes a cell may kill: the first with others under way, then alone."""


@dataclass(frozen=True)
class Job:
    """A task, and the group whose cells share a trace."""

    task: Mapping[str, Any]
    group: str

    @property
    def id(self) -> str:
        """The cell's id."""
        return str(self.task["id"])

    @property
    def limit_s(self) -> float | None:
        """Its time limit in seconds, None for no limit."""
        limit: float | None = self.task.get("time_limit_s")
        return limit


class Executor(Protocol):
    """Runs jobs, in whatever order."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[str, Outcome]]:
        """Yield each job's id and outcome once, as it finishes; closing the iterator stops all work."""


@contextmanager
def stopping(outcomes: Iterator[T]) -> Iterator[Iterator[T]]:
    """Outcomes of an executor; at the end all its workers are stopped, whatever the reason."""
    try:
        yield outcomes
    finally:
        close = getattr(outcomes, "close", None)
        if close:
            close()


class Inline:
    """Runs jobs one after another in this process. It does not survive a cell that kills its process."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[str, Outcome]]:
        """See `Executor`. Raises TiersimError for a job with a time limit."""
        if any(job.limit_s is not None for job in jobs):
            raise TiersimError("a time limit needs processes that can be ended: Local(1) instead of Inline()")
        bench = Bench()
        with bench.collecting():
            for job in jobs:
                yield job.id, bench.run(job.task)


def killed(how: str) -> Outcome:
    """The outcome of a cell that has killed its process `TRIES` times."""
    row = {"status": "killed", "fits": None, "error": "the process that ran it died each time it was tried"}
    return {"row": row, "ran": {"how": how}}


def stuck(job: Job) -> Outcome:
    """The outcome of a cell whose policy took no interruption, so that its process was ended."""
    error = "its policy took no interruption after its limit of time, and its process was ended"
    limit = CELL_SECONDS if job.limit_s is None else job.limit_s
    return {"row": {"status": "timed_out", "fits": None, "error": error}, "ran": {"time_limit_s": limit}}


def timed_out(limit_s: float) -> Outcome:
    """The outcome of a cell that was ended at its limit."""
    row = {"status": "timed_out", "fits": None, "error": f"not finished within {limit_s:g} s"}
    return {"row": row, "ran": {"time_limit_s": limit_s, "wall_s": limit_s}}
