"""How many bytes crossed each link, and how busy it was."""

from __future__ import annotations

from dataclasses import dataclass

from sim.analysis.lanes import MOVE, total_ns
from sim.log import EventLog


@dataclass(frozen=True)
class LinkTraffic:
    """The use of one link.

    bytes: on the wire.
    transfers: how many.
    busy_ns: time with at least one transfer.
    busy: its fraction of the run, None in a run of no time.
    utilisation: bytes over what the link could have carried in the whole run, None in a run of no time.
    """

    link: str
    bytes: int
    transfers: int
    busy_ns: int
    busy: float | None
    utilisation: float | None


def traffic(log: EventLog) -> tuple[LinkTraffic, ...]:
    """One entry per link of the platform, in its order, zeros for unused links."""
    lane, moves = log.interval("lane"), log.interval("why") == MOVE
    start, end, bytes = log.interval("start"), log.interval("end"), log.interval("bytes")
    table = []
    for i, link in enumerate(log.platform.links, start=len(log.platform.engines)):
        rows = moves & (lane == i)
        moved, busy = int(bytes[rows].sum()), total_ns(start[rows], end[rows])
        table.append(
            LinkTraffic(
                link=link.name,
                bytes=moved,
                transfers=int(rows.sum()),
                busy_ns=busy,
                busy=busy / log.end if log.end else None,
                utilisation=moved * 10**9 / (link.rate * log.end) if log.end else None,
            )
        )
    return tuple(table)
