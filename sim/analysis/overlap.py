"""How much of the copying hides behind computing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.analysis.lanes import CODEC, MOVE, RECOMPUTE, RUN, on_main, overlap_ns, total_ns
from sim.log import EventLog


@dataclass(frozen=True)
class Overlap:
    """transfer_ns: time in which at least one copy ran, per device and summed; hidden_ns: the part of it in
    which that device's main engine computed. fraction: hidden over transfer time, None without transfers.
    """

    transfer_ns: int
    hidden_ns: int
    fraction: float | None


def overlap(log: EventLog) -> Overlap:
    """Copies against the main lane of the device that they belong to; those of no device against all lanes."""
    why, device = log.interval("why"), log.interval("device")
    start, end = log.interval("start"), log.interval("end")
    moves = why == MOVE
    busy = on_main(log) & ((why == RUN) | (why == RECOMPUTE) | (why == CODEC))
    transfer = hidden = 0
    for owner in np.unique(device[moves]).tolist():
        copies = moves & (device == owner)
        lanes = busy & (device == owner) if owner >= 0 else busy
        transfer += total_ns(start[copies], end[copies])
        hidden += overlap_ns((start[copies], end[copies]), (start[lanes], end[lanes]))
    return Overlap(transfer, hidden, hidden / transfer if transfer else None)
