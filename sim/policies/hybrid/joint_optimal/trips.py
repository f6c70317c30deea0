"""From the program's answer to a plan: moves beside the recomputations, replayed, and changed where that is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sim.errors import TiersimError
from sim.plan import Action, Move, Plan, Problem
from sim.policies.hybrid.joint_optimal.copies import Copies
from sim.solvers.cascade import cascade
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes, NodeValue
from sim.solvers.schedule import TraceIndex, schedule_of

ATTEMPTS = 4
NODES = 10_000
STEP = 50
"""An exact program is searched to so many nodes and, after an answer of which no plan fits, asked again with this part
of the budget less, so often in all."""


@dataclass(frozen=True, slots=True)
class Away:
    """A tensor's stay on the host.

    value: which one.
    out: the node after which its copy is asked for.
    last: the node after which it leaves, when it has been copied.
    early: whether it leaves before that node instead, after what is recomputed there has read it.
    back: the node before which its return is asked for.
    due: the node before which it has to be back.
    """

    value: int
    out: int
    last: int
    early: bool
    back: int
    due: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan in the program's terms.

    reruns: (stage, node) that is recomputed there.
    away: the stays on the host.
    """

    reruns: frozenset[tuple[int, int]]
    away: tuple[Away, ...] = ()


def choice_of(program: Program, copies: Copies | None, stages: Sequence[Sequence[int]]) -> Choice:
    """What the program's answer chooses."""
    found, nodes = program.found, program.nodes
    reruns = frozenset((t, i) for t, stage in enumerate(stages) for i in stage)
    away: list[Away] = []
    for v in copies.values if copies else ():
        value = nodes.values[v]
        uses = uses_of(value, reruns, len(nodes))
        for t in range(value.producer + 1, len(nodes)):
            for half in (0, 1):
                due = min((use for use in uses if use >= t + half), default=-1)
                if copies is None or due < 0 or not copies.lands(found, t, half, v):
                    continue
                away.append(stay(v, value, reruns, due, copies.begun(found, v, t), copies.left(found, v)))
    return Choice(reruns, tuple(dict.fromkeys(away)))


def uses_of(value: NodeValue, reruns: frozenset[tuple[int, int]], count: int) -> list[int]:
    """The stages in which a value is read, in order."""
    again = {t for t, i in reruns if i in value.readers}
    return [t for t in range(value.producer + 1, count) if t in value.readers or t in again]


def stay(
    v: int, value: NodeValue, reruns: frozenset[tuple[int, int]], due: int, back: int, out: int | None = None
) -> Away:
    """A stay from the last use before `due`. out: when its copy is asked for, if that is before that use."""
    made = [t for t, i in reruns if i == value.producer and t < due]
    last = max((value.producer, *made, *(t for t in uses_of(value, reruns, due))))
    early = last != value.producer and last not in value.readers
    first = last if out is None else max(min(out, last), value.producer)
    return Away(v, first, last, early, min(max(back, last + 1), due), due)


class Replays:
    """Choices replayed by the engine.

    best: the fastest plan that fits; None where none does.
    end: its makespan, ns.
    """

    def __init__(self, problem: Problem, index: TraceIndex, nodes: Nodes, host: str, most: int) -> None:
        """most: replays at most."""
        self._problem = problem
        self._index = index
        self._nodes = nodes
        self._host = host
        self._left = most
        self._seen: dict[Choice, int | None] = {}
        self.best: Plan | None = None
        self.end = -1

    def look(self, choice: Choice) -> int | None:
        """How long a choice takes, ns; None where it does not fit."""
        if choice not in self._seen:
            self._left -= 1
            plan = Plan(self._problem.trace, self.actions(choice))
            try:
                end: int | None = self._problem.evaluate(plan).end
            except TiersimError:
                end = None
            self._seen[choice] = end
            if end is not None and (self.best is None or end < self.end):
                self.best, self.end = plan, end
        return self._seen[choice]

    def take(self, plan: Plan, least: int) -> None:
        """Look at a plan from elsewhere. least: ns below which none of the class is; one that is stays out."""
        try:
            end = self._problem.evaluate(plan).end
        except TiersimError:
            return
        if self.best is None or least <= end < self.end:
            self.best, self.end = plan, end

    def actions(self, choice: Choice) -> tuple[Action, ...]:
        """Returns, recomputations and drops, then what leaves, at each anchor in this order."""
        nodes, problem = self._nodes, self._problem
        stages: list[list[int]] = [[] for _ in range(len(nodes))]
        for t, i in sorted(choice.reruns):
            stages[t].append(i)
        schedule = schedule_of(self._index, nodes.reruns(stages), prune=True)
        first = [part[0] for part in nodes.members]
        back = [
            Move(t, problem.home, keep=True, before=first[one.back])
            for one in sorted(choice.away, key=lambda one: (one.due, one.value))
            for t in nodes.values[one.value].tensors
        ]
        out = [
            _leaves(t, one, nodes, self._host)
            for one in sorted(choice.away, key=lambda one: (one.last, one.value))
            for t in nodes.values[one.value].tensors
        ]
        begun = [
            Move(t, self._host, keep=True, after=nodes.members[one.out][-1])
            for one in sorted(choice.away, key=lambda one: (one.out, one.value))
            for t in nodes.values[one.value].tensors
            if one.out < one.last
        ]
        moves = (*back, *schedule.actions(), *out, *begun)
        return cascade(problem.trace, problem.platform, moves, self._host) if self._host else moves

    def improve(self, start: Choice, goal: int) -> None:
        """Change one thing after the other as long as that makes the plan faster, or makes it fit.

        goal: ns that no plan goes below.
        """
        latest = replace(start, away=tuple(replace(one, back=one.due) for one in start.away))
        current = self._first([start, latest])
        if current is None:
            return
        end, moved = self._seen[current] or 0, True
        while moved and end > goal:
            moved = False
            for other in self._changed(current):
                if self._left < 0 or end <= goal:
                    return
                took = self.look(other)
                if took is not None and took < end:
                    end, current, moved = took, other, True
                    break

    def _first(self, starts: Sequence[Choice]) -> Choice | None:
        """The faster of some choices; where none fits, the first that does when one thing is changed."""
        fits = [(end, i) for i, choice in enumerate(starts) if (end := self.look(choice)) is not None]
        if fits:
            return starts[min(fits)[1]]
        for choice in starts:
            for other in self._changed(choice):
                if self._left < 0:
                    return None
                if self.look(other) is not None:
                    return other
        return None

    def _changed(self, choice: Choice) -> Iterator[Choice]:
        """Choices that differ in one thing: when a value returns or leaves, or how it is restored."""
        for k, one in enumerate(choice.away):
            others = (*choice.away[:k], *choice.away[k + 1 :])
            for back in range(one.due, one.last, -1):
                yield replace(choice, away=(*others, replace(one, back=back)))
            yield replace(choice, away=others)
            producer = self._nodes.values[one.value].producer
            for out in range(producer, one.last + 1):
                yield replace(choice, away=(*others, replace(one, out=out)))
            if one.last + 1 < one.back:
                yield replace(choice, away=(*others, replace(one, out=one.last + 1, last=one.last + 1, early=False)))
            if one.due <= self._nodes.last_rerun[producer]:
                yield Choice(choice.reruns | {(one.due, producer)}, others)
        for t, i in sorted(choice.reruns):
            fewer = choice.reruns - {(t, i)}
            yield replace(choice, reruns=fewer)
            yield from (
                replace(choice, reruns=fewer, away=(*choice.away, stay(v, self._nodes.values[v], fewer, t, t)))
                for v in (movable(self._nodes) if self._host else ())
                if self._nodes.values[v].producer == i
                and t in uses_of(self._nodes.values[v], fewer, len(self._nodes))
                and all(one.value != v for one in choice.away)
            )


def _leaves(tensor: int, one: Away, nodes: Nodes, host: str) -> Move:
    """The move of a tensor that leaves after the last op of a node, or before its first."""
    if one.early:
        return Move(tensor, host, before=nodes.members[one.last][0])
    return Move(tensor, host, after=nodes.members[one.last][-1])


def movable(nodes: Nodes) -> list[int]:
    """The values that may leave: produced, read later, not overwritten in place, no weight gradient, no output."""
    return [
        v
        for v, value in enumerate(nodes.values)
        if value.held_until < 0 and not value.end and value.overwritten_at == len(nodes)
        if value.size and value.readers
    ]
