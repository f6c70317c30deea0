"""A rewrite: where ranks share optimizer states but not weights (ZeRO 1 and 2), each updates its own part of a weight.

Each rank's update there reads a weight of which the device has all, and makes a part that an all-gather joins with the
others'. A host that updates keeps that part from one iteration to the next, as it keeps whole weights elsewhere: the
weight itself never comes down, and only the new part goes up.
"""

from __future__ import annotations

from collections.abc import Collection

from sim.rewrites.kept import kept
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.origin import Part, Same
from sim.trace.tensor import ROLE_CODE

WEIGHT = ROLE_CODE["weight"]


def with_weight_parts(trace: Trace, updates: Collection[int]) -> Trace:
    """The trace in which these ops of the update read the parts of weights that they update. Ops keep their ids.

    Where no rank has only a part of what it updates, the trace itself.
    """
    parts = _parts(trace, updates)
    if not parts:
        return trace

    def make() -> tuple[Trace, Trace]:
        new = _rewritten(trace, parts, set(updates))
        return new, new

    return kept(trace, ("with_weight_parts", frozenset(updates)), make)


def _parts(trace: Trace, updates: Collection[int]) -> dict[int, tuple[int, int]]:
    """Per whole weight that an update reads, its new part's first value and its last, which a collective gathers."""
    t, found = trace.tensor_columns, dict[int, tuple[int, int]]()
    for op in trace.op_columns.group:
        for last, whole in zip(trace.reads(op), trace.writes(op), strict=False):
            weight, first = int(t.replaces[whole]), int(last)
            while t.replaces[first] >= 0:
                first = int(t.replaces[first])
            of_update = trace.producer[first] in updates and trace.producer[last] in updates
            if of_update and weight >= 0 and t.role[weight] == WEIGHT and trace.producer[weight] < 0:
                found[weight] = first, int(last)
    return {t: pair for t, pair in found.items() if any(op in updates for op in trace.readers(t))}


def _rewritten(trace: Trace, parts: dict[int, tuple[int, int]], updates: set[int]) -> Trace:
    new = Rewriter(trace)
    new.all_tensors()
    part_of: dict[int, int] = {}
    for weight, (first, last) in parts.items():
        like, origin = trace.tensors[first], trace.origin.tensors[last] if trace.origin else None
        assert isinstance(origin, Part), "a rank's part of a weight says which"
        stands_for = Part(Same(weight), origin.first, origin.stop, origin.count)
        name = f"{trace.tensors[weight].name}.part"
        part_of[weight] = new.tensor(like, stands_for, name=name, replaces=None)
        new.builder.take_over(first, part_of[weight])
    copy = new.copier()
    for op, device in enumerate(trace.op_columns.device.tolist()):
        own = part_of if op in updates else {}
        copy(op, [own.get(t, t) for t in trace.reads(op)], trace.writes(op), device)
    lasts = {last: part_of[weight] for weight, (_, last) in parts.items()}
    return new.build(outputs=[*trace.outputs, *lasts], carry=[*trace.carry, *lasts.items()])
