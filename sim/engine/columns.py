"""The columns of a trace that the array path works with, made once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.log import Ints
from sim.trace.columns import distinct, slots_of
from sim.trace.graph import Trace
from sim.trace.liveness import freeable

Ids = NDArray[np.int32]
"""Ops or tensors: of a large trace these columns take much memory."""

FREE_READ, FREE_WRITTEN, FREE_RELEASED = 5, 6, 7
"""Phases in which a step frees what nothing uses any more: what its op reads, what it writes, what is released."""


class Operands(NamedTuple):
    """What each op reads, or what it writes: op and tensor of each entry, in order; each tensor once per op.

    start: per op its first entry, and their number.
    """

    op: Ids
    tensor: Ids
    start: Ints

    def of(self, ops: Ints, steps: Ints) -> tuple[Ints, Ids]:
        """The operands of some runs, given by op and step: (step, tensor) of each entry."""
        if not len(ops):
            return steps, self.tensor[:0]
        return np.repeat(steps, np.diff(self.start)[ops]), self.tensor[slots_of(self.start, ops)]


class TraceColumns:
    """Facts of the structure of a trace, which no plan and no size changes.

    replaces: per tensor the value that it overwrites, -1 for none.
    producer: per tensor the op that produces it, -1 for none.
    may_free: per tensor whether it may be freed once nothing uses it.
    placed: the tensors without a producer.
    read, written: the operands of all ops.
    last_use: per tensor the last op that reads it, or at whose end it is released; -1 for none.
    free_op, free_phase, freed: where tensors are freed if no op is recomputed.
    """

    def __init__(self, trace: Trace) -> None:
        c, t = trace.op_columns, trace.tensor_columns
        self.replaces, self.producer, self.may_free = t.replaces, trace.producer, freeable(trace)
        self.placed = _ids(np.flatnonzero(trace.producer < 0))
        self.read, self.written = _operands(c.read_start, c.read_ids), _operands(c.write_start, c.write_ids)
        pairs = [(op, tensor) for op in sorted(c.releases) for tensor in c.releases[op]]
        release_op, released = np.array(pairs, np.int32).reshape(-1, 2).T
        last_read = np.full(len(t.name), -1, np.int32)
        last_read[self.read.tensor] = self.read.op  # they are in order, and the last one stays
        self.last_use = last_read.copy()
        np.maximum.at(self.last_use, released, release_op)
        last, free = self.last_use, self.may_free
        reads = np.flatnonzero((self.read.op == last[self.read.tensor]) & free[self.read.tensor])
        writes = np.flatnonzero((self.written.op >= last[self.written.tensor]) & free[self.written.tensor])
        touched = np.maximum(last_read, trace.producer)[
            released
        ]  # by an op that reads or writes it, it is freed as such
        releases = np.flatnonzero((release_op > touched) & free[released])
        self.free_op = np.concatenate((self.read.op[reads], self.written.op[writes], release_op[releases]))
        self.freed = np.concatenate((self.read.tensor[reads], self.written.tensor[writes], released[releases]))
        kinds = (FREE_READ, FREE_WRITTEN, FREE_RELEASED)
        self.free_phase = np.repeat(np.array(kinds, np.int8), [len(reads), len(writes), len(releases)])


def _operands(start: Ints, ids: Ids) -> Operands:
    op, tensor = np.repeat(np.arange(len(start) - 1), np.diff(start)), ids
    pairs = op * (int(tensor.max(initial=0)) + 1) + tensor
    if len(distinct(pairs)) < len(op):  # an op that reads a tensor twice reads it once
        first = np.sort(np.unique(pairs, return_index=True)[1])
        op, tensor = op[first], tensor[first]
    return Operands(_ids(op), tensor, np.searchsorted(op, np.arange(len(start))))


def _ids(wide: Ints) -> Ids:
    return wide.astype(np.int32)
