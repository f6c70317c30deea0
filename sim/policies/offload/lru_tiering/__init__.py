"""Two zones of memory under least-recently-used replacement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Lt

from sim.errors import PolicyError
from sim.eviction.replacement import LeastRecent, movable_results
from sim.eviction.upcoming import Upcoming, upcoming_of
from sim.plan import Action, Change, Memory, Move, Online, Plan, Problem, Unpressed
from sim.policies.base import Policy, by_parameter


@dataclass(frozen=True, kw_only=True)
class LruTiering(Policy):
    """Results start in the fast zone; under pressure the least recently used one is moved to the slow zone.

    Under pressure, move the unpinned result that was read or produced longest ago from the device's memory
    to the host tier; an op that reads a tensor that is not resident waits while the engine copies it back. The slow
    copy stays until the tensor dies or its space is needed, so that moving the tensor out again costs nothing.
    When the host is full, what left the device's memory longest ago goes on to the tier behind it, if there is one.
    Source: the layered scheme for the MT-3000 (an 8 GB acceleration zone beside 64 GB of DDR) that a
        survey of memory optimisation for training sketches, parts 1, 2 and 4; no figures were published.
    Bounds: moves nothing where everything fits. A step is O(1) for `lru`; `score` looks at all residents
        under each memory pressure, as DTR does.
    Departs: of the scheme's other parts, checkpoints at the borders of zone residency groups, the
        instruction mapping table (a platform's engines and efficiencies play that role), low-precision
        copies (a codec, a rewrite) and the choice between recomputation and DDR are policies of
        their own. `score` picks what to move with DTR's local index; it does not recompute. The survey has
        memory swapped when an allocation fails and copied back on a miss: both while the device waits.
        `watermark` and `prefetch` are what its streams of their own for each direction would allow.

    hits: tensors read at least that many times are moved only after all others; 0 treats all alike.
    pin_flops_per_byte: never move the result of an op of more FLOPs per byte touched; None for no
        pinning. Pinned results may exceed the budget.
    choice: `lru`, or `score` for the smallest (time to recompute) / (bytes * time since its last use).
    watermark: share of the device's memory that is kept free: before each op the least recently used is moved ahead
        of need, overlapping with compute; 0 waits for pressure.
    prefetch: before each backward op prefetch up to so many tensors that are resident in slow tiers alone, the last
        to leave first, as far as memory is free beyond the op's results and the watermark; 0 waits for misses.
    Raises PolicyError for an unknown choice, a watermark that is not a share below 1, a negative number, or a platform
        without a host tier.
    """

    online = True
    moves = True
    needs = frozenset({"host"})
    fidelity = "reconstruction"
    other_values = by_parameter(hits=2, pin_flops_per_byte=1.0, choice="score", watermark=0.1, prefetch=4)

    hits: Annotated[int, Ge(0)] = 0
    pin_flops_per_byte: Annotated[float, Ge(0)] | None = None
    choice: Literal["lru", "score"] = "lru"
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.0
    prefetch: Annotated[int, Ge(0)] = 0

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is, with an online part that answers pressure."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"lru_tiering: {platform.name} has no host tier to move to")
        size, producer = trace.tensor_columns.bytes, trace.producer
        movable = np.array(movable_results(trace), np.bool_)
        if self.pin_flops_per_byte is not None:
            intense = trace.op_columns.flops > self.pin_flops_per_byte * np.maximum(trace.touched, 1)
            movable &= ~intense[producer]
        weight: list[float] = []
        if self.choice == "score":
            # the part of the index that does not change: time to recompute per byte
            weight = [problem.cost.op_ns(int(p)) / max(int(b), 1) if p >= 0 else 0.0 for p, b in zip(producer, size)]
        kind: Callable[..., Online] = _Ranked
        if self.watermark or self.prefetch:
            kind = partial(_Ahead, upcoming_of(problem), watermark=self.watermark, depth=self.prefetch)
        online = partial(
            kind,
            chain=platform.cascade(platform.host.name),
            homes=tuple(platform.home(device).name for device in range(trace.devices)),
            movable=movable.tolist(),
            size=size.tolist(),
            hits=self.hits,
            weight=weight,
        )
        return Plan(trace, online=online, unpressed=Unpressed(headroom=int(self.watermark * problem.budget)))


class _Ranked(LeastRecent):
    """The least recently used first, or those of the least index."""

    def __init__(self, *, weight: Sequence[float], **rest: Any) -> None:
        super().__init__(**rest)
        self._weight = weight

    def order(self, tier: str, now: int) -> Iterable[int]:
        """The first to leave first."""
        if not self._weight:
            return super().order(tier, now)
        # what was used this very instant counts as used 1 ns ago: the index divides by the time since
        ranked = (
            sorted(group, key=lambda t: (self._weight[t] / max(now - group[t], 1), t)) for group in self.used[tier]
        )
        return chain.from_iterable(ranked)


class _Ahead(_Ranked):
    """The same, and before each op what keeps memory free and brings back what backward will want."""

    def __init__(self, upcoming: Upcoming, *, watermark: float, depth: int, **rest: Any) -> None:
        super().__init__(**rest)
        self._upcoming = upcoming
        self._watermark = watermark
        self._depth = depth
        self._away: dict[int, str] = {}  # in slow tiers alone, in the order in which they left: from where

    def notice(self, change: Change) -> None:
        """Keep the queue of what is away, too."""
        super().notice(change)
        what, tensor, tier, _ = change
        if what == "read":
            return
        if tier in self.used:
            self._away.pop(tensor, None)
            if what == "went" and self.below.has(tensor):
                self._away[tensor] = tier
        elif tensor in self._away and not self.below.has(tensor):
            del self._away[tensor]

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """Send away ahead of need; else bring back."""
        ahead = self._upcoming
        tier, reads = ahead.home[op], ahead.reads[op]
        kept = int(self._watermark * ahead.capacity[tier])
        room = memory.free(tier) - ahead.makes[op] - kept
        coming = room + memory.leaving(tier) + self.waiting(tier, memory)
        if kept and coming < 0:
            return self.send(tier, -room - memory.leaving(tier), memory, reads)
        if not self._depth or not ahead.backward[op]:
            return ()
        return self._fetches(tier, ahead.room(op, memory) - kept, memory, reads)

    def _fetches(self, tier: str, room: int, memory: Memory, reads: Collection[int]) -> list[Action]:
        answer: list[Action] = []
        for tensor in islice(reversed(self._away), self._depth):
            if self.size[tensor] > room:
                break
            if self._away[tensor] == tier and tensor not in reads and memory.in_flight(tensor) is None:
                room -= self.size[tensor]
                answer.append(Move(tensor, tier, keep=True))
        return answer
