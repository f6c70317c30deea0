"""The work of a Dask worker: it runs cells of a message in a process of their own and returns those that are done."""

from __future__ import annotations

import json
import platform
import time

from sim.errors import TiersimError
from sim.sweeps.cell import Outcome
from sim.sweeps.execute import Job
from sim.sweeps.process import Died, Worker

BATCH_S = 0.7  # after which a message goes back with what is done
IDLE_S = 60.0  # a process ends that a Dask worker has not used for so long

Batch = tuple[list[tuple[str, Outcome]], str | None]

_idle: list[Worker] = []  # of this Dask worker, ready


def run_batch(tasks: list[str], stamp: str, folder: str) -> Batch:
    """Outcomes of the first of these tasks, and how the process died on the next one, if it did.

    folder: the driver's working folder, to which paths are relative.

    Raises TiersimError if the program here is of another version.
    """
    began = time.monotonic()
    done: list[tuple[str, Outcome]] = []
    worker = None
    try:
        for text in tasks:
            job = Job(**json.loads(text))
            worker = worker or _worker(stamp, folder)
            try:
                outcome = worker.answer(job)
            except Died as error:
                worker = None
                return done, str(error)
            if worker.process.returncode is not None:
                worker = None
            outcome["ran"]["host"] = platform.node()
            done.append((job.id, outcome))
            if time.monotonic() - began > BATCH_S:
                break
    finally:
        if worker is not None:
            _idle.append(worker)
    return done, None


def _worker(stamp: str, folder: str) -> Worker:
    """A process that runs the same program in the same folder, an idle one or a new one."""
    while _idle:
        worker = _idle.pop()
        if worker.process.poll() is None and worker.serves == (stamp, folder):
            return worker
        worker.close()
    worker = Worker(idle_s=IDLE_S, folder=folder)
    try:
        worker.begin(stamp)
    except Died as error:
        raise TiersimError(f"dask: {platform.node()}: no process starts there: {error}") from None
    except TiersimError:
        worker.close()
        raise TiersimError(f"dask: {platform.node()}: another version of this program is there") from None
    return worker
