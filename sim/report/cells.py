"""The content of tables before layout: columns, their text, which policy is fastest, and which do not fit.

A row is a mapping with `policy`, `fits`, `fidelity`, `manages` and the keys of a run's summary; a row that does not
fit has `error`, `floor_bytes` and `holders` instead. `fits` None stands for a policy that was not run or failed
otherwise, with its `error`. A key that is missing or None reads "–".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.analysis.figures import columns as titles
from sim.analysis.figures import known
from sim.report.error_bars import measured_on, policies_error
from sim.units import format_bytes, format_time

Row = Mapping[str, Any]

NONE = "–"
BASELINE = "keep_all"
SAME = "≈"
MODEL_ERROR = policies_error()
"""The default for the model's own error of the ratio of two policies' times, as a fraction: as measured."""

INITIALS = {"activations": "A", "gradients": "G", "optimizer_state": "O", "weights": "W"}
HOLDERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    spare: a narrow terminal leaves out columns with a low number first, and never those with 0.
    """

    title: str
    text: Callable[[Row], str]
    right: bool = True
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """The rank of a row by time.

    over: slowdown against the fastest, as a fraction.
    same: whether it is within the model's error of the fastest.
    is_fastest: whether it is the fastest, of several that take as long the simplest.
    ties: whether it is another of those.
    """

    over: float
    same: bool
    is_fastest: bool
    ties: bool = False

    def __str__(self) -> str:
        if self.is_fastest or self.ties:
            return "fastest" if self.is_fastest else "as fast"
        return f"{SAME if self.same else ''} {percent(self.over, sign=True)}".strip()


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows that fit by time, then those that do not by their smallest feasible budget, then those that were not run.

    Of rows that are equal, the simpler one comes first: that recomputes and moves less, and manages less.
    """

    def key(row: Row) -> tuple[int, float, float, int, int, bool, str]:
        name = row["policy"]
        if row["fits"]:
            done = total(row.get("recompute_ns") or 0) + total(row.get("moved_bytes") or 0)
            simple = done, len(row.get("manages") or ()), name != BASELINE
            return 0, row["makespan_ns"], row["peak_bytes"], *simple, name
        floor = row.get("floor_bytes")
        return (1 if row["fits"] is False else 2), float("inf") if floor is None else floor, 0, 0, 0, True, name

    return sorted(rows, key=key)


def standings(rows: Sequence[Row], model_error: float = MODEL_ERROR) -> dict[str, Standing]:
    """By policy, for the rows that fit. Equal to the fastest is a row whose time is at most 1 + model_error of it.

    Raises ValueError on a negative error.
    """
    if model_error < 0:
        raise ValueError(f"model_error {model_error}: an error is not negative")
    fitting = [row for row in ordered(rows) if row["fits"]]
    if not fitting:
        return {}
    best = fitting[0]["makespan_ns"]
    found = {}
    for row in fitting:
        over = row["makespan_ns"] / best - 1 if best else 0.0
        first = row is fitting[0]
        found[row["policy"]] = Standing(over, over <= model_error, first, not first and row["makespan_ns"] == best)
    return found


def told_rows(rows: Sequence[Row], model_error: float = MODEL_ERROR) -> list[dict[str, Any]]:
    """The rows in their order; those that fit have two more keys, as in tables.

    `over_fastest`: the slowdown against the fastest, as a fraction.
    `indistinguishable`: whether it is another one than the fastest, and not told from it by the model's own error.
    """
    standing = standings(rows, model_error)
    told = {
        name: {"over_fastest": each.over, "indistinguishable": each.same and not each.is_fastest}
        for name, each in standing.items()
    }
    return [{**row, **told.get(row["policy"], {})} for row in rows]


def columns(rows: Sequence[Row], *, model_error: float = MODEL_ERROR, binary: bool = False) -> tuple[Column, ...]:
    """The columns of a comparison; a column that is empty in all rows is left out."""
    standing = standings(rows, model_error)

    def share(row: Row, key: str) -> str:
        """A time as a share of all device time of the row: shares can be compared where times differ."""
        spent, whole = row.get(key), device_ns(row)
        return NONE if spent is None or not whole else percent(total(spent) / whole)

    def moved(row: Row) -> str:
        by_link = row.get("moved_bytes")
        return NONE if by_link is None else size(total(by_link), binary)

    title = titles()
    every = (
        Column("policy", lambda row: row["policy"], right=False),
        Column(title["fits"], lambda row: {True: "yes", False: "no", None: NONE}[row["fits"]], right=False),
        Column(title["peak_bytes"], lambda row: size(row.get("peak_bytes"), binary)),
        Column(title["makespan_ns"], lambda row: clock(row.get("makespan_ns"))),
        Column(title["over_fastest"], lambda row: str(standing.get(row["policy"], NONE))),
        Column(title["overhead"], lambda row: percent(row.get("overhead"), sign=True), spare=4),
        Column(title["above_bound"], lambda row: percent(row.get("above_bound"), sign=True), spare=7),
        Column(title["recompute_share"], lambda row: share(row, "recompute_ns"), spare=5),
        Column(title["stall_share"], lambda row: share(row, "stall_ns"), spare=6),
        Column(title["moved_bytes"], moved, spare=3),
        Column(title["saved_fraction"], lambda row: percent(row.get("saved_fraction")), spare=2),
        Column("manages", lambda row: manages(row.get("manages")), right=False, spare=1),
        Column(title["fidelity"], lambda row: row.get("fidelity") or NONE, right=False),
    )
    return tuple(c for c in every if c.title in ("policy", "fits") or any(c.text(row) != NONE for row in rows))


def key_lines(rows: Sequence[Row], model_error: float = MODEL_ERROR) -> list[str]:
    """What the signs in a comparison mean, for those that occur in it."""
    lines = []
    standing = standings(rows, model_error)
    if any(s.same and not (s.is_fastest or s.ties) for s in standing.values()):
        fastest = " and ".join(policy for policy, s in standing.items() if s.is_fastest or s.ties)
        lines.append(
            f"{SAME} not distinguishable from {fastest}, the fastest: within the model's own error of "
            f"{percent(model_error)}{measured_on(model_error)}"
        )
    meant = {
        "overhead": "vs unlimited: slowdown against unlimited memory" + _freedoms(rows),
        "stall_ns": "recompute, stall: of the devices' time",
        "moved_bytes": "moved: on all links together",
        "saved_fraction": "saved: of the peak of keep_all",
    }
    if said := [text for key, text in meant.items() if any(row.get(key) is not None for row in rows)]:
        lines.append("; ".join(said))
    if any(row.get("manages") for row in rows):
        lines.append("manages: " + ", ".join(f"{letter} {name_of(role)}" for role, letter in INITIALS.items()))
    lines += _cancelled(rows)
    if any(row.get("fidelity") == "reconstruction" for row in rows):
        lines.append("reconstruction: detail of the published system was not public, so its headline is not credited")
    return lines


def bound_lines(text: str, rows: Sequence[Row]) -> list[str]:
    """What the rows are above: the bound in words, "" for none, and which runs it is not about."""
    if not text:
        return []
    apart: dict[str, list[str]] = {}
    for row in ordered(rows):
        if why := row.get("outside_bound"):
            apart.setdefault(str(why), []).append(str(row["policy"]))
    others = "; ".join(f"{', '.join(policies)} ({why})" for why, policies in apart.items())
    return [f"bound: {text}", *([f"not compared with the bound: {others}"] if apart else [])]


def cancelled_lines(summary: Row) -> list[str]:
    """A line on moves that were cancelled before they started; empty without any.

    Without it a platform with a smaller host, or a slower link, would look faster for having moved less.
    """
    if not (called_back := counter(summary, "moves_cancelled")):
        return []
    without = counter(summary, "moves_without_space")
    of_them = f", {without:,} of them for lack of space at their destination" if without else ""
    moves = _moves(called_back, counter(summary, "cancelled_bytes"))
    return [f"{moves} cancelled before the copy started{of_them}: their tensors stayed where they were"]


def counter(row: Row, name: str) -> int | None:
    """One of the counts of the engine: of a summary, or of a flat row with `counters.NAME`; None where it has none."""
    counters = row.get("counters")
    found = counters.get(name) if isinstance(counters, Mapping) else row.get(f"counters.{name}")
    return found if isinstance(found, int) else None  # a folder that was tampered with may say anything


def _moves(count: int, bytes: int | None) -> str:
    amount = "" if bytes is None else f" ({format_bytes(bytes)})"
    return f"{'1 move' if count == 1 else f'{count:,} moves'}{amount}"


def _cancelled(rows: Sequence[Row]) -> list[str]:
    """Per policy what `cancelled_lines` says of its run; of several runs one line for all."""
    runs: dict[str, list[Row]] = {}
    for row in ordered(rows):
        runs.setdefault(str(row["policy"]), []).append(row)
    lines = []
    for policy, these in runs.items():
        counts = [(count, row) for row in these if (count := counter(row, "moves_cancelled"))]
        if len(these) == 1:
            lines += [f"{policy}: {line}" for line in cancelled_lines(these[0])]
        elif counts:
            most, row = max(counts, key=lambda pair: pair[0])
            lines.append(
                f"{policy}: moves cancelled before the copy started in {len(counts):,} of {len(these):,} runs, at most "
                f"{_moves(most, counter(row, 'cancelled_bytes'))}: their tensors stayed where they were"
            )
    return lines


APPROXIMATE_SHOWN = 3


def approximate_lines(names: Sequence[str]) -> list[str]:
    """Which tensors a lossy codec has decoded: a line, or none where there are none."""
    if not names:
        return []
    shown = ", ".join(names[:APPROXIMATE_SHOWN])
    more = f" and {len(names) - APPROXIMATE_SHOWN} more" if len(names) > APPROXIMATE_SHOWN else ""
    return [
        f"approximate, decoded by a lossy codec ({len(names)}), and so is what is computed from them: {shown}{more}"
    ]


def _freedoms(rows: Sequence[Row]) -> str:
    """A note on rows whose run with unlimited memory is not that of keep_all but uses the policy's freedoms."""
    named: dict[str, list[str]] = {}
    for row in rows:
        if (run := row.get("unlimited_run")) and run != "keep_all":
            named.setdefault(str(run), []).append(str(row["policy"]))
    found = ""
    for run, policies in named.items():
        own = "its own time" if len(set(policies)) == 1 else "their own times"
        found += f"; {', '.join(dict.fromkeys(policies))}: against {own} there, with {run}"
    return found


ALIKE = 3


def state_lines(rows: Sequence[Row], *, binary: bool = False) -> list[str]:
    """What is said before all else: state that alone exceeds a tier, and the policies that leave it there."""
    lines = []
    for why, refused in _left_in_place(rows).items():
        named = [row for row in refused if row.get("floor_bytes")]
        floors = (f"; {row['policy']} fits from {format_bytes(row['floor_bytes'], binary=binary)}" for row in named)
        leave = "leaves them there and is not run" if len(refused) == 1 else "leave them there and are not run"
        lines.append(f"{why}: {', '.join(row['policy'] for row in refused)} {leave}{''.join(floors)}")
    return lines


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """Policies that were left out, a line per reason."""
    names: dict[str, list[str]] = {}
    for name, why in left_out.items():
        names.setdefault(why.removeprefix(f"{name}: "), []).append(name)
    return [f"not run: {', '.join(these)}: {why}" for why, these in names.items()]


def failure_lines(rows: Sequence[Row], *, binary: bool = False, brief: bool = False) -> list[str]:
    """One line for each row that does not fit: the smallest budget known to fit, and what holds the memory.

    Policies that were refused for the state that they leave in place are those of `state_lines`.

    brief: those that do not fit because the same memory is full share a line, from three on.
    """
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in ordered(rows):
        if brief and row["fits"] is False and row.get("refusal") != "state" and row.get("full"):
            alike.setdefault(tuple(row["full"]), []).append(row)
    joined = {full: these for full, these in alike.items() if len(these) >= ALIKE}
    apart = [row for row in rows if not any(row is other for these in joined.values() for other in these)]
    return [*_each_failure(apart, binary), *(_together(full, these, binary) for full, these in joined.items())]


def _together(full: Sequence[str], rows: Sequence[Row], binary: bool) -> str:
    """The line of several policies for which the same memory is too small."""
    from_budget: dict[str, list[str]] = {}
    for row in rows:
        floor = row.get("floor_bytes")
        where = "no budget is known to fit" if floor is None else f"fits from {size(floor, binary)}"
        from_budget.setdefault(where, []).append(str(row["policy"]))
    parts = [f"{', '.join(names)}: {where}" for where, names in from_budget.items()]
    return f"{' and '.join(full)} full: {'; '.join(parts)}"


def _each_failure(rows: Sequence[Row], binary: bool) -> list[str]:
    lines = []
    for row in ordered(rows):
        if row["fits"] or row.get("refusal") == "state":
            continue
        if row["fits"] is None:
            lines.append(f"{row['policy']}: not run: {row.get('error') or 'no reason given'}")
            continue
        floor = row.get("floor_bytes")
        parts = ["no budget is known to fit" if floor is None else f"fits from {format_bytes(floor, binary=binary)}"]
        if full := row.get("full"):
            parts.append(f"{' and '.join(full)} full")
        holders = row.get("holders") or ()
        if holders:
            shown = ", ".join(f"{n} {size(b, binary)} ({why})" for n, b, why in holders[:HOLDERS_SHOWN])
            more = f" and {len(holders) - HOLDERS_SHOWN} more" if len(holders) > HOLDERS_SHOWN else ""
            parts.append(f"held by {shown}{more}")
        elif row.get("error"):
            parts.append(str(row["error"]))
        lines.append(f"{row['policy']}: does not fit: {'; '.join(parts)}")
    return lines


def _left_in_place(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of policies that were refused for the state of training alone, by what they were told."""
    refused: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("refusal") == "state":
            refused.setdefault(str(row["error"]), []).append(row)
    return refused


# ---- text of one value -------------------------------------------------------------------------


def size(bytes: int | None, binary: bool = False) -> str:
    """Bytes to three digits."""
    return NONE if bytes is None else format_bytes(bytes, binary=binary, digits=3)


def clock(ns: int | None) -> str:
    """Nanoseconds to three digits."""
    return NONE if ns is None else format_time(ns, digits=3).replace(" us", " µs")


def percent(fraction: float | None, *, sign: bool = False) -> str:
    """A fraction in percent: one decimal below 10 %, none above."""
    if fraction is None:
        return NONE
    value = 100 * fraction
    text = f"{value:{'+' if sign else ''}.{1 if abs(value) < 9.95 else 0}f}"
    return ("0" if float(text) == 0 else text) + " %"


def manages(roles: Sequence[str] | None) -> str:
    """Initials of what a policy may drop or move: "A G O W"."""
    if roles is None:
        return NONE
    return " ".join(letter for role, letter in INITIALS.items() if role in roles) or NONE


def total(value: Mapping[str, int] | int) -> int:
    """The sum of a figure that is given by cause or by link."""
    return sum(value.values()) if isinstance(value, Mapping) else value


def device_ns(row: Row) -> int:
    """The time that a run took of all its devices' main engines together."""
    return (row.get("makespan_ns") or 0) * (row.get("devices") or 1)


def name_of(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def unit_of(key: str) -> str:
    """The unit of a figure: as declared, else by the ending of its key; "" if neither tells."""
    name = key.partition(".")[0]
    if (figure := known().get(name)) is not None:
        return figure.unit
    ends = {"_ns": "time", "_bytes": "bytes", "_fraction": "percent", "_share": "percent"}
    return next((unit for end, unit in ends.items() if name.endswith(end)), "")


def text_of(key: str, value: Any, *, binary: bool = False) -> str:
    """The text of one figure of a summary, by its unit."""
    if value is None:
        return NONE
    unit = unit_of(key)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "time":
        return format_time(round(value)).replace(" us", " µs")
    if unit == "bytes":
        return format_bytes(round(value), binary=binary)
    if unit in ("percent", "change"):
        return percent(value, sign=unit == "change")
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (tuple, list)):
        return ", ".join(str(item) for item in value) or NONE
    return str(value)
