"""What a part's rewrite of the trace has changed: more than how ops are implemented, or that alone."""

from __future__ import annotations

import numpy as np

from sim.policies.composition.selectors import Mask
from sim.rewrites.holding import points, with_releases
from sim.rewrites.rewriter import with_columns
from sim.trace.graph import Trace

IMPLEMENTATION = ("flops", "bytes", "duration", "workspace")
"""What another implementation of an op changes, see `choose_implementation`."""


def rewrites(new: Trace, old: Trace) -> bool:
    """Whether there are other ops or tensors, or ops with other operands or engines."""
    if new is old:
        return False
    a, b = new.op_columns, old.op_columns
    names = [(list(c.name), list(trace.tensor_columns.name), dict(c.engine)) for c, trace in ((a, new), (b, old))]
    return names[0] != names[1] or not (
        np.array_equal(a.read_ids, b.read_ids) and np.array_equal(a.write_ids, b.write_ids)
    )


def implemented_among(ops: Mask, new: Trace, old: Trace) -> Trace:
    """A trace with its own implementations of these ops; all others as they were before."""
    a, b = new.op_columns, old.op_columns
    if all(np.array_equal(getattr(a, name), getattr(b, name)) for name in IMPLEMENTATION):
        return new
    columns = {name: np.where(ops, getattr(a, name), getattr(b, name)) for name in IMPLEMENTATION}
    known = {op: b.alternatives[op] for op in b.alternatives if not ops[op] or op in a.alternatives}
    return with_columns(new, alternatives=known, **columns)


def held_among(ops: Mask, new: Trace, old: Trace) -> Trace:
    """A trace with its own release points of what these ops read or make; all others as they were before."""
    if new.op_columns.releases == old.op_columns.releases:
        return new
    near = np.zeros(len(new.tensor_columns.name), np.bool_)
    for op in np.flatnonzero(ops).tolist():
        near[[*new.reads(op), *new.writes(op)]] = True
    wanted = [point for point in points(new) if near[point[0]]] + [point for point in points(old) if not near[point[0]]]
    wanted.sort(key=lambda point: point[1])
    return new if wanted == points(new) else with_releases(new, wanted)
