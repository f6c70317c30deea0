"""Two-phase rounding: from a fractional answer to plans with whole numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sim.plan import Problem
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes
from sim.solvers.outcome import rerun_ns
from sim.solvers.runs import Ledger, Runs, runs

FINEST = 40  # thresholds that are tried
TIGHTER = (1.0, 0.9)  # parts of the budget for which the relaxation is rounded
STEPS = 8  # towards the smallest budget


def by_rounding(problem: Problem, ledger: Ledger, nodes: Nodes) -> tuple[Runs | None, int | None]:
    """The cheapest plan by rounding that fits, and the bound on ns of reruns; None where there is none."""
    room = problem.budget - nodes.outside
    best: Runs | None = None
    bound: int | None = None
    for part in TIGHTER:
        relaxed = Program(nodes, int(room * part)).relax()
        if part == 1.0:
            bound = relaxed.bound if relaxed else None
        for stages in rounded(nodes, relaxed.keep if relaxed else {}):
            found = runs(ledger, nodes.again(stages), prune=True)
            cheaper = best is None or rerun_ns(problem, found) < rerun_ns(problem, best)
            if cheaper and found.peak() <= problem.budget:
                best = found
        if relaxed is None or (best and rerun_ns(problem, best) == bound):
            break
    return best, bound


def tightest(ledger: Ledger, nodes: Nodes) -> tuple[Runs, bool]:
    """The plan of least peak that rounding finds, and whether the relaxation proves that none needs less."""
    relaxed = Program(nodes, None).relax()
    best = runs(ledger, {})
    for _ in range(STEPS):
        if relaxed is None:
            return best, True
        lower = _least_peak(ledger, nodes, relaxed.keep)
        if lower.peak() >= best.peak():
            break
        best = lower
        if best.peak() <= nodes.outside + relaxed.room:
            return best, True
        relaxed = Program(nodes, best.peak() - 1 - nodes.outside).relax()
    return best, False


def _least_peak(ledger: Ledger, nodes: Nodes, keep: Mapping[tuple[int, int], float]) -> Runs:
    return min((runs(ledger, nodes.again(stages), prune=True) for stages in rounded(nodes, keep)), key=Runs.peak)


def rounded(nodes: Nodes, keep: Mapping[tuple[int, int], float]) -> Iterator[list[list[int]]]:
    """Plans (per stage the nodes that run again), one a threshold, the most that is kept last.

    First what is kept: everything kept at least as far as the threshold; then the fewest reruns for that.
    The thresholds are the values that occur in `keep`, thinned out evenly where they are many, and more
    than 1: there nothing is kept that need not be. A plan may hold more than the budget.
    """
    levels = sorted({round(level, 6) for level in keep.values() if level > 1e-6}, reverse=True)
    if len(levels) > FINEST:
        levels = [levels[i * (len(levels) - 1) // (FINEST - 1)] for i in range(FINEST)]
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for level in [2.0, *levels]:
        chosen = {key for key, far in keep.items() if far >= level - 1e-6}
        stages = fewest_reruns(nodes, chosen)
        if stages is None:
            continue
        key = tuple(map(tuple, stages))
        if key not in seen:
            seen.add(key)
            yield stages


def fewest_reruns(nodes: Nodes, chosen: Iterable[tuple[int, int]]) -> list[list[int]] | None:
    """The fewest reruns that have the chosen (stage, value) lie there; None where one of them can't run.

    In closed form: a node runs in a stage if something that it makes is kept for the next and was not kept
    for this one, or if a node that runs there needs it.
    """
    count = len(nodes)
    kept: list[set[int]] = [set() for _ in range(count + 1)]
    for t, v in chosen:
        kept[t].add(v)
    for v, value in enumerate(nodes.values):
        for t in range(value.maker + 1, value.held_until + 1):
            kept[t].add(v)
        if value.end:
            kept[count].add(v)
    stages = []
    for t in range(count):
        needed = {t} | {nodes.values[v].maker for v in kept[t + 1] - kept[t]}
        for k in range(t, -1, -1):
            if k in needed:
                if k < t and not nodes.border <= t <= nodes.last_again[k]:
                    return None
                needed.update(nodes.values[v].maker for v in nodes.read_by[k] if v not in kept[t])
        stages.append(sorted(needed - {t}))
    return stages
