"""From which op to which each tensor is resident on a device when nothing leaves it: for planners that count ahead."""

from __future__ import annotations

from typing import NamedTuple

from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.liveness import freeable


class Span(NamedTuple):
    """The first and the last op during which a tensor is resident, by id."""

    first: int
    last: int


def spans(trace: Trace, device: int) -> dict[int, Span]:
    """Per tensor with bytes that an op of the device is the first to use, when it is resident; not to be changed.

    What has no producer is resident from the start; it and the outputs stay to the end. A tensor that is overwritten
    in place ends before the op that overwrites it.
    """
    return kept(trace, "spans", device, lambda: _spans(trace, device))


def _spans(trace: Trace, device: int) -> dict[int, Span]:
    dies, end, found = freeable(trace).tolist(), len(trace.ops) - 1, dict[int, Span]()
    producer, released, replaced_by = (
        column.tolist() for column in (trace.producer, trace.released, trace.replaced_by)
    )
    device_of = trace.op_columns.device.tolist()
    for t, size in enumerate(trace.tensor_columns.bytes.tolist()):
        users, produced = trace.readers(t), producer[t]
        first = produced if produced >= 0 else (users[0] if users else -1)
        if not size or first < 0 or device_of[first] != device:
            continue
        last = max((*users, first, released[t])) if dies[t] else end
        if replaced_by[t] >= 0:
            last = producer[replaced_by[t]] - 1
        found[t] = Span(first if produced >= 0 else 0, last)
    return found


def may_swap(trace: Trace, tensor: int, roles: tuple[int, ...]) -> bool:
    """Whether a tensor of these roles can leave between its uses, and one device sees the end of each of them.

    It has a producer and is not an output, and nothing overwrites it.
    """
    c = trace.op_columns
    ops = (int(trace.producer[tensor]), *trace.readers(tensor))
    return bool(
        ops[0] >= 0
        and len(ops) > 1
        and trace.tensor_columns.role[tensor] in roles
        and trace.tensor_columns.bytes[tensor]
        and trace.replaced_by[tensor] < 0
        and tensor not in trace.outputs
        and not any(op in c.engine or op in c.group or c.device[op] != c.device[ops[0]] for op in ops)
    )
