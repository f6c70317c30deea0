"""DTR's runtime as the paper's authors simulate it, in the plainest way: no index, no cache, no engine.

Every eviction scores every candidate from scratch. Used as an oracle beside the printed tables; it
shares no code with the policy or the engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Full(Exception):
    """Nothing is left to evict."""


@dataclass
class Twin:
    """One run over a trace. `recomputed` and `recompute_ns` count second runs of ops."""

    trace: Any
    budget: int
    heuristic: str = "dtr"
    deallocation: str = "eager"
    last: bool = True
    staleness: str = "own"
    size: bool = True
    costs: Sequence[int] | None = None
    limit: float = math.inf
    ghosts: bool = False
    recomputed: int = 0
    recompute_ns: int = 0
    evicted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        trace = self.trace
        self.ops = [(op.reads, op.writes, op.duration) for op in trace.ops]
        self.cost = [self.ops[p][2] if p >= 0 else 0 for p in trace.producer.tolist()]
        self.bytes = trace.tensor_columns.bytes.tolist()
        self.producer = trace.producer.tolist()
        self.parents = [self.ops[p][0] if p >= 0 else () for p in self.producer]
        self.children: list[list[int]] = [[] for _ in self.bytes]
        for reads, writes, _ in self.ops:
            for t in reads:
                self.children[t] += writes
        self.here = {t for t, p in enumerate(self.producer) if p < 0}
        self.used = sum(self.bytes[t] for t in self.here)
        self.clock = 0
        self.reached: set[int] = set()  # tensors whose op has been reached
        self.made: set[int] = set()
        self.pool: list[int] = []
        self.locks = dict.fromkeys(range(len(self.bytes)), 0)
        self.access = dict.fromkeys(range(len(self.bytes)), 0)
        self.classes: dict[int, list[Any]] = {}
        self.released: set[int] = set()
        self.banished: set[int] = set()
        self.pinned = set(self.here)
        self.random = random.Random(0)

    # ---- the run -----------------------------------------------------------------------------

    def run(self) -> Twin:
        last_use = {}
        for i, (reads, writes, _) in enumerate(self.ops):
            for t in (*reads, *writes):
                last_use[t] = i
        for i, (reads, writes, _) in enumerate(self.ops):
            self.reached |= set(writes)
            self.materialize(i, writes[0] if writes else -1, again=False)
            for t in writes:
                self.access[t] = self.clock
            for t in dict.fromkeys((*reads, *writes)):
                if last_use[t] == i and t not in self.trace.outputs and self.producer[t] >= 0:
                    self.release(t)
        return self

    def materialize(self, op: int, wanted: int, again: bool) -> None:
        reads, writes, ns = self.ops[op]
        if again and any(t in self.banished for t in reads):
            raise AssertionError("a banished tensor is needed")
        for t in reads:
            self.access[t] = self.clock
        absent = [t for t in reads if t not in self.here]
        for t in reads:
            if t in self.here:
                self.lock(t)
        for t in absent:
            if t not in self.here:
                self.materialize(self.producer[t], t, again=True)
            self.lock(t)
        need = sum(self.bytes[t] for t in writes)
        while self.used + need > self.budget:
            self.evict(self.choose())
        self.clock += ns
        if again:
            self.recomputed += 1
            self.recompute_ns += ns
            if self.recompute_ns > self.limit:
                raise Full("too much is recomputed")
        fresh = [t for t in writes if t not in self.here]
        for t in fresh:
            self.here.add(t)
            self.made.add(t)
            self.used += self.bytes[t]
            if t in self.classes:
                self.classes.pop(t)[0] -= self.cost[t]
        self.pool += [t for t in fresh if t != wanted] + [t for t in fresh if t == wanted]
        for t in reads:
            self.unlock(t)
        if self.deallocation == "banish":
            for t in reads:
                self.banish(t)

    def lock(self, t: int) -> None:
        self.locks[t] += 1
        if t in self.pool:
            self.pool.remove(t)

    def unlock(self, t: int) -> None:
        self.locks[t] -= 1
        if not self.locks[t] and t not in self.pinned:
            self.pool.append(t)

    def evict(self, t: int) -> None:
        self.evicted.append(t)
        self.here.remove(t)
        self.used -= self.bytes[t]
        self.pool.remove(t)
        mine = [self.cost[t]]
        for n in self.neighbours(t):
            theirs = self.classes.setdefault(n, [0])
            if theirs is not mine:
                mine[0] += theirs[0]
                for m, c in self.classes.items():
                    if c is theirs:
                        self.classes[m] = mine
        self.classes[t] = mine

    def release(self, t: int) -> None:
        self.released.add(t)
        if self.deallocation == "eager" and t in self.here:
            self.evict(t)
        if self.deallocation == "banish":
            self.banish(t)

    def banish(self, t: int) -> None:
        if t not in self.released or t in self.banished or self.locks[t] and t not in self.pinned:
            return
        if any(c not in self.here and c not in self.banished for c in self.children[t] if c in self.made):
            return
        if t in self.here:
            if t in self.pool:
                self.evict(t)
            else:
                self.here.remove(t)
                self.used -= self.bytes[t]
        self.banished.add(t)
        for c in self.children[t]:
            if c in self.here and c not in self.pinned:
                self.pinned.add(c)
                if c in self.pool:
                    self.pool.remove(c)

    # ---- the heuristics ----------------------------------------------------------------------

    def choose(self) -> int:
        if not self.pool:
            raise Full("nothing is left to evict")
        best, found = math.inf, -1
        for t in self.pool:
            score = self.score(t)
            if score < best or (self.last and score == best) or found < 0:
                best, found = score, t
        return found

    def score(self, t: int) -> float:
        if self.heuristic == "lru":
            return self.access[t]
        around: set[int] = set()
        top = self.cost[t]
        if self.heuristic == "dtr":
            around = self.reach(t, up=True) | self.reach(t, up=False)
        if self.heuristic == "msps":
            around = self.reach(t, up=True)
        top += sum(self.cost[u] for u in around)
        if self.heuristic == "dtr_eq":
            found = {id(self.classes.get(n)): self.classes.get(n, [0])[0] for n in self.neighbours(t)}
            top += sum(found.values())
        if self.heuristic in ("size", "stale"):
            top = 1
        bottom = self.bytes[t] if self.size else 1
        seen = self.access[t]
        if self.staleness == "neighbourhood":
            seen = max([seen, *(self.access[u] for u in around)])
        if self.staleness != "none" and self.heuristic not in ("size", "msps"):
            bottom *= self.clock - seen
        return top / bottom if bottom > 0 else math.inf

    def gone(self, t: int) -> bool:
        known = self.reached if self.ghosts else self.made
        return t not in self.here and t in known and t not in self.banished

    def neighbours(self, t: int) -> set[int]:
        return {u for u in (*self.parents[t], *self.children[t]) if self.gone(u)}

    def reach(self, t: int, up: bool) -> set[int]:
        step = self.parents if up else self.children
        found: set[int] = set()
        stack = [t]
        while stack:
            for u in step[stack.pop()]:
                if self.gone(u) and u not in found:
                    found.add(u)
                    stack.append(u)
        return found
