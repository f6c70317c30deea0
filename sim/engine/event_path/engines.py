"""How ops run: what a run takes, the queues of engines beside the devices' main ones, and what an op's end brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

from sim.engine.event_path.clock import AFTERS, ENDS, FREES, Wake
from sim.engine.event_path.decisions import Decisions
from sim.engine.event_path.flows import Flow, Flows
from sim.engine.event_path.links import Links
from sim.engine.event_path.space import WORKSPACE
from sim.engine.event_path.state import State, Work
from sim.hardware.cost import slow_operand_ns
from sim.trace.op import KINDS


class OpEnd:
    """The end of an op, on whatever engine: results arrive, actions after it, what nobody needs any more is freed.

    A device takes the three steps one by one; `together` takes them for ops that no device stands by.
    """

    def __init__(self, state: State, decisions: Decisions) -> None:
        self._clock = state.clock
        self._record = state.record
        self._residency = state.residency
        self._space = state.space
        self._lifetimes = state.lifetimes
        self._ops = state.ops
        self._decisions = decisions

    def deliver(self, work: Work) -> None:
        """Give workspace back, let results arrive, and unpin what the op used."""
        op, residency, lifetimes = work.op, self._residency, self._lifetimes
        for tier, bytes, handle in work.workspace:
            self._space.give(-1, tier, bytes, op, WORKSPACE, handle)
        for old, new, tier in work.takeovers:
            residency.end_overwriting(old)
            if work.why != "run" and residency.is_there(new, tier):
                lifetimes.release_overwritten(old, tier, op)
                residency.end_awaiting(new, tier)
            else:
                lifetimes.take_over(old, new, tier, op)
                residency.deliver(new, tier)
        for tensor, tier in work.fresh:
            residency.deliver(tensor, tier)
        if work.counted:
            lifetimes.note_reads(op, first=work.why == "run")
        lifetimes.unpin_operands(op)

    def free(self, work: Work) -> None:
        """Free what no op still to run and no planned recomputation reads, and the program does not hold."""
        self._lifetimes.free_after(work.op)
        for old, _, _ in work.takeovers:
            self._lifetimes.free_if_dead(old, work.op)

    def together(self, ended: Sequence[Work], cause: str) -> None:
        """All steps for ops that end together. cause: of the stall of whoever waits for them."""
        clock = self._clock
        self._ops.end(cause, len(ended))
        self._record.ended(clock.now)
        for work in ended:
            self.deliver(work)
        if clock.is_next(FREES + ended[-1].op):
            for work in ended:
                self._after(work)
            for work in ended:
                self.free(work)
        else:
            for work in ended:
                clock.later(AFTERS + work.op, partial(self._after, work))
                clock.later(FREES + work.op, partial(self.free, work))
        self._ops.note_idle()
        clock.poke()

    def _after(self, work: Work) -> None:
        if work.why == "run":
            self._decisions.after(work.op, work.device)


class Engines:
    """Runs ops on engines beside the devices' main ones, and says what a run takes on any.

    busy: per engine whether it runs an op. guests: per main engine the ops that other devices recompute there.
    """

    def __init__(self, state: State, links: Links, flows: Flows, op_end: OpEnd) -> None:
        self._platform = state.platform
        self._prepared = state.prepared
        self._clock = state.clock
        self._record = state.record
        self._residency = state.residency
        self._ops = state.ops
        self._links = links
        self._flows = flows
        self._op_end = op_end
        self._tiers = state.space.names
        self._queues: list[list[tuple[tuple[int, ...], Work]]] = [[] for _ in state.platform.engines]
        self.stale = False
        self.busy = [False] * len(state.platform.engines)
        self.guests = [0] * len(state.platform.engines)
        self._hosts: dict[int, list[Wake]] = {}  # per main engine who waits for its guests

    # ---- time --------------------------------------------------------------------------------

    def duration(self, work: Work) -> tuple[int, int]:
        """Fixed nanoseconds, and bytes that flow through a pool, of a run with its operands where they are."""
        prepared, copies, size = self._prepared, self._residency.copies, self._prepared.size
        engine = prepared.engine[work.op]
        home = prepared.home[engine]
        read: dict[str, int] = {}
        written: dict[str, int] = {}
        for tensor in prepared.reads[work.op]:
            if not copies[tensor] & 1 << home:
                for tier in prepared.reach_order[engine]:
                    if copies[tensor] & 1 << tier:
                        read[self._tiers[tier]] = read.get(self._tiers[tier], 0) + size[tensor]
                        break
        for tensor, tier in (*work.fresh, *((old, tier) for old, _, tier in work.takeovers)):
            if tier != home:  # what it writes there, in new space or in place
                written[self._tiers[tier]] = written.get(self._tiers[tier], 0) + size[tensor]
        kind = KINDS[prepared.trace.op_columns.kind[work.op]]
        extra = slow_operand_ns(self._platform, engine, kind, read, written) if read or written else 0
        return prepared.fixed[work.op] + extra, prepared.flow_bytes[work.op]

    def launch(self, work: Work, done: Callable[[int], None]) -> None:
        """Start an op now on its engine; `done` is called when it ends."""
        prepared, clock = self._prepared, self._clock
        work.begin(clock.now)
        fixed, bytes = self.duration(work)
        if not bytes:
            clock.at(clock.now + fixed, ENDS + work.op, lambda _: done(int(clock.env.now)))
            return
        name = self._platform.engines[prepared.engine[work.op]].name
        users = self._flows.number(((name, prepared.flow_rate[work.op], prepared.charges[name]),))
        flow = Flow(bytes, users, done, ENDS + work.op)

        def begin(_: object) -> None:
            clock.catch_up()
            self._flows.start(flow, clock.now)
            clock.poke()
            clock.flush()

        clock.at(clock.now + fixed, ENDS, begin)

    # ---- other engines -----------------------------------------------------------------------

    def enqueue(self, work: Work) -> None:
        """Hand an op to an engine that is not the device's main one."""
        prepared, op = self._prepared, work.op
        engine = prepared.engine[op]
        priority = int(prepared.trace.op_columns.priority[op])
        key = (priority, self._clock.now, work.device, self._links.next_number())
        heappush(self._queues[engine], (key, work))
        if engine in prepared.main:
            self.guests[engine] += 1
        self._ops.begin(work, "engine")
        self.look()

    def look(self) -> None:
        """At the end of this instant start what can start."""
        self.stale = True
        self._clock.poke()

    def settle(self) -> None:
        """If stale, start the next op of every engine that is free."""
        self.stale = False
        for engine, queue in enumerate(self._queues):
            if queue and not self.busy[engine]:
                self.busy[engine] = True
                work = heappop(queue)[1]
                self.launch(work, partial(self._end, work, engine))

    def _end(self, work: Work, engine: int, now: int) -> None:
        self.busy[engine] = False
        self.stale = True
        self._clock.advance(now)
        if self.guests[engine]:
            self.guests[engine] -= 1
            self._clock.wake(self._hosts.pop(engine, ()))
        self._record.ran(work.began, now, work.device, engine, self._prepared.logged(work.op, work.why), work.op)
        self._op_end.together([work], "engine")
        self._clock.flush()

    # ---- main engines ------------------------------------------------------------------------

    def occupy(self, engine: int) -> None:
        """A device runs an op on its main engine."""
        self.busy[engine] = True

    def vacate(self, engine: int) -> None:
        """It has ended: guests may start."""
        self.busy[engine] = False
        if self.guests[engine]:
            self.look()

    def wait_for_guests(self, engine: int, wake: Wake) -> None:
        """Fire an event when an op that another device recomputes on this main engine has ended."""
        self._hosts.setdefault(engine, []).append(wake)
