"""A pool of processes on this machine that survives the death of any of them."""

from __future__ import annotations

import json
import os
import selectors
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from sim.errors import TiersimError
from sim.sweeps.cell import Outcome
from sim.sweeps.execute import TRIES, Executor, Inline, Job, killed, stuck, timed_out
from sim.sweeps.identity import sources_stamp
from sim.sweeps.process import BENCH, CHANGED, Worker

STILLBORN = 10
"""Workers in a row that may die before they are ready."""

FEW = 16
"""So many cells take less time than the start of a pool."""


class Local:
    """A pool of processes on this machine.

    Each has one job at a time, so that its death affects that job only. The job is tried twice more with nothing else
    running; after that its outcome is `killed`. A job that exceeds its time limit is ended with its process, and its
    outcome is `timed_out`.

    jobs: how many processes.
    bench: what runs the jobs in each process, see `sim.sweeps.process.Worker`.
    keeps: whether idle processes wait for the next `run`, with what they have cached, until `close`.
    """

    def __init__(self, jobs: int, bench: str = BENCH, *, keeps: bool = False) -> None:
        self.jobs = jobs
        self.bench = bench
        self.keeps = keeps
        self._idle: list[Worker] = []

    def run(
        self, jobs: Sequence[Job], wanted: Callable[[Job], bool] = lambda job: True, until: float | None = None
    ) -> Iterator[tuple[str, Outcome]]:
        """See `Executor`.

        wanted: asked before each job is handed out, whether it is still to be run.
        until: when all work is stopped, finished or not, as `time.monotonic` says it; None for never. What has no
            outcome by then gets none.
        """
        pool = _Pool(jobs, min(self.jobs, len(jobs)), self.bench, self._idle, wanted, until)
        self._idle = []
        try:
            yield from pool.run()
        finally:
            if self.keeps:
                self._idle = pool.release()
            pool.stop()

    def start(self) -> None:
        """Start all processes; the next `run` hands jobs to each as it gets ready."""
        self._idle += [Worker(bench=self.bench) for _ in range(self.jobs - len(self._idle))]

    def close(self) -> None:
        """End the processes that were started or kept."""
        while self._idle:
            self._idle.pop().close()


class _Pool:
    """The workers of one run, the jobs to hand out, by group, and those whose worker died."""

    def __init__(
        self,
        jobs: Sequence[Job],
        size: int,
        bench: str = BENCH,
        workers: Sequence[Worker] = (),
        wanted: Callable[[Job], bool] = lambda job: True,
        until: float | None = None,
    ) -> None:
        self.bench = bench
        self.wanted = wanted
        self.until = until
        self.groups: OrderedDict[str, deque[Job]] = OrderedDict()
        for job in jobs:
            self.groups.setdefault(job.group, deque()).append(job)
        self.size = size
        self.suspects: deque[Job] = deque()
        self.deaths: dict[str, int] = {}
        self.stillborn = 0
        self.stamp = sources_stamp()
        self.workers: dict[int, Worker] = {}
        self.selector = selectors.DefaultSelector()
        for worker in workers:
            self.add(worker)

    def run(self) -> Iterator[tuple[str, Outcome]]:
        """Outcomes as they come."""
        while len(self.workers) < self.size:
            self.start()
        self.feed()
        while self.groups or self.suspects or any(worker.job for worker in self.workers.values()):
            limits = [left for worker in self.workers.values() if (left := worker.left_s) is not None]
            if self.until is not None:
                limits.append(max(0.0, self.until - time.monotonic()))
                if not limits[-1]:
                    return
            for key, _ in self.selector.select(min(limits, default=None)):
                worker = self.workers[key.fd]
                lines = worker.lines()
                if lines is None:
                    yield from self.bury(worker)
                    continue
                for line in lines:
                    if worker.job is None:
                        if line.decode() != self.stamp:
                            raise TiersimError(CHANGED)
                        worker.ready, self.stillborn = True, 0
                    else:
                        job, worker.job = worker.job, None
                        self.deaths.pop(job.id, None)
                        yield job.id, json.loads(line)
            for worker in [worker for worker in self.workers.values() if worker.left_s == 0]:
                yield from self.end(worker)
            self.feed()

    def feed(self) -> None:
        """Give each idle worker a job, if possible of the group that it has just worked on."""
        idle = [worker for worker in self.workers.values() if worker.ready and worker.job is None]
        for worker in idle:
            job = self.next_job(worker)
            if job is None:
                break
            worker.give(job)
        if not self.groups and self.suspects and not any(worker.job for worker in self.workers.values()):
            ready = next((worker for worker in idle if worker.job is None), None)
            if ready is not None:
                ready.give(self.suspects.popleft())

    def next_job(self, worker: Worker) -> Job | None:
        """The next job for a worker that is still wanted; None where there is none."""
        while (group := self.next_group(worker)) is not None:
            jobs = self.groups[group]
            job = jobs.popleft()
            if not jobs:
                del self.groups[group]
            if self.wanted(job):
                return job
        return None

    def next_group(self, worker: Worker) -> str | None:
        """Its own group, else one that nobody works on, else the longest."""
        if worker.group in self.groups:
            return worker.group
        taken = {other.job.group for other in self.workers.values() if other.job is not None}
        free = next((group for group in self.groups if group not in taken), None)
        return free if free is not None else max(self.groups, key=lambda g: len(self.groups[g]), default=None)

    def start(self) -> None:
        """Start a worker; it reports when it is ready."""
        self.add(Worker(bench=self.bench))

    def add(self, worker: Worker) -> None:
        """Listen to a worker."""
        self.workers[worker.output.fileno()] = worker
        self.selector.register(worker.output, selectors.EVENT_READ)

    def release(self) -> list[Worker]:
        """The idle workers, which this run then no longer has."""
        idle = [worker for worker in self.workers.values() if worker.ready and worker.job is None]
        for worker in idle:
            self.selector.unregister(worker.output)
            del self.workers[worker.output.fileno()]
        return idle

    def bury(self, worker: Worker) -> Iterator[tuple[str, Outcome]]:
        """Replace a worker that has died; its job will run alone, or is given up."""
        self.close(worker)
        if not worker.ready:
            self.stillborn += 1
            if self.stillborn >= STILLBORN:
                raise TiersimError(f"workers do not start: {worker.how()}")
        job = worker.job
        if job is not None and worker.is_stuck:
            yield job.id, stuck(job)
        elif job is not None:
            self.deaths[job.id] = self.deaths.get(job.id, 0) + 1
            if self.deaths[job.id] < TRIES:
                self.suspects.append(job)
            else:
                yield job.id, killed(worker.how())
        self.replace()

    def end(self, worker: Worker) -> Iterator[tuple[str, Outcome]]:
        """End a worker whose job takes too long, and replace it."""
        self.close(worker)
        job = worker.job
        assert job is not None
        assert job.limit_s is not None
        yield job.id, timed_out(job.limit_s)
        self.replace()

    def replace(self) -> None:
        """Replace a worker that has ended, if there are jobs left for it."""
        if self.groups or (self.suspects and not self.workers):
            self.start()

    def close(self, worker: Worker) -> None:
        """End a worker and forget it."""
        self.selector.unregister(worker.output)
        del self.workers[worker.output.fileno()]
        worker.close()

    def stop(self) -> None:
        """End all workers immediately, whatever they do."""
        for worker in list(self.workers.values()):
            self.close(worker)
        self.selector.close()


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def executor_for(jobs: int | None, cells: int, apart: bool) -> Executor:
    """This process for few cells or one job, else a pool of `jobs` processes, by default one per processor.

    apart: whether the cells need a process that can be ended: to enforce a time limit, or for policies of others.
    """
    count = (1 if cells <= FEW else usable_cpus()) if jobs is None else jobs
    return Inline() if count == 1 and not apart else Local(count)
