"""The bytes below which no plan gets that only drops and recomputes."""

from __future__ import annotations

from sim.solvers.moments import made_bytes
from sim.solvers.schedule import TraceIndex
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE


def least_bytes(index: TraceIndex) -> int:
    """Bytes below which no plan can stay that drops and recomputes on one device and keeps weight gradients.

    At the start all inputs are resident. While an op runs, resident are: its inputs and results, its
    workspace, inputs that are still to be read, and tensors that a later op reads and nothing can recompute until then.
    An input may be dropped after its last read. An output may be dropped and recomputed; at the end all are resident.
    """
    enters, leaves = _never_dropped(index)
    resident: set[int] = set()
    held = 0
    at_start = sum(index.size[t] for t, op in enumerate(index.producer) if op < 0)
    most = max(at_start, sum(index.size[t] for t in index.trace.outputs))
    for op, reads in enumerate(index.reads):
        new = enters.get(op, set()) - resident
        resident |= new
        held += sum(index.size[t] for t in new)
        read = sum(index.size[t] for t in reads if t not in resident)
        most = max(most, held + read + made_bytes(index, op))
        free = leaves.get(op, set()) & resident
        resident -= free
        held -= sum(index.size[t] for t in free)
    return most


def _never_dropped(index: TraceIndex) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Per op the tensors that have to be resident from it on, and those for which it is the last such op."""
    trace = index.trace
    update = trace.op_columns.phase == PHASE_CODE["update"]
    gradient = trace.tensor_columns.role == ROLE_CODE["gradient"]
    last, outputs, until = len(index.reads), set(trace.outputs), index.recomputable_until
    enters: dict[int, set[int]] = {}
    leaves: dict[int, set[int]] = {}
    for t, producer in enumerate(index.producer):
        readers = trace.readers(t)
        end = index.stays_until[t] if producer < 0 else last if t in outputs else max(readers, default=producer)
        if producer < 0:
            start = 0
        elif gradient[t] and (t in outputs or any(update[reader] for reader in readers)):
            start = producer + 1  # while the producer runs it counts what it makes
        else:
            start = max(producer + 1, until[producer])
        end = min(end, index.overwritten_at[t])
        if start <= end:
            enters.setdefault(start, set()).add(t)
            leaves.setdefault(end, set()).add(t)
    return enters, leaves
