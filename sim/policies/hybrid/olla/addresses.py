"""Addresses: each lifetime at an offset, so that nothing overlaps in time and space and the highest end is low."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sim.policies.hybrid.olla.graph import Graph


class Lifetime(NamedTuple):
    """Bytes that need one range from the first to the last of some steps."""

    size: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        """Whether both exist at some step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Layout:
    """offsets: where each lifetime begins. end: where the highest ends."""

    offsets: tuple[int, ...]
    end: int


def lifetimes(graph: Graph, order: Sequence[int], rounding: int = 1) -> list[Lifetime]:
    """Of the blocks that are always resident, of the other blocks, then of workspaces by op; sizes rounded up."""
    place = [0] * len(order)
    for step, op in enumerate(order):
        place[op] = step
    spans = [(block.size, *block.life(place)) for block in (*graph.always, *graph.blocks)]
    spans += [(size, place[op], place[op]) for op, size in enumerate(graph.workspace) if size]
    return [Lifetime(-(-size // rounding) * rounding, first, last) for size, first, last in spans]


def most_live(lives: Sequence[Lifetime]) -> int:
    """The most bytes that exist at one step: no layout ends lower."""
    steps = max((life.last for life in lives), default=0) + 2
    change = np.zeros(steps, np.int64)
    for size, first, last in lives:
        change[first] += size
        change[last + 1] -= size
    return int(change.cumsum().max(initial=0))


def pyramid(lives: Sequence[Lifetime]) -> dict[int, int]:
    """Offsets of nested lifetimes, stacked from the bottom: the longest first, each within the one below it."""
    offsets: dict[int, int] = {}
    top, below = 0, Lifetime(0, -1, max((life.last for life in lives), default=0))
    ranked = sorted(range(len(lives)), key=lambda i: (lives[i].first - lives[i].last, -lives[i].size, i))
    for i in ranked:
        if below.first <= lives[i].first and lives[i].last <= below.last:
            offsets[i], below = top, lives[i]
            top += lives[i].size
    return offsets


Key = Callable[[Lifetime], tuple[int, ...]]
KEYS: tuple[Key, ...] = (
    lambda life: (life.first - life.last, -life.size),
    lambda life: (-life.size, life.first - life.last),
    lambda life: ((life.first - life.last - 1) * life.size,),
    lambda life: (life.first, -life.size),
    lambda life: (-life.last, -life.size),
)
"""In which order what is not placed yet is placed: longest, largest, most bytes times steps, first, last to end."""
TURNS = 30


def first_fit(lives: Sequence[Lifetime], placed: dict[int, int], key: Callable[[int], Any]) -> Layout:
    """Each lifetime at the lowest offset that is free throughout it, given where some of them are placed."""
    size, first, last = np.array([tuple(life) for life in lives], np.int64).reshape(-1, 3).T
    start = np.zeros(len(lives), np.int64)
    is_placed = np.zeros(len(lives), np.bool_)
    for i, offset in placed.items():
        start[i], is_placed[i] = offset, True
    for i in sorted((i for i in range(len(lives)) if i not in placed), key=lambda i: (key(i), i)):
        beside = np.flatnonzero(is_placed & (first <= last[i]) & (first[i] <= last))
        beside = beside[np.argsort(start[beside], kind="stable")]
        ends = np.maximum.accumulate(np.concatenate(([0], start[beside] + size[beside])))
        gaps = np.flatnonzero(start[beside] - ends[:-1] >= size[i])
        start[i], is_placed[i] = ends[gaps[0] if len(gaps) else -1], True
    return Layout(tuple(start.tolist()), int((start + size).max(initial=0)))


def laid_out(lives: Sequence[Lifetime]) -> Layout:
    """The lowest of the layouts by first fit, above a pyramid or without one; the first that cannot be beaten.

    What ends above the most bytes that are live is then placed earlier, some times.
    """
    least = most_live(lives)
    best: Layout | None = None
    for placed in (pyramid(lives), {}):
        for key in KEYS:
            layout = first_fit(lives, placed, lambda i, key=key: key(lives[i]))  # type: ignore[misc]
            if best is None or layout.end < best.end:
                best = layout
            if best.end <= least:
                return best
    assert best is not None
    return _sooner(lives, best, least)


def _sooner(lives: Sequence[Lifetime], best: Layout, least: int) -> Layout:
    """The lowest of some layouts, in each of which goes first what lay too high in the one before."""
    rank = {i: place for place, i in enumerate(sorted(range(len(lives)), key=lambda i: (best.offsets[i], i)))}
    layout = best
    for turn in range(1, TURNS + 1):
        ends = (offset + life.size for offset, life in zip(layout.offsets, lives, strict=True))
        rank |= {i: rank[i] - turn * len(lives) for i, end in enumerate(ends) if end > least}
        layout = first_fit(lives, {}, rank.__getitem__)
        best = min(best, layout, key=lambda layout: layout.end)
        if best.end <= least:
            break
    return best
