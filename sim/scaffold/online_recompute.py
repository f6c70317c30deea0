"""Evict under pressure: what was used longest ago is dropped, and recomputed when an op reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from annotated_types import Ge

from sim.plan import Action, Change, Drop, Memory, Need, Online, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.trace.index import TraceIndex
from sim.trace.tensor import ROLE_CODE


@dataclass(frozen=True, kw_only=True)
class ScaffoldOnlineRecompute(Policy):
    """When memory is short, drop what was used longest ago; the engine recomputes what an op reads.

    What one device could not recompute at its last use stays: its inputs are overwritten by then, or were received.
    Source: none; this is what `tiersim policies --new` starts from.
    Bounds: recomputes nothing where everything fits. A step is O(1), but for what is pinned when memory is short.
    Departs: from nothing that was published.

    at_least: bytes that a tensor must have to be evicted.
    """

    online = True
    recomputes = True
    fidelity = "reconstruction"
    other_values = by_parameter(at_least=1 << 24)

    at_least: Annotated[int, Ge(1)] = 1

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is, with an online part that answers pressure."""
        trace, platform = problem.trace, problem.platform
        index, roles = TraceIndex(trace), {ROLE_CODE["activation"], ROLE_CODE["temporary"]}
        until, last_use = index.recomputable_from_inputs, trace.last_use.tolist()
        evictable = [
            producer >= 0
            and index.role[t] in roles
            and index.size[t] >= self.at_least
            and until[producer] > last_use[t]
            for t, producer in enumerate(index.producer)
        ]
        online = partial(
            _LeastRecentlyUsed,
            homes=tuple(platform.home(device).name for device in range(trace.devices)),
            size=index.size,
            evictable=evictable,
        )
        return Plan(trace, online=online)


class _LeastRecentlyUsed(Online):
    """What is resident in each device's memory, in the order of its last use. Every run of the plan makes a new one."""

    def __init__(self, *, homes: Sequence[str], size: Sequence[int], evictable: Sequence[bool]) -> None:
        self._size = size
        self._evictable = evictable
        # a dict keeps the order in which its keys were put in
        self._used: dict[str, dict[int, None]] = {home: {} for home in homes}

    def notice(self, change: Change) -> None:
        """Keep the order."""
        used = self._used.get(change.tier)
        if used is None or not self._evictable[change.tensor]:
            return
        resident = change.tensor in used
        used.pop(change.tensor, None)
        if change.what == "came" or (change.what == "read" and resident):
            used[change.tensor] = None

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """The first in order that are not pinned, until their bytes are enough."""
        answer: list[Action] = []
        deficit = need.short
        for tensor in self._used.get(need.tier, ()):
            if deficit <= 0:
                break
            if memory.is_locked(tensor) or memory.in_flight(tensor) is not None:
                continue
            answer.append(Drop(tensor, need.tier))
            deficit -= self._size[tensor]
        return answer
