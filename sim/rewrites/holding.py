"""Release points of a rewritten trace: where it releases the tensors that the old trace held.

Likewise where the program's variables let go of what autograd goes on to hold (`Op.unbinds`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np

from sim.trace.graph import Trace
from sim.trace.origin import (
    Along,
    Chosen,
    Encoded,
    Expr,
    Glue,
    Lossy,
    Microbatch,
    Origin,
    Packed,
    Part,
    Rowwise,
    Same,
    leaves,
)
from sim.trace.tensor import ROLE_CODE

POINTS = ("releases", "unbinds")
"""Columns of ops that name tensors of which the program lets go."""

Turn = tuple[int, tuple[int, int, int] | None]
"""Iteration and microbatches (first, stop, count; None for all) of the first base."""


def carry_releases(old: Trace, new: Trace, origin: Origin) -> Trace:
    """`new` with the release points of `old`; `origin` says in terms of `old` what tensors and ops stand for.

    A tensor that an op of the old trace produces is held until the end of the op that stands for the old release
    point, in the same iteration and microbatch and on the same device; one of no microbatch that nothing reads, such as
    a weight that ZeRO gathers for what has a cast of it, until the last op that stands for that point. If that op is on
    another device or left out, the tensor is held until the last preceding op on this device. A gradient is held as the
    sum of its microbatches and ranks, or this rank's part of it, whatever op adds it up; a term of it is not. Other
    tensors that a rewrite adds (a received copy, an encoding) and tensors whose storage is taken over are not held;
    where that only gives a value another name, the last name is held. What variables let go of is found in the same
    way.
    """
    places = _Places(new, origin)
    columns = {"releases": released_by(new, _carried(old, new, origin, places, "releases"))}
    if old.op_columns.unbinds:
        columns["unbinds"] = unbound_by(new, _carried(old, new, origin, places, "unbinds"))
    return _with(new, columns)


def _carried(old: Trace, new: Trace, origin: Origin, places: _Places, key: str) -> list[tuple[int, int]]:
    """The points of a new trace that stand for those of the old one, as (tensor, op) in order."""
    assert new.origin is not None
    order = {t: (rank, op) for rank, (t, op) in enumerate(points(old, key))}
    until: dict[int, tuple[int, int]] = {}  # several names of one value may end in the same
    gradient = new.tensor_columns.role == ROLE_CODE["gradient"]
    for t, expr in enumerate(origin.tensors):
        producer, name = int(new.producer[t]), _last_name(new, origin, t)
        is_added = producer >= 0 and isinstance(origin.ops[producer], Glue) and not gradient[t]
        if producer < 0 or is_added or new.replaced_by[name] >= 0:
            continue
        turn, device = _turn_of_tensor(new, t), int(new.op_columns.device[producer])
        if turn[1] is not None and gradient[t]:
            if _is_term(new.origin.tensors[t]):
                continue  # a microbatch's part of a gradient is added to the others; it is their sum that is held
            turn = turn[0], None
        held = [(leaf, *order[leaf.id]) for leaf in leaves(expr) if leaf.id in order]
        unread = turn[1] is None and not new.readers(t)
        place = partial(places.any_turn if unread else places.last, turn)
        ends = [(place(op, leaf.iteration, device), rank) for leaf, rank, op in held]
        if ends:
            until[name] = max(*ends, until.get(name, (-1, -1)))
    return [(t, op) for (op, _), t in sorted((place, t) for t, place in until.items())]


def _turn_of_tensor(new: Trace, t: int) -> Turn:
    """The turn of a tensor: of one that each microbatch has a whole copy of, that of the ops that read it."""
    assert new.origin is not None
    turn = _turn(new.origin.tensors[t])
    if turn[1] is None:
        of_readers = {_turn(new.origin.ops[op]) for op in new.readers(t)}
        if len(of_readers) == 1:
            (turn,) = of_readers
    return turn


def _is_term(expr: Expr | None) -> bool:
    """Whether a gradient is of some microbatches or replicas alone."""
    while expr is not None:
        match expr:
            case Microbatch(of, first, stop, count):
                if stop - first < count:
                    return True
                expr = of
            case Part(of) | Along(of) | Rowwise(of) | Encoded(of) | Lossy(of):
                expr = of
            case Chosen():
                expr = expr.of
            case Packed(parts):
                expr = next((part for part in parts if part is not None), None)
            case _:
                return False
    return False


def _last_name(new: Trace, origin: Origin, tensor: int) -> int:
    """The last tensor that has the value of this one in its storage: an op that computes nothing may rename it."""
    while (heir := int(new.replaced_by[tensor])) >= 0:
        if origin.tensors[heir] != origin.tensors[tensor] or not isinstance(origin.ops[new.producer[heir]], Glue):
            break
        tensor = heir
    return tensor


def has_points(trace: Trace) -> bool:
    """Whether the program holds anything beyond its last reader, or names what autograd holds."""
    return bool(trace.op_columns.releases or trace.op_columns.unbinds)


def points(trace: Trace, key: str = "releases") -> list[tuple[int, int]]:
    """All release points of a trace as (tensor, op), in order; with "unbinds" those where variables let go."""
    return [(t, op) for op, tensors in sorted(getattr(trace.op_columns, key).items()) for t in tensors]


def with_releases(trace: Trace, wanted: Iterable[tuple[int, int]]) -> Trace:
    """The same trace with only these release points, given as for `released_by`."""
    return _with(trace, {"releases": released_by(trace, wanted)})


def with_points(trace: Trace, released: Iterable[tuple[int, int]], unbound: Iterable[tuple[int, int]]) -> Trace:
    """The same trace with only these points, given as for `released_by`."""
    return _with(trace, {"releases": released_by(trace, released), "unbinds": unbound_by(trace, unbound)})


def _with(trace: Trace, columns: Mapping[str, Mapping[int, tuple[int, ...]]]) -> Trace:
    ops = replace(trace.op_columns, **columns)  # type: ignore[arg-type]
    return Trace(
        trace.tensor_columns, ops, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin
    )


def released_by(trace: Trace, wanted: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """The tensors that each op releases, given (tensor, op) in order.

    Impossible points are left out: one before the last use, and one of an output or of a tensor whose storage is
    taken over.
    """
    kept, last_use = {*trace.outputs, *np.flatnonzero(trace.replaced_by >= 0).tolist()}, trace.last_use.tolist()
    releases: dict[int, list[int]] = defaultdict(list)
    for t, op in wanted:
        if op >= last_use[t] and t not in kept:
            releases[op].append(t)
    return {op: tuple(tensors) for op, tensors in sorted(releases.items())}


def unbound_by(trace: Trace, wanted: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """The tensors of which variables let go at the end of each op, given (tensor, op); impossible ones are left out."""
    unbinds: dict[int, list[int]] = defaultdict(list)
    for t, op in wanted:
        if 0 <= trace.producer[t] <= op:
            unbinds[op].append(t)
    return {op: tuple(tensors) for op, tensors in sorted(unbinds.items())}


class _Places:
    """Finds the op of a new trace that stands for an op of the old one, or for the nearest preceding one."""

    def __init__(self, new: Trace, origin: Origin) -> None:
        assert new.origin is not None
        by_key: dict[tuple[int, Turn, int], list[tuple[int, int]]] = defaultdict(list)
        device = new.op_columns.device.tolist()
        for op, expr in enumerate(origin.ops):
            for leaf in leaves(expr):
                by_key[leaf.iteration, _turn(new.origin.ops[op]), device[op]].append((leaf.id, op))
        self.by_key = {key: _latest(rows) for key, rows in by_key.items()}
        self.standing: dict[tuple[int, int, int], int] = {}
        for (iteration, _, on), rows in by_key.items():
            for old, op in rows:
                key = old, iteration, on
                self.standing[key] = max(op, self.standing.get(key, -1))

    def any_turn(self, turn: Turn, old: int, iteration: int, device: int) -> int:
        """The last op that stands for op `old`, in whichever turn; where there is none, as `last`."""
        found = self.standing.get((old, iteration, device), -1)
        return found if found >= 0 else self.last(turn, old, iteration, device)

    def last(self, turn: Turn, old: int, iteration: int, device: int) -> int:
        """The last op that stands for op `old` or one before it, on that device and in that turn; -1 for none."""
        for which in (turn, (turn[0], None)):  # some ops run once for all microbatches
            ids, ops = self.by_key.get((iteration, which, device), ((), ()))
            place = bisect_right(ids, old) - 1
            if place >= 0:
                return ops[place]
        return -1


def _latest(rows: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Old ids in rising order, and for each the last of the new ops up to it."""
    rows.sort()
    return [old for old, _ in rows], list(accumulate((op for _, op in rows), max))


def _turn(expr: Expr) -> Turn:
    """The iteration and the microbatches of an expression; for a pack, those of its first member."""
    batch = None
    while True:
        match expr:
            case Microbatch(of, first, stop, count):
                expr, batch = of, (first, stop, count)
            case Part(of) | Along(of) | Rowwise(of) | Encoded(of) | Lossy(of):
                expr = of
            case Chosen():
                expr = expr.of
            case Packed(parts):
                expr = next((part for part in parts if part is not None), Glue())
            case Same(_, iteration):
                return iteration, batch
            case _:
                return 0, batch
