"""The ops of a trace that gather weights, as those of ZeRO's level 3 do."""

from __future__ import annotations

import numpy as np

from sim.trace.graph import PERSISTENT, Trace
from sim.trace.op import KIND_CODE
from sim.trace.origin import Glue


def is_gather(trace: Trace, op: int) -> bool:
    """Whether an op gathers weights, or what lies on as part of them, and computes nothing."""
    c, role = trace.op_columns, trace.tensor_columns.role
    if c.kind[op] != KIND_CODE["collective"] or trace.origin is None or not isinstance(trace.origin.ops[op], Glue):
        return False
    reads = trace.reads(op)
    return bool(reads) and all(role[t] in PERSISTENT for t in reads)


def gathers(trace: Trace) -> list[int]:
    """The ops that gather weights, in order."""
    collectives = np.flatnonzero(trace.op_columns.kind == KIND_CODE["collective"]).tolist()
    return [op for op in collectives if is_gather(trace, op)]
