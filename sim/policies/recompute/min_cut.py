"""Min-cut partitioning: keep for backward what weighs least, run cheap ops again."""

from __future__ import annotations

from dataclasses import dataclass

from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.solvers.cuts import joint_of
from sim.solvers.runs import runs


@dataclass(frozen=True, kw_only=True)
class MinCut(Policy):
    """Cut the joint graph of forward and backward where the tensors that cross weigh least.

    A tensor weighs its bytes times 1.1 for each op between it and backward (at most 100). Only ops that
    are cheap and not random may run again; what they make that backward needs is made just before it.
    Source: PyTorch's `min_cut_rematerialization_partition` (torch/_functorch/partitioners.py, 2.3).
    Bounds: what is kept weighs no more than under any other choice of cheap ops; at most one more run of
        each. The maximum flow takes well under a second for thousands of ops.
    Departs: ops are not fused, so running a cheap op again costs its time, and no tensor counts double
        for being inside a fused kernel. A compiler's limits on long fusible chains and on uses that lie
        far apart are left out. On the platform's budget nothing depends.

    aggressive: also run again what reduces to less than a quarter, and what a backward op reads that is
    no cheap one, which PyTorch leaves out unless told so.
    Raises PolicyError where nothing in backward reads what forward makes, or on several devices.
    """

    recomputes = True
    needs = frozenset({"backward"})
    solver = "max-flow"
    fidelity = "reconstruction"

    aggressive: bool = False

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations; notes: bytes kept from forward to backward."""
        joint = joint_of(problem, "min_cut")
        chosen = joint.cut(joint.dear(self.aggressive))
        found = runs(joint.ledger, joint.again(chosen), prune=True)
        return Plan(problem.trace, found.actions(), notes={"kept_bytes": joint.kept_bytes(chosen)})
