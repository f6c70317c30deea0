"""A policy that never answers, or whose plan never ends, is stopped and named wherever it runs."""

from __future__ import annotations

import gc
import itertools
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from sim import compare, load_profile, simulate
from sim.errors import IllegalPlan
from sim.limits import AGAIN_S, TooLong, limited, limited_again
from sim.plan import Drop, Plan
from sim.policies.base import Policy
from workloads import transformer

ROOT = Path(__file__).resolve().parent.parent
TINY = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16, "n_positions": 8}
TRACE, MACHINE = transformer(TINY, batch=1, sequence=8), load_profile("p100")


@dataclass(frozen=True, kw_only=True)
class Loops(Policy):
    """Never answers, and takes every error for one of its own."""

    def plan(self, problem):
        while True:
            with suppress(Exception):
                sum(range(1000))


@dataclass(frozen=True, kw_only=True)
class Endless(Policy):
    """Has a plan without end."""

    recomputes = True

    def plan(self, problem):
        return Plan(problem.trace, (Drop(0, after=0) for _ in itertools.count()))


def alone(claim):
    """Check a claim in a fresh process: in one of many tests, what others have left takes processor time, too."""
    code = f"from tests.test_limits import {claim.__name__} as claim; claim()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def goes_on_after_a_policy_that_never_answers():
    found = compare(TRACE, MACHINE, [Loops, "keep_all", Endless], time_limit_s=1, bound=False)
    loops, kept, endless = found.rows
    assert kept["fits"]
    assert loops["fits"] is None
    assert re.search(r"no answer after .*; --time-limit allows more", loops["error"])
    assert "a plan of more than 16,450 actions for 129 ops" in endless["error"]
    assert "--most-actions allows more" in endless["error"]


def test_a_comparison_goes_on_after_a_policy_that_never_answers():
    alone(goes_on_after_a_policy_that_never_answers)


def test_as_many_actions_as_asked_for_are_allowed():
    ops = len(TRACE.ops)
    actions = [Drop(0, after=0)] * (10_000 + 50 * ops)
    assert len(Plan(TRACE, actions).actions) == len(actions)
    with pytest.raises(IllegalPlan, match=f"more than {len(actions):,} actions for {ops} ops"):
        Plan(TRACE, [*actions, actions[0]])
    with limited(None, actions=len(actions) + 1):
        Plan(TRACE, [*actions, actions[0]])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_that_the_garbage_collector_swallows_comes_again():
    lost = []

    def wait(phase, info):
        try:
            while not lost:
                sum(range(1000))
        finally:
            lost.append(phase)  # an exception in here goes nowhere

    def collect():
        gc.callbacks.append(wait)
        gc.collect(0)
        gc.callbacks.remove(wait)
        while True:
            sum(range(1000))

    gc.disable()
    try:
        with pytest.raises(TooLong), limited(0.2):
            collect()
    finally:
        gc.enable()
    assert lost[0] == "start"


def test_timers_and_handlers_are_as_they_were():
    before = signal.getsignal(signal.SIGPROF), signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_PROF, 1000)
    try:
        with limited(100):
            simulate(TRACE, MACHINE, "keep_all")
        assert 900 < signal.setitimer(signal.ITIMER_PROF, 0)[0] < 1001
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert (signal.getsignal(signal.SIGPROF), signal.getsignal(signal.SIGALRM)) == before


def busy(seconds):
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        sum(range(100))


def has_time_of_its_own_and_takes_none():
    before = resource.getrlimit(resource.RLIMIT_CPU)
    with pytest.raises(TooLong), limited(0.75):  # noqa: PT012
        for _ in range(3):
            with limited_again():
                busy(0.5)
        with pytest.raises(TooLong), limited_again():
            busy(1.5)
        busy(0.25)
        busy(1.5)
    with limited_again():  # nothing limits it
        busy(0.01)
    assert resource.getrlimit(resource.RLIMIT_CPU) == before


@pytest.mark.slow  # seconds of processor time
def test_one_limit_in_another_has_time_of_its_own_and_takes_none():
    alone(has_time_of_its_own_and_takes_none)


def test_who_swallows_the_interruption_has_had_no_answer():
    with pytest.raises(TooLong, match=r"no answer after 0\.05 s"), limited(0.05), suppress(BaseException):
        busy(5)


def test_the_kernels_limit_is_put_off_by_what_an_inner_one_takes():
    def left():
        return resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()

    with limited(100):
        assert 101 <= left() <= 102
        busy(1.1)
        with limited_again():
            assert 101 <= left() <= 102
            busy(1.1)
        assert 99.8 <= left() <= 101


def test_an_interruption_while_a_limit_begins_or_ends_waits():
    inside, machinery = sys._getframe(), SimpleNamespace(f_code=contextmanager.__code__)
    with pytest.raises(TooLong), limited(0.01):  # noqa: PT012
        interrupt = signal.getsignal(signal.SIGPROF)
        with suppress(TooLong):
            busy(5)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        busy(AGAIN_S)
        interrupt(signal.SIGPROF, machinery)  # an exception would pass by what puts the timers back
        with pytest.raises(TooLong):
            interrupt(signal.SIGPROF, inside)
        interrupt(signal.SIGALRM, inside)  # so soon it would hit what deals with the other
    interrupt(signal.SIGPROF, inside)  # it is over
