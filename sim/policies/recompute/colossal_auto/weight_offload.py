"""Weights that reside on the host and are fetched for each visit to their stage: which, and how early, greedily."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import inf

import numpy as np
from numpy.typing import NDArray

from sim.hardware.platform import Tier
from sim.plan import Action, Drop, Move, Problem, Recompute
from sim.solvers.schedule import Schedule, TraceIndex
from sim.trace.chain import Chain
from sim.trace.tensor import ROLE_CODE

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are offloaded together: those of a stage, or of several stages that share one.

    bytes: of all.
    """

    weights: tuple[int, ...]
    bytes: int


def units_of(problem: Problem, line: Chain) -> list[Unit]:
    """The weights of a chain that ops of the main engine alone touch, in units, in the order of the stages."""
    trace, platform = problem.trace, problem.platform
    c, role = trace.op_columns, trace.tensor_columns.role
    main = platform.engine_for(0)
    elsewhere = {op for op, engine in c.engine.items() if platform.engine_for(0, engine) != main}
    unit_of: dict[int, int] = {}  # per weight the first stage that is joined to it
    members: dict[int, list[int]] = {}
    for i, stage in enumerate(line.stages):
        read = dict.fromkeys(t for op in (*stage.forward, *stage.backward) for t in trace.reads(op))
        mine = [t for t in read if role[t] == ROLE_CODE["weight"] and trace.producer[t] < 0]
        mine = [t for t in mine if elsewhere.isdisjoint(_touching(problem, t))]
        joined = sorted({unit_of[t] for t in mine if t in unit_of})
        weights = dict.fromkeys(t for unit in joined for t in members.pop(unit))
        weights |= dict.fromkeys(mine)
        first = joined[0] if joined else i
        members[first] = list(weights)
        unit_of |= dict.fromkeys(weights, first)
    size = trace.tensor_columns.bytes
    units = [Unit(tuple(weights), int(size[weights].sum())) for _, weights in sorted(members.items()) if weights]
    return [unit for unit in units if unit.bytes]


def _touching(problem: Problem, weight: int) -> set[int]:
    """The ops that read a weight, or a value that takes its place."""
    touching: set[int] = set()
    while weight >= 0:
        touching |= {*problem.trace.readers(weight), int(problem.trace.producer[weight])} - {-1}
        weight = int(problem.trace.replaced_by[weight])
    return touching


class Pager:
    """What offloading units saves, and costs, along a recomputation schedule.

    A visit is a run of steps of one stage; an op of no stage (an update) is one by itself. A weight on the host
    is fetched before a visit that reads it, and its copy dropped after that; where it is overwritten the new value
    is copied to the host after its last use. With `ahead` = a copies begin at the start of the a-th visit before,
    with 0 when the visit itself starts.

    peaks: bytes per step without offload. Every array has as many entries as there are steps.
    """

    def __init__(self, problem: Problem, line: Chain, schedule: Schedule, host: Tier) -> None:
        self.problem, self.schedule, self.host = problem, schedule, host
        self.index: TraceIndex = schedule.index
        self.peaks = schedule.residency().held
        took = [problem.cost.op_ns(op) for op in range(len(self.index.reads))]
        ops = schedule.ops.tolist()
        self.passed = [0, *accumulate(map(took.__getitem__, ops))]  # per step the time of all before it, and of all
        counts = [len(list(run)) for _, run in groupby([line.stage_of.get(op, -1 - op) for op in ops])]
        self.ends = [last - 1 for last in accumulate(counts)]
        self.starts = [end - count + 1 for end, count in zip(self.ends, counts, strict=True)]
        self.visit_of = [visit for visit, count in enumerate(counts) for _ in range(count)]
        self.outputs = set(problem.trace.outputs)
        self._intervals: dict[tuple[int, int], list[tuple[int, int]]] = {}

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """Per tensor the steps that read, produce or overwrite it."""
        uses: dict[int, list[int]] = {}
        index = self.index
        for s, (op, _) in enumerate(self.schedule.steps):
            touched = {*index.reads[op], *index.writes[op]}
            for t in touched | {index.replaces[t] for t in index.writes[op]}:
                uses.setdefault(t, []).append(s)
        return uses

    def last_value(self, weight: int) -> int:
        """What a weight has become at the end."""
        replaced_by = self.problem.trace.replaced_by
        while replaced_by[weight] >= 0:
            weight = int(replaced_by[weight])
        return weight

    def intervals(self, weight: int, ahead: int) -> list[tuple[int, int]]:
        """First and last steps of the times during which a weight, or what it has become, is on the device."""
        key = weight, ahead
        if key not in self._intervals:
            intervals: list[tuple[int, int]] = []
            end = self.last_value(weight)
            visits = list(dict.fromkeys(self.visit_of[s] for s in self.uses.get(weight, ())))
            for v in visits:
                first, last = self.starts[max(v - ahead, 0)], self.ends[v]
                if v == visits[-1] and end != weight:
                    last = self.uses[end][-1]
                if intervals and first <= intervals[-1][1] + 1:
                    first = intervals.pop()[0]
                intervals.append((first, last))
            self._intervals[key] = intervals
        return self._intervals[key]

    def absent(self, unit: Unit, ahead: int) -> Ints:
        """Bytes that are not on the device, per step."""
        size = self.index.size
        change = np.zeros(len(self.peaks) + 1, np.int64)
        for t in unit.weights:
            for first, last in self.intervals(t, ahead):
                change[first] -= size[t]
                change[last + 1] += size[t]
        absent: Ints = unit.bytes + np.cumsum(change)[:-1]
        return absent

    def absent_in_all(self, unit: Unit, ahead: int) -> int:
        """The sum of these bytes over all steps."""
        size, there = self.index.size, self.intervals
        held = sum(size[t] * sum(last + 1 - first for first, last in there(t, ahead)) for t in unit.weights)
        return unit.bytes * len(self.peaks) - held

    def exposed(self, unit: Unit, ahead: int) -> int:
        """Nanoseconds of copies to the device that no visit in between hides, links being free."""
        home, host, passed = self.problem.home, self.host.name, self.passed
        coming: dict[tuple[int, int], int] = {}
        for t in unit.weights:
            took, steps = self.problem.cost.move_ns(t, host, home), self.uses.get(t, ())
            for first, _ in self.intervals(t, ahead):
                needed = self.starts[self.visit_of[steps[bisect_left(steps, first)]]]
                coming[first, needed] = coming.get((first, needed), 0) + took
        return sum(max(0, took - max(passed[needed] - passed[first], 0)) for (first, needed), took in coming.items())

    def actions(self, chosen: Sequence[tuple[Unit, int]]) -> tuple[Action, ...]:
        """The runs' drops and recomputations, and the copies of the chosen units, each with its `ahead`."""
        into: dict[int, list[tuple[int, int, Action]]] = {}
        out: dict[int, list[int]] = {}
        anchors = [op if anchor < 0 else anchor for op, anchor in self.schedule.steps]
        for t, ahead in ((t, ahead) for unit, ahead in chosen for t in unit.weights):
            for first, last in self.intervals(t, ahead):
                needed = self.uses[t][bisect_left(self.uses[t], first)]
                # the host's copy goes where the next thing is that it is overwritten
                keep = t == self.last_value(t) or self.uses[int(self.problem.trace.replaced_by[t])][0] > last
                move = Move(t, self.problem.home, keep=keep, before=anchors[first])
                into.setdefault(first, []).append((needed, t, move))
                out.setdefault(last, []).append(t)
        actions: list[Action] = []
        for s, ((op, anchor), dropped) in enumerate(zip(self.schedule.steps, self.schedule.drops, strict=True)):
            # copies that begin together come in the order of need
            actions += [move for _, _, move in sorted(into.get(s, ()), key=lambda one: one[:2])]
            if anchor >= 0:
                actions.append(Recompute(op, before=anchor))
            after, before = (op, None) if anchor < 0 else (None, anchor)
            actions += [Drop(t, after=after, before=before) for t in dropped]
            for t in out.get(s, ()):
                now = self.last_value(t)
                if now == t or self.uses[now][-1] != s:
                    actions.append(Drop(t, self.problem.home, after=after, before=before))
                elif now in self.outputs:
                    actions.append(Move(now, self.host.name, after=after, before=before))
        return tuple(actions)


def offloaded(
    pager: Pager, units: Sequence[Unit], *, budget: int, target: int, window: int
) -> list[tuple[Unit, int]] | None:
    """Units to offload, each with how many visits ahead it comes, so that no step holds more than `target`.

    Greedily, the unit first that saves the most per nanosecond of copies that nothing hides, with the
    least `ahead` up to `window` that does so best; then the one that saves the most bytes times steps, then the
    one that lowers the peak the most. If all that is not enough, units come later again, to the start of
    their own visit, in the same order. None where more than `budget` remains.
    """
    held, chosen = pager.peaks.copy(), dict[int, int]()
    room = pager.host.capacity

    def best_first(options: list[tuple[float, int, int, int, Ints]]) -> Iterator[tuple[int, int, Ints]]:
        """The best by ratio and bytes; among equals the one after which the least is held."""
        options.sort(key=lambda one: one[:2], reverse=True)
        while options:
            tied = [one for one in options if one[:2] == options[0][:2]]
            best = min(tied, key=lambda one: (int((held - one[4]).max()), one[2])) if len(tied) > 1 else tied[0]
            options.remove(best)
            yield best[2:]

    if int(held.max()) > target:
        first = []
        for u, unit in enumerate(units):
            tried = [(*_profit(pager, unit, ahead), u, ahead) for ahead in range(window + 1)]
            ratio, total, _, ahead = max(tried, key=lambda one: (one[0], one[1], -one[3]))
            first.append((ratio, total, u, ahead, pager.absent(unit, ahead)))
        for u, ahead, saved in best_first(first):
            if int(held.max()) <= target:
                break
            if saved.any() and units[u].bytes <= room:
                held, chosen[u], room = held - saved, ahead, room - units[u].bytes
    if int(held.max()) > target:
        later = []
        for u, ahead in chosen.items():
            more = pager.absent(units[u], 0) - pager.absent(units[u], ahead)
            if more.any():
                cost = pager.exposed(units[u], 0) - pager.exposed(units[u], ahead)
                later.append((int(more.sum()) / cost if cost > 0 else inf, int(more.sum()), u, 0, more))
        for u, ahead, saved in best_first(later):
            if int(held.max()) <= target:
                break
            held, chosen[u] = held - saved, ahead
    return [(units[u], ahead) for u, ahead in sorted(chosen.items())] if int(held.max()) <= budget else None


def _profit(pager: Pager, unit: Unit, ahead: int) -> tuple[float, int]:
    total, cost = pager.absent_in_all(unit, ahead), pager.exposed(unit, ahead)
    return (total / cost if cost else inf), total
