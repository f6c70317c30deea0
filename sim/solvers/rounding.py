"""Two-phase rounding: from a fractional answer to plans with whole numbers.

As Checkmate does it (Jain et al., MLSys 2020): first what is kept, by a threshold of one half or at random, each
value with the probability that the relaxation gives it; then the least recomputation for that. Because a rounded plan
may need more than the budget, the relaxation is solved for less, too. Departs: all thresholds that matter are tried,
for several budgets down to the least that the relaxation allows, where the public code takes nine thresholds, and nine
tenths of the budget alone.

Each value of each stage is rounded independently, as published, and near the smallest budget that costs much. There the
relaxation keeps a part of nearly every value and runs a part of its producer, and the missing parts get smaller
from node to node. A threshold below those parts keeps more than fits; one above keeps nothing, so that each op of the
backward recomputes from far back. GPT-2 medium at 10 GB, by stage: the relaxation takes 36.4 % of the iteration, the
best whole plan 36.9 %; of the 38 plans that thresholds give the cheapest that fits takes 451.8 %, and 228.2 % with
relaxations for less memory and random roundings.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from sim.plan import Problem
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes
from sim.solvers.outcome import rerun_ns
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of

FINEST = 40  # thresholds that are tried
DRAWS = 10  # random roundings of each relaxation
BUDGETS = 5  # relaxations that are rounded,
LOWEST = 0.8  # from this part of the budget on
STEPS = 8  # towards the smallest budget

Stages = Sequence[Sequence[int]]
"""Per stage the nodes that are recomputed."""


def by_rounding(
    problem: Problem,
    index: TraceIndex,
    nodes: Nodes,
    finish: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    *,
    budgets: int = BUDGETS,
) -> tuple[Cheapest, int | None]:
    """The cheapest plan by rounding that fits, and the bound on ns of recomputation, None where nothing fits.

    The relaxation is solved for less and less memory, as long as its roundings get cheaper.

    finish: applied to a plan that fits before it is compared.
    budgets: for how many budgets the relaxation is solved at most.
    """
    room = problem.budget - nodes.outside
    relaxed = Program(nodes, room).relax()
    bound = relaxed.bound if relaxed else None
    search = Cheapest(problem, index, nodes, finish)
    floor = Program(nodes, None).relax() if relaxed and budgets > 1 else None
    low = max(floor.room if floor else room, int(room * LOWEST))
    for i in range(budgets if low < room else 1):
        if i:
            relaxed = Program(nodes, room - (room - low) * i // (budgets - 1)).relax()
        keep, before = relaxed.keep if relaxed else {}, search.cost
        search.look((*rounded(nodes, keep), *drawn(nodes, keep)))
        if search.best is not None and (search.cost == before or rerun_ns(problem, search.best) == bound):
            break
    return search, bound


class Cheapest:
    """The cheapest plan so far that fits, None where none did.

    cost: ns of recomputation of the cheapest before `finish`.
    reckoned: the same with all nodes recomputed whole: the plan leaves out ops of a node whose results are not read.
    """

    def __init__(
        self, problem: Problem, index: TraceIndex, nodes: Nodes, finish: Callable[[Schedule], Schedule]
    ) -> None:
        self.problem, self.index, self.nodes, self.finish = problem, index, nodes, finish
        self.best: Schedule | None = None
        self.cost = self.reckoned = math.inf

    def look(self, plans: Iterable[Stages]) -> None:
        """Take the cheapest of some plans that fits, if it is cheaper than the one so far."""
        for stages in plans:
            schedule = schedule_of(self.index, self.nodes.reruns(stages), prune=True)
            cost = rerun_ns(self.problem, schedule)
            if cost >= self.cost or schedule.peak() > self.problem.budget:
                continue
            self.cost, self.reckoned = cost, sum(self.nodes.cost[i] for stage in stages for i in stage)
            schedule = self.finish(schedule)
            if self.best is None or rerun_ns(self.problem, schedule) < rerun_ns(self.problem, self.best):
                self.best = schedule


def tightest(index: TraceIndex, nodes: Nodes) -> tuple[Schedule, bool]:
    """The plan of least peak that rounding finds, and whether the relaxation proves that none needs less."""
    relaxed = Program(nodes, None).relax()
    best = schedule_of(index, {})
    for _ in range(STEPS):
        if relaxed is None:
            return best, True
        lower = _least_peak(index, nodes, relaxed.keep)
        if lower.peak() >= best.peak():
            break
        best = lower
        if best.peak() <= nodes.outside + relaxed.room:
            return best, True
        relaxed = Program(nodes, best.peak() - 1 - nodes.outside).relax()
    return best, False


def _least_peak(index: TraceIndex, nodes: Nodes, keep: Mapping[tuple[int, int], float]) -> Schedule:
    return min(
        (schedule_of(index, nodes.reruns(stages), prune=True) for stages in rounded(nodes, keep)), key=Schedule.peak
    )


def rounded(nodes: Nodes, keep: Mapping[tuple[int, int], float]) -> Iterator[list[list[int]]]:
    """Plans (per stage the nodes that are recomputed), one per threshold, the most that is kept last.

    First what is kept: everything kept at least as far as the threshold; then the least recomputation for that.
    The thresholds are the values that occur in `keep`, thinned out evenly where they are many, one half, and more
    than 1: there nothing is kept that need not be. A plan may need more than the budget.
    """
    levels = sorted({round(level, 6) for level in keep.values() if level > 1e-6}, reverse=True)
    if len(levels) > FINEST:
        levels = [levels[i * (len(levels) - 1) // (FINEST - 1)] for i in range(FINEST)]
    levels = sorted({2.0, 0.5, *levels}, reverse=True)
    yield from _different(nodes, ({key for key, far in keep.items() if far >= level - 1e-6} for level in levels))


def drawn(nodes: Nodes, keep: Mapping[tuple[int, int], float]) -> Iterator[list[list[int]]]:
    """Plans in which each value is kept with the chance that it has in `keep`; always the same ones."""
    draw = random.Random(0)
    yield from _different(nodes, ({key for key, far in keep.items() if draw.random() < far} for _ in range(DRAWS)))


def _different(nodes: Nodes, choices: Iterable[set[tuple[int, int]]]) -> Iterator[list[list[int]]]:
    """The fewest reruns of each choice that can run, without repeats."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for chosen in choices:
        stages = fewest_reruns(nodes, chosen)
        if stages is None:
            continue
        key = tuple(map(tuple, stages))
        if key not in seen:
            seen.add(key)
            yield stages


def fewest_reruns(nodes: Nodes, chosen: Iterable[tuple[int, int]]) -> list[list[int]] | None:
    """The fewest reruns with which the chosen (stage, value) are resident; None where they can't run.

    In closed form: a node runs in a stage if a value that it produces is kept for the next and was not kept
    for this one, or if a node that runs there needs it. A value that can't be recomputed stays from its first run on.
    """
    count = len(nodes)
    kept: list[set[int]] = [set() for _ in range(count + 1)]
    for t, v in chosen:
        kept[t].add(v)
    for v, value in enumerate(nodes.values):
        for t in range(value.producer + 1, value.held_until + 1):
            kept[t].add(v)
        if value.end:
            kept[count].add(v)
    stages = []
    for t in range(count):
        needed = {t}
        if not all(_lies(nodes, kept, needed, t, v) for v in kept[t + 1] - kept[t]):
            return None
        for k in range(t, -1, -1):
            reads = (v for v in nodes.read_by[k] if not k == t == nodes.values[v].producer)
            if k in needed and not all(_lies(nodes, kept, needed, t, v) for v in reads):
                return None
        stages.append(sorted(needed - {t}))
    return stages


def _lies(nodes: Nodes, kept: Sequence[set[int]], needed: set[int], t: int, v: int) -> bool:
    """Have a value resident in a stage: kept, recomputed or, where that can't be, kept from its first run on."""
    value = nodes.values[v]
    if v in kept[t]:
        return True
    if value.producer == t or (not value.once and nodes.border <= t <= nodes.last_rerun[value.producer]):
        needed.add(value.producer)
        return True
    for stage in range(value.producer + 1, t + 1):
        kept[stage].add(v)
    return t <= value.overwritten_at
