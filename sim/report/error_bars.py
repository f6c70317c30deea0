"""The model's own error by kind of statement, from published runs that were simulated (docs/published.md).

`error_bars.json` is written by scripts/make_published.py with the page; nothing is fitted to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from sim.hardware.platform import Platform

STATEMENTS = ("time", "policies", "layouts", "machines", "peak")
"""Kinds of statement that an answer may make."""
STATED = ("time", "policies")
"""Those whose errors stand under each result."""
WHAT = {
    "time": "a time itself",
    "policies": "the ratio of two policies' times",
    "layouts": "the ratio of two layouts' times",
    "machines": "the ratio of two machines' times",
    "peak": "a peak",
}
"""What each is an error of, in words."""


@dataclass(frozen=True, slots=True)
class Bar:
    """How far statements of one kind were from print, as fractions.

    rows: of how many rows or pairs of rows.
    sources: of how many public tables these are.
    median, nine_tenths, worst: errors of the middle one, of nine tenths of them, of the worst.
    machines: profiles that rows of this kind were simulated on.
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
    """That of `time`, `policies`, `stacks`, `layouts`, `machines` (ratios of the times of two) or `peak`.

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


def statement_errors(profile: str, statements: Iterable[str] = STATEMENTS) -> dict[str, dict[str, Any]]:
    """The error of each kind of statement as JSON values, on this machine where enough of it was published.

    Each has `what` it is an error of; `bar`, the fraction that texts state and by which they tell two apart; `rows`,
    `sources`, `median`, `nine_tenths` and `worst` of the errors; `on`, the machine that they are of alone, or None; and
    `measured_on`, the machines that they are of.
    """
    return {statement: _as_dict(statement, profile) for statement in statements}


def _as_dict(statement: str, profile: str) -> dict[str, Any]:
    bar = error_bar(statement)
    own = bar.by_machine.get(profile)
    shown = own or bar
    keys = ("rows", "sources", "median", "nine_tenths", "worst")
    return {
        "what": WHAT[statement],
        "on": profile if own else None,
        "bar": shown.worst if statement == "policies" else shown.nine_tenths,
        **{key: getattr(shown, key) for key in keys},
        "measured_on": [profile] if own else list(bar.machines),
    }


def measured_on(model_error: float) -> str:
    """What a bar for two policies rests on, for a place behind it; "" where the caller has set another one."""
    bar = error_bar("policies")
    return f", n = {bar.rows}" if model_error == bar.worst else ""


def error_lines(platforms: Iterable[Platform] = (), *, also: Iterable[str] = ()) -> list[str]:
    """Under a result: the error of the ratio of two policies' times, and that of a time itself.

    platforms: of the result. An error that was not measured on all of them says on which it was; a machine that no
        published run is of is named, since there no error is known.
    also: further statements that the result makes, of `layouts`, `machines` and `peak`.
    """
    assumed = {p.name: len(p.assumed) for p in platforms}
    ratio, known = error_bar("policies"), {*error_bar("time").machines}
    more = "".join(_further(statement, [name for name in assumed if name in known]) for statement in also)
    of_pairs = f"the worst of n = {ratio.rows} pairs of {ratio.sources} sources{_only_on(ratio, assumed)}"
    return [
        f"error, beside published runs: {WHAT['policies']} {_percent(ratio.worst)} ({of_pairs}); {WHAT['time']} "
        f"{_of_times([*assumed])}{more}; assumed figures come on top",
        *(_unknown(name, count) for name, count in assumed.items() if name not in known),
    ]


def _of_times(names: Sequence[str]) -> str:
    """The error of a time itself: on one machine its own, on several that of all and of each that has its own."""
    bar = error_bar("time")
    own = {name: bar.by_machine[name] for name in names if name in bar.by_machine}
    if len(names) == 1 and own:
        return f"{_percent(own[names[0]].nine_tenths)} in nine of ten ({_rests_on(own[names[0]], f' on {names[0]}')})"
    each = "".join(f", on {name} {_percent(part.nine_tenths)} ({_rests_on(part)})" for name, part in own.items())
    return f"{_percent(bar.nine_tenths)} in nine of ten ({_rests_on(bar)}){each}"


def _rests_on(bar: Bar, where: str = "") -> str:
    return f"n = {bar.rows}{where}, {bar.sources} sources, worst {_percent(bar.worst)}"


def _unknown(name: str, assumed: int) -> str:
    """Of a machine that no published run is of. assumed: how many of its figures are."""
    figures = f", and {assumed} of its figures are assumed" if assumed else ""
    return (
        f"that error is of other machines: no published run of {name} is among them{figures}; what it says of this one "
        "is not known"
    )


def _only_on(bar: Bar, names: Iterable[str]) -> str:
    """On which machines an error was measured, behind others, where these are not all among them."""
    if {*names} <= {*bar.machines}:
        return ""
    *first, last = bar.machines
    return f", on {', '.join(first)} and {last} alone" if first else f", on {last} alone"


def _further(statement: str, names: Iterable[str]) -> str:
    """The error of one more kind of statement, behind others. names: machines that it is said of."""
    bar = error_bar(statement)
    of_ten = f"n = {bar.rows}, worst {_percent(bar.worst)}{_only_on(bar, names)}"
    return f"; {WHAT[statement]} {_percent(bar.nine_tenths)} in nine of ten ({of_ten})"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if fraction < 0.0995 else f"{100 * fraction:.0f} %"
