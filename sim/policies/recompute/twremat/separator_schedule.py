"""Schedules of small footprint, computed by recursion over a tree of separators.

To compute the wanted results of a part of a graph, the ops of its separator are run in order and their results held;
the inputs of each that lie in the smaller parts between them are computed there in the same way, and then freed. At
any time one separator per level is resident, and the inputs of one op per level.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from sim.policies.recompute.twremat.tree_decomposition import Separators
from sim.solvers.nodes import taken
from sim.solvers.schedule import Reruns, TraceIndex


class Needs:
    """What the first `count` ops of a trace need of each other, and until when.

    The ops form parts, each alone but for those that write in place (`parts_in_place`); these are recomputed together
    with the producer of what they overwrite. Everything else is by part.

    allowed: per op whether the caller lets it be recomputed.
    may_rerun: whether it can be, until the last time that its results can be needed.
    producers: the parts that produce its inputs.
    writes: its results that other parts use.
    fresh: bytes of those that need new space.
    space: bytes beyond that while it runs.
    until: per tensor the last part before which it can be needed, for itself or to recompute others; the
        number of parts where it is read later, kept, or passes its bytes on to what overwrites it.
    """

    def __init__(self, index: TraceIndex, count: int, allowed: Sequence[bool]) -> None:
        self.index, self.parts = index, parts_in_place(index, count, allowed)
        self.count = len(self.parts)
        part_of = {op: i for i, part in enumerate(self.parts) for op in part}
        kept = set(index.trace.outputs)
        self.producers, self.writes = list[list[int]](), list[list[int]]()
        self.fresh, self.space = list[int](), list[int]()
        for i, part in enumerate(self.parts):
            producers = {part_of[index.producer[t]] for op in part for t in index.reads[op] if index.producer[t] >= 0}
            self.producers.append(sorted(producers - {i}))
            if len(part) == 1:  # nothing is inside it
                self.writes.append(list(index.writes[part[0]]))
                self.fresh.append(sum(index.size[t] for t in self.writes[i] if index.replaces[t] < 0))
                self.space.append(index.workspace[part[0]])
                continue
            made = [t for op in part for t in index.writes[op]]
            inside = set(made)
            leaves = [
                t for t in made
                if t not in inside or t in kept or any(part_of.get(r) != i for r in index.trace.readers(t))
            ]  # fmt: skip
            self.writes.append(leaves)
            fresh = [t for t in leaves if index.replaces[t] < 0 or index.replaces[t] in inside]
            self.fresh.append(sum(index.size[t] for t in fresh))
            self.space.append(taken(index, part, set(leaves)) - self.fresh[-1])
        self.until = [-1] * len(index.size)
        self.may_rerun = [False] * self.count
        last = [0] * self.count  # the last part before which one may have to be recomputed
        for i in reversed(range(self.count)):
            part = self.parts[i]
            last[i] = i
            for t in self.writes[i]:
                readers = index.trace.readers(t)
                if t in kept or index.overwritten_at[t] < len(index.reads) or (readers and readers[-1] >= count):
                    self.until[t] = self.count
                else:
                    behind = [part_of[r] for r in readers if part_of[r] != i]
                    self.until[t] = max((last[r] if self.may_rerun[r] else r for r in behind), default=i)
                last[i] = max(last[i], self.until[t])
            in_time = last[i] < self.count and self.parts[last[i]][0] <= min(index.recomputable_among(part).values())
            droppable = all(index.droppable[t] for t in self.writes[i])
            self.may_rerun[i] = in_time and droppable and all(allowed[op] for op in part)

    def graph(self) -> list[set[int]]:
        """Per part those that read its results, or produce its inputs."""
        beside: list[set[int]] = [set(producers) for producers in self.producers]
        for op, producers in enumerate(self.producers):
            for producer in producers:
                beside[producer].add(op)
        return beside


def parts_in_place(index: TraceIndex, count: int, allowed: Sequence[bool]) -> list[list[int]]:
    """The first `count` ops in parts: each alone, but one that overwrites what it alone reads with its producer.

    The parts stand in an order in which they could run: ops between the two come before them, or behind them where they
    read a result of the first. Where the second reads such an op's result in turn, both stay alone; so does what is not
    allowed.
    """
    parts: list[list[int]] = []
    for op in range(count):
        old = [index.replaces[t] for t in index.writes[op] if index.replaces[t] >= 0]
        producers = {index.producer[t] for t in old if index.trace.readers(t) == (op,)}
        at = next(
            (i for i in reversed(range(len(parts) if producers else 0)) if not producers.isdisjoint(parts[i])), -1
        )
        if at < 0 or not all(allowed[one] for one in (*parts[at], op)):
            parts.append([op])
            continue
        before, behind = list[list[int]](), list[list[int]]()
        made, later = {t for one in parts[at] for t in index.writes[one]}, set[int]()
        for part in parts[at + 1 :]:
            depends = any(t in made or t in later for one in part for t in index.reads[one])
            (behind if depends else before).append(part)
            later.update(t for one in part for t in index.writes[one] if depends)
        if later.isdisjoint(index.reads[op]):
            parts[at:] = [*before, [*parts[at], op], *behind]
        else:
            parts.append([op])
    return parts


def separator_schedule(needs: Needs, tree: Separators, cost: Sequence[int], limit: int, longest: int) -> Reruns | None:
    """Per op the ops recomputed before it, when all first runs are in program order; None if they are too many.

    An op here is a part of `needs`.

    limit: bytes. Results that may be freed stay up to this limit, then the least recomputation time per byte is freed
        first; pinned results may exceed the limit all the same. At 0 everything is freed at once.
    longest: the most reruns.
    """
    schedule = _Schedule(needs, tree, cost, limit, longest)
    try:
        schedule.run()
    except _TooLong:
        return None
    return schedule.reruns


class _TooLong(Exception):
    """More ops would be recomputed than allowed."""


class _Schedule:
    def __init__(self, needs: Needs, tree: Separators, cost: Sequence[int], limit: int, longest: int) -> None:
        self.needs, self.tree, self.limit, self.left = needs, tree, limit, longest
        self.reruns: dict[int, list[int]] = {}
        index = needs.index
        self.next = 0  # the first op that has not run
        self.live = [False] * needs.count  # whether an op's results are resident
        self.pins = [0] * needs.count  # pin counts
        self.idle: list[tuple[float, int]] = []  # results that may be freed, and stale entries of others, by price
        self.held = sum(size for t, size in enumerate(index.size) if index.producer[t] < 0)
        bytes = [sum(index.size[t] for t in writes) for writes in needs.writes]
        self.price = [sum(cost[op] for op in part) / max(bytes[i], 1) for i, part in enumerate(needs.parts)]
        self.dying: list[list[tuple[int, int]]] = [[] for _ in range(needs.count + 1)]
        for op in range(needs.count):
            for t in needs.writes[op]:
                self.dying[needs.until[t]].append((op, t))
        self.children = [tree.children(node) for node in range(len(tree.up))]
        self.sinks = self._sinks()

    def _sinks(self) -> list[list[int]]:
        """Per node of the tree the ops in it and below whose results no other reads, in order."""
        read = {producer for producers in self.needs.producers for producer in producers}
        found: list[list[int]] = [[] for _ in self.tree.up]
        for op in range(self.needs.count):
            node = self.tree.home[op] if op not in read else -1
            while node >= 0:
                found[node].append(op)
                node = self.tree.up[node]
        return found

    def run(self) -> None:
        """Run everything once, and what that takes."""
        if self.needs.count:
            self._solve(0, (), self.needs.count)

    def _solve(self, node: int, wanted: Sequence[int], upto: int) -> None:
        """Of the part at a node and below: have the wanted results there and pinned, all sinks before `upto` run."""
        tree = self.tree
        missing = [op for op in wanted if not self.live[op]] + self._pending(node, upto)
        if not missing:
            self._pin(wanted)
            return
        needed, held = self._slice(node, missing)
        self._pin(held)
        for op in tree.vertices[node]:
            if op not in needed:
                continue
            read = [
                producer
                for producer in self.needs.producers[op]
                if tree.below(node, producer) and tree.home[producer] != node
            ]
            for child in self.children[node]:
                self._solve(child, [producer for producer in read if tree.below(child, producer)], op)
            if not self.live[op]:
                self._reach(op)
            self._pin((op,))
            self._unpin(read)
            held.append(op)
        for child in self.children[node]:
            self._solve(child, [op for op in wanted if tree.below(child, op)], 0)
        self._finish(node, upto)
        self._pin([op for op in wanted if tree.home[op] == node])
        self._unpin(held)

    def _slice(self, node: int, missing: list[int]) -> tuple[Collection[int], list[int]]:
        """The ops of a part that have to run for those missing; those of its separator that are there for them."""
        needed: set[int] = set()
        there: set[int] = set()
        while missing:
            op = missing.pop()
            if op in needed:
                continue
            needed.add(op)
            for producer in self.needs.producers[op]:
                if self.live[producer]:
                    there.add(producer)
                elif self.tree.below(node, producer):
                    missing.append(producer)
        return needed, [op for op in self.tree.vertices[node] if op in there]

    def _finish(self, node: int, upto: int) -> None:
        """Run the sinks of the parts below a node, in program order."""
        waiting = [(pending[0], child) for child in self.children[node] if (pending := self._pending(child, upto))]
        heapify(waiting)
        while waiting:
            _, child = heappop(waiting)
            self._solve(child, (), waiting[0][0] if waiting else upto)
            if pending := self._pending(child, upto):
                heappush(waiting, (pending[0], child))

    def _pending(self, node: int, upto: int) -> list[int]:
        sinks = self.sinks[node]
        return sinks[bisect_left(sinks, self.next) : bisect_left(sinks, upto)]

    # ---- single runs -------------------------------------------------------------------------

    def _reach(self, op: int) -> None:
        """Run an op again, or, for the first time, all before it and then it."""
        while self.next < op:
            self._perform(self.next)
        self._perform(op)

    def _perform(self, op: int) -> None:
        needs, size, producers = self.needs, self.needs.index.size, self.needs.producers[op]
        for producer in producers:
            if self.live[producer]:
                self._pin((producer,))
            else:
                self._solve(self.tree.home[producer], (producer,), 0)
        self._make_room(needs.fresh[op] + needs.space[op])
        self.live[op] = True
        if op < self.next:
            self.left -= len(needs.parts[op])
            if self.left < 0:
                raise _TooLong
            self.reruns.setdefault(needs.parts[self.next][0], []).extend(needs.parts[op])
            self.held += sum(size[t] for t in needs.writes[op] if needs.until[t] >= self.next)
        else:
            self.next = op + 1
            self.held += needs.fresh[op]
            self.held -= sum(size[t] for producer, t in self.dying[op] if self.live[producer])
        self._pin((op,))
        self._unpin((*producers, op))

    def _pin(self, ops: Sequence[int]) -> None:
        for op in ops:
            self.pins[op] += 1

    def _unpin(self, ops: Sequence[int]) -> None:
        for op in ops:
            self.pins[op] -= 1
            if not self.pins[op] and self.needs.may_rerun[op]:
                heappush(self.idle, (self.price[op], op))

    def _make_room(self, need: int) -> None:
        while self.held + need > self.limit and self.idle:
            _, op = heappop(self.idle)
            if self.live[op] and not self.pins[op]:
                self.live[op] = False
                writes, until = self.needs.writes[op], self.needs.until
                self.held -= sum(self.needs.index.size[t] for t in writes if until[t] >= self.next)
