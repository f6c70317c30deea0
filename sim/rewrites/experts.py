"""The dimension along which a mixture of experts can be divided among devices: its experts.

It is known for experts whose weights are one tensor, (experts, columns, inner), as `workloads.experts` builds them by
default (`grouped`): the tokens' rows are sorted by expert, so that those of consecutive experts are consecutive rows.

Of p ranks each has as many experts; a share of rows has as many rows as tokens are routed to its experts
(`meta["expert_loads"]`). The ranks of a layer are numbered by the load of their experts, largest first: the first rank
is the one that all others of its layer wait for.

Where tokens are divided among ranks, each routes its own: it has the rows of its tokens, sorted by expert, and counts
of its own rows per expert (`Routed`). All are taken to route alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sim.trace.graph import Trace
from sim.trace.op import Op
from sim.trace.tensor import ROWS

EXPERTS = "experts"
APART = "experts_apart"
"""Entry of a trace's `meta`: whether no op of its update works on experts and on other weights."""

_WEIGHT = re.compile(r"h\d+\.mlp\.(gate_up|down)\.weight")
_OF_WEIGHT = re.compile(rf"{_WEIGHT.pattern}(\..*)?")
_GRADIENT = re.compile(r"(.*)\.grad(\.\d+)?")
_OF_LAYER = re.compile(r"h\d+\.mlp\..*")
_OF_ROUTER = re.compile(r"h\d+\.mlp\.router\.(softmax(\.bwd)?|top)")
_SORTS, _FINDS = (re.compile(rf"h\d+\.mlp\.{name}") for name in ("sort", r"expert\d+\.find"))
_OF_ONE = re.compile(r"h(\d+)\.mlp\.expert(\d+)\..*")


class Routed(NamedTuple):
    """What the router makes of tokens.

    rows: tensors with a row for each expert of each token.
    counts: tensors that say how many rows each expert has: as large for a part of the tokens as for all.
    ops: those of the router that work on each token alone, of kinds that in general do not.
    """

    rows: frozenset[int]
    counts: frozenset[int]
    ops: frozenset[int]


def routed(trace: Trace, ops: Sequence[Op], family: Sequence[str], ranks: int) -> Routed:
    """The rows of a mixture's experts and what the router computes; nothing for a trace without such experts.

    family: per tensor the weight that it belongs to. ranks: among which the tokens are divided, of which this is one.
    """
    columns = trace.tensor_columns
    named = {t for t, names in columns.axes.items() if ROWS in names and not family[t]}
    if not experts_of(trace):
        rows = named if columns.axes else _rows_of_each(trace, family, ranks)
        by_token = [op for op in ops if _OF_ROUTER.fullmatch(op.name) or _FINDS.fullmatch(op.name)] if rows else []
        return Routed(frozenset(rows), frozenset(), frozenset(op.id for op in by_token))
    lengths = {sum(rows) // ranks for layers in trace.meta.get("expert_loads") or () for rows in layers.values()}
    rows = named or {
        t
        for t, shape in columns.shape.items()
        if len(shape) in (1, 2) and shape[0] in lengths and not family[t] and _OF_LAYER.fullmatch(columns.name[t])
    }
    by_token = [op for op in ops if _OF_ROUTER.fullmatch(op.name) or _SORTS.fullmatch(op.name)]
    sorts = [op for op in by_token if op.name.endswith(".sort")]
    counts = {t for op in sorts for t in op.writes if columns.dtype[t] == "int32"}
    return Routed(frozenset(rows), frozenset(counts), frozenset(op.id for op in by_token))


def _rows_of_each(trace: Trace, family: Sequence[str], ranks: int) -> set[int]:
    """The rows of experts that run one after another: of each, as many as tokens chose it."""
    loads, columns, found = trace.meta.get("expert_loads") or [{}], trace.tensor_columns, set[int]()
    if not isinstance(loads[0], dict):
        return found
    for t, shape in columns.shape.items():
        if family[t] or len(shape) not in (1, 2) or not (of := _OF_ONE.fullmatch(columns.name[t])):
            continue
        of_layer = loads[0].get(of[1], ())
        if int(of[2]) < len(of_layer) and shape[0] == of_layer[int(of[2])] // ranks:
            found.add(t)
    return found


def experts_of(trace: Trace) -> dict[str, int]:
    """How many experts each weight has that holds those of a layer, by name."""
    columns, found = trace.tensor_columns, {}
    for t, shape in columns.shape.items():
        name = columns.name[t]
        if len(shape) == 3 and trace.producer[t] < 0 and _WEIGHT.fullmatch(name):
            found[name] = shape[0]
    return found


def expert_ops(trace: Trace, ops: Sequence[Op], family: Sequence[str]) -> tuple[frozenset[int], frozenset[int]]:
    """The ops that work on each expert alone, and the tensors that have a share for each expert.

    family: per tensor the weight that it belongs to, see `sim.rewrites.dimensions`.
    """
    experts = experts_of(trace)
    if not experts:
        return frozenset(), frozenset()
    has = {t for t, weight in enumerate(family) if weight in experts}
    names = trace.tensor_columns.name
    by_name = {name: t for t, name in enumerate(names)}
    found: set[int] = set()
    made: set[int] = set()  # by these ops
    for op in ops:
        if op.kind == "optimizer":
            if all(t in has for t in op.writes):
                found.add(op.id)
            continue
        if op.kind == "matmul" and not has.isdisjoint((*op.reads, *op.writes)):
            if any(family[t] in experts for t in (*op.reads, *op.writes)):
                found.add(op.id)
                has.update(op.reads[:3], op.writes)  # two factors, and where the experts' rows end
                made.update(op.writes)
            continue
        own = all(t in made or family[t] in experts for t in op.reads)
        if op.kind not in ("elementwise", "copy", "collective") or not op.reads or not own:
            continue
        of = [gradient[1] for t in op.writes if op.kind == "copy" and (gradient := _GRADIENT.fullmatch(names[t]))]
        if any(family[by_name[name]] == "" and by_name[name] not in made for name in of if name in by_name):
            continue  # a cast of a gradient, for what the token's rank had cast
        found.add(op.id)
        has.update(op.writes)
        made.update(op.writes)
    return frozenset(found), frozenset(has)


def is_of_weight(name: str) -> bool:
    """Whether a tensor of this name is a weight of experts, a copy or a part of it, or its gradient or state."""
    return bool(_OF_WEIGHT.fullmatch(name))


def is_of_experts(trace: Trace, parameter: str) -> bool:
    """Whether a weight of this name holds the experts of a layer."""
    return parameter in experts_of(trace)


def row_span(trace: Trace, layer: int, first: int, stop: int, count: int) -> tuple[int, int, int]:
    """From which to which of how many routed rows of a layer the ranks from `first` to `stop` of `count` have."""
    groups = group_loads(trace, layer, count)
    return sum(groups[:first]), sum(groups[:stop]), sum(groups)


def group_loads(trace: Trace, layer: int, count: int) -> list[int]:
    """How many rows the experts of each of `count` ranks have in a layer, largest first; 1 each where none is known."""
    stated = trace.meta.get("expert_loads") or [{}]
    loads = stated[0].get(str(layer), ()) if isinstance(stated[0], dict) else ()
    if not loads or len(loads) % count or not sum(loads):
        return [1] * count
    each = len(loads) // count
    return sorted((sum(loads[k : k + each]) for k in range(0, len(loads), each)), reverse=True)


__all__ = [
    "EXPERTS",
    "Routed",
    "expert_ops",
    "experts_of",
    "group_loads",
    "is_of_experts",
    "is_of_weight",
    "routed",
    "row_span",
]
