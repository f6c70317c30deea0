"""Copies beside what planners recompute that may recompute an op more than once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from sim.errors import Infeasible, PolicyError
from sim.plan import Problem, Recompute
from sim.policies.hybrid.hybrid.drafts import WORK, Draft, Drafts, Replayed, replayed
from sim.policies.recompute.relax_and_fix import RelaxAndFix
from sim.policies.recompute.relax_and_fix.moment_search import LEVELS, MomentSearch
from sim.policies.recompute.rotor import Rotor
from sim.policies.recompute.twremat import Twremat
from sim.solvers.located import index_of
from sim.solvers.schedule import Reruns
from sim.solvers.unnecessary import remove_unnecessary

SHARES = (0.0, 0.1, 0.25, 0.5)
"""Memory that is planned for, between what there is and what keeping everything needs: copies have to free the rest."""
PLANS = 5_000
"""Ops of the trace times plans of each planner at most, one is always made; and three times that, times programs at
moments."""
LONG = 1_500
"""Rotor's program takes the cube of the stages: of traces of more ops the separators alone are asked."""
ROUGH, POLISHED = 2, 2
"""Rounds for each plan, and how many of the drafts made so are polished."""


def beside_recomputation(problem: Problem, drafts: Drafts, below: int | None, *, hard: bool = False) -> Replayed | None:
    """The fastest draft that keeps or offloads what such planners do not recompute, if it takes less than `below` ns.

    hard: whether as many programs at moments are solved as `relax_and_fix` solves, of traces of at most `LONG` ops.
    None on several devices, too.
    """
    kept = drafts.kept()
    if len(drafts.devices) > 1 or (below is not None and below <= kept.ns):
        return None
    best: Replayed | None = None
    most = kept.schedule.peak()
    room = drafts.capacity[0] - kept.least_bytes + most
    found: list[tuple[Draft, Drafts]] = []
    ops = len(problem.trace.ops)
    programs = 3 * PLANS // ops if not hard or ops > LONG else RelaxAndFix().rounds
    for reruns in recomputations(problem, room, most, programs):
        given = drafts.given(reruns)
        if below is None or given.kept().ns < below:
            found.append((min(given.rough(ROUGH), key=attrgetter("rank")), given))
    for rough, given in sorted(found, key=lambda each: each[0].rank)[:POLISHED]:
        draft = given.repaired(rough, below)
        for each in (given.polished(draft, WORK), draft):
            run = replayed(problem, given, each)
            if run.fits and (below is None or run.ns < below):
                best, below = run, run.ns
    return best


def recomputations(problem: Problem, room: int, most: int, programs: int) -> Iterator[Reruns]:
    """For what there is first, then for more.

    room: bytes of the home tier that are left to this policy. most: bytes that keeping everything needs of them.
    programs: those at moments, at most.
    """
    ops, seen = len(problem.trace.ops), list[Reruns]()
    planners = (Twremat(), Rotor(remove_unnecessary=True)) if ops <= LONG else (Twremat(),)
    for share in SHARES[: max(1, PLANS // ops)]:
        budget = int(room + share * (most - room))
        tries = [_planned(problem, planner, budget) for planner in planners]
        if not share:
            tries.append(_at_moments(problem, budget, programs))
        for found in tries:
            if found and found not in seen:
                seen.append(found)
                yield found


def _planned(problem: Problem, planner: Twremat | Rotor, budget: int) -> Reruns:
    """What a planner recomputes within a budget, or, where that is too small for it, the smallest that is not."""
    for _ in range(2):
        try:
            plan = planner.plan(replace(problem, platform=problem.platform.with_budget(budget)))
        except Infeasible as refusal:
            if refusal.floor_bytes is None:
                break
            budget = refusal.floor_bytes
        except PolicyError:
            break
        else:
            found: dict[int, list[int]] = {}
            for action in plan.actions:
                if isinstance(action, Recompute) and action.before is not None:
                    found.setdefault(problem.trace.op_id(action.before), []).append(problem.trace.op_id(action.op))
            return found
    return {}


def _at_moments(problem: Problem, budget: int, programs: int) -> Reruns:
    """What is recomputed where linear programs say what is resident whenever memory is short; nothing if none fits."""
    cost = [problem.cost.op_ns(op) for op in range(len(problem.trace.ops))]
    search = MomentSearch(index_of(problem), cost)
    for level in LEVELS:
        dive = search.dive(budget, level, programs)
        programs -= dive.programs
        if dive.schedule is not None:
            found: dict[int, list[int]] = {}
            for op, anchor in remove_unnecessary(dive.schedule, cost, budget).steps:
                if anchor >= 0:
                    found.setdefault(anchor, []).append(op)
            return found
    return {}
