"""The cache of experts on the devices: what is fetched when a router has chosen, and what leaves for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sim.eviction.replacement import LeastRecent
from sim.plan import Action, Change, Memory, Move

Wanted = tuple[str, tuple[str, ...], tuple[str, ...]]
"""At an op: the device's memory, the experts that its visit still reads, in order, and those that are predicted."""


class Experts(LeastRecent):
    """Fetches what is read next, as far as there are slots, and evicts what has not been used for longest.

    tensors: per expert its weights, and what their storages hold later.
    wanted: per op at which something may be fetched, what.
    uses: per expert the ops that begin to read it, for `belady`; empty for least recent use.
    slots: experts per device, None for as many as fit.
    """

    def __init__(
        self,
        *,
        tensors: Mapping[str, Sequence[int]],
        wanted: Mapping[int, Wanted],
        uses: Mapping[str, Sequence[int]],
        slots: int | None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self._tensors, self._wanted, self._uses, self._slots = tensors, wanted, uses, slots
        self._expert = {t: name for name, ids in tensors.items() for t in ids}
        self._resident: dict[str, dict[str, set[int]]] = {home: {} for home in self._going}
        self._now = 0

    def notice(self, change: Change) -> None:
        """Keep the experts of each device, the least recently used first."""
        super().notice(change)
        what, tensor, tier, _ = change
        name = self._expert.get(tensor)
        here = self._resident.get(tier)
        if name is None or here is None:
            return
        held = here.get(name, set())
        if what == "came":
            held.add(tensor)
        elif what == "went":
            held.discard(tensor)
        if not held:
            here.pop(name, None)
        elif what != "went":
            here.pop(name, None)
            here[name] = held

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """Where experts are chosen, or the next of them begins: fetch those to come, in the slots of others."""
        if op not in self._wanted:
            return ()
        self._now = op
        tier, certain, predicted = self._wanted[op]
        order = tuple(dict.fromkeys((*certain, *predicted)))
        target = order if self._slots is None else order[: self._slots]
        here = self._resident[tier]
        coming = [name for name in target if self._missing(name, tier, memory)]
        taken = len(here.keys() | {name for name in self._tensors if self._arrives(name, tier, memory)})
        answer: list[Action] = []
        self.below.begin()
        for name in coming:
            if self._slots is not None and name not in here:
                spared = (target, certain) if name in certain else (target,)  # what is only predicted makes way
                while taken >= self._slots:
                    leaves = next((s for keep in spared if (s := self._evict(tier, keep, memory)) is not None), None)
                    if leaves is None:
                        return answer
                    answer += leaves
                    taken -= 1
                taken += 1
            urgent = 0 if name in certain else 1
            answer += [Move(t, tier, keep=True, priority=urgent) for t in self._missing(name, tier, memory)]
        return answer

    def _missing(self, name: str, tier: str, memory: Memory) -> list[int]:
        """The weights of an expert that are neither on the device nor on their way."""
        return [
            t
            for t in self._tensors[name]
            if (there := memory.where(t)) and tier not in there and memory.in_flight(t) != tier
        ]

    def _arrives(self, name: str, tier: str, memory: Memory) -> bool:
        return any(memory.in_flight(t) == tier for t in self._tensors[name])

    def _evict(self, tier: str, target: Sequence[str], memory: Memory) -> list[Action] | None:
        """What sends one expert away that is not among the target; None where none can leave."""
        here = self._resident[tier]
        candidates = [name for name in here if name not in target and not any(map(memory.is_locked, here[name]))]
        for name in sorted(candidates, key=self._next_use, reverse=True) if self._uses else candidates:
            steps = [self.below.send(t, memory) for t in sorted(here[name])]
            if all(step is not None for step in steps):
                del here[name]
                return [action for step in steps if step is not None for action in step]
        return None

    def _next_use(self, name: str) -> float:
        uses = self._uses.get(name, ())
        k = bisect_left(uses, self._now)
        return uses[k] if k < len(uses) else float("inf")
