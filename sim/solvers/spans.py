"""From which op to which each tensor is resident on a device when nothing leaves it: for planners that count ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.liveness import freeable


class Span(NamedTuple):
    """The first and the last op during which a tensor is resident, by id."""

    first: int
    last: int


class _Columns(NamedTuple):
    """The spans of some tensors, by id in order. Shape (tensors,) each."""

    tensor: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


def spans(trace: Trace, device: int, *, of_no_bytes: bool = False) -> Mapping[int, Span]:
    """Per tensor with bytes that an op of the device is the first to use, when it is resident; not to be changed.

    What has no producer is resident from the start; it and the outputs stay to the end. A tensor that is overwritten
    in place ends before the op that overwrites it.

    of_no_bytes: whether those without bytes are among them, so that it is the same for all traces of a structure.
    """
    size = trace.tensor_columns.bytes
    if of_no_bytes or size.all():
        return _spans(trace, device)
    return kept(trace, "spans", device, lambda: {t: span for t, span in _spans(trace, device).items() if size[t]})


def _spans(trace: Trace, device: int) -> dict[int, Span]:
    """The same of all tensors, whatever their sizes: once for all traces of a structure."""

    def make() -> dict[int, Span]:
        tensors, first, last = (column.tolist() for column in _columns(trace, device))
        return {t: Span(a, b) for t, a, b in zip(tensors, first, last, strict=True)}

    return kept(trace.structure, "spans", device, make)


def _columns(trace: Trace, device: int) -> _Columns:
    """These as columns."""

    def make() -> _Columns:
        producer, replaced_by, end = trace.producer, trace.replaced_by, len(trace.op_columns.name) - 1
        used = np.where(producer >= 0, producer, trace.first_read)
        own = np.flatnonzero((used >= 0) & (trace.op_columns.device[used] == device))
        last = np.where(freeable(trace), trace.held_until, end)
        last = np.where(replaced_by >= 0, producer[replaced_by] - 1, last)
        return _Columns(own, np.maximum(producer, 0)[own].astype(np.int64), last[own].astype(np.int64))

    return kept(trace.structure, "columns_of_spans", device, make)


def resident_during(trace: Trace, device: int, of: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Bytes of tensors resident on a device during each op of the trace. Shape (ops,).

    of: per tensor whether it counts; None for all.
    """
    tensor, first, last = _columns(trace, device)
    size, change = trace.tensor_columns.bytes[tensor], np.zeros(len(trace.op_columns.name) + 1, np.int64)
    if of is not None:
        size = np.where(of[tensor], size, 0)
    np.add.at(change, first, size)
    np.subtract.at(change, last + 1, size)
    resident: NDArray[np.int64] = np.cumsum(change)[:-1]
    return resident


def users(trace: Trace) -> Mapping[int, Sequence[int]]:
    """Per tensor with bytes the ops that produce and read it, in order; not to be changed."""

    def make() -> list[list[int]]:
        return [[*((made,) if made >= 0 else ()), *trace.readers(t)] for t, made in enumerate(trace.producer.tolist())]

    found = kept(trace.structure, "users", None, make)
    return {t: found[t] for t in np.flatnonzero(trace.tensor_columns.bytes).tolist()}


def swappable(trace: Trace, roles: tuple[int, ...], *, of_no_bytes: bool = False) -> Set[int]:
    """The tensors of these roles that can leave between their uses, and one device sees the end of each of these.

    They have a producer and are no outputs, and nothing overwrites them. Not to be changed.

    of_no_bytes: whether those without bytes are among them, so that it is the same for all traces of a structure.
    """
    known = kept(trace.structure, "swappable", roles, lambda: _swappable(trace, roles))
    size = trace.tensor_columns.bytes
    return known if of_no_bytes or size.all() else {t for t in known if size[t]}


def _swappable(trace: Trace, roles: tuple[int, ...]) -> Set[int]:
    c, outputs, device = trace.op_columns, {*trace.outputs}, trace.op_columns.device.tolist()
    may = (trace.producer >= 0) & np.isin(trace.tensor_columns.role, roles) & (trace.replaced_by < 0)
    found = dict[int, None]()
    for t in np.flatnonzero(may & (trace.read_counts > 0)).tolist():
        ops = (int(trace.producer[t]), *trace.readers(t))
        if t not in outputs and not any(op in c.engine or op in c.group or device[op] != device[ops[0]] for op in ops):
            found[t] = None
    return found.keys()
