"""What the page shows of many runs, as JSON values: one row per run, units in the names of the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.analysis.figures import columns, known
from sim.hardware.platform import Platform
from sim.report.cells import MODEL_ERROR, device_ns, key_lines, name_of, ordered, standings, total, unit_of
from sim.report.colours import policy_signs
from sim.report.error_bars import error_lines, measured_on
from sim.report.footer import beyond_lines, priced_lines
from sim.report.page.run import SCOPE, RunView, SavedView, facts_data
from sim.report.verdict import verdict_lines, winners_lines

Row = Mapping[str, Any]

HIDDEN = ("id", "same", "rank", "indistinguishable")
"""Keys of rows that are no columns: the page says what they say by signs and order."""
WITHIN = ("policy", "budget", "seed", "iterations", "recompute_limit")
"""Axes along which runs stand in one picture; along any other they are of another job."""


@dataclass(frozen=True)
class TableView:
    """Many runs as a page shows them.

    rows: each has `id` (its name in links), the axes in `labels`, `policy` among them, `fits`, and the keys of
        `Result.summary`, or `error` and `floor_bytes` if it did not fit.
    platforms: those whose figures are listed, besides those in `facts`.
    runs: by id, those that the page shows in detail.
    links: by id (text, address) of files kept next to the page.
    notes: lines under the table.
    caution: lines above it.
    """

    title: str
    labels: Sequence[str]
    rows: Sequence[Row]
    subtitle: str = ""
    lead: str = ""
    platforms: Sequence[Platform] = ()
    runs: Mapping[str, RunView | SavedView] = field(default_factory=dict)
    links: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    command: str = ""
    facts: Sequence[Sequence[str]] = ()
    caution: Sequence[str] = ()


def table_data(view: TableView) -> dict[str, Any]:
    """The data of the table; runs are separate."""
    rows = [{"policy": ""} | _flat(row) | _shares(row) for row in view.rows]  # a damaged row may lack its own
    for row, over in zip(rows, _over_fastest(view.rows, view.labels), strict=True):
        row |= over
    titles, declared = columns(), known()
    names = list(dict.fromkeys([*view.labels, *titles, *(name for row in rows for name in row)]))
    names = [name for name in names if name not in HIDDEN and any(_known(row.get(name)) for row in rows)]
    differ = [name for name in view.labels if len({str(row.get(name)) for row in rows}) > 1]
    axes = ["policy", *(name for name in differ if name != "policy")]
    facets = [name for name in differ if name not in WITHIN and not name.startswith("policy.")]
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    hollow = {str(row["policy"]) for row in rows if row.get("fidelity") == "reconstruction"}
    return {
        "title": view.title,
        "subtitle": view.subtitle,
        "lead": view.lead,
        "verdict": _verdict(view, differ),
        "command": view.command,
        "ids": [row["id"] for row in rows],
        "columns": [
            [name, _title(name), _kind(name, rows), declared[name].meaning if name in titles else ""] for name in names
        ],
        "values": {name: [row.get(name) for row in rows] for name in names},
        "same": [bool(row.get("same")) for row in rows],
        "rank": [row.get("rank") for row in rows],
        "shown": [*axes, *(name for name in titles if name in names and (name != "fits" or "status" not in names))],
        "facets": facets,
        "labels": [name for name in view.labels if name in names],
        "constant": [[name, rows[0].get(name)] for name in view.labels if rows and name not in axes],
        "policies": {name: [*sign, name in hollow] for name, sign in policy_signs(policies).items()},
        "links": {id: [list(link) for link in links] for id, links in view.links.items()},
        "warnings": _warnings(view),
        "machine_notes": _machine_notes(view),
        "notes": list(dict.fromkeys([*_keys(view.rows), *error_lines(view.platforms), *view.notes])),
        "scope": [list(line) for line in SCOPE],
        "facts": [*facts_data(view.platforms), *map(list, view.facts)],
        "caution": list(view.caution),
        "model_error": MODEL_ERROR,
        "model_error_on": measured_on(MODEL_ERROR),
    }


def _title(name: str) -> str:
    """The head of a column: that of tables, else the figure's in words, with the part that it is of."""
    figure, _, part = name.partition(".")
    declared = known().get(figure)
    title = columns().get(name) or (declared.title if declared else name_of(figure))
    return f"{title}: {name_of(part)}" if part else title


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{part}": amount for part, amount in value.items()}
        elif key == "holders":
            flat["held by"] = "; ".join(f"{name} {bytes:,} B ({why})" for name, bytes, why in value or ())
        elif isinstance(value, (list, tuple, set, frozenset)):
            flat[key] = ", ".join(map(str, sorted(value) if isinstance(value, (set, frozenset)) else value))
        else:
            flat[key] = value
    return flat


def _shares(row: Row) -> dict[str, Any]:
    """Times as shares of all device time of the row, and the bytes on all links together."""
    whole, found = device_ns(row), {}
    for key, name in (("recompute_ns", "recompute_share"), ("stall_ns", "stall_share")):
        spent = _sum(row, key)
        found[name] = None if spent is None or not whole else spent / whole
    found["moved_bytes"] = _sum(row, "moved_bytes")
    return found


def _sum(row: Row, key: str) -> int | None:
    """The sum of a figure that is given by cause or by link: nested, or flat as `stall_ns.transfer`."""
    if row.get(key) is not None:
        return total(row[key])
    if row.get("makespan_ns") is None:
        return None
    return sum(value or 0 for name, value in row.items() if name.startswith(f"{key}."))


def _verdict(view: TableView, differ: Sequence[str]) -> list[str]:
    """Of one job what `compare` ends with, of several in how many each policy is the fastest."""
    rows = [{**row, "policy": str(row.get("policy"))} for row in _summed(view.rows)]  # a folder may say anything
    if not differ or differ == ["policy"]:
        return verdict_lines(rows)
    return winners_lines(_jobs(rows, view.labels))


def _jobs(rows: Sequence[Row], labels: Sequence[str]) -> list[list[Row]]:
    """The rows of each job: what differs in the policy alone."""
    job = [name for name in labels if name != "policy" and not name.startswith("policy.")]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.get(name)) for name in job), []).append(row)
    return list(groups.values())


def _over_fastest(rows: Sequence[Row], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Per row its rank in its job, its slowdown against the fastest there, and whether it can be told from it."""
    found = {}
    for group in _jobs(rows, labels):
        fitting = [{**row, "policy": str(row.get("policy"))} for row in group if row["fits"]]
        rank = {row["id"]: place for place, row in enumerate(ordered(fitting))}
        for id, standing in standings([{**row, "policy": row["id"]} for row in fitting]).items():
            found[id] = {"rank": rank[id], "over_fastest": standing.over, "same": standing.same and standing.over > 0}
    return [found.get(row["id"], {}) for row in rows]


def _keys(rows: Sequence[Row]) -> list[str]:
    """What the columns mean; the page itself says what its signs mean."""
    named = [{**row, "policy": str(row.get("policy"))} for row in _summed(rows)]  # a folder may say anything
    return [line for line in key_lines(named) if not line.startswith(("≈", "manages"))]


def _warnings(view: TableView) -> list[str]:
    """What of the runs is of another machine than the one named, as `sim.report.footer.warnings` says of one."""
    lines: dict[str, None] = {}
    several = len(view.platforms) > 1
    for platform in view.platforms:
        rows = [row for row in view.rows if row.get("profile", platform.name) == platform.name]
        budgets = [b for row in rows if isinstance(b := row.get("budget_bytes", row.get("capacity_bytes")), int)]
        found = beyond_lines(platform, max(budgets, default=None))
        lines |= {f"{platform.name}: {line}" if several else line: None for line in found}
    for row in view.rows:
        of = f"{row['profile']}: " if several and "profile" in row else ""
        main, _, priced = str(row.get("priced_as") or "").partition(" as ")
        lines |= {of + line: None for line in priced_lines(main, priced)}
    return list(lines)


def _machine_notes(view: TableView) -> list[str]:
    """How the machines were described, in their profiles' words; or in those of views, where no profile was read."""
    if view.platforms:
        of = {platform.name: platform.notes for platform in view.platforms}
    else:
        saved = [run.data for run in view.runs.values() if isinstance(run, SavedView) and "beside" in run.data]
        of = {str(data["platform"]): data["notes"] for data in saved}
    return [f"{name}: {note}" if len(of) > 1 else str(note) for name, notes in of.items() for note in notes]


def _summed(rows: Sequence[Row]) -> list[Row]:
    """Rows with the sums of figures that are given by cause or by link."""
    return [{**row, **{key: _sum(row, key) for key in ("stall_ns", "moved_bytes")}} for row in rows]


def _known(value: Any) -> bool:
    return value is not None and value != ""


def _kind(name: str, rows: Sequence[Row]) -> str:
    """How the page writes a column: by the unit in its name, or by the type of its values."""
    if unit := unit_of(name):
        return unit
    kinds = {type(row.get(name)) for row in rows} - {type(None)}
    if kinds == {bool}:
        return "flag"
    return "number" if kinds and kinds <= {int, float} else "text"
