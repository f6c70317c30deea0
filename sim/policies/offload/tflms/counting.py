"""The count of resident bytes that decides whether settings pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.plan import Problem
from sim.policies.offload.tflms.swaps import Settings, Stay, Swaps
from sim.solvers.spans import spans
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
    c, end = trace.tensor_columns, len(trace.ops) - 1
    role, bytes_of = c.role.tolist(), c.bytes.tolist()
    change = [0] * (end + 3)
    for t, span in spans(trace, device).items():
        if role[t] in PERSISTENT:
            continue
        size = bytes_of[t]
        for i, stay in enumerate(swaps.get(t, (Stay(-1, *span),))):
            begin = stay.first if settings.waits_in or not i else stay.begin + 1
            stop = stay.last + (DELAY if t in swaps and not i and not settings.waits_out else 0)
            change[begin] += size
            change[stop + 1] -= size
    load, now = [], 0
    rows = zip(change[: end + 1], trace.op_columns.workspace.tolist(), trace.op_columns.device.tolist(), strict=True)
    for step, workspace, where in rows:
        now += step
        load.append(now + (workspace if where == device else 0))
    return load


def _variables(trace: Trace, device: int) -> int:
    """Bytes of weights and optimizer state whose first reader is on a device."""
    c = trace.tensor_columns
    start = np.flatnonzero(np.isin(c.role, PERSISTENT) & (trace.producer < 0) & (trace.first_read >= 0))
    mine = start[trace.op_columns.device[trace.first_read[start]] == device]
    return sum(c.bytes[mine].tolist())
