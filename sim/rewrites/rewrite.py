"""Ready-made rewrites: changes of *what* is computed, as opposed to when memory is held where.

Each takes a trace and returns a new one whose `origin` says what every op and tensor stands for; `values` checks it.
Further rewrites are in `split` (tensors), `batching` (microbatches), `fuse` (kernels), `encoding` (codecs) and
`pipeline` (stages on several devices); all can be imported from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from sim.errors import TraceError, near
from sim.rewrites.batching import split_batch
from sim.rewrites.encoding import Codec, encode
from sim.rewrites.fuse import fuse
from sim.rewrites.holding import POINTS, has_points, points, released_by, with_points
from sim.rewrites.pipeline import pipeline
from sim.rewrites.rewriter import Rewriter, with_columns
from sim.rewrites.split import pack_tensors, split_tensors
from sim.trace.graph import PERSISTENT, OpColumns, Trace
from sim.trace.launched import with_launched
from sim.trace.origin import Origin, Same

__all__ = [
    "Codec",
    "choose_implementation",
    "cut",
    "encode",
    "fuse",
    "hold_longer",
    "pack_tensors",
    "pipeline",
    "reorder",
    "split_batch",
    "split_tensors",
    "to_engine",
    "unroll",
]


def reorder(trace: Trace, order: Sequence[int | str]) -> Trace:
    """The same ops in another program order.

    trace: the trace to rewrite.
    order: every op once, by id or name.

    Raises TraceError where `order` is not a permutation, or violates a dependency (naming op and tensor).
    """
    ids = [trace.op_id(op) for op in order]
    if sorted(ids) != list(range(len(trace.ops))):
        raise TraceError(f"the order names {len(set(ids))} of {len(trace.ops)} ops, or one of them twice")
    origin = Origin.identity(trace)
    new = Trace(
        trace.tensor_columns,
        replace(_pick(trace, ids), releases={}, unbinds={}),
        outputs=trace.outputs,
        carry=trace.carry,
        meta=trace.meta,
        origin=replace(origin, ops=tuple(origin.ops[i] for i in ids)),
    )
    new = with_launched(trace, new, [Same(i) for i in ids])
    place = {op: i for i, op in enumerate(ids)}
    if not has_points(trace):
        return new
    ends = (sorted((place[op], rank, t) for rank, (t, op) in enumerate(points(trace, key))) for key in POINTS)
    return with_points(new, *([(t, op) for op, _, t in each] for each in ends))


def cut(trace: Trace, n_ops: int) -> Trace:
    """The first `n_ops` ops, with the tensors that they produce and those that exist from the start.

    Tensors are renumbered without gaps, in the same order; names stay. An output that is no longer produced is
    replaced by its last version that is, or left out. A tensor that a later op would release is held to the end.
    """
    count = min(max(n_ops, 0), len(trace.ops))
    t, replaces = trace.tensor_columns, trace.tensor_columns.replaces
    left = np.flatnonzero(trace.producer < count)
    new = np.full(len(trace.tensors) + 1, -1, np.int32)  # the last entry serves -1, "none"
    new[left] = np.arange(len(left))
    columns: dict[str, object] = {}
    for key, column in vars(t).items():
        if isinstance(column, Mapping):
            columns[key] = {int(new[i]): value for i, value in column.items() if new[i] >= 0}
        else:
            columns[key] = column[left] if isinstance(column, np.ndarray) else [column[i] for i in left.tolist()]
    columns["replaces"] = new[replaces[left]]
    new_outputs: dict[int, int] = {}
    for last in trace.outputs:
        kept = last
        while new[kept] < 0 and replaces[kept] >= 0:
            kept = int(replaces[kept])
        if new[kept] >= 0:
            new_outputs[last] = int(new[kept])
    ops = _pick(trace, range(count))
    origin = Origin.identity(trace)
    whole = Trace(
        replace(t, **columns),  # type: ignore[arg-type]
        replace(ops, read_ids=new[ops.read_ids], write_ids=new[ops.write_ids], releases={}, unbinds={}),
        outputs=list(new_outputs.values()),
        carry=[(new_outputs[last], int(new[first])) for last, first in trace.carry if last in new_outputs],
        meta=trace.meta,
        origin=replace(origin, tensors=tuple(origin.tensors[i] for i in left.tolist()), ops=origin.ops[:count]),
    )
    whole = with_launched(trace, whole, [Same(op) for op in range(count)])
    if not has_points(trace):
        return whole
    ends = ([(int(new[t]), min(op, count - 1)) for t, op in points(trace, key) if new[t] >= 0] for key in POINTS)
    return with_points(whole, *ends)


def _pick(trace: Trace, ids: Sequence[int]) -> OpColumns:
    """Columns of some ops of a trace, in the order given."""
    c, rows = trace.op_columns, np.array(ids, np.int64)
    where = {old: new for new, old in enumerate(ids)}
    columns: dict[str, object] = {}
    for key, column in vars(c).items():
        if isinstance(column, Mapping):
            columns[key] = {where[op]: value for op, value in column.items() if op in where}
        elif not isinstance(column, np.ndarray):
            columns[key] = [column[i] for i in ids]
        elif not key.startswith(("read_", "write_")):
            columns[key] = column[rows]
    for start_key, ids_key in (("read_start", "read_ids"), ("write_start", "write_ids")):
        start, values = getattr(c, start_key), getattr(c, ids_key)
        counts = np.diff(start)[rows]
        ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        # position in the old column: where the op's entries start, plus how far into them this one is
        within = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
        columns[start_key], columns[ids_key] = ends, values[np.repeat(start[:-1][rows], counts) + within]
    return replace(c, **columns)  # type: ignore[arg-type]


def to_engine(trace: Trace, ops: Iterable[int | str], engine: str) -> Trace:
    """The same trace with some ops on another engine of their device, "" for its main one."""
    names = dict(trace.op_columns.engine)
    for op in ops:
        names[trace.op_id(op)] = engine
    return with_columns(trace, engine={op: name for op, name in names.items() if name})


def hold_longer(trace: Trace, until: Mapping[int, int]) -> Trace:
    """The same trace, with some tensors held at least until the end of an op: tensor -> op, by id."""
    ends = dict(points(trace))
    ends.update({t: max(op, ends.get(t, -1)) for t, op in until.items()})
    releases = released_by(trace, sorted(ends.items(), key=lambda point: point[1]))
    return with_columns(trace, releases=releases) if releases != dict(trace.op_columns.releases) else trace


def choose_implementation(trace: Trace, choice: Mapping[int | str, str]) -> Trace:
    """The same trace with other implementations of some ops.

    The workspace becomes the alternative's. A measured duration is multiplied by the alternative's time factor, and so
    are FLOPs and bytes touched (rounded up), because they decide the time where none was measured.

    trace: the trace to rewrite.
    choice: op -> name of one of its `alternatives`.

    Raises TraceError if an op has no such alternative.
    """
    if not choice:
        return trace
    c = trace.op_columns
    flops, touched, duration = c.flops.copy(), c.bytes.copy(), c.duration.copy()
    workspace, alternatives = c.workspace.copy(), dict(c.alternatives)
    for key, name in choice.items():
        op = trace.op_id(key)
        known = {a.name: a for a in c.alternatives.get(op, ())}
        if name not in known:
            raise TraceError(f"op {c.name[op]!r}: no alternative {name!r}{near(name, known)}")
        factor = Fraction(known[name].time_factor)
        flops[op] = -(-int(flops[op]) * factor // 1)
        touched[op] = -(-int(trace.touched[op]) * factor // 1)
        if duration[op] >= 0:
            duration[op] = -(-int(duration[op]) * factor // 1)
        workspace[op] = known[name].workspace
        del alternatives[op]
    return with_columns(
        trace, flops=flops, bytes=touched, duration=duration, workspace=workspace, alternatives=alternatives
    )


# ---- iterations --------------------------------------------------------------------------------


def unroll(trace: Trace, n: int) -> Trace:
    """Join `n` iterations into one trace through `carry`; names gain `#0`, `#1`, ….

    In later iterations, the tensor carried to an initial tensor takes its place. Weights and optimizer states that
    nothing overwrites or carries are constants, shared by all iterations. Inputs are new in each iteration and, like
    all tensors without a producer, exist from the start. Only the last iteration's outputs are kept. `samples`,
    `tokens` and `model_flops` of the metadata are multiplied by `n`.

    Raises TraceError where an iteration overwrites a tensor that the next one needs and nothing is carried to it.
    """
    if n < 1:
        raise TraceError(f"unroll: {n} iterations; it needs at least 1")
    per_iteration = ("samples", "tokens", "model_flops")
    scaled = {key: trace.meta[key] * n for key in per_iteration if isinstance(trace.meta.get(key), int)}
    new = Rewriter(trace, {**scaled, "iterations": n * int(trace.meta.get("iterations", 1))})
    carried = {first: last for last, first in trace.carry}
    role, producer = trace.tensor_columns.role, trace.producer.tolist()
    tensors, ops = list(trace.tensors), list(trace.ops)
    before: list[int] = []
    first_ids: list[int] = []
    for i in range(n):
        ids = [-1] * len(tensors)
        for t in tensors:
            if producer[t.id] < 0 and i > 0:
                if t.id in carried:
                    ids[t.id] = before[carried[t.id]]
                    continue
                if role[t.id] in PERSISTENT:
                    if trace.replaced_by[t.id] >= 0:
                        raise TraceError(f"unroll: tensor {t.name!r} is overwritten, and nothing is carried to it")
                    ids[t.id] = before[t.id]
                    continue
            # a tensor that is taken over in place may come later in the table, so all are added before any take-over
            ids[t.id] = new.tensor(t, Same(t.id, i), name=f"{t.name}#{i}")
        for t in tensors:
            if t.replaces is not None:
                new.builder.take_over(ids[t.id], ids[t.replaces])
        for op in ops:
            new.op(
                op,
                Same(op.id, i),
                name=f"{op.name}#{i}",
                reads=[ids[t] for t in op.reads],
                writes=[ids[t] for t in op.writes],
                group=f"{op.group}#{i}" if op.group else "",
            )
        first_ids = first_ids or ids
        before = ids
    outputs = [before[t] for t in trace.outputs]
    carry = [(before[last], first_ids[first]) for last, first in trace.carry]
    return new.build(outputs=outputs, carry=carry, iterations=n)
