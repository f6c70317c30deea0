"""The parameters that one op of the optimizer updates, and the rewrite that gives each part of them an op of its own.

A kernel that updates several parameters together is, in values, one update per parameter: a *slot*. Which tensors
belong to which slot their names tell: those of parameter `w` are `w`, `w.grad`, `w.m`, `w.m.new`, …. An operand of no
parameter's name, or one that lies in another parameter's storage, means that the op cannot be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

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
    """

    parameter: str
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


def slots_of(trace: Trace, op: int) -> list[Slot]:
    """The slots of an op in the order of its operands; [] where it cannot be divided into any."""
    if trace.op_columns.kind[op] != OPTIMIZER:
        return []
    weights = weights_of(trace)
    names, replaces = trace.tensor_columns.name, trace.tensor_columns.replaces
    slots: dict[str, Slot] = {}
    for which, ids in (("reads", trace.reads(op)), ("writes", trace.writes(op))):
        for t in ids:
            parameter = owner(names[t], weights)
            old = int(replaces[t])
            if parameter is None or (which == "writes" and old >= 0 and owner(names[old], weights) != parameter):
                return []
            getattr(slots.setdefault(parameter, Slot(parameter)), which).append(t)
    return list(slots.values())


def weights_of(trace: Trace) -> frozenset[str]:
    """Names of all weights that exist from the start."""

    def find() -> frozenset[str]:
        columns = trace.tensor_columns
        initial = (trace.producer < 0) & (columns.role == WEIGHT)
        return frozenset(name for name, is_one in zip(columns.name, initial.tolist(), strict=True) if is_one)

    return kept(trace, "weight_names", "", find)


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
                reads=[ids[t] for m in members for t in own[m].reads],
                writes=[ids[t] for m in members for t in own[m].writes],
                flops=slice_of(op.flops, start, done, total),
                bytes=None if op.bytes is None else slice_of(op.bytes, start, done, total),
                workspace=-(-op.workspace * (done - start) // total),
                duration=None if op.duration is None else -(-op.duration * (done - start) // total),
            )
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)
