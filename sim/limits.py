"""How long a policy may take, and how many actions it may return: one that never answers is stopped and named."""

from __future__ import annotations

import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeVar

from sim.errors import IllegalPlan

T = TypeVar("T")
SECONDS = 30.0
"""Processor time for one example of the law unless another limit is given; examples are small."""

RUN_SECONDS = 600.0
"""Processor time for one policy of `tiersim run` and `compare` unless another limit is given."""

CELL_SECONDS = 3600.0
"""Processor time for one cell of a study that gives no limit."""

ASLEEP, BUSY = 3, 20
"""How many times as long it may take on the clock: one that hardly uses a processor, and any on a busy machine."""

IDLE = 0.05
"""The share of the time below which a policy hardly uses a processor."""

BEHIND_S = 1.0
"""By how much the kernel's own limit comes after the timers, which a policy can clear."""

AGAIN_S = 0.5
"""Between two interruptions: one that falls into a callback of the garbage collector is lost there."""

ACTIONS, ACTIONS_PER_OP = 10_000, 50
"""How many actions a plan may have by default, for a trace of any size and for each of its ops."""

_most_actions: ContextVar[int | None] = ContextVar("most_actions", default=None)


class TooLong(BaseException):
    """A policy that does not answer; no `Exception`, so that no policy takes it for one of its own."""


@contextmanager
def limited(
    seconds: float | None, *, actions: int | None = None, more: str = "--time-limit allows more"
) -> Iterator[None]:
    """Raise TooLong where the body takes more processor time than that, or sleeps for `ASLEEP` times as long.

    seconds: None or 0 for no limit; nor is there one in a thread other than the main one, which alone can be
        interrupted.
    actions: how many actions plans may have meanwhile; None for what the trace's size suggests.
    more: where the limit is set, as the end of the message.
    """
    allowed = _most_actions.set(actions)
    try:
        if not seconds or threading.current_thread() is not threading.main_thread():
            yield
        else:
            with _interrupted(seconds, more):
                yield
    finally:
        _most_actions.reset(allowed)


@contextmanager
def _interrupted(seconds: float, more: str) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        if frame is None or frame.f_code is here:
            return  # it is over: what is below must run
        how = f"{seconds:g} s of processor time"
        if number == signal.SIGALRM:
            passed, used = time.monotonic() - began, time.process_time() - used_before
            if used > IDLE * passed and passed < BUSY * seconds:
                return  # others use the processor
            how = f"{passed:.1f} s, most of them asleep"
        raise TooLong(f"no answer after {how}; {more}")

    began, used_before = time.monotonic(), time.process_time()
    here = _interrupted.__wrapped__.__code__  # type: ignore[attr-defined]
    old = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU)}
    timers = {
        timer: signal.setitimer(timer, limit, AGAIN_S)
        for timer, limit in ((signal.ITIMER_PROF, seconds), (signal.ITIMER_REAL, ASLEEP * seconds))
    }
    allowed = resource.getrlimit(resource.RLIMIT_CPU)
    _allow(used_before + seconds + BEHIND_S)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, allowed)
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in old.items():
            signal.signal(number, handler)
        for timer, (left, interval) in timers.items():
            if left:  # whoever had set it still waits for it
                signal.setitimer(timer, left, interval)


def _allow(seconds: float) -> None:
    """Have the kernel send SIGXCPU after so much processor time of this process, and each second from then on.

    A limit of the user's that comes sooner stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    sooner = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_CPU, (min(math.ceil(seconds), *sooner, sys.maxsize), hard))


def counted(actions: Iterable[T], ops: int) -> tuple[T, ...]:
    """The actions of a plan for a trace of so many ops. Raises IllegalPlan for more of them than a plan may have."""
    most = _most_actions.get()
    most = ACTIONS + ACTIONS_PER_OP * ops if most is None else most
    found = actions if type(actions) is tuple else tuple(islice(actions, most + 1))
    if len(found) > most:
        raise IllegalPlan(f"a plan of more than {most:,} actions for {ops:,} ops; --most-actions allows more")
    return found
