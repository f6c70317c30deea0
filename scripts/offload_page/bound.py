"""The least time of an iteration whose device has so many bytes, where nothing is recomputed: a proven bound.

While op i runs, whatever the device has produced or read before, and an op of the device reads later, is somewhere: on
the device, with the operands and results of i, or elsewhere. What exceeds the budget is elsewhere from its beginning to
its end, for a copy takes its space on the device before it begins. So each of these bytes crosses into the device after
i, and those that the device itself produced have crossed out of it before. So

    time >= max over i of  max(ops before i, bytes out / rate out) + i + max(ops after i, bytes in / rate in).

It holds for every plan that runs these ops once, in this order, on these engines, and copies whole bytes over these
links; weights and states may begin anywhere, unless they are said to begin on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.hardware.cost import op_times
from sim.hardware.platform import Platform
from sim.trace.graph import Trace


class Bound(NamedTuple):
    """ns: the bound. out, back: bytes that must have left, and must return, at the op where most has to; op: its id."""

    ns: int
    out: int
    back: int
    compute_ns: int
    op: int


def bound(
    trace: Trace,
    platform: Platform,
    budget: int,
    *,
    ratio: float = 1.0,
    rates: tuple[int, int] | None = None,
    begins_there: bool = False,
) -> Bound:
    """The bound of a trace of one device.

    ratio: the least fraction of its bytes that a copy takes on the link.
    begins_there: whether only plans are meant with which all that no op produces begins on the device.
    rates: bytes/s out and back, by default of the links to the host and to drives or pools beside it.
    """
    c, t = trace.op_columns, trace.tensor_columns
    count, home = len(c.name), platform.home(0).name
    times = op_times(trace, platform)
    here = np.array([engine.home == home for engine in platform.engines])[times.engine]
    cost = np.where(here, times.total, 0)
    readers = np.repeat(np.arange(count), np.diff(c.read_start))
    pairs = np.unique(readers * len(t.bytes) + c.read_ids)
    op, tensor = np.divmod(pairs, len(t.bytes))
    mine = here[op]
    last = np.full(len(t.bytes), -1, np.int64)  # the last op of the device that reads it
    np.maximum.at(last, tensor[mine], op[mine])
    made_here = (trace.producer >= 0) & here[np.maximum(trace.producer, 0)]
    begins = np.where(trace.producer >= 0, trace.producer + 1, 0)
    live, free = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    counted = last >= begins
    for which, total in ((counted, live), (counted & ~made_here, free)):
        np.add.at(total, begins[which], t.bytes[which])
        np.subtract.at(total, last[which] + 1, t.bytes[which])
    live, free = np.cumsum(live)[:count], np.cumsum(free)[:count]
    # of what need not have left, the operands of an op are there
    operand = mine & ~made_here[tensor] & (begins[tensor] <= op)
    np.subtract.at(free, op[operand], t.bytes[tensor[operand]])
    ending = np.flatnonzero(counted & ~made_here)
    assert (free[last[ending]] >= 0).all()
    results = np.zeros(count, np.int64)
    writers = np.repeat(np.arange(count), np.diff(c.write_start))
    fresh = here[writers] & (t.replaces[c.write_ids] < 0)
    np.add.at(results, writers[fresh], t.bytes[c.write_ids[fresh]])
    held = live + np.where(here, results + c.workspace, 0)
    back = np.maximum(held - budget, 0)
    out = back if begins_there else np.maximum(back - free, 0)
    before = np.concatenate([[0], np.cumsum(cost)])
    if rates is None:
        rates = _rates(platform, home)
    first = np.maximum(before[:-1], out * ratio * 1e9 / rates[0])
    total = first + cost + np.maximum(before[-1] - before[1:], back * ratio * 1e9 / rates[1])
    worst = int(np.argmax(total))
    most = int(np.argmax(back))
    return Bound(int(total[worst]), int(out[most]), int(back[most]), int(before[-1]), worst)


def _rates(platform: Platform, home: str) -> tuple[int, int]:
    """Bytes/s out of the home tier and into it: to the host by its fastest way, and to what lies beside the host."""
    host = platform.host
    assert host is not None
    behind = {tier.name for tier in platform.tiers if tier.kind != platform.tier(home).kind and tier.name != host.name}
    beside = {name for name in behind if platform.tier(name).kind == "pooled" or platform.tier(name).kind != host.kind}
    out = platform.pace(platform.route(home, host.name)).rate
    back = platform.pace(platform.route(host.name, home)).rate
    out += sum(link.rate for link in platform.links if link.source == home and link.target in beside)
    back += sum(link.rate for link in platform.links if link.target == home and link.source in beside)
    return out, back
