"""The columns of a run's log, and its counters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.hardware.platform import Platform
from sim.log import STALL, WHY, EventLog, Ints
from sim.trace.graph import Trace

MOVE = WHY["move"]
COUNTERS = (
    *("ignored_actions", "implicit_moves", "implicit_recomputes", "moves_cancelled", "cancelled_bytes"),
    *("moves_without_space", "pressure_calls", "returned_moves"),
)


class Columns:
    """Rows of integers, appended to a flat list and packed when it grows long."""

    PACK: ClassVar[int] = 1 << 19

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[int] = []
        self._packed: list[NDArray[np.int64]] = []

    def pack(self) -> None:
        """Move the rows so far into an array."""
        self._packed.append(np.fromiter(self.rows, np.int64, len(self.rows)).reshape(-1, self.width))
        self.rows.clear()

    def array(self) -> Ints:
        """All rows, shape (rows, width)."""
        self.pack()
        return np.concatenate(self._packed)


class Record:
    """What has happened so far. end: when the last op or copy ended, in ns."""

    def __init__(self, platform: Platform) -> None:
        self._first_link = len(platform.engines)  # lanes are engines, then links
        self.changes = Columns(6)
        self.intervals = Columns(9)
        self.reserved = Columns(3)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.end = 0

    def count(self, counter: str) -> None:
        """One more of what a counter counts."""
        self.counters[counter] += 1

    def cancelled(self, bytes: int, *, without_space: bool) -> None:
        """A move has been called back before it began."""
        self.counters["moves_cancelled"] += 1
        self.counters["cancelled_bytes"] += bytes
        self.counters["moves_without_space"] += without_space

    def ended(self, now: int) -> None:
        """Something has ended beside the devices."""
        if now > self.end:
            self.end = now

    def ran(self, start: int, end: int, device: int, lane: int, why: int, op: int) -> None:
        """A run of an op. why: a position in `WHYS`."""
        self.intervals.rows.extend((start, end, device, lane, why, op, -1, 0, 0))

    def moved(self, start: int, end: int, device: int, route: Iterable[int], op: int, tensor: int, bytes: int) -> None:
        """A copy on all links of a route."""
        for link in route:
            self.intervals.rows.extend((start, end, device, self._first_link + link, MOVE, op, tensor, 0, bytes))

    def stalled(self, start: int, end: int, device: int, lane: int, op: int, tensor: int, cause: str) -> None:
        """A wait of a device."""
        self.intervals.rows.extend((start, end, device, lane, WHY["stall"], op, tensor, STALL[cause], 0))

    def pack(self) -> None:
        """Pack the columns, which have grown long."""
        self.changes.pack()
        self.intervals.pack()

    def log(self, trace: Trace, platform: Platform, now: int, complete: bool) -> EventLog:
        """All of it as a log. now: how far the run has come."""
        return EventLog(
            trace=trace,
            platform=platform,
            intervals=self.intervals.array(),
            changes=self.changes.array(),
            reserved=self.reserved.array(),
            end=max(self.end, now),
            complete=complete,
            counters=dict(self.counters),
        )
