"""Rotor's dynamic program with several ways to run each stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from sim.policies.recompute.rockmate.options import Option
from sim.solvers.chain_dp import INF

Step = tuple[str, int, int]
"""("F" or "B", stage, option): an option says how a backward runs; -1 for a forward."""


@dataclass(frozen=True)
class Line:
    """A chain of L stages. uf, ub: ns. x: L + 1 sizes. temp: bytes beyond input and output while saving nothing.

    there, grown: weight gradients, as in `ChainCosts`; none where empty.
    """

    uf: Sequence[int]
    ub: Sequence[int]
    x: Sequence[int]
    temp: Sequence[int]
    options: Sequence[Sequence[Option]]
    there: Sequence[int] = ()
    grown: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.uf)


class OptionTable:
    """Least times of all parts of a chain for all numbers of free slots; see `sim.solvers.chain_dp`.

    The recurrences are Rotor's (Herrmann et al., arXiv 1911.13214), where "stage i saves all" becomes the best
    of stage i's options, as in Rockmate (Zhao et al., ICML 2023).
    """

    def __init__(self, line: Line, budget: int, slots: int) -> None:
        self.line, count = line, len(line)
        sizes = {*line.x, *line.temp, *line.there, *line.grown}
        for option in (o for options in line.options for o in options):
            sizes |= {option.xbar, option.saving, option.undoing}
        unit = math.gcd(*sizes) or max(budget, 1)
        self.slot = Fraction(unit) if budget // unit <= slots else Fraction(budget, slots)
        self.slots = int(budget / self.slot)
        self.x = [*map(self._up, line.x), 0]
        there, grown = line.there or [0] * count, line.grown or [0] * count
        # the gradients that are resident until a stage's backward: of its output, and of weights
        self.lying = [self.x[i + 1] + self._up(there[i]) for i in range(count)] + [0]
        # per stage and option: slots to start with, to save, and needed beside the resident gradient
        self.ways = [
            [(self._up(o.xbar), self._up(o.xbar) + self._up(o.saving),
              self.x[i + 1] + self._up(o.xbar) + self._up(o.undoing) + self._up(grown[i])) for o in options]
            for i, options in enumerate(line.options)
        ] + [[(0, 0, self.x[count])]]  # fmt: skip
        self.best = [np.full((count + 1 - i, self.slots + 1), INF, np.int64) for i in range(count + 1)]
        for i in range(count + 1):
            for o, (_, saving, hold) in enumerate(self.ways[i]):
                least = max(hold, self.lying[i] + saving)
                row = self.best[i][0]
                row[least:] = np.minimum(row[least:], self._turning(i, o))
        for span in range(1, count + 1):
            for i in range(count + 1 - span):
                self._fill(i, i + span)

    def _up(self, bytes: int) -> int:
        return math.ceil(bytes / self.slot)

    def _turning(self, i: int, o: int) -> int:
        """Time of a stage forward and at once backward."""
        if i == len(self.line):
            return 0
        option = self.line.options[i][o]
        return option.turn + self.line.ub[i] + option.extra

    def _fill(self, i: int, j: int) -> None:
        line, x, row = self.line, self.x, self.best[i][j - i]
        passed, sweep = 0, 0
        for k in range(i + 1, min(j, len(line) - 1) + 1):
            sweep = max(sweep, (x[k - 1] if k - 1 > i else 0) + x[k] + self._up(line.temp[k - 1]))
            passed += line.uf[k - 1]
            least = max(self.lying[j] + sweep, x[k])
            if least <= self.slots:
                later = self.best[k][j - k, least - x[k] : self.slots + 1 - x[k]]
                np.minimum(row[least:], later + self.best[i][k - 1 - i, least:] + passed, out=row[least:])
        for o, (xbar, saving, hold) in enumerate(self.ways[i]):
            least = max(hold, self.lying[j] + saving)
            if least <= self.slots:
                behind = self.best[i + 1][j - i - 1, least - xbar : self.slots + 1 - xbar]
                time = line.uf[i] + line.ub[i] + line.options[i][o].extra
                np.minimum(row[least:], behind + time, out=row[least:])
        np.minimum(row, INF, out=row)

    @property
    def time(self) -> int:
        """Nanoseconds of the whole chain; INF where it does not fit."""
        free = self.slots - self.x[0]
        return int(self.best[0][len(self.line), free]) if free >= 0 else INF

    def least_bytes(self) -> int | None:
        """The fewest bytes, to the slot, in which a schedule fits; None if more than there are."""
        fits: NDArray[np.int64] = np.flatnonzero(self.best[0][len(self.line)] < INF)
        least = int(fits[0]) + self.x[0] if len(fits) else self.slots + 1
        return math.ceil(least * self.slot) if least <= self.slots else None

    def schedule(self) -> list[Step]:
        """The steps of a schedule of least time."""
        end = len(self.line)
        found: list[Step] = []
        stack: list[tuple[int, int, int] | Step] = [(0, end, self.slots - self.x[0])]
        while stack:
            top = stack.pop()
            if isinstance(top[0], str):
                found.append(top)
                continue
            i, j, m = top
            stack += self._parts(i, j, m)
        return [step for step in found if step[1] < end]

    def _parts(self, i: int, j: int, m: int) -> list[tuple[int, int, int] | Step]:
        """What a part's best time is made of, last first."""
        x, best = self.x, int(self.best[i][j - i, m])
        for o, (xbar, saving, hold) in enumerate(self.ways[i]):
            if m < max(hold, self.lying[j] + saving):
                continue
            if i == j:
                if self._turning(i, o) == best:
                    return [("B", i, o), ("F", i, -1)]
                continue
            time = self.line.uf[i] + self.line.ub[i] + self.line.options[i][o].extra
            if time + int(self.best[i + 1][j - i - 1, m - xbar]) == best:
                return [("B", i, o), (i + 1, j, m - xbar), ("F", i, -1)]
        passed = 0
        for k in range(i + 1, min(j, len(self.line) - 1) + 1):
            passed += self.line.uf[k - 1]
            if m >= x[k] and passed + int(self.best[k][j - k, m - x[k]]) + int(self.best[i][k - 1 - i, m]) == best:
                return [(i, k - 1, m), (k, j, m - x[k]), *(("F", s, -1) for s in reversed(range(i, k)))]
        raise AssertionError("a table whose entry comes from nowhere")
