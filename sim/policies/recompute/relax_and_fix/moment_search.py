"""Relax-and-fix over moments of the schedule: plans from linear programs, one moment fixed after the other.

The program of one moment (`moments`, beside this file) says what is resident when the op of largest footprint
runs. That is rounded, and what is not kept is recomputed just before it is read. Where such a plan passes the
budget, the op there becomes the next moment: what was decided at the moments before it is fixed, and the program of
that one moment decides what is resident there. In integer programming this is known as relax-and-fix, and the choice
of the next moment as adding a constraint where it is violated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim.solvers.moments import Moment, Program, wanted_until
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of

LEVELS = (0.5, 1e-6, 0.999)
"""How far a tensor has to be resident in the relaxation in order to be kept: three roundings."""
STEP = 2000  # where a moment is short again it gets at least this part of the budget less, each time twice as much


@dataclass(frozen=True, eq=False)
class Dive:
    """What one pass found. found: a plan that fits, or None. programs: how many were solved.

    moments: ops, in the order in which they were added.
    """

    schedule: Schedule | None
    moments: Sequence[int]
    programs: int


class MomentSearch:
    """Plans and bounds for one trace. cost: ns per op."""

    def __init__(self, index: TraceIndex, cost: Sequence[int]) -> None:
        self.index, self.cost = index, cost
        peaks = schedule_of(index, {}).peaks()[1:]
        self.first = int(np.argmax(peaks)) if peaks else 0
        self._moments: dict[int, Moment] = {}

    def moment(self, op: int) -> Moment:
        """The moment at which an op runs in its place, with whatever recomputation is possible after it."""
        if op not in self._moments:
            self._moments[op] = Moment(self.index, op, self.index.recomputable_until)
        return self._moments[op]

    def bound(self, ops: Sequence[int], budget: int) -> int | None:
        """Nanoseconds that every plan recomputes at least, from the moments of some ops; None where nothing fits."""
        moments = [self.moment(op) for op in sorted(set(ops))]
        answer = Program(self.index, self.cost, moments).relax([budget] * len(moments))
        return None if answer is None else answer.bound

    def dive(self, budget: int, level: float, rounds: int) -> Dive:
        """Fix moment after moment until a plan fits, at most `rounds` times; level: one of `LEVELS`."""
        order, added = [self.first], [self.first]
        keep: dict[int, set[int]] = {}
        short: dict[int, int] = {}
        step: dict[int, int] = {}
        for round in range(rounds):
            now, before = order[-1], order[-2] if len(order) > 1 else None
            moments = [self.moment(op) for op in order[-2:]]
            rooms = [budget - short.get(moment.at, 0) for moment in moments]
            held = None if before is None else keep[before]
            answer = Program(self.index, self.cost, moments, held).relax(rooms)
            if answer is None:
                break
            keep[now] = {t for t, far in answer.keep[-1].items() if far >= level}
            schedule = schedule_of(self.index, self._again(order, keep), prune=True)
            excess = _first_excess(schedule, order, budget)
            if excess is None:
                return Dive(schedule, added, round + 1)
            op, bytes = excess
            order = [one for one in order if one <= op]
            if op in order:
                step[op] = 2 * step[op] if op in step else budget // STEP
                short[op] = short.get(op, 0) + max(bytes, step[op])
            else:
                order.append(op)
                added += [] if op in added else [op]
        return Dive(None, added, rounds)

    def _again(self, order: Sequence[int], keep: Mapping[int, Collection[int]]) -> dict[int, list[int]]:
        """Which ops are recomputed before which, where each moment keeps what it keeps and no more.

        In closed form, as in the second phase of Checkmate's rounding: between two moments what is read, or kept at
        the next one, and neither kept nor produced; each just before the first op that needs it.
        """
        reruns: dict[int, list[int]] = {}
        for k, at in enumerate(order):
            end = order[k + 1] if k + 1 < len(order) else None
            chosen = self._missing(self.moment(at), keep[at], end, () if end is None else keep[end])
            done: set[int] = set()
            for op in range(at + 1, len(self.index.reads) if end is None else end + 1):
                needed = self._needed(op, chosen - done)
                if op == end:
                    needed |= chosen - done
                if needed:
                    reruns[op] = sorted(needed)
                    done |= needed
                if len(done) == len(chosen):
                    break
        return reruns

    def _missing(self, moment: Moment, kept: Collection[int], end: int | None, then: Collection[int]) -> set[int]:
        """The ops to be recomputed between a moment and the next."""
        index, may = self.index, set(moment.reruns)
        stack = [*wanted_until(index, moment, end), *(t for t in then if 0 <= index.producer[t] < moment.at)]
        chosen: set[int] = set()
        while stack:
            t = stack.pop()
            op = index.producer[t]
            if t in kept or op in chosen or op not in may:
                continue
            chosen.add(op)
            stack += [read for read in index.reads[op] if 0 <= index.producer[read] < moment.at]
        return chosen

    def _needed(self, op: int, left: Collection[int]) -> set[int]:
        """Which of some ops have to be recomputed for another, directly or not."""
        producer, reads = self.index.producer, self.index.reads
        stack, needed = [producer[t] for t in reads[op]], set[int]()
        while stack:
            one = stack.pop()
            if one < op and one in left and one not in needed:
                needed.add(one)
                stack += [producer[t] for t in reads[one]]
        return needed


def _first_excess(schedule: Schedule, order: Sequence[int], budget: int) -> tuple[int, int] | None:
    """The op at which, or before which, a plan passes the budget most, up to the next moment; and by how much.

    Of the stretches between moments the first one that passes it counts. None where the plan fits.
    """
    peaks = np.array(schedule.peaks()[1:])
    over = np.flatnonzero(peaks > budget)
    if not len(over):
        return None
    place = np.array([op if anchor < 0 else anchor for op, anchor in schedule.steps])
    end = min((op for op in order if op >= place[over[0]]), default=len(place))
    inside = over[place[over] <= end]
    worst = int(inside[np.argmax(peaks[inside])])
    return int(place[worst]), int(peaks[worst]) - budget
