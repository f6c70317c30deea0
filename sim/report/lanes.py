"""The figure of lanes: what each engine and link did, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.log import EventLog
from sim.report.colours import INK, VERMILION, WHY_COLOURS, ink_on
from sim.report.draw import COLUMNS, FONT, SMALL, clock_text, literal, new_figure, tidy, time_scale
from sim.report.tracks import Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]
ROW = 0.72  # height of a row's bars; rows stand 1 apart
LEAST = 0.04  # the least share of a row that a column shows of what happened in it at all
EDGED = 4  # columns from which a bar has a white edge


def plot_lanes(log: EventLog, window: tuple[int, int] | None = None) -> Figure:
    """What each engine and link did: one row each, coloured by the reason why it was busy, empty while idle.

    Rows that are idle throughout are left out, except main engines. A row with more intervals than can be drawn is
    divided into columns, each filled from below in proportion to the reasons (but never too little to be seen).

    window: (start, end) in ns; None takes the whole run.

    Raises ValueError on an empty window.
    """
    from matplotlib.patches import Patch

    scene = Scene(log)
    start, end = (0, max(log.end, 1)) if window is None else window
    if not start < end:
        raise ValueError(f"window {window}: the end must come after the start")
    rows = log.intervals
    seen = (rows[:, 0] < end) & (rows[:, 1] > start)
    tracks = [i for i, t in enumerate(scene.tracks) if t.is_main or (seen & (scene.track_of == i)).any()]
    clock, tick = time_scale(end)
    figure = new_figure(8, 0.9 + 0.38 * len(tracks))
    axes: Axes = figure.add_subplot()
    tidy(axes, grid="x")
    present = set()
    axes.set_xlim(start / tick, end / tick)
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    for y, track in enumerate(tracks):
        mine = rows[seen & (scene.track_of == track)]
        present |= set(mine[:, 4].tolist())
        crowded = len(mine) > COLUMNS // 2
        (_draw_columns if crowded else _draw_bars)(axes, y, mine, start, end, tick)
        if not crowded:
            _name_bars(axes, y, mine, scene, start, end, tick)
    axes.set_yticks(range(len(tracks)), [literal(scene.tracks[i].name) for i in tracks], fontsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time ({clock_text(clock)})", fontsize=FONT)
    patches = [
        Patch(**(_look(why) | {"linewidth": 0.6 if why == "stall" else 0.0}), label=why)
        for code, why in enumerate(WHY_COLOURS)
        if code in present
    ]
    if patches:
        figure.legend(
            handles=patches, loc="outside upper left", ncols=len(patches), fontsize=SMALL + 0.5, frameon=False,
            handlelength=1.6,
        )  # fmt: skip
    return figure


def _look(why: str) -> dict[str, Any]:
    """Fill of a kind of interval. A stall is hatched on white, which is clear in print without colour, too."""
    if why == "stall":
        return {"facecolor": "white", "edgecolor": VERMILION, "hatch": "/////", "linewidth": 0.0}
    return {"facecolor": WHY_COLOURS[why], "edgecolor": "white", "linewidth": 0.0}


def _draw_bars(axes: Axes, y: int, rows: Ints, start: int, end: int, tick: float) -> None:
    column = (end - start) / COLUMNS
    for code, why in enumerate(WHY_COLOURS):
        mine = rows[rows[:, 4] == code]
        if not len(mine):
            continue
        left = np.maximum(mine[:, 0], start)
        width = np.maximum(np.minimum(mine[:, 1], end) - left, column)  # a thinner one would fade away
        spans = list(zip((left / tick).tolist(), (width / tick).tolist(), strict=True))
        look = _look(why)
        if len(rows) <= 120 or why == "stall":
            look["linewidth"] = np.where(width < EDGED * column, 0.0, 0.4)  # an edge would cover a thin one
        axes.broken_barh(spans, (y - ROW / 2, ROW), **look)


def _draw_columns(axes: Axes, y: int, rows: Ints, start: int, end: int, tick: float) -> None:
    edges = np.linspace(start, end, COLUMNS + 1)
    shares = np.zeros((len(WHY_COLOURS), COLUMNS))
    for code in range(len(WHY_COLOURS)):
        share = np.diff(_busy_until(rows[rows[:, 4] == code], edges)) / np.diff(edges)
        shares[code] = np.where(share > 1e-12, np.maximum(share, LEAST), 0.0)
    shares /= np.maximum(1.0, shares.sum(axis=0))
    floor = np.full(COLUMNS, y + ROW / 2)
    for code, why in enumerate(WHY_COLOURS):
        if not shares[code].any():
            continue
        upper = floor - ROW * shares[code]
        axes.fill_between(
            edges / tick, np.append(floor, floor[-1]), np.append(upper, upper[-1]), step="post", rasterized=True,
            **_look(why),
        )  # fmt: skip
        floor = upper


def _busy_until(rows: Ints, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Nanoseconds of `rows` (which do not overlap) before each edge."""
    order = np.argsort(rows[:, 0], kind="stable")
    left, right = rows[order, 0].astype(float), rows[order, 1].astype(float)
    before = np.concatenate(([0.0], np.cumsum(right - left)))
    place = np.searchsorted(left, edges, side="right")
    open_end = np.append(0.0, right)[place]
    return np.asarray(before[place] - np.maximum(0.0, open_end - edges) * (place > 0))


def _name_bars(axes: Axes, y: int, rows: Ints, scene: Scene, start: int, end: int, tick: float) -> None:
    """Write the name into each bar that is wide enough; the cause of a stall on a white ground."""
    inches = 6.6  # width of the axes, about
    letter = 0.0085 * SMALL  # inches per letter, about
    ground = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"}
    for row in rows.tolist():
        left, right = max(row[0], start), min(row[1], end)
        name, args = scene.describe(row)
        is_stall = args["why"] == "stall"
        name = name.removeprefix("recompute ").removeprefix("stall: ")
        if (right - left) / (end - start) * inches > letter * (len(name) + (2 if is_stall else 1)):
            axes.text(
                (left + right) / 2 / tick, y, literal(name), ha="center", va="center", fontsize=SMALL - 0.5,
                clip_on=True, fontweight="bold",
                color=INK if is_stall else ink_on(WHY_COLOURS[str(args["why"])]),
                bbox=ground if is_stall else None,
            )  # fmt: skip
