"""Tensors that exceed the host's capacity go on to the tier behind it, the coldest first: one rule for all offloading.

Offline plans are walked in program order (`cascade`), online ones ask when they free space (`Below`). Both leave
capacities to the engine: a copy waits until the tensors that it displaces have left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.hardware.platform import Platform
from sim.plan import Action, ChangeFields, Drop, Memory, Move
from sim.trace.graph import Trace

At = tuple[int, int]
"""Where an action stands: an op, and 0 before or 1 after it."""


def cascade(trace: Trace, platform: Platform, actions: Iterable[Action], host: str) -> tuple[Action, ...]:
    """The plan with tensors beyond `host`'s capacity sent on to the tiers behind it, in order of their anchors.

    Where the host would overflow, the tensor needed back last goes on to the next tier, the newcomer itself if
    that is it (straight through, without taking space on the host). When a tensor leaves the host, the one needed
    next is brought up from behind as far as there is space, so that the slow link works ahead. Tensors are fetched from
    where they reside. A tensor that fits nowhere is left as it was: its copy waits, or the run ends naming the tier.
    Without a tier behind the host, or where everything fits, the plan is as it was.
    """
    chain = platform.cascade(host)
    plain = tuple(actions)
    if len(chain) == 1:
        return plain
    spare = [platform.tier(name).capacity - resident_bytes(trace, platform, name) for name in chain]
    if _all_fit(trace, plain, chain, spare[0]):
        return plain
    anchored: dict[At, list[Action]] = {}
    for action in plain:
        anchored.setdefault(_at(trace, action), []).append(action)
    back: dict[int, list[At]] = {}
    for at, acts in anchored.items():
        for action in acts:
            if isinstance(action, Move) and action.to not in chain:
                back.setdefault(trace.tensor_id(action.tensor), []).append(at)
    shelves = _Shelves(spare, trace.tensor_columns.bytes.tolist())
    never: At = (len(trace.ops), 0)
    planned: list[Action] = []
    for at in sorted(anchored):
        before, after = (at[0], None) if at[1] == 0 else (None, at[0])
        left = False
        here: dict[int, tuple[int, Move]] = {}  # the index in `planned` of a tensor's move at this anchor
        for action in anchored[at]:
            if not isinstance(action, Move):
                planned.append(action)
                continue
            tensor = trace.tensor_id(action.tensor)
            if action.to not in chain:
                left = shelves.take(tensor) or left
                planned.append(action)
                continue
            due = min((one for one in back.get(tensor, ()) if one > at), default=never)
            steps = shelves.put(tensor, due)
            for t, level in steps:
                if t in here:  # it has not started: it goes straight there
                    place, move = here[t]
                    planned[place] = replace(move, to=chain[level])
                elif t != tensor:
                    planned.append(Move(t, chain[level], before=before, after=after))
            here[tensor] = len(planned), action
            planned.append(replace(action, to=chain[next((level for t, level in steps if t == tensor), 0)]))
        if left:
            planned += [Move(t, chain[level], before=before, after=after) for t, level in shelves.lift(at)]
    return tuple(planned)


def _all_fit(trace: Trace, actions: Iterable[Action], chain: Sequence[str], spare: int) -> bool:
    """Whether all that is ever offloaded fits in the host at once, so that nothing goes on to a tier behind it."""
    offloaded = {action.tensor: action.to for action in actions if isinstance(action, Move) and action.to in chain}
    size = trace.tensor_columns.bytes
    return set(offloaded.values()) <= {chain[0]} and sum(int(size[trace.tensor_id(t)]) for t in offloaded) <= spare


def _at(trace: Trace, action: Action) -> At:
    anchor = action.after if action.before is None else action.before
    assert anchor is not None
    return trace.op_id(anchor), 0 if action.after is None else 1


def resident_bytes(trace: Trace, platform: Platform, tier: str) -> int:
    """The most bytes that ops of the tier's own engines keep there at once, where offload has no say."""
    c, t, count = trace.op_columns, trace.tensor_columns, len(trace.ops)
    here = np.zeros(count, np.bool_)  # per op whether its engine has its home there
    for device in range(trace.devices):
        here[c.device == device] = platform.engines[platform.engine_for(device)].home == tier
    for op, engine in c.engine.items():
        here[op] = platform.engines[platform.engine_for(int(c.device[op]), engine)].home == tier
    if not here.any():
        return 0
    made = trace.producer >= 0
    first = np.where(made, trace.producer, trace.first_read)
    own = np.flatnonzero((first >= 0) & (trace.replaced_by < 0) & here[first])
    to_end = ~made
    to_end[list(trace.outputs)] = True
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.where(made & (t.replaces < 0), trace.producer, 0)[own], t.bytes[own])
    np.subtract.at(change, np.where(to_end, count, trace.last_use + 1)[own], t.bytes[own])
    return int(np.cumsum(change).max(initial=0))


@dataclass
class _Shelves:
    """How full each tier of a cascade is at a point of the program, and when its tensors are needed.

    spare: bytes of each tier, first to last.
    level: per tensor the tier in which it resides.
    due: per tensor when it is needed.
    far, near: heaps by when a tensor is needed, latest first and earliest first; entries of tensors that have moved on
        since are skipped.
    """

    spare: list[int]
    size: Sequence[int]
    level: dict[int, int] = field(default_factory=dict)
    due: dict[int, At] = field(default_factory=dict)
    far: list[list[tuple[int, int, int]]] = field(init=False)
    near: list[list[tuple[At, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.far, self.near = [[] for _ in self.spare], [[] for _ in self.spare]

    def put(self, tensor: int, due: At) -> list[tuple[int, int]]:
        """The moves, in order, that place a tensor needed at `due`; its own comes last, if it finds space."""
        self.take(tensor)
        self.due[tensor] = due
        moves: list[tuple[int, int]] = []
        self._place(tensor, 0, moves)
        return moves

    def take(self, tensor: int) -> bool:
        """Forget a tensor that is fetched; whether it resided in the first tier."""
        level = self.level.pop(tensor, -1)
        if level >= 0:
            self.spare[level] += self.size[tensor]
        return level == 0

    def lift(self, now: At) -> list[tuple[int, int]]:
        """The moves up into the first tier, as far as it has space: the tensor needed next, first."""
        moves = []
        for level in range(1, len(self.spare)):
            heap = self.near[level]
            while heap:
                due, tensor = heap[0]
                if self.level.get(tensor) == level and self.due[tensor] == due and due > now:
                    if self.size[tensor] > self.spare[0]:
                        break
                    self.take(tensor)
                    self._stand(tensor, 0)
                    moves.append((tensor, 0))
                heapq.heappop(heap)
        return moves

    def _place(self, tensor: int, first: int, moves: list[tuple[int, int]]) -> bool:
        for level in range(first, len(self.spare)):
            if self._make_room(level, tensor, moves):
                self.take(tensor)
                self._stand(tensor, level)
                moves.append((tensor, level))
                return True
        return False

    def _make_room(self, level: int, tensor: int, moves: list[tuple[int, int]]) -> bool:
        """Send tensors that are needed later than this one further on until it fits."""
        heap = self.far[level]
        while self.size[tensor] > self.spare[level]:
            while heap and not self._is_at(level, heap[0]):
                heapq.heappop(heap)
            if not heap or level + 1 == len(self.spare):
                return False
            coldest = heap[0][2]
            if self.due[coldest] <= self.due[tensor] or not self._place(coldest, level + 1, moves):
                return False
        return True

    def _is_at(self, level: int, entry: tuple[int, int, int]) -> bool:
        op, side, tensor = entry
        return self.level.get(tensor) == level and self.due[tensor] == (-op, -side)

    def _stand(self, tensor: int, level: int) -> None:
        due = self.due[tensor]
        self.level[tensor] = level
        self.spare[level] -= self.size[tensor]
        heapq.heappush(self.far[level], (-due[0], -due[1], tensor))
        heapq.heappush(self.near[level], (due, tensor))


class Below:
    """The tiers behind the fast ones, as an online part sees them: the tensors it sent there, coldest first.

    Tell it of every change of what is `mine`; in each answer call `begin`, then `send` for each tensor that is to be
    offloaded.

    chain: the tiers, the host first.
    mine: what has ever been sent.
    """

    def __init__(self, chain: Sequence[str], size: Sequence[int]) -> None:
        self.chain = tuple(chain)
        self._size = size
        self.mine: set[int] = set()
        self._order: dict[str, dict[int, None]] = {tier: {} for tier in chain}
        self._sent: dict[str, set[int]] = {tier: set() for tier in chain}  # not arrived yet
        self._chosen: dict[str, set[int]] = {tier: set() for tier in chain}  # of this answer: they leave that tier

    def notice(self, change: ChangeFields) -> None:
        """Keep the order: the tensor that arrived last, or left a fast tier last, is warmest."""
        what, tensor, tier, _ = change
        if tensor not in self.mine:
            return
        if tier in self._order:
            if what != "read":
                self._sent[tier].discard(tensor)
                self._order[tier].pop(tensor, None)
            if what == "came":
                self._order[tier][tensor] = None
        elif what == "went":
            for order in self._order.values():
                if tensor in order:
                    del order[tensor]
                    order[tensor] = None

    def begin(self) -> None:
        """A new answer begins."""
        for chosen in self._chosen.values():
            chosen.clear()

    def has(self, tensor: int) -> bool:
        """Whether one of these tiers has a copy of a tensor that was sent."""
        return any(tensor in order for order in self._order.values())

    def send(self, tensor: int, memory: Memory) -> list[Action] | None:
        """The actions that move a tensor down, after freeing space for it; None where no tier can hold it."""
        there = memory.where(tensor)
        for tier in self.chain:
            if tier in there:
                return [Move(tensor, tier)]  # nothing is copied
        self.mine.add(tensor)
        return self._down(tensor, 0, memory)

    def _down(self, tensor: int, first: int, memory: Memory) -> list[Action] | None:
        for level in range(first, len(self.chain)):
            made = self._make_room(level, self._size[tensor], memory)
            if made is not None:
                self._sent[self.chain[level]].add(tensor)
                return [*made, Move(tensor, self.chain[level])]
        return None

    def _make_room(self, level: int, bytes: int, memory: Memory) -> list[Action] | None:
        """Send the coldest further on until so many bytes are free; None if that is impossible."""
        tier, size = self.chain[level], self._size
        # a tensor that was sent and has no space yet has been promised it
        promised = sum(size[t] for t in self._sent[tier]) - memory.arriving(tier)
        room = memory.free(tier) + memory.leaving(tier) + sum(size[t] for t in self._chosen[tier]) - max(promised, 0)
        answer: list[Action] = []
        for tensor in list(self._order[tier]) if room < bytes else ():
            if tensor in self._chosen[tier] or memory.is_locked(tensor) or memory.in_flight(tensor) is not None:
                continue
            if any(other not in self.chain for other in memory.where(tensor)):
                steps: list[Action] | None = [
                    Drop(tensor, tier)
                ]  # a spare copy of a tensor that is resident in a fast tier
            else:
                steps = self._down(tensor, level + 1, memory)
            if steps is None:
                return None
            answer += steps
            self._chosen[tier].add(tensor)
            room += size[tensor]
            if room >= bytes:
                break
        return answer if room >= bytes else None
