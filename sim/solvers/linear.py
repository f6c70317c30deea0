"""A linear program under construction, row by row, and HiGHS to solve it, through SciPy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.solvers.silence import off_stdout

Terms = list[tuple[int, float]]
"""A sum: (column, factor) of each part."""
INF = math.inf
INFEASIBLE = 2
"""`status` of an answer that proves that a program has no solution."""


class LinearProgram:
    """Columns with their costs and bounds, and rows that bound sums of them. `solve` minimises the cost."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._whole: list[int] = []
        self._cells: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._least: list[float] = []
        self._most: list[float] = []

    @property
    def columns(self) -> int:
        """How many there are."""
        return len(self._cost)

    def column(self, low: float = 0.0, high: float = 1.0, cost: float = 0.0, *, whole: bool = False) -> int:
        """A new variable; its number. whole: whether `solve` takes whole numbers alone for it."""
        self._cost.append(cost)
        self._low.append(low)
        self._high.append(high)
        self._whole.append(int(whole))
        return len(self._cost) - 1

    def row(self, terms: Sequence[tuple[int, float]], least: float = -INF, most: float = INF) -> int:
        """A new condition, that a sum is at least and at most so much; its number."""
        rows, columns, factors = self._cells
        number = len(self._least)
        for column, factor in terms:
            rows.append(number)
            columns.append(column)
            factors.append(factor)
        self._least.append(least)
        self._most.append(most)
        return number

    def limit(self, row: int, most: float) -> None:
        """Change what the sum of a row is at most."""
        self._most[row] = most

    def add_cost(self, costs: Mapping[int, float]) -> None:
        """More cost of some columns."""
        for column, cost in costs.items():
            self._cost[column] += cost

    def solve(self, *, relaxed: bool = False, **options: Any) -> Any:
        """SciPy's answer: `status` is 0 for an optimum, 1 at a limit; `x` and `fun`, None where none was found.

        relaxed: whole numbers may be fractions. options: those of `scipy.optimize.milp`, such as `time_limit` in
        seconds.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows, columns, factors = self._cells
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._least), len(self._cost)))
        with off_stdout():
            return milp(
                np.array(self._cost),
                integrality=None if relaxed else np.array(self._whole),
                bounds=Bounds(np.array(self._low), np.array(self._high)),
                constraints=LinearConstraint(matrix, np.array(self._least), np.array(self._most)),
                options=options,
            )


def limit_of(solution: Any) -> str:
    """Which limit ended a search: `time`, `nodes`, or "" for none."""
    return {0: "", 1: "time"}.get(solution.status, "nodes")
