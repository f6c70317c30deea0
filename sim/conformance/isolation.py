"""A check in a process of its own, so that a policy that ends its process does not end the caller's."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sim.conformance.across_processes import alone
from sim.conformance.memory import check_outcome
from sim.conformance.suite import Broken, Report, check_policy, sentence
from sim.errors import PolicyError, PolicyFailed, TiersimError
from sim.limits import BUSY, SECONDS, STUCK_BY, limit_space
from sim.policies import load

START_S = 60.0
"""Seconds that a process may need besides its examples: it starts another one, and imports."""

MOST_MEMORY, MOST_WRITTEN = 8 << 30, 256 << 20
"""Bytes of memory, and of any file, of a process that checks a policy, so that it cannot take the machine's."""

CLOSING_S = 1.0
"""After a process has ended, how long its last words may take."""

SILENT = object()
"""Instead of an answer: the process said nothing for too long."""

BEAT = ""
"""The line that says that the check goes on."""


def checked(
    name: str,
    parameters: Mapping[str, Any],
    *,
    examples: int,
    seed: int,
    time_limit_s: float = SECONDS,
    folder: str | None = None,
) -> tuple[dict[str, Any], str]:
    """The report on a policy, as JSON values and as text.

    If the process ends without a report, law 6 is broken, and so it is if nothing is heard of it for so long that no
    example can still be running: a policy can keep its own process from stopping it. Raises PolicyError or
    PolicyFailed as `load` does.
    """
    job = {"name": name, "parameters": dict(parameters), "examples": examples, "seed": seed}
    job |= {"time_limit_s": time_limit_s, "folder": folder}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "sim.conformance.isolation", str(os.getpid())]
    silence_s = BUSY * time_limit_s + START_S if time_limit_s else None
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            answer = _answer(process, json.dumps(job), silence_s)
        finally:
            _end(process)
    if isinstance(answer, dict) and "error" in answer:
        raise {"PolicyError": PolicyError}.get(answer["error"], PolicyFailed)(answer["text"])
    if not isinstance(answer, dict):
        text = f"the process that checks it ends without a report (exit status {process.returncode})"
        if process.returncode in STUCK_BY:
            text = "it takes no interruption: its process was ended after its limit of time; --time-limit allows more"
        if answer is SILENT:
            text = f"nothing was heard of it for {silence_s:g} s, and it could not be stopped from within"
        broken = Broken("outcome", sentence(check_outcome), 1, text)
        report = Report(name, seed, examples=0, skipped=0, refused=0, broken=(broken,))
        return report.as_dict(), report.as_text()
    return answer["record"], answer["text"]


def _answer(process: subprocess.Popen[str], job: str, silence_s: float | None) -> Any:
    """What the process answers to a job; None if it ends without an answer, `SILENT` if it says nothing for so long."""
    said: queue.Queue[str | None] = queue.Queue()

    def listen() -> None:
        with suppress(ValueError):  # closed meanwhile: nobody listens any more
            for line in process.stdout or ():
                said.put(line)
        said.put(None)

    threading.Thread(target=listen, daemon=True).start()
    if process.stdin is not None:
        try:
            process.stdin.write(job)
            process.stdin.close()
        except BrokenPipeError:  # it has ended, which is seen below
            process.stdin = None
    last = None
    heard = time.monotonic()
    while True:
        try:
            line = said.get(timeout=CLOSING_S)
        except queue.Empty:
            if process.poll() is not None:  # a process that it has started keeps its output open
                break
            if silence_s is not None and time.monotonic() - heard > silence_s:
                return SILENT
            continue
        if line is None:
            break
        heard = time.monotonic()
        last = line if line.strip() != BEAT else last
    process.wait()
    try:
        return json.loads(last or "") if not process.returncode else None
    except ValueError:
        return None


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, if it still runs, and those that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, where it has ended
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Read a job from standard input and print its report."""
    limit_space(MOST_MEMORY, MOST_WRITTEN)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a policy prints is not part of the answer
    job = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        policy = load(job["name"], **job.pop("parameters"))
        report = check_policy(policy, **job, beat=lambda: print(BEAT, file=out, flush=True))
        answer = {"record": report.as_dict(), "text": report.as_text()}
    except TiersimError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    json.dump(answer, out)
    out.close()


if __name__ == "__main__":
    alone(main)
