"""What an online policy may evict: the lineage of every tensor, and the sets of candidates.

A tensor may be evicted if one device alone can recompute its producer (`sim.trace.index`), unless that belongs to the
update. A tensor that cannot be recomputed (a received one, an updated weight) is freed for good only when no evicted
tensor that is still needed depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray

from sim.declared import OneOf
from sim.hardware.dispatch import added
from sim.native import mypyc_attr
from sim.plan import Drop, Problem
from sim.trace.columns import row_sums, rows_of
from sim.trace.graph import Trace
from sim.trace.index import TraceIndex
from sim.trace.kept import kept
from sim.trace.liveness import freeable, uses
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE, ROLES

EVICTED_ROLES = ("activation", "temporary")
"""The roles that are evicted where a policy is not told otherwise."""

Role = Annotated[str, OneOf(ROLES)]
"""A role that a policy may be told to evict."""


@mypyc_attr(native_class=False)
@dataclass(frozen=True, eq=False)
class Lineage:
    """Flat lists of a trace, indexed by op or by tensor; picklable.

    A view stands for the storage that it views, in `reads`, `parents` and `children`.

    reads: per op without duplicates, in the order in which the last mention of each stands.
    writes: per op its results.
    makes: per op the bytes of its results and workspace.
    device: per op.
    forward: per op whether it belongs to the forward pass.
    producer: per tensor the op that produces it, -1 without one.
    parents: per tensor what its producer reads.
    children: per tensor the results, except views, of the recomputable ops that read it.
    around: per tensor its parents, then its children.
    views: per op that makes views each with its storage.
    view_of: per view its storage.
    views_in: per storage all its views.
    size: per tensor bytes.
    took: per op ns of a run.
    cost: per tensor ns of a run of its producer, 0 without one.
    evictable: per tensor whether it may be evicted.
    counts: per tensor whether its producer can be recomputed, so that it adds to an evicted neighbourhood.
    freeable: per tensor whether it may be freed after its last read.
    holders: per tensor how many ops read it, and one more where the program releases it.
    releases: per op the tensors that the program releases at its end.
    overwrites: per op the tensors that it overwrites in place and that cannot be recomputed afterwards.
    drops: per tier and tensor the action that drops it there, once one was asked for.
    """

    reads: Sequence[tuple[int, ...]]
    writes: Sequence[tuple[int, ...]]
    makes: list[int]
    device: list[int]
    forward: list[bool]
    producer: list[int]
    parents: list[tuple[int, ...]]
    children: list[tuple[int, ...]]
    around: list[tuple[int, ...]]
    views: Mapping[int, tuple[tuple[int, int], ...]]
    view_of: Mapping[int, int]
    views_in: Mapping[int, list[int]]
    size: list[int]
    took: list[int]
    cost: list[int]
    evictable: list[bool]
    counts: list[bool]
    freeable: list[bool]
    holders: list[int]
    releases: Mapping[int, tuple[int, ...]]
    overwrites: dict[int, tuple[int, ...]]
    drops: dict[str, dict[int, Drop]] = field(default_factory=dict)

    def drop(self, tensor: int, tier: str) -> Drop:
        """The action that drops a tensor, the same in each run."""
        known = self.drops.get(tier)
        if known is None:
            known = self.drops[tier] = {}
        found = known.get(tensor)
        if found is None:
            found = known[tensor] = Drop(tensor, tier)
        return found


def lineage_of(problem: Problem, evicts: Collection[str] = EVICTED_ROLES, *, empty: bool = False) -> Lineage:
    """The lineage of a problem's trace. An op's cost is its time with nothing else running.

    evicts: roles of tensors that may be evicted.
    empty: whether tensors without bytes may be, too.
    """
    key = problem.platform.timing_hash, frozenset(evicts), empty
    return kept(problem.trace, "lineages", key, lambda: _lineage(problem, evicts, empty))


def _lineage(problem: Problem, evicts: Collection[str], empty: bool) -> Lineage:
    trace = problem.trace
    c, t = trace.op_columns, trace.tensor_columns
    counts, facts = kept(trace.structure, "lineage", None, lambda: _facts(trace))
    evictable = counts & np.isin(t.role, [ROLE_CODE[role] for role in evicts]) & (empty | (t.bytes > 0))
    evictable[list(trace.view_of)] = False
    times = added(trace, problem.platform)
    cost = np.where(trace.producer >= 0, times[trace.producer], 0) if len(times) else np.zeros(len(t.name), np.int64)
    return Lineage(
        makes=(row_sums(c.write_start, t.bytes[c.write_ids]) + c.workspace).tolist(),
        size=t.bytes.tolist(),
        took=times.tolist(),
        cost=cost.tolist(),
        evictable=evictable.tolist(),
        **facts,
    )


def _facts(trace: Trace) -> tuple[NDArray[np.bool_], dict[str, Any]]:
    """Which tensors count as parents and children, and the rest of a lineage that no size has a part in."""
    c, view_of = trace.op_columns, trace.view_of
    reads = _last_mentions(trace)
    until = _recomputable_until(TraceIndex(trace))
    recomputable = until > np.arange(len(c.name))
    made = trace.producer >= 0
    counts = made & recomputable[trace.producer] if len(c.name) else made
    may_free = freeable(trace)
    may_free[list(view_of)] = False
    overwrites: dict[int, tuple[int, ...]] = {}
    for old, new in enumerate(trace.replaced_by.tolist()):
        op = int(trace.producer[new])
        if new >= 0 and (trace.producer[old] < 0 or until[trace.producer[old]] <= op):
            overwrites[op] = (*overwrites.get(op, ()), old)
    views: dict[int, tuple[tuple[int, int], ...]] = {}
    views_in: dict[int, list[int]] = {}
    for view, storage in view_of.items():
        views_in.setdefault(storage, []).append(view)
        op = int(trace.producer[view])
        views[op] = (*views.get(op, ()), (view, storage))
    parents: list[tuple[int, ...]] = [reads[p] if p >= 0 else () for p in trace.producer.tolist()]
    children = _children(trace, reads, recomputable)
    facts = {
        "reads": reads,
        "writes": trace.all_writes,
        "device": c.device.tolist(),
        "forward": (c.phase == PHASE_CODE["forward"]).tolist(),
        "producer": trace.producer.tolist(),
        "parents": parents,
        "children": children,
        "around": [(*above, *below) for above, below in zip(parents, children, strict=True)],
        "views": views,
        "view_of": view_of,
        "views_in": views_in,
        "counts": counts.tolist(),
        "freeable": may_free.tolist(),
        "holders": uses(trace).tolist(),
        "releases": c.releases,
        "overwrites": overwrites,
    }
    return counts, facts


def _recomputable_until(index: TraceIndex) -> NDArray[np.int64]:
    """Per op the op from which on an evictor can't have it recomputed: alone, with what it has overwritten in place.

    0 for an op of the update, and for one that only works together with other devices.
    """
    update = PHASE_CODE["update"]
    mine = (op for op, phase in enumerate(index.phase) if phase != update and op not in index.communicating)
    until = np.zeros(len(index.reads), np.int64)
    for op, last in index.recomputable_among(mine).items():
        until[op] = last
    return until


def _last_mentions(trace: Trace) -> Sequence[tuple[int, ...]]:
    """Per op what it reads, with storages for views, in the order in which the last mention of each stands."""
    c, view_of = trace.op_columns, trace.view_of
    if not view_of and sum(map(len, trace.distinct_reads)) == len(c.read_ids):
        return trace.distinct_reads
    rows = (tuple(view_of.get(tensor, tensor) for tensor in row) for row in rows_of(c.read_start, c.read_ids))
    return [tuple(dict.fromkeys(reversed(row)))[::-1] for row in rows]


def _children(trace: Trace, reads: Sequence[tuple[int, ...]], recomputable: NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """Per tensor the results, except views, of the recomputable ops that read it, in their order."""
    view_of = trace.view_of
    writes: Sequence[tuple[int, ...]] = trace.all_writes
    if view_of:
        writes = [tuple(t for t in row if t not in view_of) for row in writes]
    parents: list[int] = []
    found: list[int] = []
    for i in np.flatnonzero(recomputable).tolist():
        for tensor in reads[i]:
            found += writes[i]
            parents += [tensor] * len(writes[i])
    parent = np.array(parents, np.int64)
    start = np.concatenate(([0], np.cumsum(np.bincount(parent, minlength=len(trace.tensor_columns.name)))))
    return rows_of(start, np.array(found, np.int64)[np.argsort(parent, kind="stable")])


class Kin:
    """Parents, children and costs so far: the lineage, and what the views made so far add to it.

    cost: per storage ns of the ops that produce it and its views, each once.
    around: parents, then children.
    joined: storages that have parents besides those of their producer, through a view.
    views_made_from: per tensor the views of other storages whose op reads it.
    """

    def __init__(self, lineage: Lineage) -> None:
        grows = bool(lineage.views)
        self._lineage = lineage
        self.cost = list(lineage.cost) if grows else lineage.cost
        self.parents = list(lineage.parents) if grows else lineage.parents
        self.children = list(lineage.children) if grows else lineage.children
        self.around = list(lineage.around) if grows else lineage.around
        self.joined: set[int] = set()
        self.views_made_from: dict[int, list[int]] = {}

    def add_views(self, op: int) -> tuple[int, ...]:
        """An op that makes views is reached for the first time. Returns the storages whose cost grows by its own."""
        line, reads = self._lineage, self._lineage.reads[op]
        storages = tuple(dict.fromkeys(storage for _, storage in line.views[op]))
        for storage in storages:
            self.cost[storage] += line.took[op]
            others = tuple(tensor for tensor in reads if tensor != storage)
            self.parents[storage] += others
            for tensor in others:
                self.children[tensor] += (storage,)
                self.joined.add(storage)
            for tensor in (storage, *others) if others else ():
                self.around[tensor] = (*self.parents[tensor], *self.children[tensor])
        for view, storage in line.views[op]:
            for tensor in reads:
                if tensor != storage:
                    self.views_made_from.setdefault(tensor, []).append(view)
        return storages


class ScoreTable:
    """Per tensor, as arrays to score many at once.

    size: bytes.
    access: ns of the last access.
    order: a count that grows with the moment since when it is evictable; a list, since only ties look at it.
    weight: the numerator of its score, or a lower bound of it (ns).
    accesses, weights: the same memory as `access` and `weight`, for single values: several times faster there.
    """

    def __init__(self, lineage: Lineage) -> None:
        count = len(lineage.size)
        self.size = np.array(lineage.size, np.float64)
        self.access = np.zeros(count)
        self.order = [0] * count
        self.weight = np.array(lineage.cost, np.float64)
        self.accesses = cast("memoryview[float]", self.access.data)
        self.weights = cast("memoryview[float]", self.weight.data)


class CandidateSet:
    """The candidates in one tier, packed."""

    def __init__(self) -> None:
        self._ids = np.zeros(64, np.int64)
        self._places = self._ids.data  # the same memory: several times faster for single values
        self._slot: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._slot

    @property
    def ids(self) -> NDArray[np.int64]:
        """The candidates, in no order that means anything."""
        return self._ids[: len(self._slot)]

    def slot(self, tensor: int) -> int:
        """Where it stands in `ids`, -1 if it does not."""
        return self._slot.get(tensor, -1)

    def add(self, tensor: int) -> None:
        """Add a tensor; nothing if it is a member."""
        at = len(self._slot)
        if self._slot.setdefault(tensor, at) != at:
            return
        if at == len(self._places):
            self._ids = np.concatenate((self._ids, np.zeros(at, np.int64)))
            self._places = self._ids.data
        self._places[at] = tensor

    def remove(self, tensor: int) -> None:
        """Remove a tensor; the last one takes its place. Nothing if it is not a member."""
        at = self._slot.pop(tensor, -1)
        last = len(self._slot)
        if at >= 0 and at != last:
            self._places[at] = moved = self._places[last]
            self._slot[moved] = at
