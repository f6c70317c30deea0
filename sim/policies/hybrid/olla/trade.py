"""Spilling and rematerialisation as a plan: which ops and blocks may take part, and the actions of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from sim.plan import Action, Drop, Move, Problem, Recompute
from sim.policies.hybrid.olla.graph import Graph
from sim.policies.hybrid.olla.trade_program import Trade
from sim.solvers.schedule import Schedule, schedule_of
from sim.trace.index import TraceIndex


def recomputable(graph: Graph, index: TraceIndex) -> list[int]:
    """Ops that can run at any later step: nothing of theirs is overwritten, and each result is freed some time."""
    single = {block.tensors[0] for block in graph.blocks if len(block.tensors) == 1 and not block.stays}
    last = len(index.reads)
    return [
        op
        for op, writes in enumerate(index.writes)
        if op not in index.communicating
        and all(t in single or not index.size[t] for t in writes)
        and all(index.freeable[t] and index.replaces[t] < 0 for t in writes)
        and all(index.overwritten_at[t] == last for t in (*index.reads[op], *writes))
    ]


def movable(graph: Graph) -> list[int]:
    """Blocks that may leave for the host: of one tensor, that an op produces and that is freed some time."""
    blocks = enumerate(graph.blocks)
    return [i for i, block in blocks if block.first >= 0 and not block.stays and len(block.tensors) == 1]


def host_of(problem: Problem) -> str:
    """The tier that blocks may leave for; "" where there is no host, or the device reads it in place."""
    host = problem.platform.host
    return "" if host is None or host.name in problem.platform.main_engine(0).reaches else host.name


def order_of(trade: Trade) -> list[int]:
    """The ops in the order of their first runs."""
    return list(dict.fromkeys(op for op, _ in trade.steps))


def actions_of(trade: Trade, graph: Graph, index: TraceIndex, home: str, host: str) -> tuple[Action, ...]:
    """Drops, recomputations and moves. index: of the trace in the order of first runs; its ops count in that order."""
    place = {op: i for i, op in enumerate(order_of(trade))}
    ran: set[int] = set()
    reruns: dict[int, list[int]] = {}
    for op, _ in trade.steps:
        if op in ran:
            reruns.setdefault(len(ran), []).append(place[op])
        ran.add(op)
    schedule = schedule_of(index, {anchor: ops for anchor, ops in reruns.items() if anchor < len(place)})
    fetches = [[graph.blocks[b].tensors[0] for b in fetched] for _, fetched in trade.steps[: len(schedule.steps)]]
    leaves, returns = _trips(schedule, fetches)
    actions: list[Action] = []
    for i, ((op, anchor), dropped) in enumerate(zip(schedule.steps, schedule.drops, strict=True)):
        before = op if anchor < 0 else anchor
        actions += [Move(t, home, before=before) for t in returns.get(i, ())]
        if anchor < 0:
            actions += [Drop(t, after=op) for t in dropped]
            actions += [Move(t, host, after=op) for t in leaves.get(i, ())]
        else:
            actions.append(Recompute(op, before=anchor))
            actions += [Drop(t, before=anchor) for t in dropped]
            actions += [Move(t, host, before=anchor) for t in leaves.get(i, ())]
    return tuple(actions)


def _trips(schedule: Schedule, fetches: Sequence[Sequence[int]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Per step what leaves for the host after it, and what returns before it: what is read before it is produced."""
    index, last = schedule.index, dict[int, int]()
    leaves: dict[int, list[int]] = {}
    returns: dict[int, list[int]] = {}
    for i, ((op, _), fetched) in enumerate(zip(schedule.steps, fetches, strict=True)):
        for t in fetched:
            coming = (t in index.reads[later] for later, _ in schedule.steps[i:] if t in _operands(index, later))
            if next(coming, False):
                leaves.setdefault(last[t], []).append(t)
                returns.setdefault(i, []).append(t)
                last[t] = i
        last |= dict.fromkeys(_operands(index, op), i)
    return leaves, returns


def _operands(index: TraceIndex, op: int) -> tuple[int, ...]:
    return (*index.reads[op], *index.writes[op])
