"""Buffers for the gradients of all weights that exist from the start to the end of an iteration, as Megatron-LM's.

Megatron-LM allocates one contiguous buffer for the gradients of the weights when it wraps the model
(`_ParamAndGradBuffer` of `megatron/core/distributed/param_and_grad_buffer.py`, the views `main_grad`), fills it with
zeros before each iteration and adds to it in every microbatch. So its bytes are there during the first forward, too,
where a framework that makes gradients when they are first needed has none.
Departs: one buffer per weight and no padding between them; the zeros cost no time, and the first microbatch writes its
gradients instead of adding them; where a gradient has terms on two stages (tied embeddings), the buffer of each is that
of their sum. Policies that manage gradients are refused on such a trace: they would
move buffers whose content is about to be overwritten. Where kernels are fused, or the loss makes gradients in forward,
gradients whose accumulation is part of another kernel have no buffer.
"""

from __future__ import annotations

from sim.rewrites.rewriter import Rewriter
from sim.rewrites.slots import owner, weights_of
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.origin import Packed
from sim.trace.tensor import ROLE_CODE

BACKWARD, UPDATE = PHASE_CODE["backward"], PHASE_CODE["update"]
GRADIENT = ROLE_CODE["gradient"]


def gradient_buffers(trace: Trace) -> Trace:
    """The trace with an empty tensor for each gradient, in whose storage it is accumulated and which is kept."""
    last = _accumulated(trace)
    if not last:
        return trace
    new = Rewriter(trace, {"gradient_buffer": True})
    ids = new.all_tensors()
    buffers: dict[int, int] = {}
    for t in last:
        root = _root(trace, t)
        like = trace.tensors[root]
        fields = {"name": f"{like.name}.buffer", "replaces": None, "saved_for": ""}
        buffers[t] = new.tensor(like, Packed((None,)), **fields)
        new.builder.take_over(ids[root], buffers[t])
    for op in trace.ops:
        new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
    outputs = [ids[t] for t in dict.fromkeys((*trace.outputs, *last))]
    carry = [(ids[a], ids[b]) for a, b in trace.carry] + [(ids[t], buffer) for t, buffer in buffers.items()]
    return new.build(outputs=outputs, carry=carry)


def _accumulated(trace: Trace) -> list[int]:
    """The last version of each storage that holds a weight's gradient for the update, or for the sum of replicas."""
    c, columns, weights = trace.op_columns, trace.tensor_columns, weights_of(trace)
    found: dict[int, None] = {}
    for t, role in enumerate(columns.role.tolist()):
        made = int(trace.producer[t])
        if role != GRADIENT or made < 0 or trace.replaced_by[t] >= 0 or owner(columns.name[t], weights) is None:
            continue
        first = int(trace.producer[_root(trace, t)])
        if first < 0 or c.phase[first] != BACKWARD or first in c.ring:
            continue
        readers = trace.readers(t)
        if readers and all(c.phase[r] == UPDATE or r in c.ring for r in readers):
            found[t] = None
    return list(found)


def _root(trace: Trace, t: int) -> int:
    """The first version of a tensor's storage."""
    replaces = trace.tensor_columns.replaces
    while replaces[t] >= 0:
        t = int(replaces[t])
    return t


__all__ = ["gradient_buffers"]
