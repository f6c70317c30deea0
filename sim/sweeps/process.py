"""One process that runs cells: `sim.sweeps.worker`, a line of JSON in, a line out."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import IO

from sim.errors import TiersimError
from sim.limits import STUCK_BY
from sim.sweeps.cell import Outcome
from sim.sweeps.execute import Job, stuck, timed_out

CHANGED = "the program was changed while the sweep ran; continue with --resume"
BENCH = "sim.sweeps.cell:Bench"
"""What runs the cells of a sweep."""


class Died(Exception):
    """A process ended without an outcome; the text says how."""


class Worker:
    """A process that runs one job at a time, and can be ended in the middle of one.

    idle_s: seconds without a job after which it ends by itself; None for never.
    folder: its working folder, if that exists; None for that of this process.
    bench: `module:Class` of what runs the jobs; its method `run` takes a task and returns an outcome, both JSON values.
    """

    def __init__(self, idle_s: float | None = None, folder: str | None = None, bench: str = BENCH) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment.setdefault(name, "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from sim.sweeps.worker import main; main({idle_s}, {bench!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=folder if folder and os.path.isdir(folder) else None,
            start_new_session=True,  # ctrl-C is for the driver, which then stops them
        )
        self.ready = False
        self.serves = ("", folder)
        self.job: Job | None = None
        self.group = ""
        self._ends: float | None = None
        self._read = bytearray()

    @property
    def output(self) -> IO[bytes]:
        """The file descriptor of its outcomes."""
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, job: Job) -> None:
        """Hand over a job; the death of a worker is noticed when its output ends."""
        self.job, self.group = job, job.group
        self._ends = None if job.limit_s is None else time.monotonic() + job.limit_s
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(job.task).encode() + b"\n")
            self.process.stdin.flush()

    @property
    def left_s(self) -> float | None:
        """Seconds until its job is overdue, None for no limit."""
        if self.job is None or self._ends is None:
            return None
        return max(0.0, self._ends - time.monotonic())

    def lines(self) -> list[bytes] | None:
        """Whole lines that it has written; None once its output has ended."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        if not chunk:
            return None
        self._read += chunk
        *whole, rest = self._read.split(b"\n")
        self._read = bytearray(rest)
        return [bytes(line) for line in whole]

    def begin(self, stamp: str) -> None:
        """Wait until it is ready. Raises Died; TiersimError if its sources are not those of the stamp."""
        if self._next() != stamp:
            raise TiersimError(CHANGED)
        self.ready, self.serves = True, (stamp, self.serves[1])

    def answer(self, job: Job) -> Outcome:
        """Run one job and wait for it. Raises Died. A job that exceeds its time limit ends the process."""
        self.give(job)
        try:
            outcome: Outcome = json.loads(self._next())
        except TimeoutError:
            self.close()
            assert job.limit_s is not None
            return timed_out(job.limit_s)
        except Died:
            if self.is_stuck:
                return stuck(job)
            raise
        self.job = None
        return outcome

    def _next(self) -> str:
        """The next line. Raises Died, TimeoutError."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            while True:
                if not selector.select(self.left_s):
                    raise TimeoutError
                lines = self.lines()
                if lines is None:
                    self.close()
                    raise Died(self.how())
                if lines:
                    return lines[0].decode()

    def close(self) -> None:
        """End it immediately, whatever it does."""
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            if end is not None:
                with contextlib.suppress(OSError):  # data that it has not read
                    end.close()

    @property
    def is_stuck(self) -> bool:
        """Whether it ended because its policy took no interruption: again it would, too."""
        return self.process.returncode in STUCK_BY

    def how(self) -> str:
        """How it ended."""
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
