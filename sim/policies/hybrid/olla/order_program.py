"""The order of least peak as an integer program: which op runs at which step, what is preserved from step to step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sim.policies.hybrid.olla.graph import Block, Graph, unit_of
from sim.solvers.linear import INFEASIBLE, LinearProgram, Terms


@dataclass(frozen=True, eq=False)
class Found:
    """What a program came to.

    proven: whether nothing better exists.
    limit: which limit ended the search, "time" or "nodes", "" for none.
    order: a better order than the known one, None where none was found.
    """

    proven: bool
    limit: str = ""
    order: list[int] | None = None


class OrderProgram:
    """One op per step; an op runs at a step of its span: after all its ancestors, before all its descendants.

    `G[op, t]` is whether an op runs at a step, and so whether its results are generated there; `P[block, t]` whether a
    block that exists is preserved at a step. Where the G are whole numbers, so are the P.
    """

    def __init__(self, graph: Graph, known: int) -> None:
        """known: the peak of an order that is known; one that is lower is looked for."""
        self.graph, self._rows = graph, LinearProgram()
        reaches, count = graph.reaches, len(graph)
        self.early = (reaches.sum(axis=0) - 1).tolist()
        self.late = (count - reaches.sum(axis=1)).tolist()
        sizes = [*(block.size for block in graph.blocks), *graph.workspace]
        self._unit = unit_of(sizes, known - graph.resident)
        top = math.ceil((known - graph.resident) / self._unit) - 1
        low = (graph.least - graph.resident) / self._unit
        self._hopeless = top < low
        if self._hopeless:
            return
        self._peak = self._rows.column(low, top, cost=1.0)
        self._runs = [
            {t: self._rows.column(whole=True) for t in range(self.early[op], self.late[op] + 1)} for op in range(count)
        ]
        for op in range(count):
            self._rows.row([(c, 1.0) for c in self._runs[op].values()], 1.0, 1.0)
        for t in range(count):
            self._rows.row([(runs[t], 1.0) for runs in self._runs if t in runs], 1.0, 1.0)
        for op, needed in enumerate(graph.before):
            for other in needed:
                self._precedes(other, op)
        held: list[Terms] = [[(runs[t], size) for runs, size in self._working() if t in runs] for t in range(count)]
        for block in graph.blocks:
            self._block(block, held)
        for terms in held:
            self._rows.row([*terms, (self._peak, -1.0)], most=0.0)

    def _working(self) -> list[tuple[dict[int, int], float]]:
        pairs = zip(self._runs, self.graph.workspace, strict=True)
        return [(runs, size / self._unit) for runs, size in pairs if size]

    def _until(self, op: int, t: int) -> Terms:
        """Whether an op has run by the end of a step."""
        return [(c, 1.0) for step, c in self._runs[op].items() if step <= t]

    def _precedes(self, one: int, other: int) -> None:
        for t in range(self.early[other], min(self.late[other], self.late[one]) + 1):
            left = [(c, -1.0) for c, _ in self._until(one, t - 1)]
            self._rows.row([*self._until(other, t), *left], most=0.0)

    def _block(self, block: Block, held: list[Terms]) -> None:
        """Preserved from step to step until its last user; what has been freed never returns."""
        size, first, count = block.size / self._unit, block.first, len(self.graph)
        begin = 0 if first < 0 else self.early[first] + 1
        end = count - 1 if block.stays else max((self.late[op] for op in block.users), default=-1)
        needed = max((self.early[op] for op in block.users), default=-1)
        taken = -1 if first < 0 else self.late[first]  # the last step at which it may begin
        for t, c in self._runs[first].items() if first >= 0 else ():
            held[t].append((c, size))
        before: int | None = None
        for t in range(begin, end + 1):
            surely = t > taken and (block.stays or t <= needed)
            kept = self._rows.column(low=float(surely))
            held[t].append((kept, size))
            runs = {} if first < 0 else self._runs[first]
            if block.stays:
                self._rows.row([(kept, -1.0), *self._until(first, t - 1)], most=0.0)
            elif first >= 0 or before is not None:
                past = [(c, -1.0) for c in (before, runs.get(t - 1)) if c is not None]
                self._rows.row([(kept, 1.0), *past], most=0.0)
            for op in block.users - {first}:
                if t in self._runs[op]:
                    self._rows.row([(self._runs[op][t], 1.0), (kept, -1.0)], most=0.0)
            before = kept

    def solve(self, *, nodes: int, seconds: float) -> Found:
        """An order with a lower peak than the known one, if there is one; nodes, seconds: limits of the search."""
        if self._hopeless:
            return Found(True)
        answer = self._rows.solve(mip_rel_gap=0.0, node_limit=nodes, time_limit=seconds)
        if answer.status == INFEASIBLE:
            return Found(True)
        limit = "" if answer.status == 0 else "time" if answer.status == 1 else "nodes"
        if answer.x is None:
            return Found(False, limit)
        step = [max(runs, key=lambda t, runs=runs: answer.x[runs[t]]) for runs in self._runs]  # type: ignore[misc]
        return Found(not limit, limit, [int(op) for op in np.argsort(step, kind="stable")])
