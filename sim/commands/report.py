"""report: a saved run, comparison or sweep as a page.

A folder keeps a run's options and figures, not its log. A run is a function of its inputs, so it is repeated, and its
figures are compared with the saved ones: a page never shows a run other than the one in the folder. Only what is
shipped or installed is repeated unasked. If the folder names files (a policy's program, a profile, a trace), the page
is made from what was saved of the run and says so. With `--trust` such runs are repeated, too; see `sim.foreign`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.commands.options import JSON, OUT, budget_of, files_of, job_of, limit_of, parameters, say
from sim.commands.runs import COMPARED, RUN
from sim.commands.saved import Wanted, check_repeated, files_beside, saved_view

if TYPE_CHECKING:
    from sim.experiment import Result
    from sim.foreign import Named, Trust
    from sim.hardware.platform import Platform
    from sim.report.page import RunView, SavedView
    from sim.trace.graph import Trace

ASKED = {option.name: option.kind for option in (*RUN, *COMPARED) if option not in (OUT, JSON)}
"""The type of each option that a folder may mention."""


def report(
    source: Annotated[str, typer.Argument(help="folder of `run -o`, `compare -o`, `demo` or `sweep`")],
    out: Annotated[str, typer.Option("-o", "--out", help="page to write: report.html")],
    cell: Annotated[
        list[str] | None,
        typer.Option(help="a cell whose run the page shows, by the start of its id; may be given more than once"),
    ] = None,
    runs: Annotated[int, typer.Option(help="most runs that the page shows", min=0)] = 24,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="use the files that the folder names: its own policies' programs, profiles, traces, models"
        ),
    ] = False,
) -> None:
    """Write a saved run, comparison or sweep as one HTML file that opens without a network."""
    from sim.commands.report_sweep import sweep_page
    from sim.errors import TiersimError

    folder, target = Path(source), Path(out)
    if target.is_dir():
        raise typer.BadParameter(f"-o {out!r}: a folder; expected the name of a file, such as report.html")
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
    from sim.pages import run_view
    from sim.report.page import write_run_page
    from sim.views import NAME

    folder = wanted.folder
    saved = _read(folder / "summary.json", "asked", "trace")
    asked = saved["asked"]
    policy = str(saved.get("policy") or asked.get("policy"))
    links, command = files_beside(folder, wanted.target), _command("run", asked)
    trust, options = _trust(wanted, saved, "summary.json"), _options(asked)
    objections, job = _job(options, trust, files_of(asked, [policy]))
    if job is None:
        view = saved_view(folder / NAME, saved, objections, links=links, command=command)
        return write_run_page(view, wanted.target)
    platform, trace = job
    result = _repeat(options, trace, platform, policy, saved, folder)
    return write_run_page(run_view(result, command=command, links=links), wanted.target)


def _comparison(wanted: Wanted) -> Path:
    from sim.pages import run_view, saved_table
    from sim.report.page import write_table_page
    from sim.views import row_view

    folder = wanted.folder
    saved = _read(folder / "comparison.json", "asked", "trace", "rows", "left_out", "workload", "platform")
    rows = _rows(saved["rows"], folder / "comparison.json")
    asked = saved["asked"]
    trust, options = _trust(wanted, saved, "comparison.json"), _options(asked)
    objections, job = _job(options, trust, files_of(asked, ()))
    runs: dict[str, RunView | SavedView] = {}
    fitting = sorted((i for i, row in enumerate(rows) if row["fits"]), key=lambda i: rows[i]["makespan_ns"])
    for i in fitting[: wanted.most]:
        name = rows[i]["policy"]
        against = objections + trust.objections(files_of({}, [name]))
        if against and not row_view(folder, i).is_file():
            print(f"tiersim: no run: {name}: nothing was saved for a page, and {'; '.join(against)}", file=sys.stderr)
        elif job is None or against:
            runs[name] = saved_view(row_view(folder, i), rows[i], against, title=name)
        else:
            say(f"… {name}")
            result = _repeat(options, job[1], job[0], name, {**saved, **rows[i]}, folder)
            runs[name] = run_view(result, title=name)
    view = saved_table(
        saved,
        runs,
        platform=job[0] if job else None,
        command=_command("compare", asked),
        caution=objections + trust.objections(files_of({}, [row["policy"] for row in rows])),
    )
    return write_table_page(view, wanted.target)


def _job(
    options: Mapping[str, Any], trust: Trust, files: Iterable[Named]
) -> tuple[list[str], tuple[Platform, Trace] | None]:
    """Why a run cannot be repeated; if it can, its platform and trace."""
    objections = [*trust.objections(files), *trust.too_much(options)]
    if objections:
        return objections, None
    job = job_of(dict(options))
    objections = trust.too_long(len(job[1].op_columns.name), options["iterations"])
    return objections, None if objections else job


def _trust(wanted: Wanted, saved: Mapping[str, Any], file: str) -> Trust:
    from sim.foreign import Trust, read_sums

    return Trust(wanted.folder, wanted.trust, read_sums(saved.get("files"), str(wanted.folder / file)))


def _read(path: Path, *needed: str) -> dict[str, Any]:
    from sim.errors import TiersimError
    from sim.foreign import read_file

    try:
        found = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise TiersimError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict) or not all(key in found for key in needed):
        raise TiersimError(f"{path}: expected the keys {', '.join(needed)}; `tiersim run -o` writes them")
    for key in ("workload", "left_out"):
        if key in needed and not isinstance(found[key], dict):
            raise TiersimError(f"{path}: {key}: expected an object")
    asked = found["asked"]
    if not isinstance(asked, dict) or not isinstance(asked.get("profile"), str):
        raise TiersimError(f"{path}: asked: expected the options of the run, 'profile' among them")
    for key, kind in ASKED.items():
        value = asked.get(key)
        words = value if kind is list and isinstance(value, list) else []
        if not (value is None or type(value) is kind) or not all(isinstance(word, str) for word in words):
            raise TiersimError(f"{path}: asked.{key}: expected {kind.__name__}, not {value!r}")
    return found


def _rows(rows: Any, path: Path) -> list[dict[str, Any]]:
    """The rows of a saved comparison. Raises TiersimError for one without the keys that a page needs."""
    from sim.errors import TiersimError

    for i, row in enumerate(rows if isinstance(rows, list) else [None]):
        is_row = isinstance(row, dict) and isinstance(row.get("policy"), str) and row.get("fits") in (True, False, None)
        if not is_row or (row["fits"] and not all(type(row.get(k)) is int for k in ("makespan_ns", "peak_bytes"))):
            raise TiersimError(f"{path}: rows[{i}]: not a row of a comparison")
    found: list[dict[str, Any]] = rows
    return found


def _options(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {key: asked.get(key) for key in (*ASKED, *asked)}


def _repeat(
    options: Mapping[str, Any], trace: Trace, platform: Platform, policy: str, saved: Mapping[str, Any], folder: Path
) -> Result:
    """The saved run, repeated. Raises TiersimError if its figures differ from the saved ones."""
    from sim.experiment import simulate

    given = parameters(options["param"])
    result = simulate(
        trace,
        platform,
        policy,
        budget=budget_of(options["budget"], trace, platform),
        seed=options["seed"] or 0,
        iterations=options["iterations"],
        **limit_of(options["recompute_limit"]),
        **given,
    )
    check_repeated({"trace": trace.content_hash, **result.summary()}, saved, f"{folder}: {policy}")
    return result


def _command(verb: str, asked: Mapping[str, Any]) -> str:
    """The command line with these options."""
    words = ["tiersim", verb]
    for key, value in asked.items():
        option = {"param": "-p", "set_": "--set"}.get(key, f"--{key.replace('_', '-')}")
        for each in value if isinstance(value, list) else [value]:
            words += [option, str(each)]
    return shlex.join(words)
