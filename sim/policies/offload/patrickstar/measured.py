"""What PatrickStar measures in an iteration: the bytes on the device, per op, that are no model state."""

from __future__ import annotations

import numpy as np

from sim.log import WHY, EventLog
from sim.trace.tensor import ROLE_CODE

MODEL = [ROLE_CODE[role] for role in ("weight", "gradient", "optimizer_state")]


def non_model(log: EventLog) -> dict[str, int]:
    """Per op, by name, the most bytes of its device's memory that held no model state while it ran."""
    role = np.asarray(log.trace.tensor_columns.role)
    names, device = log.trace.op_columns.name, log.trace.op_columns.device
    found: dict[str, int] = {}
    runs = log.intervals[log.interval("why") == WHY["run"]]
    for d in range(log.trace.devices):
        tier = log.platform.tier_ids[log.platform.home(d).name]
        rows = log.changes[log.change("tier") == tier]
        tensor = rows[:, 3]
        model = (tensor >= 0) & np.isin(role[tensor], MODEL)
        rows = rows[~model]
        level = np.concatenate(([0], np.cumsum(rows[:, 2])))
        for row in runs.tolist():
            start, end, op = row[0], row[1], row[5]
            if int(device[op]) == d:
                first = int(np.searchsorted(rows[:, 0], start, side="right"))
                last = int(np.searchsorted(rows[:, 0], end, side="left"))  # what begins then is the next op's
                found[names[op]] = max(found.get(names[op], 0), int(level[first : max(first, last) + 1].max()))
    return found
