"""Links: routes over them, and their queues. By priority, then first come, a job occupies its whole route at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from sim.engine.event_path.clock import At, Clock
from sim.engine.event_path.flows import Flow, Flows
from sim.engine.prepare import Charges, Prepared
from sim.errors import IllegalPlan
from sim.hardware.platform import Platform
from sim.hardware.transfer_time import transfer_ns


class Routes:
    """Routes between tiers by position, and the nearest copy of a tensor, as far as a run has looked them up."""

    def __init__(self, platform: Platform, prepared: Prepared) -> None:
        self._platform = platform
        self._prepared = prepared
        self._names = [tier.name for tier in platform.tiers]
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._sources: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}

    def between(self, source: int, target: int) -> tuple[int, ...]:
        """Positions of the links from one tier to another; () if there are none."""
        key = (source, target)
        if key not in self._routes:
            self._routes[key] = self._platform.route(self._names[source], self._names[target])
        return self._routes[key]

    def source(self, tensor: int, held: int, target: int) -> tuple[int, tuple[int, ...]]:
        """Of the tiers that hold a tensor (as bits), the one with the shortest route to `target`, and that route.

        Raises IllegalPlan where there is none.
        """
        if (held, target) in self._sources:
            return self._sources[held, target]
        holders = [tier for tier in range(len(self._names)) if held & 1 << tier]
        routes = {tier: route for tier in holders if (route := self.between(tier, target))}
        if not routes:
            name = self._prepared.trace.tensor_columns.name[tensor]
            where = ", ".join(repr(self._names[tier]) for tier in holders)
            raise IllegalPlan(f"tensor {name!r}: no route from {where} to {self._names[target]!r}")
        best = min(routes, key=lambda tier: (len(routes[tier]), self._platform.pace(routes[tier]).fixed, tier))
        self._sources[held, target] = best, routes[best]
        return self._sources[held, target]

    def nearest(self, tensor: int, tiers: Iterable[int], target: int) -> int:
        """Of these tiers the one with the shortest route to `target`, or any where there is none."""
        linked = sum(1 << tier for tier in tiers if self.between(tier, target))
        return self.source(tensor, linked, target)[0] if linked else next(iter(tiers))


class Row(NamedTuple):
    """Chunks under way in a row.

    first: when the first of them ends.
    each: ns of a whole one.
    size: bytes of a whole one.
    left: bytes after the first.
    """

    first: int
    each: int
    size: int
    left: int


class Job:
    """Bytes for a route of links; a subclass says what follows when they have arrived.

    bytes: what has not been started.
    rank: that of its end, see `clock`.
    most: bytes/s at which a codec beside the links takes or gives its bytes, None for none.
    delay: ns on top of the fixed time.
    fixed: ns that it pays once, None for the fixed time of its route.
    chunk: bytes between points where one of higher priority may go first, 0 for none.
    key: its place in the queues, least first; unique, and () while it stands in none.
    began: when its first chunk started, -1 before.
    ends: when the present chunk ends if it is not slowed down; the last one, where the chunks are under way in a row.
    row: these chunks, None where each starts by itself.
    alarm: the end that it has been told to the clock, None where it shares bandwidth.
    """

    __slots__ = (
        *("alarm", "began", "bytes", "chunk", "delay", "ends", "flow"),
        *("fixed", "is_waiting", "key", "most", "rank", "route", "row"),
    )

    def __init__(
        self,
        route: tuple[int, ...],
        bytes: int,
        rank: int,
        chunk: int = 0,
        most: Fraction | None = None,
        delay: int = 0,
        fixed: int | None = None,
    ) -> None:
        self.route = route
        self.bytes = bytes
        self.rank = rank
        self.chunk = chunk
        self.most = most
        self.delay = delay
        self.fixed = fixed
        self.key: tuple[int, ...] = ()
        self.began = -1
        self.ends = -1
        self.flow: Flow | None = None
        self.row: Row | None = None
        self.alarm: At | None = None
        self.is_waiting = False

    def done(self, now: int) -> None:
        """All its bytes have arrived."""
        raise NotImplementedError

    def enqueue(self, key: tuple[int, ...]) -> None:
        """It stands in the queues of its links, at that place."""
        self.key = key
        self.is_waiting = True

    def withdraw(self) -> None:
        """It is to be forgotten."""
        self.is_waiting = False

    def start(self, now: int, fixed: int, rate: int | Fraction, *, in_a_row: bool) -> int:
        """Start its next chunk; the bytes of that. Only the first one pays the route's fixed time.

        in_a_row: start all that are left, one when the other ends, until it is told to `stop`.
        """
        self.is_waiting = False
        if self.began < 0:
            self.began = now
        else:
            fixed = 0
        part = min(self.bytes, self.chunk) if self.chunk else self.bytes
        self.bytes -= part
        self.ends = now + transfer_ns(part, rate, fixed)
        if in_a_row and self.bytes:
            self.row = Row(self.ends, transfer_ns(part, rate), part, self.bytes)
            whole, rest = divmod(self.bytes, part)
            self.ends += whole * self.row.each + (transfer_ns(rest, rate) if rest else 0)
            self.bytes = 0
        return part

    def end_with(self, end: Callable[[Job, int], None], clock: Clock) -> None:
        """Have the clock call `end` when what is under way ends, and no more what it was to call before."""
        if self.alarm is not None and not self.alarm.processed:
            self.alarm.callbacks = []
        self.alarm = clock.at(self.ends, self.rank, lambda _: end(self, self.ends))

    def present(self, now: int, settled: bool) -> tuple[int, int]:
        """When the chunk under way ends, and the bytes of those after it. settled: that of `now` has begun already."""
        row = self.row
        if row is None:
            return self.ends, self.bytes
        passed = max(0, -((row.first - now) // row.each))  # chunks that end at `now` at the latest, but for the first
        passed += row.first + passed * row.each == now and settled
        left = row.left - passed * row.size
        return (row.first + passed * row.each, left) if left > 0 else (self.ends, 0)

    def stop(self, now: int, settled: bool) -> bool:
        """Let the chunk under way be the last of its row; whether others would have followed."""
        self.ends, self.bytes = self.present(now, settled)
        self.row = None
        return self.bytes > 0

    def share(self, flow: Flow) -> None:
        """Its present chunk shares bandwidth."""
        self.flow = flow


class Links:
    """The queues of all links."""

    def __init__(self, platform: Platform, prepared: Prepared, flows: Flows, clock: Clock) -> None:
        self._platform = platform
        self._links = platform.links
        self._charges = prepared.charges
        self._flows = flows
        self._clock = clock
        self._free = [link.copy_engines for link in self._links]
        self._queues: list[list[tuple[tuple[int, ...], Job]]] = [[] for _ in self._links]
        self._shared = [link.name in prepared.charges for link in self._links]
        self._users: dict[tuple[tuple[int, ...], Fraction | None], int] = {}
        self._running: dict[Job, None] = {}
        self._rows: list[dict[Job, None]] = [{} for _ in self._links]  # by link what has chunks under way in a row
        self.stale: set[int] = set()
        self._sequence = count()

    def next_number(self) -> int:
        """A number for what else is queued by priority and time, so that nothing stands at one place with another."""
        return next(self._sequence)

    def submit(self, job: Job, priority: int, device: int) -> None:
        """Queue a job behind those of a lower `priority` value; the next `settle` begins it if its links are free."""
        self._enqueue(job, (priority, self._clock.now, device, next(self._sequence)))

    def _enqueue(self, job: Job, key: tuple[int, ...]) -> None:
        job.enqueue(key)
        for link in job.route:
            heappush(self._queues[link], (key, job))
            for other in [other for other in self._rows[link] if other.key > key]:
                self._stop(other)
        self.stale.update(job.route)
        self._clock.poke()

    def cancel(self, job: Job) -> None:
        """Forget a job that has not started."""
        job.withdraw()
        self.stale.update(job.route)

    def settle(self) -> None:
        """Start every job that is first in the queues of all its links and finds each free."""
        while self.stale:
            link = self.stale.pop()
            if not self._free[link]:
                continue
            job = self._first(link)
            if job is None:
                continue
            if len(job.route) == 1 or all(self._free[i] and self._first(i) is job for i in job.route):
                self._start(job, self._clock.now)
                self.stale.update(job.route)

    def _first(self, link: int) -> Job | None:
        queue = self._queues[link]
        while queue and not queue[0][1].is_waiting:
            heappop(queue)
        return queue[0][1] if queue else None

    def _start(self, job: Job, now: int) -> None:
        self._running[job] = None
        shared = False
        for i in job.route:
            heappop(self._queues[i])
            self._free[i] -= 1
            shared = shared or self._shared[i]
        fixed, rate = self._pace(job)
        is_first = job.began < 0
        part = job.start(now, fixed, rate, in_a_row=not shared)
        if not shared or not part:  # 0 bytes share nothing
            if job.row is not None:
                for i in job.route:
                    self._rows[i][job] = None
            job.end_with(self._end, self._clock)
            return
        use = job.route, job.most
        if use not in self._users:
            self._users[use] = self._flows.number(tuple(self._user(link, job.most) for link in job.route))
        flow = Flow(part, self._users[use], lambda at: self._end(job, at), job.rank)
        job.share(flow)
        if fixed and is_first:
            self._flows.start_at(flow, now + fixed)
        else:
            self._flows.start(flow, now)

    def _stop(self, job: Job) -> None:
        """Another goes first when the chunk under way ends."""
        for link in job.route:
            del self._rows[link][job]
        if job.stop(self._clock.now, self._clock.has_settled):
            job.end_with(self._end, self._clock)

    def _pace(self, job: Job) -> tuple[int, int | Fraction]:
        """Fixed ns and bytes/s of a job alone on its route, at most those of its codec."""
        fixed, rate = self._platform.pace(job.route)
        fixed = fixed if job.fixed is None else job.fixed
        return fixed + job.delay, rate if job.most is None or rate < job.most else job.most

    def _user(self, link: int, most: Fraction | None) -> tuple[str, int | Fraction, Charges]:
        name, rate = self._links[link].name, self._links[link].rate
        return name, rate if most is None or rate < most else most, self._charges.get(name, ())

    def _end(self, job: Job, now: int) -> None:
        self._clock.advance(now)
        del self._running[job]
        if job.row is not None:
            job.stop(now, settled=False)
            for link in job.route:
                del self._rows[link][job]
        for link in job.route:
            self._free[link] += 1
            if self._queues[link]:
                self.stale.add(link)
                self._clock.poke()
        if job.bytes:
            self._enqueue(job, job.key)
        else:
            job.done(now)
        self._clock.flush()

    def free_at(self, route: Sequence[int], now: int) -> int:
        """When what is queued or running on a route now will have ended, at present rates."""
        links = set(route)
        end = now
        running = [job for job in self._running if links.intersection(job.route)]
        waiting = {id(job): job for link in route for _, job in self._queues[link] if job.is_waiting}
        later = [(job, job.bytes) for job in waiting.values()]
        shared = self._flows.settled_at == now
        for job in running:
            ends, left = job.present(now, self._clock.has_settled)
            end = max(end, ends if job.flow is None else job.flow.ends_at(now, ends, shared))
            later.append((job, left))
        for job, left in later:
            fixed, rate = self._pace(job)
            end += transfer_ns(left, rate, fixed if job.began < 0 else 0)
        return end
