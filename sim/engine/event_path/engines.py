"""Engines beside the devices' main ones: queues of ops, and what one run takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from sim.engine.event_path.clock import ENDS, Clock, Wake
from sim.engine.event_path.flows import Flow, Flows
from sim.engine.event_path.links import Links
from sim.engine.event_path.op_end import OpEnd
from sim.engine.event_path.ops_under_way import OpsUnderWay
from sim.engine.event_path.record import Record
from sim.engine.event_path.residency import Residency
from sim.engine.event_path.work import Work
from sim.engine.prepare import Prepared
from sim.hardware.cost import slow_operand_ns
from sim.hardware.platform import Platform
from sim.trace.op import KINDS


class Engines:
    """Runs ops on engines beside the devices' main ones, and says what a run takes on any.

    busy: per engine whether it runs an op. guests: per main engine the ops that other devices recompute there.
    """

    def __init__(
        self,
        platform: Platform,
        prepared: Prepared,
        clock: Clock,
        record: Record,
        residency: Residency,
        links: Links,
        flows: Flows,
        ops: OpsUnderWay,
        op_end: OpEnd,
    ) -> None:
        self._platform = platform
        self._prepared = prepared
        self._clock = clock
        self._record = record
        self._residency = residency
        self._links = links
        self._flows = flows
        self._ops = ops
        self._op_end = op_end
        self._tiers = [tier.name for tier in platform.tiers]
        self._queues: list[list[tuple[tuple[int, ...], Work]]] = [[] for _ in platform.engines]
        self.stale = False
        self.busy = [False] * len(platform.engines)
        self.guests = [0] * len(platform.engines)
        self._hosts: dict[int, list[Wake]] = {}  # per main engine who waits for its guests

    # ---- time --------------------------------------------------------------------------------

    def parts(self, work: Work) -> tuple[int, int]:
        """Fixed nanoseconds, and bytes that flow through a pool, of a run with its operands where they are."""
        prepared, copies, size = self._prepared, self._residency.copies, self._prepared.size
        engine = prepared.engine[work.op]
        home = prepared.home[engine]
        elsewhere: dict[str, int] = {}
        for tensor in prepared.reads[work.op]:
            if not copies[tensor] & 1 << home:
                for tier in prepared.reach_order[engine]:
                    if copies[tensor] & 1 << tier:
                        elsewhere[self._tiers[tier]] = elsewhere.get(self._tiers[tier], 0) + size[tensor]
                        break
        for tensor, tier in (*work.fresh, *((old, tier) for old, _, tier in work.takeovers)):
            if tier != home:  # what it writes there, in new space or in place
                elsewhere[self._tiers[tier]] = elsewhere.get(self._tiers[tier], 0) + size[tensor]
        kind = KINDS[prepared.trace.op_columns.kind[work.op]]
        extra = slow_operand_ns(self._platform, engine, kind, elsewhere) if elsewhere else 0
        return prepared.fixed[work.op] + extra, prepared.flow_bytes[work.op]

    def launch(self, work: Work, done: Callable[[int], None]) -> None:
        """Start an op now on its engine; `done` is called when it ends."""
        prepared, clock = self._prepared, self._clock
        work.begin(clock.now)
        fixed, bytes = self.parts(work)
        if not bytes:
            clock.at(clock.now + fixed, ENDS + work.op, lambda _: done(int(clock.env.now)))
            return
        name = self._platform.engines[prepared.engine[work.op]].name
        flow = Flow(bytes, ((name, prepared.flow_rate[work.op], prepared.charges[name]),), done, ENDS + work.op)

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
