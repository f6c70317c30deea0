"""How much of the transfer time is hidden behind computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.analysis.lanes import CODEC, MOVE, RECOMPUTE, RUN, covered_before, on_main, overlap_ns, total_ns, union
from sim.log import EventLog, Ints
from sim.trace.columns import distinct


@dataclass(frozen=True)
class Overlap:
    """Transfer time, and how much of it is hidden. The transfer of a group belongs to each of its members.

    transfer_ns: time in which at least one copy ran, summed over devices.
    hidden_ns: the part of it in which that device's main engine computed.
    fraction: hidden over transfer time, None without transfers.
    by_link: per link the fraction of its bytes that moved while their devices computed, each transfer's bytes times
        the hidden fraction of its time; None where none moved.
    """

    transfer_ns: int
    hidden_ns: int
    fraction: float | None
    by_link: Mapping[str, float | None] = field(default_factory=dict)


def overlap(log: EventLog) -> Overlap:
    """Copies against the main lane of the devices that they belong to; those of no device against all lanes."""
    why, device = log.interval("why"), log.interval("device")
    start, end = log.interval("start"), log.interval("end")
    moves = np.flatnonzero(why == MOVE)
    busy = on_main(log) & ((why == RUN) | (why == RECOMPUTE) | (why == CODEC))
    row, owner = _owners(log, moves)
    hidden_part = np.zeros(len(why))
    transfer = hidden = 0
    for each in distinct(owner).tolist():
        copies = row[owner == each]
        lanes = busy & (device == each) if each >= 0 else busy
        transfer += total_ns(start[copies], end[copies])
        hidden += overlap_ns((start[copies], end[copies]), (start[lanes], end[lanes]))
        computing = union(start[lanes], end[lanes])
        inside = covered_before(end[copies], *computing) - covered_before(start[copies], *computing)
        np.add.at(hidden_part, copies, inside / np.maximum(end[copies] - start[copies], 1))
    hidden_part[moves] /= np.bincount(row, minlength=len(why))[moves]
    return Overlap(transfer, hidden, hidden / transfer if transfer else None, _by_link(log, moves, hidden_part))


def _owners(log: EventLog, moves: Ints) -> tuple[Ints, Ints]:
    """Pairs of a transfer's row and a device that it belongs to: one for a copy, one per member for a group."""
    group, devices = log.trace.op_columns.group, log.trace.op_columns.device
    members: dict[str, list[int]] = {}
    for op, name in group.items():
        members.setdefault(name, []).append(int(devices[op]))
    ops, tensor, owners = log.interval("op").tolist(), log.interval("tensor"), log.interval("device")
    pairs = [
        (row, owner)
        for row in moves.tolist()
        for owner in (members[group[ops[row]]] if tensor[row] < 0 and ops[row] in group else (int(owners[row]),))
    ]
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _by_link(log: EventLog, moves: Ints, hidden_part: NDArray[np.float64]) -> dict[str, float | None]:
    lane, bytes = log.interval("lane")[moves], log.interval("bytes")[moves]
    found: dict[str, float | None] = {}
    for i, link in enumerate(log.platform.links, start=len(log.platform.engines)):
        on_it = lane == i
        moved = int(bytes[on_it].sum())
        found[link.name] = float((bytes[on_it] * hidden_part[moves][on_it]).sum() / moved) if moved else None
    return found
