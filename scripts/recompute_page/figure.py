"""The figure: time added against peak memory, a panel a group of policies and a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scripts.recompute_page.results import GROUPS, Results, group_of, results
from sim.report.colours import BLACK, FAINT, INK, POLICY_MARKERS, policy_colour, policy_marker
from sim.report.draw import FONT, SMALL, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GB = 10**9
TOP = 50.0
"""The highest overhead shown, percent."""


def plot_recompute(figures: Mapping[str, Any]) -> Figure:
    """All policies on all jobs, with the front of all of them and the bound below which no plan lies."""
    found = results(figures)
    figure = new_figure(10.5, 9.6)
    grid = figure.add_gridspec(len(GROUPS), len(found))
    for across, result in enumerate(found.values()):
        for down, group in enumerate(GROUPS):
            axes = figure.add_subplot(grid[down, across])
            tidy(axes, grid="both")
            _ground(axes, result)
            labels = [
                label
                for label in sorted(result.labels)
                if result.of(label) and group_of(_policy(result, label)) == down
            ]
            signs = _signs(result, labels)
            for label in labels:
                _line(axes, result, label, *signs[label])
            axes.set_xlim(0.97 * result.job["floor_bytes"] / GB, 1.02 * result.job["peak_bytes"] / GB)
            axes.set_ylim(0, TOP)
            if down == 0:
                axes.set_title(result.job["title"], fontsize=FONT, color=BLACK, loc="left", fontweight="bold")
            if across == 0:
                axes.set_ylabel(f"{group}\ntime added (%)", fontsize=FONT)
            if down == len(GROUPS) - 1:
                axes.set_xlabel("peak memory (GB)", fontsize=FONT)
            if across == len(found) - 1:
                axes.legend(
                    loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=SMALL, frameon=False, labelcolor=INK
                )
    figure.suptitle(
        "grey: no plan is possible (proven)     thin line: the best of all policies     hollow: a reconstruction     "
        "†: does more than recompute     "
        f"above {TOP:.0f} %: see the table",
        fontsize=SMALL, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _ground(axes: Axes, result: Results) -> None:
    sizes = [size / GB for size, _ in result.job["bounds"]]
    times = [100 * bound / result.job["makespan_ns"] for _, bound in result.job["bounds"]]
    axes.fill_between(sizes, 0, times, color=FAINT, alpha=0.45, linewidth=0)
    axes.axvspan(0, result.job["floor_bytes"] / GB, color=FAINT, alpha=0.45, linewidth=0)
    front = [(row["peak_bytes"] / GB, 100 * result.over(row)) for row in result.front()]
    axes.step(*zip(*front, strict=True), where="post", color=INK, linewidth=0.7, zorder=1)


def _signs(result: Results, labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each row: those of its name, with the next free marker where two rows would look alike."""
    taken: set[tuple[str, str]] = set()
    found = {}
    for label in labels:
        colour, marker = policy_colour(_policy(result, label)), policy_marker(label)
        start = POLICY_MARKERS.index(marker)
        turned = (*POLICY_MARKERS[start:], *POLICY_MARKERS[:start])
        sign = next((colour, one) for one in turned if (colour, one) not in taken)
        taken.add(sign)
        found[label] = sign
    return found


def _line(axes: Axes, result: Results, label: str, colour: str, marker: str) -> None:
    rows = result.front(label)
    hollow = any(row["fidelity"] == "reconstruction" for row in result.cells if row["label"] == label)
    axes.plot(
        [row["peak_bytes"] / GB for row in rows], [100 * result.over(row) for row in rows], color=colour,
        marker=marker, markersize=4.5, linewidth=0.9, markeredgecolor=colour,
        markerfacecolor="white" if hollow else colour, label=f"{label} †" if result.free(label) else label, zorder=3,
    )  # fmt: skip


def _policy(result: Results, label: str) -> str:
    return next(str(row["policy"]) for row in result.cells if row["label"] == label)
