"""The engine against the reference simulator: every figure of a run, and where they differ first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from sim.engine.replay import replay
from sim.errors import OutOfMemory, TiersimError
from sim.hardware.platform import Platform
from sim.log import CAUSES, STALLS, WHYS, EventLog
from sim.plan import Online, Plan
from tests.engine.reference import Outcome, simulate

COUNTERS = (
    *("ignored_actions", "implicit_moves", "implicit_recomputes", "pressure_calls", "returned_moves"),
    *("moves_cancelled", "cancelled_bytes", "moves_without_space"),
)


class Expected(NamedTuple):
    """What the reference says of a problem; the online parts that it asked, if any."""

    outcome: Outcome
    parts: list[Online]


def expected(plan: Plan, platform: Platform) -> Expected:
    """Run the reference on a problem."""
    parts: list[Online] = []
    return Expected(simulate(_watched(plan, parts), platform), parts)


def difference(plan: Plan, platform: Platform, *, fast: bool = True, known: Expected | None = None) -> str:
    """Where engine and reference first differ on a problem, in words; "" where they agree in all.

    known: what the reference says of it, where it has been asked before.
    """
    parts: list[Online] = []
    log, error = _replayed(_watched(plan, parts), platform, fast)
    known = known or expected(plan, platform)
    for mine, theirs in zip(parts[-1:], known.parts):  # the last: a run may begin again, on another path
        for here, there in zip_longest(getattr(mine, "seen", ()), getattr(theirs, "seen", ())):
            if here != there:
                return f"seen: {_first_unequal(here, there)}"
    return compared(log, error, known.outcome)


def _watched(plan: Plan, parts: list[Online]) -> Plan:
    """The same plan; what its runs make to answer while they run is kept."""
    if plan.online is None:
        return plan
    factory = plan.online

    def make() -> Online:
        parts.append(factory())
        return parts[-1]

    return replace(plan, online=make)


def _first_unequal(here: object, there: object) -> str:
    if isinstance(here, tuple | list) and isinstance(there, tuple | list) and len(here) == len(there):
        context = here[:2] if here and not isinstance(here[0], tuple | list) else ""
        return f"{context} " + next(_first_unequal(a, b) for a, b in zip(here, there) if a != b)
    return f"engine {here}; reference {there}"


def _replayed(plan: Plan, platform: Platform, fast: bool) -> tuple[EventLog | None, TiersimError | None]:
    try:
        return replay(plan, platform, fast=fast), None
    except TiersimError as error:
        return None, error


def compared(log: EventLog | None, error: TiersimError | None, expected: Outcome) -> str:
    """The kind of refusal; else the end, all intervals, all changes of memory per instant, and the counters."""
    if type(error) is not type(expected.error):
        return f"refused: engine {_kind(error)}; reference {_kind(expected.error)}"
    if isinstance(error, OutOfMemory) and isinstance(expected.error, OutOfMemory):
        mine = error.tier, error.need_bytes, error.free_bytes
        theirs = expected.error.tier, expected.error.need_bytes, expected.error.free_bytes
        return "" if mine == theirs else f"out of memory: engine {mine}; reference {theirs}"
    if log is None:
        return ""
    for what, here, there in (
        ("row", _intervals(log), _joined(expected.intervals)),
        ("change", _changes(log), expected.changes),
    ):
        different = _first_difference(what, here, there)
        if different:
            return different
    if log.end != expected.end:
        return f"end: engine {log.end}; reference {expected.end}"
    for name in COUNTERS:
        if log.counters[name] != expected.counters[name]:
            return f"{name}: engine {log.counters[name]}; reference {expected.counters[name]}"
    return ""


def _kind(error: TiersimError | None) -> str:
    return "not at all" if error is None else f"{type(error).__name__}: {error}"


def _intervals(log: EventLog) -> list[tuple]:
    lanes = log.platform.lanes
    return _joined(
        (s, e, d, lanes[lane], WHYS[why], op, t, STALLS[cause], bytes)
        for s, e, d, lane, why, op, t, cause, bytes in log.intervals.tolist()
    )


def _changes(log: EventLog) -> list[tuple]:
    tiers = [tier.name for tier in log.platform.tiers]
    return [(time, tiers[i], d, t, op, CAUSES[cause]) for time, i, d, t, op, cause in log.changes.tolist()]


def _joined(rows: Iterable[tuple]) -> list[tuple]:
    """Stalls that follow each other for one reason are one; how often a device looked again does not count."""
    out, open_at = [], {}
    for row in sorted(rows):
        start, end, device, lane, why, op, tensor, cause, _ = row
        if why != "stall":
            out.append(row)
            continue
        key = (device, lane, op, tensor, cause)
        before = open_at.get(key)
        if before is not None and out[before][1] == start:
            out[before] = (out[before][0], end, *row[2:])
        else:
            open_at[key] = len(out)
            out.append(row)
    return out


def _first_difference(what: str, here: list[tuple], there: list[tuple]) -> str:
    by_time: dict[int, list[Counter]] = defaultdict(lambda: [Counter(), Counter()])
    for side, rows in enumerate((here, there)):
        for row in rows:
            by_time[row[0]][side][row] += 1
    for time in sorted(by_time):
        mine, theirs = by_time[time]
        if mine != theirs:
            return f"{what} at {time}: engine {sorted(mine - theirs)}; reference {sorted(theirs - mine)}"
    return ""
