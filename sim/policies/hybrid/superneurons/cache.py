"""The tensor cache: moves out under pressure, and copies back one layer ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sim.eviction.replacement import LeastRecent
from sim.eviction.upcoming import Upcoming
from sim.plan import Action, Memory, Move

Stages = Sequence[tuple[int, Sequence[int]]]
"""What backward needs of each offloaded layer: the first op that needs any, and the tensors; in order of need."""


class TensorCache(LeastRecent):
    """Least recently used; while a stage is under way, what the next one needs is copied back as far as memory is free.

    stages: per device.
    device: per op.
    """

    def __init__(self, upcoming: Upcoming, *, stages: Mapping[int, Stages], device: Sequence[int], **rest: Any) -> None:
        super().__init__(**rest)
        self._upcoming = upcoming
        self._stages = stages
        self._starts = {each: [start for start, _ in found] for each, found in stages.items()}
        self._device = device

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """Copies back for the next stage."""
        device = self._device[op]
        starts = self._starts.get(device, ())
        after = bisect_right(starts, op)
        if not 0 < after < len(starts):
            return ()
        home, reads = self._upcoming.home[op], self._upcoming.reads[op]
        room = self._upcoming.room(op, memory)
        answer = []
        for tensor in self._stages[device][after][1]:
            there = memory.where(tensor)
            if there and home not in there and memory.in_flight(tensor) is None and tensor not in reads:
                if self.size[tensor] > room:
                    break
                room -= self.size[tensor]
                answer.append(Move(tensor, home, keep=True))
        return answer
