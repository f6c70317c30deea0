"""The rewrite that fuses several ops into one kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from sim.errors import TraceError
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.op import KIND_CODE, KINDS, PHASES
from sim.trace.origin import Fused, Same

Touched = Callable[[Sequence[int], Sequence[int]], int]
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
    meta: Mapping[str, Any] | None = None,
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
    touched: bytes that a fused op touches, given the ids that it reads and writes; by default each operand once.
    workspace: False for a kernel of another engine, which has no workspace.
    recomputed: ops whose results no later phase finds in memory. A fused op of a later phase that reads one computes
        it once more, from what is in memory; an op in no group may not.
    streams: groups may have several kinds of `STREAMED`; what they become is priced as an element-wise kernel, and
        may be split in every way in which all its ops may. An element-wise op alone that recomputes nothing stays.
        Of a group that begins with a product the others are its epilogue, and it stays a product of that type.
    meta: entries to add to the trace's.

    Raises TraceError for a group that does not meet these conditions.
    """
    touched_bytes = touched or (
        lambda reads, writes: sum(int(trace.tensor_columns.bytes[t]) for t in (*reads, *writes))
    )
    pieces = _pieces(trace, groups, STREAMED if streams else (), frozenset(recomputed))
    internal = _internal(trace, pieces)
    crossing = [(t, piece) for piece in pieces for t in piece.reads if _phase_of(trace, t) < piece.phase]
    later = {t for t, _ in crossing} if recomputed else None
    rebuilt = {t for t, piece in crossing if piece.again}
    new = Rewriter(trace, meta)
    c, copy = trace.op_columns, new.copier()
    ids, device = new.all_tensors(without=internal), c.device.tolist()
    flops, space, priority, random = (column.tolist() for column in (c.flops, c.workspace, c.priority, c.random))
    if later is not None:
        for t, new_id in enumerate(ids):
            if new_id >= 0:
                new.builder.set_saved(new_id, _why(trace, t, later, rebuilt))
    for piece in pieces:
        reads, (first, *rest) = piece.reads, piece.ops
        writes = [t for op in piece.ops for t in trace.all_writes[op] if t not in internal]
        new_reads, new_writes = [ids[t] for t in reads], [ids[t] for t in writes]
        alone = streams and not rest and not piece.again and KINDS[c.kind[first]] in APART
        if not piece.fused or alone:
            if (len(reads), len(writes)) == (len(trace.reads(first)), len(trace.all_writes[first])):
                copy(first, new_reads, new_writes, device[first])
            else:
                new.op(trace.ops[first], reads=new_reads, writes=new_writes)
            continue
        computed, last = [*piece.again, *piece.ops], trace.ops[piece.ops[-1]]
        products = [op for op in piece.ops if c.kind[op] == KIND_CODE[PRODUCT]]
        once = touched_bytes(reads, writes)
        apart = int(trace.touched[computed].sum())
        new.op(
            last,
            Fused(tuple(map(Same, computed))),
            kind=PRODUCT if products else "elementwise" if streams and last.kind in STREAMED else last.kind,
            reads=new_reads,
            writes=new_writes,
            flops=sum(flops[op] for op in computed),
            counted=sum(c.counted.get(op, flops[op]) for op in computed),
            bytes=min(once, apart) if streams else once,  # an op may touch less than its operands
            workspace=max(space[op] for op in computed) if workspace else 0,
            duration=None,
            random=any(random[op] for op in computed),
            priority=min(priority[op] for op in piece.ops),
            dtype=_widest([(c.dtype[op], flops[op]) for op in products or computed]),
            alternatives=(),
            splits=_splits(trace, piece.ops, set(writes)) if streams else (),
            function="",
        )
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def _phase_of(trace: Trace, t: int) -> int:
    """The phase in which a tensor is produced; that of no op for one that exists from the start."""
    producer = int(trace.producer[t])
    return int(trace.op_columns.phase[producer]) if producer >= 0 else len(PHASES)


def _why(trace: Trace, t: int, later: Collection[int], rebuilt: Collection[int]) -> str:
    """Why backward needs a tensor: as before, or for what is recomputed from it; "" where it no longer reads it."""
    if t not in later:
        return ""
    return trace.tensor_columns.saved_for.get(t, RECOMPUTES_FROM if t in rebuilt else "")


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
    reads: what it finds in memory, once it is complete.
    """

    ops: list[int]
    phase: int
    group: int = -1
    started: int = 0
    again: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)

    @property
    def fused(self) -> bool:
        """Whether they are of a group."""
        return self.group >= 0

    def complete(self, trace: Trace, recomputed: Collection[int]) -> _Piece:
        """The piece with what it recomputes and what it reads."""
        phase, inside = trace.op_columns.phase, set(self.ops)
        if recomputed:
            stack = [t for op in self.ops for t in trace.reads(op)]
            while stack:
                producer = int(trace.producer[stack.pop()])
                if producer in recomputed and producer not in inside and phase[producer] < self.phase:
                    inside.add(producer)
                    self.again.append(producer)
                    stack += trace.reads(producer)
            if self.again and not self.fused:
                name = trace.op_columns.name
                raise TraceError(f"fuse: op {name[self.ops[0]]!r} is in no group, but reads {name[self.again[0]]!r}")
            self.again.sort()
        computed = (*self.again, *self.ops)
        made = {t for op in computed for t in trace.all_writes[op]}
        read = dict.fromkeys(t for op in computed for t in trace.distinct_reads[op])
        self.reads = [t for t in read if t not in made]
        return self


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
    order = _hoisted(trace, groups, group_of) if mixed else range(len(trace.op_columns.name))
    for place, op in enumerate(order):
        group, reads, writes = group_of.get(op, -1), trace.distinct_reads[op], trace.all_writes[op]
        overwritten = [replaces[t] for t in writes if replaces[t] >= 0] if overwrites else []
        before = [made[t] for t in (*reads, *overwritten) if t in made]  # all of them come before this op
        before += [piece for t in overwritten for piece in read.get(t, ())]
        due = {piece.group for piece in before if piece.group in collecting and collecting[piece.group] is piece}
        for k in sorted(due - {group}, key=lambda k: collecting[k].started):
            pieces.append(collecting.pop(k))
        if group < 0:
            pieces.append(_Piece([op], phase[op]))
            continue
        piece = collecting.setdefault(group, _Piece([], phase[op], group, place))
        piece.ops.append(op)
        made.update(dict.fromkeys(writes, piece))
        if overwrites:
            for t in reads:
                read.setdefault(t, []).append(piece)
        missing[group] -= 1
        # complete groups run in the order of their starts, so that the order does not depend on how ops interleave
        while collecting and not missing[first := next(iter(collecting))]:
            pieces.append(collecting.pop(first))
    return [piece.complete(trace, recomputed) for piece in pieces]


def _hoisted(trace: Trace, groups: Sequence[Sequence[int]], group_of: Mapping[int, int]) -> Iterator[int]:
    """The ops in an order in which a group's ops follow each other as soon as what they read is there.

    Otherwise an op between them that reads what the first of them writes would cut the group. What overwrites a
    tensor keeps its place.
    """
    producer, replaces = trace.producer.tolist(), trace.tensor_columns.replaces
    placed = [False] * len(trace.ops)
    fixed = {op for op in group_of if any(replaces[t] >= 0 for t in trace.writes(op))}
    for op in range(len(trace.ops)):
        if placed[op]:
            continue
        placed[op] = True
        yield op
        if op not in group_of:
            continue
        for other in groups[group_of[op]]:
            movable = not placed[other] and other not in fixed
            if movable and all(producer[t] < 0 or placed[producer[t]] for t in trace.reads(other)):
                placed[other] = True
                yield other


def _group_of(trace: Trace, groups: Sequence[Sequence[int]], mixed: Collection[str]) -> dict[int, int]:
    group_of: dict[int, int] = {}
    c = trace.op_columns
    for k, group in enumerate(groups):
        first = (PRODUCT,) if mixed and len(group) > 1 and c.kind[group[0]] == KIND_CODE[PRODUCT] else ()
        several = {KIND_CODE[kind] for kind in (*mixed, *first)}
        for op in group:
            traits = [
                (c.device[i], c.engine.get(i, ""), -1 if c.kind[i] in several else c.kind[i], c.phase[i])
                for i in (op, group[0])
            ]
            if op in group_of or op in c.group or traits[0] != traits[1]:
                raise TraceError(f"fuse: op {c.name[op]!r} cannot be in one op with {c.name[group[0]]!r}")
            group_of[op] = k
    return group_of


def _internal(trace: Trace, pieces: Sequence[_Piece]) -> set[int]:
    """The tensors that are only visible inside one fused op, unread ones included."""
    inside = {op: k for k, piece in enumerate(pieces) if piece.fused for op in piece.ops}
    outside = {t for piece in pieces for t in piece.reads}
    outside.update(trace.outputs)
    internal = set()
    for t, producer in enumerate(trace.producer.tolist()):
        if producer not in inside or t in outside:
            continue
        after = int(trace.replaced_by[t])
        if after < 0 or inside.get(int(trace.producer[after])) == inside[producer]:
            internal.add(t)
    return internal
