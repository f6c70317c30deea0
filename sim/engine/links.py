"""Links: what is to be copied queues by priority, then first come, and occupies its whole route at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from sim.engine.events import COPIES, At, Event
from sim.engine.flows import Flow, Flows
from sim.engine.prepare import Charges
from sim.engine.state import State
from sim.hardware.transfer_time import transfer_ns


class Job:
    """Bytes for a route of links; subclasses say what follows when it starts and ends.

    key: its place in the queues, least first; unique. rank: that of its end. chunk: bytes between points where
    one of higher priority may go first, 0 for none.
    """

    __slots__ = ("began", "bytes", "chunk", "ends", "flow", "is_waiting", "key", "rank", "route")

    def __init__(self, route: tuple[int, ...], bytes: int, key: tuple[int, ...], rank: int, chunk: int = 0) -> None:
        self.route = route
        self.bytes = bytes
        self.key = key
        self.rank = rank
        self.chunk = chunk
        self.began = -1
        self.ends = -1
        self.flow: Flow | None = None
        self.is_waiting = False

    def started(self) -> None:
        """It has its links for the first time."""

    def done(self, now: int) -> None:
        """All its bytes have arrived."""
        raise NotImplementedError


class Links:
    """The queues of all links."""

    def __init__(self, state: State, charges: Mapping[str, Charges], flows: Flows) -> None:
        self._state = state
        self._env = state.env
        self._platform = state.platform
        self._links = state.platform.links
        self._charges = charges
        self._flows = flows
        self._free = [link.copy_engines for link in self._links]
        self._queues: list[list[tuple[tuple[int, ...], Job]]] = [[] for _ in self._links]
        self._shared = [link.name in charges for link in self._links]
        self._running: dict[Job, None] = {}
        self.stale: set[int] = set()
        self.sequence = count()  # of all jobs, so that no two keys are equal

    def submit(self, job: Job) -> None:
        """Queue a job; the next `start_ready` begins it if its links are free."""
        job.is_waiting = True
        for link in job.route:
            heappush(self._queues[link], (job.key, job))
        self.stale.update(job.route)

    def cancel(self, job: Job) -> None:
        """Forget a job that has not started."""
        job.is_waiting = False
        self.stale.update(job.route)

    def start_ready(self, now: int) -> None:
        """Start every job that is first in the queues of all its links and finds each free."""
        while self.stale:
            link = self.stale.pop()
            job = self._first(link)
            if job is None or not self._free[link]:
                continue
            if len(job.route) == 1 or all(self._free[i] and self._first(i) is job for i in job.route):
                self._start(job, now)
                self.stale.update(job.route)

    def _first(self, link: int) -> Job | None:
        queue = self._queues[link]
        while queue and not queue[0][1].is_waiting:
            heappop(queue)
        return queue[0][1] if queue else None

    def _start(self, job: Job, now: int) -> None:
        job.is_waiting = False
        self._running[job] = None
        fixed, rate = self._platform.pace(job.route)
        shared = False
        for i in job.route:
            heappop(self._queues[i])
            self._free[i] -= 1
            shared = shared or self._shared[i]
        if job.began < 0:
            job.began = now
            job.started()
        else:
            fixed = 0  # the later chunks of a job that has paid it
        part = min(job.bytes, job.chunk) if job.chunk else job.bytes
        job.bytes -= part
        job.ends = now + transfer_ns(part, rate, fixed)
        if not shared or not part:  # 0 bytes share nothing
            At(self._env, job.ends - self._env.now, job.rank, lambda event: self._end(job, job.ends))
            return
        users = tuple(self._user(link) for link in job.route)
        flow = job.flow = Flow(part, users, lambda at: self._end(job, at), job.rank)
        if fixed:
            At(self._env, now + fixed - self._env.now, COPIES, lambda event: self._flow(flow, event))
        else:
            self._flows.start(flow, now)

    def _user(self, link: int) -> tuple[str, int, Charges]:
        name = self._links[link].name
        return name, self._links[link].rate, self._charges.get(name, ())

    def _flow(self, flow: Flow, _: Event) -> None:
        now = int(self._env.now)
        self._state.tick(now)
        self._flows.start(flow, now)
        self._state.wanted = True
        self._state.flush()

    def _end(self, job: Job, now: int) -> None:
        self._state.tick(now)
        del self._running[job]
        for link in job.route:
            self._free[link] += 1
            if self._queues[link]:
                self.stale.add(link)
                self._state.wanted = True
        if job.bytes:
            self.submit(job)
            self._state.wanted = True
        else:
            job.done(now)
        self._state.flush()

    def free_at(self, route: Sequence[int], now: int) -> int:
        """When what is queued or running on a route now will have ended, at present rates."""
        links = set(route)
        end = now
        running = [job for job in self._running if links.intersection(job.route)]
        for job in running:
            end = max(end, job.ends if job.flow is None else job.flow.ends_at(now, job.ends))
        waiting = {id(job): job for link in route for _, job in self._queues[link] if job.is_waiting}
        for job in (*running, *waiting.values()):  # of one that runs the later chunks
            fixed, rate = self._platform.pace(job.route)
            end += transfer_ns(job.bytes, rate, fixed if job.began < 0 else 0)
        return end
