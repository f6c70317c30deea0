"""Hybrid: each saved result is kept, offloaded or recomputed, whichever a linear program and a replay find fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from sim.errors import Infeasible, OutOfMemory
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.hybrid.drafts import Draft, Drafts
from sim.units import format_bytes

REPLAYS = 3
"""The fastest drafts that fit are replayed, so many."""


@dataclass(frozen=True, kw_only=True)
class Hybrid(Policy):
    """Keep, offload or recompute the results of each forward op that backward reads, as time and memory allow.

    A linear program divides each op's results into shares that are kept, offloaded and recomputed. It knows the time
    of every op and copy, and in some 256 windows of the iteration what either direction of the link can carry and
    what is resident. So a copy costs nothing as long as the link has time before the memory is needed, then its stall;
    recomputation costs its ops. Shares are rounded in program order. A model of one device (ops one after another, a
    link in each direction, copies back as early as memory allows) times the draft and shows what the
    program did not know: transient results of recomputation, when an input is needed for it, copies that are late.
    The next round's program takes that into account. The fastest drafts are replayed, the fastest replay is the plan.
    Recomputation is lazy: an op is recomputed right before its results are first read, once, from what is
    resident or comes back for it. Nothing is recomputed from within what has been recomputed and dropped once more.

    Source: our own. The choice between three ways and its relaxation follow Beaumont et al., "Efficient Combination of
        Rematerialization and Offloading for Training DNNs", NeurIPS 2021; windows of link time: Huang et al.,
        "SwapAdvisor", and Peng et al., "Capuchin", both ASPLOS 2020; recomputing the cheap: Korthikanti et al., MLSys
        2023.
    Bounds: `rounds` programs of about 4 columns per op and 6 per window, each with a schedule in O(ops); three
        replays, more where they do not fit.
    Departs: no paper's design is claimed.

    rounds: linear programs at most.
    Notes of the plan: `kept_bytes`, `offloaded_bytes`, `recomputed_bytes`; `expected_ns`, the model's time.
    Raises Infeasible, with the smallest budget of any draft, where none fits.
    """

    recomputes = True
    moves = True
    solver = "lp"
    rarely = "nothing is offloaded or recomputed where all fits"
    other_values = by_parameter(rounds=1)

    rounds: Annotated[int, Ge(1)] = 6

    def plan(self, problem: Problem) -> Plan:
        """The fastest draft that fits, by replay."""
        drafts = Drafts(problem)
        found = list(drafts.search(self.rounds))
        if plan := self._fastest(problem, drafts, found):
            return plan
        least = drafts.least(self.rounds)
        if plan := self._fastest(problem, drafts, [least]):
            return plan
        raise Infeasible(
            f"policy 'hybrid': no draft fits {format_bytes(problem.budget)}; "
            f"{format_bytes(least.least_bytes, digits=None)} would do",
            floor_bytes=least.least_bytes,
        )

    def _fastest(self, problem: Problem, drafts: Drafts, found: Sequence[Draft]) -> Plan | None:
        """The draft that is fastest when replayed; None if none fits."""
        best: tuple[int, Plan] | None = None
        replayed: set[tuple[int, ...]] = set()
        for draft in sorted(found, key=lambda draft: draft.rank):
            if best is not None and len(replayed) >= REPLAYS:
                break
            if tuple(draft.choice) in replayed:
                continue
            replayed.add(tuple(draft.choice))
            plan = drafts.plan(draft)
            try:
                end = problem.evaluate(plan).end
            except OutOfMemory:
                continue
            if best is None or end < best[0]:
                best = end, plan
        return best[1] if best else None
