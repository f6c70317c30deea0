"""Removing unnecessary recomputation: what a plan drops although there is memory for it stays resident instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sim.solvers.residency import Residency
from sim.solvers.schedule import Schedule, schedule_of

PASSES = 6

Gaps = Mapping[int, Sequence[tuple[int, int]]]
"""Per rerun (a step) the tensors that it produces and that are read: each with the step after which it was freed."""


def remove_unnecessary(schedule: Schedule, cost: Sequence[int], budget: int) -> Schedule:
    """The same plan without recomputations whose results can stay resident instead within `budget` bytes.

    Those that take longest per byte come first. What was recomputed only for them is left out with them, and the
    memory that this frees is used in the next pass, of which there are at most six. Never slower than the plan given;
    the peak is above the budget only if that of the plan given was, and never above both. Where nothing has to be
    recomputed, nothing is. cost: ns per op.
    """
    plain = schedule_of(schedule.index, {}, hold=schedule.hold)
    if plain.peak() <= budget:  # a single one removed may only exchange an operand for its result
        return plain
    for _ in range(PASSES):
        left_out = _left_out(schedule, cost, budget)
        if not left_out:
            break
        reruns: dict[int, list[int]] = {}
        for step, (op, anchor) in enumerate(schedule.steps):
            if anchor >= 0 and step not in left_out:
                reruns.setdefault(anchor, []).append(op)
        hold, once = schedule.hold, schedule.once_recomputed
        fewer = schedule_of(schedule.index, reruns, prune=True, hold=hold, once_recomputed=once)
        # what the program holds and nothing recomputes any more stays until it is released
        if fewer.peak() > max(schedule.peak(), budget):
            break
        schedule = fewer
    return schedule


def _left_out(schedule: Schedule, cost: Sequence[int], budget: int) -> set[int]:
    size = schedule.index.size
    residency = schedule.residency()
    held, gaps = residency.held.copy(), _gaps(schedule, residency)
    worth = {
        step: cost[schedule.steps[step][0]] / max(sum(size[t] for t, _ in tensors), 1) for step, tensors in gaps.items()
    }
    chosen: set[int] = set()
    for step in sorted(gaps, key=lambda step: (-worth[step], step)):
        start = min((freed + 1 for _, freed in gaps[step]), default=step)
        more = np.zeros(step - start, np.int64)
        for t, freed in gaps[step]:
            more[freed + 1 - start :] += size[t]
        stays = held[start:step] + more
        if stays[more > 0].max(initial=0) <= budget:
            held[start:step] = stays
            chosen.add(step)
    return chosen


def _gaps(schedule: Schedule, residency: Residency) -> Gaps:
    """The gaps of tensors that are recomputed."""
    overwritten = set(schedule.index.overwritten)
    gaps: dict[int, list[tuple[int, int]]] = {i: [] for i, (_, anchor) in enumerate(schedule.steps) if anchor >= 0}
    for i, t, freed in zip(*(column.tolist() for column in residency.returns()), strict=True):
        if t in overwritten:  # it could not have stayed
            gaps.pop(i, None)
        elif i in gaps:
            gaps[i].append((t, freed))
    return gaps
