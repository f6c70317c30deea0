"""An online part for plans that look ahead: under pressure that they did not foresee, what is needed last makes way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from sim.eviction.replacement import Residents
from sim.native import mypyc_attr
from sim.plan import Action, Memory, Move, Need

NEVER = 1 << 62


@mypyc_attr(allow_interpreted_subclasses=True)
class FarthestNextUse(Residents):
    """Evicts the resident that is used farthest ahead (Belady), and turns prefetches back that leave too little space.

    uses: per tensor the ops that use it, by id, in order.
    """

    def __init__(
        self,
        *,
        chain: Sequence[str],
        homes: Sequence[str],
        movable: Sequence[bool],
        size: Sequence[int],
        uses: Mapping[int, Sequence[int]],
    ) -> None:
        super().__init__(chain=chain, homes=homes, movable=movable, size=size)
        self._uses = uses
        self._turned: set[int] = set()  # on their way, and wanted away again
        self._op = -1

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """Those needed last, until their bytes are enough; where none is left, what is still on its way turns back."""
        self._op = need.op
        return super().on_pressure(need, memory) or self._turn_back(need, memory)

    def order(self, tier: str, now: int) -> Iterable[int]:
        """What is used last first; of equals the larger one."""
        return sorted(self.here.get(tier, ()), key=self._rank)

    def _turn_back(self, need: Need, memory: Memory) -> list[Action]:
        """Prefetched too early: it leaves as soon as it has arrived, or does not set out."""
        answer: list[Action] = []
        self._turned = {t for t in self._turned if memory.in_flight(t) is not None}
        arriving = (t for t in self._uses if memory.arriving(need.tier) and memory.in_flight(t) == need.tier)
        freed = 0
        for tensor in sorted(arriving, key=self._rank):
            if freed >= need.short:
                break
            there = next((tier for tier in self.below.chain if tier in memory.where(tensor)), None)
            if there is not None and tensor not in self._turned and not memory.is_locked(tensor):
                self._turned.add(tensor)
                answer.append(Move(tensor, there))
                freed += self.size[tensor]
        return answer

    def _rank(self, tensor: int) -> tuple[int, int, int]:
        uses = self._uses.get(tensor, ())
        i = bisect_right(uses, self._op)
        return -(uses[i] if i < len(uses) else NEVER), -self.size[tensor], tensor
