"""The figures that summarise a run: each declared once, with its unit, its title and its meaning.

Tables, JSON, CSV, pages and documents take them from here. The figures of a summary are the fields of `Summary`,
declared in their annotations. A module of this folder may declare more of its own, which then appear everywhere, too:

    FIGURES = {"shortest_stall_ns": Figure("time", "shortest stall", "of all devices", of=lambda log, reference: …)}

The other columns of comparisons and sweeps are declared below.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from sim.analysis.figure import LAST, Figure, Unit
from sim.analysis.registry import declared_figures
from sim.analysis.summary import Summary
from sim.errors import TiersimError, near

__all__ = ["BESIDE", "LAST", "UNITS", "Figure", "Unit", "columns", "figures", "figures_markdown", "known"]

BESIDE: Mapping[str, Figure] = {
    "policy": Figure("text", "policy", "the policy, and its parameters that are not the defaults", 0),
    "status": Figure(
        "text", "status", "of a cell of a sweep: ok, infeasible, not_applicable, failed, …", column=(1, "status")
    ),
    "error": Figure("text", "error", "what kept it from running", 3, (13, "error")),
    "refusal": Figure(
        "text",
        "refusal",
        "the kind of a refusal: out_of_memory, thrashing, deadlock, infeasible, or state (of training)",
    ),
    "floor_bytes": Figure(
        "bytes", "smallest budget known to fit", "a budget below which none was found to fit", 4, (12, "fits from")
    ),
    "holders": Figure("text", "held by", "the largest residents where memory ran out: tensor, bytes, why it stays", 5),
    "full": Figure("text", "full", "the tiers that were full"),
    "need_bytes": Figure("bytes", "asked for", "bytes of the request that did not fit"),
    "free_bytes": Figure("bytes", "free then", "free bytes of the tier where it did not fit"),
    "fidelity": Figure("text", "fidelity", "how near the policy is to what is published", 62, (11, "fidelity")),
    "manages": Figure("text", "manages", "what the policy may drop or move", 63),
    "plan_s": Figure("number", "planning (s of wall time)", "what planning took on this machine; it varies"),
    "wall_s": Figure("number", "wall s", "what the cell took on this machine; it varies"),
    "budget_bytes": Figure("bytes", "budget bytes", "the budget of the device's home tier"),
    "unconstrained_peak_bytes": Figure("bytes", "unconstrained peak bytes", "what keeping everything takes there"),
    "time_limited": Figure("flag", "time limited", "whether a planner met a limit of wall-clock time"),
    "over_fastest": Figure(
        "change", "over fastest", "slowdown against the fastest policy on the same job", column=(4, "vs fastest")
    ),
    "bound_ns": Figure("time", "least time", "the least that any plan of a class takes, which is proven"),
    "above_bound": Figure(
        "change",
        "above the bound",
        "how much longer than the least time that any plan of its class takes, which is proven",
        column=(5, "above bound"),
    ),
    "outside_bound": Figure("text", "outside the bound", "what a run does that plans of the bound's class do not"),
    "recompute_share": Figure("percent", "recompute share", "of the devices' time", column=(6, "recompute")),
    "stall_share": Figure("percent", "stall share", "of the devices' time", column=(7, "stall")),
}
"""The other columns of comparisons, sweeps and pages, besides the figures of a run."""


@cache
def figures() -> Mapping[str, Figure]:
    """All figures of a summary by their keys, in the order of JSON and CSV."""
    hints = get_type_hints(Summary, include_extras=True)
    found = {key: get_args(said)[1] for key, said in hints.items() if get_origin(said) is Annotated}
    for module, key, each in declared_figures():
        where = f"sim/analysis/{module.__name__.rpartition('.')[2]}.py: figure {key!r}"
        if key in found or key in BESIDE:
            raise TiersimError(f"{where} is declared already")
        if each.unit not in UNITS:
            raise TiersimError(f"{where}: no unit is called {each.unit!r}{near(each.unit, UNITS)}")
        if each.of is None:
            raise TiersimError(f"{where} needs `of`, the function of a log and a reference that computes it")
        found[key] = each
    return found


def known() -> Mapping[str, Figure]:
    """The figures of a summary, and the other columns of rows."""
    return {**figures(), **BESIDE}


def misfit(row: Mapping[str, Any]) -> str | None:
    """The first key of a row from a file whose value cannot be its figure's, None if there is none.

    A row that fits has a time and a peak; figures with parts, such as stalls by cause, and only these are tables.
    """
    declared, own = known(), _own()
    fits = row.get("fits") is True
    required: tuple[str, ...] = ("makespan_ns", "peak_bytes") if fits else ()
    for key in (*required, *row):
        value = row.get(key)
        if key not in declared:
            continue
        if value is None:
            is_of = not (fits and own.get(key) is not None)
        else:
            is_table = isinstance(value, Mapping)
            is_of = is_table == (own.get(key) is dict) and _is_of(declared[key].unit, value)
            if is_table and key in own and key not in _with_gaps():
                is_of &= None not in value.values()
        if not is_of:
            return key
    return None


@cache
def _own() -> Mapping[str, type | None]:
    """The figures of `Summary`: dict for those with parts, None for those that a run may lack."""
    hints = get_type_hints(Summary, include_extras=True)
    kinds = {key: get_args(said)[0] for key, said in hints.items() if get_origin(said) is Annotated}
    return {
        key: dict if get_origin(kind) is dict else None if type(None) in get_args(kind) else kind
        for key, kind in kinds.items()
    }


@cache
def _with_gaps() -> frozenset[str]:
    """The figures of `Summary` that may lack a part, such as the overlap of a link on which nothing moved."""
    hints = get_type_hints(Summary)
    return frozenset(
        key for key, kind in hints.items() if get_origin(kind) is dict and type(None) in get_args(get_args(kind)[1])
    )


def _is_of(unit: Unit, value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, Mapping):
        return all(not isinstance(part, Mapping) and _is_of(unit, part) for part in value.values())
    if unit == "text":
        return isinstance(value, str) or (isinstance(value, list) and all(map(_is_entry, value)))
    if unit == "flag":
        return isinstance(value, bool)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63


def _is_entry(value: Any) -> bool:
    """A name, or a resident: tensor, bytes, why it stays."""
    return isinstance(value, str) or (isinstance(value, list) and [type(part) for part in value] == [str, int, str])


def columns() -> Mapping[str, str]:
    """Keys and titles of the columns that tables of many runs show by default, in order."""
    shown = [(each.column, key) for key, each in known().items() if each.column]
    return {key: title for (_, title), key in sorted(shown)}


UNITS: Mapping[Unit, str] = {
    "bytes": "bytes",
    "time": "ns",
    "percent": "fraction",
    "change": "fraction",
    "number": "number",
    "flag": "true or false",
    "text": "text",
}
"""Units as they stand in JSON and CSV."""


def figures_markdown(shown: Mapping[str, Figure]) -> str:
    """Figures as a Markdown table, for documents."""
    lines = ["| key | unit | in words | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{key}` | {UNITS[each.unit]} | {each.title} | {each.meaning} |" for key, each in shown.items()]
    return "\n".join(lines) + "\n"
