"""Plans made once for the cells that share them: by what of the problem each policy has asked for.

A policy that looks at nothing but the trace plans the same for every machine and budget, so its plan is kept for all
cells of that trace; one that looks at the machine but not at its budget plans the same for every budget. A solver's
plan is kept for cells with the same machine and budget, such as those with other seeds or with a timeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.sweeps.asked import BUDGET, MACHINE, SEED, asked
from sim.sweeps.kept import Kept


@dataclass(frozen=True, kw_only=True)
class _Remembering(Policy):
    """A policy that looks for its plan among earlier ones.

    policy, kept: a Policy; a Kept.
    trace: all that a plan depends on which looks at nothing but the trace.
    machine: what one that looks at the machine depends on, too.
    limits: all else that a plan may depend on, except the seed.
    """

    policy: Any  # declared like this, they are not held against a type in every cell
    kept: Any
    trace: Any
    machine: Any
    limits: Any

    @property
    def text(self) -> str:
        """How messages call it."""
        return type(self).__name__

    def plan(self, problem: Problem) -> Plan:
        """See `Policy`.

        A plan is not kept if its solver ran out of time, if it may depend on earlier iterations, or if it, or anything
        else, holds the problem.
        """
        if problem.history:
            return self._planned(problem)
        for key in self._keys(problem.seed):
            if key in self.kept:
                found: Plan = self.kept.get(key, _never)
                return found
        noting = asked(problem)
        made = self._planned(noting)
        read, held = frozenset(noting.read), weakref.ref(noting.read)
        del noting
        is_shared = held() is None and (BUDGET not in read or self.policy.solver)  # what is held may be read later
        if isinstance(made, Plan) and is_shared and not _is_hurried(made):
            machine = self.machine if read & {MACHINE, BUDGET} else None
            limits = self.limits if BUDGET in read else None
            seed = problem.seed if SEED in read else None
            ops = len(problem.trace.op_columns.name)
            self.kept.get((self.trace, machine, limits, seed), lambda: made, lambda _: ops)
        return made

    def _planned(self, problem: Problem) -> Plan:
        plan: Plan = self.policy.plan(problem)
        return plan

    def _keys(self, seed: int) -> tuple[Hashable, ...]:
        scopes = ((None, None), (self.machine, None), (self.machine, self.limits))
        return tuple((self.trace, *scope, each) for scope in scopes for each in (None, seed))


def _is_hurried(plan: Plan) -> bool:
    """Whether its solver ran out of time; a policy's notes may be no mapping."""
    return isinstance(plan.notes, Mapping) and bool(plan.notes.get("time_limited"))


def _never() -> Plan:
    raise AssertionError("what is kept need not be made")


def remembering(policy: Policy, kept: Kept, trace: Hashable, machine: Hashable, limits: Hashable) -> Policy:
    """The policy, or one of the same name that gives the same plans and keeps those of first iterations.

    kept: a cache that weighs plans by their ops.
    trace: the trace and the policy, as a key.
    machine: the machine without its budget, as a key.
    limits: the budget and the limits of a run, as a key.
    """
    if policy.warm_up:
        return policy
    return _named(type(policy).__name__)(policy=policy, kept=kept, trace=trace, machine=machine, limits=limits)


@cache
def _named(name: str) -> type[_Remembering]:
    """The class under another name, since messages name a policy by its class."""
    return type(name, (_Remembering,), {})
