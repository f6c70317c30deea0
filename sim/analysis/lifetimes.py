"""Each tensor's lifetime: when it is produced, used, idle and released, and the cost of restoring it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.analysis.lanes import RECOMPUTE, Runs, runs
from sim.log import EventLog, Ints
from sim.trace.columns import distinct
from sim.trace.tensor import ROLES

if TYPE_CHECKING:
    import pandas as pd


def lifetimes(log: EventLog) -> pd.DataFrame:
    """The offload-priority table: one row per tensor that was ever resident, most byte-seconds first.

    Columns, in ns and bytes, -1 where there is none:

    `tensor`, `role`, `layer`, `bytes`: the tensor.
    `made_ns`: when its first bytes were allocated, by its producer or by the initial placement.
    `gone_ns`: when its last copy was released, or the run ended.
    `last_read_ns`: the end of the last run that read it.
    `reads`: how many runs read it.
    `idle_ns`: its longest time between two uses (its production and its reads).
    `idle_from_ns`, `idle_until_ns`: the start and end of that time.
    `recompute_ns`: one run of its producer, as measured in this log.
    `move_ns`: one copy to the host tier with nothing else on the route.
    `slack_ns`: the idle time less a round trip to the host; negative if the round trip cannot be hidden.
    `byte_seconds`: bytes times idle time, what offloading it could save; the table is ordered by it.
    """
    import pandas as pd

    columns = log.trace.tensor_columns
    count = len(columns.name)
    made, gone = _presence(log, count)
    ran = runs(log)
    tensor, start, end, is_read = _uses(log, ran, made)
    last_read = np.full(count, -1, np.int64)
    np.maximum.at(last_read, tensor[is_read], end[is_read])
    idle, since, until = _longest_idle(tensor, start, end, count)
    move = _move_ns(log, columns.bytes)
    table = pd.DataFrame(
        {
            "tensor": list(columns.name),
            "role": np.array(ROLES, object)[columns.role],
            "layer": columns.layer.astype(np.int64),
            "bytes": columns.bytes,
            "made_ns": made,
            "gone_ns": gone,
            "last_read_ns": last_read,
            "reads": np.bincount(tensor[is_read], minlength=count),
            "idle_ns": idle,
            "idle_from_ns": since,
            "idle_until_ns": until,
            "recompute_ns": _recompute_ns(log, ran),
            "move_ns": move,
            "slack_ns": np.where(move < 0, -1, idle - 2 * move),
            "byte_seconds": columns.bytes * (idle / 1e9),
        }
    )[made >= 0]
    return table.sort_values("byte_seconds", ascending=False, kind="stable", ignore_index=True)


def _presence(log: EventLog, count: int) -> tuple[Ints, Ints]:
    """When each tensor's first bytes were allocated and its last released, -1 for one that never was resident."""
    time, delta, tensor = log.change("time"), log.change("delta"), log.change("tensor")
    rows = tensor >= 0
    time, delta, tensor = time[rows], delta[rows], tensor[rows]
    first, held = np.full(count, log.end + 1, np.int64), np.zeros(count, np.int64)
    last = np.full(count, -1, np.int64)
    np.minimum.at(first, tensor, time)
    np.maximum.at(last, tensor, time)
    np.add.at(held, tensor, delta)
    return np.where(first > log.end, -1, first), np.where(held > 0, log.end, last)


def _uses(log: EventLog, ran: Runs, made: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Every use: tensor, start, end, and whether it is a read. A tensor placed at the start is used then."""
    c = log.trace.op_columns
    parts = []
    for start, ids, is_read in ((c.read_start, c.read_ids, 1), (c.write_start, c.write_ids, 0)):
        counts = (start[1:] - start[:-1])[ran.op]
        which = np.repeat(np.arange(len(ran.op)), counts)
        at = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + start[ran.op][which]
        tensor = ids[at].astype(np.int64)
        if is_read:  # an op that reads a tensor twice uses it once
            once = distinct(which * len(made) + tensor)
            which, tensor = np.divmod(once, len(made))
        begin = ran.start if is_read else ran.end  # a result is idle from the end of its producer
        parts.append((tensor, begin[which], ran.end[which], np.full(len(which), is_read)))
    placed = np.flatnonzero((log.trace.producer < 0) & (made >= 0))
    parts.append((placed, made[placed], made[placed], np.zeros(len(placed), np.int64)))
    tensor, begin, end, is_read_column = (np.concatenate(column) for column in zip(*parts, strict=True))
    return tensor, begin, end, is_read_column.astype(np.bool_)


def _longest_idle(tensor: Ints, start: Ints, end: Ints, count: int) -> tuple[Ints, Ints, Ints]:
    """Per tensor its longest time between uses, the first of equal ones, with its start and end."""
    order = np.lexsort((start, tensor))
    tensor, start, end = tensor[order], start[order], end[order]
    idle, since, until = np.zeros(count, np.int64), np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    if not len(tensor):
        return idle, since, until
    # uses on several engines may overlap: idle time starts at the latest end so far, tensor by tensor
    span = int(end.max()) + 1
    rank = np.cumsum(np.concatenate(([0], tensor[1:] != tensor[:-1])))
    latest = np.maximum.accumulate(end + rank * span) - rank * span
    same = tensor[1:] == tensor[:-1]
    gap, what, begin = (start[1:] - latest[:-1])[same], tensor[1:][same], latest[:-1][same]
    best = np.lexsort((-np.arange(len(gap)), gap))  # the last write wins: longest, then first
    best = best[gap[best] > 0]
    idle[what[best]], since[what[best]] = gap[best], begin[best]
    until[what[best]] = begin[best] + gap[best]
    return idle, since, until


def _recompute_ns(log: EventLog, ran: Runs) -> Ints:
    """Per tensor the time of its producer's first run; -1 where it has none or it has not run."""
    cost = np.full(len(log.trace.op_columns.name) + 1, -1, np.int64)
    first = ran.why != RECOMPUTE
    cost[ran.op[first]] = (ran.end - ran.start)[first]
    return cost[log.trace.producer]  # producer -1 indexes the last entry, which belongs to no op


def _move_ns(log: EventLog, bytes: Ints) -> Ints:
    platform, host = log.platform, log.platform.host
    if host is None:
        return np.full(len(bytes), -1, np.int64)
    home = platform.home(0).name
    sizes, which = np.unique(bytes, return_inverse=True)
    costs = [platform.move_ns(size, home, host.name) for size in sizes.tolist()]
    return np.array(costs, np.int64)[which]
