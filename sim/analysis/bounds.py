"""What no plan for this trace on this platform can beat, and how far the run is from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.analysis.lanes import MOVE
from sim.analysis.peak_memory import fullest_home, peak_bytes
from sim.hardware.cost import OpTimes, op_times
from sim.hardware.ideal import load_and_path
from sim.hardware.transfer_time import transfer_ns
from sim.log import CAUSE, EventLog, Ints
from sim.trace.columns import distinct


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on time (ns) and on the use of one tier (bytes) for the trace that ran, with its initial placement.

    tier: the tier that the bounds on memory concern.
    critical_path_ns: the longest chain of ops joined by data or by a device's program order, each op at its time with
        all operands in the nearest tier and transfers at no time.
    engine_load_ns: all ops of the busiest engine.
    transfer_ns: the transfers that the first and last places of tensors force, over the links of the busiest tier.
        A tensor must move if no engine that reads it reaches its first tier, or none that produces it its last one.
    time_ns: the largest of these three.
    makespan_ns: of the run.
    time_distance: makespan over its bound, less 1; None where the bound is 0 or the run did not end.
    working_set_bytes: what the op with the highest bound holds while it runs.
    pinned_bytes: what else can be neither moved nor recomputed at that op; 0 where another tier can be reached.
    memory_bytes: the sum of these two.
    op: the op with the highest bound on memory, "" for none.
    peak_bytes: of the run.
    memory_distance: peak over its bound, less 1; None where the bound is 0.
    """

    tier: str
    critical_path_ns: int
    engine_load_ns: int
    transfer_ns: int
    time_ns: int
    makespan_ns: int
    time_distance: float | None
    working_set_bytes: int
    pinned_bytes: int
    memory_bytes: int
    op: str
    peak_bytes: int
    memory_distance: float | None


def bounds(log: EventLog, tier: str | None = None) -> Bounds:
    """Bounds for a run; those on memory are for `tier`, by default the home tier of the fullest device.

    Raises ProfileError on an unknown tier.
    """
    name = fullest_home(log).name if tier is None else log.platform.tier(tier).name
    times = op_times(log.trace, log.platform)
    load, path = load_and_path(log.trace, log.platform, times)
    transfer = _transfer_ns(log, times)
    working, pinned, op = _memory_bound(log, times, name)
    time, memory, peak = max(load, path, transfer), working + pinned, peak_bytes(log)[name]
    return Bounds(
        tier=name,
        critical_path_ns=path,
        engine_load_ns=load,
        transfer_ns=transfer,
        time_ns=time,
        makespan_ns=log.end,
        time_distance=log.end / time - 1 if time and log.complete else None,
        working_set_bytes=working,
        pinned_bytes=pinned,
        memory_bytes=memory,
        op=log.trace.op_columns.name[op] if op >= 0 else "",
        peak_bytes=peak,
        memory_distance=peak / memory - 1 if memory else None,
    )


# ---- time --------------------------------------------------------------------------------------


def _transfer_ns(log: EventLog, times: OpTimes) -> int:
    """The longest time of the moves that tensors' first and last places force, over all links of a tier."""
    platform, c = log.platform, log.trace.op_columns
    tiers = platform.tier_ids
    reach = np.zeros((len(platform.engines), len(tiers)), np.bool_)
    for i, engine in enumerate(platform.engines):
        reach[i, [tiers[name] for name in {engine.home, *engine.reaches}]] = True
    moved = (log.interval("why") == MOVE) & (log.interval("tensor") >= 0)
    size = _smallest(log.trace.tensor_columns.bytes, log.interval("tensor"), log.interval("bytes"), moved)
    placed = (log.change("cause") == CAUSE["placed"]) & (log.change("tensor") >= 0) & (log.change("delta") > 0)
    begins = np.zeros((len(size), len(tiers)), np.bool_)
    begins[log.change("tensor")[placed], log.change("tier")[placed]] = True
    reader = times.engine[np.repeat(np.arange(len(c.name)), np.diff(c.read_start))]
    near = (begins[c.read_ids] & reach[reader]).any(axis=1) | ~begins[c.read_ids].any(axis=1)
    leaves = np.zeros(len(size), np.bool_)
    leaves[c.read_ids[~near]] = True
    out, back = np.zeros(len(tiers), np.int64), np.zeros(len(tiers), np.int64)
    for tensor in np.flatnonzero(leaves & (begins.sum(axis=1) == 1)).tolist():
        out[np.flatnonzero(begins[tensor])] += size[tensor]
    for end, start in log.trace.carry:
        producer = int(log.trace.producer[end])
        if producer >= 0 and begins[start].sum() == 1 and not (begins[start] & reach[times.engine[producer]]).any():
            back[np.flatnonzero(begins[start])] += size[end]
    most = 0
    for name, i in tiers.items():
        for bytes, rate in (
            (int(out[i]), sum(link.rate for link in platform.links if link.source == name)),
            (int(back[i]), sum(link.rate for link in platform.links if link.target == name)),
        ):
            if bytes and rate:
                most = max(most, transfer_ns(bytes, rate))
    return most


def _smallest(bytes: Ints, tensor: Ints, seen: Ints, rows: NDArray[np.bool_]) -> Ints:
    """Sizes of tensors; the smallest size in these rows where a link compresses."""
    size = bytes.copy()
    np.minimum.at(size, tensor[rows], seen[rows])
    return size


# ---- memory ------------------------------------------------------------------------------------


def _memory_bound(log: EventLog, times: OpTimes, tier: str) -> tuple[int, int, int]:
    """Working set and pinned bytes at the op with the largest sum of both, and that op (-1 for none)."""
    trace, platform = log.trace, log.platform
    c, t = trace.op_columns, trace.tensor_columns
    count, here = len(c.name), platform.tier_ids[tier]
    rows = (log.change("tier") == here) & (log.change("tensor") >= 0) & (log.change("delta") > 0)
    size = _smallest(t.bytes, log.change("tensor"), log.change("delta"), rows)
    home = np.array([engine.home == tier for engine in platform.engines])[times.engine]
    # an engine that reaches several tiers may have its operands in another one
    bound = np.array([{e.home, *e.reaches} == {tier} for e in platform.engines])[times.engine]
    alive, storage_is_pinned = _pinned(log, tier, size)

    working = np.where(home, c.workspace, 0)
    pairs = distinct(np.repeat(np.arange(count), np.diff(c.read_start)) * len(size) + c.read_ids)
    reader, read = np.divmod(pairs, len(size))
    writer = np.repeat(np.arange(count), np.diff(c.write_start))
    overwriter = np.where(trace.replaced_by >= 0, trace.producer[trace.replaced_by], -1)
    for op, tensor in ((reader, read), (writer, c.write_ids)):
        counted = bound[op] & ~storage_is_pinned[tensor]
        if op is reader:
            counted &= overwriter[tensor] != op  # the result takes over its storage
        np.add.at(working, op[counted], size[tensor[counted]])
    if not count:
        return 0, 0, -1
    worst = int(np.argmax(working + alive))
    held = distinct(np.concatenate((trace.reads(worst), trace.writes(worst))).astype(np.int64))
    own = int(size[held[storage_is_pinned[held]]].sum()) if bound[worst] else 0
    replaced = held[storage_is_pinned[held] & (overwriter[held] == worst)]
    own -= int(size[replaced].sum()) if bound[worst] else 0
    return int(working[worst]) + own, int(alive[worst]) - own, worst


def _pinned(log: EventLog, tier: str, size: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Per op the pinned bytes in the tier, and per tensor whether it is pinned.

    Pinned are tensors that were placed there without a producer, and those that later take over their storage: until
    the last op that uses them, or to the end if they are outputs. Nothing is pinned where another tier can be reached.
    """
    trace, platform = log.trace, log.platform
    count = len(trace.op_columns.name)
    nothing = np.zeros(count, np.int64), np.zeros(len(size), np.bool_)
    if any(other.name != tier and platform.route(tier, other.name) for other in platform.tiers):
        return nothing
    replaces = trace.tensor_columns.replaces
    root = np.arange(len(size))
    while (replaces[root] >= 0).any():
        root = np.where(replaces[root] >= 0, replaces[root], root)
    here = np.zeros(len(size), np.bool_)
    first = (log.change("cause") == CAUSE["placed"]) & (log.change("tier") == platform.tier_ids[tier])
    here[log.change("tensor")[first & (log.change("tensor") >= 0)]] = True
    pinned = here[root]
    last = np.full(len(size), -1, np.int64)
    np.maximum.at(last, root, trace.last_use.astype(np.int64))
    last[root[list(trace.outputs)]] = count
    owners = np.flatnonzero(here & (root == np.arange(len(size))))
    ends = np.zeros(count + 2, np.int64)
    np.add.at(ends, last[owners] + 1, size[owners])
    return int(size[owners].sum()) - np.cumsum(ends)[:count], pinned
