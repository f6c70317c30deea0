"""The swaps of one order and one allocation: Belady's choice of what leaves, copies in as early as buffers allow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.plan import Move
from sim.solvers.spans import swappable
from sim.trace.graph import Trace
from sim.trace.liveness import freeable
from sim.trace.tensor import ROLE_CODE

SWAPPED = (ROLE_CODE["activation"], ROLE_CODE["temporary"])


@dataclass(frozen=True)
class Allocation:
    """A pool cut into buffers by size class.

    classes: per distinct tensor size, in order, the index of the size whose buffers it uses; never falling.
    counts: per distinct size how many buffers of that size there are.
    """

    classes: tuple[int, ...]
    counts: tuple[int, ...]


class Program:
    """The tensors of a trace that may be swapped, and who uses them."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        size = trace.tensor_columns.bytes
        self.swapped = {*swappable(trace, SWAPPED)}
        self.sizes = sorted({int(size[t]) for t in self.swapped})
        rank = {s: i for i, s in enumerate(self.sizes)}
        self.rank = {t: rank[int(size[t])] for t in self.swapped}
        ops, swapped = range(len(trace.ops)), self.swapped
        self.reads = [tuple(dict.fromkeys(t for t in trace.reads(op) if t in swapped)) for op in ops]
        self.writes = [tuple(t for t in trace.writes(op) if t in swapped) for op in ops]
        self._users = {t: (int(trace.producer[t]), *trace.readers(t)) for t in self.swapped}
        used = (trace.producer >= 0) | (trace.read_counts > 0)
        self._others = [t for t, s in enumerate(size.tolist()) if s and used[t] and t not in swapped]
        self._dies = freeable(trace)

    def uses(self, order: Sequence[int]) -> dict[int, list[int]]:
        """Per swapped tensor the positions of its uses in an order."""
        at = {op: i for i, op in enumerate(order)}
        return {t: sorted({at[op] for op in users}) for t, users in self._users.items()}

    def reserved(self, order: Sequence[int]) -> int:
        """The most bytes that everything else takes at once in an order, workspaces included."""
        trace, at, end = self.trace, {op: i for i, op in enumerate(order)}, len(order) - 1
        change = np.zeros(end + 3, np.int64)
        for t in self._others:
            producer, over = int(trace.producer[t]), int(trace.replaced_by[t])
            first = at[producer] if producer >= 0 else 0
            release = int(trace.released[t])
            held = [at[op] for op in trace.readers(t)] + ([at[release]] if release >= 0 else [])
            last = max((first, *held)) if self._dies[t] else end
            if over >= 0:
                last = at[int(trace.producer[over])] - 1
            change[first] += trace.tensor_columns.bytes[t]
            change[max(last, first - 1) + 1] -= trace.tensor_columns.bytes[t]
        workspace = trace.op_columns.workspace[list(order)]
        return int((np.cumsum(change)[: end + 1] + workspace).max(initial=0))

    def demand(self, order: Sequence[int], classes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Per class the buffers that one op needs at least, and those with which nothing is ever swapped."""
        need, most = [0] * len(self.sizes), [0] * len(self.sizes)
        live, last = [0] * len(self.sizes), {t: at[-1] for t, at in self.uses(order).items()}
        for i, op in enumerate(order):
            here = [0] * len(self.sizes)
            for t in (*self.reads[op], *self.writes[op]):
                here[classes[self.rank[t]]] += 1
            for t in self.writes[op]:
                live[classes[self.rank[t]]] += 1
            for c in {classes[self.rank[t]] for t in (*self.reads[op], *self.writes[op])}:
                need[c], most[c] = max(need[c], here[c]), max(most[c], live[c])
            for t in (*self.reads[op], *self.writes[op]):
                if last[t] == i:
                    live[classes[self.rank[t]]] -= 1
        return need, most

    def swaps(self, order: Sequence[int], allocation: Allocation, home: str, host: str) -> list[Move] | None:
        """The moves, anchored to positions in the order; None where an op's tensors have too few buffers."""
        uses = self.uses(order)
        classes, moves = allocation.classes, list[Move]()
        free = {c: [-1] * allocation.counts[c] for c in set(classes)}
        resident: dict[int, dict[int, int]] = {c: {} for c in set(classes)}  # tensor -> position of its latest use
        left: dict[int, int] = {}

        def buffer(c: int, position: int, pinned: Sequence[int]) -> int | None:
            """The position after which a buffer is free, after an eviction if need be; -1 from the start."""
            if free[c]:
                free[c].sort(reverse=True)
                return free[c].pop()
            evictable = [t for t in resident[c] if t not in pinned]
            if not evictable:
                return None
            victim = max(evictable, key=lambda t: (uses[t][bisect_right(uses[t], position - 1)], t))  # Belady
            left[victim] = resident[c].pop(victim)
            moves.append(Move(victim, host, after=left[victim]))
            return left[victim]

        for i, op in enumerate(order):
            here = (*self.reads[op], *self.writes[op])
            for t in here:
                c = classes[self.rank[t]]
                if t not in resident[c]:
                    since = buffer(c, i, here)
                    if since is None:
                        return None
                    if t in left:
                        since = max(since, left.pop(t))
                        moves.append(Move(t, home, keep=True, after=since))
                resident[c][t] = i
            for t in here:
                if uses[t][-1] == i:
                    c = classes[self.rank[t]]
                    del resident[c][t]
                    free[c].append(i)
        return moves
