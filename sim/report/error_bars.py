"""The model's own error by kind of statement, from published runs that were simulated (docs/published.md).

`error_bars.json` is written by scripts/make_published.py with the page; nothing is fitted to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from sim.hardware.platform import Platform

STATEMENTS = ("time", "policies", "layouts", "machines", "peak")
"""Kinds of statement that an answer may make."""
FURTHER = {
    "layouts": "the ratio of two layouts' times",
    "machines": "the ratio of two machines' times",
    "peak": "a peak",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """How far statements of one kind were from print, as fractions.

    rows: of how many rows or pairs of rows.
    sources: of how many public tables these are.
    median, nine_tenths, worst: errors of the middle one, of nine tenths of them, of the worst.
    machines: profiles that these were simulated on.
    by_machine: of those with enough rows the same for these alone.
    """

    rows: int
    sources: int
    median: float
    nine_tenths: float
    worst: float
    machines: tuple[str, ...] = ()
    by_machine: Mapping[str, Bar] = field(default_factory=dict)


@cache
def error_bar(statement: str) -> Bar:
    """That of `time`, `policies`, `stacks`, `machines` (ratios of the times of two) or `peak`.

    Raises KeyError on another name.
    """
    found = json.loads((files("sim.report") / "error_bars.json").read_text(encoding="utf-8"))[statement]
    own = {name: Bar(**part) for name, part in found.get("by_machine", {}).items()}
    return Bar(**{**found, "machines": tuple(found["machines"]), "by_machine": own})


def policies_error() -> float:
    """The error of the ratio of two policies' times on one machine: the worst of the pairs, since these are few."""
    return error_bar("policies").worst


def ratio_error(*, layouts: bool = False) -> tuple[float, str]:
    """The error of the ratio of two times on one machine, and what it rests on, for a place behind it.

    layouts: whether two layouts are compared, of which there are many pairs: what nine of ten keep to. Of two policies
        see `policies_error`.
    """
    bar = error_bar("layouts" if layouts else "policies")
    return (bar.nine_tenths, f"nine of ten, n = {bar.rows}") if layouts else (bar.worst, f"n = {bar.rows}")


def statement_errors(profile: str) -> dict[str, dict[str, Any]]:
    """The error of each kind of statement as JSON values, on this machine where enough of it was published."""
    return {statement: _as_dict(error_bar(statement), profile) for statement in STATEMENTS}


def _as_dict(bar: Bar, profile: str) -> dict[str, Any]:
    own = bar.by_machine.get(profile)
    shown = own or bar
    keys = ("rows", "sources", "median", "nine_tenths", "worst")
    return {"on": profile if own else None, **{key: getattr(shown, key) for key in keys}}


def measured_on(model_error: float) -> str:
    """What a bar for two policies rests on, for a place behind it; "" where the caller has set another one."""
    bar = error_bar("policies")
    return f", n = {bar.rows}" if model_error == bar.worst else ""


def error_lines(platforms: Iterable[Platform] = (), *, also: Iterable[str] = ()) -> list[str]:
    """Under a result: the error of the ratio of two policies' times, and that of a time itself.

    platforms: of the result; a machine that no published run is of is named, since there the error is not known.
    also: further statements that the result makes, of `layouts`, `machines` and `peak`.
    """
    ratio, time = error_bar("policies"), error_bar("time")
    names = {p.name: len(p.assumed) for p in platforms}
    known = {*ratio.machines, *time.machines}
    caution = [
        f"that error is of other machines: no published run of {name} is among them, and {count} of its figures are "
        "assumed; what it says of this one is not known"
        for name, count in names.items()
        if count and name not in known
    ]
    (only,) = names if len(names) == 1 else ("",)
    own = time.by_machine.get(only)
    shown, where = (own, f" on {only}") if own else (time, "")
    more = "".join(map(_further, also))
    return [
        f"error, beside published runs: the ratio of two policies' times {_percent(ratio.worst)} (the worst of n = "
        f"{ratio.rows} pairs of {ratio.sources} sources); a time itself {_percent(shown.nine_tenths)} in nine of ten "
        f"(n = {shown.rows}{where}, {shown.sources} sources, worst {_percent(shown.worst)}){more}; assumed "
        "figures come on top",
        *caution,
    ]


def _further(statement: str) -> str:
    """The error of one more kind of statement, behind others."""
    bar = error_bar(statement)
    of_ten = f"{_percent(bar.nine_tenths)} in nine of ten (n = {bar.rows}, worst {_percent(bar.worst)})"
    return f"; {FURTHER[statement]} {of_ten}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if fraction < 0.0995 else f"{100 * fraction:.0f} %"
