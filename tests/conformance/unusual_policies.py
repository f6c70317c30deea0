"""Correct policies of kinds that are not shipped: the law must not call them wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np

from sim.errors import TraceError
from sim.plan import Action, Drop, Memory, Move, Need, Online, Plan, Problem, Recompute, Wait
from sim.policies.base import MANAGES, Policy
from sim.rewrites.order import must_precede
from sim.rewrites.rewrite import reorder, split_batch
from sim.rewrites.slots import split_updates
from sim.trace import Trace
from sim.trace.index import TraceIndex
from sim.trace.tensor import ROLE_CODE


@dataclass(frozen=True, kw_only=True)
class DepthFirst(Policy):
    """Reorders: each op that nothing depends on, after all that it depends on, depth first."""

    rewrites = True
    rarely = "most orders of nets this small are that order already"

    def plan(self, problem: Problem) -> Plan:
        """The trace in the new order; as it is where several engines run it."""
        trace = problem.trace
        if trace.devices > 1 or trace.op_columns.engine:
            return Plan(trace)
        order = _depth_first([sorted(must_precede(trace, op)) for op in range(len(trace.ops))])
        return Plan(trace if order == list(range(len(order))) else reorder(trace, order))


def _depth_first(needs: Sequence[Sequence[int]]) -> list[int]:
    order: dict[int, None] = {}
    needed = {other for others in needs for other in others}
    for root in (op for op in range(len(needs)) if op not in needed):
        stack = [root]
        while stack:
            left = [other for other in needs[stack[-1]] if other not in order]
            if left:
                stack.append(left[0])
            else:
                order[stack.pop()] = None
    return list(order)


@dataclass(frozen=True, kw_only=True)
class HalvesAndAgain(Policy):
    """Splits the batch in two, and drops and recomputes results of one half that read inputs alone."""

    rewrites = True
    splits_batch = True
    recomputes = True
    rarely = "few results of nets this small are read twice and produced from inputs alone"

    def plan(self, problem: Problem) -> Plan:
        """The trace in halves, with drops and recomputations; as it is where it cannot be split."""
        trace = _halves(problem.trace)
        index, c = TraceIndex(trace), trace.op_columns
        actions: list[Action] = []
        for t, producer in enumerate(index.producer):
            readers = trace.readers(t)
            if producer < 0 or len(readers) < 2 or not index.droppable[t] or index.released[t] >= 0:
                continue
            users, last = {producer, *readers}, readers[-1]
            if any(op in c.engine or op in c.group for op in users) or len(trace.writes(producer)) > 1:
                continue
            inputs = all(index.stays_until[read] >= last for read in index.reads[producer])
            if inputs and index.until[producer] >= last and last > readers[-2] + 1:
                actions += [Drop(t, after=readers[-2]), Recompute(producer, before=last)]
        return Plan(trace, actions)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """Halves follow each other through several devices or engines, as in a pipeline."""
        return {"halves": Plan(_halves(problem.trace))}


def _halves(trace: Trace) -> Trace:
    try:
        return split_batch(trace, 2)
    except TraceError:
        return trace


@dataclass(frozen=True, kw_only=True)
class WeightsAway(Policy):
    """Moves each weight to the host where it is used least, and back one op before it is used."""

    moves = True
    manages = ("weights",)
    needs = frozenset({"host"})
    rarely = "not every net has a weight that rests for three ops"

    def plan(self, problem: Problem) -> Plan:
        """Moves there and back, each waited for."""
        trace, platform = problem.trace, problem.platform
        assert platform.host is not None
        if trace.devices > 1 or trace.op_columns.engine:
            return Plan(trace)
        columns = trace.tensor_columns
        actions: list[Action] = []
        for t in np.flatnonzero((columns.role == ROLE_CODE["weight"]) & (trace.producer < 0)).tolist():
            over = [int(trace.producer[trace.replaced_by[t]])] if trace.replaced_by[t] >= 0 else []
            users = sorted({*trace.readers(t), *over})
            rest, after, before = max(((b - a, a, b) for a, b in pairwise(users)), default=(0, 0, 0))
            if rest > 2 and columns.bytes[t]:
                back = Move(t, platform.home(0).name, before=before - 1)
                actions += [Move(t, platform.host.name, after=after), back, Wait(t, before=before)]
        return Plan(trace, actions)


class _EvictsAll(Online):
    def __init__(self, host: str, size: Sequence[int]) -> None:
        self.host, self.size = host, size

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """What was read longest ago: weights, states and gradients as well."""
        resident = [t for t in memory.residents(need.tier) if not memory.is_locked(t) and memory.in_flight(t) is None]
        answer: list[Action] = []
        deficit, space = need.short, memory.free(self.host)
        for t in sorted(resident, key=lambda t: (memory.last_read(t), -self.size[t], t)):
            if deficit > 0 and 0 < self.size[t] <= space:
                answer.append(Move(t, self.host))
                deficit -= self.size[t]
                space -= self.size[t]
        return answer


@dataclass(frozen=True, kw_only=True)
class EvictsAll(Policy):
    """Online: moves any tensor of any role to the host under pressure."""

    online = True
    moves = True
    manages: ClassVar[tuple[str, ...]] = MANAGES
    needs = frozenset({"host"})

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is."""
        assert problem.platform.host is not None
        size = problem.trace.tensor_columns.bytes.tolist()
        return Plan(problem.trace, online=partial(_EvictsAll, problem.platform.host.name, size))


@dataclass(frozen=True, kw_only=True)
class UpdatesApart(Policy):
    """Rewrites: of an update of several parameters one op for every other parameter, and one for the rest."""

    rewrites = True
    rarely = "few nets this small update several parameters at once"

    def plan(self, problem: Problem) -> Plan:
        """The trace with the updates divided."""
        trace = problem.trace
        return Plan(split_updates(trace, lambda slot: trace.tensor_id(slot.parameter) % 2))


UNUSUAL = (DepthFirst, HalvesAndAgain, WeightsAway, EvictsAll, UpdatesApart)
