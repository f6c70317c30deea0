"""Analyses that were asked for by name: as text, and as CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sim.analysis.registry import meaning
from sim.foreign_text import csv_text
from sim.report.cells import text_of
from sim.report.listings import aligned

SHOWN = 20
"""Most rows of an analysis that a terminal shows."""

Records = Sequence[Mapping[str, Any]]


def analysis_text(name: str, records: Records) -> str:
    """An analysis as a title and a table; a single record has one figure per line."""
    lines = [f"{name}: {meaning(name)}"]
    if len(records) == 1:
        pairs = [(f"  {key}", _text(key, value)) for key, value in records[0].items()]
        return "\n".join([*lines, aligned(pairs, header=False)])
    if not records:
        return "\n".join([*lines, "  nothing"])
    rows = [tuple(records[0]), *(tuple(_text(k, v) for k, v in record.items()) for record in records[:SHOWN])]
    lines.append(aligned(rows))
    if len(records) > SHOWN:
        lines.append(f"… and {len(records) - SHOWN:,} more rows; --json prints and -o writes all of them")
    return "\n".join(lines)


def analysis_csv(records: Records) -> str:
    """An analysis as CSV: exact figures, nested ones as JSON."""
    names = list(dict.fromkeys(key for record in records for key in record))
    return csv_text([{key: _flat(value) for key, value in record.items()} for record in records], names)


def _flat(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _text(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{part} {text_of(key, each)}" for part, each in value.items()) or "–"
    return text_of(key, value)
