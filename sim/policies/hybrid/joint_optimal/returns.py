"""From when values are back to when they leave; and copies back ahead of their reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sim.plan import Problem
from sim.policies.hybrid.joint_optimal.trips import Choice, movable, stay, uses_of
from sim.solvers.nodes import Nodes
from sim.solvers.trip import Trip


def copy_times(problem: Problem, nodes: Nodes, host: str) -> dict[int, Trip]:
    """Per value that may leave the ns of its copies, each alone on its route; none without a host."""
    if not host:
        return {}
    move_ns, home = problem.platform.move_ns, problem.home
    size = {v: nodes.values[v].size for v in movable(nodes)}
    return {v: Trip(move_ns(bytes, home, host), move_ns(bytes, host, home)) for v, bytes in size.items()}


def choice_with(nodes: Nodes, stages: Sequence[Sequence[int]], back: Collection[tuple[int, int]]) -> Choice:
    """The choice that recomputes these nodes per stage, and has values back when they are read next.

    back: (stage, value) that is copied back for that stage. It leaves after its last use before that.
    """
    reruns = frozenset((t, i) for t, stage in enumerate(stages) for i in stage)
    away = []
    for t, v in sorted(back):
        due = min((use for use in uses_of(nodes.values[v], reruns, len(nodes)) if use >= t), default=-1)
        if due >= 0:
            away.append(stay(v, nodes.values[v], reruns, due, due))
    return Choice(reruns, tuple(dict.fromkeys(away)))


def ahead(nodes: Nodes, trips: Mapping[int, Trip], choice: Choice) -> Choice:
    """The same with copies back as late as they are in time, one after the other, instead of when they are read."""
    again = dict.fromkeys(range(len(nodes)), 0)
    for t, i in choice.reruns:
        again[t] += nodes.cost[i]
    starts, now = [], 0
    for t, cost in enumerate(nodes.cost):
        starts.append(now)
        now += again[t] + cost
    away, free = [], now
    for one in sorted(choice.away, key=lambda one: (-one.due, -one.value)):
        free = min(free, starts[one.due]) - trips[one.value].back
        latest = bisect_right(starts, free) - 1
        away.append(replace(one, back=min(max(latest, one.last + 1), one.due)))
    return replace(choice, away=tuple(away[::-1]))
