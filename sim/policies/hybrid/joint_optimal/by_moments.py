"""Plans and bounds for traces of thousands of ops: the program at moments, rounded, scheduled and replayed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from sim.errors import Infeasible, TiersimError
from sim.plan import Plan, Problem
from sim.policies.hybrid.hybrid.drafts import Draft, Drafts
from sim.policies.hybrid.hybrid.program import rounded
from sim.policies.hybrid.hybrid.recomputations import beside_recomputation
from sim.policies.hybrid.hybrid.results import KEEP, OFFLOAD, RECOMPUTE
from sim.policies.recompute.relax_and_fix import RelaxAndFix
from sim.solvers.moment_bound import NothingFits, Shares, program_of
from sim.solvers.outcome import refused
from sim.solvers.schedule import TraceIndex
from sim.solvers.trip import trip

WIDE = (
    "run the ops in order on one device, drop, recompute and copy to the host and back in whatever order and however "
    "often, and keep weights, inputs, outputs, weight gradients and what is overwritten in place"
)
"""The plans that the bound is about."""
FEW, LARGE = 2, 3000
"""Moments to begin with where a trace has more than so many ops."""
ROUNDS, REPLAYS = 6, 5
"""Drafts at most, and how many of the fastest are replayed."""


def by_moments(
    problem: Problem, index: TraceIndex, host: str, moments: int, time_limit: float
) -> tuple[Plan, int, int | None]:
    """The fastest plan found, its makespan, and the least ns beyond every op run once, None where time was up."""
    try:
        shares, proven = _relaxed(problem, index, host, moments, time_limit), False
    except NothingFits:
        shares, proven = None, True
    drafts = Drafts(problem, inputs=False)
    found = [] if proven else list(drafts.search(ROUNDS))
    if shares is not None:
        found.append(drafts.polished(_by_shares(drafts, shares), 40_000))
    plans = _fastest(drafts, found)
    with suppress(Infeasible):
        plans.append(RelaxAndFix().plan(problem))  # also in the class
    best: tuple[int, Plan] | None = None
    for plan in plans:
        try:
            end = problem.evaluate(plan).end
        except TiersimError:
            continue
        if best is None or end < best[0]:
            best = end, plan
    if not proven and (more := beside_recomputation(problem, drafts, best[0] if best else None)) is not None:
        best = more.ns, more.plan
    if best is None:
        least = drafts.least(ROUNDS).least_bytes
        raise refused(problem, "joint_optimal", least, proven=proven, smallest=False, plans=WIDE)
    return best[1], best[0], None if shares is None else shares.bound


def drafted(problem: Problem) -> list[Plan]:
    """The plans that `hybrid`'s drafts come to in this class, the fastest by its model first; not replayed."""
    drafts = Drafts(problem, inputs=False)
    return _fastest(drafts, list(drafts.search(ROUNDS)))


def _fastest(drafts: Drafts, found: Sequence[Draft]) -> list[Plan]:
    return [drafts.plan(draft) for draft in sorted(found, key=lambda draft: draft.rank)[:REPLAYS]]


def _relaxed(problem: Problem, index: TraceIndex, host: str, moments: int, time_limit: float) -> Shares | None:
    """The program's best answer in the time; of a large trace first with `FEW` moments, which may have to do."""
    ends, best = time.monotonic() + time_limit, None
    cost = [problem.cost.op_ns(op) for op in range(len(index.reads))]
    route = partial(trip, problem.platform, host) if host else None
    for count in (FEW, moments) if len(index.reads) > LARGE and moments > FEW else (moments,):
        program = program_of(index, cost, problem.budget, route, count)
        shares = program.relax(problem.budget, max(ends - time.monotonic(), 1e-6))
        if shares is not None and (best is None or shares.bound >= best.bound):
            best = shares
    return best


def _by_shares(drafts: Drafts, shares: Shares) -> Draft:
    """The program's shares made whole: what is resident stays, the rest returns or is recomputed, in proportion."""
    found = {}
    for i, saved in enumerate(drafts.results.saved):
        parts = np.zeros(3)
        t = max(saved.tensors, key=lambda t: drafts.results.index.size[t])
        away = 1.0 - shares.resident.get(t, 1.0)
        ways = (shares.restored.get(t, 0.0) * saved.offloads, shares.recomputed.get(saved.op, 0.0) * saved.recomputes)
        for way, part in zip((OFFLOAD, RECOMPUTE), ways, strict=True):
            parts[way] = away * part / sum(ways) if sum(ways) else 0.0
        parts[KEEP] = 1.0 - parts[OFFLOAD] - parts[RECOMPUTE]
        found[i] = parts
    choice = [KEEP] * len(drafts.results.saved)
    for i, way in rounded(drafts.results, found).items():
        choice[i] = way
    return drafts.draft(choice)
