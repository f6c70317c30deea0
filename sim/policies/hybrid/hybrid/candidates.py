"""Which results there is a choice for, and what their copies and their recomputation take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from sim.plan import Problem
from sim.policies.hybrid.hybrid.results import Results, Saved
from sim.solvers.schedule import TraceIndex
from sim.trace.chain import BACKWARD, FORWARD, saved_tensors
from sim.trace.tensor import ROLE_CODE

SMALL = 1000
"""The smallest results, together less than one in so many saved bytes, stay: each copy has a fixed time."""


def results_of(problem: Problem, *, inputs: bool = True, later: bool = False) -> Results:
    """The choices of a trace on a platform.

    inputs: whether inputs of the iteration are among them. later: whether what backward and the update produce for
    later ops is, too; it may be offloaded.
    """
    trace, index = problem.trace, TraceIndex(problem.trace)
    storages = set(trace.view_of.values())
    groups: dict[int, list[int]] = {}
    for t in saved_tensors(trace).tolist():
        if index.size[t] and index.droppable[t] and t not in storages:
            groups.setdefault(index.producer[t], []).append(t)
    sizes = {op: sum(index.size[t] for t in tensors) for op, tensors in groups.items()}
    total, stays = sum(sizes.values()), _small(sizes)
    given = [(-1, (t,)) for t in _inputs(index) if inputs and index.size[t] * SMALL > total]
    found = []
    for op, tensors in (*given, *((op, tuple(groups[op])) for op in sorted(groups) if op not in stays)):
        need = min(r for t in tensors for r in trace.readers(t) if index.phase[r] == BACKWARD)
        found.append(_saved(problem, index, op, tensors, need))
    backward = _results(index, found)
    needs = _forward_only(backward)
    for op, need in needs.items():
        lost = (t for t in index.writes[op] if backward.is_lost(t, need) and index.droppable[t] and t not in storages)
        found.append(_saved(problem, index, op, tuple(lost), need, forward_only=True))
    chosen = {t for s in found for t in s.tensors}
    for op, t, need in _produced_later(index) if later else ():
        if t not in chosen and t not in storages and index.size[t] * SMALL > total:
            found.append(replace(_saved(problem, index, op, (t,), need), recomputes=False))
    results = _results(index, found)
    # what would take an op of another device or of a group to recompute is not recomputed
    return _results(index, [replace(s, recomputes=s.recomputes and _alone(results, s)) for s in results.saved])


def _results(index: TraceIndex, saved: Sequence[Saved]) -> Results:
    """These in program order, except for those that are read at once."""
    ordered = sorted((s for s in saved if s.bytes and s.last + 1 < s.need), key=lambda s: s.op)
    return Results(
        index,
        ordered,
        {s.op: i for i, s in enumerate(ordered) if s.op >= 0},
        {t: i for i, s in enumerate(ordered) for t in s.tensors},
        frozenset(index.trace.outputs),
        index.trace.held_until.tolist(),
    )


def _saved(
    problem: Problem, index: TraceIndex, op: int, tensors: tuple[int, ...], need: int, *, forward_only: bool = False
) -> Saved:
    """Results of an op, or an input, with what their ways cost."""
    c, size = index.trace.op_columns, [index.size[t] for t in tensors]
    last = max([op, *(r for t in tensors for r in index.trace.readers(t) if r < need)])
    device = index.device[op if op >= 0 else last]
    out, back = _copies(problem, size, device)
    sends, early = (
        out > 0 and (at < 0 or (at not in c.engine and at not in c.group and index.device[at] == device))
        for at in (last, op)
    )
    recomputes = op >= 0 and index.recomputable_until[op] >= need
    return Saved(
        op, device, tensors, sum(size), last, need, out, back, sends, recomputes, sends and early and op < last,
        forward_only,
    )  # fmt: skip


def _forward_only(results: Results) -> dict[int, int]:
    """Per op of which backward reads nothing, but recomputation might, the first op of backward at which."""
    needs: dict[int, int] = {}
    for s in results.saved:
        for op in results.behind(s.op, s.need) if s.recomputes else ():
            if op not in results.by_op:
                needs[op] = min(needs.get(op, s.need), s.need)
    return needs


def _inputs(index: TraceIndex) -> list[int]:
    """Inputs of the iteration that one device's forward and backward read."""
    found, trace = [], index.trace
    lasting = (trace.producer >= 0) | (trace.replaced_by >= 0)
    for t in np.flatnonzero(~lasting & (trace.tensor_columns.role == ROLE_CODE["input"])).tolist():
        phases = [index.phase[op] for op in trace.readers(t)]
        alone = len({index.device[op] for op in trace.readers(t)}) == 1
        if alone and FORWARD in phases and BACKWARD in phases and t not in trace.outputs:
            found.append(t)
    return found


def _produced_later(index: TraceIndex) -> Iterator[tuple[int, int, int]]:
    """Results of backward and the update, weight gradients apart: op, tensor, and the read after its longest gap."""
    trace = index.trace
    for op in np.flatnonzero(trace.op_columns.phase != FORWARD).tolist():
        for t in index.writes[op]:
            uses = [op, *(r for r in trace.readers(t) if r > op)]
            gaps = [(after - before, after) for before, after in pairwise(uses)]
            if gaps and index.droppable[t]:
                yield op, t, max(gaps)[1]


def _alone(results: Results, saved: Saved) -> bool:
    index, c = results.index, results.index.trace.op_columns
    return all(
        index.device[op] == saved.device and op not in c.group and op not in c.engine
        for op in (saved.op, *results.behind(saved.op, saved.need))
    )


def _small(size: Mapping[int, int]) -> set[int]:
    """The ops with the smallest results, together less than `SMALL` says."""
    found, left = set(), sum(size.values()) // SMALL
    for op in sorted(size, key=lambda op: (size[op], op)):
        left -= size[op]
        if left < 0:
            break
        found.add(op)
    return found


def _copies(problem: Problem, sizes: Sequence[int], device: int) -> tuple[int, int]:
    """Nanoseconds to copy tensors from a device to the host and back, (0, 0) where there is no way."""
    platform, home = problem.platform, problem.platform.home(device).name
    if (
        platform.host is None
        or not platform.route(home, platform.host.name)
        or not platform.route(platform.host.name, home)
    ):
        return 0, 0
    host = platform.host.name
    return sum(platform.move_ns(b, home, host) for b in sizes), sum(platform.move_ns(b, host, home) for b in sizes)
