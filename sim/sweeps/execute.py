"""Where cells run: in this process, or in a pool of local ones that survives the death of any of them.

One protocol: tasks in, `(id, outcome)` out as they finish. Tasks and outcomes are JSON values, so that an executor
may be on another machine; each gives the same rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from sim.errors import TiersimError
from sim.sweeps.cell import Bench, Outcome
from sim.sweeps.identity import sources_stamp

TRIES = 3
"""How often a cell may kill its worker: once among others, and then alone."""

STILLBORN = 10
"""Workers in a row that may die before they are ready."""


@dataclass(frozen=True)
class Job:
    """A task, and the group whose cells share a trace."""

    task: Mapping[str, Any]
    group: str

    @property
    def id(self) -> str:
        """The cell's."""
        return str(self.task["id"])


class Executor(Protocol):
    """Runs jobs, in whatever order."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[str, Outcome]]:
        """Yield each job's id and outcome once, as it finishes; closing the iterator stops all work."""


class Inline:
    """Runs jobs one after another in this process. It does not survive a cell that kills it."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[str, Outcome]]:
        """See `Executor`."""
        bench = Bench()
        for job in jobs:
            yield job.id, bench.run(job.task)


@dataclass(eq=False)
class _Worker:
    """A process that runs one job at a time: a line of JSON in, a line out."""

    process: subprocess.Popen[bytes]
    ready: bool = False
    job: Job | None = None
    group: str = ""
    read: bytearray = field(default_factory=bytearray)

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, job: Job) -> None:
        """Hand over a job; a worker that is gone is noticed when its output ends."""
        self.job, self.group = job, job.group
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(job.task).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self) -> list[bytes] | None:
        """Whole lines that it has written; None once its output has ended."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        if not chunk:
            return None
        self.read += chunk
        *whole, rest = self.read.split(b"\n")
        self.read = bytearray(rest)
        return [bytes(line) for line in whole]


class Local:
    """A pool of processes on this machine.

    Each has one job at a time, so that a death costs that job alone. It is tried again, twice and with
    nothing else running, and then its outcome is `killed`. jobs: how many processes.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[str, Outcome]]:
        """See `Executor`."""
        pool = _Pool(jobs, min(self.jobs, len(jobs)))
        try:
            yield from pool.run()
        finally:
            pool.stop()


class _Pool:
    """The workers of one run, the jobs not yet given, by group, and those whose worker died."""

    def __init__(self, jobs: Sequence[Job], size: int) -> None:
        self.groups: OrderedDict[str, deque[Job]] = OrderedDict()
        for job in jobs:
            self.groups.setdefault(job.group, deque()).append(job)
        self.size = size
        self.suspects: deque[Job] = deque()
        self.deaths: dict[str, int] = {}
        self.stillborn = 0
        self.stamp = sources_stamp()
        self.workers: dict[int, _Worker] = {}
        self.selector = selectors.DefaultSelector()

    def run(self) -> Iterator[tuple[str, Outcome]]:
        """Outcomes as they come."""
        for _ in range(self.size):
            self.start()
        while self.groups or self.suspects or any(worker.job for worker in self.workers.values()):
            for key, _ in self.selector.select():
                worker = self.workers[key.fd]
                lines = worker.lines()
                if lines is None:
                    yield from self.bury(worker)
                    continue
                for line in lines:
                    if worker.job is None:
                        if line.decode() != self.stamp:
                            raise TiersimError("the program was changed while the sweep ran; --resume starts it again")
                        worker.ready, self.stillborn = True, 0
                    else:
                        job, worker.job = worker.job, None
                        self.deaths.pop(job.id, None)
                        yield job.id, json.loads(line)
            self.feed()

    def feed(self) -> None:
        """Give each idle worker a job, of the group that it has just worked on where there is one."""
        idle = [worker for worker in self.workers.values() if worker.ready and worker.job is None]
        for worker in idle:
            group = self.next_group(worker)
            if group is None:
                break
            jobs = self.groups[group]
            worker.give(jobs.popleft())
            if not jobs:
                del self.groups[group]
        if not self.groups and self.suspects and not any(worker.job for worker in self.workers.values()):
            ready = next((worker for worker in idle if worker.job is None), None)
            if ready is not None:
                ready.give(self.suspects.popleft())

    def next_group(self, worker: _Worker) -> str | None:
        """Its own, else one that nobody works on, else the longest."""
        if worker.group in self.groups:
            return worker.group
        taken = {other.job.group for other in self.workers.values() if other.job is not None}
        free = next((group for group in self.groups if group not in taken), None)
        return free if free is not None else max(self.groups, key=lambda g: len(self.groups[g]), default=None)

    def start(self) -> None:
        """Start a worker; it says when it is ready."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment.setdefault(name, "1")
        process = subprocess.Popen(
            [sys.executable, "-c", "from sim.sweeps.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # ctrl-C is for the driver, which then stops them
        )
        worker = _Worker(process)
        self.workers[worker.output.fileno()] = worker
        self.selector.register(worker.output, selectors.EVENT_READ)

    def bury(self, worker: _Worker) -> Iterator[tuple[str, Outcome]]:
        """Replace a worker that is dead; its job goes to those that run alone, or is given up."""
        self.close(worker)
        code = worker.process.returncode
        if not worker.ready:
            self.stillborn += 1
            if self.stillborn >= STILLBORN:
                raise TiersimError(f"workers do not start: {_how(code)}")
        job = worker.job
        if job is not None:
            self.deaths[job.id] = self.deaths.get(job.id, 0) + 1
            if self.deaths[job.id] < TRIES:
                self.suspects.append(job)
            else:
                row = {"status": "killed", "fits": None, "error": f"the process that ran it died {TRIES} times"}
                yield job.id, {"row": row, "ran": {"how": _how(code)}}
        if self.groups or (self.suspects and not self.workers):
            self.start()

    def close(self, worker: _Worker) -> None:
        """End a worker and forget it."""
        self.selector.unregister(worker.output)
        del self.workers[worker.output.fileno()]
        worker.process.kill()
        worker.process.wait()
        for end in (worker.process.stdin, worker.process.stdout):
            if end is not None:
                with contextlib.suppress(OSError):  # what it was still to be given
                    end.close()

    def stop(self) -> None:
        """End all workers at once, whatever they do."""
        for worker in list(self.workers.values()):
            self.close(worker)
        self.selector.close()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def executor_for(jobs: int | None, cells: int) -> Executor:
    """In this process for few cells or one job, else a pool of `jobs` processes, by default one a processor."""
    count = (1 if cells <= FEW else usable_cpus()) if jobs is None else jobs
    return Inline() if count == 1 else Local(count)


FEW = 16
"""Cells that are done before a pool has started."""
