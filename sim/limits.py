"""How long a policy may take, and how many actions it may return: one that never answers is stopped and named."""

from __future__ import annotations

import contextlib
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
from typing import Any, NoReturn, TypeVar

from sim.errors import IllegalPlan, PolicyFailed, TiersimError

T = TypeVar("T")
SECONDS = 30.0
"""Processor time for one example of the law unless another limit is given; examples are small."""

RUN_SECONDS = 600.0
"""Processor time for one policy of `tiersim run` and `compare` unless another limit is given."""

CELL_SECONDS = 3600.0
"""Processor time for one cell of a study that gives no limit."""

MOST_S = 10**8
"""The longest limit, three years, of which `BUSY` times as much is still a time that a timer takes."""

ASLEEP, BUSY = 3, 20
"""How many times as long it may take on the clock: one that hardly uses a processor, and any on a busy machine."""

IDLE = 0.05
"""The share of the time below which a policy hardly uses a processor."""

BEHIND_S = 1.0
"""By how much the kernel's own limit comes after the timers, which a policy can clear."""

AGAIN_S = 0.5
"""Between two interruptions: one that falls into a callback of the garbage collector is lost there."""

TICK_S = 0.05
"""By how much a timer of processor time may be early."""

MACHINERY = frozenset({__file__, contextlib.__file__})
"""Files of what begins and ends a limit: an exception there would leave its timers running for whoever comes next."""

GRACE_S = 10.0
"""By how much a policy exceeds its limit, until the process is ended in which nothing stops it."""

STUCK = 75
"""The exit status of a process that a policy kept from going on."""

STUCK_BY = (STUCK, -signal.SIGVTALRM)
"""Exit statuses of such a process; the second where not even a thread could go on, as in a loop of C code."""

CLOSING_S = 5.0
"""How long a process may take to end, until it is ended: threads that a policy has started may never end."""

ACTIONS, ACTIONS_PER_OP = 10_000, 50
"""How many actions a plan may have by default, for a trace of any size and for each of its ops."""

_most_actions: ContextVar[int | None] = ContextVar("most_actions", default=None)


@dataclass
class _Allowance:
    """Processor time for the body of a `limited`.

    seconds: how much.
    more: where the limit is set, "" for nowhere.
    began, used_before: the clock, and the processor time of this process, when it began; later by what an allowance
        inside has taken.
    users: the user's own limit of processor time.
    whose: the policy that has it, as the beginning of a message; "" where the caller knows.
    said: of the interruption that the body has had, "" before there was one.
    """

    seconds: float
    more: str
    began: float
    used_before: float
    users: int
    whose: str = ""
    said: str = ""

    def over(self, later_s: float = 0.0) -> str:
        """How it has been exceeded, by `later_s` at least; "" while it has not.

        On the clock it is exceeded by who sleeps; where others use the processor it is not yet.
        """
        passed, used = _clock() - self.began, _processor() - self.used_before
        if used > self.seconds + later_s:
            return self.ended(f"{self.seconds:g} s of processor time")
        most = ASLEEP * self.seconds + later_s
        if passed > most and (used <= IDLE * passed or passed >= BUSY * self.seconds + later_s):
            return self.ended(f"{passed:.1f} s, most of them asleep")
        return ""

    def ended(self, time: str) -> str:
        """The message for a time after which it ended."""
        return f"no answer after {time}{'; ' if self.more else ''}{self.more}"


_clock, _processor, _sleep = time.monotonic, time.process_time, time.sleep  # whatever a policy makes of the module's
_innermost: list[_Allowance] = []
"""The allowances of the main thread, one inside another; `_watch` reads the last one."""

_ends = False
"""Whether this process ends where a policy sticks."""

_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)
_usual: ContextVar[tuple[float, str] | None] = ContextVar("usual", default=None)
"""The seconds of `usually_limited`, and where they are set."""


class TooLong(BaseException):
    """A policy that does not answer; no `Exception`, so that no policy takes it for one of its own."""


def check_seconds(seconds: float | None) -> None:
    """Raise TiersimError where a limit is not a time that timers take."""
    if seconds is not None and not 0 <= seconds <= MOST_S:
        raise TiersimError(f"time limit: expected 0 to {MOST_S:,} seconds, or None for no limit")


@contextmanager
def limited(
    seconds: float | None, *, actions: int | None = None, more: str = "--time-limit allows more"
) -> Iterator[None]:
    """Raise TooLong where the body takes more processor time than that, or sleeps for `ASLEEP` times as long.

    The time of one inside another does not count for the outer one.

    seconds: None or 0 for no limit; nor is there one in a thread other than the main one, which alone can be
        interrupted.
    actions: how many actions plans may have meanwhile; None for what the trace's size suggests.
    more: where the limit is set, as the end of the message; "" for nowhere.
    """
    check_seconds(seconds)
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
def usually_limited(
    seconds: float | None, *, actions: int | None = None, more: str = "--time-limit allows more"
) -> Iterator[None]:
    """Within the body, give each `calling` so much processor time. The arguments are those of `limited`."""
    check_seconds(seconds)
    usual, allowed = _usual.set((seconds, more) if seconds else None), _most_actions.set(actions)
    try:
        yield
    finally:
        _most_actions.reset(allowed)
        _usual.reset(usual)


@contextmanager
def calling(policy: str) -> Iterator[None]:
    """Around code of a policy, which may never end: the limit of the `usually_limited` around it, if there is one.

    One inside another, or in a `limited`, has no limit of its own. Raises PolicyFailed, which names the policy.
    """
    usual = _usual.get()
    if usual is None or _allowance.get() is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        with _interrupted(*usual, f"policy {policy!r}: "):
            yield
    except TooLong as error:
        raise PolicyFailed(f"policy {policy!r}: {error}") from None


@contextmanager
def _interrupted(seconds: float, more: str, whose: str = "") -> Iterator[None]:
    runs, last = False, -math.inf

    def stop(number: int, frame: Any) -> None:
        nonlocal last
        if not runs or frame is None or frame.f_code.co_filename in MACHINERY:
            return  # it has not begun, or is over: what puts the timers back must run
        if not mine.over(0 if number == signal.SIGALRM else -TICK_S):
            return  # others use the processor, or it is a signal for a limit around this one
        if _clock() < last + AGAIN_S / 2:
            return  # of another timer, in the middle of what deals with the first interruption
        last = _clock()
        mine.said = mine.over() or mine.ended(f"{seconds:g} s of processor time")
        raise TooLong(mine.said)

    outer, allowed = _allowance.get(), resource.getrlimit(resource.RLIMIT_CPU)
    began, used_before = _clock(), _processor()
    mine = _Allowance(seconds, more, began, used_before, allowed[0] if outer is None else outer.users, whose)
    old = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU)}
    timers = {
        timer: signal.setitimer(timer, limit, AGAIN_S)
        for timer, limit in ((signal.ITIMER_PROF, seconds), (signal.ITIMER_REAL, ASLEEP * seconds))
    }
    _allow(mine)
    _end_after(mine)
    inside = _allowance.set(mine)
    _innermost.append(mine)
    try:
        runs = True
        yield
        if mine.said:
            raise TooLong(mine.said)  # what was interrupted took it for an error of its own
    except Exception:
        if mine.said:
            raise TooLong(mine.said) from None
        raise
    finally:
        runs = False
        _allowance.reset(inside)
        resource.setrlimit(resource.RLIMIT_CPU, allowed)
        if outer is not None:
            outer.began += _clock() - began
            outer.used_before += _processor() - used_before
            _allow(outer)
        _end_after(outer)
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


def end_where_stuck(parent: int | None = None, status: int = STUCK, *, tells: bool = True) -> None:
    """Have this process end with a status where a policy in it takes no interruption.

    Where not even another thread can go on, the kernel ends it, by SIGVTALRM.

    For processes of this program alone, once: a policy may swallow every exception, or ignore the signals.

    parent: the number of the process that started this one, to end when that one has; None to go on.
    tells: whether it says so on standard error; whoever started it may.
    """
    global _ends
    _ends = True
    threading.Thread(target=_watch, args=(parent, status, tells), daemon=True).start()


def end(status: int) -> NoReturn:
    """End this process as `sys.exit` does, and in any case within `CLOSING_S`.

    For processes of this program alone: threads and functions at exit that a policy has left may never end.
    """

    def leave() -> None:
        _sleep(CLOSING_S)
        os._exit(status)

    threading.Thread(target=leave, daemon=True).start()
    sys.exit(status)


def _watch(parent: int | None, status: int, tells: bool) -> None:
    while True:
        _sleep(AGAIN_S)
        if parent is not None and os.getppid() != parent:
            os._exit(STUCK)
        current = _innermost[-1:]
        if current and (said := current[0].over(GRACE_S)):
            if tells:
                os.write(2, f"tiersim: {current[0].whose}{said}; it takes no interruption\n".encode())
            os._exit(status)


def _end_after(allowance: _Allowance | None) -> None:
    """Have the kernel end this process, if it is to end where a policy sticks, well after `_watch` would have."""
    if _ends:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0 if allowance is None else allowance.seconds + 2 * GRACE_S)


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
