"""A device: one process that walks its ops in program order and waits for what each needs.

Where it can, it takes the fast path; the general path is the reference for that.
"""

from __future__ import annotations

from collections.abc import Generator

from sim.engine.event_path.clock import AFTERS, ENDS, FREES, STARTS, Event
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.perform import Perform
from sim.engine.event_path.record import Columns
from sim.engine.event_path.residency import LEAVING, TELLS
from sim.engine.event_path.space import PRODUCED, WORKSPACE
from sim.engine.event_path.waits import Steps, Waits
from sim.engine.prepare import Plain
from sim.log import WHY

RUN = WHY["run"]
GENERAL, SHORT = -1, -2
"""Instead of the end of an op: it has to take the general path; it lacks nothing but space."""


class Device:
    """Walks the ops of one device. finished: fires when all have run."""

    def __init__(self, index: int, parts: Parts) -> None:
        self.index = index
        self.waits = Waits(index, parts)
        self.perform = Perform(parts, self.waits)
        self.finished = self.waits.wake_up()
        self._parts = parts
        self._state = parts.state
        self._clock = parts.state.clock
        self._lane = parts.state.prepared.main[index]
        self._home = parts.state.prepared.home[self._lane]
        self._reach = parts.state.prepared.reach[self._lane]
        self._fast = FastPath(parts, index)

    def walk(self, fast: bool) -> Steps:
        """All ops in order; then `finished` fires. fast: take the fast path where it can be taken."""
        parts, state, path, perform = self._parts, self._state, self._fast, self.perform
        resolved, clock, apply, queue = parts.resolved, self._clock, parts.decisions.apply, self._clock.queue
        plain = self._plain() if fast else [None] * len(state.prepared.plain)
        before, after = resolved.before, resolved.after
        slow_before, slow_after = resolved.slow_before, resolved.slow_after
        device, starts = self.index, STARTS + self.index
        free_after, space, home = state.lifetimes.free_after, state.space, self._home
        asks = parts.decisions.asks_before
        yield from self.waits.turn(starts)
        for op in state.prepared.order[self.index]:
            if op in before:
                if op in slow_before:
                    yield from perform.actions(before[op], op)
                else:
                    apply(before[op], device, op)
            if asks and (answer := parts.decisions.before(op, device)):
                if any(act.kind in ("wait", "recompute") for act in answer):
                    yield from perform.actions(answer, op, online=True)
                else:
                    apply(answer, device, op, online=True)
            entry = plain[op]
            if entry is None:
                yield from perform.op(op)
                continue
            end = path.begin(op, entry)
            if end == SHORT:
                end = path.make_room(op, entry)
                if end < 0:
                    yield from perform.pressed(op)
                    continue
            elif end < 0:
                fetched = path.are_coming(entry)
                if fetched:
                    yield from self._until_there(entry, op)
                    end = path.begin(op, entry, fetched=True)
                if end < 0:
                    yield from perform.op(op, fetched=fetched)
                    continue
            start = clock.now
            others = False
            if queue and queue[0][0] <= end:
                others = yield from self._run_beside(op, end)
            path.end(op, entry, start, end)
            if op in after:
                if others and not clock.is_next(AFTERS + op):
                    yield from self.waits.turn(AFTERS + op)
                if op in slow_after:
                    yield from perform.actions(after[op], op)
                else:
                    apply(after[op], device, op)
            if others and not clock.is_next(FREES + op):
                yield from self.waits.turn(FREES + op)
            free_after(op)
            if space.waiting:
                space.offer(home)
            if queue and queue[0][0] <= clock.now:
                yield from self.waits.turn(starts)
        yield from self.waits.catch_up()
        self.finished.fire()

    def _plain(self) -> list[Plain | None]:
        """Of the ops that may take the fast path what is known of them; those that the plan places may not."""
        plain, special = self._state.prepared.plain, self._parts.resolved.special
        return [None if op in special else entry for op, entry in enumerate(plain)] if special else plain

    def _run_beside(self, op: int, end: int) -> Generator[Event, None, bool]:
        """Let an op run while others act; whether any acts at its end, too."""
        clock, lifetimes, engines = self._clock, self._state.lifetimes, self._parts.engines
        lifetimes.pin_operands(op)
        engines.occupy(self._lane)
        yield clock.at(end, ENDS + op)
        clock.advance(end)
        lifetimes.unpin_operands(op)
        engines.vacate(self._lane)
        return bool(clock.queue) and clock.queue[0][0] <= end

    def _until_there(self, plain: Plain, op: int) -> Steps:
        """Wait for the reads that are on their way home, or till one is on its way no more."""
        residency, lifetimes = self._state.residency, self._state.lifetimes
        lifetimes.pin(plain.reads)
        for tensor in plain.reads:
            while not residency.copies[tensor] & self._reach and tensor in residency.in_flight:
                yield from self.waits.arrival(tensor, "transfer", op)
            if not residency.copies[tensor] & self._reach:
                break
        lifetimes.unpin(plain.reads)


class FastPath:
    """Starts and ends plain ops (`Prepared.plain`) of one device.

    All that such an op reads is at home, and there is space. It writes the rows that the general path would write, by
    the same rules, without its generators, tells an online part what that would tell it, and works on the lists of the
    run's parts directly: one call per op and part would cost more than the op itself.
    """

    def __init__(self, parts: Parts, device: int) -> None:
        state, prepared = parts.state, parts.state.prepared
        self._device = device
        self._lane = prepared.main[device]
        self._home = prepared.home[self._lane]
        self._reach = prepared.reach[self._lane]
        self._bit = 1 << self._home
        self._clock, self._space, self._record = state.clock, state.space, state.record
        self._residency = state.residency
        self._copies, self._produced = state.residency.copies, state.residency.produced
        self._waiters, self._in_flight = state.residency.waiters, state.residency.in_flight
        self._used, self._capacity = state.space.used, state.space.capacity[self._home]
        self._changes, self._intervals = state.record.changes.rows, state.record.intervals.rows
        self._guests = parts.engines.guests
        self._lifetimes, self._decisions, self._operands = state.lifetimes, parts.decisions, prepared.operands
        self._uses, self._releases = state.lifetimes.uses, prepared.releases
        self._is_watched, self._tell = state.residency.is_watched, state.residency.tell
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
            self._note_reads(reads, now)
        for tensor, bytes in writes:
            changes += (now, home, bytes, tensor, op, PRODUCED)
        if workspace:
            changes += (now, home, workspace, -1, op, WORKSPACE)
        self._used[home] = total
        if self._clock.wanted and ns:
            self._clock.flush()
        return now + ns

    def make_room(self, op: int, plain: Plain) -> int:
        """Ask the online part for the space that an op lacks, take it, and say when the op ends.

        `GENERAL` if it has to wait for space: `Perform.pressed` goes on from there.
        """
        space, home, lifetimes, decisions = self._space, self._home, self._lifetimes, self._decisions
        need = plain.out + plain.workspace
        lifetimes.pin(self._operands[op])
        self._note_reads(plain.reads, self._clock.now)
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

    def _note_reads(self, reads: tuple[int, ...], now: int) -> None:
        last_read, tell, name = self._residency.last_read, self._tell, self._name
        for tensor in reads:
            last_read[tensor] = now
            if tell is not None:
                tell(TELLS(("read", tensor, name, now)))

    def are_coming(self, plain: Plain) -> bool:
        """Whether some reads are on their way home, and all others at home to stay.

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
        copies, produced, bit, tell = self._copies, self._produced, self._bit, self._tell
        for tensor, _ in writes:
            copies[tensor] |= bit
            produced[tensor] = True
            if tell is not None:
                tell(TELLS(("came", tensor, self._name, end)))
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
