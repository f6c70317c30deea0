"""Finished cells as a table: one row per cell, units in the names of the columns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sim.analysis.figures import figures as declared
from sim.errors import TiersimError
from sim.foreign_text import csv_text
from sim.report.files import write_aside

if TYPE_CHECKING:
    import pandas as pd

FIRST = ("status", "fits", "error", "fidelity", "budget_bytes", "unconstrained_peak_bytes", "floor_bytes")
TIMING = ("wall_s", "plan_s", "host", "date")
"""Columns that vary from run to run; a table has them only on request."""

MOST_PLACES, PLACES_PER_FIGURE = 10_000_000, 50
"""How large a table of rows may be: so many places, or so many for each figure that the rows have."""

Rows = Iterable[tuple[Mapping[str, Any], Mapping[str, Any] | None]]


def flat_rows(rows: Rows, *, timing: bool = False) -> list[dict[str, Any]]:
    """One flat record per cell: `cell` (its id), labels, figures; nested ones as `stall_ns.transfer`.

    A cell that is not finished has status "missing". The order of the columns depends on the rows alone.

    Raises TiersimError for rows that have so few columns in common that their table would be empty for the most part.
    """
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    labels: dict[str, None] = {}
    figures: set[str] = set()
    for cell, record in rows:
        labels |= dict.fromkeys(cell["labels"])
        row = dict(record["row"]) if record else {"status": "missing", "fits": None}
        if timing:
            row |= {key: (record or {"ran": {}})["ran"].get(key) for key in TIMING}
        flat = _flat(row)
        figures |= set(flat)
        found.append(({"cell": "", **cell["labels"]} | {"cell": cell["id"]}, flat))
    places, filled = len(found) * (len(labels) + len(figures)), sum(len(shown) + len(flat) for shown, flat in found)
    if places > max(MOST_PLACES, PLACES_PER_FIGURE * filled):
        raise TiersimError(
            f"{len(found):,} rows with {len(labels) + len(figures):,} columns, hardly one of which two have in common: "
            "not the results of a sweep"
        )
    known = dict.fromkeys((*FIRST, *declared(), "time_limited", *TIMING))
    order = {name: i for i, name in enumerate(known)}
    columns = sorted(figures, key=lambda name: (order.get(name.partition(".")[0], len(order)), name))
    names = ("cell", *labels)
    return [
        {**{name: shown.get(name) for name in names}, **{column: flat.get(column) for column in columns}}
        for shown, flat in found
    ]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{part}": amount for part, amount in value.items()}
        elif not isinstance(value, list):
            flat[key] = value
    return flat


def frame(rows: Rows, *, timing: bool = False) -> pd.DataFrame:
    """The rows as a DataFrame; columns of whole numbers with gaps are pandas' `Int64`."""
    import pandas as pd

    flat = flat_rows(rows, timing=timing)
    names = list(flat[0]) if flat else ["cell"]
    return pd.DataFrame({name: pd.Series(*_column([row[name] for row in flat])) for name in names})


def _column(values: list[Any]) -> tuple[list[Any], None, str]:
    """Values, no index, and pandas' type for them."""
    kinds = {type(value) for value in values if value is not None}
    some = None in values
    if kinds == {bool}:
        return values, None, "boolean" if some else "bool"
    if kinds == {int}:
        return values, None, "Int64" if some else "int64"
    if kinds and kinds <= {int, float}:
        return values, None, "float64"
    same = len(kinds) <= 1
    return [value if same or value is None else str(value) for value in values], None, "object"


def write_csv(rows: Rows, path: str | os.PathLike[str], *, timing: bool = False) -> Path:
    """Write the table as CSV, as a whole; the same rows give the same bytes. Raises OSError."""
    flat = flat_rows(rows, timing=timing)
    text = csv_text(flat, list(flat[0]) if flat else ["cell"])

    def write(file: IO[bytes]) -> None:
        file.write(text.encode())

    return write_aside(path, write)


def write_parquet(rows: Rows, path: str | os.PathLike[str], *, timing: bool = False) -> Path:
    """Write the table as Parquet, as a whole. Raises OSError; TiersimError if pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise TiersimError("Parquet needs pyarrow: pip install 'tiersim[parquet]'")
    table = frame(rows, timing=timing)

    def write(file: IO[bytes]) -> None:
        table.to_parquet(file, engine="pyarrow", index=False)

    return write_aside(path, write)
