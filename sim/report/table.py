"""Tables for the terminal, and the same as plain text and CSV."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from sim.analysis.figures import LAST, known
from sim.foreign_text import csv_text, printable, styled
from sim.report.cells import (
    MODEL_ERROR,
    NONE,
    Column,
    Row,
    columns,
    device_ns,
    failure_lines,
    key_lines,
    name_of,
    ordered,
    percent,
    standings,
    state_lines,
    text_of,
    total,
    unit_of,
)
from sim.report.footer import Footer, footer_lines
from sim.report.verdict import verdict_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GAP = 2  # spaces between columns


# ---- comparison --------------------------------------------------------------------------------


def comparison_text(
    rows: Sequence[Row],
    *,
    footer: Footer | None = None,
    model_error: float = MODEL_ERROR,
    binary: bool = False,
) -> str:
    """The comparison as plain text: state that exceeds a tier, a line per policy, what does not fit, footer, verdict.

    rows: see `sim.report.cells`.
    model_error: times nearer to the fastest than this fraction are marked as not distinguishable.
    binary: GiB instead of GB.
    """
    shown = columns(rows, model_error=model_error, binary=binary)
    first = state_lines(rows, binary=binary)
    lines = [*first, *([""] if first else []), *_aligned(shown, ordered(rows))]
    for block in _below(rows, footer, model_error, binary):
        lines += ["", *block]
    return printable("\n".join(lines) + "\n", keep="\n")


def comparison_table(rows: Sequence[Row], *, model_error: float = MODEL_ERROR, binary: bool = False) -> Table:
    """The comparison as a table for `rich`: those not distinguishable from the fastest in bold, misfits dimmed."""
    return _rich_table(columns(rows, model_error=model_error, binary=binary), rows, model_error)


def print_comparison(
    rows: Sequence[Row],
    *,
    footer: Footer | None = None,
    model_error: float = MODEL_ERROR,
    binary: bool = False,
    file: IO[str] | None = None,
) -> None:
    """Print the comparison: a coloured table on a terminal, `comparison_text` in a pipe or file.

    On a terminal that is too narrow for all columns, optional ones are left out and named.
    """
    from rich.console import Console

    console = Console(file=styled(file or sys.stdout), highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.file.write(comparison_text(rows, footer=footer, model_error=model_error, binary=binary))
        return
    shown, left_out = _fitting(columns(rows, model_error=model_error, binary=binary), rows, console.width)
    if first := state_lines(rows, binary=binary):
        _print_lines(console, first, "yellow")
        console.print()
    console.print(_rich_table(shown, rows, model_error))
    if left_out:
        _print_lines(console, [f"too narrow for: {', '.join(left_out)}"], "dim")
    failing, keys, about, verdict = _blocks(rows, footer, model_error, binary)
    _print_lines(console, failing, "yellow")
    _print_lines(console, [*keys, *about], "dim")
    _print_lines(console, verdict, "bold")


def comparison_csv(rows: Sequence[Row]) -> str:
    """All rows in the order given with every key as a column: exact integers, nested ones as `stall_ns.transfer`."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    return csv_text(flat, names)


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{part}": amount for part, amount in value.items()}
        elif key == "holders":
            flat[key] = json.dumps(value) if value else ""
        elif isinstance(value, (tuple, list, set, frozenset)):
            flat[key] = " ".join(
                str(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)
            )
        else:
            flat[key] = value
    return flat


def _blocks(
    rows: Sequence[Row], footer: Footer | None, model_error: float, binary: bool
) -> tuple[list[str], list[str], list[str], list[str]]:
    about = footer_lines(footer, binary=binary) if footer else []
    failing = failure_lines(rows, binary=binary, brief=footer is not None and footer.brief)
    return failing, key_lines(rows, model_error), about, verdict_lines(rows, model_error, binary=binary)


def _below(rows: Sequence[Row], footer: Footer | None, model_error: float, binary: bool) -> list[list[str]]:
    return [block for block in _blocks(rows, footer, model_error, binary) if block]


def _aligned(shown: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    cells = [[column.title for column in shown], *([printable(column.text(row)) for column in shown] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    return [
        (" " * GAP)
        .join(
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(line, widths, shown, strict=True)
        )
        .rstrip()
        for line in cells
    ]


def _fitting(shown: Sequence[Column], rows: Sequence[Row], width: int) -> tuple[list[Column], list[str]]:
    """The columns that fit into a width, and the titles of those left out."""
    kept = list(shown)
    left_out: list[str] = []
    for column in sorted((c for c in shown if c.spare), key=lambda c: c.spare):
        if max(map(len, _aligned(kept, rows))) <= width:
            break
        kept.remove(column)
        left_out.append(column.title)
    return kept, left_out


def _rich_table(shown: Sequence[Column], rows: Sequence[Row], model_error: float) -> Table:
    from rich.table import Table
    from rich.text import Text

    standing = standings(rows, model_error)
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold underline", pad_edge=False)
    for column in shown:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in ordered(rows):
        at = standing.get(row["policy"])
        style = "dim" if at is None else "bold green" if at.is_fastest else "bold" if at.same else ""
        table.add_row(*(Text(printable(column.text(row))) for column in shown), style=style)
    return table


def _print_lines(console: Console, lines: Sequence[str], style: str) -> None:
    from rich.text import Text

    if lines:
        console.print()
    for line in lines:
        console.print(Text(printable(line), style=style))


# ---- one run -----------------------------------------------------------------------------------


def summary_lines(summary: Mapping[str, Any], *, binary: bool = False) -> list[tuple[str, str]]:
    """Names and texts of a run's summary: the well-known figures first, parts of a sum indented below it."""
    lines: list[tuple[str, str]] = []
    whole = device_ns(summary)
    declared = known()
    for key in sorted(summary, key=lambda k: declared[k].order if k in declared else LAST):
        value, name = summary[key], declared[key].title if key in declared else name_of(key)
        if key == "makespan_ns" and summary.get("complete") is False:
            name = "time until it did not fit" if summary.get("refusal") else "time until it stopped"
        if key == "holders":
            lines += [(name if i == 0 else "", f"{n} {text_of('_bytes', b, binary=binary)} ({why})")
                      for i, (n, b, why) in enumerate(value or ())]  # fmt: skip
        elif isinstance(value, Mapping):
            numbers = all(isinstance(part, (int, float)) for part in value.values())
            if numbers and (key.endswith("_ns") or (key.endswith("_bytes") and value)):
                lines.append((name, _with_share(key, total(value), whole, binary)))
            else:
                lines.append((name, "" if any(value.values()) else NONE))
            lines += [
                (f"  {part}", text_of(key, amount, binary=binary))
                for part, amount in value.items()
                if amount or (amount is not None and unit_of(key) == "percent")
            ]
        else:
            lines.append((name, _with_share(key, value, whole, binary)))
    return lines


def _with_share(key: str, value: Any, whole: int | None, binary: bool) -> str:
    text = text_of(key, value, binary=binary)
    if key in ("compute_ns", "recompute_ns", "codec_ns", "stall_ns", "idle_ns") and whole and value:
        text += f" ({percent(value / whole)} of the devices' time)"
    return text


def summary_text(summary: Mapping[str, Any], *, footer: Footer | None = None, binary: bool = False) -> str:
    """One run's summary as plain text, one figure per line, then the footer."""
    pairs = summary_lines(summary, binary=binary)
    width = max((len(name) for name, _ in pairs), default=0)
    lines = [f"{name.ljust(width)}{' ' * GAP}{text}".rstrip() for name, text in pairs]
    if footer:
        lines += ["", *footer_lines(footer, binary=binary)]
    return printable("\n".join(lines) + "\n", keep="\n")


def print_summary(
    summary: Mapping[str, Any], *, footer: Footer | None = None, binary: bool = False, file: IO[str] | None = None
) -> None:
    """Print one run's summary: coloured on a terminal, `summary_text` in a pipe or file."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=styled(file or sys.stdout), highlight=False)
    if not console.is_terminal:
        console.file.write(summary_text(summary, footer=footer, binary=binary))
        return
    table = Table(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    for name, text in summary_lines(summary, binary=binary):
        table.add_row(Text(printable(name), style="dim" if name.startswith(" ") else "bold"), Text(printable(text)))
    console.print(table)
    _print_lines(console, footer_lines(footer, binary=binary) if footer else [], "dim")
