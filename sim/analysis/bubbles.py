"""When each device does nothing: before its first op, after its last, and in between."""

from __future__ import annotations

from dataclasses import dataclass

from sim.analysis.lanes import STALL, on_main, total_ns
from sim.log import EventLog


@dataclass(frozen=True)
class Bubbles:
    """Nanoseconds of one device's main engine; the five add up to the makespan.

    busy_ns: computing.
    stall_ns: waiting for a cause, between its first and last row.
    before_ns: from the start of the run to its first row.
    after_ns: from its last row to the end of the run.
    gap_ns: without any row, between its first and last; 0 in a complete log.
    idle: the fraction of the makespan that is not busy, None in a run of no time.
    """

    device: int
    busy_ns: int
    stall_ns: int
    before_ns: int
    after_ns: int
    gap_ns: int
    idle: float | None


def bubbles(log: EventLog) -> tuple[Bubbles, ...]:
    """One entry per device of the trace."""
    start, end, waits = log.interval("start"), log.interval("end"), log.interval("why") == STALL
    table = []
    for device in range(log.trace.devices):
        rows = on_main(log, device)
        first, last = (int(start[rows].min()), int(end[rows].max())) if rows.any() else (log.end, log.end)
        covered, stall = total_ns(start[rows], end[rows]), total_ns(start[rows & waits], end[rows & waits])
        busy = covered - stall
        table.append(
            Bubbles(
                device=device,
                busy_ns=busy,
                stall_ns=stall,
                before_ns=first,
                after_ns=log.end - last,
                gap_ns=last - first - covered,
                idle=1 - busy / log.end if log.end else None,
            )
        )
    return tuple(table)
