"""Ways to run one stage of a chain: how much it saves, and what its backward then recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.plan import Problem
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes, nodes_of
from sim.solvers.rounding import rounded
from sim.solvers.schedule import TraceIndex
from sim.trace.chain import BACKWARD, Stage

NEVER, READ, PRODUCED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage. Times in ns, sizes in bytes, as of a `Stage`.

    reruns: per backward op what is recomputed before it, by position in forward and backward together.
    extra: time of those.
    turn: forward time where the backward follows at once.
    xbar: what it saves, its output included.
    saving: bytes beyond input and xbar while it runs forward.
    undoing: bytes beyond xbar and the gradient of its output while it runs backward.
    """

    reruns: tuple[tuple[int, ...], ...]
    extra: int
    turn: int
    xbar: int
    saving: int
    undoing: int

    def beats(self, other: Option) -> bool:
        """Whether nothing about the other is better."""
        mine = (self.extra, self.turn, self.xbar, self.xbar + self.saving, self.xbar + self.undoing)
        theirs = (other.extra, other.turn, other.xbar, other.xbar + other.saving, other.xbar + other.undoing)
        return all(a <= b for a, b in zip(mine, theirs, strict=True))


class Menu:
    """Finds the options of stages; stages that are alike share them.

    levels: how many amounts of saved bytes, between all and the least; as many limits on what the stage holds at
    once for each. exact_ops: for stages of more ops, forward and backward, plans come from rounding alone.
    node_limit, time_limit: of each search.
    """

    def __init__(
        self,
        problem: Problem,
        index: TraceIndex,
        *,
        levels: int,
        exact_ops: int,
        node_limit: int,
        time_limit: float,
    ) -> None:
        self.problem, self.index = problem, index
        self.levels, self.exact_ops = levels, exact_ops
        self.node_limit, self.time_limit = node_limit, time_limit
        self.limits: set[str] = set()
        self._known: dict[object, list[Option]] = {}

    def of(self, stage: Stage, turn: int, max_ops: int) -> list[Option]:
        """The options of a stage; the first saves all. Stages of more than `max_ops` ops have that one alone."""
        count = len(stage.forward)
        every = Option(((),) * len(stage.backward), 0, turn, stage.xbar, stage.saving_temp, stage.backward_temp)
        if not stage.backward or count < 2 or count + len(stage.backward) > max_ops:
            return [every]
        parts = [[op] for op in (*stage.forward, *stage.backward)]
        nodes = nodes_of(self.problem, self.index, parts, border=count)
        incoming = self._incoming(stage)
        values = [replace(value, tensors=()) for value in nodes.values]  # alike, whichever tensors they are
        output = int(self.problem.trace.tensor_columns.bytes[stage.output])
        key = (  # all that the search is told
            *map(tuple, (nodes.cost, nodes.run_bytes, values, incoming)),
            tuple(last - i for i, last in enumerate(nodes.last_rerun) if last <= len(nodes)),
            every,
            stage.uf,
            output,
        )
        if key not in self._known:
            self._known[key] = self._search(nodes, every, stage.uf, incoming, output)
        return self._known[key]

    def _incoming(self, stage: Stage) -> list[tuple[int, int]]:
        """Bytes of the gradients that come from later stages and end here, and the node that reads them last."""
        trace, found = self.problem.trace, []
        place = {op: len(stage.forward) + i for i, op in enumerate(stage.backward)}
        for t in sorted({t for op in stage.backward for t in trace.reads(op)}):
            producer = int(trace.producer[t])
            if producer >= 0 and producer not in place and trace.op_columns.phase[producer] == BACKWARD:
                last = trace.readers(t)[-1]
                found.append((int(trace.tensor_columns.bytes[t]), place.get(last, len(stage.forward) + len(place))))
        return found

    def _search(
        self, nodes: Nodes, every: Option, uf: int, incoming: Sequence[tuple[int, int]], output: int
    ) -> list[Option]:
        border = nodes.border
        movable = [v for v in nodes.useful[1][border] if nodes.values[v].held_until < border]
        held = [v for v in nodes.useful[1][border] if nodes.values[v].held_until >= border]
        least = sum(nodes.values[v].size for v in held)
        most = least + sum(nodes.values[v].size for v in movable)
        found = [every]
        floor = Program(nodes, None).relax()
        if floor is None or most == least:
            return found
        for level in range(self.levels):
            saved = least + (most - least) * level // self.levels
            high = sum(value.size for value in nodes.values) + max(nodes.run_bytes)
            for step in range(self.levels):
                room = floor.room + (high - floor.room) * (self.levels - step) // self.levels
                plans = self._plans(nodes, room, saved)
                for stages in plans:
                    option = _option(nodes, stages, uf, incoming, output)
                    if not any(old.beats(option) for old in found):
                        found = [every, *(old for old in found[1:] if not option.beats(old)), option]
                if not plans:
                    break
                if not step:
                    high = max(held_by(nodes, plans[-1], ())[:2])
        return found

    def _plans(self, nodes: Nodes, room: int, saved: int) -> list[Sequence[Sequence[int]]]:
        """Plans for a stage within limits (by rounding: near them), the best one last; none where none is possible."""
        limits = (nodes.border, saved)
        program = Program(nodes, room, saved=limits)
        relaxed = program.relax()
        if relaxed is None:
            return []
        plans: list[Sequence[Sequence[int]]] = list(rounded(nodes, relaxed.keep))
        if len(nodes) <= self.exact_ops:
            answer = program.minimise(node_limit=self.node_limit, time_limit=self.time_limit)
            if answer.limit:
                self.limits.add(answer.limit)
            if answer.stages:
                plans.append(answer.stages)
        return plans


def _option(
    nodes: Nodes, stages: Sequence[Sequence[int]], uf: int, incoming: Sequence[tuple[int, int]], output: int
) -> Option:
    forward, backward, xbar = held_by(nodes, stages, incoming)
    return Option(
        reruns=tuple(tuple(stage) for stage in stages[nodes.border :]),
        extra=sum(nodes.cost[i] for stage in stages for i in stage),
        turn=uf,
        xbar=xbar,
        saving=max(0, forward - xbar),
        undoing=max(0, backward - xbar - output),
    )


def held_by(nodes: Nodes, stages: Sequence[Sequence[int]], incoming: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """The most bytes while the forward runs, while the backward runs, and the bytes resident between them.

    Tensors that stay to the end in every plan (weight gradients) do not count.

    incoming: (bytes, node that reads it last) of gradients from outside; resident from the border on.
    """
    count, border = len(nodes), nodes.border
    stays = {v for v, value in enumerate(nodes.values) if value.end and value.held_until >= count}
    run_bytes = [
        bytes - sum(nodes.values[v].size for v in nodes.produced_by[k] if v in stays and nodes.values[v].fresh)
        for k, bytes in enumerate(nodes.run_bytes)
    ]
    coming = [READ if value.end else NEVER for value in nodes.values]
    lies = sum(value.size for v, value in enumerate(nodes.values) if value.end and v not in stays)
    between, most = 0, [0, 0]
    for t in reversed(range(count)):
        if t == border - 1:
            for v, value in enumerate(nodes.values):
                if value.held_until >= border and coming[v] != READ and value.producer < border:
                    coming[v] = READ
                    lies += value.size
            between = lies
        for k in reversed([*stages[t], t]):
            for v in nodes.produced_by[k]:
                if coming[v] == READ and v not in stays:
                    lies -= nodes.values[v].size
                coming[v] = PRODUCED
            for v in nodes.read_by[k]:
                if coming[v] != READ and v not in stays:
                    lies += nodes.values[v].size
                coming[v] = READ
            outside = sum(bytes for bytes, last in incoming if t <= last) if t >= border else 0
            most[t >= border] = max(most[t >= border], lies + run_bytes[k] + outside)
    return most[0], most[1], between
