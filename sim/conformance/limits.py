"""The time that a policy may take for an example: one that never answers is stopped and named."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 30.0
"""Processor time for one example unless another limit is given; examples are small."""

ASLEEP = 3
"""How many times as long it may take on the clock, on a machine that does other things, too."""


class TooLong(BaseException):
    """A policy that does not answer; no `Exception`, so that no policy takes it for one of its own."""


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise TooLong where the body takes more processor time than that, or waits for `ASLEEP` times as long.

    None, or a thread other than the main one: no limit, since only the main thread can be interrupted.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        how = f"{seconds:g} s of processor time" if number == signal.SIGPROF else f"{ASLEEP * seconds:g} s asleep"
        raise TooLong(f"no answer after {how}; --time-limit allows more")

    old = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, ASLEEP * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in old.items():
            signal.signal(number, handler)
