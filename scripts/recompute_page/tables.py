"""The tables of the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.recompute_page.cases import has_last_step
from scripts.recompute_page.results import Results
from sim.units import format_bytes

NONE = "–"
NOT = "✗"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A Markdown table; `right` names the columns of numbers."""
    numbers = set(right)
    rule = ["---:" if i in numbers else "---" for i in range(len(head))]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(rule) + " |"]
    return "\n".join((*lines, *("| " + " | ".join(row) + " |" for row in rows))) + "\n\n"


def percent(value: float | None, *, sign: bool = False) -> str:
    """A fraction in percent, one digit behind the point."""
    if value is None:
        return NONE
    text = f"{100 * value:{'+' if sign else ''}.1f}"
    return text.removeprefix("-") if float(text) == 0 else text


def size(bytes: int) -> str:
    """Bytes to three digits."""
    return format_bytes(bytes, digits=3)


def seconds(value: float) -> str:
    """Two digits are enough for a time that depends on the machine."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def name(result: Results, label: str) -> str:
    """A row's name, with an asterisk for a reconstruction and a dagger where it does more than recompute."""
    rows = [row for row in result.cells if row["label"] == label]
    policy, _, rest = label.partition(",")
    star = "\\*" if any(row["fidelity"] == "reconstruction" for row in rows) else ""
    star += " †" if result.free(label) else ""
    return f"`{policy}`{',' + rest if rest else ''}{star}"


def overheads(result: Results) -> str:
    """Time added per policy and budget, with the bound first and the best in bold."""
    peak = result.job["peak_bytes"]
    head = ["policy", *(f"{budget / 1e9:.1f} GB<br>{budget / peak:.0%}" for budget in result.budgets)]
    head += ["smallest", "above the bound", "planner, s", "solver"]
    rows = [["*proven bound*", *(percent(result.bound(b)) for b in result.budgets), size(result.job["floor_bytes"])]]
    rows[0] += [NONE] * 3
    best = {budget: result.winner(budget)[0] for budget in result.budgets}
    for label in result.labels:
        if not result.of(label):
            continue
        at = []
        for budget in result.budgets:
            over = result.overhead(label, budget)
            text = NOT if over is None else percent(over)
            at.append(f"**{text}**" if best[budget] == label else text)
        least = result.smallest(label)
        cells = result.of(label)
        rows.append(
            [
                name(result, label),
                *at,
                size(least["peak_bytes"]) if least else NONE,
                percent(result.above_bound(label)),
                seconds(statistics.median(row["plan_s"] for row in cells)),
                solver(cells),
            ]
        )
    return table(head, rows, range(1, len(head) - 1))


def last_step(result: Results) -> str:
    """Time added by each planner without and with the removal of unnecessary recomputation, as published in bold."""
    head = ["policy", *(f"{budget / 1e9:.1f} GB" for budget in result.budgets)]
    rows = []
    for label in result.labels:
        has = has_last_step(_policy(result, label))
        if has is None or not any(row["label"] == label for row in result.others):
            continue
        at = []
        for budget in result.budgets:
            published, other = result.overhead(label, budget), result.other(label, budget)
            texts = [NOT if over is None else percent(over) for over in (published, other)]
            texts[0] = f"**{texts[0]}**"
            at.append(" → ".join(texts[::-1] if has else texts))
        rows.append([name(result, label), *at])
    return table(head, rows, range(1, len(head))) if rows else ""


def _policy(result: Results, label: str) -> str:
    return next(str(row["policy"]) for row in result.cells if row["label"] == label)


def solver(cells: Sequence[Mapping[str, Any]]) -> str:
    """What a solver said of its plans, over all budgets: status and limit with how often, and its own gap."""
    said: dict[str, int] = {}
    gaps = []
    for row in cells:
        notes = row.get("solver") or {}
        if "status" in notes:
            text = notes["status"] + (f", {notes['limit']} limit" if notes.get("limit") else "")
            said[text] = said.get(text, 0) + 1
        if notes.get("bound_ns") and notes.get("rerun_ns"):
            gaps.append(1 - notes["bound_ns"] / notes["rerun_ns"])
    text = "; ".join(f"{status} ({count})" for status, count in said.items())
    return text + (f"; gap {statistics.median(gaps):.0%}" if gaps else "") or NONE


def winners(result: Results) -> str:
    """Which policy is fastest at each budget, beside the bound."""
    head = ("budget", "of the peak", "fastest", "time added", "bound", "distance", "next")
    rows = []
    policies = {row["label"]: row["policy"] for row in result.cells}
    for budget in result.budgets:
        (label, over), *rest = result.ranking(budget)
        second = next(((value, other) for other, value in rest if policies[other] != policies[label]), None)
        rows.append(
            [
                size(budget),
                f"{budget / result.job['peak_bytes']:.0%}",
                name(result, label),
                percent(over, sign=True) + " %",
                percent(result.bound(budget), sign=True) + " %",
                f"{100 * (over - result.bound(budget)):.1f} points",
                NONE if second is None else f"{name(result, second[1])} {percent(second[0], sign=True)} %",
            ]
        )
    return table(head, rows, (0, 1, 3, 4, 5))


def deep(rows: Sequence[Mapping[str, Any]]) -> str:
    """Planning and replaying on the deep trace."""
    head = ("policy", "planner, s", "planner and replay, s", "")
    shown = [
        [
            f"`{row['label']}`",
            seconds(row["plan_s"]) if "plan_s" in row else NONE,
            seconds(row["total_s"]),
            {"ok": "", "more memory": "does not fit the budget: replayed in more"}.get(row["status"], row["status"]),
        ]
        for row in rows
    ]
    return table(head, shown, (1, 2))


def misfits(result: Results) -> list[str]:
    """A line for each row that fits no budget or was refused, with the reason."""
    lines = []
    for label in sorted(result.labels):
        rows = [row for row in result.cells if row["label"] == label]
        if result.of(label):
            lost = [row for row in rows if row["status"] == "given up"]
            if lost:
                lines.append(f"- {name(result, label)}: {len(lost)} of {len(rows)} cells given up ({lost[0]['error']})")
            continue
        why = next((row["error"] for row in rows if row.get("error")), "nothing was run")
        lines.append(f"- {name(result, label)}: {why}")
    return lines
