"""DTR's runtime as the paper's authors simulate it, in the plainest way: no index, no cache, no engine.

Every eviction scores every candidate from scratch. Used as an oracle beside the printed tables; it
shares no code with the policy or the engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


class Full(Exception):
    """Nothing is left to evict, or more is recomputed than allowed."""


@dataclass
class Reference:
    """One run over a trace. kept: tensors that are never evicted. limit: most ns of recomputation.

    hold: our engine's rule, that an op which waits for several evicted tensors holds those that come back
    on the way to another, and a recomputed op those of its results that are still there. The
    prototype may evict them.
    ran: (op, whether again) in order; evicted: tensors in order, freed dead ones among them.
    """

    trace: Any
    budget: int
    heuristic: str = "dtr"
    deallocation: str = "eager"
    last: bool = True
    staleness: str = "own"
    size: bool = True
    kept: Collection[int] = ()
    limit: float = math.inf
    hold: bool = False
    ran: list[tuple[int, bool]] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        trace = self.trace
        self.ops = [(op.reads, op.writes, op.duration) for op in trace.ops]
        self.bytes = trace.tensor_columns.bytes.tolist()
        self.producer = trace.producer.tolist()
        self.cost = [self.ops[p][2] if p >= 0 else 0 for p in self.producer]
        self.parents = [self.ops[p][0] if p >= 0 else () for p in self.producer]
        self.children: list[list[int]] = [[] for _ in self.bytes]
        for reads, writes, _ in self.ops:
            for t in reads:
                self.children[t] += writes
        self.here = {t for t, p in enumerate(self.producer) if p < 0}
        self.used = sum(self.bytes[t] for t in self.here)
        self.clock = 0
        self.made: set[int] = set()
        self.pool: list[int] = []
        self.locks = [0] * len(self.bytes)
        self.access = [0] * len(self.bytes)
        self.classes: dict[int, list[int]] = {}  # evicted tensor -> its class, a list that holds the cost
        self.released: set[int] = set()
        self.banished: set[int] = set()
        self.pinned = self.here | set(self.kept)

    @property
    def recomputed(self) -> int:
        return sum(again for _, again in self.ran)

    @property
    def recompute_ns(self) -> int:
        return sum(self.ops[op][2] for op, again in self.ran if again)

    # ---- the run -----------------------------------------------------------------------------

    def run(self) -> Reference:
        last_use = {t: i for i, (reads, writes, _) in enumerate(self.ops) for t in (*reads, *writes)}
        held = {t for op in self.trace.ops for t in op.releases}
        for i, (reads, writes, _) in enumerate(self.ops):
            self.materialize(i, writes[0] if writes else -1, again=False)
            for t in writes:
                self.access[t] = self.clock
            free = [t for t in (*reads, *writes) if last_use[t] == i and t not in held]
            for t in dict.fromkeys((*free, *self.trace.ops[i].releases)):
                if i < len(self.ops) - 1 and t not in self.trace.outputs and self.producer[t] >= 0:
                    self.release(t)
        return self

    def materialize(self, op: int, wanted: int, again: bool) -> None:
        reads, writes, ns = self.ops[op]
        assert not self.banished.intersection(reads)
        for t in reads:
            self.access[t] = self.clock
        absent = [t for t in reads if t not in self.here]
        for t in reads:
            if t in self.here or self.hold:
                self.lock(t)
        for t in absent:
            if t not in self.here:
                self.materialize(self.producer[t], t, again=True)
            if not self.hold:
                self.lock(t)
        while self.used + sum(self.bytes[t] for t in writes) > self.budget:
            self.evict(self.choose(writes if self.hold else ()))
        self.clock += ns
        self.ran.append((op, again))
        if again and self.recompute_ns > self.limit:
            raise Full
        fresh = [t for t in writes if t not in self.here]
        for t in fresh:
            self.here.add(t)
            self.made.add(t)
            self.used += self.bytes[t]
            if t in self.classes:
                self.classes.pop(t)[0] -= self.cost[t]
        loose = [t for t in fresh if t not in self.pinned and not self.locks[t]]
        self.pool += [t for t in loose if t != wanted] + [t for t in loose if t == wanted]
        for t in reads:
            self.locks[t] -= 1
            if not self.locks[t] and t not in self.pinned:
                self.pool.append(t)
        if self.deallocation == "banish":
            for t in reads:
                self.banish(t)

    def lock(self, t: int) -> None:
        self.locks[t] += 1
        if t in self.pool:
            self.pool.remove(t)

    def forget(self, t: int) -> None:
        self.evicted.append(t)
        self.here.remove(t)
        self.used -= self.bytes[t]
        if t in self.pool:
            self.pool.remove(t)

    def evict(self, t: int) -> None:
        self.forget(t)
        mine = self.classes[t] = [self.cost[t]]
        for n in self.neighbours(t) - {t}:
            theirs = self.classes[n]
            if theirs is not mine:
                mine[0] += theirs[0]
                for m in [m for m, c in self.classes.items() if c is theirs]:
                    self.classes[m] = mine

    def release(self, t: int) -> None:
        self.released.add(t)
        if self.deallocation == "eager" and t in self.here:  # what is away already is not brought back to be let go
            self.evict(t)
        if self.deallocation == "banish":
            self.banish(t)

    def banish(self, t: int) -> None:
        if t not in self.released - self.banished or any(self.gone(c) for c in self.children[t]):
            return
        if t in self.here:
            self.forget(t)
        else:
            self.classes.pop(t)[0] -= self.cost[t]
        self.banished.add(t)
        for c in self.children[t]:
            if c in self.here:
                self.pinned.add(c)
                self.pool = [u for u in self.pool if u != c]

    # ---- the heuristics ----------------------------------------------------------------------

    def choose(self, barred: Collection[int]) -> int:
        scores = [(self.score(t), t) for t in self.pool if t not in barred]
        if not scores:
            raise Full
        least = min(score for score, _ in scores)
        tied = [t for score, t in scores if score == least]
        return tied[-1] if self.last else tied[0]

    def score(self, t: int) -> float:
        if self.heuristic == "lru":
            return self.access[t]
        if self.heuristic == "size":
            return 1 / self.bytes[t]
        around: set[int] = set()
        if self.heuristic in ("dtr", "msps"):
            around = self.reach(t, self.parents)
        if self.heuristic == "dtr":
            around |= self.reach(t, self.children)
        top = self.cost[t] + sum(self.cost[u] for u in around)
        if self.heuristic == "dtr_eq":
            top += sum({id(self.classes[n]): self.classes[n][0] for n in self.neighbours(t)}.values())
        if self.heuristic == "none":
            top = 1
        seen = max([self.access[t], *(self.access[u] for u in around if self.staleness == "neighbourhood")])
        bottom = self.bytes[t] if self.size or self.heuristic == "msps" else 1
        if self.staleness != "none" and self.heuristic != "msps":
            bottom *= self.clock - seen
        return top / bottom if bottom else math.inf

    def gone(self, t: int) -> bool:
        return t in self.made and t not in self.here and t not in self.banished

    def neighbours(self, t: int) -> set[int]:
        return {u for u in (*self.parents[t], *self.children[t]) if self.gone(u)}

    def reach(self, t: int, step: Any) -> set[int]:
        found: set[int] = set()
        stack = [t]
        while stack:
            for u in step[stack.pop()]:
                if self.gone(u) and u not in found:
                    found.add(u)
                    stack.append(u)
        return found
