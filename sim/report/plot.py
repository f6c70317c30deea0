"""Figures: memory over time, what each engine and link did (`lanes`), and a comparison of policies.

Each is a `matplotlib.figure.Figure` of its own: there is no global state, and a notebook shows it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.analysis.pareto import pareto_front
from sim.analysis.peak_memory import fullest_home, peak_memory, roles_over_time
from sim.hardware.platform import Tier
from sim.log import EventLog
from sim.report.cells import clock, name_of, ordered
from sim.report.colours import BLACK, FAINT, INK, ROLE_COLOURS, policy_signs
from sim.report.draw import (
    COLUMNS,
    FONT,
    SMALL,
    byte_scale,
    clock_text,
    draw_limit,
    literal,
    new_figure,
    place_labels,
    save_figure,
    thin,
    tidy,
    time_scale,
)
from sim.report.lanes import plot_lanes
from sim.report.tracks import level_points
from sim.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_comparison", "plot_lanes", "plot_memory", "save_figure"]

Floats = NDArray[np.float64]
LISTED = 25  # policies named in the list of those that do not fit
NAMED = 16  # policies up to which each marker has its policy's name
PER_COLUMN = 30  # lines of the list beside the figure
IN_LIST = 42  # characters of one of them at most


# ---- memory over time --------------------------------------------------------------------------


def plot_memory(log: EventLog, tier: str | None = None, *, binary: bool = False) -> Figure:
    """Bytes in use of one tier over time, stacked by role, with its capacity and its peak.

    tier: its name; None takes the home tier of the fullest device. binary: GiB instead of GB.
    Raises ProfileError on an unknown tier.
    """
    platform = log.platform
    shown = fullest_home(log) if tier is None else platform.tier(tier)
    top_of = peak_memory(log, shown.name, largest=0)
    peak, at = top_of.bytes, top_of.time_ns
    frame = roles_over_time(log, shown.name)
    times = frame.pop("time_ns").to_numpy()
    kept = level_points(times, frame.sum(axis=1).to_numpy())
    frame, times = frame.iloc[kept], times[kept]
    total = frame.sum(axis=1).to_numpy()
    unit, size = byte_scale(max(peak, 1), binary=binary)
    unit_ns, tick = time_scale(max(log.end, 1))
    figure = new_figure(8, 3.6)
    axes: Axes = figure.add_subplot()
    tidy(axes)
    keep = thin(total, times, 0, max(log.end, 1))
    x = np.append(times[keep], log.end) / tick
    floor = _stack_roles(axes, x, {role: frame[role].to_numpy()[keep] / size for role in ROLE_COLOURS if role in frame})
    axes.step(x, floor, where="post", color=INK, linewidth=0.5)
    top = max(peak, 1)
    limit = _limit_text(log, shown, binary)
    if shown.capacity <= 3 * top:
        top = max(top, shown.capacity)
        draw_limit(axes, shown.capacity / size)
        limit = f"– – {limit}"
    else:
        limit += ", above this figure"
    axes.set_title(limit, fontsize=SMALL + 0.5, loc="right", color=INK)
    axes.set_xlim(0, max(log.end, 1) / tick)
    axes.set_ylim(0, top * 1.06 / size)
    ended = "" if log.complete else "; the run did not end"
    axes.set_xlabel(f"time ({clock_text(unit_ns)}){ended}", fontsize=FONT)
    axes.set_ylabel(literal(f"in use in {shown.name} ({unit})"), fontsize=FONT)
    # both figures are in the line above: next to the curve they would cover the limit, or each other
    title = f"▼ peak {format_bytes(peak, binary=binary)}" if peak else "nothing was held here"
    if peak:
        title += f" at {clock(at)}" + (f", {top_of.op}" if top_of.op else "")
        axes.plot([at / tick], [peak / size], marker="v", markersize=6, color=BLACK, clip_on=False, zorder=5,
                  markeredgecolor="white")  # fmt: skip
    axes.set_title(literal(title), fontsize=SMALL + 0.5, loc="left", color=BLACK, fontweight="bold")
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # from top to bottom like the layers
        figure.legend(
            handles[::-1],
            labels[::-1],
            loc="outside right upper",
            fontsize=SMALL + 0.5,
            frameon=False,
            handlelength=1.2,
        )
    return figure


def _stack_roles(axes: Axes, x: Floats, heights: Mapping[str, Floats]) -> Floats:
    """Draw the roles on top of each other, each up to the last of the times `x`; the height of all."""
    floor = np.zeros(len(x))
    for role, bytes in heights.items():
        height = np.append(bytes, bytes[-1:])
        axes.fill_between(
            x, floor, floor + height, step="post", color=ROLE_COLOURS[role], linewidth=0, label=name_of(role),
            rasterized=len(x) > COLUMNS,  # keeps vector files of long runs small
        )  # fmt: skip
        floor = floor + height
    return floor


def _limit_text(log: EventLog, tier: Tier, binary: bool) -> str:
    homes = {engine.home for engine in log.platform.engines if engine.main}
    word = "budget" if log.platform.budget is not None and tier.name in homes else "capacity"
    text = f"{word} {format_bytes(tier.capacity, binary=binary)}"
    if tier.nominal != tier.capacity:
        text += f" (nominal {format_bytes(tier.nominal, binary=binary)})"
    return text


# ---- policies ----------------------------------------------------------------------------------


def plot_comparison(rows: Sequence[Mapping[str, Any]], *, budget: int | None = None, binary: bool = False) -> Figure:
    """Time against peak memory, one marker per policy; those that do not fit are listed at the side.

    A hollow marker is a reconstruction: its paper left details open. The staircase is the Pareto front of time and
    memory. More than `NAMED` policies are numbered by their time and named at the side; time has a logarithmic axis
    where the slowest takes more than five times as long as the fastest.

    rows: as `sim.report.table.comparison_table` takes them.
    budget: bytes, drawn as a line; None draws the capacity, where all rows have the same and it is not far above them.
    binary: GiB instead of GB.
    """
    fitting = [row for row in ordered(rows) if row["fits"]]
    failing = [row for row in ordered(rows) if not row["fits"]]
    limit, limit_name = (budget, "budget") if budget is not None else (_capacity(fitting), "capacity")
    numbered = len(fitting) > NAMED
    beside = _beside(fitting if numbered else (), failing, binary)
    columns = max(1, -(-len(beside) // PER_COLUMN))
    figure = new_figure(8 + 3.2 * (columns - 1), 5)
    axes: Axes = figure.add_subplot()
    tidy(axes, grid="both")
    unit, size = byte_scale(max((row["peak_bytes"] for row in fitting), default=1), binary=binary)
    unit_ns, tick = time_scale(max((row["makespan_ns"] for row in fitting), default=1))
    points = [(row["makespan_ns"] / tick, row["peak_bytes"] / size) for row in fitting]
    _limits(axes, points, None if limit is None else limit / size)
    lines: list[tuple[tuple[float, float], tuple[float, float]]] = []
    if limit is not None and limit / size <= axes.get_ylim()[1]:
        draw_limit(axes, limit / size)
        said = f"– – {limit_name} {format_bytes(limit, binary=binary)}"
        axes.set_title(said, fontsize=SMALL, loc="right", color=INK)
        lines.append(((axes.get_xlim()[0], limit / size), (axes.get_xlim()[1], limit / size)))
    axes.set_xlabel(f"time of an iteration ({clock_text(unit_ns)})", fontsize=FONT)
    axes.set_ylabel(f"peak memory ({unit})", fontsize=FONT)
    signs = policy_signs([row["policy"] for row in rows])
    for row, (x, y) in zip(fitting, points, strict=True):
        (colour, marker), hollow = signs[row["policy"]], row.get("fidelity") == "reconstruction"
        axes.plot(
            [x], [y], marker=marker, markersize=7, color=colour, linestyle="none", zorder=4,
            markerfacecolor="white" if hollow else colour, markeredgecolor=colour, markeredgewidth=1.3,
        )  # fmt: skip
    lines += _staircase(axes, points)
    if any(row.get("fidelity") == "reconstruction" for row in fitting):
        axes.set_title("hollow: reconstruction, detail was not public", fontsize=SMALL, loc="left", color=INK)
    if beside:
        _list_beside(figure, beside, columns)
    names = [str(i) if numbered else row["policy"] for i, row in enumerate(fitting, 1)]
    place_labels(axes, *_joined(points, names), size=SMALL + (0 if numbered else 0.5), lines=lines)
    return figure


def _capacity(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The capacity of all rows, None where they differ or have none."""
    found = {row.get("capacity_bytes") for row in rows}
    return found.pop() if len(found) == 1 else None


def _limits(axes: Axes, points: Sequence[tuple[float, float]], budget: float | None) -> None:
    """Leave a margin around all points; an axis starts at zero unless that would crowd them."""
    times = [x for x, _ in points]
    if times and max(times) > 5 * min(times) > 0:
        _logarithmic(axes, min(times), max(times))
    for values, line, set_limits in (
        (times, [], axes.set_xlim),
        ([y for _, y in points], [] if budget is None else [budget], axes.set_ylim),
    ):
        if not values or (values == times and axes.get_xscale() == "log"):
            continue
        low, high = min(values), max(values)
        if line and line[0] <= 1.5 * high:
            high = max(high, line[0])
        room = 0.12 * (high - low) or 0.1 * high
        set_limits(0 if low - room < 0.2 * high else low - room, high + room)


def _logarithmic(axes: Axes, low: float, high: float) -> None:
    """A logarithmic axis of time with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    room = (high / low) ** 0.12
    axes.set_xscale("log")
    axes.set_xlim(low / room, high * room)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _staircase(
    axes: Axes, points: Sequence[tuple[float, float]]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Draw the front; its lines."""
    best = [points[i] for i in pareto_front(points)]
    if len(best) < 2:
        return []
    axes.step([x for x, _ in best], [y for _, y in best], where="post", color=FAINT, linewidth=1, zorder=1)
    steps = list(pairwise(best))
    return [line for (x, y), (end, low) in steps for line in (((x, y), (end, y)), ((end, y), (end, low)))]


def _joined(points: Sequence[tuple[float, float]], names: Sequence[str]) -> tuple[list[tuple[float, float]], list[str]]:
    """One label for all policies that share a point."""
    together: dict[tuple[float, float], list[str]] = {}
    for point, name in zip(points, names, strict=True):
        together.setdefault(point, []).append(name)
    texts = [",\n".join(", ".join(group[i : i + 2]) for i in range(0, len(group), 2)) for group in together.values()]
    return list(together), texts


def _beside(
    numbered: Sequence[Mapping[str, Any]], failing: Sequence[Mapping[str, Any]], binary: bool
) -> list[tuple[str, bool]]:
    """The list beside the figure: lines, and whether each is a heading."""
    lines = [(f"{i}  {row['policy']}, {clock(row['makespan_ns'])}", False) for i, row in enumerate(numbered, 1)]
    if lines:
        lines.insert(0, ("fit, by time", True))
    for heading, kind in (("do not fit", False), ("not run", None)):
        those = [row for row in failing if row["fits"] is kind]
        if those:
            lines.append((heading, True))
        for row in those[:LISTED]:
            floor = row.get("floor_bytes")
            more = f" (fits from {format_bytes(floor, binary=binary, digits=3)})" if floor else ""
            lines.append((row["policy"] + more, False))
        if len(those) > LISTED:
            lines.append((f"… and {len(those) - LISTED} more", False))
    return lines


def _list_beside(figure: Figure, lines: Sequence[tuple[str, bool]], columns: int) -> None:
    from matplotlib.lines import Line2D

    # a legend without signs: the layout reserves space for it next to the axes
    legend = figure.legend(
        handles=[Line2D([], [], linestyle="none") for _ in lines], labels=[literal(text, IN_LIST) for text, _ in lines],
        loc="outside right upper", fontsize=SMALL, frameon=False, handlelength=0, ncols=columns,
        handletextpad=0, labelcolor=INK, alignment="left", columnspacing=1,
    )  # fmt: skip
    for text, (_, heading) in zip(legend.get_texts(), lines, strict=True):
        if heading:
            text.set_fontweight("bold")
