"""Nested calls on a time line, turned into ops: which calls run something themselves, and for how long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.importers.aten import is_silent


@dataclass(slots=True)
class Call:
    """One recorded call: times in ns, its thread, its arguments as recorded. parent, root: places among the calls."""

    name: str
    start: int
    end: int
    thread: Any
    args: dict[str, Any]
    is_op: bool
    parent: int = -1
    root: int = -1
    silent: bool = False
    longest: int = 0


@dataclass(slots=True)
class Unit:
    """A stretch of one call that is an op of the trace. time_ns: its own, and what was folded into it."""

    call: int
    start: int
    time_ns: int


@dataclass
class Timeline:
    """Calls in order of start, and the ops found in them.

    A call that calls nothing but silent ones (allocations, views) is one op, with their time. Of a call that
    calls others, the longest stretch of its own is an op if it is longer than any call in it; its other own
    time is added to the op before it in the same outermost call, or to the next one.
    """

    calls: list[Call] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)

    @classmethod
    def of(cls, calls: Sequence[Call], busy: Sequence[int]) -> Timeline:
        """The time line of some calls; silent calls count only where one of the times `busy` (sorted) lies in them."""
        line = cls(sorted(calls, key=lambda c: (c.start, -c.end)))
        _nest(line.calls)
        threads: dict[Any, list[int]] = {}
        for i, call in enumerate(line.calls):
            if call.is_op:
                threads.setdefault(call.thread, []).append(i)
        for order in threads.values():
            line.units += _units(line.calls, order, busy)
        line.units.sort(key=lambda unit: unit.start)
        return line

    def above(self, call: int) -> list[str]:
        """The name of a call and of those round it, innermost first (at most the nearest thousand)."""
        names: list[str] = []
        while call >= 0 and len(names) < 1000:
            names.append(self.calls[call].name)
            call = self.calls[call].parent
        return names


def _nest(calls: list[Call]) -> None:
    """Set parents, and mark the silent; a call that outlasts the one round it is cut."""
    stacks: dict[Any, list[int]] = {}
    for i, call in enumerate(calls):
        stack = stacks.setdefault(call.thread, [])
        while stack and calls[stack[-1]].end <= call.start:
            stack.pop()
        if stack:
            call.parent = stack[-1]
            call.end = min(call.end, calls[stack[-1]].end)
        above = calls[call.parent] if call.parent >= 0 else None
        call.root = above.root if above is not None and above.is_op else i
        call.silent = call.is_op and is_silent(call.name)
        stack.append(i)
    for call in reversed(calls):  # children stand after their parents
        if call.parent >= 0 and call.is_op:
            above = calls[call.parent]
            above.silent = above.silent and call.silent
            if not call.silent:
                above.longest = max(above.longest, call.end - call.start, 1)


@dataclass(slots=True)
class _Stretch:
    call: int
    start: int
    end: int
    is_unit: bool


def _units(calls: list[Call], order: list[int], busy: Sequence[int]) -> list[Unit]:
    stretches = _stretches(calls, order, busy)
    best: dict[int, _Stretch] = {}
    for part in stretches:
        if not part.is_unit and (
            part.call not in best or part.end - part.start > best[part.call].end - best[part.call].start
        ):
            best[part.call] = part
    for call, part in best.items():
        part.is_unit = part.end - part.start > calls[call].longest
    units: list[Unit] = []
    waiting: _Stretch | None = None
    root, time_before, first = -1, 0, 0
    for part in stretches:
        if calls[part.call].root != root:
            root, waiting, time_before = calls[part.call].root, None, 0
            first = len(units)
        if part.is_unit:
            start = waiting.start if waiting else part.start
            units.append(Unit(part.call, start, part.end - part.start + time_before))
            waiting, time_before = None, 0
        elif len(units) > first:
            units[-1].time_ns += part.end - part.start
        else:
            waiting = waiting or part
            time_before += part.end - part.start
    return units


def _stretches(calls: list[Call], order: list[int], busy: Sequence[int]) -> list[_Stretch]:
    """The time of one thread's ops, cut where another call begins or ends."""
    found: list[_Stretch] = []
    stack: list[list[int]] = []  # [call, time up to which it is accounted for]
    covered = -1

    def close(until: int) -> None:
        while stack and calls[stack[-1][0]].end <= until:
            call, since = stack.pop()
            found.append(_Stretch(call, since, calls[call].end, False))
            if stack:
                stack[-1][1] = calls[call].end

    for i in order:
        call = calls[i]
        close(call.start)
        if covered >= 0 and call.start < calls[covered].end:
            continue
        if call.silent and (stack or not _any_between(busy, call.start, call.end)):
            continue
        if stack:
            found.append(_Stretch(stack[-1][0], stack[-1][1], call.start, False))
            stack[-1][1] = call.start
        if call.longest:
            stack.append([i, call.start])
        else:
            found.append(_Stretch(i, call.start, call.end, True))
            covered = i
            if stack:
                stack[-1][1] = call.end
    close(1 << 62)
    return found


def _any_between(times: Sequence[int], start: int, end: int) -> bool:
    at = bisect_left(times, start)
    return at < len(times) and times[at] < end
