"""What leaves the device while its load exceeds the budget: the tensor that is away longest across the peak."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.plan import Action, Problem
from sim.solvers.cascade import cascade
from sim.solvers.load_curve import Absence, Curve, Load, curve_of
from sim.solvers.swap_trips import actions_of, scheduled


class Offloads(NamedTuple):
    """What leaves, and what it costs.

    actions: the moves and waits.
    times: how often a tensor leaves.
    short: ops for which that is not enough.
    waits: ops that wait until a tensor has left.
    """

    actions: tuple[Action, ...]
    times: int
    short: tuple[int, ...]
    waits: tuple[int, ...]


def offloads(problem: Problem, host: str) -> Offloads:
    """The offloads of each device that its budget asks for; copies out begin early, copies back late."""
    actions: list[Action] = []
    short, waits, count = list[int](), list[int](), 0
    for device in range(problem.trace.devices):
        home = problem.platform.home(device)
        curve = curve_of(problem, device, host)
        chosen, load = longest_away(curve, home.capacity)
        short += [curve.ops[i] for i in np.flatnonzero(load > home.capacity).tolist()]
        trips = scheduled(curve, chosen, home.capacity)
        actions += actions_of(trips, home.name, host)
        waits += [trip.wait for trip in trips if trip.wait is not None]
        count += len(trips)
    return Offloads(cascade(problem.trace, problem.platform, actions, host), count, tuple(short), tuple(waits))


def longest_away(curve: Curve, limit: int) -> tuple[list[Absence], Load]:
    """What leaves while the load exceeds the limit, each time across its highest point, and the load that is left."""
    known = list(_absences(curve))
    left, back, gap, size = (
        np.array([getattr(one, key) for one in known], np.int64) for key in ("left", "back", "gap_ns", "bytes")
    )
    order = np.lexsort((size, gap))  # the longest away last, of equal ones the largest
    stays = np.ones(len(known), np.bool_)
    load, chosen = curve.load.copy(), []
    above = load > limit  # where something may still leave
    while above.any():
        peak = int(np.argmax(np.where(above, load, -1)))
        across = order[(stays & (left < peak) & (peak < back))[order]]
        if not len(across):
            above[peak] = False
            continue
        one = known[int(across[-1])]
        stays[across[-1]] = False
        chosen.append(one)
        load[one.left + 1 : one.back] -= one.bytes
        above &= load > limit
    return chosen, load


def _absences(curve: Curve) -> Iterator[Absence]:
    """Every tensor between two consecutive accesses with an op in between."""
    for t, variable in curve.variables.items():
        for left, back in pairwise(variable.accesses):
            if back > left + 1:
                gap = int(curve.start[back] - curve.end[left])
                yield Absence(t, variable.bytes, left, back, gap, variable.out_ns, variable.in_ns)
