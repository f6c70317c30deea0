"""How far a comparison is, on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim.commands.options import say

if TYPE_CHECKING:
    from sim.comparison import Progress


def told() -> Callable[[Progress], None]:
    """A function that says of each policy what came of it, how many are done and how long the rest may take.

    What all policies that leave their state in place are refused for is said once.
    """
    said: set[Any] = set()

    def tell(progress: Progress) -> None:
        row = progress.row
        if row.get("refusal") != "state":
            say(progress_line(progress))
        elif row["error"] not in said:
            said.add(row["error"])
            say(f"{row['error']}: policies that leave these in place are not run")

    return tell


def progress_line(progress: Progress) -> str:
    """One policy's outcome: "12 of 28  swap_all: 1.56 s, 7.24 GB; 5 s left"."""
    from sim.report.cells import clock, size
    from sim.sweeps.command import clock_text

    row = progress.row
    outcome = {False: "does not fit", None: "not run"}.get(row["fits"])
    if outcome is None:
        outcome = f"{clock(row['makespan_ns'])}, {size(row['peak_bytes'])}"
    is_last = progress.done == progress.total or progress.left_s is None
    left = "" if is_last else f"; {clock_text(progress.left_s or 0)} left"
    return f"{progress.done} of {progress.total}  {progress.label}: {outcome}{left}"
