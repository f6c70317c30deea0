"""Recomputation schedules: what every offline recomputation plan comes down to.

A plan that only drops and recomputes says which ops are recomputed, and before which op of the trace. The drops
follow: a tensor is dropped after its last read before it is recomputed, and stays resident where nothing
recomputes it. So every such schedule is legal, and no other plan with the same recomputations that keeps weight
gradients, the tensors without a producer, and those that the program holds, needs less memory. A legal plan may drop
those, too, the tensors without a producer after their last read (`TraceIndex.stays_until`). The published systems do
not, nor do these policies, but bounds for all plans take it into account.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from sim.plan import Action, Drop, Recompute
from sim.solvers.residency import Residency
from sim.trace.columns import slots_of
from sim.trace.index import OverwriteTracker, TraceIndex
from sim.trace.op import KIND_CODE

__all__ = ["OverwriteTracker", "Reruns", "Schedule", "TraceIndex", "backward_slice", "schedule_of"]

Ints = NDArray[np.int64]

COLLECTIVE = KIND_CODE["collective"]

Reruns = Mapping[int, Sequence[int]]
"""Per op (the anchor) the ops that are recomputed before it, in order."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """A trace's ops in program order with some of them recomputed.

    ops, anchors: of each step in order; anchor -1 for the op in its own place, else the op before which it is
        recomputed.
    drops: per step the tensors that are dropped after it.
    hold: tensors that are not dropped before the end of a later op.
    once_recomputed: tensors that, if they are recomputed, are dropped for good at the end of an op.
    """

    index: TraceIndex
    ops: Ints
    anchors: Ints
    drops: Sequence[Sequence[int]]
    hold: Mapping[int, int] | None = None
    once_recomputed: Mapping[int, int] | None = None

    @cached_property
    def steps(self) -> list[tuple[int, int]]:
        """Op and anchor of each step."""
        return list(zip(self.ops.tolist(), self.anchors.tolist(), strict=True))

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
        residency = self.residency(device)
        return [residency.start, *residency.held.tolist()]

    def residency(self, device: int | None = None) -> Residency:
        """What a device holds or, as if they shared one memory, all."""
        key = device if self.index.trace.devices > 1 else None
        if key not in self._residencies:
            self._residencies[key] = Residency(self.index, self.ops, self.anchors, self.drops, key)
        return self._residencies[key]

    @cached_property
    def _residencies(self) -> dict[int | None, Residency]:
        return {}

    def rerun_count(self) -> int:
        """How many ops are recomputed."""
        return int((self.anchors >= 0).sum())


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
    if prune:
        kept = _wanted_again(index, ops, anchors)
        ops, anchors = ops[kept], anchors[kept]
    drops = _drops(index, ops, anchors)
    schedule = Schedule(index, ops, anchors, drops, hold, once_recomputed)
    if hold:
        _put_off(schedule.steps, drops, hold)
    if once_recomputed:
        _let_go(index, schedule.steps, drops, once_recomputed)
    return schedule


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


def _wanted_again(index: TraceIndex, ops: Ints, anchors: Ints) -> Ints:
    """The steps without recomputations of which nothing is read before it is produced once more, or at all."""
    start, ids = index.write_rows
    often = np.zeros(len(index.size), np.bool_)
    often[ids[slots_of(start, ops[anchors >= 0])]] = True  # all that matters here
    touched = np.zeros(len(index.reads), np.bool_)
    touched[ops[anchors >= 0]] = True
    for start, ids in (index.read_rows, index.write_rows):
        touched[np.repeat(np.arange(len(touched)), np.diff(start))[often[ids]]] = True
    touched[index.trace.released[often & (index.trace.released >= 0)]] = True
    is_kept = np.ones(len(ops), np.bool_)
    wanted = [False] * len(often)  # whether it is read after that, or released by the program
    comes_next = [False] * len(often)  # whether it is produced before that
    reads, writes, releases, group = index.reads, index.writes, index.releases, index.trace.op_columns.group
    steps = np.flatnonzero(touched[ops])[::-1]
    for step, op, anchor in zip(steps.tolist(), ops[steps].tolist(), anchors[steps].tolist(), strict=True):
        if anchor < 0:
            for t in releases.get(op, ()):
                wanted[t] = True
        elif op not in group and not any(wanted[t] and not comes_next[t] for t in writes[op]):
            is_kept[step] = False
            continue
        for t in writes[op]:
            comes_next[t] = wanted[t]
        for t in reads[op]:
            comes_next[t], wanted[t] = False, True
    return np.flatnonzero(is_kept)


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
