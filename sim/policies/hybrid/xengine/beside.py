"""Engines beside each other with unlimited memory: what a run of XEngine's plans can gain that its program ignores."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim.errors import TiersimError
from sim.plan import Move, Plan, Problem
from sim.policies.hybrid.xengine.engines import Choices, on_engines
from sim.policies.hybrid.xengine.program import Scene


def fastest_beside(problem: Problem, scene: Scene, starts: Sequence[Sequence[int]]) -> Plan:
    """The fastest plan that was found by giving one op after the other to another engine, as long as that helps.

    starts: engines per op to start from.
    """
    best, end = Plan(problem.trace), _end(problem, Plan(problem.trace))
    for start in starts:
        chosen, plan, moved = list(start), eager(scene, start), True
        last = _end(problem, plan)
        while moved:
            moved = False
            for op, e in ((op, e) for op, engines in enumerate(scene.choices.able) for e in engines):
                other = [*chosen[:op], e, *chosen[op + 1 :]]
                draft = eager(scene, other)
                if e != chosen[op] and (took := _end(problem, draft)) < last:
                    chosen, plan, last, moved = other, draft, took, True
        if last < end:
            best, end = plan, last
    return best


def _end(problem: Problem, plan: Plan) -> float:
    """When a plan ends, ns; infinity where it does not fit another memory."""
    try:
        return problem.evaluate(plan).end
    except TiersimError:
        return math.inf


def eager(scene: Scene, chosen: Sequence[int]) -> Plan:
    """Ops on these engines, with each copy made as soon as there is something to copy, and nothing released."""
    index, choices = scene.index, scene.choices
    at = [choices.memory(e) for e in chosen]
    place: dict[int, str] = {}
    for t, root in scene.roots.items():
        if t != root:
            place[root] = at[index.producer[t]]
    for op, reads in enumerate(index.reads):
        for t in reads:
            if t in scene.roots:
                place.setdefault(scene.roots[t], at[op])
    moves: list[Move] = []
    for op, reads in enumerate(index.reads):
        for t in reads:
            producer = index.producer[t]
            if (at[producer] if producer >= 0 else place[t]) == at[op]:
                continue
            move = Move(t, at[op], keep=True, before=0) if producer < 0 else Move(t, at[op], keep=True, after=producer)
            if move not in moves:
                moves.append(move)
    return Plan(on_engines(index.trace, choices, chosen), tuple(moves), place=place)


def all_on(choices: Choices, memory: str) -> list[int]:
    """Per op its fastest engine in a memory, or at all where none there runs it."""
    return [
        min(engines, key=lambda e: (choices.memory(e) != memory, choices.ns[op, e]))
        for op, engines in enumerate(choices.able)
    ]
