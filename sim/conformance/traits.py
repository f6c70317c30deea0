"""How often a policy shows its declared traits."""

from __future__ import annotations

from collections.abc import Iterator

from sim.conformance.ledger import RECOMPUTE
from sim.conformance.optimality import claims_optimum, could_claim
from sim.conformance.replayed import Replayed
from sim.declared import declarations, plain, takes_anything
from sim.errors import PolicyError
from sim.plan import Move, Plan
from sim.policies import parameters_of
from sim.policies.base import Policy

SELDOM = 0.3
"""The fraction of examples below which a declared trait is not exercised."""

ENOUGH = 15
"""Examples that ran, from which on a declared trait that never showed counts as a fault."""

SAMPLE = 50
"""Examples from which it can be told how often a trait shows: the first of them are the simplest."""


def _moves(plan: Plan) -> bool:
    """Whether a plan may move anything by itself: the engine copies what an op reads in another tier."""
    return plan.online is not None or bool(plan.place) or any(isinstance(act, Move) for act in plan.actions)


class Exercised:
    """Counts over all examples of a policy.

    claimed: of the runs in which an optimal policy could claim an optimum that matters, whether it did.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.examples = self.skipped = self.refused = self.failed = self.ran = self.pressed = 0
        self.counts = {trait: 0 for trait in ("recomputes", "moves", "rewrites") if getattr(policy, trait)}
        self.why_skipped = ""
        self.claimed: list[bool] = []

    def note_claim(self, run: Replayed) -> None:
        """Of a run in which an optimal policy could claim an optimum that matters: whether it does."""
        if could_claim(run):
            self.claimed.append(run.done and claims_optimum(run))

    def add(self, run: Replayed, *, ample: bool = False) -> None:
        """One more example. ample: with memory for everything, where nothing has to show."""
        self.examples += 1
        if isinstance(run.error, PolicyError):
            self.skipped += 1
            self.why_skipped = str(run.error)
            return
        if run.refused:
            self.refused += 1
            return
        if not run.done or run.log is None or run.plan is None:
            self.failed += 1
            return
        self.ran += 1
        if ample:
            return
        self.pressed += 1
        size = run.plan.trace.tensor_columns.bytes
        shows = {
            "recomputes": bool((run.log.interval("why") == RECOMPUTE).any()),
            "moves": _moves(run.plan) and any(size[copy.tensor] for copy in run.ledger.copies),
            "rewrites": run.plan.trace != run.trace,
        }
        for trait in self.counts:
            self.counts[trait] += shows[trait]

    def shares(self) -> dict[str, float]:
        """Per declared trait the fraction of the runs in less than ample memory in which it showed."""
        return {trait: count / self.pressed if self.pressed else 0.0 for trait, count in self.counts.items()}

    def notes(self) -> Iterator[str]:
        """Remarks for the reader of the report."""
        yield from self.policy.saving_lines()
        if self.policy.rarely:
            yield f"declared to show rarely: {self.policy.rarely}"
        elif self.ran and any(share < SELDOM for share in self.shares().values()):
            is_fault = self.ran >= ENOUGH and not all(self.counts.values())
            if self.examples < SAMPLE and not is_fault:
                yield f"so few examples do not tell how often a trait shows, the first being the simplest: {SAMPLE} do"
            else:
                yield "a trait that examples seldom show: take it away, or say in `rarely` why it is rare"
        declared = declarations(type(self.policy))
        for parameter in parameters_of(self.policy):
            if takes_anything(declared[parameter]):
                yield (
                    f"{parameter}: {plain(declared[parameter])} takes anything: give a number its bounds, as in "
                    "Annotated[int, Ge(0)], and a text its choices, as in Literal['first', 'last']"
                )
        if self.skipped:
            yield f"skipped, for example: {self.why_skipped}"
