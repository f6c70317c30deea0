"""The general path of one op: restore its reads, take space, run; and what a plan has the device do."""

from __future__ import annotations

from collections.abc import Sequence

from sim.engine.event_path.clock import AFTERS, ENDS, FREES, STARTS
from sim.engine.event_path.fast_path import GENERAL, SHORT, FastPath
from sim.engine.event_path.operands import Outputs, Restore
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.state import Work
from sim.engine.event_path.waits import Steps, Waits
from sim.engine.prepare import Plain, Renewal
from sim.engine.resolve import Act
from sim.errors import IllegalPlan


class Perform:
    """Performs ops and actions for one device."""

    def __init__(self, parts: Parts, waits: Waits, fast: FastPath) -> None:
        self._parts = parts
        self._fast = fast
        self._waits = waits
        self._state = parts.state
        self._prepared = parts.state.prepared
        self._clock = parts.state.clock
        self._lane = self._prepared.main[waits.index]
        self._home = self._prepared.home[self._lane]
        self.restore = Restore(parts, waits)
        self._outputs = Outputs(parts, waits)

    # ---- actions -----------------------------------------------------------------------------

    def actions(self, acts: Sequence[Act], op: int, *, online: bool = False) -> Steps:
        """Carry out actions at an op, in order. online: they answer a question."""
        for act in acts:
            if act.kind == "wait":
                residency = self._state.residency
                while act.target in residency.awaited and not residency.produced[act.target]:
                    yield from self._waits.arrival(act.target, residency.awaited[act.target], op)
                while act.target in residency.in_flight:
                    yield from self._waits.transfer_of(act.target, "wait", op)
            elif act.kind == "recompute":
                yield from self.op(act.target, why="recompute", counted=not online)
            else:
                self._parts.decisions.apply((act,), self._waits.index, op, online=online)

    # ---- one op ------------------------------------------------------------------------------

    def op(self, op: int, why: str = "run", counted: bool = True, fetched: bool = False) -> Steps:
        """Run an op, and first, on an explicit stack, all that must be recomputed for its reads.

        fetched: what it reads has been sent for, and waited for, before.
        """
        produced, writes = self._state.residency.produced, self._prepared.writes
        if why == "recompute" and writes[op] and not any(produced[tensor] for tensor in writes[op]):
            yield from self._first_end(op)
        if why == "recompute":
            yield from self._waits.launch(op)
        stack = [self._open(op, why, counted)]
        fast = self._fast
        while stack:
            work = stack[-1]
            plain = fast.plain[work.op]
            end = GENERAL if plain is None else fast.begin_restored(work.op, plain, fetched=fetched)
            if end == GENERAL:
                producer = yield from self.restore.reads(work.op, fetched=fetched)
                if producer >= 0:
                    fetched = False
                    self._state.record.count("implicit_recomputes")
                    yield from self._waits.launch(producer)
                    stack.append(self._open(producer, "recompute", False))
                    continue
                if plain is not None:
                    end = fast.begin_restored(work.op, plain, fetched=True)
            fetched = False
            if plain is not None and end >= 0:
                yield from self._pass(work, plain, end)
            else:
                yield from self._execute(work, asked=end == SHORT)
            stack.pop()

    def _pass(self, work: Work, plain: Plain, end: int) -> Steps:
        """Let a plain op run that has its space, as `_run_here` does."""
        state, clock, fast, op, waits = self._state, self._clock, self._fast, work.op, self._waits
        start, is_first = clock.now, work.why == "run"
        if clock.queue and clock.queue[0][0] <= end:
            for tensor, _ in plain.writes if not is_first else ():
                state.residency.begin_reproducing(tensor, self._home)
            yield from fast.run_beside(op, end)
            for tensor, _ in plain.writes:
                state.residency.end_reproducing(tensor, self._home)
        fast.end(op, plain, start, end, again=not is_first, counted=work.counted)
        state.lifetimes.unpin_operands(op)
        if plain.workspace and state.space.waiting:
            state.space.offer(self._home)
        yield from self._after(op, is_first)
        state.lifetimes.free_after(op)
        if not clock.is_next(STARTS + waits.index):
            yield from waits.turn(STARTS + waits.index)

    def _after(self, op: int, is_first: bool) -> Steps:
        """The actions after an op; then it is time to free."""
        after = self._parts.resolved.after
        if is_first and op in after:
            yield from self._waits.turn(AFTERS + op)
            yield from self.actions(after[op], op)
        if not self._clock.is_next(FREES + op):
            yield from self._waits.turn(FREES + op)

    def renew(self, op: int, renewal: Renewal) -> Steps:
        """Let an op run that overwrites values which nobody else uses, as `_run_here` does."""
        state, clock, waits, home = self._state, self._clock, self._waits, self._home
        lifetimes, residency, engines, start = state.lifetimes, state.residency, self._parts.engines, clock.now
        lifetimes.pin_operands(op)
        for old, _ in renewal.pairs:
            residency.begin_overwriting(old, home)
        engines.occupy(self._lane)
        if renewal.ns:
            clock.flush()
        clock.advance(start + renewal.ns)
        if not clock.is_next(ENDS + op):
            yield from waits.turn(ENDS + op)
        state.record.ran(start, clock.now, waits.index, self._lane, self._prepared.logged(op, "run"), op)
        engines.vacate(self._lane)
        for old, new in renewal.pairs:
            residency.end_overwriting(old)
            lifetimes.take_over(old, new, home, op)
            residency.deliver(new, home)
        lifetimes.note_reads(op, first=True)
        lifetimes.unpin_operands(op)
        yield from self._after(op, True)
        lifetimes.free_after(op)
        for old, _ in renewal.pairs:
            lifetimes.free_if_dead(old, op)
        if not clock.is_next(STARTS + waits.index):
            yield from waits.turn(STARTS + waits.index)

    def exchange(self, op: int) -> bool:
        """Have a collective among ranks begin whose reads are there, and for whose results there is space; whether it
        has.

        It takes new space, or overwrites values in place which nobody else uses.
        """
        fast, work = self._fast, Work(op, self._waits.index, "run", True)
        if op in fast.exchanges and fast.begin(op, fast.exchanges[op]) >= 0:
            work.fresh.extend((tensor, self._home) for tensor, _ in fast.exchanges[op].writes)
        elif op in fast.exchanges_over and fast.renews(op, fast.exchanges_over[op]):
            for old, new in fast.exchanges_over[op].pairs:
                work.takeovers.append((old, new, self._home))
                self._state.residency.begin_overwriting(old, self._home)
        else:
            return False
        self._state.lifetimes.pin_operands(op)
        self._parts.groups.join(work)
        return True

    def pressed(self, op: int) -> Steps:
        """Run an op for the first time: it is reached, its operands are pinned, and space has been asked for."""
        yield from self._execute(Work(op, self._waits.index, "run", True), asked=True)

    def _first_end(self, op: int) -> Steps:
        """Wait for the first run of an op that has been handed to another engine and has not ended."""
        result = self._prepared.writes[op][0]
        awaited = self._state.residency.awaited
        if result not in awaited:
            raise IllegalPlan(f"op {self._prepared.trace.op_columns.name[op]!r}: Recompute before it has run")
        yield from self._waits.arrival(result, awaited[result], op)

    def _open(self, op: int, why: str, counted: bool) -> Work:
        """An op is reached: what it reads is pinned until it has ended."""
        state, reads = self._state, self._prepared.reads[op]
        if why == "recompute":
            self._parts.recompute_limit.spend(op)
        state.lifetimes.pin(reads)
        self._fast.note_reads(reads, self._clock.now)
        return Work(op, self._waits.index, why, counted)

    def _execute(self, work: Work, *, asked: bool = False) -> Steps:
        """Take space, then run: here, on another engine, or with the other members of a group.

        asked: its operands are pinned, it overwrites nothing, and the policy has been asked for its space.
        """
        parts, prepared, op = self._parts, self._prepared, work.op
        engine = prepared.engine[op]
        if not asked:
            if op in prepared.in_place:
                yield from self._outputs.overwritable(op)
            self._state.lifetimes.pin(prepared.writes[op])
        yield from self._outputs.take_space(work, engine, asked=asked)
        if op in prepared.group_of:
            parts.groups.join(work)
        elif engine != self._lane:
            parts.engines.enqueue(work)
        else:
            yield from self._run_here(work)

    def _run_here(self, work: Work) -> Steps:
        """Run on the device's main engine, and stay until all that happens at the op's end has happened."""
        parts, waits, clock, op = self._parts, self._waits, self._clock, work.op
        engines, op_end = parts.engines, parts.op_end
        while engines.guests[self._lane]:  # another device has an op recomputed here, and was first
            wake = waits.wake_up()
            engines.wait_for_guests(self._lane, wake)
            yield from waits.stall(wake, "engine", op, -1, f"engine {self._state.platform.engines[self._lane].name!r}")
        engines.occupy(self._lane)
        start = clock.now
        yield from self._compute(work)
        self._state.record.ran(start, clock.now, waits.index, self._lane, self._prepared.logged(op, work.why), op)
        engines.vacate(self._lane)
        op_end.deliver(work)
        yield from self._after(op, work.why == "run")
        op_end.free(work)
        if not clock.is_next(STARTS + waits.index):
            yield from waits.turn(STARTS + waits.index)

    def _compute(self, work: Work) -> Steps:
        """Let the op's time pass: a fixed one, or what the bandwidth that it shares leaves it."""
        waits, clock = self._waits, self._clock
        fixed, flowing = self._parts.engines.duration(work)
        if flowing:
            end = clock.wake_up(ENDS + work.op)
            self._parts.engines.launch(work, lambda _: end.fire())
            yield from waits.end_of(work.op, end)
        else:
            if fixed:
                clock.flush()
            clock.advance(clock.now + fixed)
            if not clock.is_next(ENDS + work.op):
                yield from waits.turn(ENDS + work.op)
