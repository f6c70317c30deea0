"""A saved sweep as a page; see `sim.commands.report`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.commands.options import say
from sim.commands.repeating import steps
from sim.commands.saved import Wanted, check_repeated, files_beside, saved_view, say_saved
from sim.errors import BEGAN, Infeasible, ProfileError, TiersimError, near
from sim.limits import calling

if TYPE_CHECKING:
    from sim.experiment import Result
    from sim.foreign import Trust
    from sim.pages import Links
    from sim.report.page import RunView, SavedView
    from sim.sweeps.store import Store


MOST_CELLS = 100_000
"""Cells of the largest study whose runs are repeated for a page: all of them are built to find the ones it shows."""

MOST_FILTERED = 1_000_000
"""How many times a cell of it may be held against a filter."""


def sweep_page(wanted: Wanted) -> Path:
    """Write the page of a sweep: its rows as they were saved, and the runs of cells."""
    from sim.foreign import Trust
    from sim.least_time import KEEPING
    from sim.report.page import TableView, write_table_page
    from sim.sweeps.frame import flat_rows
    from sim.sweeps.store import Store

    folder = wanted.folder
    store = Store(folder)
    trust = Trust(folder, wanted.trust, store.files)
    records = list(store.rows())
    rows = [{**row, "id": row["cell"]} for row in flat_rows(records)]
    labels = list(dict.fromkeys(name for about, _ in records for name in about["labels"]))
    kept = {about["id"]: files_beside(store.cell_folder(about["id"]), wanted.target, "*") for about, _ in records}
    links = {id: files for id, files in kept.items() if files}
    chosen = _named(folder, wanted.cells, kept) if wanted.cells else [id for id in kept if id in links]
    found = _Runs(store, trust, links)
    found.collect(chosen, wanted.most)
    platforms, unread = _platforms(rows, trust)
    notes = [*found.notes, *unread]
    if any(row.get("bound_ns") is not None for row in rows):
        notes.append(f"above bound: over the least time among plans that {KEEPING}; where runs are others, no figure")
    if store.damaged:
        notes.append(f"{store.damaged} damaged lines in the folder count as missing")
    view = TableView(
        title=str(store.study.get("name") or folder.resolve().name),
        subtitle=str(store.study.get("description") or "sweep"),
        labels=labels,
        rows=rows,
        platforms=platforms,
        runs=found.runs,
        links=links,
        notes=notes,
        caution=found.caution,
    )
    return write_table_page(view, wanted.target)


def _named(folder: Path, cells: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """The cells whose ids start so. Raises TiersimError where none does, or more than one."""
    found = []
    for start in cells:
        mine = [id for id in known if id.startswith(start)]
        if len(mine) != 1:
            what = "more than one cell has that id" if mine else "no cell has that id"
            raise TiersimError(f"{folder}: {start!r}: {what}{near(start, [id[:12] for id in known])}")
        found += mine
    return found


class _Runs:
    """Runs of cells for a page: repeated as the sweep ran them, or from what was saved.

    runs: the views of cells, by id.
    notes: on runs that are left out.
    caution: why runs were not repeated.
    """

    def __init__(self, store: Store, trust: Trust, links: Mapping[str, Links]) -> None:
        self.store = store
        self.trust = trust
        self.links = links
        self.runs: dict[str, RunView | SavedView] = {}
        self.notes: list[str] = []
        self.caution: list[str] = []

    def collect(self, wanted: Sequence[str], most: int) -> None:
        """Add the runs of those of these cells that completed or did not fit, as many as `most`."""
        records = self.store.records()
        rows = {id: records[id]["row"] for id in wanted if id in records}
        ran = [id for id, row in rows.items() if row["status"] == "ok" or row.get("refusal") in BEGAN]
        if not ran:
            return
        against, tasks = self._tasks()
        labels = {cell["id"]: cell["labels"] for cell in self.store.cells}
        saved = {id for id in ran if id not in tasks and against and self._view(id).is_file()}
        available = [id for id in ran if id in tasks or id in saved]
        if len(available) < len(ran):
            why = "use files that the results name" if against else "are of another version of the program"
            self.notes.append(f"{len(ran) - len(available)} runs {why} and are not in this page")
        if len(available) > most:
            self.notes.append(
                f"{len(available) - most} more runs were kept than this page shows; --runs N or --cell ID adds them"
            )
        for id in available[:most]:
            row, title = records[id]["row"], str(labels[id].get("policy", id[:12]))
            objections = self._too_long(tasks[id].task) if id in tasks else against
            if not objections:
                with suppress(Infeasible):  # it planned, and nothing ran
                    self.runs[id] = self._repeat(id, tasks[id], row, title)
            elif self._view(id).is_file():
                self.runs[id] = saved_view(self._view(id), row, objections, title=title, links=self._links(id))
            else:
                self.notes += [f"cell {id[:12]} is not in this page: {line}" for line in objections]
        say_saved(self.runs.values())

    def _tasks(self) -> tuple[list[str], dict[str, Any]]:
        """Why not all cells can be repeated, and those that can, by id."""
        from sim.sweeps.study import load_study

        study, against = _without_files(self.store.study, self.trust)
        self.caution += against
        for line in against:
            print(f"tiersim: not repeated: {line}", file=sys.stderr)
        if study is None:
            return against, {}
        count, filters = _combinations(study), _filters(study)
        if count > MOST_CELLS or count * filters > MOST_FILTERED:
            has = f"{count:,} combinations{f' and {filters:,} filters' if filters else ''}"
            self.notes.append(f"no run is repeated for this page: the study has {has}")
            return against, {}
        try:
            cells = {cell.id: cell for cell in load_study(study).cells()}
        except TiersimError as error:
            self.notes += [f"no run is repeated for this page: {line}" for line in str(error).splitlines()]
            return against, {}
        large = {id: self.trust.too_much(_numbers(cell.task)) for id, cell in cells.items()}
        said = list(dict.fromkeys(line for lines in large.values() for line in lines))
        self.caution += said
        for line in said:
            print(f"tiersim: not repeated: {line}", file=sys.stderr)
        return [*against, *said], {id: cell for id, cell in cells.items() if not large[id]}

    def _too_long(self, task: Mapping[str, Any]) -> list[str]:
        """Why a cell is not repeated without --trust, from its trace before that is divided."""
        from sim.sweeps.job import build, layout_of, undivided

        if self.trust.asked:
            return []
        arguments = undivided(task)
        parts = (arguments.pop("micro_batches", None) or 1) * (layout_of(task).micro_batches or 1)
        trace = build(arguments)
        ops = len(trace.op_columns.name)
        return [*self.trust.too_divided(steps(trace), parts), *self.trust.too_long(ops, task["iterations"])]

    def _repeat(self, id: str, cell: Any, row: Mapping[str, Any], title: str) -> RunView:
        from sim.pages import run_view

        say(f"… {', '.join(map(str, cell.labels.values()))}")
        result = _cell(cell.task, row)
        check_repeated(result.summary(), row, f"{self.store.folder}: cell {id[:12]}")
        return run_view(result, title=title, links=self._links(id))

    def _view(self, id: str) -> Path:
        from sim.foreign import part_of
        from sim.views import NAME

        return part_of(self.store.cell_folder(id), NAME)

    def _links(self, id: str) -> Links:
        return self.links.get(id, ())


def _without_files(study: Mapping[str, Any], trust: Trust) -> tuple[dict[str, Any] | None, list[str]]:
    """A study without the files that may not be used, None if nothing is left of it; and why they may not."""
    from sim.foreign import model_files, policy_files, profile_files, trace_files

    kinds = {"policy": policy_files, "profile": profile_files, "trace": trace_files, "model": model_files}
    left, against = dict(study), []
    for key, files in kinds.items():
        if key not in study:
            continue
        entries = study[key] if isinstance(study[key], list) else [study[key]]
        kept = []
        for entry in entries:
            name = entry.get("name") if isinstance(entry, Mapping) else entry
            objections = trust.objections(files([name])) if isinstance(name, str) else []
            against += objections
            if not objections:
                kept.append(entry)
        if not kept:
            return None, list(dict.fromkeys(against))
        left[key] = kept
    return left, list(dict.fromkeys(against))


def _combinations(study: Mapping[str, Any]) -> int:
    """The most cells that a study has before its filters: its lists, crossed, and those of policies' tables."""

    def crossed(table: Mapping[str, Any]) -> int:
        return prod(max(len(value), 1) for value in table.values() if isinstance(value, list))

    def summed(entries: Any) -> int:
        return sum(crossed(each) if isinstance(each, Mapping) else 1 for each in entries or [None])

    entries = study["policy"] if isinstance(study.get("policy"), list) else [study.get("policy")]
    layouts = study["parallel"] if isinstance(study.get("parallel"), list) else [study.get("parallel")]
    figures = study.get("figures")
    rest = {key: value for key, value in study.items() if key not in ("policy", "parallel", "skip", "only", "timeline")}
    return summed(entries) * summed(layouts) * crossed(rest) * (crossed(figures) if isinstance(figures, Mapping) else 1)


def _filters(study: Mapping[str, Any]) -> int:
    """How many filters and values of them a study has, each of which may be held against each cell."""
    tables = (study.get(key) for key in ("skip", "only", "timeline"))
    listed = [entry for table in tables for entry in (table if isinstance(table, list) else [table])]
    filters = [entry for entry in listed if isinstance(entry, Mapping)]
    values = [value for entry in filters for value in entry.values()]
    return len(filters) + sum(len(value) if isinstance(value, list) else 1 for value in values)


def _numbers(task: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a cell that say how large it is, by the names of options."""
    workload, limit = task["workload"], task["recompute_limit"]
    named = {"batch": "batch", "seq": "sequence", "micro_batches": "micro_batches"}
    found = {key: workload.get(name) for key, name in named.items()} | dict(task.get("parallel") or {})
    return {**found, "iterations": task["iterations"], "recompute_limit": 0 if limit is None else limit}


def _cell(task: Mapping[str, Any], row: Mapping[str, Any]) -> Result:
    """The run of one cell, or what ran of it until it did not fit; its budget in bytes is in its row."""
    from sim.experiment import simulate
    from sim.policies import load
    from sim.sweeps.job import job

    trace, platform = job(task)
    try:
        with calling(task["policy"]):
            result = simulate(
                trace,
                platform,
                load(task["policy"], **task["parameters"]),
                budget=None if task["budget"] is None else row["budget_bytes"],
                seed=task["seed"],
                iterations=task["iterations"],
                recompute_limit=task["recompute_limit"],
            )
    except Infeasible as error:
        if error.attempt is None or row["status"] == "ok":
            raise
        attempt: Result = error.attempt
        return attempt
    return result.with_bound() if task["bound"] else result


def _platforms(rows: Sequence[Mapping[str, Any]], trust: Trust) -> tuple[list[Any], list[str]]:
    """The platforms of a sweep as their profiles are now; those that cannot or may not be read are left out."""
    from sim.foreign import profile_files
    from sim.hardware.profile import load_profile

    found, unread = [], []
    for name in dict.fromkeys(str(row.get("profile")) for row in rows):
        against = trust.objections(profile_files([name]))
        unread += [f"the figures of a machine are not in this page: {line}" for line in against]
        if against:
            continue
        try:
            found.append(load_profile(name))
        except ProfileError:
            continue
    return found, unread
