"""Which items to save within a share of the memory: three solvers, with the roundings of PyTorch's.

Each takes the items' memory and runtime and the room, and says per item whether it is saved. PyTorch:
torch/_functorch/_activation_checkpointing/knapsack.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

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

    found = milp(
        -np.array(runtime),
        constraints=LinearConstraint(np.array(memory), ub=room),
        integrality=np.ones(len(memory)),
        bounds=Bounds(0, 1),
    )
    return [bool(one == 1) for one in found.x]


PICKERS: dict[str, Picker] = {"dp": by_dp, "greedy": by_ratio, "ilp": by_ilp}
