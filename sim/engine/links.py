"""Links: what is to be copied queues by priority, then first come, and occupies its whole route at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from sim.engine.events import ENDS, At, Environment
from sim.engine.flows import Flow, Flows
from sim.engine.prepare import Charges
from sim.hardware.platform import Link


class Job:
    """Bytes for a route of links. started, done: called with the time; chunk: bytes between pre-emptions."""

    __slots__ = ("began", "bytes", "chunk", "done", "ends", "fixed", "key", "route", "started")

    def __init__(
        self,
        route: Sequence[int],
        bytes: int,
        key: tuple[int, ...],
        done: Callable[[int], None],
        *,
        started: Callable[[int], None] | None = None,
        chunk: int = 0,
    ) -> None:
        self.route = tuple(route)
        self.bytes = bytes
        self.key = key
        self.done = done
        self.started = started
        self.chunk = chunk
        self.began = -1
        self.ends = -1
        self.fixed = -1


class Links:
    """The queues of all links."""

    def __init__(
        self,
        env: Environment,
        links: Sequence[Link],
        charges: Mapping[str, Charges],
        flows: Flows,
        poke: Callable[[], None],
    ) -> None:
        self._env = env
        self._poke = poke
        self._links = links
        self._charges = charges
        self._flows = flows
        self._free = [link.copy_engines for link in links]
        self._queues: list[list[tuple[tuple[int, ...], Job]]] = [[] for _ in links]
        self._shared = [link.name in charges for link in links]
        self.running: set[Job] = set()
        self.waiting: set[Job] = set()
        self.stale = False

    def submit(self, job: Job) -> None:
        """Queue a job; the next `start_ready` begins it if its links are free."""
        for link in job.route:
            heappush(self._queues[link], (job.key, job))
        self.waiting.add(job)
        self.stale = True

    def cancel(self, job: Job) -> None:
        """Forget a job that has not started."""
        self.waiting.discard(job)
        self.stale = True

    def start_ready(self, now: int) -> None:
        """Start every job that is first in the queues of all its links and finds each free."""
        self.stale = False
        again = True
        while again:
            again = False
            for link, queue in enumerate(self._queues):
                while queue and queue[0][1] not in self.waiting:
                    heappop(queue)
                if queue and self._free[link] and self._is_next(queue[0][1]):
                    self._start(queue[0][1], now)
                    again = True

    def _is_next(self, job: Job) -> bool:
        for link in job.route:
            queue = self._queues[link]
            while queue and queue[0][1] not in self.waiting:
                heappop(queue)
            if not self._free[link] or queue[0][1] is not job:
                return False
        return True

    def _start(self, job: Job, now: int) -> None:
        self.waiting.discard(job)
        self.running.add(job)
        for link in job.route:
            heappop(self._queues[link])
            self._free[link] -= 1
        if job.began < 0:
            job.began = now
            if job.started is not None:
                job.started(now)
        fixed = sum(self._links[link].fixed for link in job.route) if job.fixed < 0 else job.fixed
        job.fixed = 0
        part = min(job.bytes, job.chunk) if job.chunk else job.bytes
        job.bytes -= part
        rate = min(self._links[link].rate for link in job.route)
        job.ends = now + fixed - (-part * 10**9 // rate)
        if any(self._shared[link] for link in job.route):
            users = [
                (self._links[i].name, self._links[i].rate, self._charges.get(self._links[i].name, ()))
                for i in job.route
            ]
            flow = Flow(part, users, lambda at: self._end(job, at))
            if fixed:
                At(self._env, now + fixed - int(self._env.now), ENDS, lambda _: self._flow(flow))
            else:
                self._flows.start(flow, now)
        else:
            At(self._env, job.ends - int(self._env.now), ENDS, lambda _: self._end(job, int(self._env.now)))

    def _flow(self, flow: Flow) -> None:
        self._flows.start(flow, int(self._env.now))
        self._poke()

    def _end(self, job: Job, now: int) -> None:
        self._poke()
        self.running.discard(job)
        for link in job.route:
            self._free[link] += 1
        self.stale = True
        if job.bytes:
            self.submit(job)
        else:
            job.done(now)

    def free_at(self, route: Sequence[int], now: int) -> int:
        """When what is queued or running on a route now will have ended, at present rates."""
        links = set(route)
        end = now
        for job in self.running:
            if links.intersection(job.route):
                end = max(end, job.ends)
        for job in self.waiting:
            if links.intersection(job.route):
                rate = min(self._links[link].rate for link in job.route)
                end += max(job.fixed, 0) - (-job.bytes * 10**9 // rate)
        return end
