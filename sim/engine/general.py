"""The general path of one op: fetch its reads, run again what is gone, take space, run; and what a plan has done."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from sim.engine.actions import Act
from sim.engine.events import AFTERS, ENDS, FREES, STARTS, Event, Wake
from sim.engine.state import LEAVING, MADE, MOVED_IN, MOVED_OUT, WORKSPACE
from sim.engine.transfer import WAITS
from sim.engine.waiting import Steps, Waiting
from sim.engine.work import Work
from sim.errors import IllegalPlan
from sim.plan import Change


class General(Waiting):
    """A device as far as it performs one op, or the actions of a plan."""

    # ---- actions -----------------------------------------------------------------------------

    def _act(self, actions: Sequence[Act], op: int, strict: bool = False) -> Steps:
        state = self._state
        for act in actions:
            if act.kind == "wait":
                while act.target in state.transfers:
                    waiting = self._transfers.outside(act.target)
                    if waiting is not None:
                        yield from self._demand(waiting, op)
                        continue
                    event = self._wake()
                    state.transfers[act.target].wake_at_end(event)
                    yield from self._stall(event, "wait", op, act.target)
            elif act.kind == "recompute":
                yield from self._perform(act.target, why="recompute", counted=not strict)
            else:
                self._actions.apply(act, self.index, op, strict)

    # ---- one op ------------------------------------------------------------------------------

    def _perform(self, op: int, why: str = "run", counted: bool = True, begun: bool = False) -> Steps:
        """Run an op, and first, on an explicit stack, all that must be run again for its reads.

        begun: what it reads has been looked for, and waited for, before.
        """
        state, prepared = self._state, self._state.prepared
        if why == "recompute" and not any(state.made[w] for w in prepared.writes[op]) and prepared.writes[op]:
            yield from self._first_end(op)
        stack = [self._open(op, why, counted)]
        while stack:
            work = stack[-1]
            producer = yield from self._restore(work, begun)
            begun = False
            if producer >= 0:
                state.counters["implicit_recomputes"] += 1
                stack.append(self._open(producer, "recompute", False))
                continue
            yield from self._execute(work)
            stack.pop()

    def _first_end(self, op: int) -> Steps:
        """Wait for the first run of an op that has been handed to another engine and has not ended."""
        state = self._state
        result = state.prepared.writes[op][0]
        if result not in state.awaited:
            raise IllegalPlan(f"op {self._name(op)!r}: Recompute before it has run")
        yield from self._arrival(result, state.awaited[result], op)

    def _open(self, op: int, why: str, counted: bool) -> Work:
        state = self._state
        if why == "recompute":
            state.note_recompute(op)
        for tensor in state.prepared.reads[op]:
            state.locks[tensor] += 1
            state.last_read[tensor] = state.now
            if state.online is not None:
                state.online.notice(Change("read", tensor, state.names[self._home], state.now))
        return Work(op, self.index, why, counted)

    def _restore(self, work: Work, begun: bool = False) -> Generator[Event, None, int]:
        """Have every read where the op's engine can read it; the op to run again first, or -1."""
        state, prepared = self._state, self._state.prepared
        engine = prepared.engine[work.op]
        reach, home = prepared.reach[engine], prepared.home[engine]
        reads = prepared.reads[work.op]
        for tensor in () if begun else reads:
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
        if tensor in state.overwriting and (copies & reach or copies & ~LEAVING) == 1 << state.overwriting[tensor]:
            by = self._name(state.prepared.producer[state.prepared.replaced_by[tensor]])
            what = f"op {self._name(op)!r}: tensor {self._tensor(tensor)!r}"
            raise IllegalPlan(f"{what} is being overwritten by {by!r} and no copy was kept")
        if copies & reach:
            if copies & LEAVING:
                read = home if copies & 1 << home else (copies & reach).bit_length() - 1
                self._transfers.keep_leaving(tensor, read)
            return
        under_way = state.transfers.get(tensor)
        if under_way is not None and under_way.stage != WAITS:
            return
        if (under_way is None and not copies & ~LEAVING) or (tensor, home) in state.making:
            return
        if under_way is not None and 1 << under_way.target & reach:
            yield from self._demand(under_way, op)
            return
        yield from self._room(home, state.size[tensor], op, f"reading {self._tensor(tensor)!r}")
        waiting = self._transfers.outside(tensor)
        if waiting is not None:
            self._transfers.call_back(waiting)
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
            event = self._wake()
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
            if old >= 0 and state.copies[old] & prepared.reach[engine]:
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
                    work.fresh.remove((tensor, tier))
                    tensor = -1
                handle = state.take(tensor, tier, bytes, op, MADE if tensor >= 0 else WORKSPACE, offset)
                if tensor < 0:
                    work.scratch.append((tier, bytes, handle))
        if work.why != "run":
            for i, (old, tensor, tier) in enumerate(work.takeovers):
                if self._came_meanwhile(work, tensor, tier):
                    work.takeovers[i] = (old, -1, tier)

    def _came_meanwhile(self, work: Work, tensor: int, tier: int) -> bool:
        """Whether a result is there, or on its way, by the time space is taken; else it is noted as being made."""
        state = self._state
        under_way = state.transfers.get(tensor)
        if under_way is not None and under_way.target == tier and under_way.stage == WAITS:
            self._transfers.cancel(under_way)  # nothing is left to copy
            if not under_way.keep:
                self._transfers.release_copy(tensor, under_way.source, work.op, MOVED_OUT)
        elif state.copies[tensor] & 1 << tier or (under_way is not None and under_way.target == tier):
            return True
        state.making.add((tensor, tier))
        return False

    def _run_here(self, work: Work) -> Steps:
        state, env, works = self._state, self._state.env, self._works
        prepared = state.prepared
        while works.guests[self._lane]:  # another device has an op run again here, and was first
            event = self._wake()
            works.hosts.setdefault(self._lane, []).append(event)
            yield from self._stall(event, "engine", work.op, -1, f"engine {state.platform.engines[self._lane].name!r}")
        works.busy[self._lane] = True
        start = state.now
        fixed, flowing = self._works.parts(work)
        if flowing:
            end = Wake(env, ENDS + work.op)
            works.launch(work, lambda _: end.fire())
            self.waits_for = f"op {self._name(work.op)!r} to end"
            state.flush()
            yield end
            state.now = int(env.now)
        else:
            if fixed:
                state.flush()
            state.now = start + fixed
            yield from self._turn(ENDS + work.op)
        state.spans.rows += (
            start,
            state.now,
            self.index,
            self._lane,
            prepared.logged(work.op, work.why),
            work.op,
            -1,
            0,
            0,
        )
        works.busy[self._lane] = False
        if works.guests[self._lane]:
            works.look()
        works.deliver(work)
        if work.why == "run" and work.op in self._actions.after:
            yield from self._turn(AFTERS + work.op)
            yield from self._act(self._actions.after[work.op], work.op)
        yield from self._turn(FREES + work.op)
        works.bury(work)
        yield from self._turn(STARTS + self.index)
