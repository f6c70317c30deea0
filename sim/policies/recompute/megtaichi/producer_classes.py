"""MegEngine's estimate of what evicted neighbours cost: components found through the producing op."""

from __future__ import annotations

from sim.eviction.evictable import Kin, Lineage, ScoreTable
from sim.eviction.neighbourhood import CostClasses


class ProducerClasses(CostClasses):
    """Union-find components of evicted tensors, joined and counted from the side of a tensor's producer.

    An evicted tensor joins the components of its producer's inputs and of that op's other results, where those
    are evicted; a candidate counts, for each of these neighbours, its component or its own cost, whichever is more.

    both: neighbours are its parents and its children instead, and each component counts once, as in DTR.
    own: whether its own cost counts.
    """

    def __init__(
        self, lineage: Lineage, kin: Kin, table: ScoreTable, evicted: list[bool], *, both: bool, own: bool
    ) -> None:
        super().__init__(kin, table, evicted)
        self._lineage = lineage
        self._both = both
        self._own = own
        for tensor in range(len(lineage.size)):
            self._reset(tensor)

    def exact(self, tensor: int, limit: float) -> tuple[int, int] | None:
        """See `Price`; never cut off."""
        self._stamp[tensor] = stamp = self._stamp[tensor] + 1
        total = bound = self._base(tensor)
        seen: set[int] = set()
        for other in self._neighbours(tensor):
            root = self._root(self._node[other])
            first = root not in seen
            seen.add(root)
            if self._both and not first:
                continue
            value, least = self._value[root], 0 if self._both else self._kin.cost[other]
            slack = max(value, 0) >> self.SLACK
            total += max(value, least)
            bound += max(value - slack, least)
            if first:
                self._watch_for(root, slack, tensor, stamp)
        self._table.weights[tensor] = bound
        return total, 0

    def vanished(self, tensor: int) -> None:
        """See `Price`."""
        super().vanished(tensor)
        for other in self._beside(tensor):
            self._reset(other)

    def _base(self, tensor: int) -> int:
        return self._kin.cost[tensor] if self._own else 0

    def _reset(self, tensor: int) -> None:
        self._stamp[tensor] += 1
        self._table.weights[tensor] = self._base(tensor)

    def _adjacent(self, tensor: int) -> tuple[int, ...]:
        if self._both:
            return super()._adjacent(tensor)
        return (*self._kin.parents[tensor], *self._beside(tensor))

    def _beside(self, tensor: int) -> list[int]:
        """The other results of its producer."""
        producer = self._lineage.producer[tensor]
        return [t for t in self._lineage.writes[producer] if t != tensor] if producer >= 0 else []
