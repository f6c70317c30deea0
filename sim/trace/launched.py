"""What a trace says of how its ops are launched, as facts of its `meta` that name ops by id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.errors import TraceError
from sim.trace.graph import Trace
from sim.trace.origin import Expr, leaves

CAPTURED = "captured"
"""The fact of a trace that lists the ops, by id and in order, of each part that is launched as one graph."""

AWAITED = "awaited"
"""The fact of a trace that lists the ops, by id, before which the program reads something from the device."""


def awaited(meta: Mapping[str, Any], count: int) -> list[int]:
    """The ops before which the program reads something from the device. count: how many the trace has.

    Raises TraceError for ids that no op has.
    """
    return _ids(AWAITED, meta.get(AWAITED, ()), count)


def captured(meta: Mapping[str, Any], count: int) -> list[list[int]]:
    """The ops of each part that is launched as one graph; errors as for `awaited`."""
    parts = meta.get(CAPTURED, ())
    return [_ids(CAPTURED, part, count) for part in _listed(parts)]


def names_launched(trace: Trace) -> bool:
    """Whether a trace has such facts: then what is made of it is not what is made of others of its structure."""
    return AWAITED in trace.meta or CAPTURED in trace.meta


def renumbered(old: Trace, new: Trace, claims: Sequence[Expr]) -> dict[str, Any]:
    """The facts for a rewritten trace: of the ops that stand for those named, kernels that compute one among them.

    What is computed once more in another phase is none of them. Of a part that stands there several times, for
    microbatches or devices, each is launched for itself.

    claims: what each op of the new trace stands for in the old one.
    """
    meta, count = old.meta, len(old.op_columns.name)
    if not names_launched(old):
        return {}
    standing: dict[int, list[int]] = {}
    for op, expr in enumerate(claims):
        for of in {leaf.id for leaf in leaves(expr)}:
            if old.op_columns.phase[of] == new.op_columns.phase[op]:
                standing.setdefault(of, []).append(op)
    found: dict[str, Any] = {}
    if AWAITED in meta:
        found[AWAITED] = sorted({op for of in awaited(meta, count) for op in standing.get(of, ())})
    if CAPTURED in meta:
        found[CAPTURED] = []
        for part in captured(meta, count):
            turns = [standing[of] for of in part if of in standing]
            for k in range(max(map(len, turns), default=0)):
                found[CAPTURED].append(sorted({ops[k] for ops in turns if len(ops) > k}))
    return found


def _ids(fact: str, ids: object, count: int) -> list[int]:
    found = list[int]()
    for op in _listed(ids):
        if not isinstance(op, int) or isinstance(op, bool) or not 0 <= op < count:
            raise TraceError(f"meta {fact!r}: needs ids of ops from 0 to {count - 1}, has {op!r}")
        found.append(op)
    return found


def _listed(ids: object) -> Sequence[Any]:
    return ids if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]
