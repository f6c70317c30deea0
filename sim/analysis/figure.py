"""What a figure of a run is, and what figures are measured against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sim.log import EventLog

Unit = Literal["bytes", "time", "percent", "change", "number", "flag", "text"]
"""bytes and time (ns) are whole numbers; percent and change are fractions, a change with its sign."""

LAST = 1000


@dataclass(frozen=True, eq=False)
class Reference:
    """What unlimited memory allows.

    log: the run that keeps everything, of the unchanged trace; memory saved is relative to its peak.
    makespan_ns: of the fastest run with the freedoms of the policy at hand; the overhead is relative to it.
    name: of that run: `keep_all`, or the name of a freedom, see `Policy.unlimited`.
    """

    log: EventLog
    makespan_ns: int
    name: str = "keep_all"


@dataclass(frozen=True)
class Figure:
    """One figure.

    unit: how its values are written.
    title: its name in the summary of a run.
    meaning: one line, for documents and hints.
    order: its position in the summary of a run; those of equal order follow as they are declared.
    column: position and title among the columns that tables of many runs show by default, None if it is not one.
    of: the function that computes it from a run's log and from what unlimited memory allows (None where that is not
        known); None for the fields of `Summary`.
    """

    unit: Unit
    title: str
    meaning: str
    order: int = LAST
    column: tuple[int, str] | None = None
    of: Callable[[EventLog, Reference | None], Any] | None = None
