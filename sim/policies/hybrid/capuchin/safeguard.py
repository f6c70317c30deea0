"""No guided iteration is slower than those before it: one that would be gives way to the fastest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sim.errors import Deadlock, OutOfMemory, Thrashing
from sim.log import WHY, EventLog
from sim.plan import Plan, Problem, Run
from sim.policies.hybrid.capuchin.guide import Guide


def no_slower(
    problem: Problem, past: Sequence[Run], guide: Guide, plan_of: Callable[[Guide | None], Plan], feedback: float
) -> Plan:
    """The plan of a guide if it fits and ends no later than each past iteration did; else the fastest known.

    past: iterations of the same trace, the measured one first.
    plan_of: the plan of a guide, and passive mode for None.
    feedback: the share of its swap time by which a late tensor's in-trigger moves.
    A plan that gives way notes as `next` what the feedback makes of the guide that was tried.
    """
    fastest = min(past, key=lambda run: run.log.end)
    tried, passive = plan_of(guide), plan_of(None)
    log = _replayed(problem, tried)
    # where carried tensors move, an iteration begins with them elsewhere than the measured one did
    shifted = _replayed(problem, passive) if any(_carried_move(run.log) for run in past) else None
    limit = fastest.log.end if shifted is None else min(fastest.log.end, shifted.end)
    if log is not None and log.end <= limit:
        return tried
    known = fastest.plan.notes.get("guide")
    others = [plan_of(known), passive] if known is not None else [passive]
    found = [(log.end, tried)] if log is not None else []
    found += [(replayed.end, plan) for plan in others if (replayed := _replayed(problem, plan)) is not None]
    best = min(found, key=lambda one: one[0], default=(0, others[-1]))[1]
    if best is tried:
        return tried
    return replace(best, notes={**best.notes, "next": guide if log is None else guide.after(log, feedback)})


def _carried_move(log: EventLog) -> bool:
    """Whether a tensor that is carried to the next iteration was copied."""
    moved = log.interval("tensor")[log.interval("why") == WHY["move"]]
    return bool(np.isin(moved, [tensor for pair in log.trace.carry for tensor in pair]).any())


def _replayed(problem: Problem, plan: Plan) -> EventLog | None:
    """The log of an iteration with a plan; None where it does not fit."""
    try:
        return problem.evaluate(plan)
    except (OutOfMemory, Thrashing, Deadlock):
        return None
