"""What Capuchin does while an iteration runs: passive mode, and what a guided iteration adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sim.eviction.replacement import Residents
from sim.plan import Action, Change, ChangeFields, Drop, Memory, Need


class Passive(Residents):
    """On pressure moves out what was accessed first; a read of what is away waits for its copy."""

    def order(self, tier: str, now: int) -> Iterable[int]:
        """From the start of the access list."""
        here = self.here[tier]
        return (tensor for tensor in self.arrived if tensor in here)


class Guided(Passive):
    """Passive mode, but what a recomputation brought back beside its target is dropped first.

    back: per tensor that is recomputed its back-access.
    """

    def __init__(self, *, back: Mapping[int, int], **rest: Any) -> None:
        super().__init__(**rest)
        self._back = back
        self._dropped: set[int] = set()
        self._kept: dict[int, str] = {}  # recomputed and not read since

    def notice(self, change: Change) -> None:
        """The same for one."""
        Guided.notice_all(self, (change,))

    def notice_all(self, changes: Sequence[ChangeFields]) -> None:
        """Keep what was recomputed for others."""
        super().notice_all(changes)
        back, dropped, kept = self._back, self._dropped, self._kept
        for what, tensor, tier, _ in changes:
            if tensor not in back or what == "read":
                continue
            if what == "went":
                dropped.add(tensor)
                kept.pop(tensor, None)
            elif tensor in dropped:
                kept[tensor] = tier

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """Drop what is needed last of what was kept; then as in passive mode."""
        answer: list[Action] = []
        dropped: set[int] = set()
        freed = 0
        for tensor in sorted(self._kept, key=lambda each: (-self._back[each], each)):
            if freed >= need.short:
                return answer
            if self._back[tensor] > need.op and self._may_drop(tensor, need.tier, memory):
                answer.append(Drop(tensor, need.tier))
                dropped.add(tensor)
                freed += self.size[tensor]
        if freed < need.short:
            answer += self.send(need.tier, need.short - freed, memory, dropped)
        return answer

    def _may_drop(self, tensor: int, tier: str, memory: Memory) -> bool:
        alone = memory.where(tensor) == (tier,) and memory.in_flight(tensor) is None
        return alone and not memory.is_locked(tensor)
