"""Figures of a sweep's table: fronts of memory and time, heat maps, overhead over the budget, ablations.

Each takes the DataFrame that `sim.sweep` returns and gives one `matplotlib.figure.Figure`. Cells that differ in
more than the figure shows (model, profile, …) get a panel each, named by what differs. Policies that are
reconstructions, whose detail was not public, have hollow markers and an asterisk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.analysis.pareto import pareto_front
from sim.errors import TiersimError, near
from sim.report.colours import BLACK, FAINT, INK, policy_signs
from sim.report.draw import FONT, SMALL, byte_scale, clock_text, literal, new_figure, tidy, time_scale
from sim.units import BYTES, FLOPS, RATES, TIMES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 12
ACROSS = 3
SHOWN_CROSSES = 12
SHOWN_LABELS = 30  # more policies than that get no legend; the table names them


def plot_fronts(table: pd.DataFrame, *, binary: bool = False) -> Figure:
    """Peak memory against iteration time of all cells that fit, with their Pareto front.

    Budgets are not distinguished: a policy's points over budgets are its trade-off. Raises TiersimError without cells.
    """
    fitting = _fitting(table)
    unit, size = byte_scale(int(fitting["peak_bytes"].max()), binary=binary)
    clock, tick = time_scale(int(fitting["makespan_ns"].max()))
    figure, panels = _panels(fitting, {"policy", "budget", "seed"})
    signs = _signs(table)
    for axes, part in panels:
        for policy, rows in part.groupby("policy", sort=True):
            _points(axes, str(policy), signs, rows, rows["makespan_ns"] / tick, rows["peak_bytes"] / size, line=False)
        points = list(zip((part["makespan_ns"] / tick).tolist(), (part["peak_bytes"] / size).tolist(), strict=True))
        front = [points[i] for i in pareto_front(points)]
        if len(front) > 1:
            axes.step(*zip(*front, strict=True), where="post", color=FAINT, linewidth=1, zorder=1)
        _labelled(axes, f"iteration time ({clock_text(clock)})", f"peak memory ({unit})")
        axes.set_ylim(bottom=0)
    _legend(figure, fitting)
    return figure


def plot_winners(table: pd.DataFrame) -> Figure:
    """Heat map over batch and sequence: which policy is fastest of those that fit, and its overhead.

    A square where nothing fits is hatched. Budgets, models and profiles get panels. Raises TiersimError without
    an axis `batch` or `sequence`.
    """
    _need(table, "batch", "sequence")
    figure, panels = _panels(table, {"policy", "seed", "batch", "sequence"})
    signs = _signs(table)
    for axes, part in panels:
        columns, rows = sorted(set(part["sequence"])), sorted(set(part["batch"]))
        for (batch, sequence), cells in part.groupby(["batch", "sequence"]):
            x, y = columns.index(sequence), rows.index(batch)
            fitting = cells[cells["status"] == "ok"]
            if fitting.empty:
                _square(axes, x, y, "white", "nothing fits" if (cells["status"] == "infeasible").any() else "–", True)
                continue
            alike = fitting[fitting["makespan_ns"] == fitting["makespan_ns"].min()].drop_duplicates("policy")
            # of equally fast ones the baseline, else the first by name
            best = min(
                (row for _, row in alike.iterrows()), key=lambda row: (row["policy"] != "keep_all", row["policy"])
            )
            more = f"\nand {len(alike) - 1} more" if len(alike) > 1 else ""
            text = f"{_name(best)}{more}\n{_percent(best.get('overhead'))}"
            _square(axes, x, y, signs[str(best["policy"])][0], text, False)
        _grid(axes, columns, rows)
    figure.suptitle("fastest policy that fits, and its time over that without a limit", fontsize=FONT, color=INK)
    return figure


def plot_fits(table: pd.DataFrame) -> Figure:
    """Heat map over batch and sequence: how many of the policies fit. Raises TiersimError as `plot_winners` does."""
    _need(table, "batch", "sequence")
    figure, panels = _panels(table, {"policy", "seed", "batch", "sequence"})
    from matplotlib import colormaps

    shades = colormaps["Blues"]
    for axes, part in panels:
        columns, rows = sorted(set(part["sequence"])), sorted(set(part["batch"]))
        for (batch, sequence), cells in part.groupby(["batch", "sequence"]):
            asked = cells["policy"].nunique()
            fitting = cells.loc[cells["status"] == "ok", "policy"].nunique()
            shade = shades(0.1 + 0.5 * fitting / asked) if fitting else "white"
            _square(axes, columns.index(sequence), rows.index(batch), shade, f"{fitting} of {asked}", not fitting)
        _grid(axes, columns, rows)
    figure.suptitle("policies that fit", fontsize=FONT, color=INK)
    return figure


def plot_overhead(table: pd.DataFrame) -> Figure:
    """Slowdown against unlimited memory over the budget as a part of the unconstrained peak; one line per policy.

    A cross at the bottom, at a height of its own for each policy, marks a budget that a policy does not fit.
    Raises TiersimError without cells.
    """
    known = table[table["status"].isin(["ok", "infeasible"])].copy()
    known = known[known["unconstrained_peak_bytes"].notna() & known["budget_bytes"].notna()]
    if known.empty:
        raise TiersimError("plot_overhead: no cell has a budget and an unconstrained peak")
    # budgets above the peak limit nothing: all of them are one point
    share = (known["budget_bytes"].astype(float) / known["unconstrained_peak_bytes"].astype(float)).clip(upper=1.0)
    known["share"] = 100 * share
    figure, panels = _panels(known, {"policy", "seed", "budget"})
    signs = _signs(table)
    for axes, part in panels:
        foot = axes.get_xaxis_transform()  # x as the budget, y as a part of the axes' height
        for i, (policy, rows) in enumerate(part.sort_values("share").groupby("policy", sort=True)):
            good = rows[(rows["status"] == "ok") & rows.get("overhead", rows["share"] * float("nan")).notna()]
            _points(axes, str(policy), signs, good, good["share"], 100 * good["overhead"].astype(float), line=True)
            bad = rows[rows["status"] == "infeasible"]
            height = 0.03 + 0.035 * (i % SHOWN_CROSSES)
            axes.plot(bad["share"], [height] * len(bad), "x", transform=foot, color=signs[str(policy)][0], markersize=4)
        axes.margins(y=0.15)
        _labelled(axes, "budget (% of the unconstrained peak)", "time added (%)")
    _legend(figure, known)
    return figure


def plot_ablation(table: pd.DataFrame, figure: str) -> Figure:
    """Iteration time over one figure of the profile, such as `links.h2d.rate`; one line per policy.

    figure: its path, an axis of the study.

    Raises TiersimError if the table has no such axis or no cell fits.
    """
    _need(table, figure)
    fitting = _fitting(table).copy()
    parsed = [_amount(str(text)) for text in fitting[figure]]
    fitting["amount"] = [amount for amount, _ in parsed]
    clock, tick = time_scale(int(fitting["makespan_ns"].max()))
    drawn, panels = _panels(fitting, {"policy", "seed", figure})
    signs = _signs(table)
    for axes, part in panels:
        for policy, rows in part.sort_values("amount").groupby("policy", sort=True):
            _points(axes, str(policy), signs, rows, rows["amount"], rows["makespan_ns"] / tick, line=True)
        values = sorted(set(zip(part["amount"], part[figure], strict=True)))
        if values[0][0] > 0 and values[-1][0] > 8 * values[0][0]:
            axes.set_xscale("log")
            axes.minorticks_off()
        texts = [literal(str(text)) for _, text in values]
        axes.set_xticks([amount for amount, _ in values], texts, rotation=30, ha="right")
        _labelled(axes, figure, f"iteration time ({clock_text(clock)})")
        axes.set_ylim(bottom=0)
    _legend(drawn, fitting)
    return drawn


# ---- parts ---------------------------------------------------------------------------------------


def _labels(table: pd.DataFrame) -> list[str]:
    """The axes of a sweep's table: the columns between the cell's id and its status."""
    names = list(table.columns)
    if "status" not in names or "policy" not in names:
        raise TiersimError("a sweep's table has columns 'policy' and 'status'; this one lacks them")
    return [name for name in names[: names.index("status")] if name != "cell"]


def _need(table: pd.DataFrame, *axes: str) -> None:
    known = _labels(table)
    for axis in axes:
        if axis not in known:
            raise TiersimError(f"the table has no axis {axis!r}{near(axis, known)}")


def _fitting(table: pd.DataFrame) -> pd.DataFrame:
    _labels(table)
    fitting = table[table["status"] == "ok"]
    if fitting.empty:
        raise TiersimError("no cell of this table fits: there is nothing to draw")
    return fitting


def _panels(table: pd.DataFrame, inside: set[str]) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """A panel for each combination of the axes that differ and are not drawn inside one."""
    differ = [name for name in _labels(table) if name not in inside and table[name].nunique(dropna=False) > 1]
    parts = [(key, part) for key, part in table.groupby(differ, sort=False, dropna=False)] if differ else [((), table)]
    if len(parts) > PANELS:
        raise TiersimError(
            f"{len(parts)} panels are too many ({PANELS} at most): choose rows; they differ in {', '.join(differ)}"
        )
    across = min(ACROSS, len(parts))
    down = -(-len(parts) // across)
    figure = new_figure(2.2 + 3.4 * across, 0.6 + 2.9 * down)
    panels = []
    for i, (key, part) in enumerate(parts):
        axes = figure.add_subplot(down, across, i + 1)
        tidy(axes)
        values = key if isinstance(key, tuple) else (key,)
        title = ", ".join(f"{name} {value}" for name, value in zip(differ, values, strict=True))
        axes.set_title(literal(title), fontsize=SMALL + 0.5, color=INK, loc="left")
        panels.append((axes, part))
    return figure, panels


def _signs(table: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """The signs of all policies of a study, the same in each of its figures."""
    return policy_signs([str(policy) for policy in table["policy"].unique()])


def _points(
    axes: Axes, policy: str, signs: dict[str, tuple[str, str]], rows: pd.DataFrame, x: Any, y: Any, *, line: bool
) -> None:
    (colour, marker), hollow = signs[policy], _is_reconstruction(rows)
    axes.plot(
        x.astype(float), y.astype(float), marker=marker, markersize=5, color=colour, linewidth=1.1,
        linestyle="-" if line else "none", markerfacecolor="white" if hollow else colour, markeredgecolor=colour,
        label=policy,
    )  # fmt: skip


def _is_reconstruction(rows: pd.DataFrame) -> bool:
    return "fidelity" in rows and bool((rows["fidelity"] == "reconstruction").any())


def _name(row: pd.Series) -> str:
    return f"{row['policy']}*" if row.get("fidelity") == "reconstruction" else str(row["policy"])


def _labelled(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(literal(x), fontsize=FONT)
    axes.set_ylabel(literal(y), fontsize=FONT)


def _legend(figure: Figure, table: pd.DataFrame) -> None:
    """One entry per policy for all panels."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not 0 < len(handles) <= SHOWN_LABELS:
        return
    names = sorted(handles)
    made = {name for name in names if _is_reconstruction(table[table["policy"] == name])}
    figure.legend(
        [handles[name] for name in names], [literal(f"{name}*" if name in made else name) for name in names],
        loc="outside right upper", fontsize=SMALL, frameon=False, labelcolor=INK,
        title="* reconstruction" if made else None, title_fontsize=SMALL,
    )  # fmt: skip


def _square(axes: Axes, x: int, y: int, colour: Any, text: str, hatched: bool) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor=FAINT if hatched else "white", alpha=0.4
                  if not hatched else 1.0, hatch="///" if hatched else None, linewidth=0.6)
    )  # fmt: skip
    axes.text(x, y, literal(text), ha="center", va="center", fontsize=SMALL - 1, color=BLACK, wrap=True)


def _grid(axes: Axes, columns: Sequence[Any], rows: Sequence[Any]) -> None:
    axes.grid(visible=False)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(columns)), [literal(str(value)) for value in columns])
    axes.set_yticks(range(len(rows)), [literal(str(value)) for value in rows])
    _labelled(axes, "sequence (tokens)", "batch (samples)")


def _percent(overhead: Any) -> str:
    return "" if overhead is None or overhead != overhead else f"{100 * float(overhead):+.1f} %"


def _amount(text: str) -> tuple[float, str]:
    """The number of a figure in the base unit of its kind, and that unit; a plain number as it is."""
    number, _, unit = text.strip().partition(" ")
    for units in (RATES, BYTES, FLOPS, TIMES):
        if unit in units:
            return float(number.replace("_", "")) * float(units[unit]), next(u for u in units if units[u] == 1)
    try:
        return float(text), ""
    except ValueError:
        raise TiersimError(f"value {text!r}: expected a number or a quantity, to be drawn along an axis") from None
