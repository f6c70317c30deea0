"""Drafts of a plan: whole choices, scheduled and timed by the model, each made from what the one before has shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle
from operator import attrgetter
from typing import Any

import numpy as np

from sim.plan import Action, Drop, Move, Plan, Problem, Recompute
from sim.policies.hybrid.hybrid.program import Profile, rounded, shares
from sim.policies.hybrid.hybrid.results import KEEP, OFFLOAD, RECOMPUTE, Results, results_of
from sim.policies.hybrid.hybrid.timeline import Steps, Timeline, steps_of, timeline
from sim.solvers.cascade import cascade
from sim.solvers.schedule import Schedule, schedule_of

ENOUGH = 1.0005
"""A draft that takes as many times as long as keeping everything is good enough."""


WORK = 40_000
"""Steps that drafts may have in all that are tried in order to improve on the best."""


@dataclass(frozen=True, eq=False)
class Draft:
    """A choice for every result, its schedule, and what the model says of it on each device."""

    choice: Sequence[int]
    schedule: Schedule
    steps: Sequence[Steps]
    lines: Sequence[Timeline]

    @property
    def excess(self) -> int:
        """The most bytes above the budget of a device, 0 where it fits."""
        return max(line.excess for line in self.lines)

    @property
    def ns(self) -> int:
        """The time of the slowest device."""
        return max(line.ns for line in self.lines)

    @property
    def moved(self) -> int:
        """How many results are copied."""
        return sum(len(line.fetch) for line in self.lines)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Less is better: what fits first, then what is fast, then what copies less."""
        return self.excess, self.ns, self.moved

    @property
    def least_bytes(self) -> int:
        """What a device needs that waits for every copy."""
        return max(int(steps.held.max(initial=0)) for steps in self.steps)


class Drafts:
    """Makes drafts for a problem.

    results: all that is chosen for. devices: the devices. capacity: bytes of each.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.results: Results = results_of(problem)
        self.devices = range(problem.trace.devices)
        self.capacity = [problem.platform.home(device).capacity for device in self.devices]
        self._ns = [problem.cost.op_ns(op) for op in range(len(problem.trace.ops))]
        self._doubt: dict[int, float] = {}  # of the last program, how far from whole each choice was
        self._last: dict[int, list[int]] = {}
        for i, s in enumerate(self.results.saved):
            self._last.setdefault(s.last, []).append(i)

    # ---- one draft ---------------------------------------------------------------------------

    def draft(self, choice: Sequence[int]) -> Draft:
        """A choice, scheduled and timed."""
        results = self.results
        settled, reruns = results.settled(choice)
        schedule = schedule_of(results.index, reruns)
        steps = [steps_of(results, settled, schedule, self._ns, device) for device in self.devices]
        lines = [timeline(results, each, self.capacity[device]) for device, each in enumerate(steps)]
        return Draft(settled, schedule, steps, lines)

    def by_program(self, before: Draft, targets: Sequence[int]) -> Draft:
        """What the linear program chooses for these bytes per device, given the schedule of an earlier draft."""
        results, choice = self.results, [KEEP] * len(self.results.saved)
        host = self.problem.platform.host
        for device in self.devices:
            places = [i for i, s in enumerate(results.saved) if s.device == device]
            if places:
                profile = self._profile(before, device)
                found = shares(results, places, profile, targets[device], host.capacity if host else 0)
                for i, what in rounded(results, found).items():
                    choice[i] = what
                    self._doubt[i] = 1.0 - float(found[i].max())
        return self.draft(choice)

    def _profile(self, draft: Draft, device: int) -> Profile:
        """Bytes that are resident beside all choices, and when each is needed, in the schedule of a draft."""
        results, steps = self.results, draft.steps[device]
        need = [s.need for s in results.saved]
        held = steps.held.copy()
        wheres = []
        since: dict[int, int] = {}
        for step, (op, at) in enumerate(zip(steps.ops, steps.at, strict=True)):
            anchor = draft.schedule.steps[at][1]
            wheres.append(op if anchor < 0 else anchor)
            for t in results.index.reads[op]:
                i = results.of.get(t, -1)
                if i in since:
                    start = since.pop(i)
                    need[i] = min(need[i], wheres[step])
                    if draft.choice[i] == KEEP:
                        held[start + 1 : step] -= results.saved[i].bytes
            if anchor < 0:
                since.update(dict.fromkeys(self._last.get(op, ()), step))
        base: dict[int, int] = {}
        for where, bytes in zip(wheres, held.tolist(), strict=True):
            base[where] = max(base.get(where, 0), bytes)
        ops = sorted(base)
        return Profile(ops, [self._ns[op] for op in ops], [base[op] for op in ops], need)

    # ---- several -----------------------------------------------------------------------------

    def search(self, rounds: int) -> Iterator[Draft]:
        """Drafts for the capacities: nothing released, then as the program says, with less room after each miss."""
        now = self.draft([KEEP] * len(self.results.saved))
        yield now
        plain = now.ns
        targets, seen = list(self.capacity), set()
        best = now
        for i in range(rounds):
            if not now.excess and now.ns <= plain * ENOUGH:
                return
            now = self.by_program(now, targets)
            yield now
            best = min(best, now, key=lambda draft: draft.rank)
            targets = [target - line.excess for target, line in zip(targets, now.lines, strict=True)]
            if tuple(now.choice) in seen:  # copies take longer to leave or to return than windows show
                targets = [target - target // 200 * i for target in targets]
            seen.add(tuple(now.choice))
        yield self.polished(best, WORK)

    def polished(self, draft: Draft, work: int, key: Callable[[Draft], Any] = attrgetter("rank")) -> Draft:
        """A draft that no other way for one result, or for two, improves on; as far as so many steps allow."""
        order = sorted(range(len(self.results.saved)), key=lambda i: (self._doubt.get(i, 0.0), -i), reverse=True)
        single = [((i, way),) for i in order for way in self.results.ways(i)]
        best, left = self._climb(draft, single, work, key)
        if left >= len(single) ** 2 // 2 * sum(len(each.ops) for each in draft.steps):
            best, _ = self._climb(best, [(one, two) for (one,), (two,) in combinations(single, 2)], left, key)
        return best

    def _climb(
        self, best: Draft, flips: Sequence[tuple[tuple[int, int], ...]], left: int, key: Callable[[Draft], Any]
    ) -> tuple[Draft, int]:
        """Try these in turn until none improves, or the work is done; what is left of that."""
        idle = 0
        for flip in cycle(flips):
            idle += 1
            left -= sum(len(each.ops) for each in best.steps)
            if left < 0 or idle > len(flips):
                break
            choice = list(best.choice)
            for i, way in flip:
                choice[i] = way
            if choice != list(best.choice):
                tried = self.draft(choice)
                if key(tried) < key(best):
                    best, idle = tried, 0
        return best, left

    def least(self, rounds: int) -> Draft:
        """The draft that needs least memory, however long it takes; the same for any capacity."""
        now = best = self.draft([KEEP] * len(self.results.saved))
        for _ in range(rounds):
            now = self.by_program(now, [0 for _ in self.devices])
            best = min(best, now, key=attrgetter("least_bytes"))
        return self.polished(best, WORK, attrgetter("least_bytes"))

    # ---- the plan ----------------------------------------------------------------------------

    def plan(self, draft: Draft) -> Plan:
        """A draft as actions."""
        trace, platform, saved = self.problem.trace, self.problem.platform, self.results.saved
        host = platform.host.name if platform.host else ""
        fetch: dict[int, list[int]] = {}
        leave: dict[int, Sequence[int]] = {}
        for steps, line in zip(draft.steps, draft.lines, strict=True):
            leave.update((steps.at[step], places) for step, places in steps.left.items())
            for at, i in line.fetch:
                fetch.setdefault(at, []).append(i)
        actions: list[Action] = []
        for at, ((op, anchor), dropped) in enumerate(zip(draft.schedule.steps, draft.schedule.drops, strict=True)):
            before = op if anchor < 0 else anchor
            for i in fetch.get(at, ()):
                home = platform.home(saved[i].device).name
                actions += [Move(t, home, before=before) for t in saved[i].tensors]
            if anchor >= 0:
                actions += [Recompute(op, before=anchor), *(Drop(t, before=anchor) for t in dropped)]
            else:
                actions += [Drop(t, after=op) for t in dropped]
            actions += [Move(t, host, after=op) for i in leave.get(at, ()) for t in saved[i].tensors]
        bytes = np.zeros(3, np.int64)
        for s, what in zip(saved, draft.choice, strict=True):
            bytes[what] += s.bytes
        notes = {
            "kept_bytes": int(bytes[KEEP]),
            "offloaded_bytes": int(bytes[OFFLOAD]),
            "recomputed_bytes": int(bytes[RECOMPUTE]),
            "expected_ns": draft.ns,
        }
        return Plan(trace, cascade(trace, platform, actions, host) if host else tuple(actions), notes=notes)
