"""Which results leave after which op, and from which op on they return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.hardware.platform import Platform
from sim.plan import Action, Move, Wait
from sim.policies.offload.tflms.ancestors import Ancestors
from sim.solvers.spans import swappable
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.tensor import ROLE_CODE

Ints = NDArray[np.int64]
SWAPPED = (ROLE_CODE["activation"], ROLE_CODE["temporary"])
WAITS_OUT, WAITS_IN = 1, 2
"""Bits of a mode."""
MOST_SETTINGS = 64
"""Whose stays are kept for further traces of a structure: a search tries about half as many."""


@dataclass(frozen=True)
class Settings:
    """The four parameters of `Tflms`, all given."""

    swapout_threshold: int
    swapin_ahead: int
    swapin_groupby: int
    sync_mode: int

    @property
    def waits_out(self) -> bool:
        """Whether computation waits for copies out."""
        return bool(self.sync_mode & WAITS_OUT)

    @property
    def waits_in(self) -> bool:
        """Whether computation waits for copies in, each at its reader."""
        return bool(self.sync_mode & WAITS_IN)


class Stays(NamedTuple):
    """The times that results which are swapped are resident for: by result, and in order. Shape (stays,) each.

    tensor: the result, which has at least two.
    begin: the op after which its copy in begins, -1 where it is produced.
    first, last: the first and the last op that use it.
    """

    tensor: Ints
    begin: Ints
    first: Ints
    last: Ints


class _Reads(NamedTuple):
    """Reads of results that may be swapped: by result, and in order of level. Shape (reads,) each."""

    tensor: Ints
    source: Ints
    op: Ints


class Swapper:
    """The graph of a trace by levels."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._inputs, self.level, self._reads = kept(trace.structure, "levels", None, lambda: _levels(trace))
        self.levels = max(self.level, default=0) + 1
        size, shape = trace.tensor_columns.bytes, trace.tensor_columns.shape
        self._may_leave = size > 0
        self._may_leave[[t for t, dimensions in shape.items() if len(dimensions) < 2]] = False

    def stays(self, settings: Settings) -> Stays:
        """When the results that leave are resident, whatever copies out wait for."""
        key = replace(settings, sync_mode=settings.sync_mode & WAITS_IN)
        found = kept(self._trace.structure, "stays", key, lambda: self._stays(key), most=MOST_SETTINGS)
        leaves = self._may_leave[found.tensor]
        return Stays(*(column[leaves] for column in found))

    def actions(self, settings: Settings, platform: Platform, host: str) -> list[Action]:
        """The moves of these swaps, and the waits of the mode; copies in that begin together by first reader."""
        actions: list[Action] = []
        back: list[tuple[int, list[Action]]] = []
        rows = list(zip(*(column.tolist() for column in self.stays(settings))))
        for (t, begin, first, last), following in zip(rows, [*rows[1:], (-1,)]):
            home = platform.home(int(self._trace.op_columns.device[first])).name
            if begin < 0:
                actions.append(Move(t, host, keep=last > first, after=first))
                actions += [Wait(t, after=first)] if settings.waits_out else []
                actions += [Move(t, host, after=last)] if last > first else []
                continue
            spare = following[0] == t
            if settings.waits_in:
                steps: list[Action] = [Move(t, home, keep=spare, before=first), Wait(t, before=first)]
            else:
                steps = [Move(t, home, keep=spare, after=begin)]
            # the host still has its copy, so that nothing crosses the link
            back.append((first, [*steps, *([Move(t, host, after=last)] if spare else [])]))
        return actions + [action for _, steps in sorted(back, key=lambda pair: pair[0]) for action in steps]

    def _stays(self, settings: Settings) -> Stays:
        """The same if all results may leave, so that it is found once for all traces of a structure."""
        reads, level = self._reads, np.array(self.level, np.int64)
        is_far = level[reads.op] - level[reads.source] > settings.swapout_threshold
        if not is_far.any():
            return Stays(*np.zeros((4, 0), np.int64))
        starts = np.flatnonzero(np.diff(reads.tensor, prepend=-1))
        near = np.maximum.reduceat(np.where(is_far, reads.source, reads.op), starts)
        produced = Stays(reads.tensor[starts], np.full(len(starts), -1), reads.source[starts], near)
        far = _Reads(*(column[is_far] for column in reads))
        return _joined(produced, self._returned(far, level, settings), len(level))

    def _returned(self, far: _Reads, level: Ints, settings: Settings) -> Stays:
        """One stay for each group of far readers: those in order of level, cut where two levels are further apart; each
        alone for a distance of 0."""
        apart = np.ones(len(far.op), np.bool_)
        if settings.swapin_groupby:
            apart[1:] = (np.diff(far.tensor) > 0) | (np.diff(level[far.op]) > settings.swapin_groupby)
        starts = np.flatnonzero(apart)
        tensor, source, earliest = (column[starts] for column in far)
        first, last = np.minimum.reduceat(far.op, starts), np.maximum.reduceat(far.op, starts)
        if settings.waits_in:
            return Stays(tensor, first - 1, first, last)
        begin = np.maximum(level[earliest] - min(settings.swapin_ahead, self.levels), level[source] + 1)
        triggers = self._ancestors.latest(earliest, begin, first)
        for i in np.flatnonzero(triggers < 0).tolist():
            triggers[i] = self._latest_input(int(source[i]), int(earliest[i]), int(first[i]))
        return Stays(tensor, triggers, first, last)

    def _latest_input(self, source: int, reader: int, before: int) -> int:
        """The latest other input of a reader before an op, for one without such an ancestor; -1 for none."""
        others = (op for op in self._inputs[reader] if op != source and op < before)
        return max((op for op in others if self._ancestors.sees(reader, op)), default=-1)

    @cached_property
    def _ancestors(self) -> Ancestors:
        c = self._trace.op_columns
        seen = np.ones(len(c.name), np.bool_)
        seen[[*c.engine, *c.group]] = False
        return Ancestors(self._inputs, self.level, seen, c.device)


def _joined(produced: Stays, returned: Stays, ops: int) -> Stays:
    """The stays of each result in order, one with those before it that last until it begins; of more than one."""
    both = Stays(*(np.concatenate(columns) for columns in zip(produced, returned)))
    order = np.lexsort((both.first, both.tensor))
    tensor, begin, first, last = (column[order] for column in both)
    offset = tensor * (ops + 1)  # so that no result reaches until the next one's begin
    reached = np.maximum.accumulate(offset + last)
    starts = np.flatnonzero(np.append(True, (offset + begin)[1:] > reached[:-1]))
    last = (reached - offset)[np.append(starts[1:], len(tensor)) - 1]
    several = np.bincount(tensor[starts])[tensor[starts]] > 1
    return Stays(*(column[several] for column in (tensor[starts], begin[starts], first[starts], last)))


def _levels(trace: Trace) -> tuple[list[tuple[int, ...]], list[int], _Reads]:
    """Per op those whose results it reads, and its level; the reads of results that may be swapped."""
    producer = trace.producer.tolist()
    inputs = [tuple({producer[t] for t in reads} - {-1}) for reads in trace.distinct_reads]
    level: list[int] = []
    for before in inputs:
        level.append(1 + max((level[op] for op in before), default=-1))
    may_leave = sorted(swappable(trace, SWAPPED, of_no_bytes=True))
    rows = [(t, op) for t in may_leave for op in sorted(trace.readers(t), key=lambda op: (level[op], op))]
    tensor, op = np.array(rows, np.int64).reshape(-1, 2).T
    return inputs, level, _Reads(tensor, trace.producer[tensor].astype(np.int64), op)
