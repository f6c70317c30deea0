"""The update as CPU kernels do it: one op a tile, whatever the accelerator's optimizer was decomposed into."""

from __future__ import annotations

from collections.abc import Sequence

from sim.rewrites.experts import APART, experts_of
from sim.rewrites.fuse import fuse
from sim.rewrites.kept import kept
from sim.rewrites.masters import held_weights
from sim.rewrites.slots import owner
from sim.trace.graph import Trace
from sim.trace.layers import op_layers
from sim.trace.op import KIND_CODE

OPTIMIZER = KIND_CODE["optimizer"]


def fuse_updates(trace: Trace, updates: Sequence[int]) -> Trace:
    """The trace with its optimizer ops, of those in `updates`, fused into one op per tile.

    A tile is what the ops themselves join (what they pass to each other, versions of one storage), and where the
    trace knows layers all parameters of a layer, or of none; experts that ranks will divide have tiles of their own.
    Each touches gradient, weight and states once as
    operands and once as results: 28 bytes per parameter with Adam, in fp32 as with fp32 masters of 16-bit weights.
    """
    optimizer = tuple(op for op in updates if trace.op_columns.kind[op] == OPTIMIZER)

    def make() -> tuple[Trace, Trace]:
        new = fuse(
            trace, tiles(trace, optimizer), lambda reads, writes: touched_once(trace, reads, writes), workspace=False
        )
        return new, new

    return kept(trace, ("fuse_updates", optimizer), make)


def tiles(trace: Trace, ops: Sequence[int]) -> list[list[int]]:
    """Ops of the optimizer in groups, as `fuse_updates` joins them, each group in program order."""
    device, kept = trace.op_columns.device, set(ops)
    root = {op: op for op in ops}

    def find(op: int) -> int:
        while root[op] != op:
            root[op] = root[root[op]]
            op = root[op]
        return op

    layer = op_layers(trace)
    layered = any(layer[op] >= 0 for op in ops)
    apart = experts_of(trace) if trace.meta.get(APART) else {}
    names = trace.tensor_columns.name
    first: dict[tuple[int, int, bool], int] = {}
    for op in ops:
        over = trace.tensor_columns.replaces[list(trace.writes(op))].tolist()
        joined = {int(trace.producer[t]) for t in (*trace.reads(op), *over) if t >= 0}
        if layered:
            of_experts = bool(apart) and all(owner(names[t], apart) for t in trace.writes(op))
            joined.add(first.setdefault((int(device[op]), int(layer[op]), of_experts), op))
        for other in joined & kept:
            if device[other] == device[op]:
                root[max(find(op), find(other))] = min(find(op), find(other))
    found: dict[int, list[int]] = {}
    for op in ops:
        found.setdefault(find(op), []).append(op)
    return list(found.values())


def touched_once(trace: Trace, reads: Sequence[int], writes: Sequence[int]) -> list[int]:
    """Of all operands and results those that count: not what a kernel holds and does not read, and no scalars."""
    shape, held = trace.tensor_columns.shape, held_weights(trace, reads, writes)
    return [t for t in (*reads, *writes) if t not in held and shape.get(t) != ()]
