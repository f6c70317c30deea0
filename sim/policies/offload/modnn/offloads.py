"""What leaves the device while its load exceeds the budget, and how its copies move."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.plan import Action, Problem
from sim.solvers.cascade import cascade
from sim.solvers.load_curve import curve_of
from sim.solvers.longest_away import longest_away
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


def offloads(problem: Problem, host: str, *, through_time: bool) -> Offloads:
    """The offloads of each device that its budget asks for; copies out begin early, copies back late.

    through_time: see `scheduled`.
    """
    actions: list[Action] = []
    short, waits, count = list[int](), list[int](), 0
    for device in range(problem.trace.devices):
        home = problem.platform.home(device)
        curve = curve_of(problem, device, host)
        chosen, load = longest_away(curve, home.capacity)
        short += [curve.ops[i] for i in np.flatnonzero(load > home.capacity).tolist()]
        trips = scheduled(curve, chosen, home.capacity, through_time=through_time)
        actions += actions_of(trips, home.name, host)
        waits += [trip.wait for trip in trips if trip.wait is not None]
        count += len(trips)
    return Offloads(cascade(problem.trace, problem.platform, actions, host), count, tuple(short), tuple(waits))
