"""Which forward op each backward op undoes: what policies need that work layer by layer."""

from __future__ import annotations

from sim.trace.chain import backward_ops, forward_ops
from sim.trace.graph import Trace


def forward_of(trace: Trace) -> dict[int, int]:
    """The forward op that each backward op undoes, by id; no entry where nothing tells.

    An op called `fc1.bwd` or `fc1.bwd.weight` undoes `fc1`. Any other undoes, of the forward ops that read
    or produce all that it reads of the forward pass, the last one that is not after the forward op
    undone just before: gradients flow backward. An op that reads nothing of the forward pass (a sum of
    gradients) belongs to the op undone just before.
    """
    forward = set(forward_ops(trace).tolist())
    by_name = {trace.op_columns.name[op]: op for op in forward}
    found: dict[int, int] = {}
    current = max(forward, default=-1)
    for op in backward_ops(trace).tolist():
        stem, mark, _ = trace.op_columns.name[op].rpartition(".bwd")
        while mark and stem not in by_name:
            stem, mark, _ = stem.rpartition(".bwd")
        if mark:
            current = by_name[stem]
        else:
            touching = _touching(trace, op, forward)
            earlier = [one for one in touching if one <= current]
            current = max(earlier or touching or {current})
        if current >= 0:
            found[op] = current
    return found


def _touching(trace: Trace, op: int, forward: set[int]) -> set[int]:
    """The forward ops that read or produce every tensor of the forward pass that an op reads."""
    common: set[int] | None = None
    for t in trace.reads(op):
        producer = int(trace.producer[t])
        if producer >= 0 and producer not in forward:
            continue
        here = {one for one in (producer, *trace.readers(t)) if one in forward}
        if here:
            common = here if common is None else common & here
    return common or set()
