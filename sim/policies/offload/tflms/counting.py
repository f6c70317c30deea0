"""The count of resident bytes that decides whether settings pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.plan import Problem
from sim.policies.offload.tflms.swaps import Settings, Swaps
from sim.solvers.spans import resident_during, spans
from sim.trace.graph import PERSISTENT, Trace

DELAY = 1
"""Ops for which a result stays resident while it is copied out, where computation does not wait for that copy."""


def fits(problem: Problem, swaps: Swaps, settings: Settings, share: float) -> bool:
    """Whether every device counts no more than its share of what weights and optimizer state leave it."""
    trace = problem.trace
    for device in range(trace.devices):
        variables = _variables(trace, device)
        capacity = problem.platform.home(device).capacity
        if max(counted(trace, swaps, settings, device), default=0) > share * (capacity - variables):
            return False
    return True


def counted(trace: Trace, swaps: Swaps, settings: Settings, device: int = 0) -> Sequence[int]:
    """Per op the bytes of results and inputs resident on a device while it runs, its workspace included."""
    ops, columns, here = trace.op_columns, trace.tensor_columns, spans(trace, device) if swaps else ()
    stays = ~np.isin(columns.role, PERSISTENT)
    stays[list(swaps)] = False
    change = np.zeros(len(ops.name) + 2, np.int64)
    for t in swaps:
        if t not in here:
            continue
        size = columns.bytes[t]
        for i, stay in enumerate(swaps[t]):
            begin = stay.first if settings.waits_in or not i else stay.begin + 1
            stop = stay.last + (0 if i or settings.waits_out else DELAY)
            change[begin] += size
            change[stop + 1] -= size
    load = resident_during(trace, device, stays) + np.cumsum(change)[: len(ops.name)]
    counts: list[int] = (load + np.where(ops.device == device, ops.workspace, 0)).tolist()
    return counts


def _variables(trace: Trace, device: int) -> int:
    """Bytes of weights and optimizer state whose first reader is on a device."""
    c = trace.tensor_columns
    start = np.flatnonzero(np.isin(c.role, PERSISTENT) & (trace.producer < 0) & (trace.first_read >= 0))
    mine = start[trace.op_columns.device[trace.first_read[start]] == device]
    return sum(c.bytes[mine].tolist())
