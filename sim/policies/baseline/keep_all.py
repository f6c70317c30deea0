"""Keep everything: what training does by default."""

from __future__ import annotations

from dataclasses import dataclass

from sim.plan import Plan, Problem
from sim.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class KeepAll(Policy):
    """Keep every tensor until its last read; offload and recompute nothing.

    Source: the default of PyTorch and every other framework; the baseline of every paper here.
    Bounds: the least time on one device, and the most memory that any of these policies needs.
    Departs: from nothing; a framework's allocator may hold more (the tier's `allocator` says).
    """

    manages = ()
    fidelity = "code"

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is."""
        return Plan(problem.trace)
