"""The fast path of one op, for a plan without an online part: all it reads is at home, and there is space.

It writes the rows that the general path would write, by the same rules, without its generators. It works on the lists
of the run's parts directly: one call per op and part would cost more than the op itself.
"""

from __future__ import annotations

from sim.engine.event_path.parts import Parts
from sim.engine.event_path.record import Columns
from sim.engine.event_path.residency import LEAVING
from sim.engine.event_path.space import PRODUCED, WORKSPACE
from sim.engine.prepare import Plain
from sim.log import WHY

RUN = WHY["run"]


class FastPath:
    """Starts and ends plain ops (`Prepared.plain`) of one device."""

    def __init__(self, parts: Parts, device: int) -> None:
        prepared = parts.prepared
        self._device = device
        self._lane = parts.prepared.main[device]
        self._home = prepared.home[self._lane]
        self._reach = prepared.reach[self._lane]
        self._bit = 1 << self._home
        self._clock, self._space, self._record = parts.clock, parts.space, parts.record
        self._residency = parts.residency
        self._copies, self._produced = parts.residency.copies, parts.residency.produced
        self._waiters, self._in_flight = parts.residency.waiters, parts.residency.in_flight
        self._used, self._capacity = parts.space.used, parts.space.capacity[self._home]
        self._changes, self._intervals = parts.record.changes.rows, parts.record.intervals.rows
        self._guests = parts.engines.guests
        self._uses, self._releases = parts.lifetimes.uses, prepared.releases

    def begin(self, op: int, plain: Plain, *, fetched: bool = False) -> int:
        """Take space for an op and say when it ends; -1 if it has to take the general path.

        fetched: its reads have been waited for; what was asked to leave meanwhile is read first.
        """
        reads, writes, out, workspace, ns = plain
        copies, bit, home = self._copies, self._bit, self._home
        mask = bit if fetched else bit | LEAVING
        for tensor in reads:
            if copies[tensor] & mask != bit:
                return -1
        total = self._used[home] + out + workspace
        if total > self._capacity or self._space.waiting or self._guests[self._lane]:
            return -1
        now, changes = self._clock.now, self._changes
        for tensor, bytes in writes:
            changes += (now, home, bytes, tensor, op, PRODUCED)
        if workspace:
            changes += (now, home, workspace, -1, op, WORKSPACE)
        self._used[home] = total
        if self._clock.wanted and ns:
            self._clock.flush()
        return now + ns

    def are_coming(self, plain: Plain) -> bool:
        """Whether some reads are on their way home, and all others at home to stay."""
        coming = False
        for tensor in plain.reads:
            copies = self._copies[tensor]
            if copies & self._bit:
                if copies & LEAVING:
                    return False
            elif copies & self._reach:
                return False  # the engine reads it where it is
            else:
                transfer = self._in_flight.get(tensor)
                if transfer is None or transfer.target != self._home or transfer.waits:
                    return False
                coming = True
        return coming

    def end(self, op: int, plain: Plain, start: int, end: int) -> None:
        """An op has run: its results are there, its reads have been."""
        writes, workspace, home = plain.writes, plain.workspace, self._home
        self._clock.now = end
        self._intervals += (start, end, self._device, self._lane, RUN, op, -1, 0, 0)
        if workspace:
            self._used[home] -= workspace
            self._changes += (end, home, -workspace, -1, op, WORKSPACE)
        copies, produced, bit = self._copies, self._produced, self._bit
        for tensor, _ in writes:
            copies[tensor] |= bit
            produced[tensor] = True
        if self._waiters:
            for tensor, _ in writes:
                self._residency.wake_waiters(tensor)
        uses = self._uses
        for tensor in plain.reads:
            uses[tensor] -= 1
        for tensor in self._releases.get(op, ()) if self._releases else ():
            uses[tensor] -= 1
        if len(self._changes) > Columns.PACK:
            self._record.pack()
