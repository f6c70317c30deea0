"""What is resident while a schedule's ops run one by one and nothing is offloaded.

Whether a tensor is live depends on the last thing that happened to it alone: it was produced, overwritten, freed after
its last use, or dropped. So all events are sorted by tensor and time at once, and no step is walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sim.trace.columns import slots_of
from sim.trace.index import TraceIndex
from sim.trace.liveness import freeable

Ints = NDArray[np.int64]


class Residency:
    """What a device holds, or, for None, all of them as if they shared one memory.

    start: bytes of the tensors without a producer. held: per step the most bytes while it runs.
    """

    def __init__(
        self, index: TraceIndex, ops: Ints, anchors: Ints, drops: Sequence[Sequence[int]], device: int | None
    ) -> None:
        """ops, anchors: of each step; see `Schedule.steps`. drops: per step the tensors that are dropped after it."""
        size, starts = np.array(index.size, np.int64), index.starts_on(device)
        is_here = np.ones(len(ops), np.bool_)
        if device is not None and index.trace.devices > 1:
            is_here = index.trace.op_columns.device[ops] == device
        made_at, made = _entries(index.write_rows, ops, is_here)
        replaces = index.trace.tensor_columns.replaces[made]
        self._last, may_end = _last_uses(index, ops, anchors, is_here)

        # events: what results overwrite, results, what dies with its last use or unread, what is dropped
        lost = np.flatnonzero(replaces >= 0)
        dies = np.flatnonzero(may_end & (self._last >= 0))
        unread = np.flatnonzero(may_end[made] & (self._last[made] < made_at))
        dropped_at = np.repeat(np.arange(len(ops)), np.fromiter(map(len, drops), np.int64, len(drops)))
        dropped = np.fromiter(chain.from_iterable(drops), np.int64, len(dropped_at))
        dropped_at, dropped = dropped_at[is_here[dropped_at]], dropped[is_here[dropped_at]]
        parts = made_at[lost], made_at, self._last[dies], made_at[unread], dropped_at
        step = np.concatenate(parts)
        tensor: Ints = np.concatenate((replaces[lost], made, dies, made[unread], dropped))
        kind = np.repeat(np.arange(5), [len(part) for part in parts])
        # results of a step come one after the other, each after what it overwrites
        place = 2 * (np.arange(len(made)) + made_at)
        end = 2 * (np.bincount(made_at, minlength=len(ops)).cumsum() + np.arange(len(ops)))
        time = np.concatenate(
            (place[lost], place + 1, end[self._last[dies]], end[made_at[unread]], end[dropped_at] + 1)
        )
        bytes = size[tensor]
        bytes[: len(lost)] = size[made[lost]]  # the storage is taken over

        order = np.argsort(tensor * (2 * (len(made) + len(ops)) + 2) + time, kind="stable")
        kind, bytes = kind[order], bytes[order]
        comes, ends = kind == 1, kind > 1
        self._step: Ints = step[order]
        self._tensor: Ints = tensor[order]
        was_live = np.zeros(len(order), np.bool_)
        was_live[1:] = comes[:-1]
        first = np.flatnonzero(np.diff(self._tensor, prepend=-1))
        at_start = np.zeros(len(size), np.bool_)
        at_start[starts] = True
        was_live[first] = at_start[self._tensor[first]]

        self._comes, self._ends = comes & ~was_live, ends & was_live
        change = np.zeros(len(ops) + 1, np.int64)
        changes = was_live != comes
        since = self._step + ends  # what is freed or dropped is so after its step
        np.add.at(change, since[changes], np.where(comes, bytes, -bytes)[changes])
        again = np.flatnonzero(was_live & comes)  # produced beside what is live, which takes space once more
        self.start = int(size[starts].sum())
        self.held: Ints = self.start + np.cumsum(change)[:-1] + np.array(index.workspace, np.int64)[ops] * is_here
        np.add.at(self.held, self._step[again], bytes[again])

    def returns(self) -> tuple[Ints, Ints, Ints]:
        """What is produced while it is not live, and still to be read: step, tensor, and the step after which it was
        freed or dropped, -1 where it was not."""
        gone = np.where(self._ends, np.arange(len(self._step)), -1)
        before = np.concatenate(([-1], np.maximum.accumulate(gone)[:-1])) if len(gone) else gone
        which = np.flatnonzero(self._comes & (self._last[self._tensor] >= self._step))
        before = before[which]
        is_same = (before >= 0) & (self._tensor[before] == self._tensor[which])
        gone_at: Ints = np.where(is_same, self._step[before], -1)
        return self._step[which], self._tensor[which], gone_at


def _entries(rows: tuple[Ints, Ints], ops: Ints, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """What the ops of the chosen steps read or write, in order: step, and tensor."""
    start, ids = rows
    steps = np.flatnonzero(chosen)
    return np.repeat(steps, np.diff(start)[ops[steps]]), ids[slots_of(start, ops[steps])]


def _last_uses(
    index: TraceIndex, ops: Ints, anchors: Ints, is_here: NDArray[np.bool_]
) -> tuple[Ints, NDArray[np.bool_]]:
    """Per tensor the step that reads it last, or at whose end the program releases it, -1 for none; whether it dies
    then: it may be freed, and no step elsewhere reads it."""
    released = index.trace.released
    step, tensor = _entries(index.read_rows, ops, is_here)
    last = np.full(len(released), -1)
    last[tensor] = step  # they are in order, and the last one stays
    last = np.maximum(last, np.where(released >= 0, np.flatnonzero(anchors < 0)[released], -1))
    may_end = freeable(index.trace)
    may_end[_entries(index.read_rows, ops, ~is_here)[1]] = False
    return last, may_end
