"""What a page is made from where a run is not repeated: what was saved of it, held against its figures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from sim.pages import Links
    from sim.report.page import SavedView


@dataclass(frozen=True)
class Wanted:
    """What a page is made of. cells: ids of cells to put in; most: how many runs at most."""

    folder: Path
    target: Path
    trust: bool
    cells: Sequence[str]
    most: int


def saved_view(path: Path, saved: Mapping[str, Any], objections: Sequence[str], **about: Any) -> SavedView:
    """A run from what was saved of it, held against its figures; why it was not run again is said on the page and here.

    about: keys of the view to set. Raises TiersimError where nothing was saved, with what to do about it.
    """
    from sim.errors import TiersimError
    from sim.views import read_view

    try:
        view = read_view(path, **{"links": [], "command": "", "caution": list(objections), **about})
    except TiersimError as error:
        raise TiersimError(f"{error}; not run again: {'; '.join(objections)}") from None
    figures, why = view.data["figures"], "make the results anew"
    hold(figures, saved, f"{path}: ", why)
    _hold_whole(view, saved, path, why)
    for line in objections:
        print(f"tiersim: from what was saved: {view.title}: {line}", file=sys.stderr)
    return view


def _hold_whole(view: SavedView, saved: Mapping[str, Any], path: Path, why: str) -> None:
    """See that a view has every figure that was saved, and shows these. Raises TiersimError."""
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


def hold_again(figures: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Hold the figures of a run that was run again against those that were saved. Raises TiersimError."""
    why = "program, profile or workload have changed since; make the results anew"
    hold(figures, saved, f"{where}: run again it ", why)


def hold(figures: Mapping[str, Any], saved: Mapping[str, Any], where: str, why: str) -> None:
    """Hold figures against those that were saved. Raises TiersimError for the first that differs."""
    from sim.errors import TiersimError

    for key, value in json.loads(json.dumps(dict(figures))).items():
        if key in saved and saved[key] != value:
            raise TiersimError(f"{where}has {key} {value}, not {saved[key]} as saved: {why}")


def files_beside(folder: Path, target: Path, only: str = "timeline*") -> Links:
    """Files kept in a folder, and where they lie as seen from the page."""
    found = []
    for path in sorted(folder.glob(only)):
        where = os.path.relpath(path, target.parent)
        found.append((path.name, quote(Path(where).as_posix())))
    return tuple(found)
