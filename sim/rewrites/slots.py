"""The parameters that one op of the optimizer updates, and the rewrite that gives each part of them an op of its own.

A kernel that updates several parameters together is, in values, one update per parameter: a *slot*. Which tensors
belong to which slot their names tell: those of parameter `w` are `w`, `w.grad`, `w.m`, `w.m.new`, …. What the update
only computes on the way has no parameter's name (the denominators of PyTorch's foreach kernels, as they are captured):
it belongs to the parameter of the storage that it lies in; else an op that reads operands of n parameters and writes n
such results writes them in the order of these, each in the shape of an operand or as a scalar. A scalar of no parameter
(a factor that clips gradients) is read by all slots. Any other operand of no parameter, or one that lies in another
parameter's storage, means that the op cannot be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Set
from dataclasses import dataclass, field

import numpy as np

from sim.rewrites.rewriter import Rewriter, slice_of
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.op import KIND_CODE
from sim.trace.origin import Same, Slots
from sim.trace.tensor import ROLE_CODE

OPTIMIZER, WEIGHT = KIND_CODE["optimizer"], ROLE_CODE["weight"]


@dataclass
class Slot:
    """One parameter of an op of the optimizer, with the op's operands that belong to it, by id.

    parameter: name of the weight.
    shared: scalars that all slots of the op read, the same list in each.
    """

    parameter: str
    shared: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


def slots_of(trace: Trace, op: int) -> list[Slot]:
    """The slots of an op in the order of its operands; [] where it cannot be divided into any."""
    if trace.op_columns.kind[op] != OPTIMIZER:
        return []
    parameters, replaces = parameters_of(trace), trace.tensor_columns.replaces
    slots: dict[str, Slot] = {}
    shared: list[int] = []
    for which, ids in (("reads", trace.reads(op)), ("writes", trace.writes(op))):
        for t in ids:
            parameter, old = parameters[t], int(replaces[t])
            if parameter is None and which == "reads" and trace.tensor_columns.shape.get(t) == ():
                shared.append(t)
                continue
            if parameter is None or (which == "writes" and old >= 0 and parameters[old] != parameter):
                return []
            getattr(slots.setdefault(parameter, Slot(parameter, shared)), which).append(t)
    return list(slots.values())


def parameters_of(trace: Trace) -> tuple[str | None, ...]:
    """Per tensor the parameter whose update it belongs to, None where it belongs to none that is known."""

    def find() -> tuple[str | None, ...]:
        weights, columns = weights_of(trace), trace.tensor_columns
        found = [owner(name, weights) for name in columns.name]
        for op in np.flatnonzero(trace.op_columns.kind == OPTIMIZER).tolist():
            unnamed = [t for t in trace.writes(op) if found[t] is None]
            for t in unnamed:
                if columns.replaces[t] >= 0:
                    found[t] = found[columns.replaces[t]]
            unnamed = [t for t in unnamed if found[t] is None]
            shapes: dict[str | None, set[tuple[int, ...] | None]] = {}
            for t in trace.reads(op) if unnamed else ():
                if found[t] is not None or columns.shape.get(t) != ():
                    shapes.setdefault(found[t], {()}).add(columns.shape.get(t))
            if None not in shapes and len(shapes) == len(unnamed):
                in_order = dict(zip(unnamed, shapes, strict=True))
                if all(columns.shape.get(t) in shapes[parameter] for t, parameter in in_order.items()):
                    for t, parameter in in_order.items():
                        found[t] = parameter
        return tuple(found)

    return kept(trace, "parameters", "", find)


def initial_weights(trace: Trace) -> Mapping[str, int]:
    """All weights that exist from the start, by name."""

    def find() -> Mapping[str, int]:
        columns = trace.tensor_columns
        initial = np.flatnonzero((trace.producer < 0) & (columns.role == WEIGHT)).tolist()
        return {columns.name[t]: t for t in initial}

    return kept(trace, "initial_weights", "", find)


def weights_of(trace: Trace) -> Set[str]:
    """Names of all weights that exist from the start."""
    return initial_weights(trace).keys()


def owner(name: str, weights: Container[str]) -> str | None:
    """The weight whose name a tensor's name begins with, the longest of several."""
    while name not in weights:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def split_updates(trace: Trace, part_of: Callable[[Slot], int]) -> Trace:
    """Give the parameters of each op of the optimizer that belong to different parts an op per part.

    trace: the trace to rewrite.
    part_of: the part that a slot belongs to.

    FLOPs, bytes touched, workspace and duration are divided in proportion to the operands' bytes. The trace itself is
    returned where no op is divided.
    """
    size = trace.tensor_columns.bytes
    divided: dict[int, list[list[int]]] = {}
    slots: dict[int, list[Slot]] = {}
    for i in range(len(trace.ops)):
        own = slots_of(trace, i)
        by_part: dict[int, list[int]] = {}
        for k, slot in enumerate(own):
            by_part.setdefault(part_of(slot), []).append(k)
        if len(by_part) > 1:
            divided[i], slots[i] = list(by_part.values()), own
    if not divided:
        return trace
    new = Rewriter(trace)
    ids = new.all_tensors()
    for op in trace.ops:
        if op.id not in divided:
            new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
            continue
        own = slots[op.id]
        weight = [sum(int(size[t]) for t in (*slot.reads, *slot.writes)) for slot in own]
        total, done = max(sum(weight), 1), 0
        for k, members in enumerate(divided[op.id]):
            start, done = done, done + sum(weight[m] for m in members)
            new.op(
                op,
                Slots(Same(op.id), tuple(members), len(own)),
                name=f"{op.name}.{k}",
                reads=[ids[t] for t in (*(t for m in members for t in own[m].reads), *own[0].shared)],
                writes=[ids[t] for m in members for t in own[m].writes],
                flops=slice_of(op.flops, start, done, total),
                bytes=None if op.bytes is None else slice_of(op.bytes, start, done, total),
                workspace=-(-op.workspace * (done - start) // total),
                duration=None if op.duration is None else -(-op.duration * (done - start) // total),
            )
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)
