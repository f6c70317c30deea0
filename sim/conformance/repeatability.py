"""Law 7: the same seed gives the same log. Across processes see `across_processes`."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping

import numpy as np

from sim.conformance.replayed import LawBroken, Replayed, run_policy
from sim.engine.replay import replay
from sim.errors import PolicyError
from sim.experiment import problem_for, unlimited
from sim.log import EventLog
from sim.plan import Plan
from sim.policies.base import Policy


def check_repeats(run: Replayed) -> None:
    """Law 7: the same policy, trace, platform and seed give the same plan and the same log, byte for byte."""
    if run.changed:
        raise LawBroken(f"the policy changes the {run.changed} that it is given, in place")
    if isinstance(run.error, PolicyError) or run.crash is not None or run.met_time_limit:
        return
    again = run_policy(fresh(run.policy), run.trace, run.platform, seed=run.seed)
    if type(again.error) is not type(run.error) or str(again.error) != str(run.error):
        raise LawBroken(f"the second time it says: {again.error or 'it fits'}; at first: {run.error or 'it fits'}")
    if run.plan is not None and again.plan is not None:
        first, second = run.plan, again.plan
        if tuple(first.actions) != tuple(second.actions) or dict(first.place) != dict(second.place):
            raise LawBroken("the second time it plans other actions")
        if first.trace != second.trace or first.keep_dead != second.keep_dead:
            raise LawBroken("the second time it plans another trace")
    if run.done:
        ample = problem_for(run.trace, unlimited(run.platform))
        if _in_short(run.policy.unlimited(ample)) != _in_short(fresh(run.policy).unlimited(ample)):
            raise LawBroken("the second time `unlimited` says otherwise")
    if run.log is not None and again.log is not None and run.log != again.log:
        raise LawBroken(f"the second time its log differs: {_difference(run.log, again.log)}")
    if run.done:
        _runs_again(run)


def _runs_again(run: Replayed) -> None:
    """A plan can be run any number of times, and in other processes: sweeps keep plans and send them."""
    assert run.plan is not None
    assert run.log is not None
    try:
        plans = {"run a second time": run.plan, "pickled": pickle.loads(pickle.dumps(run.plan))}
    except Exception as error:
        raise LawBroken(f"its plan cannot be pickled: {type(error).__name__}: {error}") from None
    for how, plan in plans.items():
        try:
            log = replay(plan, run.platform)
        except Exception as error:
            raise LawBroken(f"its plan, {how}, fails: {type(error).__name__}: {error}") from None
        if log != run.log:
            raise LawBroken(f"its plan, {how}, gives another log: {_difference(run.log, log)}")


def _in_short(plans: Mapping[str, Plan]) -> dict[str, tuple[object, ...]]:
    return {name: (plan.trace, tuple(plan.actions), dict(plan.place)) for name, plan in plans.items()}


def fresh(policy: Policy) -> Policy:
    """The same policy without what it remembers of earlier calls."""
    return dataclasses.replace(policy)


def _difference(first: EventLog, second: EventLog) -> str:
    for what, a, b in (("interval", first.intervals, second.intervals), ("change", first.changes, second.changes)):
        count = min(len(a), len(b))
        rows = np.flatnonzero((a[:count] != b[:count]).any(axis=1))
        if len(rows) or len(a) != len(b):
            return f"{what} {int(rows[0]) if len(rows) else count} is the first to differ"
    return f"ends at {first.end} and {second.end} ns, counters {dict(first.counters)} and {dict(second.counters)}"
