"""How long a policy may take, and how many actions it may return: one that never answers is stopped and named."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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

GRACE_S = 10.0
"""By how much a policy exceeds its limit, until the process is ended in which nothing stops it."""

STUCK = 75
"""The exit status of a process that a policy kept from going on."""

ACTIONS, ACTIONS_PER_OP = 10_000, 50
"""How many actions a plan may have by default, for a trace of any size and for each of its ops."""

_most_actions: ContextVar[int | None] = ContextVar("most_actions", default=None)


@dataclass
class _Allowance:
    """Processor time for the body of a `limited`.

    seconds: how much.
    more: where the limit is set.
    began, used_before: the clock, and the processor time of this process, when it began; later by what an allowance
        inside has taken.
    users: the user's own limit of processor time.
    said: of the interruption that the body has had, "" before there was one.
    """

    seconds: float
    more: str
    began: float
    used_before: float
    users: int
    said: str = ""

    def over(self, later_s: float = 0.0) -> str:
        """How it has been exceeded, by `later_s` at least; "" while it has not.

        On the clock it is exceeded by who sleeps; where others use the processor it is not yet.
        """
        passed, used = _clock() - self.began, _processor() - self.used_before
        if used > self.seconds + later_s:
            return f"no answer after {self.seconds:g} s of processor time; {self.more}"
        most = ASLEEP * self.seconds + later_s
        if passed > most and (used <= IDLE * passed or passed >= BUSY * self.seconds + later_s):
            return f"no answer after {passed:.1f} s, most of them asleep; {self.more}"
        return ""


_clock, _processor, _sleep = time.monotonic, time.process_time, time.sleep  # whatever a policy makes of the module's
_innermost: list[_Allowance] = []
"""The allowances of the main thread, one inside another; `_watch` reads the last one."""

_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


class TooLong(BaseException):
    """A policy that does not answer; no `Exception`, so that no policy takes it for one of its own."""


@contextmanager
def limited(
    seconds: float | None, *, actions: int | None = None, more: str = "--time-limit allows more"
) -> Iterator[None]:
    """Raise TooLong where the body takes more processor time than that, or sleeps for `ASLEEP` times as long.

    The time of one inside another does not count for the outer one.

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
def limited_again() -> Iterator[None]:
    """As much time again for the body as the innermost `limited` around it allows; no limit where there is none."""
    outer = _allowance.get()
    if outer is None:
        yield
    else:
        with _interrupted(outer.seconds, outer.more):
            yield


@contextmanager
def _interrupted(seconds: float, more: str) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        if frame is None or frame.f_code is here:
            return  # it is over: what is below must run
        if number == signal.SIGALRM and not mine.over():
            return  # others use the processor
        mine.said = mine.over() or f"no answer after {seconds:g} s of processor time; {more}"
        raise TooLong(mine.said)

    outer, allowed = _allowance.get(), resource.getrlimit(resource.RLIMIT_CPU)
    began, used_before = _clock(), _processor()
    mine = _Allowance(seconds, more, began, used_before, allowed[0] if outer is None else outer.users)
    here = _interrupted.__wrapped__.__code__  # type: ignore[attr-defined]
    old = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU)}
    timers = {
        timer: signal.setitimer(timer, limit, AGAIN_S)
        for timer, limit in ((signal.ITIMER_PROF, seconds), (signal.ITIMER_REAL, ASLEEP * seconds))
    }
    _allow(mine)
    inside = _allowance.set(mine)
    _innermost.append(mine)
    try:
        yield
        if mine.said:
            raise TooLong(mine.said)  # what was interrupted took it for an error of its own
    except Exception:
        if mine.said:
            raise TooLong(mine.said) from None
        raise
    finally:
        _allowance.reset(inside)
        resource.setrlimit(resource.RLIMIT_CPU, allowed)
        if outer is not None:
            outer.began += _clock() - began
            outer.used_before += _processor() - used_before
            _allow(outer)
        _innermost.pop()  # not before the outer one has its time back
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in old.items():
            signal.signal(number, handler)
        for timer, (left, interval) in timers.items():
            if left:  # whoever had set it still waits for it
                signal.setitimer(timer, left, interval)


def limit_space(memory: int, file: int) -> None:
    """Have this process, and those that it starts, take no more bytes of memory (MemoryError) or per file (OSError).

    Lower limits that it has stay.
    """
    for kind, most in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, file)):
        soft, hard = resource.getrlimit(kind)
        lowest = min([most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
        resource.setrlimit(kind, (lowest, hard))


def end_where_stuck(parent: int | None = None) -> None:
    """Have this process end with status `STUCK`, in words, where a policy in it takes no interruption.

    For processes of this program alone, once: a policy may swallow every exception, or ignore the signals.

    parent: the number of the process that started this one, to end when that one has; None to go on.
    """
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int | None) -> None:
    while True:
        _sleep(AGAIN_S)
        if parent is not None and os.getppid() != parent:
            os._exit(STUCK)
        current = _innermost[-1:]
        if current and (said := current[0].over(GRACE_S)):
            os.write(2, f"tiersim: {said}; it takes no interruption\n".encode())
            os._exit(STUCK)


def _allow(allowance: _Allowance) -> None:
    """Have the kernel send SIGXCPU when an allowance has been used for a while, and each second from then on.

    A limit of the user's that comes sooner stays.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    sooner = [limit for limit in (allowance.users, hard) if limit != resource.RLIM_INFINITY]
    ends = math.ceil(allowance.used_before + allowance.seconds + BEHIND_S)
    resource.setrlimit(resource.RLIMIT_CPU, (min(ends, *sooner, sys.maxsize), hard))


def counted(actions: Iterable[T], ops: int) -> tuple[T, ...]:
    """The actions of a plan for a trace of so many ops. Raises IllegalPlan for more of them than a plan may have."""
    most = _most_actions.get()
    most = ACTIONS + ACTIONS_PER_OP * ops if most is None else most
    found = actions if type(actions) is tuple else tuple(islice(actions, most + 1))
    if len(found) > most:
        raise IllegalPlan(f"a plan of more than {most:,} actions for {ops:,} ops; --most-actions allows more")
    return found
