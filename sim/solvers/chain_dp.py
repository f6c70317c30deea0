"""Checkpointing a heterogeneous chain by dynamic programming over memory slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from sim.solvers.reversal import ReversalSchedule

INF = 1 << 60


@dataclass(frozen=True)
class ChainCosts:
    """A chain of L stages. Times in ns, sizes in bytes.

    uf, ub: forward and backward time, L entries.
    turn: forward time where the backward follows at once, so that the output need not be computed unless that backward
        reads it.
    x: L + 1 sizes of stage inputs, the last one that of the last output.
    xbar: what stage i saves for its own backward, its output included, L entries.
    of: bytes beyond input and output while a stage runs and saves nothing.
    of_saving: bytes beyond input and xbar while it saves.
    ob: bytes beyond all that and the incoming gradient while it runs backward.
    there: bytes of weight gradients of later stages, before a stage's backward begins; none where empty.
    grown: bytes that weight gradients add to a stage's backward peak, some of its own with them; none where empty.
    """

    uf: Sequence[int]
    turn: Sequence[int]
    ub: Sequence[int]
    x: Sequence[int]
    xbar: Sequence[int]
    of: Sequence[int]
    of_saving: Sequence[int]
    ob: Sequence[int]
    there: Sequence[int] = ()
    grown: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.uf)


@dataclass(frozen=True, eq=False)
class ChainTable:
    """Least times of all parts of a chain for all numbers of free slots.

    best[j - i][i]: per number of slots the time to run stages i … j forward and backward when x[i] is held
        outside and the gradient of j's output inside; stage L is the loss, of no time. Shape of a row:
        (slots + 1,); INF where it cannot be.
    slot: bytes of one.
    saving, hold: slots that stage i needs to run forward and save, beside the resident gradients, and to run backward.
    lying: slots of the gradients that are resident until stage j's backward, of its output and of weights.
    """

    costs: ChainCosts
    slots: int
    slot: Fraction
    x: Sequence[int]
    xbar: Sequence[int]
    saving: Sequence[int]
    hold: Sequence[int]
    lying: Sequence[int]
    best: Sequence[NDArray[np.int64]]

    @property
    def time(self) -> int:
        """Nanoseconds of the whole chain with all slots; INF where it does not fit."""
        free = self.slots - self.x[0]
        return int(self.best[len(self.costs)][0, free]) if free >= 0 else INF

    def least_bytes(self) -> int | None:
        """The fewest bytes, to the slot, that some schedule fits in; None if more than there are."""
        fits = np.flatnonzero(self.best[len(self.costs)][0] < INF)
        least = int(fits[0]) + self.x[0] if len(fits) else self.slots + 1
        return math.ceil(least * self.slot) if least <= self.slots else None

    def schedule(self) -> ReversalSchedule:
        """The steps of a schedule of that least time; see `sim.solvers.reversal`."""
        end, uf = len(self.costs), (*self.costs.uf, 0)
        found: ReversalSchedule = []
        # entries to expand (first, last, free slots), or steps to append as they are
        stack: list[tuple[int, int, int] | tuple[str, int]] = [(0, end, self.slots - self.x[0])]
        while stack:
            top = stack.pop()
            if isinstance(top[0], str):
                if top[1] < end:
                    found.append(top)
                continue
            i, j, m = top
            if i == j:
                stack += [("B", i), ("F", i)]
                continue
            best = int(self.best[j - i][i, m])
            if m >= max(self.hold[i], self.lying[j] + self.saving[i]):
                time = uf[i] + self.costs.ub[i] + int(self.best[j - i - 1][i + 1, m - self.xbar[i]])
                if time == best:
                    stack += [("B", i), (i + 1, j, m - self.xbar[i]), ("F", i)]
                    continue
            stack += self._cut(i, j, m, best)
        return found

    def _cut(self, i: int, j: int, m: int, best: int) -> list[tuple[int, int, int] | tuple[str, int]]:
        """The parts, last first, of a schedule of that time which keeps the input of a stage k."""
        passed = 0
        for k in range(i + 1, min(j, len(self.costs) - 1) + 1):
            passed += self.costs.uf[k - 1]
            if m < self.x[k]:
                continue
            if passed + int(self.best[j - k][k, m - self.x[k]] + self.best[k - 1 - i][i, m]) == best:
                return [(i, k - 1, m), (k, j, m - self.x[k]), *(("F", s) for s in reversed(range(i, k)))]
        raise AssertionError("a table whose entry comes from nowhere")


def slots_for(costs: ChainCosts, budget: int, slots: int) -> tuple[Fraction, list[list[int]]]:
    """Bytes of a slot, and x, xbar, of, of_saving, ob, there and grown in whole slots, rounded up.

    Exact where the budget holds no more than `slots` multiples of the sizes' greatest common divisor;
    else a slot is the budget's `slots`-th part.
    """
    lists = (costs.x, costs.xbar, costs.of, costs.of_saving, costs.ob, costs.there, costs.grown)
    unit = math.gcd(*(size for sizes in lists for size in sizes)) or max(budget, 1)
    if budget // unit <= slots:
        return Fraction(unit), [[size // unit for size in sizes] for sizes in lists]
    return Fraction(budget, slots), [[-(-size * slots // budget) for size in sizes] for sizes in lists]


def solve(costs: ChainCosts, budget: int, slots: int = 500) -> ChainTable:
    """Fill the table of a chain for `budget` bytes.

    The recurrence of Rotor (Herrmann et al., arXiv 1911.13214): either stage i saves all it needs and the
    rest goes on behind it, or the chain runs forward to some stage k that holds its input, and is reversed
    from there, then before there. Time O(L^3 slots), one vector operation over k and slots together.
    Cutting just before the loss never pays: the plan for what lies before it, with the loss at its turning
    point, does the same without the first forward. So such cuts are left out.
    Departs: what a saving stage needs is checked beside the gradient that is resident while it runs forward,
    none before the loss, where the paper's code counts that of its own output; `turn` is `uf` in the paper.
    Weight gradients, which the paper lacks, are resident beside stages i … j from those behind j on: as many bytes
    in any order, so a constant of each part's end, and no more states.
    """
    count = len(costs)
    slot, (x, xbar, of, of_saving, ob, there, grown) = slots_for(costs, budget, slots)
    total = int(budget / slot)
    x, xbar, of = [*x, 0], [*xbar, 0], [*of, 0]
    there, grown = there or [0] * count, grown or [0] * count
    uf, turn, ub = [*costs.uf, 0], [*costs.turn, 0], [*costs.ub, 0]
    # what stage i needs inside to run backward, the gradient of its output beside it
    hold = [x[i + 1] + xbar[i] + ob[i] + grown[i] for i in range(count)] + [x[count]]
    saving = [xbar[i] + of_saving[i] for i in range(count)] + [0]
    lying = [x[i + 1] + there[i] for i in range(count)] + [0]
    width = total + 1
    passed = np.concatenate(([0], np.cumsum(np.array(uf, np.int64))))
    best: list[NDArray[np.int64]] = []
    # the same by j - k and k, moved right by x[k], with the forward time before k: what is left beside checkpoint k
    beside: list[NDArray[np.int64]] = []
    sweep = [0] * (count + 1)  # the most slots that running forward from i on takes, before the last checkpoint's op
    for span in range(count + 1):
        rows = count + 1 - span
        if span > 1:
            sweep = [max(most, x[i + span - 1] + x[i + span] + of[i + span - 1]) for i, most in enumerate(sweep[:rows])]
        elif span:
            sweep = [x[i + 1] + of[i] for i in range(rows)]
        row = _cut([lying[i + span] + sweep[i] for i in range(rows)], width, best, beside, passed)
        for i in range(rows):
            first = max(hold[i], lying[i + span] + saving[i])
            if not span:
                row[i, first:] = turn[i] + ub[i]
            elif first < width:
                chained = best[-1][i + 1, first - xbar[i] : width - xbar[i]] + (uf[i] + ub[i])
                np.minimum(row[i, first:], chained, out=row[i, first:])
        best.append(row)
        moved = np.empty_like(row)
        for k in range(rows):
            moved[k, : x[k]] = INF
            moved[k, x[k] :] = row[k, : max(width - x[k], 0)]
        moved += passed[:rows, None]
        beside.append(moved)
    return ChainTable(costs, total, slot, x, xbar, saving, hold, lying, best)


def _cut(
    least: Sequence[int],
    width: int,
    best: Sequence[NDArray[np.int64]],
    beside: Sequence[NDArray[np.int64]],
    passed: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The least times of all parts of the next length that run forward to a checkpoint k first; shape (parts, width).

    least: slots that each takes at least. best, beside, passed: see `solve`.
    """
    rows, span = len(least), len(best)
    found = np.full((rows, width), 2 * INF, np.int64)
    for ahead in range(1, span + 1):  # from i to k
        parts = rows if ahead < span else rows - 1  # just before the loss it never pays
        tried = beside[span - ahead][ahead : ahead + parts] + best[ahead - 1][:parts]
        np.minimum(found[:parts], tried, out=found[:parts])
    found -= passed[:rows, None]
    np.minimum(found, INF, out=found)
    for row, first in zip(found, least, strict=True):
        row[:first] = INF
    return found
