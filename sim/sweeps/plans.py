"""Plans of solvers, computed once for the cells that share one, such as cells with other seeds or with a timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.sweeps.kept import Kept


class _Asked(Problem):
    """A problem that knows whether its seed was read; copying it counts."""

    def __getattribute__(self, name: str) -> Any:
        if name == "seed":
            object.__setattr__(self, "seed_counts", True)
        return super().__getattribute__(name)


@dataclass(frozen=True, kw_only=True)
class _Remembering(Policy):
    """A policy that looks for its plan among earlier ones."""

    policy: Policy
    kept: Kept
    key: Hashable

    def plan(self, problem: Problem) -> Plan:
        """See `Policy`. A plan is not kept if its solver ran out of time or if it may depend on earlier iterations."""
        if problem.history:
            return self.policy.plan(problem)
        for key in (self.key, (self.key, problem.seed)):
            if key in self.kept:
                found: Plan = self.kept.get(key, _never)
                return found
        asked = _Asked(**{field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)})
        made = self.policy.plan(asked)
        if not made.notes.get("time_limited"):
            key = (self.key, problem.seed) if getattr(asked, "seed_counts", False) else self.key
            ops = len(problem.trace.op_columns.name)
            self.kept.get(key, lambda: made, lambda _: ops)
        return made


def _never() -> Plan:
    raise AssertionError("what is kept need not be made")


def remembering(policy: Policy, kept: Kept, key: Hashable) -> Policy:
    """The policy; if it has a solver, one that gives the same plans and keeps those of first iterations.

    key: all that a plan depends on, except the seed.
    kept: a cache that weighs plans by their ops.
    """
    return _Remembering(policy=policy, kept=kept, key=key) if policy.solver and not policy.warm_up else policy
