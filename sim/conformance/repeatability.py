"""Law 7: the same seed gives the same log. Across processes see `across_processes`.

A policy that declares `plans_from` is asked about a problem that differs in all else, too.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sim.conformance.models import anew
from sim.conformance.replayed import LawBroken, Replayed, run_policy
from sim.engine.replay import replay
from sim.errors import PolicyError
from sim.experiment import problem_for, unlimited
from sim.hardware.platform import Platform
from sim.log import EventLog, Ints
from sim.plan import Plan
from sim.policies.base import Policy
from sim.trace.graph import Trace


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
    if run.plan is not None and run.policy.plans_from != "problem":
        _plans_alike(run, run.plan)


def _plans_alike(run: Replayed, plan: Plan) -> None:
    """`plans_from`: the same actions, places, notes and release points for what is alike in what it names."""
    what_from = run.policy.plans_from
    if what_from == "structure":
        trace, platform = other_sizes(run.trace), other_machine(run.platform, run.trace)
    else:
        trace, platform = anew(run.trace), run.platform.with_budget(2 * run.platform.home(0).capacity + 1)
    try:
        other = fresh(run.policy).plan(problem_for(trace, platform, seed=run.seed + 1))
    except Exception as error:
        text = f"for another one that is alike in that it fails: {type(error).__name__}: {error}"
        raise LawBroken(f"it declares plans_from = {what_from!r}, and {text}") from None
    for what, here, there in (
        ("actions", tuple(plan.actions), tuple(other.actions)),
        ("places", dict(plan.place), dict(other.place)),
        ("dead tensors", plan.keep_dead, other.keep_dead),
        ("notes", plan.notes, other.notes),
        ("release points", dict(plan.trace.op_columns.releases), dict(other.trace.op_columns.releases)),
        ("parts that decide online", plan.online, other.online),
    ):
        if here != there:
            raise LawBroken(
                f"it declares plans_from = {what_from!r}, and for another one that is alike it plans other {what}"
            )


def other_sizes(trace: Trace) -> Trace:
    """The same trace with other sizes and FLOPs in another order of size; equal ones stay equal, and zeros zeros."""
    t, c = trace.tensor_columns, trace.op_columns
    meta = {key: 2 * value if type(value) is int else value for key, value in trace.meta.items()}
    tensors = replace(t, bytes=_others(t.bytes), shape={row: (2, *shape) for row, shape in t.shape.items()})
    ops = replace(c, flops=_others(c.flops), bytes=_others(c.bytes), workspace=_others(c.workspace), counted={})
    return Trace(tensors, ops, outputs=trace.outputs, carry=trace.carry, meta=meta, origin=trace.origin)


def _others(column: Ints) -> Ints:
    """Other numbers for those of a column: the larger one was, the smaller, but for what is not above 0."""
    most = int(column.max(initial=0))
    return np.where(column > 0, 3 * (most - column) + 7, column)


def other_machine(platform: Platform, trace: Trace) -> Platform:
    """A machine with engines thrice as fast and more memory, without the tiers behind its devices if a trace can do
    without them."""
    engines = tuple(
        replace(unit, peak={dtype: 3 * rate for dtype, rate in unit.peak.items()}) for unit in platform.engines
    )
    other = replace(platform, engines=engines).with_budget(2 * platform.home(0).capacity + 1)
    if trace.op_columns.engine or trace.devices > 1:
        return other
    near = {tier.name for tier in other.tiers if tier.device >= 0}
    engines = tuple(replace(unit, reaches=(unit.home,)) for unit in engines if unit.home in near)
    tiers = tuple(tier for tier in other.tiers if tier.name in near)
    return replace(other, tiers=tiers, engines=engines, links=(), pools=(), energy={})


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
