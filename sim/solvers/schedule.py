"""Orders of runs: what every offline recomputation plan comes down to.

A plan that only drops and recomputes says which ops run again, and before which op of the trace. All
else follows: a tensor goes after the last read before it is made again, and stays where nobody makes
it again. So any such order is legal, and no other plan with the same runs holds less that keeps what has no
producer and what the program holds. A legal plan may drop both, too, after the last read
(`TraceIndex.stays_until`); the published systems do not, and neither do these, but bounds for all plans count it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from sim.plan import Action, Drop, Recompute
from sim.trace.graph import Trace

NEVER, READ, MADE = 0, 1, 2

Reruns = Mapping[int, Sequence[int]]
"""Before which op (the anchor) which ops run again, in order."""


class TraceIndex:
    """A trace's reads and writes as lists, and which of its ops can run again, until when."""

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
        # the op that overwrites a tensor; later than all ops where none does
        replaced = trace.replaced_by
        self.overwritten_at: list[int] = np.where(replaced >= 0, trace.producer[replaced], len(c.name)).tolist()
        self.overwritten: list[int] = np.flatnonzero(replaced >= 0).tolist()

    @cached_property
    def received(self) -> set[int]:
        """Ops that can never run again: a part of a group that is no collective."""
        kinds = self.trace.ops
        return {op for op in self.trace.op_columns.group if kinds[op].kind != "collective"}

    @cached_property
    def until(self) -> list[int]:
        """Per op the op from which on it can't run again alone: 0 for never, because it writes in place or receives.

        For what runs again together with what makes its reads see `recomputable_until`.
        """
        last = []
        for op, reads in enumerate(self.reads):
            at = min((self.overwritten_at[t] for t in reads), default=len(self.reads))
            in_place = any(self.replaces[t] >= 0 for t in self.writes[op])
            last.append(0 if in_place or op in self.received else at)
        return last

    @cached_property
    def recomputable_until(self) -> list[int]:
        """Per op the op from which on nothing can recompute it, in whatever way; 0 for what is received."""
        return [*self.recomputable_among(range(len(self.reads))).values()]

    def recomputable_among(self, ops: Iterable[int]) -> dict[int, int]:
        """For some ops, in order, the op from which on they can't be recomputed by running only ops among them.

        What an op in place overwrites may be recomputed just before it; but an input that is overwritten is gone.
        """
        last: dict[int, int] = {}
        for op in ops:
            ends = [max(self.overwritten_at[t], last.get(self.producer[t], 0)) for t in self.reads[op]]
            last[op] = 0 if op in self.received else min(ends, default=len(self.reads))
        return last

    @cached_property
    def stays_until(self) -> list[int]:
        """Per tensor without a producer the last op before which no plan may drop it, -1 where nothing reads it.

        That is its last reader or what overwrites it, or, past all ops, the end where it is an output. For a
        tensor that an op makes: -1, since it can be made again.
        """
        outputs, last = set(self.trace.outputs), []
        for t, maker in enumerate(self.producer):
            needed = max(self.trace.readers(t), default=-1)
            if self.overwritten_at[t] < len(self.reads):
                needed = self.overwritten_at[t]
            last.append(-1 if maker >= 0 else len(self.reads) if t in outputs else needed)
        return last

    def can_recompute(self, op: int, anchor: int) -> bool:
        """Whether an op may run again alone just before `anchor`: all that it read is still what it was."""
        return op < anchor <= self.until[op]

    def can_run_together(self, ops: Iterable[int], anchor: int) -> list[int]:
        """Of ops that run again in this order just before `anchor` those that can, given that the others do."""
        values = OverwriteTracker(self, anchor)
        found = []
        for op in ops:
            if op < anchor and values.can_run(op):
                values.run(op)
                found.append(op)
        return found

    @cached_property
    def droppable(self) -> list[bool]:
        """Per tensor whether a plan may drop it: made by an op, no output, and touched by one device alone."""
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
        found: list[bool] = may.tolist()
        return found


class OverwriteTracker:
    """Which values are gone because they were overwritten, while ops run one after another: the first ones and reruns.

    An op can run again if none of its reads is gone. One that writes in place overwrites on every run, so that it
    can run again only after what makes the value that it overwrites. at: how many ops have run in their own place.
    """

    def __init__(self, index: TraceIndex, at: int = 0) -> None:
        self._index = index
        self.gone = {t for t in index.overwritten if index.overwritten_at[t] < at}

    def can_run(self, op: int) -> bool:
        """Whether an op that has run may run again now."""
        return op not in self._index.received and self.gone.isdisjoint(self._index.reads[op])

    def run(self, op: int) -> None:
        """An op runs: its results are there, and what it overwrites is gone."""
        index = self._index
        for t in index.writes[op]:
            self.gone.discard(t)
            if index.replaces[t] >= 0:
                self.gone.add(index.replaces[t])


@dataclass(frozen=True, eq=False)
class Schedule:
    """A trace's ops in program order with some of them run again.

    steps: (op, anchor) in order; anchor -1 for the op in its own place, else the op before which it runs
    again. drops: per step the tensors that go after it. hold: tensors that do not go before the end of a later op.
    """

    index: TraceIndex
    steps: Sequence[tuple[int, int]]
    drops: Sequence[Sequence[int]]
    hold: Mapping[int, int] | None = None

    def actions(self) -> tuple[Action, ...]:
        """The drops and recomputations, anchored, in order."""
        found: list[Action] = []
        for (op, anchor), gone in zip(self.steps, self.drops, strict=True):
            if anchor < 0:
                found += [Drop(t, after=op) for t in gone]
            else:
                found.append(Recompute(op, before=anchor))
                found += [Drop(t, before=anchor) for t in gone]
        return tuple(found)

    def peak(self, device: int = 0) -> int:
        """The most bytes that a device holds when its ops run one by one and nothing moves.

        What is there from the start and any device touches counts where it is first touched.
        """
        return max(self.peaks(device))

    def peaks(self, device: int = 0) -> list[int]:
        """What a device holds at the start, then per step the most while that step runs, as in `peak`."""
        index = self.index
        size, replaces, producer = index.size, index.replaces, index.producer
        uses = (index.trace.released >= 0).astype(int).tolist()  # what the program holds it uses
        for op, _ in self.steps:
            for t in index.reads[op]:
                uses[t] += 1
        kept = set(self.index.trace.outputs)
        here = self._starts_on(device)
        live: set[int] = set(here)
        held = sum(size[t] for t in here)
        found = [held]
        for (op, anchor), gone in zip(self.steps, self.drops, strict=True):
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
            found.append(held + scratch)
            held -= given_up
            released = index.releases.get(op, ()) if anchor < 0 else ()
            for t in gone if index.device[op] == device else ():
                if t in live:
                    live.discard(t)
                    held -= size[t]
            for t in (*reads, *released):
                uses[t] -= 1
            for t in (*reads, *writes, *released):
                if uses[t] <= 0 and t in live and producer[t] >= 0 and t not in kept:
                    live.discard(t)
                    held -= size[t]
        return found

    def _starts_on(self, device: int) -> list[int]:
        first: dict[int, int] = {}
        for op, where in enumerate(self.index.device):
            for t in self.index.reads[op]:
                if self.index.producer[t] < 0:
                    first.setdefault(t, where)
        return [t for t, maker in enumerate(self.index.producer) if maker < 0 and first.get(t, 0) == device]

    def rerun_count(self) -> int:
        """How many ops run again."""
        return sum(anchor >= 0 for _, anchor in self.steps)


def schedule_of(
    index: TraceIndex, reruns: Reruns, *, prune: bool = False, hold: Mapping[int, int] | None = None
) -> Schedule:
    """The trace with ops run again before their anchors; ops that can't are left out, and what they make stays.

    An op that reads what has been overwritten runs again only after what makes that value (see `Values`). A
    collective runs again only where all members of its group do, in the same order on all devices.
    prune: leave out, too, what nobody would read before it is made once more, or at all; what the program still
    holds then is wanted as if it were read. hold: tensors that do not go before the end of a later op.
    """
    legal = _possible(index, reruns)
    if (meeting := _meeting(index, legal)) is not legal:
        legal = _possible(index, meeting)
    steps: list[tuple[int, int]] = []
    for op in range(len(index.reads)):
        steps += [(one, op) for one in legal.get(op, ())]
        steps.append((op, -1))
    coming = [NEVER] * len(index.size)
    wanted = [False] * len(index.size)  # whether it is read after that, or let go by the program
    droppable, group = index.droppable, index.trace.op_columns.group
    kept: list[tuple[int, int]] = []
    drops: list[list[int]] = []
    for op, anchor in reversed(steps):
        reads, writes = index.reads[op], index.writes[op]
        for t in index.releases.get(op, ()) if anchor < 0 else ():
            wanted[t] = True
        may_skip = prune and anchor >= 0 and op not in group
        if may_skip and all(coming[t] == MADE or not wanted[t] for t in writes):
            continue
        kept.append((op, anchor))
        drops.append([t for t in (*reads, *writes) if coming[t] == MADE and droppable[t]])
        for t in writes:
            coming[t] = MADE if wanted[t] else NEVER
        for t in reads:
            coming[t], wanted[t] = READ, True
    kept.reverse()
    drops.reverse()
    late: dict[int, list[int]] = {}
    for (op, anchor), gone in zip(kept, drops, strict=True):
        for t in [t for t in gone if hold and hold.get(t, -1) >= max(op + 1, anchor)]:
            gone.remove(t)
            late.setdefault(hold[t], []).append(t)  # type: ignore[index]
        if anchor < 0:
            gone += late.pop(op, ())
    return Schedule(index, kept, drops, hold)


def _possible(index: TraceIndex, reruns: Reruns) -> dict[int, list[int]]:
    """Without reruns of what has not run, and of what reads an overwritten value that is not there again."""
    values = OverwriteTracker(index)
    found: dict[int, list[int]] = {}
    for op in range(len(index.reads)):
        for one in reruns.get(op, ()):
            if one < op and values.can_run(one):
                values.run(one)
                found.setdefault(op, []).append(one)
        values.run(op)
    return found


def _meeting(index: TraceIndex, reruns: dict[int, list[int]]) -> dict[int, list[int]]:
    """Without the collectives that not all members would join, or in another order."""
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
    """Of some ops in order those that are needed, directly or not, to make the wanted tensors; `there` lie there."""
    missing, found = set(wanted), []
    for op in reversed(ops):
        if not missing.isdisjoint(index.writes[op]):
            found.append(op)
            missing.update(t for t in index.reads[op] if t not in there)
    return found[::-1]


def _rows(start: list[int], ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[a:b]) for a, b in pairwise(start)]
