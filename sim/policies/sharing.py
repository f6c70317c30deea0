"""Plans that do not depend on all of a problem: made once for all problems that are alike in what they depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sim.plan import Action, Plan, Problem
from sim.policies.base import Policy
from sim.trace.graph import Trace
from sim.trace.kept import MOST_COMMON, had_in_common, kept
from sim.trace.origin import Origin


class _Decided(NamedTuple):
    """A plan for all traces of a structure.

    like: a trace with its release points, None where they are those of the trace that was asked about.
    """

    actions: tuple[Action, ...]
    place: Mapping[int, Any]
    keep_dead: bool | frozenset[int]
    notes: Mapping[str, Any]
    like: Trace | None

    def over(self, trace: Trace) -> Plan:
        """The plan for a trace of the same structure."""
        if self.like is not None:
            trace = _released_as(self.like, trace)
        return Plan(trace, self.actions, self.place, keep_dead=self.keep_dead, notes=self.notes)


def _decided(plan: Plan, trace: Trace) -> _Decided:
    """What a plan for a trace decides, which is the same for all of its structure."""
    like = None
    if plan.trace is not trace:
        like = _released_as(plan.trace, trace)  # a copy, since what is derived from a trace is kept as long as it is
        like.derive()
    had_in_common(plan.trace.structure, plan.actions)
    return _Decided(tuple(plan.actions), plan.place, plan.keep_dead, plan.notes, like)


def _released_as(like: Trace, trace: Trace) -> Trace:
    """A trace with the release points of another one, from which it differs in sizes alone otherwise."""
    return Trace(
        trace.tensor_columns,
        dataclasses.replace(trace.op_columns, releases=like.op_columns.releases),
        outputs=trace.outputs,
        carry=trace.carry,
        meta=trace.meta,
        origin=Origin.identity(trace),
        like=like,
    )


def shared(policy: Policy, problem: Problem, make: Callable[[], Plan]) -> Plan:
    """The plan that `make` makes, which a policy calls in its `plan`; made once for what it declares in `plans_from`.

    structure: once for all traces of one structure, unless it rewrites more than release points.
    machine: once for a trace on machines that differ in the capacity of home tiers alone.

    For one trace it is one plan, so that replays know it again.
    """
    trace = problem.trace
    if policy.plans_from == "problem":
        return make()
    if policy.plans_from == "machine":
        platform = problem.platform  # asked for nowhere else: sweeps note what a plan depends on
        behind = tuple(tier.capacity for tier in platform.tiers if tier.device < 0)
        return kept(trace, "plans", (policy, platform.timing_hash, behind), make)

    def plan() -> Plan:
        known: list[_Decided] = kept(trace.structure, "plans", policy, list, MOST_COMMON)
        if known:
            return known[0].over(trace)
        made = make()
        if made.online is None and (made.trace is trace or made.trace.has_other_releases_alone(trace)):
            known.append(_decided(made, trace))
        return made

    return kept(trace, "plans", policy, plan)
