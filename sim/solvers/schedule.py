"""Recomputation schedules: what every offline recomputation plan comes down to.

A plan that only drops and recomputes says which ops are recomputed, and before which op of the trace. The drops
follow: a tensor is dropped after its last read before it is recomputed, and stays resident where nothing
recomputes it. So every such schedule is legal, and no other plan with the same recomputations that keeps the
tensors without a producer, and those that the program holds, needs less memory. A legal plan may drop those, too,
after their last read (`TraceIndex.stays_until`). The published systems do not, nor do these policies, but bounds for
all plans take it into account.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from sim.plan import Action, Drop, Recompute
from sim.trace.graph import Trace

NEVER, READ, PRODUCED = 0, 1, 2
"""What happens next to a tensor: nothing, a read, or a run of its producer."""

Reruns = Mapping[int, Sequence[int]]
"""Per op (the anchor) the ops that are recomputed before it, in order."""


class TraceIndex:
    """A trace's reads and writes as lists, and which of its ops can be recomputed, until when."""

    def __init__(self, trace: Trace) -> None:
        c = trace.op_columns
        self.trace = trace
        self.reads = [tuple(dict.fromkeys(row)) for row in _rows(c.read_start.tolist(), c.read_ids.tolist())]
        self.writes = _rows(c.write_start.tolist(), c.write_ids.tolist())
        self.size: list[int] = trace.tensor_columns.bytes.tolist()
        self.workspace: list[int] = c.workspace.tolist()
        self.replaces: list[int] = trace.tensor_columns.replaces.tolist()
        self.producer: list[int] = trace.producer.tolist()
        self.device: list[int] = c.device.tolist()
        self.phase: list[int] = c.phase.tolist()
        self.role: list[int] = trace.tensor_columns.role.tolist()
        self.releases: Mapping[int, Sequence[int]] = c.releases
        self.released: list[int] = trace.released.tolist()
        # per tensor the op that overwrites it; the number of ops where none does
        replaced = trace.replaced_by
        self.overwritten_at: list[int] = np.where(replaced >= 0, trace.producer[replaced], len(c.name)).tolist()
        self.overwritten: list[int] = np.flatnonzero(replaced >= 0).tolist()

    @cached_property
    def received(self) -> set[int]:
        """Ops that can never be recomputed: members of a group that is not a collective (sends and receives)."""
        kinds = self.trace.ops
        return {op for op in self.trace.op_columns.group if kinds[op].kind != "collective"}

    @cached_property
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

    @cached_property
    def recomputable_until(self) -> list[int]:
        """Per op the op from which on nothing can recompute it, in whatever way; 0 for a receive."""
        return [*self.recomputable_among(range(len(self.reads))).values()]

    def recomputable_among(self, ops: Iterable[int]) -> dict[int, int]:
        """For some ops, in order, the op from which on they can't be recomputed by running only ops among them.

        A value that an op in place overwrites may be recomputed just before it; but an overwritten input is lost.
        """
        last: dict[int, int] = {}
        for op in ops:
            ends = [max(self.overwritten_at[t], last.get(self.producer[t], 0)) for t in self.reads[op]]
            last[op] = 0 if op in self.received else min(ends, default=len(self.reads))
        return last

    @cached_property
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

    @cached_property
    def droppable(self) -> list[bool]:
        """Per tensor whether a plan may drop it: it has a producer, is not an output, and one device alone uses it."""
        may = np.array(self.producer) >= 0
        may[list(self.trace.outputs)] = False
        may[self.trace.replaced_by >= 0] = False
        if self.trace.devices > 1:
            c = self.trace.op_columns
            low = np.full(len(may), np.iinfo(np.int32).max, np.int32)
            high = np.full(len(may), -1, np.int32)
            for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids)):
                device = np.repeat(c.device, np.diff(start))
                np.minimum.at(low, ids, device)
                np.maximum.at(high, ids, device)
            may &= low >= high
        droppable: list[bool] = may.tolist()
        return droppable


class OverwriteTracker:
    """Which values are lost because they were overwritten, while ops run in order, first runs and recomputations.

    An op can be recomputed if none of its inputs is lost. One that writes in place overwrites on every run, so that it
    can be recomputed only after the producer of the value that it overwrites.

    op: the first op that has not run in its own place.
    """

    def __init__(self, index: TraceIndex, op: int = 0) -> None:
        self._index = index
        self.lost = {t for t in index.overwritten if index.overwritten_at[t] < op}

    def can_run(self, op: int) -> bool:
        """Whether an op that has run may be recomputed now."""
        return op not in self._index.received and self.lost.isdisjoint(self._index.reads[op])

    def run(self, op: int) -> None:
        """An op runs: its results exist, and the values that it overwrites are lost."""
        index = self._index
        for t in index.writes[op]:
            self.lost.discard(t)
            if index.replaces[t] >= 0:
                self.lost.add(index.replaces[t])


@dataclass(frozen=True, eq=False)
class Schedule:
    """A trace's ops in program order with some of them recomputed.

    steps: (op, anchor) in order; anchor -1 for the op in its own place, else the op before which it is recomputed.
    drops: per step the tensors that are dropped after it.
    hold: tensors that are not dropped before the end of a later op.
    """

    index: TraceIndex
    steps: Sequence[tuple[int, int]]
    drops: Sequence[Sequence[int]]
    hold: Mapping[int, int] | None = None

    def actions(self) -> tuple[Action, ...]:
        """The drops and recomputations, anchored, in order."""
        actions: list[Action] = []
        for (op, anchor), dropped in zip(self.steps, self.drops, strict=True):
            if anchor < 0:
                actions += [Drop(t, after=op) for t in dropped]
            else:
                actions.append(Recompute(op, before=anchor))
                actions += [Drop(t, before=anchor) for t in dropped]
        return tuple(actions)

    def peak(self, device: int = 0) -> int:
        """The most bytes resident on a device when its ops run one by one and nothing is offloaded.

        A tensor that exists from the start and is used on several devices counts where it is first used.
        """
        return max(self.peaks(device))

    def peaks(self, device: int = 0) -> list[int]:
        """Bytes resident on a device at the start, then per step the most while that step runs, as in `peak`."""
        index = self.index
        size, replaces, producer = index.size, index.replaces, index.producer
        uses = (index.trace.released >= 0).astype(int).tolist()  # what the program holds counts as used
        for op, _ in self.steps:
            for t in index.reads[op]:
                uses[t] += 1
        kept = set(self.index.trace.outputs)
        here = self._starts_on(device)
        live: set[int] = set(here)
        held = sum(size[t] for t in here)
        peaks = [held]
        for (op, anchor), dropped in zip(self.steps, self.drops, strict=True):
            reads, writes = (index.reads[op], index.writes[op]) if index.device[op] == device else ((), ())
            scratch, given_up = index.workspace[op] if index.device[op] == device else 0, 0
            for t in writes:
                if replaces[t] in live:
                    live.discard(replaces[t])
                    given_up += size[t] if t in live else 0
                elif t in live:
                    scratch += size[t]
                else:
                    held += size[t]
                live.add(t)
            peaks.append(held + scratch)
            held -= given_up
            released = index.releases.get(op, ()) if anchor < 0 else ()
            for t in dropped if index.device[op] == device else ():
                if t in live:
                    live.discard(t)
                    held -= size[t]
            for t in (*reads, *released):
                uses[t] -= 1
            for t in (*reads, *writes, *released):
                if uses[t] <= 0 and t in live and producer[t] >= 0 and t not in kept:
                    live.discard(t)
                    held -= size[t]
        return peaks

    def _starts_on(self, device: int) -> list[int]:
        first: dict[int, int] = {}
        for op, where in enumerate(self.index.device):
            for t in self.index.reads[op]:
                if self.index.producer[t] < 0:
                    first.setdefault(t, where)
        return [t for t, producer in enumerate(self.index.producer) if producer < 0 and first.get(t, 0) == device]

    def rerun_count(self) -> int:
        """How many ops are recomputed."""
        return sum(anchor >= 0 for _, anchor in self.steps)


def schedule_of(
    index: TraceIndex, reruns: Reruns, *, prune: bool = False, hold: Mapping[int, int] | None = None
) -> Schedule:
    """The trace with ops recomputed before their anchors; ops that can't be are left out, and their results stay.

    An op that reads an overwritten value is recomputed only after the producer of that value (see
    `OverwriteTracker`). A collective is recomputed only where all members of its group do so, in the same order on
    all devices.

    reruns: per anchor the ops to recompute.
    prune: also leave out ops whose results are not read before they are recomputed once more, or at all; a result that
        the program still holds counts as read.
    hold: tensors that are not dropped before the end of a later op.
    """
    legal = _possible(index, reruns)
    if (meeting := _meeting(index, legal)) is not legal:
        legal = _possible(index, meeting)
    steps: list[tuple[int, int]] = []
    for op in range(len(index.reads)):
        steps += [(earlier, op) for earlier in legal.get(op, ())]
        steps.append((op, -1))
    coming = [NEVER] * len(index.size)
    wanted = [False] * len(index.size)  # whether it is read after that, or released by the program
    droppable, group = index.droppable, index.trace.op_columns.group
    kept: list[tuple[int, int]] = []
    drops: list[list[int]] = []
    for op, anchor in reversed(steps):
        reads, writes = index.reads[op], index.writes[op]
        for t in index.releases.get(op, ()) if anchor < 0 else ():
            wanted[t] = True
        may_skip = prune and anchor >= 0 and op not in group
        if may_skip and all(coming[t] == PRODUCED or not wanted[t] for t in writes):
            continue
        kept.append((op, anchor))
        drops.append([t for t in (*reads, *writes) if coming[t] == PRODUCED and droppable[t]])
        for t in writes:
            coming[t] = PRODUCED if wanted[t] else NEVER
        for t in reads:
            coming[t], wanted[t] = READ, True
    kept.reverse()
    drops.reverse()
    late: dict[int, list[int]] = {}
    for (op, anchor), dropped in zip(kept, drops, strict=True):
        for t in [t for t in dropped if hold and hold.get(t, -1) >= max(op + 1, anchor)]:
            dropped.remove(t)
            late.setdefault(hold[t], []).append(t)  # type: ignore[index]
        if anchor < 0:
            dropped += late.pop(op, ())
    return Schedule(index, kept, drops, hold)


def _possible(index: TraceIndex, reruns: Reruns) -> dict[int, list[int]]:
    """Leave out ops that have not run yet, and ops that read a lost value that has not been recomputed."""
    values = OverwriteTracker(index)
    possible: dict[int, list[int]] = {}
    for op in range(len(index.reads)):
        for earlier in reruns.get(op, ()):
            if earlier < op and values.can_run(earlier):
                values.run(earlier)
                possible.setdefault(op, []).append(earlier)
        values.run(op)
    return possible


def _meeting(index: TraceIndex, reruns: dict[int, list[int]]) -> dict[int, list[int]]:
    """Leave out collectives that some members would not join, or would join in another order."""
    group = index.trace.op_columns.group
    if not group or not any(op in group for ops in reruns.values() for op in ops):
        return reruns
    order: dict[int, list[str]] = {}
    members: dict[str, set[int]] = {}
    for op, name in group.items():
        members.setdefault(name, set()).add(index.device[op])
    for op in range(len(index.reads)):
        for one in (*reruns.get(op, ()), op):
            if one in group and index.trace.ops[one].kind == "collective":
                order.setdefault(index.device[one], []).append(group[one])
    for a in order:
        for b in order:
            shared = [[name for name in order[d] if {a, b} <= members[name]] for d in (a, b)]
            if shared[0] != shared[1]:
                return {anchor: [op for op in ops if op not in group] for anchor, ops in reruns.items()}
    return reruns


def backward_slice(
    index: TraceIndex, ops: Sequence[int], wanted: Iterable[int], there: Collection[int] = ()
) -> list[int]:
    """Of some ops in order those that the wanted tensors depend on; those in `there` are resident already."""
    missing, found = set(wanted), []
    for op in reversed(ops):
        if not missing.isdisjoint(index.writes[op]):
            found.append(op)
            missing.update(t for t in index.reads[op] if t not in there)
    return found[::-1]


def _rows(start: list[int], ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[a:b]) for a, b in pairwise(start)]
