"""What all figures share: scales with units, thinning of long curves, labels that do not overlap, saving."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.foreign_text import printable
from sim.report.colours import BLACK, FAINT, INK
from sim.report.files import write_aside
from sim.units import BYTES, TIMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]
Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels

DPI = 150
COLUMNS = 900  # columns of pixels in which a curve is drawn
FONT = 9
SMALL = 7.5


def byte_scale(largest: int, *, binary: bool) -> tuple[str, float]:
    """The unit in which the largest of some sizes reads as 1 or more, and its bytes."""
    units = {name: size for name, size in BYTES.items() if name == "B" or ("i" in name) == binary}
    return _scale(largest, units)


def time_scale(longest: int) -> tuple[str, float]:
    """The unit of time in which a span reads as 10 or more, and its nanoseconds."""
    return _scale(longest // 10, TIMES)


def _scale(largest: int, units: Any) -> tuple[str, float]:
    fitting = [(float(size), name) for name, size in units.items() if size <= max(largest, 1)]
    size, name = max(fitting)
    return name, size


def clock_text(unit: str) -> str:
    """A unit of time as labels write it."""
    return "µs" if unit == "us" else unit


def thin(level: Ints, times: Ints, start: int, end: int, bins: int = COLUMNS) -> NDArray[np.intp]:
    """Positions of the points that suffice to draw a step curve in `bins` columns of pixels.

    Of each column the first, lowest, highest and last point are kept, in order, and with them the peak and every
    visible dip (Jugel, Jerzak, Hackenbroich, Markl, "M4", VLDB 2014). Short curves are kept whole.
    """
    count = len(level)
    if count <= 4 * bins:
        return np.arange(count)
    column = np.minimum((times - start) * bins // max(end - start, 1), bins - 1)
    first = np.flatnonzero(np.diff(column, prepend=column[0] - 1))
    last = np.append(first[1:], count) - 1
    by_level = np.lexsort((level, column))  # columns are in order already, so each keeps its range of positions
    return np.unique(np.concatenate((first, last, by_level[first], by_level[last])))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of its own, in inches; nothing of it is global."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, *, grid: str = "y") -> None:
    """Plain axes: no box, small ticks, a faint grid behind."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.tick_params(labelsize=SMALL + 0.5, color=FAINT, labelcolor=INK, length=3)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=FAINT, linewidth=0.4, alpha=0.7)  # type: ignore[arg-type]


LONGEST, ON_AXES = 90, 60
"""Characters of a line at most, in a figure and beside a marker; longer ones would leave no space for the axes."""


def literal(text: str, most: int = LONGEST) -> str:
    """A name from elsewhere as figures take it: its dollars set no formula, and what cannot be shown is escaped.

    Of a line of more characters than `most` its beginning and its end are shown.
    """
    lines = printable(text, keep="\n").split("\n")
    half = most // 2
    shown = (line if len(line) <= most else f"{line[: half - 1]}…{line[-half:]}" for line in lines)
    return "\n".join(shown).replace("$", r"\$")


@contextmanager
def boxes_for_unknown_signs() -> Iterator[None]:
    """Signs that the font lacks are drawn as boxes, without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        yield


def draw_limit(axes: Axes, level: float) -> None:
    """A dashed line across the axes."""
    axes.axhline(level, color=BLACK, linewidth=1, linestyle=(0, (5, 3)), zorder=2)


def named(figure: Figure, policy: str) -> Figure:
    """The figure with the name of the policy that it shows above all else."""
    figure.suptitle(literal(policy), fontsize=SMALL + 1.5, color=BLACK)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Save a figure in the format of the name's ending: `.png`, `.svg` or `.pdf`. Equal figures give equal files.

    The file is replaced as a whole. Raises ValueError on an unknown ending, OSError.
    """
    import matplotlib

    ending = Path(path).suffix.lstrip(".").lower() or "png"
    if ending not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"figure {str(path)!r}: no format {ending!r}; use .png, .svg or .pdf")
    # no dates, and ids of an SVG drawn from the contents instead of at random
    undated: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}

    def write(file: IO[bytes]) -> None:
        with matplotlib.rc_context({"svg.hashsalt": "tiersim"}), boxes_for_unknown_signs():
            figure.savefig(file, format=ending, dpi=DPI, metadata=undated.get(ending))

    return write_aside(path, write)


# ---- labels ------------------------------------------------------------------------------------


@boxes_for_unknown_signs()
def place_labels(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    *,
    size: float,
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> None:
    """Label each point so that no label covers another, a point or a line; a thin line leads to distant labels.

    Greedy: the most crowded points first, each at the nearest free place around it to which a line can lead past the
    labels that stand already. The axes' limits must be set.

    lines: upright and level ones, from point to point, that no label shall cover either.
    """
    from matplotlib.patheffects import withStroke

    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]  # settles the layout, so that pixels are final
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    pixels = axes.transData.transform(np.array(points, float).reshape(-1, 2))
    scale = figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    taken: list[Box] = [(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in pixels.tolist()]
    ends = axes.transData.transform(np.array(lines, float).reshape(-1, 2)).reshape(-1, 2, 2)
    for (x0, y0), (x1, y1) in ends.tolist():
        taken.append((min(x0, x1) - scale, min(y0, y1) - scale, max(x0, x1) + scale, max(y0, y1) + scale))
    names: list[Box] = []  # where labels stand
    leaders: list[Box] = []
    near = [int((np.hypot(*(pixels - here).T) < 60 * scale).sum()) for here in pixels]
    texts = [literal(text, most=ON_AXES) for text in texts]
    for i in sorted(range(len(texts)), key=lambda k: (-near[k], texts[k])):
        probe = axes.text(0, 0, texts[i], fontsize=size)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        x, y = pixels[i].tolist()
        width, height = extent.width + 3 * scale, extent.height + 1 * scale  # space between labels
        box = _free_box(x, y, width, height, scale, (taken, names, leaders), (frame.x0, frame.y0, frame.x1, frame.y1))
        far = _is_far(x, y, box, scale)
        names.append(box)
        leaders += _leader(x, y, box, scale) if far else ()
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        label = axes.annotate(
            texts[i],
            points[i],
            ((middle[0] - x) / scale, (middle[1] - y) / scale),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=INK,
            zorder=6,
            path_effects=[withStroke(linewidth=2, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
            if far
            else None,
        )
        label.set_in_layout(False)  # the layout that its place was chosen for stays


RINGS = (7, 14, 22, 32, 44, 58, 74, 92, 112, 136, 164, 196)
ANGLES = (0, 180, 90, 270, 45, 315, 135, 225, 22, 338, 158, 202, 67, 112, 247, 292)


def _free_box(
    x: float,
    y: float,
    width: float,
    height: float,
    scale: float,
    taken: tuple[list[Box], list[Box], list[Box]],
    frame: Box,
) -> Box:
    """The nearest box for a label that covers nothing, and whose leader crosses no name; else the least evil.

    A line across a name is the lesser evil than a name on a name, a marker or a line of the figure.

    taken: markers and lines, names, leaders.
    """
    best: tuple[float, float, Box] | None = None
    marks, names, leaders = (np.array(boxes).reshape(-1, 4) for boxes in taken)
    for distance in RINGS:
        for angle in ANGLES:
            dx, dy = np.cos(np.radians(angle)), np.sin(np.radians(angle))
            middle_x = x + dx * (distance * scale + width / 2)
            middle_y = y + dy * (distance * scale + height / 2)
            box = (middle_x - width / 2, middle_y - height / 2, middle_x + width / 2, middle_y + height / 2)
            if box[0] < frame[0] or box[1] < frame[1] or box[2] > frame[2] or box[3] > frame[3]:
                continue
            covered = _covered(box, marks) + _covered(box, names)
            if best is not None and covered > best[0]:
                continue
            crossed = _covered(box, leaders)
            if _is_far(x, y, box, scale):
                crossed += sum(_covered(part, names) for part in _leader(x, y, box, scale))
            if covered == crossed == 0:
                return box
            if best is None or (covered, crossed) < best[:2]:
                best = (covered, crossed, box)
    return best[2] if best else (x, y, x + width, y + height)


def _is_far(x: float, y: float, box: Box, scale: float) -> bool:
    """Whether a label stands so far from its point that a line leads to it."""
    return max(box[0] - x, x - box[2], box[1] - y, y - box[3]) > 8 * scale


def _leader(x: float, y: float, box: Box, scale: float) -> list[Box]:
    """The line from a point to its label, as small boxes."""
    middle_x, middle_y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    dx, dy = middle_x - x, middle_y - y
    # of the way to the middle, the part up to the label's edge
    inside = min((box[2] - box[0]) / 2 / abs(dx) if dx else 1.0, (box[3] - box[1]) / 2 / abs(dy) if dy else 1.0, 1.0)
    count = int(np.hypot(dx, dy) / (2 * scale)) + 1
    at = (np.arange(count) + 0.5) / count * (1 - inside)
    return [(x + dx * t - scale, y + dy * t - scale, x + dx * t + scale, y + dy * t + scale) for t in at.tolist()]


def _covered(box: Box, others: NDArray[np.float64]) -> float:
    """Of other boxes, the area that a box covers."""
    widths = np.minimum(box[2], others[:, 2]) - np.maximum(box[0], others[:, 0])
    heights = np.minimum(box[3], others[:, 3]) - np.maximum(box[1], others[:, 1])
    return float((widths.clip(0) * heights.clip(0)).sum())
