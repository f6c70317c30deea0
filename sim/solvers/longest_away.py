"""What leaves a device while its load exceeds a limit: each time the tensor that is away longest across the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from sim.solvers.load_curve import Absence, Curve, Load


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


def most_away(chosen: Iterable[Absence]) -> int:
    """The most bytes of these that are elsewhere at once, each from the access behind which it leaves to the next."""
    changes = [change for one in chosen for change in ((one.left, one.bytes), (one.back, -one.bytes))]
    return max(accumulate(bytes for _, bytes in sorted(changes)), default=0)


def parts(capacity: int, needs: Sequence[int]) -> list[int]:
    """A memory that several devices use, dealt to them in proportion to what each needs; to one, all of it."""
    return [capacity * need // max(sum(needs), 1) for need in needs]


def _absences(curve: Curve) -> Iterator[Absence]:
    """Every tensor between two consecutive accesses with an op in between."""
    for t, variable in curve.variables.items():
        for left, back in pairwise(variable.accesses):
            if back > left + 1:
                gap = int(curve.start[back] - curve.end[left])
                yield Absence(t, variable.bytes, left, back, gap, variable.out_ns, variable.in_ns)
