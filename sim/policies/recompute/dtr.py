"""Dynamic tensor rematerialization: evict the cheapest and stalest tensor when memory is short."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sim.errors import PolicyError, near
from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.policies.evictable import lineage_of
from sim.policies.evictor import DEALLOCATIONS, Evictor, Rules, evictable_tiers
from sim.policies.ranking import HEURISTICS


@dataclass(frozen=True, kw_only=True)
class Dtr(Policy):
    heuristic: str = "dtr_eq"
    deallocation: str = "eager"
    ties: str = "last"
    staleness: str = "own"
    by_size: bool = True
    ignore_small: float = 0.0
    sample: bool = False

    online = True
    recomputes = True
    fidelity = "code"

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is, with an online part that drops under pressure."""
        rules = Rules(
            self.heuristic, self.deallocation, self.ties, self.staleness, self.by_size, self.ignore_small, self.sample
        )
        online = partial(
            Evictor,
            lineage_of(problem),
            rules,
            tiers=tuple(tier.name for tier in problem.platform.tiers),
            evicts=evictable_tiers(problem),
            seed=problem.seed,
        )
        return Plan(problem.trace, online=online, keep_dead=True)
