"""A device: one process that walks its ops in program order and waits for what each needs.

Where it can, it takes the fast path; the general path is the reference for that.
"""

from __future__ import annotations

from collections.abc import Generator

from sim.engine.event_path.clock import AFTERS, ENDS, FREES, STARTS, Event
from sim.engine.event_path.fast_path import FastPath
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.perform import Perform
from sim.engine.event_path.waits import Steps, Waits
from sim.engine.prepare import Plain
from sim.plan import Online


class Device:
    """Walks the ops of one device. finished: fires when all have run."""

    def __init__(self, index: int, parts: Parts) -> None:
        self.index = index
        self.waits = Waits(index, parts)
        self.perform = Perform(parts, self.waits)
        self.finished = self.waits.wake_up()
        self._parts = parts
        self._clock = parts.clock
        self._lane = parts.prepared.main[index]
        self._home = parts.prepared.home[self._lane]
        self._reach = parts.prepared.reach[self._lane]
        self._fast = FastPath(parts, index)

    def walk(self, fast: bool) -> Steps:
        """All ops in order; then `finished` fires. fast: take the fast path where it can be taken."""
        parts, path, perform, queue = self._parts, self._fast, self.perform, self._clock.queue
        resolved, clock, apply = parts.resolved, self._clock, parts.actions.apply
        plain = self._plain() if fast else [None] * len(parts.prepared.plain)
        before, after = resolved.before, resolved.after
        slow_before, slow_after = resolved.slow_before, resolved.slow_after
        device, starts = self.index, STARTS + self.index
        free_after, space, home = parts.lifetimes.free_after, parts.space, self._home
        asks = parts.online is not None and type(parts.online).before is not Online.before
        yield from self.waits.turn(starts)
        for op in parts.prepared.order[self.index]:
            if op in before:
                if op in slow_before:
                    yield from perform.actions(before[op], op)
                else:
                    apply(before[op], device, op)
            if asks:
                yield from self._asked(op)
            entry = plain[op]
            if entry is None:
                yield from perform.op(op)
                continue
            end = path.begin(op, entry)
            if end < 0:
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
        plain, special = self._parts.prepared.plain, self._parts.resolved.special
        return [None if op in special else entry for op, entry in enumerate(plain)] if special else plain

    def _asked(self, op: int) -> Steps:
        """Ask the online part what to do before an op, and do it."""
        parts = self._parts
        if parts.online is not None:
            acts = parts.resolved.answer(parts.online.before(op, parts.view), self.index)
            yield from self.perform.actions(acts, op, online=True)

    def _run_beside(self, op: int, end: int) -> Generator[Event, None, bool]:
        """Let an op run while others act; whether any acts at its end, too."""
        clock, lifetimes, engines = self._clock, self._parts.lifetimes, self._parts.engines
        lifetimes.pin_operands(op)
        engines.occupy(self._lane)
        yield clock.at(end, ENDS + op)
        clock.advance(end)
        lifetimes.unpin_operands(op)
        engines.vacate(self._lane)
        return bool(clock.queue) and clock.queue[0][0] <= end

    def _until_there(self, plain: Plain, op: int) -> Steps:
        """Wait for the reads that are on their way home, or till one is on its way no more."""
        residency, lifetimes = self._parts.residency, self._parts.lifetimes
        lifetimes.pin(plain.reads)
        for tensor in plain.reads:
            while not residency.copies[tensor] & self._reach and tensor in residency.in_flight:
                yield from self.waits.arrival(tensor, "transfer", op)
            if not residency.copies[tensor] & self._reach:
                break
        lifetimes.unpin(plain.reads)
