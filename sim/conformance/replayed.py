"""One example: the policy plans once, and its plan is replayed once. All laws read the result."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.conformance.ledger import Ledger
from sim.conformance.models import anew
from sim.engine.replay import replay
from sim.errors import Infeasible, TiersimError
from sim.experiment import problem_for
from sim.hardware.platform import Platform
from sim.iterations import run_iteration
from sim.limits import TooLong, limited_again
from sim.log import EventLog
from sim.plan import Plan, Problem, Recompute, Run
from sim.policies.base import Policy
from sim.trace.graph import Trace

NEARLY = 0.9
"""The part of its limit after which a solver may stop because of it."""


class LawBroken(AssertionError):
    """A run breaks a law; the text says where."""


@dataclass(frozen=True, eq=False)
class Replayed:
    """The problem, the policy's plan, and the result.

    trace: the trace of the problem; `plan.trace` is the one that ran.
    platform: with the budget in its home tiers.
    log: complete, or the partial one that an OutOfMemory carries; None if nothing ran.
    error: the error of this package that the policy or the engine raised.
    crash: any other exception, `SystemExit` included.
    plan_s: the longest that the policy took for a plan, in seconds of the clock.
    changed: which of its inputs the policy changed in place: "trace", "platform", "history" or "log of
        `evaluate`"; "" for none.
    """

    policy: Policy
    trace: Trace
    platform: Platform
    seed: int = 0
    plan: Plan | None = None
    log: EventLog | None = None
    error: TiersimError | None = None
    crash: BaseException | None = None
    history: tuple[Run, ...] = ()
    plan_s: float = 0.0
    changed: str = ""

    @property
    def done(self) -> bool:
        """Whether it ran to its end."""
        return self.error is None and self.crash is None and self.log is not None

    @property
    def refused(self) -> bool:
        """Whether it did not fit."""
        return isinstance(self.error, Infeasible)

    @property
    def met_time_limit(self) -> bool:
        """Whether its solver met a limit on the clock, so that another run may find another plan.

        Its plan says so (`time_limited`), and planning took as long as the policy's parameter `time_limit` allows.
        """
        if not self.policy.solver or self.plan is None or not self.plan.notes.get("time_limited"):
            return False
        allowed = getattr(self.policy, "time_limit", None)
        return isinstance(allowed, int | float) and self.plan_s >= NEARLY * allowed

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the log, which must exist."""
        assert self.log is not None
        return Ledger(self.log, self._planned())

    def _planned(self) -> dict[int, int] | None:
        """How often the plan recomputes each op; None where an online part decides that, too."""
        if self.plan is None:
            return {}
        if self.plan.online is not None and self.policy.recomputes:
            return None
        asked = Counter(action.op for action in self.plan.actions if isinstance(action, Recompute))
        return {self.plan.trace.op_id(name): times for name, times in asked.items()}


def run_policy(
    policy: Policy, trace: Trace, platform: Platform, *, seed: int = 0, warm_up: int | None = None
) -> Replayed:
    """Ask a policy and replay its plan, after as many warm-up iterations as it declares, or as are given."""
    given = _Given(trace, platform)
    with limited_again():  # a law that asks the policy once more must not have it answer sooner
        run = _run(policy, given, seed, policy.warm_up if warm_up is None else warm_up)
    return replace(run, changed=given.changed())


class _Given:
    """What a policy is given, with hashes of what it was, since all of it is shared with whoever uses it later."""

    def __init__(self, trace: Trace, platform: Platform) -> None:
        self.trace, self.platform = trace, platform
        self.before = self._hashes()
        self.logs: list[tuple[str, EventLog, str]] = []

    def problem(self, seed: int, history: tuple[Run, ...]) -> Problem:
        """The question to the policy."""
        self.logs += [("history", run.log, _log_hash(run.log)) for run in history[-1:]]
        problem = problem_for(self.trace, self.platform, seed=seed, history=history)

        def evaluate(plan: Plan, budget: int | None = None) -> EventLog:
            log = problem.evaluate(plan, budget)
            self.logs.append(("log of `evaluate`", log, _log_hash(log)))
            return log

        return replace(problem, evaluate=evaluate)

    def changed(self) -> str:
        """What has another hash than before, or is not what an equal trace computes; "" for nothing."""
        now = self._hashes()
        found = [what for what, hashed in self.before.items() if now[what] != hashed]
        found += ["trace"] if self.trace.content_hash != self.before["trace"] else []  # the hash that it has kept
        found += [
            "trace" for key, value in _computed(self.trace) if not np.array_equal(value, getattr(self._fresh, key))
        ]
        found += [what for what, log, hashed in self.logs if _log_hash(log) != hashed]
        return found[0] if found else ""

    def _hashes(self) -> dict[str, str]:
        """Of the trace, which itself caches its first hash, and the platform."""
        return {"trace": self.trace.hashed_anew(), "platform": repr(self.platform)}

    @cached_property
    def _fresh(self) -> Trace:
        return anew(self.trace)


def _computed(trace: Trace) -> list[tuple[str, NDArray[Any]]]:
    """The columns that a trace has computed when it was asked for them."""
    return [(key, value) for key, value in vars(trace).items() if isinstance(value, np.ndarray)]


def _log_hash(log: EventLog) -> str:
    return str(EventLog.content_hash.func(log))  # type: ignore[attr-defined]


def _run(policy: Policy, given: _Given, seed: int, warm_up: int) -> Replayed:
    history: tuple[Run, ...] = ()
    plan: Plan | None = None
    trace, platform = given.trace, given.platform
    times = [0.0]

    def planned() -> Plan:
        began = time.perf_counter()
        plan = policy.plan(given.problem(seed, history))
        times.append(time.perf_counter() - began)
        return _without_caches(plan, trace)

    try:
        for _ in range(warm_up):
            plan = planned()
            history = (*history, run_iteration(trace, plan, platform, history, last=False))
        plan = None
        plan = planned()
        ran = run_iteration(trace, plan, platform, history)
    except TiersimError as error:
        partial = getattr(error, "log", None) if plan is not None else None
        return Replayed(policy, trace, platform, seed, plan, partial, error, None, history, max(times))
    except BaseException as crash:
        if type(crash) in (KeyboardInterrupt, TooLong):  # a person's, and the checker's
            raise
        return Replayed(policy, trace, platform, seed, plan, None, None, crash, history, max(times))
    return Replayed(policy, trace, platform, seed, ran.plan, ran.log, None, None, history, max(times))


def _without_caches(plan: Plan, given: Trace) -> Plan:
    """The plan on a trace that shares no cached fact, such as its hash, with what a policy made it from."""
    return plan if plan.trace is given else replace(plan, trace=anew(plan.trace))


def replayed(policy: Policy, plan: Plan, trace: Trace, platform: Platform, *, seed: int = 0) -> Replayed:
    """Replay a given plan, as if the policy had made it."""
    plan = _without_caches(plan, trace)
    try:
        log = replay(plan, platform)
    except TiersimError as error:
        return Replayed(policy, trace, platform, seed, plan, getattr(error, "log", None), error)
    return Replayed(policy, trace, platform, seed, plan, log)
