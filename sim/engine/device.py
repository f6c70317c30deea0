"""A device: one process that walks its ops in program order and waits for what each needs.

`walk` has a fast path for the op that finds all it reads at home and space for all it makes; `perform`
is the general path, and the reference for the fast one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sim.engine.events import AFTERS, ENDS, FREES, STARTS, At
from sim.engine.general import General
from sim.engine.state import FREED, LEAVING, MADE, WORKSPACE
from sim.engine.transfer import WAITS
from sim.engine.waiting import Steps
from sim.log import WHY

RUN = WHY["run"]


class Device(General):
    """Walks the ops of one device."""

    # ---- the walk ----------------------------------------------------------------------------

    def walk(self, quick: bool) -> Steps:
        """All ops in order; then `finished` fires. quick: take the fast path where it can be taken."""
        state, prepared = self._state, self._state.prepared
        env, peek = state.env, state.env.peek
        before, after, special = self._actions.before, self._actions.after, self._actions.special
        slow_before, slow_after = self._actions.slow_before, self._actions.slow_after
        online_before = self._actions.asks_before
        plain, freeable, releases = prepared.plain, prepared.freeable, prepared.releases
        copies, uses, locks, made, size = state.copies, state.uses, state.locks, state.made, state.size
        used, capacity, transfers = state.used, state.capacity, state.transfers
        changes, spans = state.changes.rows, state.spans.rows
        pending, busy, guests = state.pending, self._works.busy, self._works.guests
        home, lane, device = self._home, self._lane, self.index
        odd_sizes = state.odd_sizes
        bit = 1 << home
        mask = bit | LEAVING
        yield from self._turn(STARTS + device)
        for i in prepared.order[device]:
            if i in before:
                if i in slow_before:
                    yield from self._act(before[i], i)
                else:
                    self._apply(before[i], i, False)
            if online_before and state.online is not None:
                yield from self._act(self._actions.answer(state.online.before(i, self._view), device), i, strict=True)
            op = plain[i] if quick and i not in special else None
            if op is None:
                yield from self._perform(i)
                continue
            reads, writes, out, workspace, ns = op
            ready = True
            for t in reads:
                if copies[t] & mask != bit:
                    ready = False
                    break
            begun = not ready and t in transfers and self._is_coming(reads, bit)
            if begun:
                yield from self._until_there(reads, i)
                ready = all(copies[t] & bit for t in reads)  # what was asked to leave meanwhile is read first
            total = used[home] + out + workspace
            if not ready or total > capacity[home] or state.queued_for_space or guests[lane]:
                yield from self._perform(i, begun=begun)
                continue
            start = state.now
            end = start + ns
            for t, bytes in writes:
                changes += (start, home, bytes, t, i, MADE)
            if workspace:
                changes += (start, home, workspace, -1, i, WORKSPACE)
            used[home] = total
            if state.wanted and ns:
                state.flush()
            contended = False
            if peek() <= end:
                for t in reads:
                    locks[t] += 1
                for t, _ in writes:
                    locks[t] += 1
                busy[lane] = True
                yield At(env, end - env.now, ENDS + i)
                state.now = end
                contended = peek() <= end
                for t, _ in writes:
                    locks[t] -= 1
                for t in reads:
                    locks[t] -= 1
                busy[lane] = False
                if state.on_unlock:
                    state.note_unlocked(reads)
                if guests[lane]:
                    self._works.look()
            state.now = end
            spans += (start, end, device, lane, RUN, i, -1, 0, 0)
            if workspace:
                used[home] -= workspace
                changes += (end, home, -workspace, -1, i, WORKSPACE)
            for t, _ in writes:
                copies[t] |= bit
                made[t] = True
            if state.on_arrival:
                for t, _ in writes:
                    state.wake(state.on_arrival.pop(t, ()))
            for t in reads:
                uses[t] -= 1
            let_go = releases.get(i, ()) if releases else ()
            for t in let_go:
                uses[t] -= 1
            if i in after:
                if contended:
                    yield from self._turn(AFTERS + i)
                if i in slow_after:
                    yield from self._act(after[i], i)
                else:
                    self._apply(after[i], i, False)
            if contended:
                yield from self._turn(FREES + i)
            for t in reads:
                if pending and t in pending and not locks[t]:
                    state.release_pending(t, i)
                if uses[t] <= 0 and freeable[t]:
                    if copies[t] == bit and not locks[t] and t not in transfers and not odd_sizes:
                        copies[t] = 0
                        used[home] -= size[t]
                        changes += (state.now, home, -size[t], t, i, FREED)
                    else:
                        state.bury(t, i)
            for t, _ in writes:
                if uses[t] <= 0 and freeable[t]:
                    state.bury(t, i)
            for t in let_go:
                state.bury(t, i)
            if state.queued_for_space:
                state.stale_tiers.add(home)
                state.poke()
            if len(changes) > state.changes.PACK:
                state.changes.pack()
                state.spans.pack()
            if peek() <= state.now:
                yield from self._turn(STARTS + device)
        yield from self._catch_up()
        self.finished.fire()

    def _is_coming(self, reads: Sequence[int], bit: int) -> bool:
        """Whether every read is at home to stay or on its way there."""
        state = self._state
        for t in reads:
            if state.copies[t] & bit:
                if state.copies[t] & LEAVING:
                    return False
            elif state.copies[t] & self._reach:
                return False  # the engine reads it where it is
            else:
                transfer = state.transfers.get(t)
                if transfer is None or transfer.target != self._home or transfer.stage == WAITS:
                    return False
        return True

    def _until_there(self, reads: Sequence[int], op: int) -> Steps:
        """Wait for the reads that are on their way home, or till one is on its way no more."""
        state = self._state
        for t in reads:
            state.locks[t] += 1
        for t in reads:
            while not state.copies[t] & self._reach and t in state.transfers:
                yield from self._arrival(t, "transfer", op)
            if not state.copies[t] & self._reach:
                break
        for t in reads:
            state.locks[t] -= 1

    def _catch_up(self) -> Steps:
        """Let the event queue's clock come up to this device's."""
        state = self._state
        state.flush()
        if state.now > state.env.now:
            yield At(state.env, state.now - int(state.env.now), STARTS + self.index)
            state.now = int(state.env.now)

    # ---- the end -----------------------------------------------------------------------------

    def close(self, others: Sequence[Device], returned: Collection[int] | None = None) -> Steps:
        """After all devices: restore missing outputs, let everything end, bring carried tensors home.

        returned: which of them, by the tensors that they were at the start; see `replay`.
        """
        state, prepared = self._state, self._state.prepared
        for other in others:
            if not other.finished.processed:
                yield other.finished
                state.now = int(state.env.now)
        last = prepared.order[self.index][-1] if prepared.order[self.index] else 0
        yield from self._drain(last)
        for tensor in prepared.trace.outputs:
            state.locks[tensor] += 1  # what makes room for one of them now must not be another
        for tensor in prepared.trace.outputs:
            while not state.copies[tensor] and state.made[tensor]:
                yield from self._perform(self._producer(tensor, last), why="recompute", counted=False)
                state.counters["implicit_recomputes"] += 1
                yield from self._drain(last)
        ends: dict[int, int] = {}
        for tensor, first in prepared.trace.carry:
            tier = state.began_in.get(first)
            if tier is None:
                continue
            ends[tensor] = tier
            if state.copies[tensor] & 1 << tier:
                continue
            whole = [t for t in range(len(state.names)) if self._is_whole(tensor, t)]
            if whole and returned is not None and first not in returned:
                ends[tensor] = self._transfers.nearest(tensor, whole, tier)
                continue
            state.counters["returned_moves"] += 1
            state.locks[tensor] += 1
            yield from self._fetch(tensor, 1 << tier, tier, last)
            state.locks[tensor] -= 1
        yield from self._drain(last)
        for tensor, _ in prepared.trace.carry:
            for tier in range(len(state.names)):
                if tier != ends.get(tensor) and state.copies[tensor] & 1 << tier:
                    state.release(tensor, tier, -1, FREED)
        for tensor in prepared.trace.outputs:
            state.locks[tensor] -= 1
        yield from self._catch_up()

    def _is_whole(self, tensor: int, tier: int) -> bool:
        """Whether a tier has a copy that no link compressed."""
        return bool(self._state.copies[tensor] & 1 << tier) and (tensor, tier) not in self._state.odd_sizes
