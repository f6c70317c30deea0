"""From an answer, whole or relaxed, to what is recomputed and fetched: back from each missing value to its sources."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sim.policies.hybrid.joint_optimal.trips import Away, Choice
from sim.solvers.nodes import Nodes
from sim.solvers.trip import Trip

Kept = Collection[tuple[int, int]]
"""(stage, value): resident when the stage starts."""


class Tracing:
    """Recursive source tracing.

    Stage by stage, what a node reads, and what is to be kept for the next stage, must be resident: because it was
    kept, because it has just been produced, or because it is restored. A value that left is never taken to be
    resident. One with a copy on the host is fetched if the time that is left in its window's link hides more of the
    copy than recomputing it from its own sources, restored alike, would take; another one is recomputed; one that can
    be neither stays resident from its first run on.
    """

    def __init__(self, nodes: Nodes, trips: Mapping[int, Trip], windows: Sequence[Sequence[int]]) -> None:
        self._nodes = nodes
        self._trips = trips
        self._window_of = {t: w for w, window in enumerate(windows) for t in window}
        self._time = [sum(nodes.cost[t] for t in window) for window in windows]

    def choice(self, kept: Kept, on_host: Kept) -> Choice | None:
        """What is recomputed and fetched where these are to be resident, and have a copy on the host.

        None where a value that cannot be restored was overwritten.
        """
        nodes, count = self._nodes, len(self._nodes)
        self._kept: list[set[int]] = [set() for _ in range(count + 1)]
        for t, v in kept:
            if t > nodes.values[v].producer:
                self._kept[t].add(v)
        for v, value in enumerate(nodes.values):
            for t in range(value.producer + 1, value.held_until + 1):
                self._kept[t].add(v)
            if value.end:
                self._kept[count].add(v)
        self._host = set(on_host)
        self._left = list(self._time)
        self._fetched: list[tuple[int, int]] = []
        self._reruns: set[tuple[int, int]] = set()
        for t in range(count):
            present = set(self._kept[t])
            wanted = [v for v in nodes.read_by[t] if nodes.values[v].producer != t]
            wanted += sorted(v for v in self._kept[t + 1] if nodes.values[v].producer < t)
            for v in wanted:
                if not self._restore(t, v, present):
                    return None
        reruns = frozenset(self._reruns)
        return Choice(reruns, tuple(self._stay(t, v, reruns) for t, v in self._fetched))

    def _restore(self, t: int, v: int, present: set[int]) -> bool:
        """Have a value resident in a stage."""
        if v in present:
            return True
        value, window = self._nodes.values[v], self._window_of[t]
        price = self._price(t, v, present, set())
        if (t, v) in self._host and v in self._trips:
            exposed = max(self._trips[v].back - max(self._left[window], 0), 0)
            if price is None or exposed <= price:
                self._left[window] -= self._trips[v].back
                self._fetched.append((t, v))
                present.add(v)
                return True
        if price is None:
            for stage in range(value.producer + 1, t + 1):
                self._kept[stage].add(v)
            present.add(v)
            return t <= value.overwritten_at
        for source in self._sources(value.producer):
            if not self._restore(t, source, present):
                return False
        self._reruns.add((t, value.producer))
        present.update(self._nodes.produced_by[value.producer])
        return True

    def _price(self, t: int, v: int, present: set[int], seen: set[int]) -> int | None:
        """ns to recompute a value in a stage, with what its sources take; None where it cannot be recomputed."""
        producer = self._nodes.values[v].producer
        able = not self._nodes.values[v].once and self._nodes.border <= t <= self._nodes.last_rerun[producer]
        if not able or producer == t:
            return None
        if producer in seen:
            return 0
        seen.add(producer)
        total = self._nodes.cost[producer]
        for source in self._sources(producer):
            if source not in present and not ((t, source) in self._host and source in self._trips):
                total += self._price(t, source, present, seen) or 0
        return total

    def _sources(self, node: int) -> list[int]:
        return [v for v in self._nodes.read_by[node] if self._nodes.values[v].producer != node]

    def _stay(self, due: int, v: int, reruns: frozenset[tuple[int, int]]) -> Away:
        """From the last use before `due`, after which it leaves, to its return."""
        value = self._nodes.values[v]
        users = {t for t, i in reruns if i in value.readers or i == value.producer}
        fetched = {t for t, other in self._fetched if other == v}
        last = max(t for t in (value.producer, *value.readers, *users, *fetched) if t < due and t >= value.producer)
        early = last not in value.readers and last != value.producer
        return Away(v, last, last, early, due, due)
