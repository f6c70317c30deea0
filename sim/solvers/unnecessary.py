"""Removing unnecessary recomputation: what a plan drops although there is memory for it stays resident instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.solvers.runs import Runs, runs

PASSES = 6

Gaps = Mapping[int, Sequence[tuple[int, int]]]
"""Per rerun (a step) the tensors that are made there and read: each with the step after which it went."""


def remove_unnecessary(found: Runs, cost: Sequence[int], budget: int) -> Runs:
    """The same plan without recomputations whose results can stay resident instead within `budget` bytes.

    Those that take longest per byte come first. What was recomputed only for them is left out with them, and the
    memory that this frees is used in the next pass, of which there are at most six. Never slower than the plan given;
    the peak is above the budget only if that of the plan given was, and never above both. Where nothing has to be
    recomputed, nothing is. cost: ns per op.
    """
    plain = runs(found.ledger, {}, hold=found.hold)
    if plain.peak() <= budget:  # one at a time, an operand may take the place of what is made from it
        return plain
    for _ in range(PASSES):
        left_out = _left_out(found, cost, budget)
        if not left_out:
            break
        again: dict[int, list[int]] = {}
        for step, (op, anchor) in enumerate(found.steps):
            if anchor >= 0 and step not in left_out:
                again.setdefault(anchor, []).append(op)
        less = runs(found.ledger, again, prune=True, hold=found.hold)
        # what the program holds and nothing makes again any more stays until it is released
        if less.peak() > max(found.peak(), budget):
            break
        found = less
    return found


def _left_out(found: Runs, cost: Sequence[int], budget: int) -> set[int]:
    size = found.ledger.size
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


def _walk(found: Runs) -> tuple[NDArray[np.int64], Gaps]:
    """The bytes held during each step on one device, and the gaps of what runs again."""
    ledger, size = found.ledger, found.ledger.size
    kept, overwritten = set(ledger.trace.outputs), set(ledger.overwritten)
    live = {t for t, maker in enumerate(ledger.producer) if maker < 0}
    uses: list[int] = (ledger.trace.released >= 0).astype(int).tolist()  # what the program holds it uses
    for op, _ in found.steps:
        for t in ledger.reads[op]:
            uses[t] += 1
    held = np.zeros(len(found.steps), np.int64)
    gaps: dict[int, list[tuple[int, int]]] = {}
    went: dict[int, int] = {}
    now = sum(size[t] for t in live)
    for step, ((op, anchor), gone) in enumerate(zip(found.steps, found.drops, strict=True)):
        reads, writes = ledger.reads[op], ledger.writes[op]
        missing = [t for t in writes if t not in live and uses[t]]
        # what was overwritten could not have stayed
        if anchor >= 0 and overwritten.isdisjoint(missing):
            gaps[step] = [(t, went[t]) for t in missing]
        scratch, given_up = ledger.workspace[op], 0
        for t in writes:
            if ledger.replaces[t] in live:
                live.discard(ledger.replaces[t])
                given_up += size[t] if t in live else 0
            elif t in live:
                scratch += size[t]
            else:
                now += size[t]
            live.add(t)
        held[step] = now + scratch
        now -= given_up
        released = ledger.releases.get(op, ()) if anchor < 0 else ()
        for t in (*reads, *released):
            uses[t] -= 1
        unread = (t for t in (*reads, *writes, *released) if uses[t] <= 0 and ledger.producer[t] >= 0 and t not in kept)
        for t in live.intersection((*gone, *unread)):
            live.discard(t)
            went[t] = step
            now -= size[t]
    return held, gaps
