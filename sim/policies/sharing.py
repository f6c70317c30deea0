"""Plans that do not depend on all of a problem: made once for all problems that are alike in what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from sim.plan import Action, Plan, Problem
from sim.policies.base import Policy
from sim.rewrites.kept import kept as kept_rewritten
from sim.rewrites.resized import Resized, resized, sizes_of
from sim.trace.graph import Trace
from sim.trace.kept import MOST_COMMON, had_in_common, kept, kept_together
from sim.trace.launched import names_launched

Acts = TypeVar("Acts", bound=Action)
MOST_OPS = 200_000
"""Up to how many ops in all the rewritten traces have that are kept for a structure."""


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
            released = trace.released_as(self.like)
            kept_together(trace, released, "times")  # an op takes the same time wherever tensors are released
            trace = released
        return Plan(trace, self.actions, self.place, keep_dead=self.keep_dead, notes=self.notes)


def _decided(plan: Plan, trace: Trace) -> _Decided:
    """What a plan for a trace decides, which is the same for all of its structure."""
    like = None
    if plan.trace is not trace:
        like = trace.released_as(plan.trace)  # a copy, since what is derived from a trace is kept as long as it is
        like.derive()
    had_in_common(plan.trace.structure, plan.actions)
    return _Decided(tuple(plan.actions), plan.place, plan.keep_dead, plan.notes, like)


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
        is_alike = made.trace is trace or made.trace.has_other_releases_alone(trace)
        if trace.structure.is_shared and made.online is None and is_alike:
            known.append(_decided(made, trace))
        return made

    return kept(trace, "plans", policy, plan)


def alike(trace: Trace, key: Hashable, make: Callable[[], tuple[Acts, ...]]) -> tuple[Acts, ...]:
    """The actions that `make` makes; made once for all traces of a structure, whatever their sizes, but for one alone
    with very many ops.

    key: the policy, and everything else that decides them besides the structure, such as which tensors have no bytes.
    """
    if not trace.structure.is_shared and len(trace.op_columns.name) > MOST_OPS:
        return make()

    def once() -> tuple[Acts, ...]:
        made = make()
        had_in_common(trace.structure, made)
        return made

    return kept(trace.structure, "alike", key, once, MOST_COMMON)


def rewriting(trace: Trace, key: Hashable, decide: Collection[int], make: Callable[[], Plan]) -> Plan:
    """The plan on a rewritten trace that `make` makes; made once for a trace, and for those of its structure that are
    alike in what decides it.

    key: the policy, and everything of a problem besides its trace that decides the plan.
    decide: the ops whose sizes, with those of their operands, decide it. The rewrite copies all others.
    """

    def plan() -> Plan:
        if not trace.structure.is_shared or names_launched(trace):
            return make()
        alike = "rewritten", (key, sizes_of(trace, decide))
        most = min(MOST_COMMON, max(1, MOST_OPS // len(trace.op_columns.name)))
        known: list[tuple[Plan, Resized]] = kept(trace.structure, *alike, list, most)
        if known:
            first, rewritten = known[0]
            return replace(first, trace=rewritten.over(trace))
        made = make()
        if (again := resized(trace, made.trace, decide)) is not None and made.online is None:
            had_in_common(again.new.structure, made.actions)
            known.append((replace(made, trace=again.new), again))
        return made

    def plan_and_trace() -> tuple[Plan, Trace]:
        made = plan()
        return made, made.trace

    return kept_rewritten(trace, key, plan_and_trace)
