"""Evict under pressure: what was used longest ago goes to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from annotated_types import Ge

from sim.errors import PolicyError
from sim.plan import Action, Change, Memory, Move, Need, Online, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.trace.tensor import ROLE_CODE


@dataclass(frozen=True, kw_only=True)
class ScaffoldOnline(Policy):
    """When memory is short, move what was used longest ago to the host; the engine fetches what an op reads.

    Source: none; this is what `tiersim policies --new` starts from.
    Bounds: moves nothing where everything fits. A step is O(1), but for what is pinned when memory is short.
    Departs: from nothing that was published.

    at_least: bytes that a tensor must have to be evicted.
    Raises PolicyError for a platform without a host tier.
    """

    online = True
    moves = True
    needs = frozenset({"host"})
    fidelity = "reconstruction"
    other_values = by_parameter(at_least=1 << 24)

    at_least: Annotated[int, Ge(1)] = 1

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is, with an online part that answers pressure."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"{platform.name} has no host tier to evict to")
        columns = trace.tensor_columns
        results = np.isin(columns.role, (ROLE_CODE["activation"], ROLE_CODE["temporary"])) & (trace.producer >= 0)
        evictable = results & (columns.bytes >= self.at_least)
        online = partial(
            _LeastRecentlyUsed,
            homes=tuple(platform.home(device).name for device in range(trace.devices)),
            host=platform.host.name,
            size=columns.bytes.tolist(),
            evictable=evictable.tolist(),
        )
        return Plan(trace, online=online)


class _LeastRecentlyUsed(Online):
    """What is resident in each device's memory, in the order of its last use. Every run of the plan makes a new one."""

    def __init__(self, *, homes: Sequence[str], host: str, size: Sequence[int], evictable: Sequence[bool]) -> None:
        self._host = host
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
        """The first in order that can go and for which the host has space, until their bytes are enough."""
        answer: list[Action] = []
        deficit, space = need.short, memory.free(self._host)
        for tensor in self._used.get(need.tier, ()):
            if deficit <= 0:
                break
            needed = 0 if self._host in memory.where(tensor) else self._size[tensor]
            if needed > space or memory.is_locked(tensor) or memory.in_flight(tensor) is not None:
                continue
            answer.append(Move(tensor, self._host))
            deficit -= self._size[tensor]
            space -= needed
        return answer
