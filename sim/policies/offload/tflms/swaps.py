"""Which results leave after which op, and from which op on they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.hardware.platform import Platform
from sim.plan import Action, Move, Wait
from sim.solvers.spans import swappable
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.tensor import ROLE_CODE

SWAPPED = (ROLE_CODE["activation"], ROLE_CODE["temporary"])


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
        return self.sync_mode in (1, 3)

    @property
    def waits_in(self) -> bool:
        """Whether computation waits for copies in, each at its reader."""
        return self.sync_mode in (2, 3)


class Stay(NamedTuple):
    """A time that a result is resident for.

    begin: the op after which its copy in begins, -1 where it is produced.
    first, last: the first and the last op that use it.
    """

    begin: int
    first: int
    last: int


Swaps = dict[int, list[Stay]]
"""Per result that is swapped its stays, in order: at least two."""


class Swapper:
    """The graph of a trace by levels."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._inputs, self.level, distance = kept(trace.structure, "levels", None, lambda: _levels(trace))
        self.levels = max(self.level, default=0) + 1
        size, shape = trace.tensor_columns.bytes, trace.tensor_columns.shape
        flat = {t for t, dimensions in shape.items() if len(dimensions) < 2}
        self._distance = {t: far for t, far in distance.items() if size[t] and t not in flat}

    def swaps(self, settings: Settings) -> Swaps:
        """The results that leave."""
        found = {}
        for t, distance in self._distance.items():
            if distance <= settings.swapout_threshold:
                continue  # no reader is far
            stays = self._stays(t, settings)
            if len(stays) > 1:
                found[t] = stays
        return found

    def actions(self, settings: Settings, platform: Platform, host: str) -> list[Action]:
        """The moves of these swaps, and the waits of the mode; copies in that begin together by first reader."""
        actions: list[Action] = []
        back: list[tuple[int, list[Action]]] = []
        for t, (produced, *stays) in self.swaps(settings).items():
            home = platform.home(int(self._trace.op_columns.device[produced.first])).name
            actions.append(Move(t, host, keep=produced.last > produced.first, after=produced.first))
            actions += [Wait(t, after=produced.first)] if settings.waits_out else []
            actions += [Move(t, host, after=produced.last)] if produced.last > produced.first else []
            for stay in stays:
                spare = stay is not stays[-1]
                if settings.waits_in:
                    steps: list[Action] = [Move(t, home, keep=spare, before=stay.first), Wait(t, before=stay.first)]
                else:
                    steps = [Move(t, home, keep=spare, after=stay.begin)]
                # the host still has its copy, so that nothing crosses the link
                back.append((stay.first, [*steps, *([Move(t, host, after=stay.last)] if spare else [])]))
        return actions + [action for _, steps in sorted(back, key=lambda pair: pair[0]) for action in steps]

    def _stays(self, tensor: int, settings: Settings) -> list[Stay]:
        source = int(self._trace.producer[tensor])
        near, far = source, []
        for op in self._trace.readers(tensor):
            if self.level[op] - self.level[source] > settings.swapout_threshold:
                far.append(op)
            else:
                near = max(near, op)
        stays = [Stay(-1, source, near)]
        for group in sorted(self._groups(far, settings.swapin_groupby), key=min):
            first, last = min(group), max(group)
            earliest = min(group, key=lambda op: (self.level[op], op))
            begin = first - 1 if settings.waits_in else self._trigger(source, earliest, first, settings.swapin_ahead)
            if begin <= stays[-1].last:
                stays[-1] = stays[-1]._replace(last=max(stays[-1].last, last))
            else:
                stays.append(Stay(begin, first, last))
        return stays

    def _groups(self, far: Sequence[int], distance: int) -> Iterator[list[int]]:
        """Readers in order of level, cut where two levels are further apart; each alone for a distance of 0."""
        group: list[int] = []
        for op in sorted(far, key=lambda op: (self.level[op], op)):
            if group and (not distance or self.level[op] - self.level[group[-1]] > distance):
                yield group
                group = []
            group.append(op)
        if group:
            yield group

    def _trigger(self, source: int, reader: int, before: int, ahead: int) -> int:
        """The op after which a copy in for `reader` begins; -1 for none before the op `before`.

        The latest ancestor of the reader at a level `ahead` before its own, but above the source's; else its latest
        other input.
        """
        level = max(self.level[reader] - ahead, self.level[source] + 1)
        device = self._trace.op_columns.device
        seen, stack, found = set[int](), list(self._inputs[reader]), []
        while stack:
            op = stack.pop()
            if op in seen or self.level[op] < level:
                continue
            seen.add(op)
            if self.level[op] == level:
                found.append(op)
            else:
                stack += self._inputs[op]
        usable = [op for op in found if self._sees(op, device[reader]) and op < before]
        others = (op for op in self._inputs[reader] if op != source and self._sees(op, device[reader]) and op < before)
        return max(usable, default=max(others, default=-1))

    def _sees(self, op: int, device: int) -> bool:
        """Whether that device sees the end of an op."""
        c = self._trace.op_columns
        return bool(c.device[op] == device and op not in c.engine and op not in c.group)


def _levels(trace: Trace) -> tuple[list[tuple[int, ...]], list[int], dict[int, int]]:
    """Per op those whose results it reads, and its level; per result that may be swapped how many levels its last
    reader is behind its producer."""
    producer = trace.producer.tolist()
    inputs = [tuple({producer[t] for t in reads} - {-1}) for reads in trace.distinct_reads]
    level: list[int] = []
    for before in inputs:
        level.append(1 + max((level[op] for op in before), default=-1))
    may_leave = sorted(swappable(trace, SWAPPED, of_no_bytes=True))
    return inputs, level, {t: max(level[op] for op in trace.readers(t)) - level[producer[t]] for t in may_leave}
