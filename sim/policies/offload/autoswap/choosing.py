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

Score = Callable[[Absence, Load, int], float]
"""Of an absence, the load now, and the limit."""


def duration(one: Absence, load: Load, limit: int) -> float:
    """DOA: the time between the accesses, by which the published code ranks."""
    return one.gap_ns


def area(one: Absence, load: Load, limit: int) -> float:
    """AOA: the time that the copies leave by the bytes; over the bytes where they leave none."""
    return one.slack_ns * one.bytes if one.slack_ns >= 0 else one.slack_ns / one.bytes


def weighted(one: Absence, load: Load, limit: int) -> float:
    """WDOA: the load above the limit, summed over the ops of the absence."""
    return int((load[one.left + 1 : one.back] - limit).sum())


SCORES: Mapping[str, Score] = MappingProxyType({"doa": duration, "aoa": area, "wdoa": weighted, "swdoa": weighted})
"""`swdoa` is `wdoa` on the load as earlier choices have left it."""


def choose(curve: Curve, limit: int, score: str, least: int) -> tuple[tuple[Absence, ...], int]:
    """What is swapped, in the order of choice, and the highest load with all of it away."""
    load, chosen = curve.load.copy(), list[Absence]()
    rest = candidates(curve, least)
    rank = _ranking(score, rest, curve.load, limit)
    while rest and load.max() > limit:
        one = max(rest, key=lambda other: (rank(other, load), other.bytes, -other.tensor))
        rest.remove(one)
        chosen.append(one)
        load[one.left + 1 : one.back] -= one.bytes
    return tuple(chosen), int(load.max(initial=0))


def _ranking(score: str, absences: Sequence[Absence], whole: Load, limit: int) -> Callable[[Absence, Load], float]:
    """What decides between absences, given the load that the choices so far have left."""
    if score == "vote":
        votes = dict.fromkeys(absences, 0)
        for name in ("doa", "aoa", "wdoa"):
            ordered = sorted(absences, key=lambda one: (SCORES[name](one, whole, limit), one.bytes, -one.tensor))
            for place, one in enumerate(ordered):
                votes[one] += place
        return lambda one, load: votes[one]
    of = SCORES[score]
    return lambda one, load: of(one, load if score == "swdoa" else whole, limit)
