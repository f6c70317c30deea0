"""What the analyses share: which rows of a log are on which lane, and unions of intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.log import FIRST_RUNS, STALLS, WHY, EventLog, Ints

RUN, RECOMPUTE, MOVE, CODEC, STALL = (WHY[name] for name in ("run", "recompute", "move", "codec", "stall"))
FIRST = tuple(WHY[name] for name in FIRST_RUNS)


@dataclass(frozen=True, eq=False)
class Runs:
    """Every run of an op: its id, start and end (ns), why (a position in `WHYS`). Shapes (runs,).

    A member of a group (send, recv, collective) counts as run while the group's transfer lasts.
    """

    op: Ints
    start: Ints
    end: Ints
    why: Ints


def main_lanes(log: EventLog) -> Ints:
    """Per device of the trace the lane of its main engine."""
    return np.array([log.platform.engine_for(device) for device in range(log.trace.devices)], np.int64)


def on_main(log: EventLog, device: int | None = None) -> NDArray[np.bool_]:
    """Which intervals are on their device's main lane, for all devices or for one. Shape (intervals,)."""
    lanes = main_lanes(log)
    owner, lane = log.interval("device"), log.interval("lane")
    known = (owner >= 0) & (owner < len(lanes)) if device is None else owner == device
    rows: NDArray[np.bool_] = known & (lane == lanes[np.where(known, owner, 0)])
    return rows


def runs(log: EventLog) -> Runs:
    """All runs of ops on engines, and of groups on links, in the order of the log."""
    why, op, tensor = log.interval("why"), log.interval("op"), log.interval("tensor")
    start, end = log.interval("start"), log.interval("end")
    ran = ((why == RUN) | (why == RECOMPUTE) | (why == CODEC)) & (op >= 0)
    parts = [np.stack((op[ran], start[ran], end[ran], why[ran]))]
    group = log.trace.op_columns.group
    if group:
        members: dict[str, list[int]] = {}
        for member, name in group.items():
            members.setdefault(name, []).append(member)
        joint = np.flatnonzero((why == MOVE) & (tensor < 0) & (op >= 0))
        # a group has one row per link of its route: count the first
        rows = sorted(set(zip(op[joint].tolist(), start[joint].tolist(), end[joint].tolist(), strict=True)))
        found = [(m, s, e, RUN) for i, s, e in rows for m in members.get(group.get(i, ""), ())]
        parts.append(np.array(found, np.int64).reshape(-1, 4).T)
    return Runs(*np.concatenate(parts, axis=1))


def union(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Disjoint intervals, in order, that cover the same time; empty ones are left out."""
    some = end > start
    start, end = start[some], end[some]
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    if not len(start):
        return start, end
    new = np.concatenate(([True], start[1:] > end[:-1]))
    return start[new], np.concatenate((end[:-1][new[1:]], end[-1:]))


def covered_before(times: Ints, starts: Ints, ends: Ints) -> Ints:
    """Per time the ns before it that these disjoint, ordered intervals cover."""
    if not len(starts):
        return np.zeros(len(times), np.int64)
    done = np.concatenate(([0], np.cumsum(ends - starts)))
    i = np.searchsorted(starts, times, "right") - 1
    inside = np.minimum(times, ends[i]) - starts[i]
    return np.where(i < 0, 0, done[i] + inside)


def total_ns(start: Ints, end: Ints) -> int:
    """Time covered by at least one of these intervals."""
    starts, ends = union(start, end)
    return int((ends - starts).sum())


def overlap_ns(a: tuple[Ints, Ints], b: tuple[Ints, Ints]) -> int:
    """Time covered by both of two sets of intervals, each (starts, ends)."""
    left, right = union(*a), union(*b)
    return int((covered_before(left[1], *right) - covered_before(left[0], *right)).sum())


# ---- sums over all lanes ------------------------------------------------------------------------


def energy_j(log: EventLog) -> float | None:
    """Joules of engines while they ran and of bytes on links; None unless the profile prices every part."""
    platform = log.platform
    price = platform.lane_energy
    if price is None:
        return None
    lane, why = log.interval("lane"), log.interval("why")
    start, end, bytes = log.interval("start"), log.interval("end"), log.interval("bytes")
    computing = (why == RUN) | (why == RECOMPUTE) | (why == CODEC)
    joules = 0.0
    for i, each in enumerate(price):
        rows = lane == i
        if i < len(platform.engines):
            joules += each * total_ns(start[rows & computing], end[rows & computing]) / 1e9
        else:
            joules += each * int(bytes[rows].sum())
    return joules


def work_ns(log: EventLog) -> int:
    """Time of all runs of ops and all copies, as if nothing overlapped; a copy over several links counts once."""
    why, start, end = log.interval("why"), log.interval("start"), log.interval("end")
    computing = (why == RUN) | (why == RECOMPUTE) | (why == CODEC)
    copying = why == MOVE
    copies = np.stack((log.interval("tensor"), start, end))[:, copying]
    copies = copies[:, np.lexsort(copies)]  # those over several links beside each other
    is_new = np.append(True, (copies[:, 1:] != copies[:, :-1]).any(axis=0))[: copies.shape[1]]
    return int((end - start)[computing].sum() + (copies[2] - copies[1])[is_new].sum())


def stall_rows(log: EventLog, device: int | None) -> list[tuple[str, str, int, int]]:
    """Per op and cause the ns of its stalls and how many, longest first. device: None for all."""
    rows = on_main(log, device) & (log.interval("why") == STALL)
    op, cause = log.interval("op")[rows], log.interval("cause")[rows]
    order = np.lexsort((cause, op))
    op, cause, ns = op[order], cause[order], (log.interval("end") - log.interval("start"))[rows][order]
    first = np.flatnonzero(np.diff(op, prepend=-2) | np.diff(cause, prepend=-1))
    total = np.add.reduceat(ns, first) if len(first) else ns
    count = np.diff(first, append=len(ns))
    longest = np.lexsort((cause[first], op[first], -total))
    names, chosen = log.trace.op_columns.name, first[longest]
    ops = [names[each] if each >= 0 else "" for each in op[chosen].tolist()]
    causes = [STALLS[each] for each in cause[chosen].tolist()]
    return list(zip(ops, causes, total[longest].tolist(), count[longest].tolist(), strict=True))
