"""Copies to the host and back as columns and rows of Checkmate's program, as POET has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.solvers.milp import Program, Residency
from sim.solvers.nodes import Nodes
from sim.solvers.trip import Trip


class Pages:
    """The columns of copies. What has been copied to the host once stays there.

    out: per (stage, value) whether it is copied to the host in that stage, at whose start it is resident.
    back: per (stage, value) whether it is copied back when that stage ends, so that it is resident in the next.
    """

    def __init__(self, nodes: Nodes, prices: Mapping[int, Trip]) -> None:
        """prices: per value that may leave what its copies cost."""
        self._nodes = nodes
        self._prices = prices
        self.out: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int], int] = {}

    def has(self, stage: int, value: int) -> bool:
        """Whether the value may leave, and has been produced before that stage."""
        return value in self._prices and stage > self._nodes.values[value].producer

    def brought(self, found: Sequence[float]) -> list[tuple[int, int]]:
        """The (stage, value) for which an answer has a value copied back."""
        return sorted((t + 1, v) for (t, v), column in self.back.items() if found[column] > 0.5)

    def work(self, times: Mapping[int, Trip]) -> list[tuple[int, int]]:
        """Each copy's column, and how many ns it takes."""
        out = [(column, times[v].out) for (_, v), column in self.out.items()]
        return out + [(column, times[v].back) for (_, v), column in self.back.items()]

    def begin(self, program: Program, there: Sequence[Sequence[int]]) -> None:
        """The columns; what comes back has been copied out in an earlier stage."""
        unit = program.price_unit
        for v, price in self._prices.items():
            before: list[tuple[int, float]] = []
            for t in range(self._nodes.values[v].producer + 1, len(self._nodes)):
                if before and v in there[t + 1]:
                    back = self.back[t, v] = program.column(cost=price.back / unit, whole=True)
                    program.row([*before, (back, -1.0)], least=0.0)
                if v in there[t]:
                    out = self.out[t, v] = program.column(cost=price.out / unit, whole=True)
                    program.row([(program.keep[t, v], 1.0), (out, -1.0)], least=0.0)
                    before = [*before, (out, 1.0)]
            if before:
                program.row(before, most=1.0)

    def value(self, program: Program, stage: int, value: int, steps: Sequence[int]) -> Residency:
        """The program's own rows, in which the value may also leave or arrive."""
        key = stage, value
        return program.value(*key, steps, arrives=self.back.get(key), leaves=self.out.get(key))

    def end(self, program: Program, stage: int, held: int) -> None:
        """Nothing more."""
