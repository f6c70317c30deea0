"""Removing unnecessary recomputation: what a plan drops although there is memory for it stays resident instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.solvers.schedule import Schedule, schedule_of

PASSES = 6

Gaps = Mapping[int, Sequence[tuple[int, int]]]
"""Per rerun (a step) the tensors that are made there and read: each with the step after which it went."""


def remove_unnecessary(found: Schedule, cost: Sequence[int], budget: int) -> Schedule:
    """The same plan without recomputations whose results can stay resident instead within `budget` bytes.

    Those that take longest per byte come first. What was recomputed only for them is left out with them, and the
    memory that this frees is used in the next pass, of which there are at most six. Never slower than the plan given;
    the peak is above the budget only if that of the plan given was, and never above both. Where nothing has to be
    recomputed, nothing is. cost: ns per op.
    """
    plain = schedule_of(found.index, {}, hold=found.hold)
    if plain.peak() <= budget:  # one at a time, an operand may take the place of what is made from it
        return plain
    for _ in range(PASSES):
        left_out = _left_out(found, cost, budget)
        if not left_out:
            break
        reruns: dict[int, list[int]] = {}
        for step, (op, anchor) in enumerate(found.steps):
            if anchor >= 0 and step not in left_out:
                reruns.setdefault(anchor, []).append(op)
        less = schedule_of(found.index, reruns, prune=True, hold=found.hold)
        # what the program holds and nothing makes again any more stays until it is released
        if less.peak() > max(found.peak(), budget):
            break
        found = less
    return found


def _left_out(found: Schedule, cost: Sequence[int], budget: int) -> set[int]:
    size = found.index.size
    held, gaps = _walk(found)
    worth = {
        step: cost[found.steps[step][0]] / max(sum(size[t] for t, _ in tensors), 1) for step, tensors in gaps.items()
    }
    chosen: set[int] = set()
    for step in sorted(gaps, key=lambda step: (-worth[step], step)):
        start = min((went + 1 for _, went in gaps[step]), default=step)
        more = np.zeros(step - start, np.int64)
        for t, went in gaps[step]:
            more[went + 1 - start :] += size[t]
        stays = held[start:step] + more
        if stays[more > 0].max(initial=0) <= budget:
            held[start:step] = stays
            chosen.add(step)
    return chosen


def _walk(found: Schedule) -> tuple[NDArray[np.int64], Gaps]:
    """The bytes held during each step on one device, and the gaps of what runs again."""
    index, size = found.index, found.index.size
    kept, overwritten = set(index.trace.outputs), set(index.overwritten)
    live = {t for t, maker in enumerate(index.producer) if maker < 0}
    uses: list[int] = (index.trace.released >= 0).astype(int).tolist()  # what the program holds it uses
    for op, _ in found.steps:
        for t in index.reads[op]:
            uses[t] += 1
    held = np.zeros(len(found.steps), np.int64)
    gaps: dict[int, list[tuple[int, int]]] = {}
    went: dict[int, int] = {}
    now = sum(size[t] for t in live)
    for step, ((op, anchor), gone) in enumerate(zip(found.steps, found.drops, strict=True)):
        reads, writes = index.reads[op], index.writes[op]
        missing = [t for t in writes if t not in live and uses[t]]
        # what was overwritten could not have stayed
        if anchor >= 0 and overwritten.isdisjoint(missing):
            gaps[step] = [(t, went[t]) for t in missing]
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
        for t in live.intersection((*gone, *unread)):
            live.discard(t)
            went[t] = step
            now -= size[t]
    return held, gaps
