"""Ops under way: what each holds, and what happens when it ends, on whatever engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

from sim.engine.events import AFTERS, ENDS, FREES, At, Wake
from sim.engine.flows import Flow, Flows
from sim.engine.links import Job, Links
from sim.engine.state import OVERWRITTEN, WORKSPACE, State
from sim.errors import IllegalPlan
from sim.hardware.cost import slow_operand_ns
from sim.log import WHY
from sim.trace.op import KINDS

COLLECTIVE_CHUNK = 4 << 20
"""Bytes of a collective between two points where one of higher priority may go first; 4 MB is the
partition that ByteScheduler ships with."""


class Work:
    """One run of an op: what it made new, what it overwrites, and the scratch space that it holds.

    takeovers: (old value, new value, tier); the new value is -1 where it is already there, so that nothing takes
    the old one's place.
    """

    __slots__ = ("counted", "device", "fresh", "op", "scratch", "start", "takeovers", "why")

    def __init__(self, op: int, device: int, why: str, counted: bool) -> None:
        self.op = op
        self.device = device
        self.why = why
        self.counted = counted  # whether its reads were counted beforehand: in program order, or planned
        self.fresh: list[tuple[int, int]] = []
        self.takeovers: list[tuple[int, int, int]] = []
        self.scratch: list[tuple[int, int, int]] = []
        self.start = -1


class Works:
    """Runs ops on engines beside the devices' main ones, and groups of ops that several devices share."""

    def __init__(self, state: State, links: Links, flows: Flows) -> None:
        self._state = state
        self._links = links
        self._flows = flows
        self._queues: list[list[tuple[tuple[int, ...], Work]]] = [[] for _ in state.platform.engines]
        self._waiting = False
        self.busy = [False] * len(state.platform.engines)
        self.guests = [0] * len(state.platform.engines)  # per main engine the ops that other devices run again there
        self.hosts: dict[int, list[Wake]] = {}  # per main engine who waits for its guests
        self._runs: dict[int, int] = {}
        self._meeting: dict[tuple[str, int], list[Work]] = {}
        self.after: Callable[[Work], None] = lambda work: None

    # ---- time --------------------------------------------------------------------------------

    def parts(self, work: Work) -> tuple[int, int]:
        """Fixed nanoseconds, and bytes that flow through a pool, of a run with its operands where they are."""
        state, prepared = self._state, self._state.prepared
        engine = prepared.engine[work.op]
        home = prepared.home[engine]
        away: dict[str, int] = {}
        for tensor in prepared.reads[work.op]:
            if not state.copies[tensor] & 1 << home:
                for tier in prepared.reach_order[engine]:
                    if state.copies[tensor] & 1 << tier:
                        away[state.names[tier]] = away.get(state.names[tier], 0) + state.size[tensor]
                        break
        for tensor, tier in (*work.fresh, *((old, tier) for old, _, tier in work.takeovers)):
            if tier != home:  # what it writes there, anew or in place
                away[state.names[tier]] = away.get(state.names[tier], 0) + state.size[tensor]
        kind = KINDS[prepared.trace.op_columns.kind[work.op]]
        extra = slow_operand_ns(state.platform, engine, kind, away) if away else 0
        return prepared.fixed[work.op] + extra, prepared.flow_bytes[work.op]

    def launch(self, work: Work, done: Callable[[int], None]) -> None:
        """Start an op now on its engine; `done` is called when it ends."""
        state, prepared = self._state, self._state.prepared
        work.start = state.now
        fixed, bytes = self.parts(work)
        wait = state.now - int(state.env.now)
        if not bytes:
            At(state.env, wait + fixed, ENDS + work.op, lambda _: done(int(state.env.now)))
            return
        name = state.platform.engines[prepared.engine[work.op]].name
        flow = Flow(bytes, ((name, prepared.flow_rate[work.op], prepared.charges[name]),), done, ENDS + work.op)

        def begin(_: object) -> None:
            state.tick(int(state.env.now))
            self._flows.start(flow, state.now)
            state.wanted = True
            state.flush()

        At(state.env, wait + fixed, ENDS, begin)

    # ---- other engines -----------------------------------------------------------------------

    def enqueue(self, work: Work) -> None:
        """Hand an op to an engine that is not the device's main one."""
        state, op = self._state, work.op
        engine = state.prepared.engine[op]
        priority = int(state.prepared.trace.op_columns.priority[op])
        heappush(self._queues[engine], ((priority, state.now, work.device, next(self._links.sequence)), work))
        if engine in state.prepared.main:
            self.guests[engine] += 1
        self._await(work, "engine")
        self.look()

    def look(self) -> None:
        """At the end of this instant start what can start."""
        self._waiting = True
        self._state.poke()

    def settle(self) -> None:
        """Start the next op of every engine that is free."""
        if not self._waiting:
            return
        self._waiting = False
        for engine, queue in enumerate(self._queues):
            if queue and not self.busy[engine]:
                self.busy[engine] = True
                work = heappop(queue)[1]
                self.launch(work, lambda now, work=work, engine=engine: self._end(work, engine, now))  # type: ignore[misc]

    def _end(self, work: Work, engine: int, now: int) -> None:
        self.busy[engine] = False
        self._waiting = True
        self._state.tick(now)
        if self.guests[engine]:
            self.guests[engine] -= 1
            self._state.wake(self.hosts.pop(engine, ()))
        why = self._state.prepared.logged(work.op, work.why)
        self._state.spans.rows += (work.start, now, work.device, engine, why, work.op, -1, 0, 0)
        self._finish([work])
        self._state.flush()

    def _await(self, work: Work, cause: str) -> None:
        self._state.running[cause] += 1
        for tensor, _ in work.fresh:
            self._state.awaited[tensor] = cause
        for _, tensor, _ in work.takeovers:
            if tensor >= 0:
                self._state.awaited[tensor] = cause

    def _finish(self, ended: Sequence[Work]) -> None:
        """Ops end together: what they made comes, then the actions after them, then what nobody reads goes."""
        state = self._state
        state.running["peer" if ended[0].op in state.prepared.group_of else "engine"] -= len(ended)
        state.end = max(state.end, state.now)
        for work in ended:
            self.deliver(work)
        if state.env.is_next(state.now, FREES + ended[-1].op):
            for work in ended:
                self.after(work)
            for work in ended:
                self.bury(work)
        else:
            for work in ended:
                state.later(AFTERS + work.op, partial(self.after, work))
                state.later(FREES + work.op, partial(self.bury, work))
        state.note_idle()
        state.poke()

    # ---- the end of an op --------------------------------------------------------------------

    def deliver(self, work: Work) -> None:
        """Give scratch space back, let results come, and unlock what the op used."""
        state = self._state
        for tier, bytes, handle in work.scratch:
            state.give(-1, tier, bytes, work.op, WORKSPACE, handle)
        for old, new, tier in work.takeovers:
            state.overwriting.pop(old, None)
            if new < 0:
                state.release(old, tier, work.op, OVERWRITTEN)
                continue
            state.overwrite(old, new, tier, work.op)
            state.making.discard((new, tier))
            state.awaited.pop(new, None)
            state.arrive(new, tier)
        for tensor, tier in work.fresh:
            state.making.discard((tensor, tier))
            state.awaited.pop(tensor, None)
            state.arrive(tensor, tier)
        for tensor in state.prepared.reads[work.op]:
            state.uses[tensor] -= work.counted
            state.locks[tensor] -= 1
        for tensor in state.prepared.writes[work.op]:
            state.locks[tensor] -= 1
        if work.why == "run":
            for tensor in state.prepared.releases.get(work.op, ()):
                state.uses[tensor] -= 1
        if state.on_unlock:
            state.note_unlocked((*state.prepared.reads[work.op], *state.prepared.writes[work.op]))

    def bury(self, work: Work) -> None:
        """Free what no op still to run and no planned recomputation reads, and the program does not hold."""
        state = self._state
        prepared, op = state.prepared, work.op
        for tensor in (*prepared.reads[op], *prepared.writes[op], *prepared.releases.get(op, ())):
            if not state.locks[tensor]:
                state.release_pending(tensor, work.op)
                state.bury(tensor, work.op)
        for old, _, _ in work.takeovers:
            state.bury(old, work.op)

    # ---- groups ------------------------------------------------------------------------------

    def join(self, work: Work) -> None:
        """A member of a group has its inputs and its space; the last one to come starts the transfer."""
        state, prepared = self._state, self._state.prepared
        name = prepared.group_of[work.op]
        turn = self._runs[work.op] = self._runs.get(work.op, 0) + 1
        meeting = self._meeting.setdefault((name, turn), [])
        meeting.append(work)
        work.start = state.now
        self._await(work, "peer")
        if len(meeting) == len(prepared.groups[name]):
            del self._meeting[name, turn]
            self._start_group(sorted(meeting, key=lambda member: member.op))

    def absent(self) -> list[str]:
        """For each group that waits: which members have not come."""
        names = self._state.prepared.trace.op_columns.name
        rows = []
        for (name, _), here in sorted(self._meeting.items()):
            missing = set(self._state.prepared.groups[name]) - {work.op for work in here}
            rows.append(f"group {name!r} waits for {', '.join(repr(names[op]) for op in sorted(missing))}")
        return rows

    def _start_group(self, members: list[Work]) -> None:
        state, prepared = self._state, self._state.prepared
        ops = [prepared.trace.ops[work.op] for work in members]
        if {op.kind for op in ops} == {"send", "recv"}:
            sender, receiver = members if ops[0].kind == "send" else members[::-1]
            stated = [op.bytes for op in ops if op.bytes is not None]
            payload = stated[0] if stated else sum(state.size[t] for t in prepared.writes[receiver.op])
            ends = [self._tier(sender), self._tier(receiver)]
            hops, chunk = [(ends[0], ends[1])], 0
        else:
            payload = max(int(prepared.trace.touched[work.op]) for work in members)
            homes = [state.names[prepared.home[prepared.main[work.device]]] for work in members]
            hops, chunk = list(zip(homes, homes[1:] + homes[:1], strict=True)), COLLECTIVE_CHUNK
        route: dict[int, None] = {}
        for source, target in hops:
            found = state.platform.route(source, target)
            if not found and source != target:
                raise IllegalPlan(f"op {ops[0].name!r}: no route from {source!r} to {target!r}")
            route.update(dict.fromkeys(found))
        key = (min(op.priority for op in ops), state.now, members[0].device, next(self._links.sequence))
        job = GroupJob(self, members, tuple(route), payload, key, chunk)
        if route:
            self._links.submit(job)
            state.poke()
        else:
            job.began = state.now
            At(state.env, state.now - int(state.env.now), job.rank, lambda _: self._meet(job))

    def _meet(self, job: GroupJob) -> None:
        """A group whose members share a tier: nothing to move."""
        self._state.tick(int(self._state.env.now))
        job.done(self._state.now)
        self._state.flush()

    def _tier(self, work: Work) -> str:
        """Where a send reads, or a recv writes."""
        state, prepared = self._state, self._state.prepared
        if work.fresh:
            return state.names[work.fresh[0][1]]
        engine = prepared.engine[work.op]
        for tensor in prepared.reads[work.op]:
            for tier in prepared.reach_order[engine]:
                if state.copies[tensor] & 1 << tier:
                    return state.names[tier]
        return state.names[prepared.home[engine]]

    def end_group(self, job: GroupJob, now: int) -> None:
        """The bytes of a group have arrived: all its members end."""
        state = self._state
        state.now = now
        for link in job.route:
            lane = len(state.platform.engines) + link
            row = (job.began, now, job.members[0].device, lane, WHY["move"], job.members[-1].op, -1, 0, job.payload)
            state.spans.rows += row
        self._finish(job.members)


class GroupJob(Job):
    """The bytes that a group of ops moves."""

    __slots__ = ("members", "owner", "payload")

    def __init__(
        self, owner: Works, members: list[Work], route: tuple[int, ...], bytes: int, key: tuple[int, ...], chunk: int
    ) -> None:
        super().__init__(route, bytes, key, ENDS + members[0].op, chunk)
        self.owner = owner
        self.members = members
        self.payload = bytes

    def done(self, now: int) -> None:
        """All members end."""
        self.owner.end_group(self, now)
