"""Copies as columns and rows of Checkmate's program: host copies, and what a link carries in a window of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.solvers.linear import Terms
from sim.solvers.milp import Program, Residency
from sim.solvers.nodes import Nodes
from sim.solvers.trip import Trip


def windows_of(nodes: Nodes, trips: Mapping[int, Trip]) -> list[list[int]]:
    """Consecutive stages, together, while their nodes take less time than the longest copy that they could hide."""
    total = sum(nodes.cost)
    longest = max((max(trip.out, trip.back) for trip in trips.values()), default=0)
    found: list[list[int]] = [[]]
    time = 0
    for t, cost in enumerate(nodes.cost):
        if found[-1] and time >= min(longest, total):
            found.append([])
            time = 0
        found[-1].append(t)
        time += cost
    return found


class Windows:
    """The columns of copies.

    out: per (stage, value) whether it is copied to the host in that stage, in which it is resident to the end.
    back: per (stage, value) whether it has been copied back when that stage's ops run.
    """

    def __init__(self, nodes: Nodes, trips: Mapping[int, Trip]) -> None:
        """trips: per value that may leave."""
        self._nodes = nodes
        self._trips = trips
        self.windows = windows_of(nodes, trips)
        self._window_of = [w for w, window in enumerate(self.windows) for _ in window]
        self.out: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int], int] = {}

    def has(self, stage: int, value: int) -> bool:
        """Whether the value may leave, and has been produced before that stage."""
        return value in self._trips and stage > self._nodes.values[value].producer

    def on_host(self, found: Sequence[float], stage: int, value: int) -> float:
        """How much of a value an answer has on the host when a stage starts."""
        return sum(found[c] for (t, v), c in self.out.items() if v == value and t < stage)

    def begin(self, program: Program, there: Sequence[Sequence[int]]) -> None:
        """The columns; a copy back needs one on the host; what a window cannot carry is waited for."""
        for v in self._trips:
            before: Terms = []
            for t in range(self._nodes.values[v].producer + 1, len(self._nodes)):
                if v in there[t] and before:
                    back = self.back[t, v] = program.column(whole=True)
                    program.row([*before, (back, -1.0)], least=0.0)
                if v in there[t]:
                    out = self.out[t, v] = program.column(whole=True)
                    before = [*before, (out, 1.0)]
            if before:
                program.row(before, most=1.0)
        unit, cost = program.price_unit, self._nodes.cost
        for window in self.windows:
            inside = set(window)
            waiting = (program.column(high=float("inf"), cost=1.0), -1.0)
            again = [(c, -cost[i] / unit) for (t, i), c in program.run.items() if t in inside and i < t]
            for way, columns in ((0, self.out), (1, self.back)):
                work = [
                    (c, (self._trips[v].back if way else self._trips[v].out) / unit)
                    for (t, v), c in columns.items()
                    if t in inside
                ]
                if work:
                    program.row([*work, waiting, *again], most=sum(cost[t] for t in window) / unit)

    def value(self, program: Program, stage: int, value: int, steps: Sequence[int]) -> Residency:
        """The rows of a value; returns after which node (-1: the start) how much of it is resident.

        A value that has left is resident again only when it has returned. A copy holds its space for its whole window:
        the value that leaves stays to its end, and the one that returns is counted from its start.
        """
        t, v = stage, value
        node = self._nodes.values[v]
        kept, then = program.keep.get((t, v)), program.keep.get((t + 1, v))
        made = program.run[t, node.producer] if node.producer in steps else None
        back = self.back.get((t, v))
        start = [(c, 1.0) for c in (kept, back) if c is not None]
        has = [*start, *([] if made is None else [(made, 1.0)])]
        readers = [k for k in node.readers if k in steps]
        uses = [program.run[t, k] for k in readers]
        window = self.windows[self._window_of[t]]
        leaving = [c for s in range(window[0], t + 1) if (c := self.out.get((s, v))) is not None]
        coming = [(c, 1.0) for s in range(t + 1, window[-1] + 1) if (c := self.back.get((s, v))) is not None]
        later = [*leaving, *([] if then is None else [then])]
        for use in (*uses, *later):
            program.row([*has, (use, -1.0)], least=0.0)
        if len(has) > 1:
            program.row(has, most=1.0)
        stays = later[0] if later else None
        if len(later) > 1:
            stays = program.column()
            for reason in later:
                program.row([(stays, 1.0), (reason, -1.0)], least=0.0)
        if start:
            reasons = [(c, 1.0) for c in (*uses, stays) if c is not None]
            program.row([*((c, -f) for c, f in start), *reasons], least=0.0)
        left = program.reasons(uses, stays, first=True)
        held: Residency = [(-1, left[0] if uses and made is None else start)]
        if made is not None:
            held.append((node.producer, left[0]))
        held += [(k, left[i + 1]) for i, k in enumerate(readers)]
        return [(after, [*terms, *coming]) for after, terms in held]

    def end(self, program: Program, stage: int, held: int) -> None:
        """Nothing more."""
