"""Cells on a cluster: on the workers of a Dask scheduler, given by address or file, or started through SLURM.

A Dask worker runs each cell in a process of its own, as `pool` does, so that a cell that dies or takes too long
affects no other and can be identified. A message carries several cells of one group and returns after about a second
with those that are done. The scheduler and all workers need the same version of this program, and the workers need to
share a file system with the driver for the user's own files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import queue
import re
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import TiersimError, near
from sim.sweeps.batch import run_batch
from sim.sweeps.cell import Outcome
from sim.sweeps.execute import TRIES, Job, killed
from sim.sweeps.identity import sources_stamp

if TYPE_CHECKING:
    from distributed import Client, Future

MISSING = "needs Dask: pip install 'tiersim[cluster]'"
ADDRESS = re.compile(r"[a-z]+://.+|[\w.-]+:\d+")
CONNECT_S = 20  # to reach a scheduler
ARRIVE_S = 60  # for a first worker, where nobody queues for one
LOOK_S = 2.0  # between two looks at which workers there are
BATCH = 64  # cells of a message at most


class Dask:
    """Runs cells on the workers of a Dask scheduler.

    where: its address ("tcp://host:8786"), its scheduler file, or "slurm" to start workers as jobs of SLURM.
    jobs: how many of those.
    slurm: keywords of `dask_jobqueue.SLURMCluster`, and `submit_command`, `cancel_command`.

    Raises TiersimError if Dask is not installed or the arguments are incompatible.
    """

    def __init__(self, where: str, *, jobs: int | None = None, slurm: Mapping[str, Any] | None = None) -> None:
        self.where = where
        self.jobs = jobs
        self.slurm = dict(slurm or {})
        try:
            import distributed  # noqa: F401
        except ImportError:
            raise TiersimError(f"dask: value {where!r}: {MISSING}") from None
        if where == "slurm":
            if jobs is None:
                raise TiersimError("dask: value 'slurm': say how many workers to start (--jobs N)")
            return
        if jobs is not None:
            raise TiersimError(f"jobs: value {jobs}: goes with dask 'slurm'; of {where!r} all workers are used")
        if slurm:
            raise TiersimError(f"slurm: goes with dask 'slurm', not with {where!r}")
        if not ADDRESS.fullmatch(where) and not Path(where).is_file():
            hint = near(where, ["slurm"])
            raise TiersimError(
                f"dask: value {where!r}: expected an address such as 'tcp://host:8786', a scheduler file that is "
                f"there, or 'slurm'{hint if 'did you mean' in hint else ''}"
            )

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[str, Outcome]]:
        """See `Executor`. Cells under way on a foreign scheduler's workers end by themselves."""
        if not jobs:
            return
        with _quiet(), self._client() as (client, watch):
            feed = _Feed(client, jobs, watch)
            try:
                yield from feed.run()
            finally:
                feed.stop()

    @contextlib.contextmanager
    def _client(self) -> Iterator[tuple[Client, Callable[[int], None]]]:
        """A client, and a function that is called now and then with the number of threads."""
        from distributed import Client

        if self.where == "slurm":
            from sim.sweeps.slurm import Workers

            assert self.jobs is not None
            with Workers(self.jobs, self.slurm) as workers, Client(workers.cluster) as client:
                yield client, workers.keep
            return
        where = {"address": self.where} if ADDRESS.fullmatch(self.where) else {"scheduler_file": self.where}
        try:
            client = Client(**where, timeout=CONNECT_S)
        except (OSError, ValueError, KeyError) as error:
            raise TiersimError(f"dask: value {self.where!r}: no scheduler answers there ({_line(error)})") from None
        with client:
            yield client, _Patience().notice


class _Patience:
    """Waits for workers for a limited time, since nobody is known to start any."""

    def __init__(self) -> None:
        self.missed = time.monotonic()

    def notice(self, threads: int) -> None:
        """Raises TiersimError if there have been none for long."""
        now = time.monotonic()
        if threads:
            self.missed = now
        elif now - self.missed > ARRIVE_S:
            raise TiersimError(f"dask: the scheduler has no workers, and none has come in {ARRIVE_S:g} s")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Dask's own messages are not shown: what matters of them is raised here."""
    loggers = [logging.getLogger(name) for name in ("distributed", "dask_jobqueue", "tornado.application")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Feed:
    """The driver's side: jobs to hand out, jobs under way, and jobs on which a process died.

    watch: called now and then with the number of threads of all workers.
    """

    def __init__(self, client: Client, jobs: Sequence[Job], watch: Callable[[int], None]) -> None:
        self.client = client
        self.watch = watch
        self.groups: OrderedDict[str, deque[Job]] = OrderedDict()
        for job in jobs:
            self.groups.setdefault(job.group, deque()).append(job)
        self.suspects: deque[Job] = deque()
        self.deaths: dict[str, int] = {}
        self.flying: dict[Future, list[Job]] = {}
        self.landed: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self.names = map(f"tiersim-{uuid.uuid4().hex[:8]}-{{}}".format, itertools.count())
        self.about = sources_stamp(), os.getcwd()
        self.threads = 0
        self.looked = -math.inf

    def run(self) -> Iterator[tuple[str, Outcome]]:
        """Outcomes as they come."""
        while self.groups or self.suspects or self.flying:
            self.look()
            self.give()
            with contextlib.suppress(queue.Empty):
                yield from self.land(self.landed.get(timeout=LOOK_S))

    def look(self) -> None:
        """Look up the workers now and then."""
        now = time.monotonic()
        if now - self.looked > LOOK_S:
            self.looked = now
            try:
                self.threads = sum(self.client.nthreads().values())
            except OSError as error:
                raise TiersimError(_gone(error)) from None
            self.watch(self.threads)

    def give(self) -> None:
        """Keep every thread busy with one message queued; suspects run alone, one by one."""
        while self.groups and len(self.flying) < 2 * self.threads:
            group, jobs = next(iter(self.groups.items()))
            waiting = sum(map(len, self.groups.values()))
            size = min(BATCH, max(1, waiting // (4 * self.threads)))
            self.send([jobs.popleft() for _ in range(min(size, len(jobs)))])
            if not jobs:
                del self.groups[group]
        if self.suspects and not self.groups and not self.flying:
            self.send([self.suspects.popleft()])

    def send(self, batch: list[Job]) -> None:
        """Give a message to the scheduler."""
        future = self.client.submit(
            run_batch,
            [json.dumps({"task": job.task, "group": job.group}) for job in batch],
            *self.about,
            key=next(self.names),
            pure=False,
        )
        self.flying[future] = batch
        future.add_done_callback(self.landed.put)

    def land(self, future: Future) -> Iterator[tuple[str, Outcome]]:
        """The outcomes in a returned message; tasks that it did not reach are handed out once more."""
        from distributed import KilledWorker

        batch = self.flying.pop(future)
        if future.status == "error":
            error = future.exception()
            if not isinstance(error, KilledWorker):
                raise error if isinstance(error, TiersimError) else TiersimError(_foreign(error))
            for job in batch:
                yield from self.suspect(job, f"{error.allowed_failures + 1} Dask workers died")
            return
        if future.status != "finished":
            raise TiersimError(_gone(future.status))
        done, died = future.result()
        for id, outcome in done:
            self.deaths.pop(id, None)
            yield id, outcome
        over = {id for id, _ in done}
        rest = [job for job in batch if job.id not in over]
        if died is not None:
            yield from self.suspect(rest.pop(0), died)
        if rest:
            waiting = self.groups.setdefault(rest[0].group, deque())
            waiting.extendleft(reversed(rest))

    def suspect(self, job: Job, how: str) -> Iterator[tuple[str, Outcome]]:
        """A process died on a job: it will run alone, or is given up."""
        self.deaths[job.id] = self.deaths.get(job.id, 0) + 1
        if self.deaths[job.id] < TRIES:
            self.suspects.append(job)
        else:
            yield job.id, killed(how)

    def stop(self) -> None:
        """Take back messages that no worker has begun."""
        with contextlib.suppress(OSError):
            self.client.cancel(list(self.flying), force=True)


def _gone(what: object) -> str:
    return f"dask: the connection to the scheduler was lost ({_line(what)}); all cells finished before are kept"


def _foreign(error: BaseException) -> str:
    """An error of a scheduler or worker that is not this program's own."""
    while error.__cause__ is not None:
        error = error.__cause__
    needs = "scheduler and workers need this program, in the same version: " if isinstance(error, ImportError) else ""
    return f"dask: {needs}{_line(error)}"


def _line(what: object) -> str:
    text = f"{type(what).__name__}: {what}" if isinstance(what, BaseException) else str(what)
    return " ".join(text.split())[:300]
