"""Lifetimes of tensors as AutoTM's program has them: uses, and gaps between uses in which a tensor may be elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.plan import Problem
from sim.solvers.cascade import resident_bytes
from sim.solvers.spans import Span, spans
from sim.trace.graph import Trace


class Gap(NamedTuple):
    """The ops between two uses, from `first` to `last` by id; none where `first` is beyond `last`."""

    first: int
    last: int


@dataclass(frozen=True)
class Life:
    """A tensor that the program decides about.

    slow: the slow tier where it is when it is not in the fast one.
    uses: what uses it, in order: an op by id; -1 for the start of the iteration, the number of ops for its end.
    out_ns, in_ns: the time of its copies to the slow tier and back.
    slow_ns: per use what the op takes longer with the tensor in the slow tier, 0 for start and end; None where an op
        cannot use it there.
    first: the value whose storage it has taken over, -1 for none.
    until: the op by which it is overwritten, -1 for none.
    starts: for the last value of what is carried, the one with which the next iteration begins, else -1.
    """

    tensor: int
    bytes: int
    slow: str
    uses: Sequence[int]
    out_ns: int
    in_ns: int
    slow_ns: Sequence[int] | None
    first: int
    until: int
    starts: int

    @property
    def gaps(self) -> list[Gap]:
        """Between each use and the next one."""
        return [Gap(a + 1, b - 1) for a, b in pairwise(self.uses)]


@dataclass(frozen=True, eq=False)
class Lives:
    """What there is to decide, and what is not.

    held: bytes that are resident in the fast tier during each op in any case, workspaces included.
    ends: the same at the start and at the end.
    took: per op its time with all operands there, in ns. latency: what an op waits for the slow tier once, in ns.
    beside: the ops of the device's own engine, beside which it may copy.
    """

    lives: Sequence[Life]
    held: Sequence[int]
    ends: tuple[int, int]
    took: Sequence[int]
    latency: int
    beside: frozenset[int]


def lives_of(problem: Problem, chain: Sequence[str]) -> Lives:
    """The lifetimes of device 0. What is never resident while memory is exceeded stays in the fast tier.

    chain: the slow tiers, nearest first. Each tensor has one of them (`_tiers`).
    """
    trace, cost, platform = problem.trace, problem.cost, problem.platform
    home, size, count = problem.home, trace.tensor_columns.bytes, len(trace.ops)
    reached = platform.main_engine(0).reaches
    took = [0 if op in trace.op_columns.engine else cost.op_ns(op) for op in range(count)]
    latency = max((platform.tier(slow).latency for slow in chain if slow in reached), default=0)
    resident = spans(trace, 0)
    load = trace.op_columns.workspace.astype(np.int64)
    for t, span in resident.items():
        load[span.first : span.last + 1] += size[t]
    over = np.concatenate(([0], np.cumsum(load > problem.budget)))
    decided = _decided(trace, {t for t, span in resident.items() if over[span.last + 1] > over[span.first]})
    outputs, starts = set(trace.outputs), {_last_value(trace, first): first for _, first in trace.carry}
    slow_of = _tiers(problem, chain, decided, starts, resident)
    lives = []
    for t in sorted(decided, key=lambda t: (int(trace.producer[t]), t)):
        slow = slow_of[t]
        ops = [op for op in (int(trace.producer[t]), *trace.readers(t)) if op >= 0]
        over_by = int(trace.replaced_by[t])
        until = int(trace.producer[over_by]) if over_by >= 0 else -1
        if until >= 0 and until not in ops:
            ops.append(until)
        touching = {int(trace.producer[t]), *trace.readers(t)}
        slow_ns = (
            [max(cost.op_ns(op, {t: slow}) - took[op] - latency, 0) if op in touching else 0 for op in ops]
            if slow in reached
            else None
        )
        begins, ends = int(trace.producer[t] < 0), int(over_by < 0 and t in outputs)
        uses = [-1] * begins + ops + [count] * ends
        lives.append(
            Life(
                t,
                int(size[t]),
                slow,
                uses,
                cost.move_ns(t, home, slow),
                cost.move_ns(t, slow, home),
                None if slow_ns is None else [0] * begins + slow_ns + [0] * ends,
                int(trace.tensor_columns.replaces[t]),
                until,
                starts.get(t, -1) if ends else -1,
            )
        )
    for life in lives:
        span = resident[life.tensor]
        load[span.first : span.last + 1] -= life.bytes
    c = trace.op_columns
    beside = frozenset(op for op in range(count) if op not in c.engine and op not in c.group)
    fixed = [t for t in resident if t not in decided]
    first = sum(int(size[t]) for t in fixed if trace.producer[t] < 0)
    last = sum(int(size[t]) for t in fixed if t in outputs)
    return Lives(lives, load.tolist(), (first, last), took, latency, beside)


def _tiers(
    problem: Problem,
    chain: Sequence[str],
    decided: Collection[int],
    starts: Mapping[int, int],
    resident: Mapping[int, Span],
) -> dict[int, str]:
    """Per tensor its slow tier: those that live longest have the nearest one, as far as all of them fit there at once.

    What overwrites another in place, and what the next iteration takes over, has the tier of what it was.
    starts: of the last values of what is carried, what they are in the next iteration.
    """
    trace, platform = problem.trace, problem.platform
    root: dict[int, int] = {}
    for t in sorted(decided, key=lambda t: (int(trace.producer[t]), t)):
        over = int(trace.tensor_columns.replaces[t])
        root[t] = root.get(over, t) if over >= 0 else root.get(starts.get(t, t), t)
    size: dict[int, int] = {}
    lived: dict[int, int] = {}
    for t, first in root.items():
        size[first] = max(size.get(first, 0), int(trace.tensor_columns.bytes[t]))
        lived[first] = lived.get(first, 0) + resident[t].last - resident[t].first
    spare = [platform.tier(name).capacity - resident_bytes(trace, platform, name) for name in chain]
    found: dict[int, str] = {}
    for first in sorted(size, key=lambda first: (-lived[first], first)):
        level = next((level for level, left in enumerate(spare) if size[first] <= left), len(chain) - 1)
        spare[level] -= size[first]
        found[first] = chain[level]
    return {t: found[first] for t, first in root.items()}


def _last_value(trace: Trace, tensor: int) -> int:
    while trace.replaced_by[tensor] >= 0:
        tensor = int(trace.replaced_by[tensor])
    return tensor


def _decided(trace: Trace, crossing: set[int]) -> set[int]:
    """Those that memory may be too small for, of which the device sees each use; with all values of their storage."""
    found: set[int] = set()
    for t in range(len(trace.tensors)):
        if trace.tensor_columns.replaces[t] >= 0:
            continue
        values = [t]
        while trace.replaced_by[values[-1]] >= 0:
            values.append(int(trace.replaced_by[values[-1]]))
        if not crossing.isdisjoint(values) and all(_may_move(trace, value) for value in values):
            found.update(values)
    return found


def _may_move(trace: Trace, tensor: int) -> bool:
    c = trace.op_columns
    ops = [op for op in (int(trace.producer[tensor]), *trace.readers(tensor)) if op >= 0]
    if not ops or not trace.tensor_columns.bytes[tensor] or trace.released[tensor] >= 0:
        return False
    return not any(op in c.engine or op in c.group for op in ops)
