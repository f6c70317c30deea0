"""Weights that ZeRO's level 3 frees after forward, where recomputation reads them in backward.

A checkpoint recomputes a layer just before its backward, when its weights have been gathered for that: the hooks of
FSDP and DeepSpeed gather a module once for both, and what forward gathered has been freed. In a trace, forward and
backward read copies of their own. A plan that recomputes ops of forward would hold forward's copy until then; here its
collective is recomputed in place of the one for backward, and backward reads what that gathers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from sim.plan import Action, Drop, Plan, Recompute
from sim.policies.composition.merging import anchor
from sim.rewrites.holding import points, with_releases
from sim.rewrites.rewriter import Rewriter
from sim.trace.gathers import gathers
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE

FORWARD = PHASE_CODE["forward"]


@dataclass(frozen=True)
class _Pair:
    """A gather for forward, and one for backward that it replaces.

    copies: per tensor that backward's gather makes, the one of forward's with the same value.
    """

    forward: int
    backward: int
    copies: dict[int, int]


def gathered_once(plan: Plan) -> Plan:
    """The plan with weights gathered once for recomputation and backward, where level 3 gathers them for backward.

    A plan without recomputation, for other traces, or with an online part is returned as it is; so is one that decides
    on the copies for backward itself.
    """
    trace = plan.trace
    if trace.meta.get("zero") != 3 or plan.online is not None:
        return plan
    if not any(isinstance(action, Recompute) for action in plan.actions):
        return plan
    pairs = _pairs(trace, plan.actions)
    return _merged(plan, pairs) if pairs else plan


def _pairs(trace: Trace, actions: Iterable[Action]) -> list[_Pair]:
    """The gathers for forward of what is recomputed, and for backward, that can be one."""
    assert trace.origin is not None
    exprs, producer, phase = trace.origin.tensors, trace.producer, trace.op_columns.phase
    ends = dict(points(trace))
    end = [max(int(last), ends.get(t, -1)) for t, last in enumerate(trace.last_use)]
    made: dict[object, list[int]] = {}  # per value the copies that backward has, in order
    forward = set()
    for op in gathers(trace):
        # one that is ahead of its layer may stand among ops of the other phase
        if any(phase[reader] == FORWARD for t in trace.writes(op) for reader in trace.readers(t)):
            forward.add(op)
        else:
            for t in trace.writes(op):
                made.setdefault(exprs[t], []).append(t)
    decided = {trace.tensor_id(a.tensor) for a in actions if not isinstance(a, Recompute)}
    found: dict[int, _Pair | None] = {}
    for action in actions:
        if not isinstance(action, Recompute):
            continue
        at = sum(anchor(action, trace))
        for t in trace.reads(trace.op_id(action.op)):
            if producer[t] not in forward or end[t] >= at or int(producer[t]) in found:
                continue
            there = [u for u in made.get(exprs[t], ()) if producer[u] < at <= end[u]]
            if there:
                found[int(producer[t])] = _pair(trace, int(producer[t]), int(producer[there[0]]), end, decided)
    taken: set[int] = set()
    pairs = []
    for pair in filter(None, found.values()):
        if pair.backward not in taken:
            taken.add(pair.backward)
            pairs.append(pair)
    return pairs


def _pair(trace: Trace, forward: int, backward: int, end: list[int], decided: set[int]) -> _Pair | None:
    """Two gathers as one, if forward's has all of what backward's has, from the same parts, and is freed by then."""
    assert trace.origin is not None
    exprs = trace.origin.tensors
    own = {exprs[t]: t for t in trace.writes(forward)}
    copies = {u: own.get(exprs[u], -1) for u in trace.writes(backward)}
    if min(copies.values(), default=-1) < 0 or not set(trace.reads(backward)) <= set(trace.reads(forward)):
        return None
    if any(end[t] >= backward for t in trace.writes(forward)) or not decided.isdisjoint((*copies, *copies.values())):
        return None
    return _Pair(forward, backward, copies)


def _merged(plan: Plan, pairs: list[_Pair]) -> Plan:
    """The plan over a trace without the gathers for backward of these pairs."""
    old = plan.trace
    copies = {u: t for pair in pairs for u, t in pair.copies.items()}
    gone = {pair.backward for pair in pairs}
    new = Rewriter(old)
    ids = new.all_tensors(copies)
    ids = [ids[copies.get(t, t)] for t in range(len(ids))]
    copy, where, place = (
        new.copier(),
        np.full(len(old.op_columns.name), -1),
        np.zeros(len(old.op_columns.name) + 1, int),
    )
    for op, device in enumerate(old.op_columns.device.tolist()):
        place[op] = new.op_count  # of a gather that is left out, the op that follows
        if op not in gone:
            where[op] = new.op_count
            reads = dict.fromkeys(ids[t] for t in old.reads(op))
            copy(op, list(reads), [ids[t] for t in old.writes(op)], device)
    place[-1] = new.op_count
    carry = [(ids[a], ids[b]) for a, b in old.carry]
    built = new.build(outputs=[ids[t] for t in old.outputs], carry=carry)
    held = [(ids[t], int(where[op])) for t, op in points(old) if t in copies]
    if held:
        kept = [(t, op) for t, op in points(built) if t not in {t for t, _ in held}]
        built = with_releases(built, sorted([*kept, *held], key=lambda point: point[1]))
    again = [Recompute(int(where[pair.forward]), before=int(place[pair.backward])) for pair in pairs]
    actions = [_moved(action, old, ids, where, place) for action in plan.actions]
    drops = list(_drops(old, built, pairs, ids, where, (*again, *actions)))
    stays = plan.keep_dead
    return replace(
        plan,
        trace=built,
        actions=(*again, *drops, *actions),
        place={ids[old.tensor_id(t)]: tier for t, tier in plan.place.items()},
        keep_dead=stays if isinstance(stays, bool) else frozenset(ids[t] for t in stays),
    )


def _moved(action: Action, old: Trace, ids: list[int], where: np.ndarray, place: np.ndarray) -> Action:
    """An action over the old trace as the same over the new one."""
    op, after = anchor(action, old)
    follows = bool(after) and where[op] >= 0  # after a gather that is left out: before the op that comes next
    before, behind = (None, int(where[op])) if follows else (int(place[op]), None)
    if isinstance(action, Recompute):
        return replace(action, op=int(where[old.op_id(action.op)]), before=before, after=behind)
    return replace(action, tensor=ids[old.tensor_id(action.tensor)], before=before, after=behind)


def _drops(
    old: Trace, built: Trace, pairs: list[_Pair], ids: list[int], where: np.ndarray, actions: tuple[Action, ...]
) -> Iterator[Action]:
    """What forward gathers is dropped after its last reader there, where something is to read it later."""
    later: set[int] = set()
    for action in actions:
        if isinstance(action, Recompute):
            later.update(built.reads(action.op))  # type: ignore[arg-type]
    ends = dict(points(built))
    for pair in pairs:
        for t in old.writes(pair.forward):
            last = int(where[max(old.readers(t), default=pair.forward)])
            new = ids[t]
            if new in later or max(int(built.last_use[new]), ends.get(new, -1)) > last:
                yield Drop(new, after=last)
