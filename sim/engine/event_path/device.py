"""A device: one process that walks its ops in program order and waits for what each needs.

Where it can, it takes the fast path; the general path is the reference for that.
"""

from __future__ import annotations

from sim.engine.event_path.clock import AFTERS, FREES, STARTS
from sim.engine.event_path.fast_path import SHORT, FastPath
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.perform import Perform
from sim.engine.event_path.waits import Steps, Waits
from sim.engine.prepare import Plain


class Device:
    """Walks the ops of one device. finished: fires when all have run."""

    def __init__(self, index: int, parts: Parts, *, fast: bool) -> None:
        """fast: take the fast path where it can be taken."""
        self.index = index
        self.waits = Waits(index, parts)
        self._fast = FastPath(parts, index, fast)
        self.perform = Perform(parts, self.waits, self._fast)
        self.finished = self.waits.wake_up()
        self._parts = parts
        self._state = parts.state
        self._clock = parts.state.clock
        self._lane = parts.state.prepared.main[index]
        self._home = parts.state.prepared.home[self._lane]
        self._reach = parts.state.prepared.reach[self._lane]

    def walk(self) -> Steps:
        """All ops in order; then `finished` fires."""
        parts, state, path, perform = self._parts, self._state, self._fast, self.perform
        resolved, clock, apply, queue = parts.resolved, self._clock, parts.decisions.apply, self._clock.queue
        plain, renewals = path.plain, path.renewals
        before, after = resolved.before, resolved.after
        slow_before, slow_after = resolved.slow_before, resolved.slow_after
        device, starts = self.index, STARTS + self.index
        free_after, space, home = state.lifetimes.free_after, state.space, self._home
        asks, launches = parts.decisions.asks_before, bool(state.prepared.dispatched)
        yield from self.waits.turn(starts)
        for op in state.prepared.order[self.index]:
            if op in before:
                if op in slow_before:
                    yield from perform.actions(before[op], op)
                else:
                    apply(before[op], device, op)
            if asks and (slow := parts.decisions.before(op, device)):
                yield from perform.actions(slow, op, online=True)
            if launches:
                yield from self.waits.launch(op)
            entry = plain[op]
            if entry is None:
                if op in renewals and path.renews(op, renewals[op]):
                    if op in after or not path.renew(op, renewals[op]):
                        yield from perform.renew(op, renewals[op])
                    elif queue and queue[0][0] <= clock.now:
                        yield from self.waits.turn(starts)
                elif not perform.exchange(op):
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
                others = yield from path.run_beside(op, end)
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
            if entry.workspace and space.waiting:
                space.offer(home)
            if queue and queue[0][0] <= clock.now:
                yield from self.waits.turn(starts)
        yield from self.waits.catch_up()
        self.finished.fire()

    def _until_there(self, plain: Plain, op: int) -> Steps:
        """Wait for the reads that are on their way home, or results of others, or till one is on its way no more.

        One that leaves as it arrives is wanted back, as in `Restore.reads`.
        """
        residency, lifetimes = self._state.residency, self._state.lifetimes
        lifetimes.pin(plain.reads)
        for tensor in plain.reads:
            while not residency.copies[tensor] & self._reach:
                if tensor in residency.in_flight:
                    yield from self.waits.arrival(tensor, "transfer", op)
                elif tensor in residency.awaited:
                    yield from self.waits.arrival(tensor, residency.awaited[tensor], op)
                    continue
                else:
                    break
                if residency.copies[tensor] & self._reach:
                    self._parts.transfers.keep_leaving(tensor, self._home)
            if not residency.copies[tensor] & self._reach:
                break
        lifetimes.unpin(plain.reads)
