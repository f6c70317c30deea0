"""What the ops of a trace take at least, each once: the busiest engine, and the longest chain of ops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.hardware.cost import OpTimes, op_times
from sim.hardware.platform import Platform
from sim.trace.graph import Trace

Ints = NDArray[np.int64]


def ideal_ns(trace: Trace, platform: Platform) -> int:
    """Nanoseconds that the ops of a trace take at least, each once, whatever the memory."""
    return max(load_and_path(trace, platform, op_times(trace, platform)))


def load_and_path(trace: Trace, platform: Platform, times: OpTimes) -> tuple[int, int]:
    """All ops of the busiest engine, and the longest chain of ops."""
    cost = times.total.copy()
    cost[list(trace.op_columns.group)] = 0  # a group runs on links
    return int(_loads(times.engine, cost).max(initial=0)), _critical_path(trace, platform, times, cost)


def _loads(engine: NDArray[np.int32], cost: Ints) -> Ints:
    """Nanoseconds of all ops, per engine."""
    load = np.zeros(int(engine.max(initial=-1)) + 1, np.int64)
    np.add.at(load, engine, cost)
    return load


def _critical_path(trace: Trace, platform: Platform, times: OpTimes, cost: Ints) -> int:
    c = trace.op_columns
    main = np.array([platform.engine_for(device) for device in range(trace.devices)], np.int64)
    in_order = times.engine == main[c.device]
    if trace.devices == 1 and in_order.all():
        return int(cost.sum())  # one engine, one queue: the chain of all ops
    reached = [0] * trace.devices  # when each device can continue
    ready = [0] * len(trace.tensor_columns.name)
    together: dict[str, int] = {}
    device, on_main, ns = c.device.tolist(), in_order.tolist(), cost.tolist()
    read_at, reads = c.read_start.tolist(), c.read_ids.tolist()
    write_at, writes = c.write_start.tolist(), c.write_ids.tolist()
    last = 0
    for op in range(len(ns)):
        start = reached[device[op]]
        for tensor in reads[read_at[op] : read_at[op + 1]]:
            if ready[tensor] > start:
                start = ready[tensor]
        group = c.group.get(op)
        if group:  # members start together; later members of the trace do not delay this one: still a lower bound
            start = together[group] = max(start, together.get(group, 0))
        end = start + ns[op]
        if on_main[op] and not group:
            reached[device[op]] = end
        for tensor in writes[write_at[op] : write_at[op + 1]]:
            ready[tensor] = end
        last = max(last, end)
    return last
