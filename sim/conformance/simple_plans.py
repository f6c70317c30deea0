"""Simple plans, with which a plan that is said to be optimal is compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from sim.plan import Plan
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of
from sim.trace.graph import Trace

PAIRS = 6
"""Of so many of the largest ops all pairs are recomputed."""


def simple_plans(trace: Trace) -> Iterator[Plan]:
    """The plain plan, and plans for one device that recompute some ops once, after the peak of the plain one.

    Results that are idle over that peak are dropped before it and recomputed before their next reader: each alone, the
    k largest, the k first and the k last together, and pairs of the largest.
    """
    if trace.devices > 1:
        return
    index = TraceIndex(trace)
    plain = schedule_of(index, {})
    yield Plan(trace, plain.actions())
    idle = _idle_at_peak(plain)
    size = {op: sum(index.size[t] for t in index.writes[op]) for op in idle}
    orders = [sorted(idle, key=lambda op: (-size[op], op)), sorted(idle), sorted(idle, reverse=True)]
    chosen: set[tuple[int, ...]] = {(op,) for op in idle}
    chosen.update(combinations(orders[0][:PAIRS], 2))
    chosen |= {tuple(sorted(order[:count])) for order in orders for count in range(1, len(order) + 1)}
    for ops in sorted(chosen, key=lambda ops: (len(ops), ops)):
        reruns: dict[int, list[int]] = {}
        for op in sorted(ops):
            reruns.setdefault(idle[op], []).append(op)
        yield Plan(trace, schedule_of(index, reruns, prune=True).actions())


def _idle_at_peak(plain: Schedule) -> dict[int, int]:
    """Per op whose results are idle at the peak: the op before which it could be recomputed."""
    index = plain.index
    held = plain.peaks()[1:]
    peak = max(range(len(held)), key=held.__getitem__, default=0)
    found: dict[int, int] = {}
    for op in range(peak):
        readers = [r for t in index.writes[op] for r in index.trace.readers(t)]
        later = min((r for r in readers if r > peak), default=-1)
        if later >= 0 and peak not in readers and index.can_recompute(op, later):
            found[op] = later
    return found
