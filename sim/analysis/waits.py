"""What each stall waited for: which tensor, on which link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.analysis.lanes import CODEC, MOVE, RECOMPUTE, RUN, STALL, main_lanes, on_main
from sim.log import STALLS, EventLog, Ints

if TYPE_CHECKING:
    import pandas as pd


def waits(log: EventLog) -> pd.DataFrame:
    """One row per tensor, link and cause that main lanes waited for, longest first.

    Columns: `cause`; `link`, "" where no copy was waited for, and the engine where a result of another one was;
    `tensor`, "" where no tensor was; `op`, the first that waited; `stall_ns`; `stalls`, how many.

    A stall for a copy waits for the copy of its tensor that ends last in it. One for space waits for the copy whose
    end gives the space: out of a home tier, at the moment when the stall ends. One for another engine waits for the
    op of such an engine that ends with it: for what it hands on, or the first of its results.
    """
    import pandas as pd

    rows = np.flatnonzero(on_main(log) & (log.interval("why") == STALL))
    start, end = log.interval("start")[rows], log.interval("end")[rows]
    tensor, link = _awaited(log, rows, end)
    frame = pd.DataFrame(
        {
            "cause": log.interval("cause")[rows],
            "link": link,
            "tensor": tensor,
            "op": log.interval("op")[rows],
            "stall_ns": end - start,
        }
    )
    table = frame.groupby(["cause", "link", "tensor"], as_index=False).agg(
        op=("op", "first"), stall_ns=("stall_ns", "sum"), stalls=("stall_ns", "size")
    )
    order = ["stall_ns", "cause", "link", "tensor"]
    table = table.sort_values(order, ascending=[False, True, True, True], ignore_index=True)
    lanes, tensors, ops = log.platform.lanes, log.trace.tensor_columns.name, log.trace.op_columns.name
    table["cause"] = [STALLS[code] for code in table["cause"]]
    table["link"] = [lanes[lane] if lane >= 0 else "" for lane in table["link"]]
    table["tensor"] = [tensors[t] if t >= 0 else "" for t in table["tensor"]]
    table["op"] = [ops[op] if op >= 0 else "" for op in table["op"]]
    return table


def _awaited(log: EventLog, rows: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Per stall the tensor and the lane of the link that it waited for, -1 for none."""
    own = log.interval("tensor")[rows].copy()
    lane = np.full(len(rows), -1, np.int64)
    moved = np.flatnonzero((log.interval("why") == MOVE) & (log.interval("tensor") >= 0))
    homes = {log.platform.home(device).name for device in range(log.trace.devices)}
    first = len(log.platform.engines)
    leaves = np.array([link.source in homes for link in log.platform.links], np.bool_)
    by_end: dict[int, list[tuple[int, int]]] = {}
    for row in moved.tolist():
        at = int(log.interval("end")[row])
        by_end.setdefault(at, []).append((int(log.interval("tensor")[row]), int(log.interval("lane")[row])))
    beside = _beside(log)
    for i, (at, tensor, cause) in enumerate(
        zip(end.tolist(), own.tolist(), log.interval("cause")[rows].tolist(), strict=True)
    ):
        if STALLS[cause] == "engine" and at in beside:
            own[i], lane[i] = _result(log, beside[at], int(log.interval("op")[rows[i]]))
            continue
        for moved_tensor, moved_lane in by_end.get(at, ()):
            gives_space = STALLS[cause] == "space" and tensor < 0 and leaves[moved_lane - first]
            if moved_tensor == tensor or gives_space:
                own[i], lane[i] = moved_tensor, moved_lane
                break
    return own, lane


def _beside(log: EventLog) -> dict[int, list[tuple[int, int]]]:
    """Per time the ops that end then on engines beside the devices' main ones, each with its lane."""
    lane, why = log.interval("lane"), log.interval("why")
    ran = ((why == RUN) | (why == RECOMPUTE) | (why == CODEC)) & (log.interval("op") >= 0)
    ran &= (lane >= 0) & (lane < len(log.platform.engines)) & ~np.isin(lane, main_lanes(log))
    found: dict[int, list[tuple[int, int]]] = {}
    for row in np.flatnonzero(ran).tolist():
        found.setdefault(int(log.interval("end")[row]), []).append((int(log.interval("op")[row]), int(lane[row])))
    return found


def _result(log: EventLog, ended: list[tuple[int, int]], waiting: int) -> tuple[int, int]:
    """What was waited for of the ops that ended with a stall, and where that ran: a result, -1 where there is none."""
    read = set(log.trace.reads(waiting)) if waiting >= 0 else set[int]()
    for op, lane in ended:
        for tensor in log.trace.writes(op):
            if tensor in read:
                return tensor, lane
    op, lane = ended[0]
    return next(iter(log.trace.writes(op)), -1), lane
