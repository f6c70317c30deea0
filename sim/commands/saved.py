"""What a page is made from if a run is not repeated: its saved view, checked against its saved figures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from sim.pages import Links
    from sim.report.page import RunView, SavedView

NAMED = 3
"""Runs that a line on stderr names at most."""


@dataclass(frozen=True)
class Wanted:
    """A page that was asked for.

    folder: the results that it shows.
    target: the file to write.
    trust: whether files that the folder names may be used.
    cells: starts of the ids of cells to show; empty for all.
    most: how many runs at most.
    """

    folder: Path
    target: Path
    trust: bool
    cells: Sequence[str]
    most: int


def saved_view(path: Path, saved: Mapping[str, Any], objections: Sequence[str], **about: Any) -> SavedView:
    """A run as it was saved, checked against its figures. The page says why it was not repeated; see `say_saved`.

    about: keys of the view to set.

    Raises TiersimError if no view was saved, with what to do about it.
    """
    from sim.errors import TiersimError
    from sim.views import read_view

    try:
        view = read_view(path, **{"links": [], "command": "", "caution": list(objections), **about})
    except TiersimError as error:
        raise TiersimError(f"{error}; not repeated: {'; '.join(objections)}") from None
    figures, why = view.data["figures"], "repeat the run or sweep"
    check_figures(figures, saved, f"{path}: ", why)
    _check_complete(view, path, why)
    return view


def say_saved(runs: Iterable[RunView | SavedView]) -> None:
    """Say on stderr why runs were not repeated: a line per reason, with the runs that it is about."""
    from sim.report.page import SavedView

    titles: dict[str, list[str]] = {}
    for run in runs:
        for line in run.data["caution"] if isinstance(run, SavedView) else ():
            titles.setdefault(line, []).append(run.title)
    for line, named in titles.items():
        more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        print(f"tiersim: from what was saved: {', '.join(named[:NAMED])}{more}: {line}", file=sys.stderr)


def _check_complete(view: SavedView, path: Path, why: str) -> None:
    """Check that a view has every figure of a summary, and shows those that it has. Raises TiersimError."""
    from sim.analysis.figures import figures as declared
    from sim.errors import TiersimError
    from sim.report.table import summary_lines

    figures = view.data["figures"]
    missing = next((key for key in declared() if key not in figures), None)
    if missing is not None:
        raise TiersimError(f"{path}: has no {missing}: {why}")
    try:
        shown = [list(line) for line in summary_lines(figures)]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TiersimError(f"{path}: figures: {error!r}: {why}") from None
    if view.data["summary"] != shown or view.data["end"] != figures["makespan_ns"]:
        raise TiersimError(f"{path}: shows other figures than it has: {why}")


def check_repeated(figures: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Compare the figures of a repeated run with the saved ones. Raises TiersimError for the first that differs."""
    why = "program, profile or workload have changed since; repeat the run or sweep"
    check_figures(figures, saved, f"{where}: repeated, the run ", why)


def check_figures(figures: Mapping[str, Any], saved: Mapping[str, Any], where: str, why: str) -> None:
    """Compare figures with the saved ones. Raises TiersimError for the first that differs."""
    from sim.errors import TiersimError

    for key, value in json.loads(json.dumps(dict(figures))).items():
        if key in saved and saved[key] != value:
            raise TiersimError(f"{where}has {key} {value}, not {saved[key]} as saved: {why}")


def files_beside(folder: Path, target: Path, only: str = "timeline*") -> Links:
    """Files kept in a folder, and their addresses as seen from the page. Raises TiersimError for a link."""
    from sim.foreign import part_of

    found = []
    for path in sorted(folder.glob(only)):
        where = os.path.relpath(part_of(folder, path.name), target.parent)
        found.append((path.name, quote(Path(where).as_posix())))
    return tuple(found)
