"""Sweeps: a study in, a table out; no finished cell is lost, no known answer is computed twice."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.arguments import explained
from sim.errors import TiersimError, closest
from sim.foreign import Named, model_files, policy_files, profile_files, sums_of, trace_files
from sim.policies import is_shipped
from sim.sweeps.axes import StudyError
from sim.sweeps.cell import STATUSES
from sim.sweeps.execute import Executor, Job, stopping
from sim.sweeps.frame import frame
from sim.sweeps.pool import executor_for
from sim.sweeps.store import ANSWERS, Writer
from sim.sweeps.study import Cell, Study, load_study

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Progress:
    """The progress of a sweep.

    total: cells.
    reused: answers that were known.
    statuses: how many cells that ran have each status.
    """

    total: int
    reused: int
    statuses: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)
    _left: Counter[str] = field(default_factory=Counter)
    _cost: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def ran(self) -> int:
        """Cells that this sweep has run."""
        return self.statuses.total()

    @property
    def done(self) -> int:
        """Cells that are finished."""
        return self.reused + self.ran

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first cell was handed out."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest will take, from the times of each policy's cells so far; None at the start."""
        if not self._cost:
            return None
        count = sum(cells for cells, _ in self._cost.values())
        seconds = sum(spent for _, spent in self._cost.values())
        mean = seconds / count
        need = sum(
            left * (self._cost[policy][1] / self._cost[policy][0] if policy in self._cost else mean)
            for policy, left in self._left.items()
        )
        return need * self.elapsed_s / max(seconds, 1e-9)  # parallel workers, and time outside of cells

    def note(self, cell: Cell, outcome: Mapping[str, Any]) -> None:
        """Count a finished cell."""
        self.statuses[outcome["row"]["status"]] += 1
        policy = str(cell.labels["policy"])
        count, seconds = self._cost.get(policy, (0, 0.0))
        self._cost[policy] = count + 1, seconds + float(outcome["ran"].get("wall_s", 0.0))
        self._left[policy] -= 1

    def text(self) -> str:
        """One line: "120 of 400 cells in 12.0 s: 100 ok, 20 infeasible"."""
        parts = [f"{self.statuses[status]} {status}" for status in STATUSES if self.statuses[status]]
        if self.reused:
            parts.append(f"{self.reused} were known already")
        return f"{self.done} of {self.total} cells in {self.elapsed_s:.1f} s: {', '.join(parts) or 'none ran'}"


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Swept:
    """The result of a sweep: its study, each cell in order with its record, and its progress.

    beside: finished cells in the folder that are none of the study's: of another study, or another version of it.
    """

    study: Study
    rows: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]
    progress: Progress
    beside: int = 0

    @property
    def failed(self) -> int:
        """Cells without an answer."""
        return sum(record["row"]["status"] not in ANSWERS for _, record in self.rows)

    def to_frame(self, *, timing: bool = False) -> pd.DataFrame:
        """One row per cell; see `sim.sweeps.frame`."""
        return frame(self.rows, timing=timing)


@explained
def sweep(
    study: str | os.PathLike[str] | Mapping[str, Any] | Study,
    *,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    resume: bool = False,
    dask: str | None = None,
    slurm: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> pd.DataFrame:
    """Run a study and return its table: one row per cell, units in the names of the columns.

    study: a TOML file, or a dict with the same keys.
    out: folder that keeps every cell as it finishes; None keeps nothing.
    jobs: processes; None for one per processor, or this one alone for few cells.
    resume: whether the folder may hold results; known answers are kept.
    dask: the address of a Dask scheduler, its scheduler file, or "slurm" for `jobs` workers of its own.
    slurm: settings of those workers, see `sim.sweeps.cluster`.
    on_progress: called after every cell.

    Raises StudyError with all mistakes of the study, StoreError, OSError; TiersimError if Dask is not installed or
    cannot be reached.
    """
    return run_sweep(
        study, out=out, jobs=jobs, resume=resume, dask=dask, slurm=slurm, on_progress=on_progress
    ).to_frame()


def run_sweep(
    study: str | os.PathLike[str] | Mapping[str, Any] | Study,
    *,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    resume: bool = False,
    dask: str | None = None,
    slurm: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
) -> Swept:
    """As `sweep`, but returns the records themselves.

    executor: runs the cells, instead of `jobs` and `dask`.
    """
    if jobs is not None and jobs < 1:
        raise TiersimError(f"jobs: value {jobs}: expected at least 1{closest(jobs, 1)}")
    if dask is not None:
        from sim.sweeps.cluster import Dask  # checks what was asked before any work is done

        executor = executor or Dask(dask, jobs=jobs, slurm=slurm)
    elif slurm:
        raise TiersimError("slurm: goes with dask 'slurm'")
    read = load_study(study)
    cells = read.cells()
    if out is None and any(cell.task["timeline"] for cell in cells):
        raise StudyError([f"{read.source}: timeline: value true: expected an output folder for it (-o DIR)"])
    if out is None:
        return _run(read, cells, None, executor, jobs, on_progress)
    with Writer(out, resume=resume) as writer:
        return _run(read, cells, writer, executor, jobs, on_progress)


def _run(
    study: Study,
    cells: list[Cell],
    writer: Writer | None,
    executor: Executor | None,
    jobs: int | None,
    on_progress: OnProgress | None,
) -> Swept:
    listed = [{"id": cell.id, "labels": dict(cell.labels)} for cell in cells]
    limit = study.file.time_limit
    known = writer.begin(study.raw, listed, time_limit_s=limit, files=sums_of(_files(cells))) if writer else {}
    records: dict[str, Mapping[str, Any]] = {cell.id: known[cell.id] for cell in cells if cell.id in known}
    todo = {cell.id: cell for cell in cells if cell.id not in records}
    names = {cell.task["policy"] for cell in todo.values()}
    chosen = executor or executor_for(jobs, len(todo), limit is not None or not all(map(is_shipped, names)))
    progress = Progress(len(cells), len(records))
    progress._left.update(str(cell.labels["policy"]) for cell in todo.values())
    where = {"host": platform.node(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    with stopping(chosen.run([_job(cell, writer) for cell in todo.values()])) as outcomes:
        for id, outcome in outcomes:
            cell = todo[id]
            outcome = {"row": outcome["row"], "ran": {**where, **outcome["ran"]}}
            if writer:
                writer.add(id, cell.labels, outcome)
            records[id] = {"id": id, **outcome}
            progress.note(cell, outcome)
            if on_progress:
                on_progress(progress)
    rows = tuple((cell, records[str(cell["id"])]) for cell in listed)
    return Swept(study, rows, progress, writer.beside if writer else 0)


def _files(cells: list[Cell]) -> list[Named]:
    """The files that the cells depend on."""
    names: dict[str, dict[str, None]] = {key: {} for key in ("policy", "profile", "trace", "model")}
    for cell in cells:
        about = {**cell.task["workload"], "policy": cell.task["policy"], "profile": cell.task["profile"]}
        for key, found in names.items():
            if key in about:
                found[about[key]] = None
    return [
        *policy_files(names["policy"]),
        *profile_files(names["profile"]),
        *trace_files(names["trace"]),
        *model_files(names["model"]),
    ]


def _job(cell: Cell, writer: Writer | None) -> Job:
    folder = str(writer.cell_folder(cell.id)) if writer and cell.task["timeline"] else None
    return Job({**cell.task, "folder": folder}, cell.group)
