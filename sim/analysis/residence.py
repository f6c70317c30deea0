"""Where tensors are resident when a run ends."""

from __future__ import annotations

import numpy as np

from sim.log import EventLog


def residence(log: EventLog) -> dict[int, tuple[str, ...]]:
    """By tensor, the tiers that hold all of it at the end; tensors without bytes are left out."""
    tensor, tier, delta = log.change("tensor"), log.change("tier"), log.change("delta")
    count = len(log.platform.tiers)
    kept = tensor >= 0
    held = np.zeros(len(log.trace.tensors) * count, np.int64)
    np.add.at(held, tensor[kept] * count + tier[kept], delta[kept])
    size = np.repeat(log.trace.tensor_columns.bytes, count)
    names = [each.name for each in log.platform.tiers]
    found: dict[int, tuple[str, ...]] = {}
    for at in np.flatnonzero((held > 0) & (held >= size)).tolist():
        t, where = divmod(at, count)
        found[t] = (*found.get(t, ()), names[where])
    return found
