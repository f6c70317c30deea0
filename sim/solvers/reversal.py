"""Reversing a chain of steps: which step runs when, forward and backward.

A schedule is a list of (kind, step): "F" runs a step forward, "B" backward. Each step's first "F" comes
in order before any "B"; all later ones are recomputations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb

from sim.solvers.schedule import TraceIndex

ReversalSchedule = list[tuple[str, int]]


def repetitions(steps: int, slots: int) -> int:
    """The least r with `steps` <= C(slots + r, slots): how often a step is advanced at most."""
    r = 0
    while comb(slots + r, slots) < steps:
        r += 1
    return r


def extra_steps(steps: int, slots: int) -> int:
    """Forward steps beyond one each that the best reversal needs with `slots` states, the first one counted.

    t(l, c) = r l - C(c + r, c + 1); Griewank, Walther, ACM TOMS 26(1), 2000 (Algorithm 799).
    """
    r = repetitions(steps, slots)
    return r * steps - comb(slots + r, slots + 1)


def binomial_split(steps: int, slots: int) -> int:
    """How far to advance before the next snapshot: the largest j that the optimum allows.

    With slots >= 2 and steps >= 2 those are the j with C(c+r-2, c) <= j <= C(c+r-1, c) and
    C(c+r-2, c-1) <= l-j <= C(c+r-1, c-1).
    """
    r = repetitions(steps, slots)
    largest = min(comb(slots + r - 1, slots), steps - comb(slots + r - 2, slots - 1))
    return max(1, min(largest, steps - 1))


def binomial_reversal(steps: int, slots: int) -> ReversalSchedule:
    """The schedule with the fewest forward steps that holds at most `slots` states at once."""
    found: ReversalSchedule = []
    stack = [(0, steps, slots)]
    while stack:
        start, length, free = stack.pop()
        if length == 1:
            found += [("F", start), ("B", start)]
        elif free == 1:
            for end in reversed(range(start, start + length)):
                found += _forward(start, end + 1)
                found.append(("B", end))
        else:
            ahead = binomial_split(length, free)
            found += _forward(start, start + ahead)
            stack += [(start, ahead, free), (start + ahead, length - ahead, free - 1)]
    return found


def bisection_reversal(steps: int, base: int = 1) -> ReversalSchedule:
    """Divide and conquer: advance half way, reverse the second half, then the first; `base` steps at once.

    Extra forward steps: t(l) = l/2 + 2 t(l/2) = (l/2) log2(l) for powers of two and base 1.
    """
    found: ReversalSchedule = []
    stack = [(0, steps)]
    while stack:
        start, length = stack.pop()
        if length <= base:
            found += _forward(start, start + length)
            found += [("B", i) for i in reversed(range(start, start + length))]
        else:
            half = length // 2
            found += _forward(start, start + half)
            stack += [(start, half), (start + half, length - half)]
    return found


def _forward(start: int, end: int) -> Iterator[tuple[str, int]]:
    return (("F", i) for i in range(start, end))


def reruns_of(
    index: TraceIndex, schedule: ReversalSchedule, forward: Sequence[Sequence[int]], anchors: Sequence[int]
) -> dict[int, list[int]]:
    """Per op the ops that are recomputed before it, for `schedule_of`, given each step's forward ops.

    anchors: per step the op before which its backward begins, in falling order of steps; -1 for a step
    without backward, which needs nothing resident.
    """
    ran: set[int] = set()
    waiting: list[int] = []
    reruns: dict[int, list[int]] = {}
    for kind, i in schedule:
        if kind == "B":
            if anchors[i] >= 0 and waiting:
                reruns.setdefault(anchors[i], []).extend(index.can_run_together(waiting, anchors[i]))
                waiting = []
        elif i in ran:
            waiting += forward[i]
        else:
            ran.add(i)
    return reruns
