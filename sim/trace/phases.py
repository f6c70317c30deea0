"""The phases of a trace: which ops belong to forward and backward, and what passes from one to the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.trace.columns import distinct
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.op import PHASE_CODE

Ints = NDArray[np.int64]
FORWARD = PHASE_CODE["forward"]
BACKWARD = PHASE_CODE["backward"]


def forward_ops(trace: Trace) -> Ints:
    """Ids of the forward ops, in program order."""
    return np.flatnonzero(trace.op_columns.phase == FORWARD)


def backward_ops(trace: Trace) -> Ints:
    """Ids of the backward ops, in program order."""
    return np.flatnonzero(trace.op_columns.phase == BACKWARD)


def before_update(trace: Trace) -> int:
    """How many ops come before the last run of update ops."""
    inside = np.flatnonzero(trace.op_columns.phase != PHASE_CODE["update"])
    return int(inside[-1]) + 1 if len(inside) else 0


def saved_through_views(trace: Trace) -> frozenset[int]:
    """The tensors of which a backward op reads a view that was made in forward.

    Such a view stays one of the storage that it was made of: nothing else can stand for that tensor in backward.
    """

    def find() -> frozenset[int]:
        saved = set(saved_tensors(trace).tolist()) if trace.view_of else ()
        return frozenset(storage for view, storage in trace.view_of.items() if view in saved)

    return kept(trace, "saved_through_views", (), find)


def saved_tensors(trace: Trace) -> Ints:
    """Ids of the tensors that a forward op produces and a backward op reads, in the order of production."""
    phase, c = trace.op_columns.phase, trace.op_columns
    by_backward = np.repeat(phase == BACKWARD, np.diff(c.read_start))
    read = distinct(c.read_ids[by_backward]).astype(np.int64)
    producer = trace.producer[read]
    saved = read[(producer >= 0) & (phase[producer] == FORWARD)]
    order: Ints = saved[np.argsort(trace.producer[saved], kind="stable")]
    return order
