"""The fast path of a device: plain ops without generators, on the lists of the run's parts."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from sim.engine.event_path.clock import ENDS, Event
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.record import Columns
from sim.engine.event_path.residency import LEAVING
from sim.engine.event_path.space import PRODUCED, WORKSPACE
from sim.engine.prepare import Plain, Renewal
from sim.log import WHY

RUN, RECOMPUTE = WHY["run"], WHY["recompute"]
GENERAL, SHORT = -1, -2
"""Instead of the end of an op: it has to take the general path; it lacks nothing but space."""


class FastPath:
    """Starts and ends plain ops (`Prepared.plain`) of one device, first runs and recomputations.

    All that such an op reads is at home, and there is space. It writes the rows that the general path would write, by
    the same rules, without its generators, tells an online part what that would tell it, and works on the lists of the
    run's parts directly: one call per op and part would cost more than the op itself.

    plain: of the device's ops that may be plain what is known of them, None for others.
    renewals: the same of ops that may overwrite values in place, see `Perform.renew`.
    exchanges, exchanges_over: the same of collectives that may begin at once, with new space for their results, or over
        values in place; see `Perform.exchange`.
    """

    def __init__(self, parts: Parts, device: int, fast: bool) -> None:
        """fast: whether any op may; those that the plan places may not."""
        state, prepared, special = parts.state, parts.state.prepared, parts.resolved.special
        self.plain: list[Plain | None] = [None] * len(prepared.total)
        if fast and len(prepared.order) == 1 and not special:
            self.plain = prepared.plain
        elif fast:
            for op in prepared.order[device]:
                self.plain[op] = None if op in special else prepared.plain[op]
        may_renew = fast and not state.residency.is_watched
        self.renewals: Mapping[int, Renewal] = prepared.renewals if may_renew else {}
        self.exchanges: Mapping[int, Plain] = prepared.exchanges if fast and not special else {}
        self.exchanges_over: Mapping[int, Renewal] = prepared.exchanges_over if may_renew else {}
        self._special = special
        self._device = device
        self._lane = prepared.main[device]
        self._home = prepared.home[self._lane]
        self._reach = prepared.reach[self._lane]
        self._bit = 1 << self._home
        self._clock, self._space, self._record = state.clock, state.space, state.record
        self._residency = state.residency
        self._copies, self._produced = state.residency.copies, state.residency.produced
        self._waiters, self._in_flight = state.residency.waiters, state.residency.in_flight
        self._awaited = state.residency.awaited
        self._used, self._capacity = state.space.used, state.space.capacity[self._home]
        self._changes, self._intervals = state.record.changes.rows, state.record.intervals.rows
        self._engines, self._guests, self._busy = parts.engines, parts.engines.guests, parts.engines.busy
        self._lifetimes, self._decisions, self._operands = state.lifetimes, parts.decisions, prepared.operands
        self._why, self._overwriters = prepared.why, state.lifetimes.overwriters
        self._uses, self._pins, self._releases = state.lifetimes.uses, state.lifetimes.pins, prepared.releases
        self._is_watched, self._news = state.residency.is_watched, state.residency.news
        self._is_told = state.residency.note is not None
        self._name = state.space.names[self._home]

    def begin(self, op: int, plain: Plain, *, fetched: bool = False) -> int:
        """Take space for an op and say when it ends; `GENERAL`, or `SHORT` where an online part can be asked for space.

        fetched: its reads have been waited for; what was asked to leave meanwhile is read first.
        """
        reads, writes, out, workspace, ns = plain
        copies, bit, home = self._copies, self._bit, self._home
        mask = bit if fetched else bit | LEAVING
        for tensor in reads:
            if copies[tensor] & mask != bit:
                return GENERAL
        total = self._used[home] + out + workspace
        if self._space.waiting or self._guests[self._lane]:
            return GENERAL
        if total > self._capacity:
            return SHORT if self._is_watched else GENERAL
        now, changes = self._clock.now, self._changes
        if self._is_watched:
            self.note_reads(reads, now)
        for tensor, bytes in writes:
            changes += (now, home, bytes, tensor, op, PRODUCED)
        if workspace:
            changes += (now, home, workspace, -1, op, WORKSPACE)
        self._used[home] = total
        if self._clock.wanted and ns:
            self._clock.flush()
        return now + ns

    def renews(self, op: int, renewal: Renewal) -> bool:
        """Whether all that an op reads is at home to stay, and nobody else uses or copies what it overwrites."""
        copies, bit, residency, lifetimes = self._copies, self._bit, self._residency, self._lifetimes
        if op in self._special or self._space.waiting or self._guests[self._lane] or self._space.compressed:
            return False
        for tensor in renewal.reads:
            if copies[tensor] & (bit | LEAVING) != bit or tensor in residency.overwriting:
                return False
        for old, new in renewal.pairs:
            if copies[old] != bit or self._pins[old] or old in self._in_flight or old in lifetimes.put_off:
                return False
            if copies[new] or self._pins[new] or new in self._in_flight or (new, self._home) in residency.reproducing:
                return False
        return True

    def renew(self, op: int, renewal: Renewal) -> bool:
        """Let such an op run if nobody else acts until it ends; whether it has, else see `Perform.renew`."""
        clock, residency, lifetimes, home = self._clock, self._residency, self._lifetimes, self._home
        if clock.wanted and renewal.ns:
            clock.flush()
        start = clock.now
        end = start + renewal.ns
        if clock.queue and clock.queue[0][0] <= end:
            return False
        clock.advance(end)
        self._intervals += (start, end, self._device, self._lane, self._why[op], op, -1, 0, 0)
        for old, new in renewal.pairs:
            lifetimes.take_over(old, new, home, op)
            residency.deliver(new, home)
        lifetimes.note_reads(op, first=True)
        lifetimes.free_after(op)
        for old, _ in renewal.pairs:
            lifetimes.free_if_dead(old, op)
        return True

    def make_room(self, op: int, plain: Plain) -> int:
        """Ask the online part for the space that an op lacks, take it, and say when the op ends.

        `GENERAL` if it has to wait for space: `Perform.pressed` goes on from there.
        """
        space, home, lifetimes, decisions = self._space, self._home, self._lifetimes, self._decisions
        need = plain.out + plain.workspace
        lifetimes.pin(self._operands[op])
        self.note_reads(plain.reads, self._clock.now)
        while not space.fits(home, need):
            if space.fits_later(home, need) or not decisions.relieve(home, need, self._device, op, "its results"):
                return GENERAL
        if space.waiting:
            return GENERAL
        lifetimes.unpin(self._operands[op])
        now, changes = self._clock.now, self._changes
        for tensor, bytes in plain.writes:
            changes += (now, home, bytes, tensor, op, PRODUCED)
        if plain.workspace:
            changes += (now, home, plain.workspace, -1, op, WORKSPACE)
        self._used[home] += need
        if self._clock.wanted and plain.ns:
            self._clock.flush()
        return now + plain.ns

    def note_reads(self, reads: tuple[int, ...], now: int) -> None:
        """An op of the device has been reached, and reads these."""
        last_read = self._residency.last_read
        for tensor in reads:
            last_read[tensor] = now
        if self._is_told:
            name = self._name
            self._news += [("read", tensor, name, now) for tensor in reads]

    def begin_restored(self, op: int, plain: Plain, *, fetched: bool = False) -> int:
        """The same for an op whose reads have been noted and pinned, and that is recomputed or had to wait for them.

        Its results are pinned, too, unless it has to take the general path. `SHORT`: the online part has been asked,
        and still there is no space.
        """
        reads, writes, out, workspace, ns = plain
        copies, home, bit, space = self._copies, self._home, self._bit, self._space
        mask = bit if fetched else bit | LEAVING
        overwriting, reproducing = self._residency.overwriting, self._residency.reproducing
        if space.waiting or self._guests[self._lane]:
            return GENERAL
        for tensor in reads:
            if copies[tensor] & mask != bit or tensor in overwriting:
                return GENERAL
        for tensor, _ in writes:
            if copies[tensor] or tensor in self._in_flight or (tensor, home) in reproducing:
                return GENERAL  # its recomputation is workspace
        for tensor, _ in writes:
            self._pins[tensor] += 1
        need = out + workspace
        while self._used[home] + need > self._capacity:
            if space.fits_later(home, need) or not self._decisions.relieve(home, need, self._device, op, "its results"):
                return SHORT
        if space.waiting:
            return SHORT
        now, changes = self._clock.now, self._changes
        for tensor, bytes in writes:
            changes += (now, home, bytes, tensor, op, PRODUCED)
        if workspace:
            changes += (now, home, workspace, -1, op, WORKSPACE)
        self._used[home] += need
        if self._clock.wanted and ns:
            self._clock.flush()
        return now + ns

    def run_beside(self, op: int, end: int) -> Generator[Event, None, bool]:
        """Let an op run while others act; whether any acts at its end, too."""
        clock, pins, operands, lane = self._clock, self._pins, self._operands[op], self._lane
        for tensor in operands:
            pins[tensor] += 1
        self._busy[lane] = True
        yield clock.at(end, ENDS + op)
        clock.advance(end)
        for tensor in operands:
            pins[tensor] -= 1
        if self._overwriters:
            self._lifetimes.wake_overwriters(operands)
        self._busy[lane] = False
        if self._guests[lane]:
            self._engines.look()
        return bool(clock.queue) and clock.queue[0][0] <= end

    def are_coming(self, plain: Plain) -> bool:
        """Whether some reads are on their way home or results of ops under way, and all others at home to stay.

        Never where there is an online part: what it is to know of the reads before the wait the general path tells it.
        """
        if self._is_watched:
            return False
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
                if transfer is None:
                    if copies or tensor not in self._awaited:
                        return False
                elif transfer.target != self._home or transfer.waits:
                    return False
                coming = True
        return coming

    def end(self, op: int, plain: Plain, start: int, end: int, *, again: bool = False, counted: bool = True) -> None:
        """An op has run: its results are there, its reads have been.

        again: it was recomputed. counted: its reads were expected.
        """
        writes, workspace, home = plain.writes, plain.workspace, self._home
        self._clock.now = end
        self._intervals += (start, end, self._device, self._lane, RECOMPUTE if again else RUN, op, -1, 0, 0)
        if workspace:
            self._used[home] -= workspace
            self._changes += (end, home, -workspace, -1, op, WORKSPACE)
        copies, produced, bit = self._copies, self._produced, self._bit
        for tensor, _ in writes:
            copies[tensor] |= bit
            produced[tensor] = True
        if self._is_told:
            name = self._name
            self._news += [("came", tensor, name, end) for tensor, _ in writes]
        if self._waiters:
            for tensor, _ in writes:
                if tensor in self._waiters:
                    self._residency.wake_waiters(tensor)
        if counted:
            uses = self._uses
            for tensor in plain.reads:
                uses[tensor] -= 1
            for tensor in self._releases.get(op, ()) if self._releases and not again else ():
                uses[tensor] -= 1
        if len(self._changes) > Columns.PACK:
            self._record.pack()
            self._decisions.tell()
