"""report: a saved run, comparison or sweep as a page.

A folder keeps a run's options and figures, not its log. A run is a function of its inputs, so it is repeated, and its
figures are compared with the saved ones: a page never shows a run other than the one in the folder. Only what is
shipped or installed is repeated unasked. If the folder names files (a policy's program, a profile, a trace), the page
is made from what was saved of the run and says so. With `--trust` such runs are repeated, too; see `sim.foreign`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.commands.options import Trusting, command_with, files_of, say
from sim.commands.repeating import checked_job, options_of, read_saved, repeat, trust_of
from sim.commands.saved import Wanted, files_beside, saved_view, say_saved

if TYPE_CHECKING:
    from sim.report.page import RunView, SavedView

PAGES = (".html", ".htm")
"""Endings of a page's name."""


def report(
    source: Annotated[str, typer.Argument(help="folder of `run -o`, `compare -o`, `demo` or `sweep`")],
    out: Annotated[str, typer.Option("-o", "--out", help="page to write: report.html")],
    cell: Annotated[
        list[str] | None,
        typer.Option(help="a cell whose run the page shows, by the start of its id; may be given more than once"),
    ] = None,
    runs: Annotated[int, typer.Option(help="most runs that the page shows", min=0)] = 24,
    trust: Trusting = False,
) -> None:
    """Write a run, comparison or sweep as one HTML page.

    It opens without a network.
    """
    from sim.commands.report_sweep import sweep_page
    from sim.errors import TiersimError

    folder, target = Path(source), Path(out)
    if target.is_dir():
        raise typer.BadParameter(f"-o {out!r}: a folder; expected the name of a file, such as report.html")
    if target.suffix.lower() not in PAGES:
        raise typer.BadParameter(
            f"-o {out!r}: a report is a page in HTML; expected {str(target.with_suffix('.html'))!r}. "
            "Pictures are drawn with the results: `compare -o DIR --figures pdf`"
        )
    if cell and not (folder / "study.json").is_file():
        raise typer.BadParameter(f"--cell: {source} is not the folder of a sweep; only a sweep has cells")
    wanted = Wanted(folder, target, trust, cell or (), runs)
    kinds: dict[str, Callable[[Wanted], Path]] = {
        "study.json": sweep_page,
        "comparison.json": _comparison,
        "summary.json": _run,
    }
    for name, write in kinds.items():
        if (folder / name).is_file():
            print(write(wanted))
            return
    raise TiersimError(
        f"{source}: no results here: expected summary.json (of `run -o`), comparison.json (of `compare -o`) "
        "or study.json (of `sweep`)"
    )


# ---- runs and comparisons ------------------------------------------------------------------------


def _run(wanted: Wanted) -> Path:
    from sim.foreign import part_of
    from sim.pages import run_view
    from sim.report.page import write_run_page
    from sim.views import NAME

    folder = wanted.folder
    saved = read_saved(folder / "summary.json", "asked", "trace")
    asked = saved["asked"]
    policy = str(saved.get("policy") or asked.get("policy"))
    links, command = files_beside(folder, wanted.target), command_with("run", asked)
    trust, options = trust_of(wanted.folder, wanted.trust, saved, "summary.json"), options_of(asked)
    objections, job = checked_job(options, trust, files_of(asked, [policy]))
    if job is None:
        view = saved_view(part_of(folder, NAME), saved, objections, links=links, command=command)
        say_saved([view])
        return write_run_page(view, wanted.target)
    platform, trace = job
    result = repeat(options, trace, platform, policy, saved, folder)
    result = result.with_bound() if options["bound"] and result.refusal is None else result
    return write_run_page(run_view(result, command=command, links=links), wanted.target)


def _comparison(wanted: Wanted) -> Path:
    from sim.errors import BEGAN, Infeasible
    from sim.pages import run_view, saved_table
    from sim.report.page import write_table_page
    from sim.views import row_view

    folder = wanted.folder
    saved = read_saved(folder / "comparison.json", "asked", "trace", "rows", "left_out", "workload", "platform")
    rows = _rows(saved["rows"], folder / "comparison.json")
    asked = saved["asked"]
    trust, options = trust_of(wanted.folder, wanted.trust, saved, "comparison.json"), options_of(asked)
    objections, job = checked_job(options, trust, files_of(asked, ()))
    runs: dict[str, RunView | SavedView] = {}
    fitting = sorted((i for i, row in enumerate(rows) if row.get("fits")), key=lambda i: rows[i]["makespan_ns"])
    began = [i for i, row in enumerate(rows) if row.get("refusal") in BEGAN]
    for i in [*fitting, *began][: wanted.most]:
        name = rows[i]["policy"]
        against = objections + trust.objections(files_of({}, [name]))
        if against and not row_view(folder, i).is_file():
            print(f"tiersim: no run: {name}: nothing was saved for a page, and {'; '.join(against)}", file=sys.stderr)
        elif job is None or against:
            runs[name] = saved_view(row_view(folder, i), rows[i], against, title=name)
        else:
            say(f"… {name}")
            with suppress(Infeasible):  # it planned, and nothing ran
                result = repeat(options, job[1], job[0], name, {**saved, **rows[i]}, folder)
                runs[name] = run_view(result, title=name)
    say_saved(runs.values())
    view = saved_table(
        saved,
        runs,
        platform=job[0] if job else None,
        command=command_with("compare", asked),
        caution=objections + trust.objections(files_of({}, [row["policy"] for row in rows])),
    )
    return write_table_page(view, wanted.target)


def _rows(rows: Any, path: Path) -> list[dict[str, Any]]:
    """The rows of a saved comparison. Raises TiersimError for one without the keys that a page needs."""
    from sim.analysis.figures import misfit
    from sim.errors import TiersimError

    for i, row in enumerate(rows if isinstance(rows, list) else [None]):
        is_row = (
            isinstance(row, dict) and isinstance(row.get("policy"), str) and row.get("fits", "") in (True, False, None)
        )
        if not is_row:
            raise TiersimError(f"{path}: rows[{i}]: not a row of a comparison")
        if (key := misfit(row)) is not None:
            raise TiersimError(f"{path}: rows[{i}].{key}: not a value of that figure")
    found: list[dict[str, Any]] = rows
    return found
