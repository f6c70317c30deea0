"""Knapsacks: what to save within a share of the memory, and what to give up for so many bytes.

To save there are three solvers, with the roundings of PyTorch's. Each takes the items' memory and runtime and the room,
and says per item whether it is saved. PyTorch: torch/_functorch/_activation_checkpointing/knapsack.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.solvers.silence import off_stdout

Picker = Callable[[Sequence[float], Sequence[float], float], list[bool]]

QUANTA = 10_000
"""Parts of a room of 1 to which the dynamic program rounds memory."""


def by_dp(memory: Sequence[float], runtime: Sequence[float], room: float) -> list[bool]:
    """Most runtime saved, memory rounded to a ten-thousandth of a room of 1 (so a little more than the room may go in).

    Runtimes are single-precision numbers. Among equals later items stay out.
    """
    units, width = [round(one * QUANTA) for one in memory], round(room * QUANTA) + 1
    best = np.zeros((len(units) + 1, width), np.float32)
    for i, (unit, gain) in enumerate(zip(units, np.asarray(runtime, np.float32), strict=True)):
        best[i + 1] = best[i]
        if unit == 0:
            best[i + 1] = best[i] + gain
        elif unit < width:
            best[i + 1, unit:] = np.maximum(best[i, unit:], best[i, :-unit] + gain)
    chosen, left = [False] * len(units), width - 1
    for i in reversed(range(len(units))):
        if best[i + 1, left] != best[i, left]:
            chosen[i], left = True, left - units[i]
    return chosen


def by_ratio(memory: Sequence[float], runtime: Sequence[float], room: float) -> list[bool]:
    """Items by falling runtime per memory, each that still fits."""
    order = sorted(range(len(memory)), key=lambda i: runtime[i] / memory[i], reverse=True)
    chosen, taken = [False] * len(memory), 0.0
    for i in order:
        if taken + memory[i] <= room:
            chosen[i], taken = True, taken + memory[i]
    return chosen


def by_ilp(memory: Sequence[float], runtime: Sequence[float], room: float) -> list[bool]:
    """Most runtime saved, by an integer program on unrounded memory."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    with off_stdout():
        found = milp(
            -np.array(runtime),
            constraints=LinearConstraint(np.array(memory), ub=room),
            integrality=np.ones(len(memory)),
            bounds=Bounds(0, 1),
        )
    return [bool(one == 1) for one in found.x]


PICKERS: dict[str, Picker] = {"dp": by_dp, "greedy": by_ratio, "ilp": by_ilp}

COVER_UNITS = 5_000
"""Units into which `least_cover` divides what is to be covered, where sizes have no larger common one."""


class Group(NamedTuple):
    """Items of which each may be taken at its own cost, or all together at one.

    items: (bytes, cost) of each, cost None where it can't be taken alone.
    together: the cost of all, None where that is impossible.
    """

    items: Sequence[tuple[int, int | None]]
    together: int | None


def least_cover(groups: Sequence[Group], need: int, units: int = COVER_UNITS) -> int | None:
    """The least cost of items of at least so many bytes in all, by a dynamic program over bytes; None if there is none.

    Exact where `need` is at most so many of the sizes' largest common unit; else sizes are rounded up to a
    coarser one, and the answer is a lower bound.
    """
    if need <= 0:
        return 0
    unit = max(math.gcd(*(size for group in groups for size, _ in group.items)), -(-need // units))
    width = -(-need // unit) + 1
    never = np.int64(1) << 62
    least = np.full(width, never)  # per unit covered, or more
    least[0] = 0

    def taken(before: NDArray[np.int64], size: int, cost: int) -> NDArray[np.int64]:
        step = min(-(-size // unit), width - 1)
        covered = np.concatenate((np.full(step, before[0]), before[: width - step]))
        return np.where(covered < never, covered + cost, never)

    for group in groups:
        alone = least
        for size, cost in group.items:
            if cost is not None:
                alone = np.minimum(alone, taken(alone, size, cost))
        if group.together is not None:
            alone = np.minimum(alone, taken(least, sum(size for size, _ in group.items), group.together))
        least = alone
    return int(least[-1]) if least[-1] < never else None
