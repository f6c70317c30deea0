"""report: a saved run, comparison or sweep as a page.

What is on disk says what was asked, not all that happened. A run is a function of its inputs, so it is run again, and
its figures are held against those that were saved: a page never shows a run that is not the one in the folder.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from sim.commands.options import budget_of, parameters, platform_of, say, workload

if TYPE_CHECKING:
    from sim.experiment import Result
    from sim.hardware.platform import Platform
    from sim.pages import Links
    from sim.report.page import RunView
    from sim.sweeps.store import Store
    from sim.trace.graph import Trace


MAY_BE_LEFT_OUT = ("trace", "model", "dropout", "budget", "seed", "iterations", "param", "set_")
"""Options of `run` that a folder does not mention where they were not given."""


def report(
    source: Annotated[str, typer.Argument(help="folder of `run -o`, `compare -o`, `demo` or `sweep`")],
    out: Annotated[str, typer.Option("-o", "--out", help="page to write: report.html")],
    cell: Annotated[
        list[str] | None,
        typer.Option(help="a cell whose run to put in, by the start of its id; may be given more than once"),
    ] = None,
    runs: Annotated[int, typer.Option(help="how many runs to put into the page at most", min=0)] = 24,
) -> None:
    """Write a saved run, comparison or sweep as one HTML file that opens without a network."""
    from sim.errors import TiersimError

    folder, target = Path(source), Path(out)
    if target.is_dir():
        raise typer.BadParameter(f"-o {out!r}: a folder; expected the name of a file, such as report.html")
    if cell and not (folder / "study.json").is_file():
        raise typer.BadParameter(f"--cell: {source} is no sweep's folder; only a sweep has cells")
    for name, write in (("study.json", _sweep), ("comparison.json", _comparison), ("summary.json", _run)):
        if (folder / name).is_file():
            print(write(folder, target, cell or (), runs))
            return
    raise TiersimError(
        f"{source}: no results are here: there is no summary.json (of `run -o`), comparison.json (of `compare -o`) "
        "or study.json (of `sweep`)"
    )


# ---- runs and comparisons ------------------------------------------------------------------------


def _run(folder: Path, target: Path, cells: Sequence[str], most: int) -> Path:
    from sim.pages import run_view
    from sim.report.page import write_run_page

    saved = _read(folder / "summary.json", "asked", "trace")
    asked = saved["asked"]
    options = _options(asked)
    platform, trace = platform_of(options["profile"], options["set_"]), workload(options)
    policy = str(saved.get("policy") or asked.get("policy"))
    result = _run_again(options, trace, platform, policy, saved, folder)
    return write_run_page(run_view(result, command=_command("run", asked), links=_files(folder, target)), target)


def _comparison(folder: Path, target: Path, cells: Sequence[str], most: int) -> Path:
    from sim.comparison import Comparison
    from sim.pages import comparison_view
    from sim.report.page import write_table_page

    saved = _read(folder / "comparison.json", "asked", "trace", "rows", "left_out")
    options = _options(saved["asked"])
    platform, trace = platform_of(options["profile"], options["set_"]), workload(options)
    fitting = sorted((row for row in saved["rows"] if row["fits"]), key=lambda row: row["makespan_ns"])
    results = {}
    for row in fitting[:most]:
        say(f"… {row['policy']}")
        results[row["policy"]] = _run_again(options, trace, platform, row["policy"], {**saved, **row}, folder)
    found = Comparison(trace, platform, tuple(saved["rows"]), results, saved["left_out"])
    return write_table_page(comparison_view(found, command=_command("compare", saved["asked"])), target)


def _read(path: Path, *needed: str) -> dict[str, Any]:
    from sim.errors import TiersimError

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TiersimError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict) or not all(key in found for key in needed):
        raise TiersimError(f"{path}: expected the keys {', '.join(needed)}; `tiersim run -o` writes them")
    return found


def _options(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {key: asked.get(key) for key in (*MAY_BE_LEFT_OUT, *asked)}


def _run_again(
    options: Mapping[str, Any], trace: Trace, platform: Platform, policy: str, saved: Mapping[str, Any], folder: Path
) -> Result:
    """The run that was asked for. Raises TiersimError where its figures are not those that were saved."""
    from sim.experiment import simulate

    given = parameters(options["param"])
    result = simulate(
        trace,
        platform,
        policy,
        budget=budget_of(options["budget"], trace, platform),
        seed=options["seed"] or 0,
        iterations=options["iterations"],
        **given,
    )
    _hold({"trace": trace.content_hash, **result.summary()}, saved, f"{folder}: {policy}")
    return result


def _hold(figures: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Hold figures against those that were saved."""
    from sim.errors import TiersimError

    for key, value in json.loads(json.dumps(dict(figures))).items():
        if key in saved and saved[key] != value:
            raise TiersimError(
                f"{where}: run again it has {key} {value}, not {saved[key]} as saved: program, profile or workload "
                "have changed since; make the results anew"
            )


def _command(verb: str, asked: Mapping[str, Any]) -> str:
    """The command line that asked for this."""
    words = ["tiersim", verb]
    for key, value in asked.items():
        option = {"param": "-p", "set_": "--set"}.get(key, f"--{key.replace('_', '-')}")
        for each in value if isinstance(value, list) else [value]:
            words += [option, str(each)]
    return shlex.join(words)


def _files(folder: Path, target: Path, only: str = "timeline*") -> Links:
    """Files kept in a folder, and where they lie as seen from the page."""
    found = []
    for path in sorted(folder.glob(only)):
        where = os.path.relpath(path, target.parent)
        found.append((path.name, quote(Path(where).as_posix())))
    return tuple(found)


# ---- sweeps --------------------------------------------------------------------------------------


def _sweep(folder: Path, target: Path, cells: Sequence[str], most: int) -> Path:
    from sim.report.page import TableView, write_table_page
    from sim.sweeps.frame import flat_rows
    from sim.sweeps.store import Store

    store = Store(folder)
    records = list(store.rows())
    rows = [{**row, "id": row["cell"]} for row in flat_rows(records)]
    labels = list(dict.fromkeys(name for about, _ in records for name in about["labels"]))
    kept = {about["id"]: _files(store.folder / "cells" / about["id"][:16], target, "*") for about, _ in records}
    links = {id: files for id, files in kept.items() if files}
    wanted = _named(folder, cells, kept) if cells else [id for id in kept if id in links]
    runs, notes = _cells_again(store, wanted, most, links)
    if store.damaged:
        notes.append(f"{store.damaged} damaged lines in the folder count as missing")
    view = TableView(
        title=str(store.study.get("name") or folder.resolve().name),
        subtitle=str(store.study.get("description") or "sweep"),
        labels=labels,
        rows=rows,
        platforms=_platforms(rows),
        runs=runs,
        links=links,
        notes=notes,
    )
    return write_table_page(view, target)


def _named(folder: Path, cells: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """The cells that are meant. Raises TiersimError for one that is not there, or is not the only one."""
    from sim.errors import TiersimError, near

    found = []
    for start in cells:
        mine = [id for id in known if id.startswith(start)]
        if len(mine) != 1:
            what = "more than one cell has that id" if mine else "no cell has that id"
            raise TiersimError(f"{folder}: {start!r}: {what}{near(start, [id[:12] for id in known])}")
        found += mine
    return found


def _cells_again(
    store: Store, wanted: Sequence[str], most: int, links: Mapping[str, Links]
) -> tuple[dict[str, RunView], list[str]]:
    """Runs of cells, as the sweep ran them, and notes on those that are not there."""
    from sim.errors import TiersimError
    from sim.pages import run_view
    from sim.sweeps.study import load_study

    records = store.records()
    ran = [id for id in wanted if id in records and records[id]["row"]["status"] == "ok"]
    if not ran:
        return {}, []
    notes = []
    try:
        tasks = {cell.id: cell for cell in load_study(store.study).cells()}
    except TiersimError as error:
        return {}, [f"no run is in this page: {line}" for line in str(error).splitlines()]
    same = [id for id in ran if id in tasks]
    if len(same) < len(ran):
        notes.append(f"{len(ran) - len(same)} runs are of another version of the program and not in this page")
    if len(same) > most:
        notes.append(
            f"{len(same) - most} more runs were kept than are in this page; --runs N or --cell ID puts them in"
        )
    found = {}
    for id in same[:most]:
        say(f"… {', '.join(map(str, tasks[id].labels.values()))}")
        result = _cell(tasks[id].task, records[id]["row"])
        _hold(result.summary(), records[id]["row"], f"{store.folder}: cell {id[:12]}")
        found[id] = run_view(result, title=str(tasks[id].labels["policy"]), links=links.get(id, ()))
    return found, notes


def _cell(task: Mapping[str, Any], row: Mapping[str, Any]) -> Result:
    """The run of one cell; what its budget came to stands in its row."""
    from sim.experiment import simulate
    from sim.hardware.profile import load_profile
    from sim.policies import load
    from workloads import load_trace, transformer

    given = {key: tuple(value) if isinstance(value, list) else value for key, value in task["parameters"].items()}
    asked = dict(task["workload"])
    trace = load_trace(asked["trace"]) if "trace" in asked else transformer(asked.pop("model"), **asked)
    return simulate(
        trace,
        load_profile(task["profile"], overrides=task["figures"] or None),
        load(task["policy"], **given),
        budget=None if task["budget"] is None else row["budget_bytes"],
        seed=task["seed"],
        iterations=task["iterations"],
    )


def _platforms(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The machines of a sweep as their profiles are now; one that cannot be read any more is left out."""
    from sim.errors import ProfileError
    from sim.hardware.profile import load_profile

    found = []
    for name in dict.fromkeys(str(row["profile"]) for row in rows):
        try:
            found.append(load_profile(name))
        except ProfileError:
            continue
    return found
