"""One example: the policy plans once, and its plan is replayed once. All laws read the result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from sim.conformance.ledger import Ledger
from sim.engine.replay import replay
from sim.errors import Infeasible, TiersimError
from sim.experiment import problem_for
from sim.hardware.platform import Platform
from sim.iterations import run_iteration
from sim.limits import TooLong, limited_again
from sim.log import EventLog
from sim.plan import Plan, Recompute, Run
from sim.policies.base import Policy
from sim.trace.graph import Trace


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
    changed: "trace" or "platform" if the policy changed it in place, "" for neither.
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
        """Whether its solver says that it met a limit on the clock, so that another run may find another plan."""
        return bool(self.policy.solver) and self.plan is not None and bool(self.plan.notes.get("time_limited"))

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
    before = _asked(trace, platform)
    with limited_again():  # a law that asks the policy once more must not have it answer sooner
        run = _run(policy, trace, platform, seed, policy.warm_up if warm_up is None else warm_up)
    now = _asked(trace, platform)
    changed = next((what for what, hashed in before.items() if now[what] != hashed), "")
    return replace(run, changed=changed)


def _asked(trace: Trace, platform: Platform) -> dict[str, str]:
    """Hashes of the policy's inputs as they are now; a trace itself caches its first hash."""
    return {"trace": Trace.content_hash.func(trace), "platform": repr(platform)}  # type: ignore[attr-defined]


def _run(policy: Policy, trace: Trace, platform: Platform, seed: int, warm_up: int) -> Replayed:
    history: tuple[Run, ...] = ()
    plan: Plan | None = None
    try:
        for _ in range(warm_up):
            plan = _computed_anew(policy.plan(problem_for(trace, platform, seed=seed, history=history)), trace)
            history = (*history, run_iteration(trace, plan, platform, history, last=False))
        plan = None
        plan = _computed_anew(policy.plan(problem_for(trace, platform, seed=seed, history=history)), trace)
        ran = run_iteration(trace, plan, platform, history)
    except TiersimError as error:
        partial = getattr(error, "log", None) if plan is not None else None
        return Replayed(policy, trace, platform, seed, plan, partial, error, None, history)
    except BaseException as crash:
        if type(crash) in (KeyboardInterrupt, TooLong):  # a person's, and the checker's
            raise
        return Replayed(policy, trace, platform, seed, plan, None, None, crash, history)
    return Replayed(policy, trace, platform, seed, ran.plan, ran.log, None, None, history)


def _computed_anew(plan: Plan, given: Trace) -> Plan:
    """The plan on a trace that shares no cached fact, such as its hash, with what a policy made it from."""
    made = plan.trace
    if made is given:
        return plan
    columns = (made.tensor_columns, made.op_columns)
    anew = Trace(*columns, outputs=made.outputs, carry=made.carry, meta=made.meta, origin=made.origin)
    return replace(plan, trace=anew)


def replayed(policy: Policy, plan: Plan, trace: Trace, platform: Platform, *, seed: int = 0) -> Replayed:
    """Replay a given plan, as if the policy had made it."""
    plan = _computed_anew(plan, trace)
    try:
        log = replay(plan, platform)
    except TiersimError as error:
        return Replayed(policy, trace, platform, seed, plan, getattr(error, "log", None), error)
    return Replayed(policy, trace, platform, seed, plan, log)
