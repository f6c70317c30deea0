"""An online part that moves what a fast tier holds to the tiers behind it under pressure, in an order of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import numpy as np

from sim.eviction.evictable import EVICTED_ROLES
from sim.native import mypyc_attr
from sim.plan import Action, Change, ChangeFields, Memory, Need, Online
from sim.solvers.cascade import Below
from sim.trace.graph import Trace
from sim.trace.tensor import ROLE_CODE


def movable_results(trace: Trace, roles: Collection[str] = EVICTED_ROLES) -> list[bool]:
    """Per tensor whether it may be moved: an op's result with bytes, of one of these roles."""
    t = trace.tensor_columns
    movable = np.isin(t.role, [ROLE_CODE[role] for role in roles]) & (trace.producer >= 0) & (t.bytes > 0)
    flags: list[bool] = movable.tolist()
    return flags


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Replacement(Online):
    """Moves residents to the first of the tiers behind that can take them; a subclass says in which order.

    chain: the tiers behind the fast ones, the host first.
    homes: the fast tiers.
    movable: per tensor whether it may be moved.
    size: per tensor bytes.
    """

    def __init__(self, *, chain: Sequence[str], homes: Sequence[str], movable: Sequence[bool], size: Sequence[int]):
        self.below = Below(chain, size)
        self.movable = movable
        self.size = size
        self._going: dict[str, dict[int, int]] = {home: {} for home in homes}  # sent away, and still there

    def order(self, tier: str, now: int) -> Iterable[int]:
        """The movable residents of a fast tier, the first to leave first."""
        raise NotImplementedError

    def manages(self, change: Change) -> bool:
        """Whether a change is about a tensor that may be moved, in a tier that it may leave."""
        return change.tier in self._going and self.movable[change.tensor]

    def notice(self, change: Change) -> None:
        """Note what has left, and what stays because it is read."""
        if change.tensor in self.below.mine:
            self.below.notice(change)
        if self.manages(change):
            self._going[change.tier].pop(change.tensor, None)

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """The first in order that can leave, until their bytes are enough."""
        return self.send(need.tier, need.short, memory)

    def send(self, tier: str, short: int, memory: Memory, excluded: Collection[int] = ()) -> list[Action]:
        """The moves of those first in order, except the excluded, until so many bytes more will be free.

        None where the tier is not one of `homes`, as where an engine of the host finds no space there.
        """
        if tier not in self._going:
            return []
        answer: list[Action] = []
        self.below.begin()
        freed = self.waiting(tier, memory)
        for tensor in self.order(tier, memory.now):
            if freed >= short:
                break
            if tensor in excluded or memory.is_locked(tensor) or memory.in_flight(tensor) is not None:
                continue
            steps = self.below.send(tensor, memory)
            if steps is None:
                continue
            answer += steps
            freed += self.size[tensor]
            self._going[tier][tensor] = self.size[tensor]
        return answer

    def waiting(self, tier: str, memory: Memory) -> int:
        """Bytes of what was sent away and waits for space in the host: it will leave, too."""
        return max(sum(self._going[tier].values()) - memory.leaving(tier), 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class Residents(Replacement):
    """Keeps what is resident, and in which order it first was.

    here: per fast tier its movable residents.
    arrived: the movable tensors that have been resident in one, the first first.
    """

    # mypyc hands all of `**rest` to each keyword of a compiled base, so they are spelled out
    def __init__(
        self, *, chain: Sequence[str], homes: Sequence[str], movable: Sequence[bool], size: Sequence[int]
    ) -> None:
        super().__init__(chain=chain, homes=homes, movable=movable, size=size)
        self.here: dict[str, set[int]] = {home: set() for home in homes}
        self.arrived: dict[int, None] = {}

    def notice(self, change: Change) -> None:
        """The same for one."""
        Residents.notice_all(self, (change,))

    def notice_all(self, changes: Sequence[ChangeFields]) -> None:
        """Keep both, and what `Replacement` notes, without another call per change."""
        movable, here, going, arrived = self.movable, self.here, self._going, self.arrived
        below, mine = self.below, self.below.mine
        for change in changes:
            what, tensor, tier, _ = change
            if tensor in mine:
                below.notice(change)
            if not movable[tensor] or tier not in here:
                continue
            going[tier].pop(tensor, None)
            if what == "came":
                here[tier].add(tensor)
                if tensor not in arrived:
                    arrived[tensor] = None
            elif what == "went":
                here[tier].discard(tensor)


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastRecent(Replacement):
    """Per fast tier the movable residents in order of last use: those seldom read, and those read often.

    hits: tensors read at least that many times leave after all others; 0 treats all alike.
    used: per tier those seldom and those often read, each with the time of its last use.
    """

    def __init__(
        self, *, chain: Sequence[str], homes: Sequence[str], movable: Sequence[bool], size: Sequence[int], hits: int = 0
    ) -> None:
        super().__init__(chain=chain, homes=homes, movable=movable, size=size)
        self._hits = hits
        # a dict keeps the order in which its keys were last put in
        self.used: dict[str, tuple[dict[int, int], dict[int, int]]] = {home: ({}, {}) for home in homes}
        self._reads: dict[int, int] = {}

    def notice(self, change: Change) -> None:
        """The same for one."""
        LeastRecent.notice_all(self, (change,))

    def notice_all(self, changes: Sequence[ChangeFields]) -> None:
        """Keep the order of last use, with its times; what `Replacement` notes, without another call per change."""
        movable, used, going, mine = self.movable, self.used, self._going, self.below.mine
        hits, reads = self._hits, self._reads
        for change in changes:
            what, tensor, tier, now = change
            if what != "read" and tensor in mine:  # reads are nothing to `Below`
                self.below.notice(change)
            if not movable[tensor] or tier not in used:
                continue
            if going[tier]:
                going[tier].pop(tensor, None)
            seldom, often = used[tier]
            was = seldom.pop(tensor, None)
            if not hits:  # all are alike
                if what == "came" or (was is not None and what == "read"):
                    seldom[tensor] = now
                continue
            if what == "read":
                reads[tensor] = reads.get(tensor, 0) + 1
            was = often.pop(tensor, was)
            if what == "came" or (what == "read" and was is not None):
                (often if reads.get(tensor, 0) >= hits else seldom)[tensor] = now

    def order(self, tier: str, now: int) -> Iterable[int]:
        """The least recently used first."""
        return chain(*self.used[tier])
