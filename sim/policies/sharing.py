"""Plans that do not depend on all of a problem: made once for all problems that are alike in what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sim.plan import Action, Plan, Problem
from sim.policies.base import Policy
from sim.rewrites.rewriter import with_columns
from sim.trace.graph import Trace
from sim.trace.kept import kept


class _Decided(NamedTuple):
    """A plan without its trace. releases: the release points of that, None where it is the one that was asked about."""

    actions: tuple[Action, ...]
    place: Mapping[int, Any]
    keep_dead: bool | frozenset[int]
    notes: Mapping[str, Any]
    releases: Mapping[int, tuple[int, ...]] | None

    def over(self, trace: Trace) -> Plan:
        """The plan for a trace of the same structure."""
        if self.releases is not None:
            trace = with_columns(trace, releases=self.releases)
        return Plan(trace, self.actions, self.place, keep_dead=self.keep_dead, notes=self.notes)


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
        known: list[_Decided] = kept(trace.structure, "plans", policy, list)
        if known:
            return known[0].over(trace)
        made = make()
        if made.online is None and (made.trace is trace or made.trace.has_other_releases_alone(trace)):
            releases = None if made.trace is trace else made.trace.op_columns.releases
            known.append(_Decided(tuple(made.actions), made.place, made.keep_dead, made.notes, releases))
        return made

    return kept(trace, "plans", policy, plan)
