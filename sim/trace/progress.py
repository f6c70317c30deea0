"""How far each device has certainly got when an op starts, however long ops take; and whether all devices finish."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.trace.columns import Graph


def reached_before(trace: Graph, ops: Iterable[int]) -> dict[int, list[int]]:
    """Per op and device: the last op (-1 for none) that the device has certainly reached when that op starts.

    A device waits for what an op reads, and for ops on its main engine to end. The members of a group end together,
    once all of them have their inputs. An op that has been reached holds its inputs until it ends.
    """
    c, producer = trace.op_columns, trace.producer.tolist()
    device, count = c.device.tolist(), len(c.name)
    reads = [trace.reads(op) for op in range(count)]
    members: dict[str, list[int]] = {}
    for op, name in c.group.items():
        members.setdefault(name, []).append(op)
    ended: list[list[int] | None] = [None] * count
    ready: list[list[int]] = [[]] * count  # progress of each device when an op has its inputs
    changed = True
    while changed:  # a second pass only where a member of a group comes after an op that waits for another member
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


def blocked(trace: Graph) -> list[tuple[int, int, int, int]]:
    """A cycle of ops that wait for each other, empty where every device finishes.

    Each entry is (op, tensor, producer or reader, member): the op does not start before that member of a group is
    reached, because it reads the tensor, which the group produces, or overwrites it in place while the group reads or
    produces it. The next op in the list is on the member's device, at or before the member.
    """
    c, producer = trace.op_columns, trace.producer.tolist()
    if not c.group or _runs_in_order(trace):
        return []
    device = c.device.tolist()
    members: dict[str, list[int]] = {}
    for op, name in sorted(c.group.items()):
        members.setdefault(name, []).append(op)
    missing = {name: set(ops) for name, ops in members.items()}
    order: list[list[int]] = [[] for _ in range(trace.devices)]
    for op in range(len(c.name)):
        order[device[op]].append(op)
    reads, writes = _lists(c.read_start, c.read_ids), _lists(c.write_start, c.write_ids)
    replaces = trace.tensor_columns.replaces.tolist()
    position = [0] * trace.devices
    started = [False] * len(c.name)

    def awaited(op: int) -> tuple[int, int] | None:
        """(tensor, op that produces or reads it) for the first op that must end before `op` starts and has not."""
        for t in reads[op]:
            p = producer[t]
            if p >= 0 and (not started[p] or missing.get(c.group.get(p, ""))):
                return t, p
        for t in writes[op]:
            old = replaces[t]
            for other in () if old < 0 else (producer[old], *trace.readers(old)):
                if 0 <= other < op and missing.get(
                    c.group.get(other, "")
                ):  # on another device it has certainly been reached
                    return old, other
        return None

    progressed = True
    while progressed:
        progressed = False
        for d, ops in enumerate(order):
            while position[d] < len(ops) and awaited(ops[position[d]]) is None:
                op = ops[position[d]]
                started[op] = progressed = True
                if op in c.group:
                    missing[c.group[op]].discard(op)
                position[d] += 1
    stuck = next((d for d, ops in enumerate(order) if position[d] < len(ops)), -1)
    chain: dict[int, tuple[int, int, int, int]] = {}
    while stuck >= 0 and stuck not in chain:
        op = order[stuck][position[stuck]]
        tensor, other = awaited(op) or (-1, -1)
        member = min(missing.get(c.group.get(other, "")) or {other})
        chain[stuck] = op, tensor, other, member
        stuck = device[member]
    return list(chain.values())[list(chain).index(stuck) :] if chain else []


def _runs_in_order(trace: Graph) -> bool:
    """Whether no op waits where all devices together walk in program order: then no cycle is possible.

    That is so where each op comes after all members of the groups that it waits for. Most traces are written like this.
    """
    c = trace.op_columns
    ends = np.arange(len(c.name) + 1)  # per op where the last member of its group stands; no producer is the last entry
    ends[-1] = -1
    last: dict[str, int] = {}
    for op, name in c.group.items():
        last[name] = max(last.get(name, -1), op)
    ends[list(c.group)] = [last[name] for name in c.group.values()]
    reader = np.repeat(np.arange(len(c.name)), np.diff(c.read_start))
    if (ends[trace.producer[c.read_ids]] >= reader).any():
        return False
    # what overwrites a tensor in place comes after what reads and produces it before
    over = np.append(trace.producer, -1)[trace.replaced_by]
    overwriter = over[c.read_ids]
    if ((reader < overwriter) & (ends[reader] >= overwriter)).any():
        return False
    return not ((trace.producer < over) & (ends[trace.producer] >= over)).any()


def _lists(start: NDArray[np.int64], ids: NDArray[np.int32]) -> list[list[int]]:
    """Per op the ids of its tensors."""
    ends, every = start.tolist(), ids.tolist()
    return [every[a:b] for a, b in pairwise(ends)]


def _join(known: list[int], more: list[int] | None) -> None:
    for device, op in enumerate(more or ()):
        known[device] = max(known[device], op)
