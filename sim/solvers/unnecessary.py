"""Removing unnecessary recomputation: what a plan drops although there is memory for it stays resident instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

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
        fewer = schedule_of(schedule.index, reruns, prune=True, hold=schedule.hold)
        # what the program holds and nothing recomputes any more stays until it is released
        if fewer.peak() > max(schedule.peak(), budget):
            break
        schedule = fewer
    return schedule


def _left_out(schedule: Schedule, cost: Sequence[int], budget: int) -> set[int]:
    size = schedule.index.size
    held, gaps = _walk(schedule)
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


def _walk(schedule: Schedule) -> tuple[NDArray[np.int64], Gaps]:
    """The bytes held during each step on one device, and the gaps of recomputed tensors."""
    index, size = schedule.index, schedule.index.size
    kept, overwritten = set(index.trace.outputs), set(index.overwritten)
    live = {t for t, producer in enumerate(index.producer) if producer < 0}
    uses: list[int] = (index.trace.released >= 0).astype(int).tolist()  # what the program holds counts as used
    for op, _ in schedule.steps:
        for t in index.reads[op]:
            uses[t] += 1
    held = np.zeros(len(schedule.steps), np.int64)
    gaps: dict[int, list[tuple[int, int]]] = {}
    freed: dict[int, int] = {}
    now = sum(size[t] for t in live)
    for step, ((op, anchor), dropped) in enumerate(zip(schedule.steps, schedule.drops, strict=True)):
        reads, writes = index.reads[op], index.writes[op]
        missing = [t for t in writes if t not in live and uses[t]]
        # what was overwritten could not have stayed
        if anchor >= 0 and overwritten.isdisjoint(missing):
            gaps[step] = [(t, freed[t]) for t in missing]
        scratch, given_up = index.workspace[op], 0
        for t in writes:
            if index.replaces[t] in live:
                live.discard(index.replaces[t])
                given_up += size[t] if t in live else 0
            elif t in live:
                scratch += size[t]
            else:
                now += size[t]
            live.add(t)
        held[step] = now + scratch
        now -= given_up
        released = index.releases.get(op, ()) if anchor < 0 else ()
        for t in (*reads, *released):
            uses[t] -= 1
        unread = (t for t in (*reads, *writes, *released) if uses[t] <= 0 and index.producer[t] >= 0 and t not in kept)
        for t in live.intersection((*dropped, *unread)):
            live.discard(t)
            freed[t] = step
            now -= size[t]
    return held, gaps
