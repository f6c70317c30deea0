"""What may be recomputed, and until when: the one answer for planners, online evictors and bounds.

An op can be recomputed while what it reads can still be had. What an op in place has overwritten can be had again only
by its producer, recomputed just before; a value without a producer is lost for good. A send or receive never runs
twice, and a collective only where all its members do: plans may see to that (`schedule_of`), one device alone may not
(`TraceIndex.communicating`).

The engine does not ask here: it replays what a plan says and refuses a read that nothing can bring back. The law in
`sim.conformance` has a rule of its own, too: it must not share what it checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.trace.graph import Trace
from sim.trace.kept import of_structure
from sim.trace.liveness import freeable, uses
from sim.trace.op import COMMUNICATION, KIND_CODE
from sim.trace.tensor import ROLE_CODE

Ints = NDArray[np.int64]

GRADIENT = ROLE_CODE["gradient"]


class TraceIndex:
    """A trace's reads and writes as lists, and which of its ops can be recomputed, until when.

    size: per tensor its bytes. workspace: per op the bytes of it.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.reads = trace.distinct_reads
        self.writes = trace.all_writes
        self.size: list[int] = trace.tensor_columns.bytes.tolist()
        self.workspace: list[int] = trace.op_columns.workspace.tolist()
        self.releases: Mapping[int, Sequence[int]] = trace.op_columns.releases

    @of_structure
    def replaces(self) -> list[int]:
        """Per tensor the value that it overwrites, -1 for none."""
        return _listed(self.trace.tensor_columns.replaces)

    @of_structure
    def producer(self) -> list[int]:
        """Per tensor the op that produces it, -1 for none."""
        return _listed(self.trace.producer)

    @of_structure
    def device(self) -> list[int]:
        """Per op its device."""
        return _listed(self.trace.op_columns.device)

    @of_structure
    def phase(self) -> list[int]:
        """Per op its phase."""
        return _listed(self.trace.op_columns.phase)

    @of_structure
    def kind(self) -> list[int]:
        """Per op its kind."""
        return _listed(self.trace.op_columns.kind)

    @of_structure
    def random(self) -> list[bool]:
        """Per op whether it draws random numbers."""
        return self.trace.op_columns.random.tolist()  # type: ignore[no-any-return]

    @of_structure
    def outputs(self) -> frozenset[int]:
        """The tensors that are kept to the end."""
        return frozenset(self.trace.outputs)

    @cached_property
    def counted_flops(self) -> list[int]:
        """Per op its FLOPs as PyTorch counts them."""
        return _listed(self.trace.counted_flops)

    @of_structure
    def role(self) -> list[int]:
        """Per tensor its role."""
        return _listed(self.trace.tensor_columns.role)

    @of_structure
    def released(self) -> list[int]:
        """Per tensor the op at whose end the program releases it, -1 where its last reader does."""
        return _listed(self.trace.released)

    @of_structure
    def unbound(self) -> list[int]:
        """Per tensor the op at whose end variables let go of it, -1 where not known."""
        return _listed(self.trace.unbound)

    @of_structure
    def overwritten_at(self) -> list[int]:
        """Per tensor the op that overwrites it; the number of ops where none does."""
        replaced = self.trace.replaced_by
        return _listed(np.where(replaced >= 0, self.trace.producer[replaced], len(self.reads)))

    @of_structure
    def overwritten(self) -> list[int]:
        """The tensors that an op overwrites."""
        return _listed(np.flatnonzero(self.trace.replaced_by >= 0))

    @of_structure
    def uses(self) -> list[int]:
        """Per tensor what keeps it from being freed: see `sim.trace.liveness`."""
        return _listed(uses(self.trace))

    @of_structure
    def freeable(self) -> list[bool]:
        """Per tensor whether it may be freed once nothing uses it."""
        return _listed(freeable(self.trace))

    @of_structure
    def read_rows(self) -> tuple[Ints, Ints]:
        """What each op reads as columns: per op its first entry, with their number at the end, and the entries."""
        return _rows(self.reads)

    @of_structure
    def write_rows(self) -> tuple[Ints, Ints]:
        """The same of what each op writes."""
        return _rows(self.writes)

    @of_structure
    def overwriting(self) -> set[int]:
        """Ops that overwrite a value in place, or produce one that is overwritten."""
        made = {self.producer[t] for t in self.overwritten}
        return {op for op in made if op >= 0} | {op for op in self.overwritten_at if op < len(self.reads)}

    @of_structure
    def received(self) -> set[int]:
        """Ops that can never be recomputed: members of a group that is not a collective (sends and receives)."""
        kind = self.trace.op_columns.kind
        return {op for op in self.trace.op_columns.group if kind[op] != KIND_CODE["collective"]}

    @of_structure
    def communicating(self) -> set[int]:
        """Ops that one device can't recompute on its own: of a group, or of a kind that has one."""
        c = self.trace.op_columns
        kinds = np.isin(c.kind, [KIND_CODE[kind] for kind in COMMUNICATION])
        return {*np.flatnonzero(kinds).tolist(), *c.group}

    @of_structure
    def gradient_ops(self) -> set[int]:
        """Ops that produce a weight gradient: where it stays once it is produced, they run once."""
        return {op for op, writes in enumerate(self.writes) if any(self.role[t] == GRADIENT for t in writes)}

    @of_structure
    def until(self) -> list[int]:
        """Per op the op from which on it can't be recomputed alone: 0 for never, since it writes in place or receives.

        For recomputation together with the producers of its inputs see `recomputable_until`.
        """
        last = []
        for op, reads in enumerate(self.reads):
            end = min((self.overwritten_at[t] for t in reads), default=len(self.reads))
            in_place = any(self.replaces[t] >= 0 for t in self.writes[op])
            last.append(0 if in_place or op in self.received else end)
        return last

    @of_structure
    def recomputable_until(self) -> list[int]:
        """Per op the op from which on nothing can recompute it, in whatever way; 0 for a receive."""
        return [*self.recomputable_among(range(len(self.reads))).values()]

    def recomputable_among(self, ops: Iterable[int]) -> dict[int, int]:
        """For some ops, in order, the op from which on they can't be recomputed by running only ops among them.

        A value that an op in place overwrites may be recomputed just before it; but an overwritten input is lost.
        """
        last = dict.fromkeys(ops, len(self.reads))  # but for those that receive, or read what is overwritten
        at, producer, losing = self.overwritten_at, self.producer, self._losing
        for op in losing if len(losing) < len(last) else sorted(last):
            if op in last and op in losing:
                last[op] = min([max(at[t], last.get(producer[t], 0)) for t in losing[op]], default=0)
        return last

    @of_structure
    def _losing(self) -> dict[int, list[int]]:
        """In order, the ops that read what is overwritten, with these tensors, and those that receive, with none."""
        found: dict[int, list[int]] = {op: [] for op in self.received}
        for t in self.overwritten:
            for reader in self.trace.readers(t):
                if reader not in self.received:
                    found.setdefault(reader, []).append(t)
        return dict(sorted(found.items()))

    @of_structure
    def recomputable_from_inputs(self) -> list[int]:
        """Per op the op from which on one device can't recompute it from what has no producer; 0 for never.

        What was received or reduced is no such input: once freed, only other devices could bring it back. So a tensor
        whose producer can still be recomputed at its last use may be dropped at any time before.
        """
        own: set[int] = set()
        for op, reads in enumerate(self.reads):
            if op not in self.communicating and all(self.producer[t] < 0 or self.producer[t] in own for t in reads):
                own.add(op)
        last = self.recomputable_among(sorted(own))
        return [last.get(op, 0) for op in range(len(self.reads))]

    @of_structure
    def stays_until(self) -> list[int]:
        """Per tensor without a producer the last op before which no plan may drop it, -1 where nothing reads it.

        That is its last reader or the op that overwrites it or, past all ops, the end where it is an output. For a
        tensor with a producer: -1, since it can be recomputed.
        """
        outputs, last = set(self.trace.outputs), []
        for t, producer in enumerate(self.producer):
            needed = max(self.trace.readers(t), default=-1)
            if self.overwritten_at[t] < len(self.reads):
                needed = self.overwritten_at[t]
            last.append(-1 if producer >= 0 else len(self.reads) if t in outputs else needed)
        return last

    @of_structure
    def first_device(self) -> dict[int, int]:
        """Per tensor without a producer the device of its first reader, 0 where nothing reads it."""
        first: dict[int, int] = {}
        for op, where in enumerate(self.device):
            for t in self.reads[op]:
                if self.producer[t] < 0:
                    first.setdefault(t, where)
        return {t: first.get(t, 0) for t, producer in enumerate(self.producer) if producer < 0}

    def starts_on(self, device: int | None) -> list[int]:
        """The tensors without a producer that count for a device, or for all."""
        return [t for t, first in self.first_device.items() if device is None or first == device]

    def can_recompute(self, op: int, anchor: int) -> bool:
        """Whether an op may be recomputed alone just before `anchor`: nothing that it reads has been overwritten."""
        return op < anchor <= self.until[op]

    def can_run_together(self, ops: Iterable[int], anchor: int) -> list[int]:
        """Of ops to be recomputed in this order just before `anchor` those that can be, given that the others are."""
        values = OverwriteTracker(self, anchor)
        possible = []
        for op in ops:
            if op < anchor and values.can_run(op):
                values.run(op)
                possible.append(op)
        return possible

    @of_structure
    def droppable(self) -> list[bool]:
        """Per tensor whether a plan may drop it: nothing overwrites it, and one device alone uses it (`freeable`).

        A weight gradient stays once it is produced, also where its op is recomputed for another of its results.
        """
        may = freeable(self.trace) & (self.trace.replaced_by < 0)
        may &= self.trace.tensor_columns.role != GRADIENT
        if self.trace.devices > 1:
            c = self.trace.op_columns
            low = np.full(len(may), np.iinfo(np.int32).max, np.int32)
            high = np.full(len(may), -1, np.int32)
            for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids)):
                device = np.repeat(c.device, np.diff(start))
                np.minimum.at(low, ids, device)
                np.maximum.at(high, ids, device)
            may &= low >= high
        return _listed(may)


def _listed(column: NDArray[Any]) -> list[Any]:
    values: list[Any] = column.tolist()
    return values


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=start[1:])
    return start, np.fromiter(chain.from_iterable(rows), np.int64, int(start[-1]))


class OverwriteTracker:
    """Which values are lost because they were overwritten, while ops run in order, first runs and recomputations.

    An op can be recomputed if none of its inputs is lost. One that writes in place overwrites on every run, so that it
    can be recomputed only after the producer of the value that it overwrites.

    op: the first op that has not run in its own place.
    """

    def __init__(self, index: TraceIndex, op: int = 0) -> None:
        self._index = index
        self._first = op
        self._since: dict[int, bool] = {}  # of what has been made or overwritten since, whether it is lost

    def can_run(self, op: int) -> bool:
        """Whether an op that has run may be recomputed now."""
        index, since, first = self._index, self._since, self._first
        if op in index.received:
            return False
        lost = [since[t] if t in since else index.overwritten_at[t] < first for t in index.reads[op]]
        return True not in lost

    def run(self, op: int) -> None:
        """An op runs: its results exist, and the values that it overwrites are lost."""
        index = self._index
        for t in index.writes[op]:
            self._since[t] = False
            if index.replaces[t] >= 0:
                self._since[index.replaces[t]] = True
