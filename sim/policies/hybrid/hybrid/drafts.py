"""Drafts of a plan: whole choices, scheduled and timed by the model, each made from what the one before has shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from sim.errors import OutOfMemory
from sim.log import FIRST_RUNS, WHY, EventLog
from sim.plan import Action, Drop, Move, Plan, Problem, Recompute
from sim.policies.hybrid.hybrid.candidates import results_of
from sim.policies.hybrid.hybrid.program import Profile, rounded, shares
from sim.policies.hybrid.hybrid.results import KEEP, OFFLOAD, RECOMPUTE, Results, Saved
from sim.policies.hybrid.hybrid.timeline import Frame, Ints, Steps, Timeline, frame_of, steps_of, timeline
from sim.solvers.cascade import cascade
from sim.solvers.schedule import Reruns, Schedule, schedule_of

SPARED = 3
"""How often what came back late is kept instead."""
WORK = 20_000
"""Steps of all drafts: of those of the rounds (two are always made), and of those tried to improve on the best."""
REPAIRS, REPAIR = 2, 60_000
"""How many drafts that miss the budget are repaired, and steps of all drafts tried for one."""
MOST_SCHEDULES = 64
"""How many schedules are kept for further drafts that recompute the same."""
AT_PEAK = 24
"""How many other ways are tried for what is resident at a peak, those of the largest results."""


class Scheduled(NamedTuple):
    """A schedule, and per device its steps."""

    schedule: Schedule
    frames: Sequence[Frame]


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

    def over(self, capacity: Sequence[int]) -> int:
        """The bytes above each device's capacity, summed over its steps; 0 where it fits."""
        lines = zip(self.lines, capacity, strict=True)
        return sum(int(np.maximum(np.array(line.used, np.int64) - most, 0).sum()) for line, most in lines)

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


def wheres(schedule: Schedule, steps: Steps) -> list[int]:
    """Per step of a device the op of the trace at which it runs: its own, or the one before which it is recomputed."""
    anchors = (schedule.steps[at][1] for at in steps.at)
    return [op if anchor < 0 else anchor for op, anchor in zip(steps.ops, anchors, strict=True)]


def use_at_ops(log: EventLog, device: int) -> dict[int, int]:
    """Bytes in use in a device's home tier when each of its ops begins its first run."""
    tier = log.platform.tiers.index(log.platform.home(device))
    here = log.change("tier") == tier
    use = np.concatenate(([0], np.cumsum(log.change("delta")[here])))  # nothing, until something changes
    first = [WHY[name] for name in FIRST_RUNS]
    rows = np.flatnonzero(np.isin(log.interval("why"), first) & (log.interval("device") == device))
    found = np.searchsorted(log.change("time")[here], log.interval("start")[rows], side="right")
    return dict(zip(log.interval("op")[rows].tolist(), use[found].tolist(), strict=True))


def _by_last(results: Results) -> dict[int, list[int]]:
    """Per op the places in `Results.saved` of what it is the last to read before backward."""
    found: dict[int, list[int]] = {}
    for i, s in enumerate(results.saved):
        found.setdefault(s.last, []).append(i)
    return found


class Drafts:
    """Makes drafts for a problem.

    results: all that is chosen for. devices: the devices. capacity: bytes of each.
    """

    def __init__(self, problem: Problem, *, inputs: bool = True) -> None:
        """inputs: whether inputs of the iteration may be offloaded."""
        self.problem = problem
        self.results = self._all = results_of(problem, inputs=inputs)
        self.index = self.results.index
        self.devices = range(problem.trace.devices)
        self.capacity = [problem.platform.home(device).capacity for device in self.devices]
        self._margin = 0
        self._late: dict[int, int] = {}
        self._others: list[int] = []  # per op the bytes that other parts of a composition add or take away
        self._seen: set[int] = set()  # ops at which replays have shown them
        self._ns = [problem.cost.op_ns(op) for op in range(len(problem.trace.ops))]
        self._doubt: dict[int, float] = {}  # of the last program, how far from whole each choice was
        self._last = _by_last(self.results)
        self._given: Scheduled | None = None  # what is recomputed where, if that is not chosen
        self._settled: dict[tuple[int, ...], tuple[list[int], Scheduled]] = {}  # of the choices that are recomputed

    def without_copies(self) -> Drafts:
        """The same, and as much learnt, where nothing may be offloaded."""
        return self._among([replace(s, offloads=False, sends_early=False) for s in self.results.saved])

    def given(self, reruns: Reruns) -> Drafts:
        """The same, and as much learnt, where these ops are recomputed; what is not is kept or offloaded."""
        again = {op for ops in reruns.values() for op in ops}
        read = {t for op in again for t in self.index.reads[op]}
        stays = [
            replace(s, recomputes=False, forward_only=False)
            for s in self.results.saved
            if s.op not in again and not (s.forward_only and read.isdisjoint(s.tensors))
        ]
        other = self._among(stays)
        other._given = self._framed(schedule_of(self.index, reruns))
        return other

    def with_later(self) -> Drafts:
        """The same, and as much learnt, where what backward and the update produce may be offloaded, too."""
        other = self._among(results_of(self.problem, later=True).saved)
        other._all = other.results
        return other

    def _among(self, saved: Sequence[Saved]) -> Drafts:
        """The same, and as much learnt of the others, where there is a choice for these alone."""
        other = copy(self)
        other.results = self.results.among(saved)
        other._last = _by_last(other.results)
        other._late, other._doubt, other._settled = {}, {}, {}
        return other

    # ---- one draft ---------------------------------------------------------------------------

    def draft(self, choice: Sequence[int]) -> Draft:
        """A choice, scheduled and timed."""
        results = self.results
        settled, (schedule, frames) = self._scheduled(choice)
        steps = [steps_of(results, settled, frames[device], device) for device in self.devices]
        for each in steps if self._others else ():
            each.held[:] += [self._others[where] for where in wheres(schedule, each)]
        lines = [self._line(each, self.capacity[device]) for device, each in enumerate(steps)]
        return Draft(settled, schedule, steps, lines)

    def _scheduled(self, choice: Sequence[int]) -> tuple[Sequence[int], Scheduled]:
        """The choice with all that its recomputation takes, and its schedule: the same whatever else is offloaded."""
        if self._given is not None:
            return choice, self._given
        chosen = tuple(i for i, way in enumerate(choice) if way == RECOMPUTE)
        if chosen not in self._settled:
            while len(self._settled) >= MOST_SCHEDULES:
                self._settled.pop(next(iter(self._settled)))
            settled, reruns = self.results.settled(choice)
            again = [i for i, way in enumerate(settled) if way == RECOMPUTE]
            self._settled[chosen] = again, self._framed(schedule_of(self.results.index, reruns))
        again, scheduled = self._settled[chosen]
        settled = list(choice)
        for i in again:
            settled[i] = RECOMPUTE
        return settled, scheduled

    def _framed(self, schedule: Schedule) -> Scheduled:
        """A schedule with its steps per device, whatever is offloaded."""
        return Scheduled(schedule, [frame_of(schedule, self._ns, device) for device in self.devices])

    def _line(self, steps: Steps, capacity: int) -> Timeline:
        """The faster way to copy out, at the last read or earlier, where the device waits for copies."""
        line = timeline(self.results, steps, capacity)
        if not line.stall_ns:
            return line
        return min(line, timeline(self.results, steps, capacity, eager=True), key=lambda each: (each.excess, each.ns))

    def kept(self) -> Draft:
        """Everything is kept."""
        return self.draft([KEEP] * len(self.results.saved))

    def away(self) -> Draft:
        """Everything is offloaded that can be."""
        return self.draft([OFFLOAD if s.offloads else KEEP for s in self.results.saved])

    def spared(self, draft: Draft) -> list[Draft]:
        """A draft, and others that keep what the device had to wait for in the one before."""
        found = [draft]
        for _ in range(SPARED):
            late = {i for line in found[-1].lines for i in line.late}
            if not late:
                break
            found.append(self.draft([KEEP if i in late else way for i, way in enumerate(found[-1].choice)]))
        return found

    def by_program(self, before: Draft, targets: Sequence[int]) -> Draft:
        """What the linear program chooses for these bytes per device, given the schedule of an earlier draft."""
        results, choice = self.results, [KEEP] * len(self.results.saved)
        host = self.problem.platform.host
        for device in self.devices:
            places = [i for i, s in enumerate(results.saved) if s.device == device]
            if places:
                profile = self._profile(before, device)
                found = shares(results, places, profile, targets[device], host.capacity if host else 0)
                if not found:  # it says nothing: as before
                    choice = [before.choice[i] if i in places else what for i, what in enumerate(choice)]
                for i, what in rounded(results, found).items():
                    choice[i] = what
                    self._doubt[i] = 1.0 - float(found[i].max())
        return self.draft(choice)

    def _profile(self, draft: Draft, device: int) -> Profile:
        """Bytes that are resident beside all choices, and when each is needed, in the schedule of a draft."""
        results, steps = self.results, draft.steps[device]
        need = [s.need for s in results.saved]
        held = steps.held.copy()
        places = wheres(draft.schedule, steps)
        since: dict[int, int] = {}
        for step, (op, at) in enumerate(zip(steps.ops, steps.at, strict=True)):
            for t in results.index.reads[op]:
                i = results.of.get(t, -1)
                if i in since:
                    start = since.pop(i)
                    need[i] = min(need[i], places[step])
                    if draft.choice[i] == KEEP:
                        held[start + 1 : step] -= results.saved[i].bytes
            if draft.schedule.steps[at][1] < 0:
                since.update(dict.fromkeys(self._last.get(op, ()), step))
        base: dict[int, int] = {}
        ns = dict.fromkeys(places, 0)
        for where, op, bytes in zip(places, steps.ops, held.tolist(), strict=True):
            base[where] = max(base.get(where, 0), bytes)
            ns[where] += self._ns[op] if op == where or self._given is not None else 0
        ops = sorted(base)
        return Profile(ops, [ns[op] for op in ops], [base[op] for op in ops], need, self._late)

    def learn(self, run: Replayed) -> bool:
        """Learn from a replay what the model does not know.

        That is what other parts of a composition hold and move: up to the op at which the replay ended, and from there
        on what earlier replays have shown, or else as it was at the last. Where a draft that should have fitted did
        not, as much more is needed at that op; where memory has addresses, anywhere.
        Returns whether there is any of that.
        """
        if run.log is None:
            return False
        homes = [run.log.platform.home(device) for device in self.devices]
        expected = all(
            max(line.used, default=0) <= most for line, most in zip(run.draft.lines, self._room(run), strict=True)
        )
        differs = [0] * len(self._ns)
        for home, (device, line) in zip(homes, enumerate(run.draft.lines), strict=True):
            steps, use, last = run.draft.steps[device], use_at_ops(run.log, device), 0
            needs: dict[int, int] = {}
            for op, used in zip(wheres(run.draft.schedule, steps), line.used, strict=True):
                needs[op] = max(needs.get(op, 0), used)
            ended = expected and run.refusal is not None and run.refusal.tier == home.name
            for at, op, used in zip(steps.at, steps.ops, line.used, strict=True):
                if run.draft.schedule.steps[at][1] >= 0:
                    continue
                if op in use:
                    last = differs[op] = use[op] - used
                    self._seen.add(op)
                elif ended:
                    differs[op], ended = home.capacity + run.lacking - needs[op], False
                elif op not in self._seen:
                    differs[op] = last
        if any(differs):
            earlier = self._others or [0] * len(self._ns)
            self._others = [a + b for a, b in zip(earlier, differs, strict=True)]
        if not run.fits and expected and any(home.allocator.name != "exact" for home in homes):
            self._margin += run.lacking
        self.capacity = self._room(run)  # in a composition what is asked for may be another budget
        return any(differs)

    def _room(self, run: Replayed) -> list[int]:
        """Per device the bytes of a replay's machine, less what is kept free."""
        assert run.log is not None
        return [run.log.platform.home(device).capacity - self._margin for device in self.devices]

    # ---- several -----------------------------------------------------------------------------

    def search(self, rounds: int) -> list[Draft]:
        """Drafts as the program chooses, and the best of them polished."""
        found = self.rough(rounds)
        if not found[-1].excess and found[-1].ns <= found[0].ns:
            return found
        found += self.repairs(found)
        best = self.polished(min(found, key=attrgetter("rank")), WORK)
        found.append(best)
        if not best.excess and max(2, rounds) < WORK // len(self._ns):
            # where polishing ends depends on how shares were rounded: a little less room rounds others
            other = self.by_program(best, [capacity - capacity // 100 for capacity in self.capacity])
            found += [other, self.polished(self.repaired(other, best.ns), WORK)]
        return found

    def repairs(self, found: Sequence[Draft]) -> list[Draft]:
        """Of drafts that miss the budget, and are faster than any that does not, those that miss by least, repaired."""
        below = min((draft.ns for draft in found if not draft.excess), default=None)
        repaired: list[Draft] = []
        for draft in sorted(found, key=attrgetter("rank")):
            if draft.excess and len(repaired) < REPAIRS and (below is None or draft.ns < below):
                repaired.append(self.repaired(draft, below))
        return repaired

    def rough(self, rounds: int) -> list[Draft]:
        """Everything kept, everything offloaded, then as the program chooses, with less room after each miss.

        The last is as fast as the first where one of these is.
        """
        kept = now = self.kept()
        found, seen, fits = [kept, self.away()], set[tuple[int, ...]](), False
        targets, less = list(self.capacity), [0 for _ in self.devices]
        for i in range(max(2, rounds)):
            now = self.by_program(now, targets)
            found.append(now)
            for line in now.lines:
                self._late.update({i: ns + self._late.get(i, 0) for i, ns in line.late.items()})
            if not now.excess and now.ns <= kept.ns:
                return found
            fits |= not now.excess
            if fits and i + 1 >= max(2, WORK // len(self._ns)):
                break
            # what is left over by rounding may be the same again
            missed = zip(now.lines, less, strict=True)
            less = [max(line.excess, 2 * last) if line.excess else 0 for line, last in missed]
            targets = [target - more for target, more in zip(targets, less, strict=True)]
            if tuple(now.choice) in seen and not now.excess:  # copies take longer than windows show
                targets = [target - target // 200 * i for target in targets]
            seen.add(tuple(now.choice))
        return found + self.spared(min(found, key=attrgetter("rank")))

    def polished(self, draft: Draft, work: int, key: Callable[[Draft], Any] = attrgetter("rank")) -> Draft:
        """A draft that no other way for one result, or for two, improves on; as far as so many steps allow."""
        order = sorted(range(len(self.results.saved)), key=lambda i: (self._doubt.get(i, 0.0), -i), reverse=True)
        single = [((i, way),) for i in order for way in self.results.ways(i)]
        best, left = self._climb(draft, single, work, key)
        if left >= len(single) ** 2 // 2 * sum(len(each.ops) for each in draft.steps):
            best, _ = self._climb(best, [(one, two) for (one,), (two,) in combinations(single, 2)], left, key)
        return best

    def repaired(self, draft: Draft, below: int | None) -> Draft:
        """A draft that misses the budget, with other ways for results that are resident where it needs most.

        The ways that cost least time for the memory they free come first, until it fits or takes `below` ns or more,
        nothing helps, or `REPAIR` is spent.
        """
        best, over, left = draft, draft.over(self.capacity), REPAIR
        while over and left > 0 and (below is None or best.ns < below):
            priced: list[tuple[float, int, int]] = []
            for i, way in self._at_peak(best):
                left -= sum(len(each.ops) for each in best.steps)
                if left < 0:
                    break
                other = self._flipped(best, i, way)
                if (freed := over - other.over(self.capacity)) > 0:
                    priced.append((max(other.ns - best.ns, 1) / freed, i, way))
            if not priced:
                break
            most = 2 * min(priced)[0]
            for n, (price, i, way) in enumerate(sorted(priced)):  # after the first, the others cost much the same
                if not over or price > most:
                    break
                left -= sum(len(each.ops) for each in best.steps)
                other = self._flipped(best, i, way)
                freed = over - other.over(self.capacity)
                if not n or (freed > 0 and max(other.ns - best.ns, 1) <= most * freed):
                    best, over = other, over - freed
        return best

    def _flipped(self, draft: Draft, i: int, way: int) -> Draft:
        """The draft with another way for one result."""
        choice = list(draft.choice)
        choice[i] = way
        return self.draft(choice)

    def _at_peak(self, draft: Draft) -> list[tuple[int, int]]:
        """Other ways for results that are resident at the step that needs most: (place, way) of each, largest first."""
        saved = self.results.saved
        over = [max(line.used, default=0) - most for line, most in zip(draft.lines, self.capacity, strict=True)]
        device = max(self.devices, key=over.__getitem__)
        steps, line = draft.steps[device], draft.lines[device]
        peak = max(range(len(line.used)), key=line.used.__getitem__)
        where = wheres(draft.schedule, steps)[peak]
        again = {
            op for at, op in zip(steps.at[: peak + 1], steps.ops, strict=False) if draft.schedule.steps[at][1] >= 0
        }
        found = []
        for i in sorted(range(len(saved)), key=lambda i: -saved[i].bytes):
            s, way = saved[i], draft.choice[i]
            stays = way == KEEP and s.last < where < s.need
            returned = (
                way == RECOMPUTE and s.op in again and where <= max(self.results.held_until[t] for t in s.tensors)
            )
            if s.device == device and (stays or returned):
                found += [(i, other) for other in self.results.ways(i) if other != way]
        return found[:AT_PEAK]

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
        fresh = copy(self)
        fresh._late, fresh._doubt = {}, {}  # which depend on the capacity
        now = best = fresh.kept()
        for _ in range(rounds):
            now = fresh.by_program(now, [0 for _ in self.devices])
            best = min(best, now, key=attrgetter("least_bytes"))
        return fresh.polished(best, WORK, attrgetter("least_bytes"))

    # ---- the plan ----------------------------------------------------------------------------

    def plan(self, draft: Draft) -> Plan:
        """A draft as actions."""
        trace, platform, saved, index = self.problem.trace, self.problem.platform, self.results.saved, self.index
        host = platform.host.name if platform.host else ""
        fetch: dict[int, list[int]] = {}
        early: dict[int, list[int]] = {}
        leave: dict[int, Sequence[int]] = {}
        for steps, line in zip(draft.steps, draft.lines, strict=True):
            leave.update((steps.at[step], places) for step, places in steps.left.items())
            for at, i in line.fetch:
                fetch.setdefault(at, []).append(i)
            for at, i in line.early:
                early.setdefault(at, []).append(i)
        first = {index.device[op]: op for op in reversed(range(len(index.reads)))}  # op of each device
        actions: list[Action] = [
            Move(t, host, before=first[saved[i].device], keep=True) for i in early.pop(-1, ()) for t in saved[i].tensors
        ]
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
            actions += [Move(t, host, after=op, keep=True) for i in early.get(at, ()) for t in saved[i].tensors]
        bytes = self._bytes_by_way(draft)
        notes = {
            "kept_bytes": int(bytes[KEEP]),
            "offloaded_bytes": int(bytes[OFFLOAD]),
            "recomputed_bytes": int(bytes[RECOMPUTE]),
            "expected_ns": draft.ns,
        }
        return Plan(trace, cascade(trace, platform, actions, host) if host else tuple(actions), notes=notes)

    def _bytes_by_way(self, draft: Draft) -> Ints:
        """The bytes that a draft keeps, offloads and recomputes."""
        again = {op for op, anchor in draft.schedule.steps if anchor >= 0}
        read = {t for op in again for t in self.index.reads[op]}
        chosen = {s.tensors: way for s, way in zip(self.results.saved, draft.choice, strict=True)}
        bytes = np.zeros(3, np.int64)
        for s in self._all.saved:
            if not s.forward_only or not read.isdisjoint(s.tensors):
                bytes[RECOMPUTE if s.op in again else chosen.get(s.tensors, KEEP)] += s.bytes
        return bytes


# ---- replays -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Replayed:
    """A draft, its plan and its replay, as far as that went.

    lacking: bytes that were short where it ended, 0 where it fits. log: None where nothing ran. refusal: why it ended.
    """

    draft: Draft
    plan: Plan
    lacking: int
    log: EventLog | None
    refusal: OutOfMemory | None = None

    @property
    def fits(self) -> bool:
        """Whether it ran to its end."""
        return not self.lacking

    @property
    def ns(self) -> int:
        """The makespan."""
        return self.log.end if self.log is not None else 0


def replayed(problem: Problem, drafts: Drafts, draft: Draft) -> Replayed:
    """A draft with its replay."""
    plan = drafts.plan(draft)
    try:
        return Replayed(draft, plan, 0, problem.evaluate(plan))
    except OutOfMemory as error:
        return Replayed(draft, plan, max(error.need_bytes - error.free_bytes, 1), error.log, error)
