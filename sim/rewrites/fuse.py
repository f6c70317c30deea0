"""The rewrite that fuses several ops into one kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sim.errors import TraceError
from sim.rewrites.kernels import Ints, Kernels
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.op import KIND_CODE, KINDS, PHASES
from sim.trace.origin import Fused

Touched = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
WIDTH = {dtype: place for place, dtype in enumerate(("int8", "fp8", "fp16", "bf16", "tf32", "fp32", "fp64"))}
"""Types by rising width; no engine computes faster in a wider one."""

STREAMED = ("elementwise", "norm", "softmax", "loss", "copy", "reduce")
"""Kinds of op that go through their operands once and are bound by memory, so that one kernel may be of several."""

APART = ("elementwise", "copy", "optimizer")
"""Kinds of op that stay as they are where they would be a kernel alone."""

PRODUCT = "matmul"

RECOMPUTES_FROM = "what a fused kernel recomputes from"
"""Why backward needs a tensor that it did not read before."""


def fuse(
    trace: Trace,
    groups: Sequence[Sequence[int]],
    touched: Touched | None = None,
    *,
    workspace: bool = True,
    recomputed: Collection[int] = (),
    streams: bool = False,
) -> Trace:
    """Replace each group of ops by one fused op, named after its last member; groups run in the order of their starts.

    The fused op reads the group's external inputs and writes the results that others read or that are kept to the end;
    tensors internal to the group are never in memory. FLOPs add up, and the workspace is the largest of the group's.
    The fused op has no measured duration, because the measured ones belong to other kernels. It computes in the widest
    type of the group, so that no arithmetic is priced too fast.
    Where an op outside the group needs one of its results before the group is complete (or overwrites one of its
    inputs), the group is cut there into several fused ops, so that no cycle arises.

    trace: the trace to rewrite.
    groups: disjoint groups of op ids; the ops of a group share device, engine, kind and phase, and belong to no
        send/recv pair or collective.
    touched: of what a fused op reads and writes, given by id, the tensors whose bytes it touches; by default all.
    workspace, recomputed, streams: see `fusion`.

    Raises TraceError for a group that does not meet these conditions.
    """
    return fusion(trace, groups, touched, workspace=workspace, recomputed=recomputed, streams=streams).trace


class Fusion(NamedTuple):
    """What `fusion` makes of an old trace.

    trace: the new one.
    tensors, ops: per tensor and op of it the old one that it is, -1 for none.
    kernels: which of its ops are fused.
    """

    trace: Trace
    tensors: Ints
    ops: Ints
    kernels: Kernels


def fusion(
    trace: Trace,
    groups: Sequence[Sequence[int]],
    touched: Touched | None = None,
    *,
    workspace: bool = True,
    recomputed: Collection[int] = (),
    streams: bool = False,
    meta: Mapping[str, Any] | None = None,
    claimed: bool = True,
) -> Fusion:
    """What `fuse` makes, and which parts of it are those of the old trace.

    workspace: False for a kernel of another engine, which has no workspace.
    recomputed: ops whose results no later phase finds in memory. A fused op of a later phase that reads one computes
        it once more, from what is in memory; an op in no group may not.
    streams: groups may have several kinds of `STREAMED`; what they become is priced as an element-wise kernel, and
        may be split in every way in which all its ops may. An element-wise op alone that recomputes nothing stays.
        Of a group that begins with a product the others are its epilogue, and it stays a product of that type.
    meta: entries to add to the trace's.
    claimed: False for a trace without origin, a workload of its own.
    """
    pieces = _pieces(trace, groups, STREAMED if streams else (), frozenset(recomputed))
    internal = _internal(trace, pieces)
    c = trace.op_columns
    for piece in pieces:
        first, *rest = piece.ops
        piece.writes = [t for op in piece.ops for t in trace.all_writes[op] if t not in internal]
        stays = streams and not rest and not piece.again and KINDS[c.kind[first]] in APART
        piece.fused = piece.grouped and not stays
    rows = [row for row, piece in enumerate(pieces) if piece.fused]
    kernels = Kernels(
        rows,
        [pieces[row].computed for row in rows],
        [touched(each.reads, each.writes) if touched else (*each.reads, *each.writes) for each in pieces if each.fused],
        workspace=workspace,
        streams=streams,
    )
    new = Rewriter(trace, meta)
    ids = new.all_tensors(without=internal)
    if recomputed:
        for t, reason in _reasons(trace, pieces).items():
            if ids[t] >= 0:
                new.builder.set_saved(ids[t], reason)
    claims = [
        Fused(tuple([new.old_ops[op] for op in each.computed])) if each.fused else new.old_ops[each.ops[0]]
        for each in pieces
    ]
    reads = [[ids[t] for t in each.reads] for each in pieces]
    writes = [[ids[t] for t in each.writes] for each in pieces]
    described = _described(trace, pieces, kernels, streams)
    new.extend_ops([each.ops[-1] for each in pieces], claims, reads, writes, described)
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    built = new.build(outputs=[ids[t] for t in trace.outputs], carry=carry, claimed=claimed)
    return Fusion(built, *new.followed, kernels)


def _described(trace: Trace, pieces: Sequence[_Piece], kernels: Kernels, streams: bool) -> dict[str, dict[int, Any]]:
    """The fields of kernels in which they differ from the last op that each computes, by row."""
    c, rows = trace.op_columns, kernels.rows.tolist()
    kind, flops, priority, random = c.kind.tolist(), c.flops.tolist(), c.priority.tolist(), c.random.tolist()
    try:
        fields = {key: dict(zip(rows, column.tolist())) for key, column in kernels.sizes(trace).items()}
    except OverflowError:
        raise TraceError("fuse: the FLOPs or bytes of a kernel: 2**63 or more") from None
    fields |= {key: {} for key in ("kind", "random", "priority", "dtype", "splits", "views")}
    fields |= {"duration": dict.fromkeys(rows, -1)}
    fields |= {key: dict.fromkeys(rows, nothing) for key, nothing in (("alternatives", ()), ("function", ""))}
    for row in rows:
        piece = pieces[row]
        computed, last = piece.computed, piece.ops[-1]
        products = [op for op in piece.ops if kind[op] == KIND_CODE[PRODUCT]]
        streamed = streams and KINDS[kind[last]] in STREAMED
        fields["kind"][row] = KIND_CODE[PRODUCT if products else "elementwise" if streamed else KINDS[kind[last]]]
        fields["random"][row] = True in [random[op] for op in computed]
        fields["priority"][row] = min([priority[op] for op in piece.ops])
        fields["dtype"][row] = _widest([(c.dtype[op], flops[op]) for op in products or computed])
        fields["splits"][row] = _splits(trace, piece.ops, set(piece.writes)) if streams else ()
        if len(computed) > 1:
            fields["views"][row] = ()
    return fields


def _reasons(trace: Trace, pieces: Sequence[_Piece]) -> dict[int, str]:
    """Why a later phase needs what was or is to be saved: as before, or for what is recomputed from it; "" where none
    reads it any more."""
    phase, producer = trace.op_columns.phase.tolist(), trace.producer.tolist()
    made = [len(PHASES) if op < 0 else phase[op] for op in producer]  # what exists from the start is of no phase
    later, rebuilt = set[int](), set[int]()
    for piece in pieces:
        crossing = [t for t in piece.reads if made[t] < piece.phase]
        later.update(crossing)
        if piece.again:
            rebuilt.update(crossing)
    known = trace.tensor_columns.saved_for
    return {t: known.get(t, RECOMPUTES_FROM) if t in later else "" for t in sorted({*known, *rebuilt})}


def _splits(trace: Trace, ops: Sequence[int], writes: Set[int]) -> tuple[str, ...]:
    """The ways in which all ops may be split; by batch where all may, as a sum where only sums are written.

    With one that has statistics over the samples, parts have their own.
    """
    ways = [trace.op_columns.splits.get(op, ()) for op in ops]
    if not all(ways):
        return ()
    by_batch = ("batch", "batch_sum", "batch_own")
    if all(set(each) & set(by_batch) for each in ways):
        if any("batch_own" in each for each in ways):
            return ("batch_own",)
        rows = any("batch" in each for op, each in zip(ops, ways) if not writes.isdisjoint(trace.writes(op)))
        return ("batch" if rows else "batch_sum",)
    return tuple(way for way in ways[0] if way not in by_batch and all(way in each for each in ways))


def _widest(ops: Sequence[tuple[str, int]]) -> str:
    """The widest type in which ops compute; what only moves bytes computes in none.

    ops: the type and FLOPs of each.
    """
    types = [dtype for dtype, flops in ops if flops and dtype] or [dtype for dtype, _ in ops]
    return max(types, key=lambda dtype: WIDTH.get(dtype, len(WIDTH) if dtype else -1))


@dataclass
class _Piece:
    """Ops that become one op of the new trace.

    ops: those met so far.
    phase: of the ops.
    group: which group they are of; -1 for an op of none.
    started: how many ops came before the first.
    again: ops of an earlier phase that it computes once more.
    reads: what it finds in memory, once it is complete; writes: what it leaves there.
    fused: whether it becomes a kernel, and not a copy of its op.
    """

    ops: list[int]
    phase: int
    group: int = -1
    started: int = 0
    again: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    fused: bool = False

    @property
    def grouped(self) -> bool:
        """Whether they are of a group."""
        return self.group >= 0

    @property
    def computed(self) -> list[int]:
        """The ops that it computes, in order."""
        return [*self.again, *self.ops]


def _pieces(
    trace: Trace, groups: Sequence[Sequence[int]], mixed: Collection[str], recomputed: Collection[int]
) -> list[_Piece]:
    """The ops of the new trace in order."""
    group_of = _group_of(trace, groups, mixed)
    missing = [len(group) for group in groups]
    replaces, phase = trace.tensor_columns.replaces.tolist(), trace.op_columns.phase.tolist()
    overwrites = bool((trace.tensor_columns.replaces >= 0).any())
    collecting: dict[int, _Piece] = {}
    pieces: list[_Piece] = []
    made: dict[int, _Piece] = {}  # tensors that a group's ops write; the pieces whose ops read each
    read: dict[int, list[_Piece]] = {}
    all_reads, all_writes = trace.distinct_reads, trace.all_writes
    order = _hoisted(trace, groups, group_of) if mixed else range(len(all_reads))
    for place, op in enumerate(order):
        group, reads, writes = group_of.get(op, -1), all_reads[op], all_writes[op]
        if collecting:
            before = [made[t] for t in reads if t in made]  # all of them come before this op
            if overwrites:
                overwritten = [replaces[t] for t in writes if replaces[t] >= 0]
                before += [made[t] for t in overwritten if t in made]
                before += [piece for t in overwritten for piece in read.get(t, ())]
            due = {piece.started: piece.group for piece in before if collecting.get(piece.group) is piece}
            for _, k in sorted(due.items()):
                if k != group:
                    pieces.append(collecting.pop(k))
        elif made:  # of pieces that are complete
            made.clear()
            read.clear()
        if group < 0:
            pieces.append(_Piece([op], phase[op]))
            continue
        piece = collecting.get(group)
        if piece is None:
            piece = collecting[group] = _Piece([], phase[op], group, place)
        piece.ops.append(op)
        for t in writes:
            made[t] = piece
        if overwrites:
            for t in reads:
                read.setdefault(t, []).append(piece)
        missing[group] -= 1
        # complete groups run in the order of their starts, so that the order does not depend on how ops interleave
        while collecting and not missing[first := next(iter(collecting))]:
            pieces.append(collecting.pop(first))
    _complete(trace, pieces, recomputed)
    return pieces


def _complete(trace: Trace, pieces: Sequence[_Piece], recomputed: Collection[int]) -> None:
    """Find what pieces recompute and read."""
    reads, writes = trace.distinct_reads, trace.all_writes
    phase, producer, name = trace.op_columns.phase.tolist(), trace.producer.tolist(), trace.op_columns.name
    again = {t for op in recomputed for t in writes[op]}
    for piece in pieces:
        found = [t for op in piece.ops for t in reads[op]]
        stack = [] if again.isdisjoint(found) else [t for t in found if t in again]
        inside = set(piece.ops if stack else ())
        while stack:
            op = producer[stack.pop()]
            if op not in inside and phase[op] < piece.phase:
                inside.add(op)
                piece.again.append(op)
                stack += [t for t in reads[op] if t in again]
        if piece.again and not piece.grouped:
            raise TraceError(f"fuse: op {name[piece.ops[0]]!r} is in no group, but reads {name[piece.again[0]]!r}")
        if len(piece.ops) == 1 and not piece.again:
            piece.reads = found
            continue
        piece.again.sort()
        made = {t for op in piece.computed for t in writes[op]}
        again_reads = [t for op in piece.again for t in reads[op]]
        piece.reads = [t for t in dict.fromkeys(again_reads + found) if t not in made]


def _hoisted(trace: Trace, groups: Sequence[Sequence[int]], group_of: Mapping[int, int]) -> Iterator[int]:
    """The ops in an order in which a group's ops follow each other as soon as what they read is there.

    Otherwise an op between them that reads what the first of them writes would cut the group. What overwrites a
    tensor keeps its place.
    """
    reads, writes, over = trace.distinct_reads, trace.all_writes, trace.tensor_columns.replaces >= 0
    placed, made = [False] * len(reads), set(np.flatnonzero(trace.producer < 0).tolist())
    fixed = set(trace.producer[over].tolist())
    for op in range(len(reads)):
        if placed[op]:
            continue
        placed[op] = True
        made.update(writes[op])
        yield op
        group = groups[group_of[op]] if op in group_of else ()
        for other in group if len(group) > 1 else ():
            if not placed[other] and other not in fixed and made.issuperset(reads[other]):
                placed[other] = True
                made.update(writes[other])
                yield other


def _group_of(trace: Trace, groups: Sequence[Sequence[int]], mixed: Collection[str]) -> dict[int, int]:
    group_of: dict[int, int] = {}
    c = trace.op_columns
    kind, phase, device = c.kind.tolist(), c.phase.tolist(), c.device.tolist()
    streamed = frozenset(KIND_CODE[kind] for kind in mixed)
    for k, group in enumerate(groups):
        start = group[0]
        product = bool(mixed) and len(group) > 1 and kind[start] == KIND_CODE[PRODUCT]
        several = streamed | {kind[start]} if product else streamed
        for op in group:
            alike = kind[op] == kind[start] or (kind[op] in several and kind[start] in several)
            alike &= phase[op] == phase[start] and device[op] == device[start]
            if not alike or c.engine.get(op) != c.engine.get(start) or op in group_of or op in c.group:
                raise TraceError(f"fuse: op {c.name[op]!r} cannot be in one op with {c.name[start]!r}")
            group_of[op] = k
    return group_of


def _internal(trace: Trace, pieces: Sequence[_Piece]) -> set[int]:
    """The tensors that are only visible inside one fused op, unread ones included."""
    inside = {op: k for k, piece in enumerate(pieces) if piece.grouped for op in piece.ops}
    outside = {t for piece in pieces for t in piece.reads}
    outside.update(trace.outputs)
    producer, after = trace.producer.tolist(), trace.replaced_by.tolist()
    return {
        t
        for op, piece in inside.items()
        for t in trace.all_writes[op]
        if t not in outside and (after[t] < 0 or inside.get(producer[after[t]]) == piece)
    }
