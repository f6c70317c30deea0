"""What Capuchin does while an iteration runs: passive mode, and what a guided iteration adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sim.eviction.replacement import Replacement
from sim.plan import Action, Change, Drop, Memory, Need


class Passive(Replacement):
    """On pressure moves out what was accessed first; a read of what is away waits for its copy."""

    def __init__(self, *, homes: Sequence[str], **rest: Any) -> None:
        super().__init__(homes=homes, **rest)
        self._first: dict[int, None] = {}  # in order of first access
        self._here: dict[str, set[int]] = {home: set() for home in homes}

    def notice(self, change: Change) -> None:
        """Keep the access list, and what is resident."""
        super().notice(change)
        if not self.manages(change):
            return
        here = self._here[change.tier]
        if change.what == "went":
            here.discard(change.tensor)
        elif change.what == "came":
            here.add(change.tensor)
            self._first.setdefault(change.tensor)

    def order(self, tier: str, now: int) -> Iterable[int]:
        """From the start of the access list."""
        here = self._here[tier]
        return (tensor for tensor in self._first if tensor in here)


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
        """Keep what was recomputed for others."""
        super().notice(change)
        what, tensor, tier, _ = change
        if tensor not in self._back:
            return
        if what == "came" and tensor in self._dropped:
            self._kept[tensor] = tier
        elif what == "went":
            self._dropped.add(tensor)
            self._kept.pop(tensor, None)

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
