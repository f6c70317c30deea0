"""Release points of a rewritten trace: where it lets go of what the old one held."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import numpy as np

from sim.trace.graph import Trace
from sim.trace.origin import Encoded, Expr, Glue, Lossy, Microbatch, Origin, Packed, Part, Same, leaves

Turn = tuple[int, tuple[int, int, int] | None]
"""Iteration and microbatches of the first base."""


def carry_releases(old: Trace, new: Trace, origin: Origin) -> Trace:
    """`new` with the release points of `old`; `origin` says in terms of `old` what tensors and ops stand for.

    A new tensor that an op of the old trace makes is held until the end of what stands for the old release
    point, in its own iteration and microbatch and on its own device; where that op is on another device or
    is left out, until the last op here of those that came before it. What a rewrite adds (a copy sent, a code)
    is not held, nor what something takes over.
    """
    assert new.origin is not None
    places = _Places(new, origin)
    order = {t: (rank, op) for rank, (t, op) in enumerate(points(old))}
    found: list[tuple[int, int, int]] = []
    for t, expr in enumerate(origin.tensors):
        maker = int(new.producer[t])
        if maker < 0 or isinstance(origin.ops[maker], Glue) or new.replaced_by[t] >= 0:
            continue
        turn, device = _turn(new.origin.tensors[t]), int(new.op_columns.device[maker])
        held = [(leaf, *order[leaf.id]) for leaf in leaves(expr) if leaf.id in order]
        ends = [(places.last(op, leaf.iteration, turn, device), rank) for leaf, rank, op in held]
        if ends:
            found.append((*max(ends), t))
    return with_releases(new, [(t, op) for op, _, t in sorted(found)])


def points(trace: Trace) -> list[tuple[int, int]]:
    """All release points of a trace, (tensor, op), in order."""
    return [(t, op) for op, tensors in sorted(trace.op_columns.releases.items()) for t in tensors]


def with_releases(trace: Trace, wanted: Iterable[tuple[int, int]]) -> Trace:
    """The same trace with these release points alone, as `released_by` takes them."""
    ops = replace(trace.op_columns, releases=released_by(trace, wanted))
    return Trace(
        trace.tensor_columns, ops, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin
    )


def released_by(trace: Trace, wanted: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Per op what it releases, given (tensor, op) in order.

    Left out is what cannot be: a point before the last use, and that of an output or of what something takes over.
    """
    kept, last_use = {*trace.outputs, *np.flatnonzero(trace.replaced_by >= 0).tolist()}, trace.last_use
    releases: dict[int, list[int]] = defaultdict(list)
    for t, op in wanted:
        if op >= last_use[t] and t not in kept:
            releases[op].append(t)
    return {op: tuple(tensors) for op, tensors in sorted(releases.items())}


class _Places:
    """Which ops of a new trace stand for those of the old one, up to any of them."""

    def __init__(self, new: Trace, origin: Origin) -> None:
        assert new.origin is not None
        at: dict[tuple[int, Turn, int], list[tuple[int, int]]] = defaultdict(list)
        device = new.op_columns.device.tolist()
        for op, expr in enumerate(origin.ops):
            for leaf in leaves(expr):
                at[leaf.iteration, _turn(new.origin.ops[op]), device[op]].append((leaf.id, op))
        self.at = {key: _latest(rows) for key, rows in at.items()}

    def last(self, old: int, iteration: int, turn: Turn, device: int) -> int:
        """The last op that stands for op `old` or one before it, on a device and in its turn; -1 for none."""
        for which in (turn, (turn[0], None)):  # some ops run once for all microbatches
            ids, ops = self.at.get((iteration, which, device), ((), ()))
            place = bisect_right(ids, old) - 1
            if place >= 0:
                return ops[place]
        return -1


def _latest(rows: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Old ids in rising order, and beside each the last of the new ops up to there."""
    rows.sort()
    return [old for old, _ in rows], list(accumulate((op for _, op in rows), max))


def _turn(expr: Expr) -> Turn:
    """The iteration and the microbatches that an expression is of; of a pack those of its first member."""
    batch = None
    while True:
        match expr:
            case Microbatch(of, first, stop, count):
                expr, batch = of, (first, stop, count)
            case Part(of) | Encoded(of) | Lossy(of):
                expr = of
            case Packed(parts):
                expr = next((part for part in parts if part is not None), Glue())
            case Same(_, iteration):
                return iteration, batch
            case _:
                return 0, batch
