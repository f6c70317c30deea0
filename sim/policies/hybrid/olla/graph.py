"""What an order of ops is chosen over: which op must precede which, and the blocks of memory that they share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.rewrites.order import must_precede
from sim.trace.index import TraceIndex

FINE = 1_000_000
"""Into how many units a program divides memory at most; what is finer it does not tell apart."""


def unit_of(sizes: Iterable[int], most: int) -> float:
    """The unit in which a program counts bytes: what all sizes are multiples of, if that is not too fine."""
    return max(float(math.gcd(*sizes) or 1), most / FINE)


class Block(NamedTuple):
    """A storage: one tensor and those that take it over in place.

    size: bytes, more than 0.
    first: the op that takes it, -1 where it exists from the start.
    users: the ops that must end before it may be freed, `first` among them.
    stays: whether it is never freed.
    tensors: what lies in it, in the order in which they take it over.
    """

    size: int
    first: int
    users: frozenset[int]
    stays: bool
    tensors: tuple[int, ...]

    def life(self, place: Sequence[int]) -> tuple[int, int]:
        """The first and the last step of its life, given each op's step; the number of ops where it stays."""
        last = len(place) if self.stays else max((place[op] for op in self.users), default=-1)
        return (0 if self.first < 0 else place[self.first]), last


@dataclass(frozen=True, eq=False)
class Graph:
    """Ops with the edges that every order keeps, and blocks.

    before: per op those that must precede it.
    workspace: per op the bytes that it needs while it runs.
    blocks: the blocks that some order frees or takes.
    always: those that no order does.
    """

    before: Sequence[Collection[int]]
    workspace: Sequence[int]
    blocks: Sequence[Block]
    always: Sequence[Block] = field(default=())

    def __len__(self) -> int:
        return len(self.before)

    @cached_property
    def resident(self) -> int:
        """Bytes of what is always resident."""
        return sum(block.size for block in self.always)

    @cached_property
    def after(self) -> list[list[int]]:
        """Per op those that it must precede."""
        after: list[list[int]] = [[] for _ in self.before]
        for op, needed in enumerate(self.before):
            for other in needed:
                after[other].append(op)
        return after

    @cached_property
    def reaches(self) -> NDArray[np.bool_]:
        """Row a, column b: whether op b comes after op a in every order, or is a itself. Program order is one."""
        reaches = np.eye(len(self), dtype=np.bool_)
        for op in reversed(range(len(self))):
            for other in self.after[op]:
                reaches[op] |= reaches[other]
        return reaches

    def levels(self, order: Sequence[int]) -> list[int]:
        """Bytes held while each op runs, in an order."""
        place = [0] * len(self)
        for step, op in enumerate(order):
            place[op] = step
        change = [0] * (len(order) + 2)
        for block in self.blocks:
            first, last = block.life(place)
            change[first] += block.size
            change[last + 1] -= block.size
        held, levels = self.resident, []
        for step, op in enumerate(order):
            held += change[step]
            levels.append(held + self.workspace[op])
        return levels

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes held in an order."""
        start = self.resident + sum(block.size for block in self.blocks if block.first < 0)
        return max([start, *self.levels(order)])

    @cached_property
    def least(self) -> int:
        """Bytes below which no order's peak is: for each op what has been taken and is still needed in all orders."""
        held = np.array(self.workspace, np.int64) + self.resident
        start = self.resident
        for block in self.blocks:
            taken = np.ones(len(self), np.bool_) if block.first < 0 else self.reaches[block.first]
            if not block.stays:
                taken = taken & self.reaches[:, sorted(block.users)].any(axis=1)
            held += block.size * taken
            start += block.size * (block.first < 0)
        return max(start, int(held.max(initial=0)))


def graph_of(index: TraceIndex, *, holds: bool) -> Graph:
    """The graph of a trace on one device and engine.

    holds: whether what the program holds beyond its last reader is held until the end of the same op.
    """
    trace, count = index.trace, len(index.reads)
    before = [must_precede(trace, op) for op in range(count)]
    previous = -1
    for op in sorted(index.communicating):  # all devices meet in the same order
        if previous >= 0:
            before[op].add(previous)
        previous = op
    until = {t: index.released[t] for t in range(len(index.size)) if holds and index.released[t] >= 0}
    for t, op in until.items():
        before[op] |= {index.producer[t], *trace.readers(t)} - {op, -1}
    blocks = []
    for tensors in _storages(index):
        last = tensors[-1]
        users = {op for t in tensors for op in (*trace.readers(t), index.producer[t], until.get(t, -1))} - {-1}
        if index.size[last]:
            first = index.producer[tensors[0]]
            blocks.append(Block(index.size[last], first, frozenset(users), not index.freeable[last], tensors))
    always = [block for block in blocks if block.first < 0 and block.stays]
    rest = [block for block in blocks if block.first >= 0 or not block.stays]
    return Graph(before, index.workspace, rest, always)


def _storages(index: TraceIndex) -> list[tuple[int, ...]]:
    """The tensors of each storage, in the order in which they take it over.

    An op that overwrites a value without reading it finds it freed, unless nothing frees it: then it takes new space.
    """
    takes: dict[int, int] = {}
    for new, old in enumerate(index.replaces):
        if old >= 0 and (old in index.reads[index.producer[new]] or not index.freeable[old]):
            takes[old] = new
    storages, taken = [], set(takes.values())
    for root in range(len(index.size)):
        if root in taken:
            continue
        tensors = [root]
        while tensors[-1] in takes:
            tensors.append(takes[tensors[-1]])
        storages.append(tuple(tensors))
    return storages
