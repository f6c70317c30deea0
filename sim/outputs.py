"""The files that a run or a comparison writes to a folder; each appears complete or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from sim.comparison import Comparison
from sim.errors import TiersimError
from sim.experiment import Result
from sim.foreign import part_of
from sim.report.cells import told_rows
from sim.report.error_bars import STATED, statement_errors
from sim.report.files import write_aside

LARGE_TIMELINE = 200_000
"""The number of intervals above which a timeline is compressed."""

MARKS = {"comparison": "comparison.json", "sweep": "study.json", "run": "summary.json"}
"""The file that identifies the kind of results in a folder; a comparison's folder also holds its fastest run."""

PICTURES = "png|svg|pdf"
PARTS = {
    "comparison": rf"comparison\.(csv|txt|json|{PICTURES})|views(/.*)?",
    "sweep": r"study\.json|lock|index\.(sqlite|sum)|segments(/.*)?|cells(/[^/]*)?",
    "run": rf"summary\.json|view\.json\.gz|timeline\.pftrace(\.gz)?|(memory|lanes)\.({PICTURES})",
}
"""What results of each kind consist of, as paths in their folder; analyses of a run are NAME.csv beside these."""


def is_part(name: str) -> bool:
    """Whether some results have a part of that name, a path in their folder."""
    return any(re.fullmatch(parts, name) for parts in PARTS.values())


def folder_of_part(path: str | os.PathLike[str]) -> Path | None:
    """The folder of saved results that a path is a part of, there or not; None for any other path.

    A report or an export beside the results is none of their parts.
    """
    target = Path(os.path.realpath(path))
    for folder in target.parents[:3]:
        name = target.relative_to(folder).as_posix()
        for kind, parts in PARTS.items():
            if (folder / MARKS[kind]).is_file() and (re.fullmatch(parts, name) or _is_analysis(kind, name)):
                return folder
    return None


def _is_analysis(kind: str, name: str) -> bool:
    if kind == "sweep" or not name.endswith(".csv"):
        return False
    from sim.analysis.registry import analyses

    return name.removesuffix(".csv") in analyses()


def check_folder(path: str | os.PathLike[str], kind: str) -> Path:
    """Check, before any work is done, that results can be written to a folder; does not create it.

    path: the folder.
    kind: kind of results, a key of `MARKS`.

    Raises OSError where it cannot be written, TiersimError where it holds results of another kind, or a link for them.
    """
    folder = Path(path)
    present = next((name for name, mark in MARKS.items() if part_of(folder, mark).exists()), kind)
    if present != kind:
        raise TiersimError(f"{folder}: holds a {present} ({MARKS[present]!r}); choose another folder for a {kind}")
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    part_of(folder, "views")
    probe = folder / f".writable-{secrets.token_hex(8)}"
    probe.touch(exist_ok=False)
    probe.unlink()
    with suppress(OSError):  # another run may be writing there already
        for each in missing:
            each.rmdir()
    return folder


def to_json(value: Any) -> str:
    """JSON text of figures, keys in the order given."""
    return json.dumps(value, indent=2, default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def write_text(path: Path, text: str) -> Path:
    """Write a text file; it appears complete or not at all."""

    def write(file: IO[bytes]) -> None:
        file.write(text.encode())

    return write_aside(path, write)


def write_run(
    result: Result, folder: Path, *, about: Mapping[str, Any], figures: str = "png", view: bytes | None = None
) -> list[Path]:
    """summary.json, view.json.gz, the timeline of one run, and its figures `memory` and `lanes`.

    figures: their format, "" for none.
    view: the saved view of the run, where it has been made.
    """
    from sim.report.timeline import write_timeline
    from sim.views import NAME, packed_view, write_packed

    name = "timeline.pftrace.gz" if len(result.log.intervals) > LARGE_TIMELINE else "timeline.pftrace"
    error = {"measured_error": statement_errors(result.platform.name, STATED)}
    written = [
        write_text(folder / "summary.json", to_json({**about, **result.summary(), **error}) + "\n"),
        write_packed(view or packed_view(result), folder / NAME),
        write_timeline(result.log, folder / name),
    ]
    if figures:
        from sim.report.draw import save_figure

        written.append(save_figure(result.plot_memory(), folder / f"memory.{figures}"))
        written.append(save_figure(result.plot_lanes(), folder / f"lanes.{figures}"))
    return written


def write_analyses(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """NAME.csv of each analysis, from its records."""
    from sim.report.analyses import analysis_csv

    return [write_text(folder / f"{name}.csv", analysis_csv(records)) for name, records in found.items()]


def write_comparison(
    comparison: Comparison, folder: Path, *, about: Mapping[str, Any], text: str, figures: str = ""
) -> list[Path]:
    """comparison.json, .csv and .txt, a view of each run, the files of the fastest run.

    figures: the format in which to draw the comparison and the fastest run, "" for not at all.
    """
    from sim.report.table import comparison_csv
    from sim.views import packed_view, row_view, write_packed

    written = [
        write_text(folder / "comparison.csv", comparison_csv(comparison.rows)),
        write_text(folder / "comparison.txt", text),
    ]
    record = {**about, "rows": told_rows(comparison.rows), "left_out": dict(comparison.left_out)}
    if comparison.bound is not None:
        record["bound"] = comparison.bound.text()
    record["measured_error"] = statement_errors(comparison.platform.name, STATED)
    written.append(write_text(folder / "comparison.json", to_json(record) + "\n"))
    ran, views = {**comparison.attempts, **comparison.results}, dict(comparison.views)
    for i, row in enumerate(comparison.rows):
        if (name := row["policy"]) in ran:
            if name not in views:
                views[name] = packed_view(ran[name], title=name)
            written.append(write_packed(views[name], row_view(folder, i)))
    if figures:
        from sim.report.draw import save_figure

        written.append(save_figure(comparison.plot(), folder / f"comparison.{figures}"))
    if (fastest := comparison.fastest) is not None:
        best = comparison.results[fastest]
        written += write_run(best, folder, about={**about, "policy": fastest}, figures=figures, view=views[fastest])
    return written
