"""Software pipelining: iterations of a loop that overlap at a fixed interval (Rau 1994, modulo scheduling).

An iteration begins every `interval` cycles. No interval is smaller than what the units allow, uses over how many there
are, nor than what dependences between iterations allow, the latency of a cycle of dependences over the iterations that
it spans. Places are found by priority in a table of that many cycles; where none is left, the interval grows by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count as naturals

from sim.errors import TraceError


@dataclass(frozen=True)
class Dependence:
    """`after` can be issued `cycles` cycles after `before` of the iteration `distance` earlier."""

    before: int
    after: int
    cycles: int
    distance: int = 0


@dataclass(frozen=True)
class Pipelined:
    """A software pipeline.

    interval: cycles from the start of an iteration to that of the next.
    issue: per instruction its cycle within its iteration.
    length: cycles of one iteration, from its first issue to the last result.
    """

    interval: int
    issue: tuple[int, ...]
    length: int

    def cycles(self, iterations: int) -> int:
        """Cycles of so many iterations: (n - 1) * interval + length."""
        return (iterations - 1) * self.interval + self.length if iterations else 0

    @property
    def stages(self) -> int:
        """How many iterations overlap in the steady state."""
        return -(-self.length // self.interval)

    def copies(self, made: int, last_read: int) -> int:
        """How many copies of a value are needed that is made and last read in these cycles of its iteration."""
        return max(1, -(-(last_read - made) // self.interval))


def least_interval(
    dependences: Sequence[Dependence], units: Sequence[str], width: Mapping[str, int] | None = None
) -> int:
    """The larger of the bounds by units and by recurrences, at least 1.

    Raises TraceError where the dependences of one iteration form a cycle.
    """
    uses: dict[str, int] = {}
    for unit in units:
        uses[unit] = uses.get(unit, 0) + 1
    by_units = max((-(-n // (width or {}).get(unit, 1)) for unit, n in uses.items()), default=1)
    if _has_positive_cycle(dependences, len(units), sum(d.cycles for d in dependences) + 1):
        raise TraceError("the dependences of one iteration form a cycle")
    return next(each for each in naturals(max(1, by_units)) if not _has_positive_cycle(dependences, len(units), each))


def modulo_schedule(
    dependences: Sequence[Dependence],
    latency: Sequence[int],
    units: Sequence[str] | None = None,
    width: Mapping[str, int] | None = None,
) -> Pipelined:
    """A software pipeline of a loop whose instructions take `latency` cycles each, issued one cycle per unit.

    dependences: between positions of instructions.
    units, width: as in `sim.rewrites.list_scheduling.schedule`.

    Raises TraceError where the dependences of one iteration form a cycle.
    """
    kinds = list(units) if units is not None else [""] * len(latency)
    if not latency:
        return Pipelined(1, (), 0)
    for interval in naturals(least_interval(dependences, kinds, width)):
        issue = _placed(dependences, latency, kinds, width or {}, interval)
        if issue is not None:
            first = min(issue)
            shifted = tuple(at - first for at in issue)
            length = max(at + took for at, took in zip(shifted, latency, strict=True))
            return Pipelined(interval, shifted, length)
    raise AssertionError("an interval as long as one iteration always does")


def _has_positive_cycle(dependences: Sequence[Dependence], count: int, interval: int) -> bool:
    """Whether some recurrence needs more than this interval (Bellman and Ford on cycles - interval * distance)."""
    far = [0] * count
    for _ in range(count + 1):
        changed = False
        for d in dependences:
            reached = far[d.before] + d.cycles - interval * d.distance
            if reached > far[d.after]:
                far[d.after], changed = reached, True
        if not changed:
            return False
    return True


def _placed(
    dependences: Sequence[Dependence],
    latency: Sequence[int],
    units: Sequence[str],
    width: Mapping[str, int],
    interval: int,
) -> list[int] | None:
    """A place for each instruction in a table of `interval` cycles, or None where the budget of tries is used up.

    An instruction that finds no free cycle takes one from another, which is placed again, as are those whose
    dependences no longer hold.
    """
    count = len(units)
    height = _heights(dependences, latency, interval)
    into: list[list[Dependence]] = [[] for _ in range(count)]
    out: list[list[Dependence]] = [[] for _ in range(count)]
    for d in dependences:
        into[d.after].append(d)
        out[d.before].append(d)
    place: list[int | None] = [None] * count
    last = [-1] * count
    tries = 20 * count + 20
    while (waiting := [i for i in range(count) if place[i] is None]) and tries:
        tries -= 1
        each = max(waiting, key=lambda i: (height[i], -i))
        earliest = 0
        for d in into[each]:
            at = place[d.before]
            if at is not None and d.before != each:
                earliest = max(earliest, at + d.cycles - interval * d.distance)
        rivals = [i for i in range(count) if place[i] is not None and units[i] == units[each]]
        free = width.get(units[each], 1)
        slot = next(
            (
                at
                for at in range(earliest, earliest + interval)
                if sum((place[i] or 0) % interval == at % interval for i in rivals) < free
            ),
            None,
        )
        if slot is None:
            slot = earliest if earliest > last[each] else last[each] + 1
            taken = [i for i in rivals if (place[i] or 0) % interval == slot % interval]
            place[min(taken, key=lambda i: height[i])] = None
        place[each] = last[each] = slot
        for d in out[each]:
            at = place[d.after]
            if at is not None and d.after != each and at < slot + d.cycles - interval * d.distance:
                place[d.after] = None
        for d in into[each]:
            at = place[d.before]
            if at is not None and d.before != each and slot < at + d.cycles - interval * d.distance:
                place[d.before] = None
    return None if waiting else [at or 0 for at in place]


def _heights(dependences: Sequence[Dependence], latency: Sequence[int], interval: int) -> list[int]:
    """The longest path from each instruction to the end of the loop, iterations counted at their interval."""
    height = list(latency)
    for _ in range(len(height)):
        for d in dependences:
            height[d.before] = max(height[d.before], height[d.after] + d.cycles - interval * d.distance)
    return height
