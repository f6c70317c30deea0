"""Which absences are swapped: the candidates, their scores, and the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from sim.solvers.load_curve import Absence, Curve, Load


def candidates(curve: Curve, least: int) -> list[Absence]:
    """The absences with the highest load strictly between their accesses, of tensors of at least so many bytes."""
    peak = int(np.argmax(curve.load)) if len(curve.load) else 0
    return [
        Absence(t, v.bytes, left, back, int(curve.start[back] - curve.end[left]), v.out_ns, v.in_ns)
        for t, v in curve.variables.items()
        for left, back in pairwise(v.accesses)
        if left < peak < back and v.bytes >= least
    ]


# ---- scores --------------------------------------------------------------------------------------

Score = Callable[[Absence, Sequence[int]], float]
"""Of an absence, and per op the load above the limit, summed over the ops before it."""


def duration(one: Absence, above: Sequence[int]) -> float:
    """DOA: the time between the accesses, by which the published code ranks."""
    return one.gap_ns


def area(one: Absence, above: Sequence[int]) -> float:
    """AOA: the time that the copies leave by the bytes; over the bytes where they leave none."""
    return one.slack_ns * one.bytes if one.slack_ns >= 0 else one.slack_ns / one.bytes


def weighted(one: Absence, above: Sequence[int]) -> float:
    """WDOA: the load above the limit, summed over the ops of the absence."""
    return above[one.back] - above[one.left + 1]


SCORES: Mapping[str, Score] = MappingProxyType({"doa": duration, "aoa": area, "wdoa": weighted, "swdoa": weighted})
"""`swdoa` is `wdoa` on the load as earlier choices have left it."""


def choose(curve: Curve, limit: int, score: str, least: int) -> tuple[tuple[Absence, ...], int]:
    """What is swapped, in the order of choice, and the highest load with all of it away."""
    load, chosen = curve.load.copy(), list[Absence]()
    rest = ranked(score, candidates(curve, least), _above(load, limit))
    while rest and load.max() > limit:
        one = ranked(score, rest, _above(load, limit))[-1] if score == "swdoa" else rest[-1]
        rest.remove(one)
        chosen.append(one)
        load[one.left + 1 : one.back] -= one.bytes
    return tuple(chosen), int(load.max(initial=0))


def ranked(score: str, absences: Sequence[Absence], above: Sequence[int]) -> list[Absence]:
    """The absences, the one that is chosen first at the end; of equals the larger, and the earlier tensor."""
    if score != "vote":
        return sorted(absences, key=lambda one: (SCORES[score](one, above), one.bytes, -one.tensor))
    votes = dict.fromkeys(absences, 0)
    for name in ("doa", "aoa", "wdoa"):
        for place, one in enumerate(ranked(name, absences, above)):
            votes[one] += place
    return sorted(absences, key=lambda one: (votes[one], one.bytes, -one.tensor))


def _above(load: Load, limit: int) -> list[int]:
    """Per op the load above the limit, summed over the ops before it, and once more for all ops."""
    return [0, *np.cumsum(load - limit).tolist()]
