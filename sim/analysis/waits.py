"""What each stall waited for: which tensor, on which link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.analysis.lanes import MOVE, STALL, on_main
from sim.log import STALLS, EventLog, Ints

if TYPE_CHECKING:
    import pandas as pd


def waits(log: EventLog) -> pd.DataFrame:
    """One row per tensor, link and cause that main lanes waited for, longest first.

    Columns: `cause`; `link`, "" where no copy was waited for; `tensor`, "" where no tensor was; `op`, the first that
    waited; `stall_ns`; `stalls`, how many.

    A stall for a copy waits for the copy of its tensor that ends last in it. One for space waits for the copy whose
    end gives the space: out of a home tier, at the moment when the stall ends.
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
    for i, (at, tensor, cause) in enumerate(
        zip(end.tolist(), own.tolist(), log.interval("cause")[rows].tolist(), strict=True)
    ):
        for moved_tensor, moved_lane in by_end.get(at, ()):
            gives_space = STALLS[cause] == "space" and tensor < 0 and leaves[moved_lane - first]
            if moved_tensor == tensor or gives_space:
                own[i], lane[i] = moved_tensor, moved_lane
                break
    return own, lane
