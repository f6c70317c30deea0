"""The count of resident bytes that decides whether settings pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.plan import Problem
from sim.policies.offload.tflms.swaps import Settings, Stays
from sim.solvers.spans import resident_during
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.kept import kept

DELAY = 1
"""Ops for which a result stays resident while it is copied out, where computation does not wait for that copy."""


def fits(problem: Problem, stays: Stays, settings: Settings, share: float) -> bool:
    """Whether every device counts no more than its share of what weights and optimizer state leave it."""
    trace = problem.trace
    variables = kept(trace, "variables", None, lambda: [_variables(trace, device) for device in range(trace.devices)])
    for device, size in enumerate(variables):
        capacity = problem.platform.home(device).capacity
        if int(counted(trace, stays, settings, device).max(initial=0)) > share * (capacity - size):
            return False
    return True


def counted(trace: Trace, stays: Stays, settings: Settings, device: int = 0) -> NDArray[np.int64]:
    """Bytes of results and inputs resident on a device during each op, its workspace included. Shape (ops,)."""
    ops = trace.op_columns
    others = kept(trace.structure, "variable", None, lambda: ~np.isin(trace.tensor_columns.role, PERSISTENT)).copy()
    others[stays.tensor] = False
    tensor, begin, first, last = (column[ops.device[stays.first] == device] for column in stays)
    produced, size = begin < 0, trace.tensor_columns.bytes[tensor]
    change = np.zeros(len(ops.name) + 2, np.int64)
    np.add.at(change, np.where(produced | settings.waits_in, first, begin + 1), size)
    np.subtract.at(change, last + np.where(produced & (not settings.waits_out), DELAY, 0) + 1, size)
    load = resident_during(trace, device, others) + np.cumsum(change)[: len(ops.name)]
    return load + np.where(ops.device == device, ops.workspace, 0)


def _variables(trace: Trace, device: int) -> int:
    """Bytes of weights and optimizer state whose first reader is on a device."""
    c = trace.tensor_columns
    start = np.flatnonzero(np.isin(c.role, PERSISTENT) & (trace.producer < 0) & (trace.first_read >= 0))
    mine = start[trace.op_columns.device[trace.first_read[start]] == device]
    return sum(c.bytes[mine].tolist())
