"""What a trace says of how its ops are launched, as facts of its `meta` that name ops by id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.errors import TraceError
from sim.trace.graph import Trace
from sim.trace.origin import Expr, Fused, Glue, Microbatch, Packed, Same, leaves

CAPTURED = "captured"
"""The fact of a trace that lists the ops, by id, of each part that is launched as one graph."""

AWAITED = "awaited"
"""The fact of a trace that lists the ops, by id, before which the program reads something from the device."""

Turn = tuple[int, int, int]
"""A device, an iteration, and where in the batch a microbatch begins, -1 for none."""


def awaited(meta: Mapping[str, Any], count: int) -> list[int]:
    """The ops before which the program reads something from the device. count: how many the trace has.

    Raises TraceError for ids that no op has.
    """
    return _ids(AWAITED, meta.get(AWAITED, ()), count)


def captured(meta: Mapping[str, Any], count: int) -> list[list[int]]:
    """The ops of each part that is launched as one graph, in program order; errors as for `awaited`."""
    return [_ids(CAPTURED, part, count) for part in _listed(meta.get(CAPTURED, ()))]


def names_launched(trace: Trace) -> bool:
    """Whether a trace has such facts: then what is made of it is not what is made of others of its structure."""
    return AWAITED in trace.meta or CAPTURED in trace.meta


def with_launched(old: Trace, new: Trace, claims: Sequence[Expr]) -> Trace:
    """The new trace with the old one's facts about launches: of the ops that stand for those named, kernels that
    compute one among them.

    Each device, iteration and microbatch waits and launches for itself; where an op has become several of these, the
    program reads before the first. What is computed once more in another phase is none of them.

    claims: what each op of the new trace stands for in the old one.
    """
    if not names_launched(old):
        return new
    meta, count = dict(new.meta), len(old.op_columns.name)
    phase, device = new.op_columns.phase, new.op_columns.device
    standing: dict[int, dict[Turn, list[int]]] = {}
    for op, expr in enumerate(claims):
        for leaf in {leaf.id: leaf for leaf in leaves(expr)}.values():
            if old.op_columns.phase[leaf.id] == phase[op]:
                turn = int(device[op]), leaf.iteration, _microbatch(expr)
                standing.setdefault(leaf.id, {}).setdefault(turn, []).append(op)
    if AWAITED in meta:
        waits = [min(ops) for of in awaited(old.meta, count) for ops in standing.get(of, {}).values()]
        meta[AWAITED] = sorted(set(waits))
    if CAPTURED in meta:
        meta[CAPTURED] = [
            graph for part in captured(old.meta, count) for graph in _graphs([standing.get(of, {}) for of in part])
        ]
    return Trace(
        new.tensor_columns,
        new.op_columns,
        outputs=new.outputs,
        carry=new.carry,
        meta=meta,
        origin=new.origin,
        like=new,
    )


def _graphs(standing: Sequence[Mapping[Turn, Sequence[int]]]) -> list[list[int]]:
    """The graphs that stand for one, an entry for each of its ops; what is of no microbatch is launched with the first
    of its device and iteration."""
    graphs: dict[Turn, set[int]] = {}
    for turns in standing:
        for turn, ops in turns.items():
            graphs.setdefault(turn, set()).update(ops)
    for turn in [turn for turn in graphs if turn[2] < 0]:
        first = min([each for each in graphs if each[:2] == turn[:2] and each[2] >= 0], default=None)
        if first is not None:
            graphs[first] |= graphs.pop(turn)
    return [sorted(graph) for graph in graphs.values()]


def _microbatch(expr: Expr | None) -> int:
    """The first part of the batch that an op computes, of a kernel that of its first op; -1 for no part."""
    if isinstance(expr, Microbatch):
        return expr.first
    if isinstance(expr, Packed | Fused):
        return next((found for part in expr.parts if (found := _microbatch(part)) >= 0), -1)
    return -1 if expr is None or isinstance(expr, Same | Glue) else _microbatch(expr.of)


def _ids(fact: str, ids: object, count: int) -> list[int]:
    found = set[int]()
    for op in _listed(ids):
        if not isinstance(op, int) or isinstance(op, bool) or not 0 <= op < count:
            raise TraceError(f"meta {fact!r}: needs ids of ops from 0 to {count - 1}, has {op!r}")
        found.add(op)
    return sorted(found)


def _listed(ids: object) -> Sequence[Any]:
    return ids if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]
