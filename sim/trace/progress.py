"""How far every device has surely come when an op starts, whatever each op takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.trace.graph import Trace


def reached_before(trace: Trace, ops: Iterable[int]) -> dict[int, list[int]]:
    """Per op, for each device the last op (-1 for none) that it has surely reached when that op starts.

    A device waits for what an op reads, and for the end of what runs on its main engine. The members of a group
    end together, once all have what they read. An op that is reached holds what it reads until it has ended.
    """
    c, producer = trace.op_columns, trace.producer.tolist()
    device, count = c.device.tolist(), len(c.name)
    reads = [trace.reads(op) for op in range(count)]
    members: dict[str, list[int]] = {}
    for op, name in c.group.items():
        members.setdefault(name, []).append(op)
    ended: list[list[int] | None] = [None] * count
    ready: list[list[int]] = [[]] * count  # when an op has what it reads
    changed = True
    while changed:  # once more only where a member of a group stands behind what waits for another
        changed = False
        known = [[-1] * trace.devices for _ in range(trace.devices)]
        for op in range(count):
            mine = known[device[op]]
            mine[device[op]] = op
            for tensor in reads[op]:
                _join(mine, ended[producer[tensor]] if producer[tensor] >= 0 else None)
            if ready[op] != mine:
                ready[op] = list(mine)
                changed = bool(members)
            end = list(mine)
            for member in members.get(c.group.get(op, ""), ()):
                _join(end, ready[member])
            ended[op] = end
    return {op: ready[op] for op in ops}


def _join(known: list[int], more: list[int] | None) -> None:
    for device, op in enumerate(more or ()):
        known[device] = max(known[device], op)
