"""A forward pass cut at its compute-intensive layers: what lies between two of them is cheap enough to recompute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from sim.solvers.schedule import Reruns
from sim.trace.chain import BACKWARD, activations, forward_ops
from sim.trace.graph import PERSISTENT
from sim.trace.index import TraceIndex
from sim.trace.op import KIND_CODE, PHASE_CODE
from sim.trace.tensor import ROLE_CODE

UPDATE = PHASE_CODE["update"]


@dataclass(frozen=True)
class Segment:
    """The cheap ops that depend on one checkpoint alone, directly or through each other.

    checkpoint: the op that ends before them; -1 - t where they start from a tensor t without a producer.
    ops: in program order.
    needed: per backward op, in order, the results of this segment that it reads.
    """

    checkpoint: int
    ops: tuple[int, ...]
    needed: Mapping[int, frozenset[int]]

    @property
    def saved(self) -> frozenset[int]:
        """The results that backward reads."""
        return frozenset().union(*self.needed.values())


def segments_of(index: TraceIndex, kinds: Collection[str]) -> tuple[list[Segment], set[int]]:
    """The segments whose results backward needs, and the checkpoints: the other forward ops of activations.

    An op is a checkpoint if it is of one of these kinds, joins what two checkpoints lead to, overwrites the result of
    one, cannot be recomputed, or does not run on the main engine of the device that produced what it reads.
    """
    trace = index.trace
    c, t = trace.op_columns, trace.tensor_columns
    stops = np.isin(c.kind, [KIND_CODE[kind] for kind in kinds])
    active, until, last = activations(trace), index.recomputable_until, trace.last_use
    inputs = np.flatnonzero((trace.producer < 0) & ~np.isin(t.role, PERSISTENT)).tolist()
    start_of: dict[int, int] = {tensor: -1 - tensor for tensor in inputs}  # per activation the checkpoint behind it
    members: dict[int, list[int]] = {}
    checkpoints: set[int] = set()
    for op in forward_ops(trace).tolist():
        writes = index.writes[op]
        if not any(active[w] for w in writes):
            continue
        reads = [r for r in index.reads[op] if r in start_of]
        starts = {start_of[r] for r in reads}
        cheap = (
            len(starts) == 1
            and not stops[op]
            and op not in c.engine
            and op not in index.communicating
            and checkpoints.isdisjoint(index.producer[index.replaces[w]] for w in writes if index.replaces[w] >= 0)
            and all(until[op] > last[w] and t.role[w] not in PERSISTENT for w in writes)
            and all(index.producer[r] < 0 or index.device[index.producer[r]] == index.device[op] for r in reads)
        )
        start = starts.pop() if cheap else op
        if cheap:
            members.setdefault(start, []).append(op)
        else:
            checkpoints.add(op)
        start_of.update(dict.fromkeys((w for w in writes if active[w]), start))
    found = []
    for start, ops in members.items():
        made = {w for op in ops for w in index.writes[op] if index.droppable[w]}
        needed: dict[int, frozenset[int]] = {}
        for op in sorted({reader for w in made for reader in trace.readers(w) if index.phase[reader] == BACKWARD}):
            needed[op] = frozenset(made.intersection(index.reads[op]))
        if needed:
            found.append(Segment(start, tuple(ops), needed))
    return found, checkpoints


def producers(index: TraceIndex, segment: Segment, tensors: Iterable[int]) -> list[int]:
    """The ops of a segment that recompute these tensors, in order."""
    members, wanted, found = set(segment.ops), set(tensors), []
    for op in reversed(segment.ops):
        if not wanted.isdisjoint(index.writes[op]):
            found.append(op)
            wanted.update(r for r in index.reads[op] if index.producer[r] in members)
    return found[::-1]


# ---- when they are recomputed ------------------------------------------------------------------


def speed_centric(index: TraceIndex, segment: Segment) -> dict[int, list[int]]:
    """All at once, before the first backward op that reads any: each op once, and all results stay."""
    return {next(iter(segment.needed)): producers(index, segment, segment.saved)}


def memory_centric(index: TraceIndex, segment: Segment) -> dict[int, list[int]]:
    """Before each backward op from the checkpoint on what it reads: only that stays, and only for it."""
    reruns: dict[int, list[int]] = {}
    there: frozenset[int] = frozenset()
    for op, tensors in segment.needed.items():
        if not tensors <= there:
            reruns[op] = producers(index, segment, tensors)
            there = tensors
    return reruns


def merged(parts: Iterable[Reruns]) -> dict[int, list[int]]:
    """The reruns of all segments, those of one anchor in program order."""
    reruns: dict[int, list[int]] = {}
    for part in parts:
        for anchor, ops in part.items():
            reruns.setdefault(anchor, []).extend(ops)
    return {anchor: sorted(ops) for anchor, ops in reruns.items()}


# ---- bytes -------------------------------------------------------------------------------------

LAYER_ROLES = tuple(ROLE_CODE[role] for role in ("activation", "temporary", "input"))


def working_set(index: TraceIndex, op: int, without: Collection[int] = ()) -> int:
    """Bytes of an op's activations and workspace."""
    operands = {*index.reads[op], *index.writes[op]}.difference(without)
    # what is produced in place has no bytes of its own
    inner = {index.replaces[w] for w in index.writes[op]}
    return index.workspace[op] + sum(index.size[o] for o in operands - inner if index.role[o] in LAYER_ROLES)


def largest_layer(index: TraceIndex) -> int:
    """l_peak: the largest working set of an op of forward or backward."""
    layers = [op for op in range(len(index.reads)) if index.phase[op] != UPDATE]
    return max((working_set(index, op) for op in layers), default=0)


def segment_bytes(index: TraceIndex, segment: Segment) -> int:
    """Bytes of a segment's results, with the working set of its last backward layer beside them."""
    results = {w for op in producers(index, segment, segment.saved) for w in index.writes[op]}
    return sum(index.size[w] for w in results) + working_set(index, next(iter(segment.needed)), results)


def gains(index: TraceIndex, segment: Segment) -> bool:
    """Whether dropping its results pays: they outweigh what is kept for them, and other work comes between."""
    anchor, reruns = next(iter(segment.needed)), producers(index, segment, segment.saved)
    inside = set(segment.ops)
    if all(op in inside or index.phase[op] == BACKWARD for op in range(segment.ops[-1], anchor)):
        return False
    held = index.trace.held_until
    kept = {r for op in reruns for r in index.reads[op] if index.producer[r] >= 0 and index.producer[r] not in inside}
    return sum(index.size[s] for s in segment.saved) > sum(index.size[r] for r in kept if held[r] < anchor)
