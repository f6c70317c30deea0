"""Compression of offloaded tensors on the host: a mask of what is not zero, and those values in slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil

from sim.errors import PolicyError
from sim.log import FIRST_RUNS, WHY, EventLog
from sim.plan import Action, Move, Plan, Problem
from sim.rewrites.codecs import WIDTHS, part_of
from sim.rewrites.encoding import may_encode
from sim.rewrites.rewrite import Codec, encode, reorder
from sim.trace.chain import FORWARD
from sim.trace.graph import Trace

CPU = "cpu"
ELEMENT = 4
"""Bytes of an element of FP32, which the published code compresses."""
SLICES = 8
"""Slices of a tensor, one for each CPU thread."""
SLOTS = 8
"""Slots of a slice: the buffers that it packs its values into; those that stay empty are never allocated."""
WORD = 32
"""Elements per word of the mask."""


def compressed_bytes(bytes: int, zeros: float, width: int = ELEMENT) -> int:
    """Bytes of a compressed tensor: its mask, and as many slots as its values fill in each slice.

    width: bytes of an element, of which `zeros` is a share.
    """
    elements = -(-bytes // width)
    mask = -(-elements // WORD) * (WORD // 8)
    in_slice = -(-elements // SLICES)
    slot = -(-in_slice // SLOTS)
    values = ceil(in_slice - part_of(in_slice, zeros))
    return mask + SLICES * -(-values // slot) * slot * width if slot else mask


def compressed(problem: Problem, plan: Plan, zeros: float, host: str) -> Plan:
    """The plan with what it offloads compressed on the host between arrival and prefetch, where that makes it smaller.

    When copies arrive, a replay of the plan tells. Raises PolicyError where no CPU works beside device 0; what
    the replay raises.
    """
    if not any(engine.name == CPU for engine in problem.platform.engines):
        raise PolicyError(f"vdnn_pp: compress: {problem.platform.name} has no engine {CPU!r}")
    trips = _trips(plan, host)
    arrival = _encodable_after(problem.evaluate(plan), trips, host)
    codecs = {}
    for t in arrival:
        size = int(plan.trace.tensor_columns.bytes[t])
        width = WIDTHS.get(plan.trace.tensor_columns.dtype[t], ELEMENT)
        small = compressed_bytes(size, plan.trace.tensor_columns.zeros.get(t, zeros), width)
        if small < size:
            codecs[t] = Codec("packed", Fraction(small, size), engine=CPU)
    return _rewritten(plan, codecs, arrival, trips) if codecs else plan


def _trips(plan: Plan, host: str) -> dict[int, Move]:
    """Per tensor that can be encoded and goes to the host alone, its move back."""
    trace, moves = plan.trace, dict[int, list[Move]]()
    for action in plan.actions:
        if isinstance(action, Move):
            moves.setdefault(trace.tensor_id(action.tensor), []).append(action)
    return {
        t: own[-1]
        for t, own in moves.items()
        if [move.to == host for move in own] == [True, True, False] and may_encode(trace, t)
    }


def _encodable_after(log: EventLog, trips: Mapping[int, Move], host: str) -> dict[int, int]:
    """Per tensor that arrives on the host before forward ends, the first forward op that begins after that."""
    trace = log.trace
    runs = {WHY[name] for name in FIRST_RUNS}
    columns = (log.interval(name).tolist() for name in ("start", "end", "why", "op", "tensor", "lane"))
    begins, arrives = {}, {}
    into = {i for i, link in enumerate(log.platform.links, len(log.platform.engines)) if link.target == host}
    for start, end, why, op, tensor, lane in zip(*columns):
        if why in runs and trace.op_columns.phase[op] == FORWARD:
            begins[op] = start
        elif why == WHY["move"] and lane in into and tensor in trips:
            arrives[tensor] = end
    device = trace.op_columns.device
    found = {}
    for t, end in sorted(arrives.items(), key=lambda pair: pair[1]):
        own = (op for op in sorted(begins) if device[op] == device[trace.producer[t]] and begins[op] >= end)
        op = next(own, None)
        if op is not None:
            found[t] = op
    return found


def _rewritten(plan: Plan, codecs: Mapping[int, Codec], arrival: Mapping[int, int], trips: Mapping[int, Move]) -> Plan:
    """Encode ops before the op at which each tensor has arrived, decode ops where its prefetch was to begin."""
    old, names = plan.trace, plan.trace.tensor_columns.name
    new = encode(old, {names[t]: codec for t, codec in codecs.items()})
    op_id = {name: op for op, name in enumerate(new.op_columns.name)}
    ahead: dict[int, list[int]] = {}
    for t in codecs:
        ahead.setdefault(op_id[old.op_columns.name[arrival[t]]], []).append(op_id[f"{names[t]}.encode"])
        begin = old.op_id(trips[t].before)  # type: ignore[arg-type]
        ahead.setdefault(op_id[old.op_columns.name[begin]], []).append(op_id[f"{names[t]}.decode"])
    moved = {op for ops in ahead.values() for op in ops}
    order = [one for op in range(len(new.ops)) if op not in moved for one in (*ahead.get(op, ()), op)]
    trace = reorder(new, order)
    decoded = {t: trace.tensor_id(f"{names[t]}.decoded") for t in codecs}
    actions = [_translated(action, old, trace, decoded, trips) for action in plan.actions]
    return replace(plan, trace=trace, actions=tuple(actions), notes={**plan.notes, "compressed": tuple(sorted(codecs))})


def _translated(
    action: Action, old: Trace, trace: Trace, decoded: Mapping[int, int], trips: Mapping[int, Move]
) -> Action:
    """An action of the old trace in the new one; the prefetch of an encoded tensor follows its decode op."""
    t = old.tensor_id(action.tensor) if isinstance(action, Move) else -1
    if t in decoded and action == trips[t]:
        decode = trace.op_id(f"{old.tensor_columns.name[t]}.decode")
        return replace(trips[t], tensor=decoded[t], before=None, after=decode)
    before, after = (
        None if op is None else trace.op_id(old.op_columns.name[old.op_id(op)]) for op in (action.before, action.after)
    )
    return replace(action, before=before, after=after)
