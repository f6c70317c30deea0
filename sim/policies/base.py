"""What every policy is: a frozen set of parameters, some declared traits, and one method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from sim.plan import Plan, Problem

FIDELITIES = ("code", "equations", "reconstruction")
MANAGES = ("activations", "gradients", "optimizer_state", "weights")
NEEDS = ("chain", "layers", "history", "host", "cpu", "backward")

SAVINGS = {
    "implementation": "another implementation of an op, as the trace states it: its time and its workspace",
    "launch": "one launch an op, where several are launched together",
    "codec": "fewer bytes on the wire than the tensor has, by a lossless codec; down to a bit for four bytes",
    "fusion": "one kernel of several ops: it is launched once and touches each operand once",
}
"""By what a rewrite may make an op cheaper than the one that it stands for."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides what to keep, drop, recompute and move. Subclass it, one policy a file.

    A subclass is a frozen, keyword-only dataclass whose fields are its parameters. The traits below are
    declared on the class and verified by `sim.conformance`:

    online: decides while running (its plan has `online`). recomputes, moves: whether ops may run twice,
    whether bytes may move. rewrites: whether it changes the trace. lossless: same values as the plain
    run. optimal: the class of plans of which its plan is proven to be the fastest ("among plans that …"), "" for
    none; `in_class` says which plans belong to it. needs: what the trace or the platform must have
    (`NEEDS`). solver: what it solves with, "" for nothing. warm_up: iterations before the steady state.
    manages: which roles it may drop or move (`MANAGES`). fidelity: how near to the published system:
    `code` (checked against the authors'), `equations` (the paper's), or `reconstruction`, the default.
    saves: by what its rewrite makes ops cheaper than those that they stand for (`SAVINGS`), and why.
    slow: planning takes long, so that `compare` leaves it out unless it is named.
    """

    online: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    rewrites: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    optimal: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    solver: ClassVar[str] = ""
    warm_up: ClassVar[int] = 0
    manages: ClassVar[tuple[str, ...]] = ("activations",)
    fidelity: ClassVar[str] = "reconstruction"
    slow: ClassVar[bool] = False
    saves: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    def saving_lines(cls) -> tuple[str, ...]:
        """What `saves` declares, a line each, for whoever reads its results."""
        return tuple(f"declared saving: {kind}: {why}" for kind, why in cls.saves.items())

    def plan(self, problem: Problem) -> Plan:
        """The plan for one iteration. Raises PolicyError on an unmet need, Infeasible with a proof."""
        raise NotImplementedError(f"{type(self).__name__} does not define plan(problem)")

    def in_class(self, plan: Plan) -> bool:
        """Whether a plan belongs to the class that `optimal` names; none does where that names none."""
        return False

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """What this policy's freedoms are worth where memory has no limit: plans by a short name of the freedom.

        For policies that may change how long the work itself takes: faster implementations, captured launches, an
        optimizer beside the device. The fastest of these plans, or keeping everything where that is faster, is what
        the policy's overhead is measured against. problem: as for `plan`, on a platform whose home tiers never fill.
        """
        return {}
