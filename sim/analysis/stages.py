"""Several devices beside each other: what each holds, computes, waits for and exchanges, and which one binds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sim.analysis.figure import Figure, Reference
from sim.analysis.lanes import MOVE, STALL, on_main, overlap_ns, total_ns
from sim.analysis.peak_memory import home_peak, peak_bytes
from sim.log import STALLS, EventLog, Ints


@dataclass(frozen=True)
class Stage:
    """One device of the trace. Bytes and ns; busy, stalls, exposed communication and bubble add up to the makespan.

    peak_bytes: of its home tier. capacity_bytes: of the same.
    busy_ns: ops, recomputation and codecs on its main engine.
    stall_ns: waiting for anything but other devices.
    exposed_ns: waiting for other devices while bytes of a group that it belongs to are under way.
    bubble_ns: the rest: waiting for other devices that still compute, and idle before its first and after its last op.
    """

    device: int
    peak_bytes: int
    capacity_bytes: int
    busy_ns: int
    stall_ns: int
    exposed_ns: int
    bubble_ns: int


def stages(log: EventLog, axes: Collection[str] | None = None) -> tuple[Stage, ...]:
    """One entry per device of the trace.

    axes: of collectives, those whose bytes count as exposed; None for these and what stages send each other.
    """
    peaks, peer = peak_bytes(log), STALLS.index("peer")
    start, end, why, cause = (log.interval(name) for name in ("start", "end", "why", "cause"))
    table = []
    for device in range(log.trace.devices):
        rows, home = on_main(log, device), log.platform.home(device)
        waits = rows & (why == STALL)
        of_others = waits & (cause == peer)
        busy = total_ns(start[rows & ~waits], end[rows & ~waits])
        moves = _moves_of(log, device, axes)
        exposed = overlap_ns((start[moves], end[moves]), (start[of_others], end[of_others]))
        stall = int((end - start)[waits & ~of_others].sum())
        table.append(
            Stage(
                device=device,
                peak_bytes=peaks.get(home.name, 0),
                capacity_bytes=home.capacity,
                busy_ns=busy,
                stall_ns=stall,
                exposed_ns=exposed,
                bubble_ns=log.end - busy - stall - exposed,
            )
        )
    return tuple(table)


def _moves_of(log: EventLog, device: int, axes: Collection[str] | None) -> Ints:
    """Rows of the transfers of groups that a device is a member of, or of those along some axes."""
    c = log.trace.op_columns
    mine = {
        name for op, name in c.group.items()
        if c.device[op] == device and (axes is None or (op in c.ring and c.ring[op].axis in axes))
    }  # fmt: skip
    ops, tensor = log.interval("op"), log.interval("tensor")
    rows = np.flatnonzero((log.interval("why") == MOVE) & (tensor < 0))
    return np.array([row for row in rows.tolist() if c.group.get(int(ops[row])) in mine], np.int64)


def _several(log: EventLog) -> tuple[Stage, ...]:
    """The stages of a trace on several devices, or on one that stands for several; none for a device alone."""
    return stages(log) if log.trace.devices > 1 or log.trace.op_columns.ring else ()


def _bubble(log: EventLog, _: Reference | None) -> float | None:
    table = _several(log)
    return sum(stage.bubble_ns for stage in table) / (len(table) * log.end) if table and log.end else None


def _exposed(log: EventLog, _: Reference | None) -> int:
    return sum(stage.exposed_ns for stage in _several(log))


def _exchanged(log: EventLog, _: Reference | None) -> int:
    rows = (log.interval("why") == MOVE) & (log.interval("tensor") < 0)
    groups = np.array(sorted(log.trace.op_columns.group), np.int64)
    return int(log.interval("bytes")[rows & np.isin(log.interval("op"), groups)].sum())


def _stands_for(log: EventLog, _: Reference | None) -> int:
    origin = log.trace.origin
    return log.trace.devices * (origin.symmetric if origin is not None else 1)


def _fullest(log: EventLog, _: Reference | None) -> int:
    return home_peak(log)


def _binding(log: EventLog, _: Reference | None) -> str | None:
    table = _several(log)
    if not table or not log.end:
        return None
    slowest = max(table, key=lambda stage: (stage.busy_ns, -stage.device))
    fullest = max(table, key=lambda stage: (stage.peak_bytes, -stage.device))
    return f"time: {slowest.device}, memory: {fullest.device}"


FIGURES = {
    "bubble": Figure(
        "percent",
        "bubble",
        "part of the devices' time without an op, a stall of their own or bytes for them under way",
        26,
        of=_bubble,
    ),
    "exposed_ns": Figure(
        "time",
        "exposed communication",
        "waiting for other devices while bytes for the waiting one are under way, summed over devices",
        27,
        of=_exposed,
    ),
    "binding_device": Figure(
        "text", "binding device", "the one that computes longest, and the one that holds most", 28, of=_binding
    ),
    "stands_for": Figure(
        "number", "devices it stands for", "those of the trace, times the equal ranks of each", 61, of=_stands_for
    ),
    "fullest_bytes": Figure(
        "bytes",
        "peak of the fullest device",
        "as `peak_bytes`, under the name that studies of layouts gave it first",
        11,
        of=_fullest,
    ),
    "exchanged_bytes": Figure(
        "bytes",
        "exchanged",
        "bytes on the wire that the layout moves, whatever the policy: of collectives, and from stage to stage",
        62,
        of=_exchanged,
    ),
}
