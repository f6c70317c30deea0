"""When copies of tensors that leave and return begin, and where the device waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.plan import Action, Move, Wait
from sim.solvers.load_curve import Absence, Curve, Load


@dataclass(frozen=True)
class Trip:
    """A tensor that leaves after one op and whose copy back begins before another; ids.

    wait: the op before which the device waits until it is away, None for nowhere.
    needed: the op that reads it next.
    """

    tensor: int
    leaves: int
    wait: int | None
    returns: int
    needed: int


def scheduled(curve: Curve, chosen: Sequence[Absence], limit: int | None, *, through_time: bool = False) -> list[Trip]:
    """The trips of these absences, by when they leave.

    limit: bytes that are not exceeded while copies are under way: for that the device waits, and copies in begin late;
        None: they may be, and a tensor whose absence is too short for both copies stays.
    through_time: memory is given to copies in in the order of need, each as late as those needed before and after it
        allow; else in the reverse, so that one that is needed later may have the space, and the link, first.
    """
    start, load = curve.start.copy(), curve.load.copy()
    away: dict[Absence, int] = {}
    waits: dict[Absence, int] = {}
    free = 0
    # in the order of the link, so that beside an op those that leave behind one that has not left are there, too
    for one in sorted(chosen, key=lambda one: (one.left, one.back)):
        free = max(int(start[one.left] + curve.end[one.left] - curve.start[one.left]), free) + one.out_ns
        gone = max(int(np.searchsorted(start, free)), one.left + 1)
        full = _above(load[one.left + 1 : min(gone, one.back)], limit)
        if len(full):
            gone = waits[one] = one.left + 1 + int(full[0])
            start[gone:] += free - int(start[gone])
        load[gone : one.back] -= one.bytes
        away[one] = gone
    due = _just_in_time(start, chosen) if through_time and limit is not None else {}
    trips, earliest = [], 0
    queue = int(start[-1]) if len(start) else 0
    for one in sorted(chosen, key=lambda one: (-one.back, -one.left), reverse=bool(due)):
        time = due.get(one, min(int(start[one.back]), queue) - one.in_ns)
        begin = max(int(np.searchsorted(start, time, side="right")) - 1, earliest)
        if limit is None and begin < away[one]:
            continue
        begin = min(max(begin, away[one], one.left + 1), one.back)
        full = _above(load[begin : one.back] + one.bytes, limit)
        begin += int(full[-1]) + 1 if len(full) else 0
        load[begin : one.back] += one.bytes
        queue = int(start[begin])
        if due:
            earliest = begin
        wait = waits.get(one)
        held = None if wait is None else curve.ops[wait]
        trips.append(Trip(one.tensor, curve.ops[one.left], held, curve.ops[begin], curve.ops[one.back]))
    return sorted(trips, key=lambda trip: (trip.leaves, trip.returns, trip.tensor))


def load_with(curve: Curve, trips: Sequence[Trip]) -> Load:
    """Bytes resident during each op where no op waits, and copies out use their link one after the other."""
    place, load, free = {op: i for i, op in enumerate(curve.ops)}, curve.load.copy(), 0
    for trip in sorted(trips, key=lambda trip: (place[trip.leaves], place[trip.needed])):
        variable, left = curve.variables[trip.tensor], place[trip.leaves]
        free = max(int(curve.end[left]), free) + variable.out_ns
        gone = max(int(np.searchsorted(curve.start, free)), left + 1)
        load[gone : place[trip.returns]] -= variable.bytes
    return load


def _just_in_time(start: NDArray[np.int64], chosen: Sequence[Absence]) -> dict[Absence, int]:
    """When each copy in begins so that it ends before its reader and before the copies needed later begin."""
    due: dict[Absence, int] = {}
    queue = int(start[-1]) if len(start) else 0
    for one in sorted(chosen, key=lambda one: (-one.back, -one.left)):
        due[one] = queue = min(int(start[one.back]), queue) - one.in_ns
    return due


def _above(load: NDArray[np.int64], limit: int | None) -> NDArray[np.intp]:
    """Where a load exceeds the limit."""
    return np.flatnonzero(load > limit) if limit is not None else np.zeros(0, np.intp)


def actions_of(trips: Sequence[Trip], home: str, host: str) -> list[Action]:
    """The moves and waits; where a wait and a copy in have the same anchor, the wait precedes it."""
    actions: list[Action] = []
    for trip in trips:
        actions.append(Move(trip.tensor, host, after=trip.leaves))
        actions += [] if trip.wait is None else [Wait(trip.tensor, before=trip.wait)]
    return [*actions, *copies_in(trips, home)]


def copies_in(trips: Sequence[Trip], home: str) -> list[Action]:
    """The moves back; of those that begin before one op, what is needed first precedes."""
    ordered = sorted(trips, key=lambda trip: (trip.returns, trip.needed, trip.tensor))
    return [Move(trip.tensor, home, before=trip.returns) for trip in ordered]
