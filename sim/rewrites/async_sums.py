"""Sums of tensor parallelism beside the weight gradients, as Megatron-LM orders the backward of a divided layer.

Of a layer whose weight is divided by columns backward computes the gradient of the input, a term that is summed over
the ranks, and that of the weight. Megatron-LM gathers the input (with sequence parallelism) beside the first product,
and sums its result, by all-reduce or reduce-scatter, beside the second one: the gather is issued before the first, the
sum between them. Where several layers share an input (queries, keys and values; gate and up), their terms are added and
summed once, beside all their weight gradients.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 4.2.2;
Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication` of `megatron/core/tensor_parallel/layers.py`, by default.
Departs: terms of several layers are one sum there only where their weights are one matrix.
"""

from __future__ import annotations

from sim.rewrites.pipeline import weight_gradients
from sim.rewrites.rewrite import reorder
from sim.trace.graph import Trace
from sim.trace.op import KIND_CODE, PHASE_CODE

BACKWARD, MATMUL = PHASE_CODE["backward"], KIND_CODE["matmul"]
COLLECTIVE = KIND_CODE["collective"]


def sums_beside_weight_gradients(trace: Trace) -> Trace:
    """A rank's trace in the order in which gathers and sums of backward run beside products.

    trace: of one rank, on one device, its layers divided along `tensor`. The same ops; with none to move, the trace.
    """
    c, later = trace.op_columns, weight_gradients(trace)
    place = {op: float(op) for op in range(len(c.name))}
    for op, ring in c.ring.items():
        if ring.axis != "tensor" or c.phase[op] != BACKWARD:
            continue
        if op not in later:
            for first in _inputs(trace, op):
                for product in _weights(trace, first, later):
                    place[product] = max(place[product], op + 0.5)
        else:
            readers = [r for t in trace.writes(op) for r in trace.readers(t) if c.kind[r] == MATMUL]
            shared = {t for r in readers for t in trace.reads(r)[:2]}.difference(trace.writes(op))
            own = [r for t in shared for r in trace.readers(t) if _is_of_input(trace, r, t, later)]
            place[op] = min([place[op], *(r - 0.5 for r in own)])
    for op in range(len(place)):  # what reads a result that comes later now
        made = (int(trace.producer[t]) for t in trace.reads(op))
        place[op] = max([place[op], *(place[p] for p in made if p >= 0)])
    order = sorted(place, key=lambda op: (place[op], op))
    return trace if order == list(place) else reorder(trace, order)


def _inputs(trace: Trace, total: int) -> list[int]:
    """The products whose results a collective sums, by themselves or added up."""
    c, found = trace.op_columns, list[int]()
    todo = [int(trace.producer[t]) for t in trace.reads(total)]
    while todo:
        op = todo.pop()
        if op < 0 or c.phase[op] != BACKWARD or c.kind[op] == COLLECTIVE:
            continue
        if c.kind[op] == MATMUL:
            found.append(op)
        elif ".grad.add" in c.name[op]:
            todo += [int(trace.producer[t]) for t in trace.reads(op)]
    return found


def _weights(trace: Trace, product: int, later: frozenset[int]) -> list[int]:
    """The products for weights that have the gradient of a layer's result in common with that for its input."""
    kind = trace.op_columns.kind
    readers = trace.readers(trace.reads(product)[0])
    return [op for op in readers if op in later and kind[op] == MATMUL]


def _is_of_input(trace: Trace, op: int, gradient: int, later: frozenset[int]) -> bool:
    c = trace.op_columns
    first = c.kind[op] == MATMUL and c.phase[op] == BACKWARD and op not in later
    return bool(first) and trace.reads(op)[0] == gradient


__all__ = ["sums_beside_weight_gradients"]
