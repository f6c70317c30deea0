"""Where two runs of one job begin to differ, and what the slower one spends more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sim.analysis.lanes import RECOMPUTE, STALL, on_main
from sim.analysis.stalls import stalls
from sim.log import STALLS, EventLog
from sim.trace.op import PHASES


@dataclass(frozen=True)
class Step:
    """One row of a device's main lane. ns.

    does: `runs`, `recomputes`, or `waits for` with the cause.
    """

    start_ns: int
    ns: int
    does: str
    op: str


@dataclass(frozen=True)
class Parting:
    """How two runs of one job differ.

    device: whose main lanes are compared.
    first, second: the first steps of the two runs that are not the same, None after the last one.
    more: what the second run spends more, in ns: `computing`, `recomputing`, `encoding`, and `waiting: CAUSE`.
    by_phase: how much later the second run is at the end of each phase, less that of the phase before. ns.
    """

    device: int
    first: Step | None
    second: Step | None
    more: dict[str, int]
    by_phase: dict[str, int]


def parting(first: EventLog, second: EventLog, device: int = 0) -> Parting:
    """Compare two runs; each may have rewritten the trace, so that ops are compared by name."""
    pairs = zip(steps(first, device), steps(second, device))
    same = 0
    for one, other in pairs:
        if (one.ns, one.does, one.op) != (other.ns, other.does, other.op):
            break
        same += 1
    apart = [next((step for i, step in enumerate(steps(log, device)) if i == same), None) for log in (first, second)]
    return Parting(device, apart[0], apart[1], _more(first, second), _by_phase(first, second, device))


def steps(log: EventLog, device: int = 0) -> Iterator[Step]:
    """The rows of a device's main lane in order of time."""
    rows = np.flatnonzero(on_main(log, device))
    rows = rows[np.lexsort((log.interval("end")[rows], log.interval("start")[rows]))]
    names = log.trace.op_columns.name
    for row in rows.tolist():
        start, end, _, _, why, op, _, cause, _ = log.intervals[row].tolist()
        does = f"waits for {STALLS[cause]}" if why == STALL else "recomputes" if why == RECOMPUTE else "runs"
        yield Step(start, end - start, does, names[op] if op >= 0 else "")


def _more(first: EventLog, second: EventLog) -> dict[str, int]:
    spent = []
    for log in (first, second):
        found = stalls(log)
        waits = {f"waiting: {cause}": ns for cause, ns in found.by_cause.items()}
        work = {"computing": found.compute_ns, "recomputing": found.recompute_ns, "encoding": found.codec_ns}
        spent.append({**work, **waits})
    keys = list(dict.fromkeys([*spent[0], *spent[1]]))
    more = {key: spent[1].get(key, 0) - spent[0].get(key, 0) for key in keys}
    return {key: ns for key, ns in sorted(more.items(), key=lambda item: -abs(item[1])) if ns}


def _by_phase(first: EventLog, second: EventLog, device: int) -> dict[str, int]:
    """The ends of a run's phases are those of the last first run of an op of each."""
    ends = []
    for log in (first, second):
        rows = on_main(log, device) & (log.interval("op") >= 0)
        rows &= (log.interval("why") != STALL) & (log.interval("why") != RECOMPUTE)
        phase = log.trace.op_columns.phase[log.interval("op")[rows]]
        reached = np.zeros(len(PHASES), np.int64)
        np.maximum.at(reached, phase, log.interval("end")[rows])
        ends.append([*np.maximum.accumulate(reached).tolist(), log.end])
    later = [b - a for a, b in zip(*ends, strict=True)]
    lost = [at - before for before, at in zip([0, *later], later)]
    return {name: ns for name, ns in zip((*PHASES, "the end"), lost, strict=True) if ns}
