"""The part that decides during the run: what leaves the zone, how, and when it returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.eviction.director import Director
from sim.eviction.evictable import CandidateSet
from sim.plan import Action, Change, Memory, Move, Wait

ORDINARY, FREQUENT, BORDER = range(3)
"""What leaves first, what next, and what only when nothing else is left."""


@dataclass(frozen=True)
class Switches:
    """Which parts are on.

    drops: whether tensors may be dropped and recomputed.
    directs: whether the director chooses between the link and recomputation; else the link is preferred.
    hits: reads from which a tensor is frequently used, 0 for never.
    streams: whether copies run beside the device's ops; else the device waits for each.
    stays: per tensor whether it never crosses to the other zone.
    borders: tensors at the borders of residency groups.
    """

    drops: bool
    directs: bool
    hits: int
    streams: bool
    stays: Sequence[bool]
    borders: Sequence[int]


class Layered(Director):
    """A director with what the scheme says of checkpoints, of compute-intensive results, and of streams."""

    def __init__(self, *parts: Any, switches: Switches) -> None:
        super().__init__(*parts)
        self._on = switches
        self._level = np.full(len(self.line.size), ORDINARY, np.int8)
        self._level[list(switches.borders)] = BORDER
        self._crosses = ~np.array(switches.stays, np.bool_)
        self._reads: dict[int, int] = {}

    def notice(self, change: Change) -> None:
        """Count reads, too."""
        super().notice(change)
        if change.what == "read" and self._on.hits:
            count = self._reads[change.tensor] = self._reads.get(change.tensor, 0) + 1
            if count >= self._on.hits and self._level[change.tensor] == ORDINARY:
                self._level[change.tensor] = FREQUENT

    def choose(self, candidates: CandidateSet, tier: str, memory: Memory, barred: set[int]) -> int:
        """The least candidate of the lowest level; ahead of need one that may cross, and no border."""
        ids = candidates.ids
        if self.early:
            ids = ids[self._crosses[ids]]
        levels = self._level[ids]
        for level in (ORDINARY, FREQUENT) if self.early else (ORDINARY, FREQUENT, BORDER):
            found = self.ranking.least(candidates, memory.now, barred, ids[levels == level])
            if found >= 0:
                return found
        return -1

    def prefers_drop(self, tensor: int, tier: str) -> bool:
        """What must stay in the zone is dropped; of the rest the director decides, if it is asked."""
        if not self._crosses[tensor]:
            return True
        return self._on.directs and super().prefers_drop(tensor, tier)

    def dropped(self, tensor: int, tier: str) -> Action | None:
        """A drop, if there is a part that drops."""
        return super().dropped(tensor, tier) if self._on.drops else None

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """As the director; without streams of their own the device waits for every copy."""
        if self._on.streams:
            return super().before(op, memory)
        answer: list[Action] = [Wait(tensor) for tensor in self.in_flight()]
        for action in super().before(op, memory):
            answer.append(action)
            if isinstance(action, Move):
                answer.append(Wait(action.tensor))
        return answer
