"""Turns nested calls on a timeline into ops: which calls run something themselves, and for how long."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.importers.aten import CALLERS, READ_OUT, is_silent, kind_of
from workloads.importers.optrace import PRODUCTS

MAIN = (*PRODUCTS, "norm")
"""Kinds of op that are always ops of the trace."""


@dataclass(slots=True)
class Call:
    """One recorded call.

    name, thread, args: as recorded.
    start, end: in ns.
    is_op: whether it is an op, not an annotation.
    parent, root: positions of the enclosing call and of the outermost op, -1 for none.
    silent: it runs no kernel, nor do its calls.
    longest: ns of the longest op that it calls, but for what hands a number to the program.
    is_main: it is a product, a convolution, attention or a norm, and does not call another one for it.
    allocates: memory is allocated in its own time, in none of its calls.
    """

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
    is_main: bool = False
    allocates: bool = False


@dataclass(slots=True)
class Unit:
    """A section of one call that is an op of the trace.

    call: position of the call.
    start: in ns, that of the outermost call whose first unit it is: what that allocates before its calls is the unit's.
    time_ns: its own time plus the time folded into it.
    """

    call: int
    start: int
    time_ns: int


@dataclass
class Timeline:
    """Calls in order of start, and the ops found in them.

    A call that calls only silent ones (allocations, views) is one op, including their time. If a call has other calls,
    the longest section of its own time is an op if it is longer than any of them, if it allocates its result itself, or
    if it is a product or a norm (a small product may take less time than the copy of its bias); the rest of its own
    time is added to the preceding op of the same outermost call, or to the next one. What only calls others (for
    autograd, for a copy) is never an op.
    """

    calls: list[Call] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)

    @classmethod
    def of(cls, calls: Sequence[Call], busy: Sequence[int], made: Sequence[int] = ()) -> Timeline:
        """The timeline of some calls.

        calls: in any order.
        busy: sorted times in ns; a silent outermost call is an op only if one of them falls into it.
        made: those of them at which memory was allocated.
        """
        line = cls(sorted(calls, key=lambda c: (c.start, -c.end)))
        nest(line.calls)
        mark_allocating(line.calls, made)
        threads: dict[Any, list[int]] = {}
        for i, call in enumerate(line.calls):
            if call.is_op:
                threads.setdefault(call.thread, []).append(i)
        for order in threads.values():
            line.units += _units(line.calls, order, busy)
        line.units.sort(key=lambda unit: unit.start)
        return line

    def above(self, call: int) -> list[str]:
        """The names of a call and its enclosing calls, innermost first (at most a thousand)."""
        names: list[str] = []
        while call >= 0 and len(names) < 1000:
            names.append(self.calls[call].name)
            call = self.calls[call].parent
        return names


def nest(calls: list[Call]) -> None:
    """Set parents of calls in order of start and mark silent ones; one that outlasts its enclosing one is truncated."""
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
    wraps = [False] * len(calls)
    for i in reversed(range(len(calls))):  # children come after their parents
        call = calls[i]
        named = call.is_op and not call.silent and kind_of(call.name, "forward") in MAIN
        call.is_main = named and not wraps[i]
        if call.parent >= 0 and call.is_op:
            above = calls[call.parent]
            wraps[call.parent] |= named or wraps[i]
            above.silent = above.silent and call.silent
            if not call.silent and call.name not in READ_OUT:
                above.longest = max(above.longest, call.end - call.start, 1)


def mark_allocating(calls: list[Call], made: Sequence[int]) -> None:
    """Mark the calls that allocate memory themselves: what only calls others has one of them allocate."""
    ops = [i for i, call in enumerate(calls) if call.is_op]
    starts = [calls[i].start for i in ops]
    for time in made:
        at = bisect_right(starts, time) - 1
        call = ops[at] if at >= 0 else -1
        while call >= 0 and calls[call].end <= time:
            call = calls[call].parent
        if call >= 0:
            calls[call].allocates = True


@dataclass(slots=True)
class _Section:
    call: int
    start: int
    end: int
    is_unit: bool


def _units(calls: list[Call], order: list[int], busy: Sequence[int]) -> list[Unit]:
    sections = _sections(calls, order, busy)
    best: dict[int, _Section] = {}
    for part in sections:
        if part.is_unit or is_silent(calls[part.call].name) or calls[part.call].name in CALLERS:
            continue
        if part.call not in best or part.end - part.start > best[part.call].end - best[part.call].start:
            best[part.call] = part
    for call, part in best.items():
        is_longest = part.end - part.start > calls[call].longest
        part.is_unit = calls[call].is_main or calls[call].allocates or is_longest
    units: list[Unit] = []
    begun: set[int] = set()  # calls that have units
    root, time_before, first = -1, 0, 0
    for part in sections:
        if calls[part.call].root != root:
            root, time_before = calls[part.call].root, 0
            first = len(units)
        if part.is_unit:
            start, call = part.start, part.call
            while call >= 0 and calls[call].is_op and call not in begun:
                begun.add(call)
                start, call = calls[call].start, calls[call].parent
            units.append(Unit(part.call, start, part.end - part.start + time_before))
            time_before = 0
        elif len(units) > first:
            units[-1].time_ns += part.end - part.start
        else:
            time_before += part.end - part.start
    return units


def _sections(calls: list[Call], order: list[int], busy: Sequence[int]) -> list[_Section]:
    """The time of one thread's ops, split wherever another call starts or ends."""
    sections: list[_Section] = []
    stack: list[list[int]] = []  # [call, time up to which its time is assigned]
    covered = -1

    def close(until: int) -> None:
        while stack and calls[stack[-1][0]].end <= until:
            call, since = stack.pop()
            sections.append(_Section(call, since, calls[call].end, False))
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
            sections.append(_Section(stack[-1][0], stack[-1][1], call.start, False))
            stack[-1][1] = call.start
        if call.longest:
            stack.append([i, call.start])
        else:
            sections.append(_Section(i, call.start, call.end, True))
            covered = i
            if stack:
                stack[-1][1] = call.end
    close(1 << 62)
    return sections


def _any_between(times: Sequence[int], start: int, end: int) -> bool:
    index = bisect_left(times, start)
    return index < len(times) and times[index] < end
