"""Recomputation schedules: what every offline recomputation plan comes down to.

A plan that only drops and recomputes says which ops are recomputed, and before which op of the trace. The drops
follow: a tensor is dropped after its last read before it is recomputed, and stays resident where nothing
recomputes it. So every such schedule is legal, and no other plan with the same recomputations that keeps weight
gradients, the tensors without a producer, and those that the program holds, needs less memory. A legal plan may drop
those, too, the tensors without a producer after their last read (`TraceIndex.stays_until`). The published systems do
not, nor do these policies, but bounds for all plans take it into account.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.plan import Action, Drop, Recompute
from sim.trace.columns import slots_of
from sim.trace.index import OverwriteTracker, TraceIndex
from sim.trace.liveness import LiveSet
from sim.trace.op import KIND_CODE

__all__ = ["OverwriteTracker", "Reruns", "Schedule", "Step", "TraceIndex", "backward_slice", "schedule_of"]

Ints = NDArray[np.int64]

COLLECTIVE = KIND_CODE["collective"]
NEVER, READ, PRODUCED = 0, 1, 2
"""What happens next to a tensor: nothing, a read, or a run of its producer."""

Reruns = Mapping[int, Sequence[int]]
"""Per op (the anchor) the ops that are recomputed before it, in order."""


class Step(NamedTuple):
    """What is live while one op of a schedule runs.

    held: the most bytes while it runs.
    missing: its results that were not live before, and are still to be read.
    freed: what is dropped or dead at its end.
    """

    held: int
    missing: Sequence[int]
    freed: Collection[int]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A trace's ops in program order with some of them recomputed.

    steps: (op, anchor) in order; anchor -1 for the op in its own place, else the op before which it is recomputed.
    drops: per step the tensors that are dropped after it.
    hold: tensors that are not dropped before the end of a later op.
    once_recomputed: tensors that, if they are recomputed, are dropped for good at the end of an op.
    """

    index: TraceIndex
    steps: Sequence[tuple[int, int]]
    drops: Sequence[Sequence[int]]
    hold: Mapping[int, int] | None = None
    once_recomputed: Mapping[int, int] | None = None

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
        starts = index.starts_on(device)
        if index.trace.devices > 1:
            return [sum(index.size[t] for t in starts), *(step.held for step in self.walk(device))]
        # planners ask this of one device for hundreds of schedules, so it has a loop of its own
        size, replaces, freeable, uses = index.size, index.replaces, index.freeable, list(index.uses)
        for op, anchor in self.steps:
            for t in index.reads[op] if anchor >= 0 else ():
                uses[t] += 1
        live = bytearray(len(size))
        for t in starts:
            live[t] = 1
        held = sum(size[t] for t in starts)
        peaks = [held]
        for (op, anchor), dropped in zip(self.steps, self.drops, strict=True):
            scratch, given_up, writes = index.workspace[op], 0, index.writes[op]
            for t in writes:
                old = replaces[t]
                if old >= 0 and live[old]:
                    live[old] = 0
                    given_up += size[t] if live[t] else 0
                elif live[t]:
                    scratch += size[t]
                else:
                    held += size[t]
                live[t] = 1
            peaks.append(held + scratch)
            held -= given_up
            used = index.reads[op]
            if anchor < 0 and op in index.releases:
                used = (*used, *index.releases[op])
            for t in used:
                uses[t] -= 1
            for t in (*used, *writes):
                if uses[t] <= 0 and live[t] and freeable[t]:
                    live[t] = 0
                    held -= size[t]
            for t in dropped:
                if live[t]:
                    live[t] = 0
                    held -= size[t]
        return peaks

    def walk(self, device: int | None = None) -> Iterator[Step]:
        """The steps one by one, on a device or, as if they shared one memory, on all."""
        index = self.index
        uses = list(index.uses)
        for op, anchor in self.steps:
            for t in index.reads[op] if anchor >= 0 else ():
                uses[t] += 1
        live = LiveSet(index.size, index.replaces, index.starts_on(device))
        for (op, anchor), dropped in zip(self.steps, self.drops, strict=True):
            here = device is None or index.device[op] == device
            reads, writes = (index.reads[op], index.writes[op]) if here else ((), ())
            missing = [t for t in writes if uses[t] and t not in live]
            held = live.run(writes, index.workspace[op] if here else 0)
            released = index.releases.get(op, ()) if anchor < 0 else ()
            for t in (*reads, *released):
                uses[t] -= 1
            freed = [t for t in (*reads, *writes, *released) if uses[t] <= 0 and index.freeable[t] and t in live]
            freed += [t for t in dropped if here and t in live]
            live.free(freed)
            yield Step(held, missing, freed)

    def rerun_count(self) -> int:
        """How many ops are recomputed."""
        return sum(anchor >= 0 for _, anchor in self.steps)


def schedule_of(
    index: TraceIndex,
    reruns: Reruns,
    *,
    prune: bool = False,
    hold: Mapping[int, int] | None = None,
    once_recomputed: Mapping[int, int] | None = None,
) -> Schedule:
    """The trace with ops recomputed before their anchors; ops that can't be are left out, and their results stay.

    An op that reads an overwritten value is recomputed only after the producer of that value (see
    `OverwriteTracker`). A collective is recomputed only where all members of its group do so, in the same order on
    all devices.

    reruns: per anchor the ops to recompute.
    prune: also leave out ops whose results are not read before they are recomputed once more, or at all; a result that
        the program still holds counts as read.
    hold: tensors that are not dropped before the end of a later op.
    once_recomputed: tensors that, if they are recomputed, are dropped at the end of an op where nothing reads them
        later, although the program holds what it computed first for longer.
    """
    legal = _possible(index, reruns)
    if (meeting := _meeting(index, legal)) is not legal:
        legal = _possible(index, meeting)
    ops, anchors = _in_order(len(index.reads), legal)
    kept, drops = list(zip(ops.tolist(), anchors.tolist(), strict=True)), list[list[int]]()
    if prune:
        kept, drops = _pruned(index, kept)
    else:
        drops = _drops(index, ops, anchors)
    if hold:
        _put_off(kept, drops, hold)
    if once_recomputed:
        _let_go(index, kept, drops, once_recomputed)
    return Schedule(index, kept, drops, hold, once_recomputed)


def _in_order(count: int, reruns: Mapping[int, Sequence[int]]) -> tuple[Ints, Ints]:
    """The steps of so many ops with recomputed ones before their anchors, as columns: op, and anchor or -1."""
    before = sorted(anchor for anchor in reruns if 0 <= anchor < count)
    anchor = np.repeat(np.array(before, np.int64), [len(reruns[each]) for each in before])
    recomputed = np.fromiter(chain.from_iterable(map(reruns.__getitem__, before)), np.int64, len(anchor))
    own = np.arange(count)
    place = own + np.searchsorted(anchor, own, "right")
    ops, anchors = np.empty(count + len(anchor), np.int64), np.full(count + len(anchor), -1)
    again = anchor + np.arange(len(anchor))
    ops[place], ops[again], anchors[again] = own, recomputed, anchor
    return ops, anchors


def _drops(index: TraceIndex, ops: Ints, anchors: Ints) -> list[list[int]]:
    """Per step the tensors that are dropped after it: what is recomputed next, and read or released after that."""
    start, ids = index.write_rows
    often = np.zeros(len(index.size), np.bool_)
    often[ids[slots_of(start, ops[anchors >= 0])]] = True  # nothing else is produced more than once
    often &= np.array(index.droppable, np.bool_)
    found = []
    for start, ids in (index.read_rows, index.write_rows):
        step, tensor = np.repeat(np.arange(len(ops)), np.diff(start)[ops]), ids[slots_of(start, ops)]
        chosen = often[tensor]
        found.append((step[chosen], tensor[chosen]))
    (step, tensor), reads = map(np.concatenate, zip(*found, strict=True)), len(found[0][0])
    last_read, released = np.full(len(often), -1), np.array(index.released)
    last_read[tensor[:reads]] = step[:reads]  # they are in order, and the last one stays
    last_release = np.where(released >= 0, np.flatnonzero(anchors < 0)[released], -1)
    order = np.lexsort((step, tensor))
    after = order[1:]
    is_wanted = (last_read[tensor[after]] > step[after]) | (last_release[tensor[after]] >= step[after])
    which = order[:-1][(tensor[order[:-1]] == tensor[after]) & (after >= reads) & is_wanted]
    which = which[np.lexsort((which, step[which]))]  # of one step what is read comes first
    drops: list[list[int]] = [[] for _ in range(len(ops))]
    for place, dropped in zip(step[which].tolist(), tensor[which].tolist(), strict=True):
        drops[place].append(dropped)
    return drops


def _pruned(index: TraceIndex, steps: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """The steps without recomputations of which nothing is read, and what is dropped after each."""
    coming = [NEVER] * len(index.size)
    wanted = [False] * len(index.size)  # whether it is read after that, or released by the program
    droppable, group = index.droppable, index.trace.op_columns.group
    kept: list[tuple[int, int]] = []
    drops: list[list[int]] = []
    all_reads, all_writes, releases = index.reads, index.writes, index.releases
    for op, anchor in reversed(steps):
        reads, writes = all_reads[op], all_writes[op]
        if anchor < 0 and op in releases:
            for t in releases[op]:
                wanted[t] = True
        may_skip = anchor >= 0 and op not in group
        if may_skip and all(coming[t] == PRODUCED or not wanted[t] for t in writes):
            continue
        kept.append((op, anchor))
        drops.append([t for t in (*reads, *writes) if coming[t] == PRODUCED and droppable[t]])
        for t in writes:
            coming[t] = PRODUCED if wanted[t] else NEVER
        for t in reads:
            coming[t], wanted[t] = READ, True
    return kept[::-1], drops[::-1]


def _put_off(steps: Sequence[tuple[int, int]], drops: Sequence[list[int]], hold: Mapping[int, int]) -> None:
    """Have what is held dropped after the op until whose end it is."""
    late: dict[int, list[int]] = {}
    for (op, anchor), dropped in zip(steps, drops, strict=True):
        if dropped:
            for t in [t for t in dropped if hold.get(t, -1) >= max(op + 1, anchor)]:
                dropped.remove(t)
                late.setdefault(hold[t], []).append(t)
        if late and anchor < 0:
            dropped += late.pop(op, ())


def _let_go(
    index: TraceIndex, steps: Sequence[tuple[int, int]], drops: Sequence[list[int]], ends: Mapping[int, int]
) -> None:
    """Have what was recomputed dropped at the end of an op, unless it is used or recomputed later."""
    recomputed: set[int] = set()
    last: dict[int, int] = {}
    for step, (op, anchor) in enumerate(steps):
        used = [t for t in (*index.reads[op], *index.writes[op]) if t in ends]
        last.update(dict.fromkeys(used, step))
        if anchor >= 0:
            recomputed.update(t for t in used if index.producer[t] == op)
    due: dict[int, list[int]] = {}
    for t in sorted(recomputed):
        if index.droppable[t] and index.released[t] > ends[t]:
            due.setdefault(ends[t], []).append(t)
    for step, ((op, anchor), dropped) in enumerate(zip(steps, drops, strict=True)):
        if anchor < 0 and op in due:
            dropped += [t for t in due[op] if last[t] <= step and t not in dropped]


def _possible(index: TraceIndex, reruns: Reruns) -> dict[int, list[int]]:
    """Leave out ops that have not run yet, and ops that read a lost value that has not been recomputed."""
    values = OverwriteTracker(index)
    possible: dict[int, list[int]] = {}
    # no other op loses a value or brings one back
    for op in sorted({op for op in reruns if 0 <= op < len(index.reads)} | index.overwriting):
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
    kind, order = index.trace.op_columns.kind, dict[int, list[str]]()
    members: dict[str, set[int]] = {}
    for op, name in group.items():
        members.setdefault(name, set()).add(index.device[op])
    for op in range(len(index.reads)):
        for one in (*reruns.get(op, ()), op):
            if one in group and kind[one] == COLLECTIVE:
                order.setdefault(index.device[one], []).append(group[one])
    for a, b in combinations(order, 2):
        shared = [[name for name in order[d] if a in members[name] and b in members[name]] for d in (a, b)]
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
