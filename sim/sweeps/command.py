"""The commands `tiersim sweep` and `tiersim results`; `sim.cli` reads their arguments."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sim.errors import TiersimError, near
from sim.foreign_text import printable, styled
from sim.sweeps.frame import flat_rows, write_csv, write_parquet
from sim.sweeps.index import TIME_LIMIT_S, query
from sim.sweeps.store import Store
from sim.sweeps.study import load_study
from sim.sweeps.sweep import OnProgress, Progress, run_sweep

SHOWN = (
    *("policy", "budget", "fidelity", "status", "peak_bytes", "makespan_ns", "overhead", "above_bound"),
    *("stands_for", "bubble", "binding_device", "error"),
)
SEVERAL = ("stands_for", "bubble", "binding_device")
"""Columns of rows on several devices."""
WIDEST = 60
EVERY_S = 0.1


def run_study(
    study: str,
    *,
    out: str | None = None,
    jobs: int | None = None,
    resume: bool = False,
    dask: str | None = None,
    slurm: Mapping[str, Any] | None = None,
    bound: bool = False,
    as_json: bool = False,
) -> int:
    """`tiersim sweep`: run a study into a folder (default: its name with `-results`) and print a summary.

    Progress goes to standard error if that is a terminal. Returns the exit status: 0 if every cell has an answer, 1 if
    one failed, was killed or took too long.

    bound: whether rows have the bound, as the study's own key says.
    as_json: print the rows on standard output, and nothing else.

    Raises KeyboardInterrupt after printing how to resume.
    """
    read = load_study(study).bounded() if bound else load_study(study)
    folder = out or f"{Path(study).stem}-results"
    last: list[Progress] = []
    try:
        with _bar(last) as on_progress:
            swept = run_sweep(
                read, out=folder, jobs=jobs, resume=resume, dask=dask, slurm=slurm, on_progress=on_progress
            )
    except KeyboardInterrupt:
        words = ["tiersim", "sweep", study, "-o", folder, *(["--jobs", str(jobs)] if jobs else [])]
        words += [*(["--bound"] if bound else []), *(["--dask", dask] if dask else [])]
        words += [part for key, value in (slurm or {}).items() for part in ("--slurm", f"{key}={_setting(value)}")]
        words.append("--resume")
        how = last[-1].text() if last else "no cell was finished"
        print(f"tiersim: {how}\ntiersim: resume with: {shlex.join(words)}", file=sys.stderr)
        raise
    if as_json:
        print(json.dumps(flat_rows(swept.rows), allow_nan=False))
    else:
        print(swept.progress.text())
        for status in ("failed", "killed", "timed_out"):
            for cell, record in swept.rows:
                if record["row"]["status"] == status:
                    print(f"{status}: {cell['id'][:12]} {_name(cell['labels'])}: {record['row']['error']}")
        if swept.beside:
            print(f"{swept.beside} cells that are none of this study are kept in the folder, and not among its results")
        print(f"results in {folder}; tiersim results show {shlex.quote(folder)}")
    return 1 if swept.failed else 0


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _name(labels: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in labels.values())


@contextmanager
def _bar(last: list[Progress]) -> Iterator[OnProgress]:
    """A progress bar with the time left on a terminal, nothing in a pipe; `last` receives the latest progress."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(file=styled(sys.stderr))
    shown = 0.0
    columns = (
        TextColumn("{task.completed:.0f} of {task.total:.0f} cells"),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    plain = not console.is_terminal
    # what others print meanwhile goes past it: the console's style is for the bar
    with Bar(*columns, console=console, disable=plain, transient=True, auto_refresh=False, redirect_stdout=False,
             redirect_stderr=False) as bar:  # fmt: skip
        task = bar.add_task("")

        def tell(progress: Progress) -> None:
            nonlocal shown
            last[:] = [progress]
            now = time.monotonic()
            if not bar.disable and (now - shown > EVERY_S or progress.done == progress.total):
                shown = now
                left = progress.left_s
                text = "" if left is None else f"{clock_text(left)} left"
                bar.update(task, completed=progress.done, total=progress.total, description=text)
                bar.refresh()

        yield tell


def clock_text(seconds: float) -> str:
    """A span for readers: "42 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


# ---- results -------------------------------------------------------------------------------------


def list_results(folder: str, *, as_json: bool = False) -> str:
    """`tiersim results list DIR`: the stores in a folder, itself included, and how many cells of each have finished."""
    found = []
    paths = [Path(folder), *sorted(path for path in Path(folder).glob("*") if path.is_dir())]
    for path in paths:
        if not (path / "study.json").is_file():
            continue
        store = Store(path)
        counts = Counter(record["row"]["status"] if record else "missing" for _, record in store.rows())
        found.append({"folder": str(path), "cells": len(store.cells), **counts, "damaged_lines": store.damaged})
    if not found:
        raise TiersimError(f"{folder}: no sweep's results are here or one level below")
    if as_json:
        return json.dumps(found)
    return "\n".join(
        f"{row['folder']}: {row['cells']} cells: " + ", ".join(f"{n} {k}" for k, n in row.items() if k in _STATES and n)
        for row in found
    )


_STATES = ("ok", "infeasible", "not_applicable", "failed", "killed", "timed_out", "missing", "damaged_lines")


def show_results(folder: str, cell: str | None = None, *, as_json: bool = False) -> str:
    """`tiersim results show DIR [CELL]`: a table of the cells, or all of one given by the start of its id."""
    store = Store(folder)
    if cell is None:
        rows = flat_rows(store.whole_rows())
        return json.dumps(rows) if as_json else _table(rows, _columns(store, rows))
    found = [(about, record) for about, record in store.rows() if about["id"].startswith(cell)]
    if len(found) != 1:
        ids = [about["id"][:12] for about, _ in store.rows()]
        what = "more than one cell has that id" if found else "no cell has that id"
        raise TiersimError(f"{folder}: {cell!r}: {what}{near(cell, ids)}")
    about, record = found[0]
    if as_json:
        return json.dumps({**about, **(record or {})})
    lines = [f"{key}: {value}" for key, value in about["labels"].items()]
    if record is None:
        return "\n".join([*lines, "status: missing"])
    for key, value in {**record["row"], **record["ran"]}.items():
        if isinstance(value, dict):
            lines += [f"{key}.{part}: {amount}" for part, amount in value.items()]
        elif isinstance(value, list):
            lines += [f"{key}: {each}" for each in value]
        else:
            lines.append(f"{key}: {value}")
    return "\n".join(lines)


def export_results(
    folder: str,
    csv: str | os.PathLike[str] | None = None,
    *,
    parquet: str | os.PathLike[str] | None = None,
    timing: bool = False,
) -> list[Path]:
    """`tiersim results export DIR --csv FILE --parquet FILE`: the whole table in either or both.

    The same cells give the same bytes. Raises OSError; TiersimError if neither is given, or pyarrow is missing.
    """
    if csv is None and parquet is None:
        raise TiersimError("export: say where to: --csv FILE, --parquet FILE, or both")
    rows = Store(folder).whole_rows()
    written = [] if csv is None else [write_csv(rows, csv, timing=timing)]
    return written if parquet is None else [*written, write_parquet(rows, parquet, timing=timing)]


def query_results(folder: str, sql: str, *, time_limit_s: float = TIME_LIMIT_S, as_json: bool = False) -> str:
    """`tiersim results query DIR SQL`: rows of a SELECT on the table `cells`."""
    found = query(Store(folder), sql, time_limit_s=time_limit_s)
    rows = [
        {str(k): v for k, v in row.items()}
        for row in found.astype(object).where(found.notna(), None).to_dict("records")
    ]
    return json.dumps(rows, default=str) if as_json else _table(rows, [str(name) for name in found.columns])


def _columns(store: Store, rows: list[dict[str, Any]]) -> list[str]:
    """Axes on which the cells differ, and the most important figures."""
    labels = dict.fromkeys(name for cell in store.cells for name in cell["labels"])
    differ = [name for name in labels if len({str(row.get(name)) for row in rows}) > 1]
    several = any((row.get("stands_for") or 1) > 1 for row in rows)
    shown = [name for name in SHOWN if rows and name in rows[0] and (several or name not in SEVERAL)]
    return list(dict.fromkeys(["cell", *differ, *shown]))


def _table(rows: list[dict[str, Any]], names: list[str]) -> str:
    texts = [[printable(name) for name in names], *([_text(name, row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(names))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in texts
    )


def _text(name: str, value: Any) -> str:
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else printable(str(value))
    if name == "cell":
        return text[:12]
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"
