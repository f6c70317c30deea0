"""The folder of a cell with a timeline."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from sim.analysis.figure import Reference
from sim.analysis.summary import summarize
from sim.experiment import Result


def write_cell(result: Result, reference: Reference | None, folder: Path) -> None:
    """Write a cell's folder under another name, sync it and rename it; an existing one is replaced.

    It holds the timeline for Perfetto, `summary.json`, the view for a report page, and, if pyarrow is installed, the
    log as Parquet: `events.parquet` and `memory.parquet`, with the columns of `Result.events` and `Result.memory`.
    Raises OSError.
    """
    from sim.report.error_bars import STATED, statement_errors
    from sim.report.timeline import write_timeline
    from sim.views import NAME, write_view

    if reference is not None:  # the open one, not a second one
        result = replace(result, reference=lambda: reference)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        write_timeline(result.log, aside / "timeline.pftrace.gz")
        error = {"measured_error": statement_errors(result.platform.name, STATED)}
        text = json.dumps({**summarize(result.log, reference).as_dict(), **error}, indent=2) + "\n"
        (aside / "summary.json").write_text(text, encoding="utf-8")
        write_view(result, aside / NAME)
        if find_spec("pyarrow"):
            result.events.to_parquet(aside / "events.parquet", engine="pyarrow", index=False)
            result.memory.to_parquet(aside / "memory.parquet", engine="pyarrow", index=False)
        for path in (*aside.iterdir(), aside):
            _sync(path)
        aside.chmod(0o777 & ~_mask())
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
