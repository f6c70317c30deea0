"""A device: one process that walks its ops in program order and waits for what each needs.

`walk` has a fast path for the op that finds all it reads at home and space for all it makes; `_perform`
is the general path, and the reference for the fast one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from sim.engine.actions import Act, Actions
from sim.engine.events import ENDS, STARTS, At, Event, fire
from sim.engine.state import FREED, LEAVING, MADE, MOVED_IN, MOVED_OUT, WORKSPACE, State
from sim.engine.transfer import WAITS, Transfer, Transfers
from sim.engine.work import Work, Works
from sim.errors import IllegalPlan
from sim.log import STALL, WHY
from sim.plan import Change, Memory, Need

Steps = Generator[Event, None, None]
RUN = WHY["run"]


class Device:
    """Walks the ops of one device."""

    def __init__(
        self,
        index: int,
        state: State,
        transfers: Transfers,
        works: Works,
        actions: Actions,
        view: Memory,
        *,
        quick: bool,
    ) -> None:
        self.index = index
        self.waits_for = ""
        self.request: tuple[int, int, int, str] | None = None
        self.asking: tuple[Event, int | None] | None = None  # what wakes it, and the offset that it needs
        self.finished = state.env.event()
        self._state = state
        self._transfers = transfers
        self._works = works
        self._actions = actions
        self._view = view
        self._quick = quick
        self._lane = state.prepared.main[index]
        self._home = state.prepared.home[self._lane]
        self._reach = state.prepared.reach[self._lane]

    # ---- the walk ----------------------------------------------------------------------------

    def walk(self) -> Steps:
        """All ops in order; then `finished` fires."""
        state, prepared = self._state, self._state.prepared
        env, peek = state.env, state.env.peek
        before, after, special = self._actions.before, self._actions.after, self._actions.special
        slow_before, slow_after = self._actions.slow_before, self._actions.slow_after
        online_before = self._actions.asks_before
        plain, freeable = prepared.plain, prepared.freeable
        copies, uses, locks, made, size = state.copies, state.uses, state.locks, state.made, state.size
        used, capacity, transfers = state.used, state.capacity, state.transfers
        changes, spans = state.changes.rows, state.spans.rows
        pending, busy, guests = state.pending, self._works.busy, self._works.guests
        home, lane, device = self._home, self._lane, self.index
        odd_sizes = state.odd_sizes
        bit, quick = 1 << home, self._quick
        mask = bit | LEAVING
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
            if not ready and t in transfers and self._is_coming(reads, bit):
                yield from self._until_there(reads, bit, i)
                ready = all(copies[t] & mask == bit for t in reads)
            total = used[home] + out + workspace
            if not ready or total > capacity[home] or state.queued_for_space or guests[lane]:
                yield from self._perform(i)
                continue
            start = state.now
            end = start + ns
            for t, bytes in writes:
                changes += (start, home, bytes, t, i, MADE)
            if workspace:
                changes += (start, home, workspace, -1, i, WORKSPACE)
            used[home] = total
            if peek() <= end:
                for t in reads:
                    locks[t] += 1
                for t, _ in writes:
                    locks[t] += 1
                busy[lane] = True
                yield At(env, end - env.now, ENDS)
                state.now = end
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
            if i in after:
                if i in slow_after:
                    yield from self._act(after[i], i)
                else:
                    self._apply(after[i], i, False)
            for t in reads:
                if pending and t in pending and not locks[t]:
                    state.drop_pending(t, i)
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
            if state.queued_for_space:
                state.stale_tiers.add(home)
                state.poke()
            if len(changes) > state.changes.PACK:
                state.changes.pack()
                state.spans.pack()
            if peek() <= state.now:
                yield At(env, state.now - env.now, STARTS)
        yield from self._catch_up()
        self.finished.succeed()

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

    def _until_there(self, reads: Sequence[int], bit: int, op: int) -> Steps:
        """Wait for the reads that are on their way home."""
        state = self._state
        for t in reads:
            state.locks[t] += 1
        for t in reads:
            while not state.copies[t] & bit and t in state.transfers:
                yield from self._arrival(t, "transfer", op)
        for t in reads:
            state.locks[t] -= 1

    def _catch_up(self) -> Steps:
        """Let the event queue's clock come up to this device's."""
        if self._state.now > self._state.env.now:
            yield At(self._state.env, self._state.now - int(self._state.env.now), STARTS)
            self._state.now = int(self._state.env.now)

    # ---- actions -----------------------------------------------------------------------------

    def _act(self, actions: Sequence[Act], op: int, strict: bool = False) -> Steps:
        state = self._state
        batch: list[Act] = []
        for act in actions:
            if act.kind == "wait":
                self._apply(batch, op, strict)
                batch = []
                while act.target in state.transfers:
                    waiting = self._transfers.outside(act.target)
                    if waiting is not None:
                        yield from self._demand(waiting, op)
                        continue
                    event = state.env.event()
                    state.transfers[act.target].wake_at_end(event)
                    yield from self._stall(event, "wait", op, act.target)
            elif act.kind == "recompute":
                self._apply(batch, op, strict)
                batch = []
                yield from self._perform(act.target, why="recompute", counted=not strict)
            else:
                batch.append(act)
        self._apply(batch, op, strict)

    def _demand(self, transfer: Transfer, op: int) -> Steps:
        """A transfer that a device waits for gets space as an op would."""
        state = self._state
        yield from self._room(transfer.target, transfer.size, op, f"reading {self._tensor(transfer.tensor)!r}")
        if self._transfers.outside(transfer.tensor) is transfer:
            state.take(transfer.tensor, transfer.target, transfer.size, op, MOVED_IN)
            self._transfers.adopt(transfer)

    def _apply(self, batch: Iterable[Act], op: int, strict: bool) -> None:
        """Drops and moves, then one settling."""
        state = self._state
        state.batching = True
        for act in batch:
            self._actions.apply(act, self.index, op, strict)
        state.flush()

    # ---- one op ------------------------------------------------------------------------------

    def _perform(self, op: int, why: str = "run", counted: bool = True) -> Steps:
        """Run an op, and first, on an explicit stack, all that must be run again for its reads."""
        state, prepared = self._state, self._state.prepared
        if why == "recompute" and not any(state.made[w] for w in prepared.writes[op]) and prepared.writes[op]:
            raise IllegalPlan(f"op {self._name(op)!r}: Recompute before it has run")
        stack = [self._open(op, why, counted)]
        while stack:
            work = stack[-1]
            producer = yield from self._restore(work)
            if producer >= 0:
                state.counters["implicit_recomputes"] += 1
                stack.append(self._open(producer, "recompute", False))
                continue
            yield from self._execute(work)
            stack.pop()

    def _open(self, op: int, why: str, counted: bool) -> Work:
        state = self._state
        for tensor in state.prepared.reads[op]:
            state.locks[tensor] += 1
            state.last_read[tensor] = state.now
            if state.online is not None:
                state.online.notice(Change("read", tensor, state.names[self._home], state.now))
        return Work(op, self.index, why, counted)

    def _restore(self, work: Work) -> Generator[Event, None, int]:
        """Have every read where the op's engine can read it; the op to run again first, or -1."""
        state, prepared = self._state, self._state.prepared
        engine = prepared.engine[work.op]
        reach, home = prepared.reach[engine], prepared.home[engine]
        reads = prepared.reads[work.op]
        for tensor in reads:
            yield from self._fetch(tensor, reach, home, work.op)
        for tensor in reads:
            while not state.copies[tensor] & reach:
                if tensor in state.transfers:
                    yield from self._arrival(tensor, "transfer", work.op)
                elif tensor in state.awaited or (tensor, home) in state.making:
                    yield from self._arrival(tensor, state.awaited.get(tensor, "peer"), work.op)
                elif not state.copies[tensor]:
                    if not state.made[tensor]:
                        yield from self._arrival(tensor, "peer", work.op)
                        continue
                    return self._producer(tensor, work.op)
                yield from self._fetch(tensor, reach, home, work.op)
        return -1

    def _fetch(self, tensor: int, reach: int, home: int, op: int) -> Steps:
        """Start what brings a copy within reach, if there is one elsewhere; do not wait for it."""
        state = self._state
        copies = state.copies[tensor]
        if copies & reach:
            if copies & LEAVING:
                self._transfers.keep_leaving(tensor)
            return
        under_way = state.transfers.get(tensor)
        if under_way is not None and under_way.stage != WAITS:
            return
        if (under_way is None and not copies & ~LEAVING) or (tensor, home) in state.making:
            return
        if tensor in state.overwriting and copies & ~LEAVING == 1 << state.overwriting[tensor]:
            by = self._name(state.prepared.producer[state.prepared.replaced_by[tensor]])
            what = f"op {self._name(op)!r}: tensor {self._tensor(tensor)!r}"
            raise IllegalPlan(f"{what} is being overwritten by {by!r} and no copy was kept")
        if under_way is not None and 1 << under_way.target & reach:
            yield from self._demand(under_way, op)
            return
        yield from self._room(home, state.size[tensor], op, f"reading {self._tensor(tensor)!r}")
        waiting = self._transfers.outside(tensor)
        if waiting is not None:
            self._transfers.cancel(waiting)
        if state.copies[tensor] & reach or tensor in state.transfers:
            return
        state.take(tensor, home, state.size[tensor], op, MOVED_IN)
        state.counters["implicit_moves"] += 1
        self._transfers.fetch(tensor, home, self.index, op)

    def _producer(self, tensor: int, op: int) -> int:
        """The op that can bring a tensor back."""
        state, prepared = self._state, self._state.prepared
        producer = prepared.producer[tensor]
        what = f"op {self._name(op)!r}: tensor {self._tensor(tensor)!r}"
        if producer < 0:
            new = prepared.replaced_by[tensor]
            if new >= 0 and state.made[new]:
                by = self._name(prepared.producer[new])
                raise IllegalPlan(f"{what} was overwritten by {by!r} and no copy was kept")
            raise IllegalPlan(f"{what} was dropped, and no op makes it")
        if producer in prepared.group_of:
            raise IllegalPlan(f"{what} was dropped, and {self._name(producer)!r} can't run again alone")
        return producer

    # ---- running -----------------------------------------------------------------------------

    def _execute(self, work: Work) -> Steps:
        """Take space, then run: here, on another engine, or with the other members of a group."""
        state, prepared = self._state, self._state.prepared
        op = work.op
        engine = prepared.engine[op]
        if work.why == "run":
            yield from self._no_hazard(op)
        for tensor in prepared.writes[op]:
            state.locks[tensor] += 1
        yield from self._take_space(work, engine)
        if op in prepared.group_of:
            self._works.join(work)
        elif engine != self._lane:
            self._works.enqueue(work)
        else:
            yield from self._run_here(work)

    def _no_hazard(self, op: int) -> Steps:
        """Wait until nobody copies or reads what an op overwrites; a wait for one may let another begin."""
        state, prepared = self._state, self._state.prepared
        olds = [old for old in (prepared.replaces[tensor] for tensor in prepared.writes[op]) if old >= 0]
        while True:
            old = next((old for old in olds if old in state.transfers or self._is_read_beside(old, op)), -1)
            if old < 0:
                return
            event = state.env.event()
            if old not in state.transfers:
                state.on_unlock.setdefault(old, []).append(event)
            elif (waiting := self._transfers.outside(old)) is not None:
                yield from self._demand(waiting, op)
                continue
            else:
                state.transfers[old].wake_at_end(event)
            yield from self._stall(event, "hazard", op, old)

    def _is_read_beside(self, tensor: int, op: int) -> bool:
        """Whether anything but this op holds a tensor: an op on another engine, or of another device."""
        return self._state.locks[tensor] > (tensor in self._state.prepared.reads[op])

    def _take_space(self, work: Work, engine: int) -> Steps:
        state, prepared = self._state, self._state.prepared
        home, op = prepared.home[engine], work.op
        wants: dict[int, list[tuple[int, int, int | None]]] = {}
        for tensor in prepared.writes[op]:
            old = prepared.replaces[tensor]
            if old >= 0 and work.why == "run" and state.copies[old] & prepared.reach[engine]:
                tier = next(t for t in prepared.reach_order[engine] if state.copies[old] & 1 << t)
                if (old, tier) not in state.odd_sizes:  # what a link compressed has no room for the new value
                    work.takeovers.append((old, tensor, tier))
                    state.overwriting[old] = tier
                    continue
            tier, offset = self._actions.born.get(tensor, (home, None))
            if not prepared.reach[engine] & 1 << tier:
                unit = state.platform.engines[engine].name
                what = f"op {self._name(op)!r}: tensor {self._tensor(tensor)!r}"
                raise IllegalPlan(f"{what}: {unit!r} can't write in {state.names[tier]!r}")
            busy = state.transfers.get(tensor)
            there = state.copies[tensor] & 1 << tier or (
                busy is not None and busy.stage != WAITS and busy.target == tier
            )
            if there:
                wants.setdefault(tier, []).append((-1, state.size[tensor], None))
            else:
                wants.setdefault(tier, []).append((tensor, state.size[tensor], offset))
                work.fresh.append((tensor, tier))
        if prepared.workspace[op]:
            wants.setdefault(home, []).append((-1, prepared.workspace[op], None))
        for tier, blocks in wants.items():
            if state.blocks[tier] is None:
                yield from self._room(tier, sum(bytes for _, bytes, _ in blocks), op, "its results")
            for tensor, bytes, offset in blocks:
                if state.blocks[tier] is not None:
                    reason = "its results" if tensor >= 0 else "its workspace"
                    yield from self._room(tier, bytes, op, reason, offset)
                if tensor >= 0 and work.why != "run" and self._came_meanwhile(work, tensor, tier):
                    tensor = -1
                handle = state.take(tensor, tier, bytes, op, MADE if tensor >= 0 else WORKSPACE, offset)
                if tensor < 0:
                    work.scratch.append((tier, bytes, handle))

    def _came_meanwhile(self, work: Work, tensor: int, tier: int) -> bool:
        """Whether a result is there, or on its way, since space was asked for; else it is noted as being made."""
        state = self._state
        under_way = state.transfers.get(tensor)
        if under_way is not None and under_way.target == tier and under_way.stage == WAITS:
            self._transfers.cancel(under_way)  # nothing is left to copy
            if not under_way.keep:
                self._transfers.release_copy(tensor, under_way.source, work.op, MOVED_OUT)
        elif state.copies[tensor] & 1 << tier or (under_way is not None and under_way.target == tier):
            work.fresh.remove((tensor, tier))
            return True
        state.making.add((tensor, tier))
        return False

    def _run_here(self, work: Work) -> Steps:
        state, env, works = self._state, self._state.env, self._works
        while works.guests[self._lane]:  # another device has an op run again here, and was first
            event = env.event()
            works.hosts.setdefault(self._lane, []).append(event)
            yield from self._stall(event, "engine", work.op, -1, f"engine {state.platform.engines[self._lane].name!r}")
        works.busy[self._lane] = True
        start = state.now
        fixed, flowing = self._works.parts(work)
        if flowing:
            event = env.event()
            self._works.launch(work, lambda _: fire(event, ENDS))
            self.waits_for = f"op {self._name(work.op)!r} to end"
            yield event
            state.now = int(env.now)
        elif env.peek() <= start + fixed:
            yield At(env, start + fixed - int(env.now), ENDS)
            state.now = int(env.now)
        else:
            state.now = start + fixed
        state.spans.rows += (start, state.now, self.index, self._lane, WHY[work.why], work.op, -1, 0, 0)
        works.busy[self._lane] = False
        if works.guests[self._lane]:
            works.look()
        works.deliver(work)
        if work.why == "run" and work.op in self._actions.after:
            yield from self._act(self._actions.after[work.op], work.op)
        self._works.bury(work)
        if env.peek() <= state.now:
            yield At(env, state.now - int(env.now), STARTS)

    # ---- waiting -----------------------------------------------------------------------------

    def _room(self, tier: int, bytes: int, op: int, reason: str, offset: int | None = None) -> Steps:
        """Return once a request fits and no device came before; ask the policy, then wait."""
        state = self._state
        queue = state.space_waiters[tier]
        mine: Event | None = None
        while True:
            # first come, first served; `replay` lets others pass where nothing else can happen
            if state.fits(tier, bytes, offset) and (mine is not None or not queue):
                if queue:
                    state.stale_tiers.add(tier)
                    state.poke()
                return
            if not state.fits_later(tier, bytes, offset) and not state.fits(tier, bytes, offset):
                if state.online is not None:  # where it keeps the dead, they are its to drop
                    if self._ask(tier, bytes, op, reason):
                        continue
                elif state.keep_dead and state.free_the_dead(tier):
                    continue
            event = state.env.event()
            if mine is None:
                queue.append(event)
            else:
                queue.appendleft(event)
            mine = event
            state.queued_for_space += 1
            state.poke()
            self.request, self.asking = (tier, bytes, op, reason), (event, offset)
            yield from self._stall(event, "space", op, -1, f"{bytes:,} B in {state.names[tier]!r} for {reason}")
            self.request = self.asking = None
            if event in queue:
                queue.remove(event)
            state.queued_for_space -= 1

    def _ask(self, tier: int, bytes: int, op: int, reason: str) -> bool:
        """Ask the online policy to make room; whether its answer made any."""
        state = self._state
        if state.online is None:
            return False
        missing = bytes - (state.capacity[tier] - state.used[tier]) - state.leaving[tier]
        need = Need(state.names[tier], bytes, max(1, missing), op, reason)
        state.counters["pressure_calls"] += 1
        answer = self._actions.answer(state.online.on_pressure(need, self._view), self.index, pressure=True)
        was = state.used[tier], state.leaving[tier]
        self._apply(answer, op, True)
        return was != (state.used[tier], state.leaving[tier])

    def _arrival(self, tensor: int, cause: str, op: int) -> Steps:
        event = self._state.env.event()
        self._state.on_arrival.setdefault(tensor, []).append(event)
        yield from self._stall(event, cause, op, tensor)

    def _stall(self, event: Event, cause: str, op: int, tensor: int, what: str = "") -> Steps:
        state = self._state
        start = state.now
        subject = what or f"tensor {self._tensor(tensor)!r}"
        self.waits_for = f"op {self._name(op)!r} waits for {subject} ({cause})"
        yield event
        state.now = int(state.env.now)
        self.waits_for = ""
        if state.now > start:
            state.spans.rows += (start, state.now, self.index, self._lane, WHY["stall"], op, tensor, STALL[cause], 0)

    # ---- the end -----------------------------------------------------------------------------

    def close(self, others: Sequence[Device]) -> Steps:
        """After all devices: restore missing outputs, let everything end, bring carried tensors home."""
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
        for tensor, first in prepared.trace.carry:
            tier = state.began_in.get(first)
            if tier is not None and not state.copies[tensor] & 1 << tier:
                state.counters["returned_moves"] += 1
                state.locks[tensor] += 1
                yield from self._fetch(tensor, 1 << tier, tier, last)
                state.locks[tensor] -= 1
        yield from self._drain(last)
        for tensor, first in prepared.trace.carry:
            for tier in range(len(state.names)):
                if tier != state.began_in.get(first) and state.copies[tensor] & 1 << tier:
                    state.release(tensor, tier, -1, FREED)
        for tensor in prepared.trace.outputs:
            state.locks[tensor] -= 1
        yield from self._catch_up()

    def _drain(self, op: int) -> Steps:
        state = self._state
        while state.transfers or state.running:
            event = state.env.event()
            state.idle_waiters.append(event)
            yield from self._stall(event, "drain", op, -1, "the end of all copies and ops under way")

    def _name(self, op: int) -> str:
        return self._state.prepared.trace.op_columns.name[op]

    def _tensor(self, tensor: int) -> str:
        return self._state.prepared.trace.tensor_columns.name[tensor]
