"""Order, spilling and rematerialisation in one program: what is generated, preserved and fetched at each step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sim.policies.hybrid.olla.graph import Graph, unit_of
from sim.solvers.linear import INFEASIBLE, LinearProgram, Terms


@dataclass(frozen=True)
class Trade:
    """What the program came to.

    status: "optimal", "feasible" (stopped by `limit`), "infeasible", or "unknown" (stopped before any answer).
    limit: "time", "nodes", "" for none.
    steps: per step the op that runs and the blocks that are fetched for it.
    """

    status: str
    limit: str = ""
    steps: Sequence[tuple[int, Collection[int]]] = ()


class TradeProgram:
    """The least bytes moved and generated with which a graph fits.

    As in `order_program` one op runs per step, but there are more steps than ops, and an op of `again` may run at
    several. `G[op, t]`: it runs; `P[block, t]`: preserved from the step before; `F[block, t]`: fetched from the host,
    which has kept a copy since the block was generated. Fetching counts a block twice, out and back.
    """

    def __init__(self, graph: Graph, room: int, again: Collection[int], movable: Collection[int], extra: int) -> None:
        """room: bytes. again: ops that may run several times. movable: blocks, by number, that may be spilled.

        extra: how many steps there are beyond one per op.
        """
        self.graph, self.steps, self._movable = graph, len(graph) + extra, frozenset(movable)
        self._rows, count = LinearProgram(), len(graph)
        sizes = [*(block.size for block in graph.blocks), *graph.workspace]
        self._unit = unit_of(sizes, room)
        reaches = graph.reaches
        early = (reaches.sum(axis=0) - 1).tolist()
        late = (self.steps - reaches.sum(axis=1)).tolist()
        price = [0.0] * count
        for block in graph.blocks:
            if block.first >= 0:
                price[block.first] += block.size / self._unit
        self._runs: list[dict[int, int]] = []
        for op in range(count):
            last = self.steps - 1 if op in again else late[op]
            cost = price[op] if op in again else 0.0
            self._runs.append({t: self._rows.column(cost=cost, whole=True) for t in range(early[op], last + 1)})
            runs = [(c, 1.0) for c in self._runs[op].values()]
            self._rows.row(runs, 1.0, len(runs) if op in again else 1.0)
            for other in graph.before[op]:
                self._follows(op, other)
        self._busy()
        self._fetches: dict[tuple[int, int], int] = {}
        held: list[Terms] = [self._workspaces(t) for t in range(self.steps)]
        for number in range(len(graph.blocks)):
            self._block(number, held)
        for terms in held:
            self._rows.row(terms, most=(room - graph.resident) / self._unit + 1e-6)

    def _busy(self) -> None:
        """One op per step; steps in which none runs are the last."""
        earlier: Terms = []
        for t in range(self.steps):
            here = [(runs[t], 1.0) for runs in self._runs if t in runs]
            self._rows.row(here, most=1.0)
            if t:
                self._rows.row([*here, *((c, -1.0) for c, _ in earlier)], most=0.0)
            earlier = here

    def _follows(self, op: int, other: int) -> None:
        """An op runs only after the first run of another."""
        for t, c in self._runs[op].items():
            self._rows.row(
                [(c, 1.0), *((past, -1.0) for step, past in self._runs[other].items() if step < t)], most=0.0
            )

    def _workspaces(self, t: int) -> Terms:
        pairs = zip(self._runs, self.graph.workspace, strict=True)
        return [(runs[t], size / self._unit) for runs, size in pairs if size and t in runs]

    def _block(self, number: int, held: list[Terms]) -> None:
        """Where it may be, what it takes, and that whoever uses it finds it."""
        block, rows = self.graph.blocks[number], self._rows
        size, made = block.size / self._unit, {} if block.first < 0 else self._runs[block.first]
        begin = 0 if block.first < 0 else min(made)
        readers = block.users - {block.first}
        end = self.steps - 1 if block.stays else max((max(self._runs[op]) for op in readers), default=-1)
        for t, c in made.items():
            held[t].append((c, size))
        before: list[int] = []
        for t in range(begin, end + 1):
            kept = [rows.column()] if block.first < 0 or t > begin else []
            fetched = []
            if number in self._movable and t > begin:
                fetched = [self._fetches.setdefault((number, t), rows.column(cost=2 * size, whole=True))]
                rows.row([(fetched[0], 1.0), *((c, -1.0) for step, c in made.items() if step < t)], most=0.0)
            here = [*kept, *fetched, *([made[t]] if t in made else [])]
            held[t] += [(c, size) for c in (*kept, *fetched)]
            rows.row([(c, 1.0) for c in here], most=1.0)
            if kept and (block.first >= 0 or t):
                rows.row([(kept[0], 1.0), *((c, -1.0) for c in before)], most=0.0)
            if kept and block.stays:
                rows.row([(kept[0], -1.0), *((c, 1.0) for step, c in made.items() if step < t)], most=0.0)
            for op in readers:
                if t in self._runs[op]:
                    rows.row([(self._runs[op][t], 1.0), *((c, -1.0) for c in (*kept, *fetched))], most=0.0)
            before = here

    def solve(self, *, nodes: int, seconds: float) -> Trade:
        """The cheapest steps; nodes, seconds: limits of the search."""
        answer = self._rows.solve(mip_rel_gap=0.0, node_limit=nodes, time_limit=seconds)
        if answer.status == INFEASIBLE:
            return Trade("infeasible")
        limit = "" if answer.status == 0 else "time" if answer.status == 1 else "nodes"
        if answer.x is None:
            return Trade("unknown", limit)
        steps = []
        for t in range(self.steps):
            ran = [op for op, runs in enumerate(self._runs) if t in runs and answer.x[runs[t]] > 0.5]
            fetched = [b for (b, step), c in self._fetches.items() if step == t and answer.x[c] > 0.5]
            steps += [(op, fetched) for op in ran]
        return Trade("feasible" if limit else "optimal", limit, steps)
