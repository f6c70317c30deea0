"""Groups: ops of several devices that start together, for a collective or a send with its receive."""

from __future__ import annotations

from collections.abc import Callable

from sim.engine.event_path.clock import ENDS
from sim.engine.event_path.engines import OpEnd
from sim.engine.event_path.links import Job, Links
from sim.engine.event_path.state import State, Work
from sim.errors import IllegalPlan
from sim.hardware.platform import rank_link, shared_link, shares_wires
from sim.trace.op import KIND_CODE, Ring

SEND, RECV = KIND_CODE["send"], KIND_CODE["recv"]
PAIR = {SEND, RECV}
COLLECTIVE_CHUNK = 4 << 20
"""Bytes of a collective between two points where one of higher priority may go first; 4 MB is the
partition that ByteScheduler ships with."""


class Groups:
    """Has the members of each group meet, and moves what they exchange."""

    def __init__(self, state: State, links: Links, op_end: OpEnd) -> None:
        self._platform = state.platform
        self._prepared = state.prepared
        self._clock = state.clock
        self._record = state.record
        self._residency = state.residency
        self._ops = state.ops
        self._links = links
        self._op_end = op_end
        self._tiers = state.space.names
        self._link_of = {link.name: i for i, link in enumerate(state.platform.links)}
        self._routes: dict[tuple[str, int], tuple[int, ...]] = {}
        self._runs: dict[int, int] = {}
        self._meeting: dict[tuple[str, int], list[Work]] = {}

    def join(self, work: Work) -> None:
        """A member of a group has its inputs and its space; the last one to come starts the transfer."""
        name = self._prepared.group_of[work.op]
        if len(self._prepared.groups[name]) == 1:  # the others are not in the trace
            self._ops.begin(work, "peer")
            self._start([work])
            return
        turn = self._runs[work.op] = self._runs.get(work.op, 0) + 1
        members = self._meeting.setdefault((name, turn), [])
        members.append(work)
        self._ops.begin(work, "peer")
        if len(members) == len(self._prepared.groups[name]):
            del self._meeting[name, turn]
            self._start(sorted(members, key=lambda member: member.op))

    def absent(self) -> list[str]:
        """For each group that waits: which members have not come."""
        names = self._prepared.trace.op_columns.name
        rows = []
        for (name, _), here in sorted(self._meeting.items()):
            missing = set(self._prepared.groups[name]) - {work.op for work in here}
            rows.append(f"group {name!r} waits for {', '.join(repr(names[op]) for op in sorted(missing))}")
        return rows

    def _start(self, members: list[Work]) -> None:
        """All members are there: the bytes that they exchange queue for the links of their route."""
        prepared, clock = self._prepared, self._clock
        ring = prepared.trace.op_columns.ring.get(members[0].op)
        if ring is not None and len(members) == 1:
            self._among_ranks(members[0], ring)
            return
        columns = prepared.trace.op_columns
        if {int(columns.kind[work.op]) for work in members} == PAIR:
            hops, payload = self._pair(members)
            chunk, fixed = 0, None
        else:
            hops, payload = self._ring(members)
            chunk, fixed = COLLECTIVE_CHUNK, self._platform.step_ns(hops) * (ring.steps if ring else len(members) - 1)
        route = self._route(hops, columns.name[members[0].op])
        if route:
            job = GroupJob(self._end, members, route, payload, chunk, fixed)
            self._links.submit(job, min(int(columns.priority[work.op]) for work in members), members[0].device)
        else:  # they share a tier: nothing to move
            clock.at(clock.now, ENDS + members[0].op, lambda _: self._end_at_once(members))

    def _among_ranks(self, member: Work, ring: Ring) -> None:
        """The own part of a collective among symmetric ranks: its bytes on the link that stands for their network."""
        trace, place = self._prepared.trace, (ring.axis, member.device)
        route = self._routes.get(place)
        if route is None:
            route = self._routes[place] = self._route_of_ranks(member, ring)
        payload = int(trace.touched[member.op])
        fixed = self._platform.pace(route).fixed * ring.passes
        job = GroupJob(self._end, [member], route, payload, COLLECTIVE_CHUNK, fixed)
        self._links.submit(job, int(trace.op_columns.priority[member.op]), member.device)

    def _route_of_ranks(self, member: Work, ring: Ring) -> tuple[int, ...]:
        """The links that stand for the network among ranks of a device. Raises IllegalPlan where there is none."""
        link_of = self._link_of
        if (name := rank_link(ring.axis, member.device)) not in link_of:
            op = self._prepared.trace.op_columns.name[member.op]
            raise IllegalPlan(f"op {op!r}: {self._platform.name} has no network among ranks; lay it out for them")
        own, shared = link_of[name], shared_link(member.device)
        return (own, link_of[shared]) if shares_wires(ring.axis) and shared in link_of else (own,)

    def _pair(self, members: list[Work]) -> tuple[list[tuple[str, str]], int]:
        """From where to where a send goes, and how many bytes."""
        prepared, columns = self._prepared, self._prepared.trace.op_columns
        sender, receiver = members if columns.kind[members[0].op] == SEND else members[::-1]
        stated = [bytes for work in members if (bytes := int(columns.bytes[work.op])) >= 0]
        payload = stated[0] if stated else sum(prepared.size[t] for t in prepared.writes[receiver.op])
        return [(self._tier(sender), self._tier(receiver))], payload

    def _ring(self, members: list[Work]) -> tuple[list[tuple[str, str]], int]:
        """The hops of a collective's ring, and how many bytes go over each."""
        prepared = self._prepared
        payload = max(int(prepared.trace.touched[work.op]) for work in members)
        homes = [self._tiers[prepared.home[prepared.main[work.device]]] for work in members]
        return list(zip(homes, homes[1:] + homes[:1], strict=True)), payload

    def _route(self, hops: list[tuple[str, str]], op: str) -> tuple[int, ...]:
        """The links of all hops, each once."""
        route: dict[int, None] = {}
        for source, target in hops:
            links = self._platform.route(source, target)
            if not links and source != target:
                raise IllegalPlan(f"op {op!r}: no route from {source!r} to {target!r}")
            route.update(dict.fromkeys(links))
        return tuple(route)

    def _tier(self, work: Work) -> str:
        """Where a send reads, or a recv writes."""
        prepared = self._prepared
        if work.fresh:
            return self._tiers[work.fresh[0][1]]
        engine = prepared.engine[work.op]
        for tensor in prepared.reads[work.op]:
            for tier in prepared.reach_order[engine]:
                if self._residency.has_copy(tensor, tier):
                    return self._tiers[tier]
        return self._tiers[prepared.home[engine]]

    def _end_at_once(self, members: list[Work]) -> None:
        self._clock.catch_up()
        self._op_end.together(members, "peer")
        self._clock.flush()

    def _end(self, job: GroupJob, now: int) -> None:
        """The bytes of a group have arrived: all its members end."""
        first, last = job.members[0], job.members[-1]
        self._record.moved(job.began, now, first.device, job.route, last.op, -1, job.payload)
        self._op_end.together(job.members, "peer")


class GroupJob(Job):
    """The bytes that the members of a group exchange.

    then: called with it and the time when they have arrived.
    """

    __slots__ = ("members", "payload", "then")

    def __init__(
        self,
        then: Callable[[GroupJob, int], None],
        members: list[Work],
        route: tuple[int, ...],
        payload: int,
        chunk: int,
        fixed: int | None = None,
    ) -> None:
        super().__init__(route, payload, ENDS + members[0].op, chunk, fixed=fixed)
        self.then = then
        self.members = members
        self.payload = payload

    def done(self, now: int) -> None:
        """All members end."""
        self.then(self, now)
