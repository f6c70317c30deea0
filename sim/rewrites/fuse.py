"""The rewrite that fuses several ops into one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.errors import TraceError
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.op import Op
from sim.trace.origin import Expr, Fused, Same

Touched = Callable[[Sequence[int], Sequence[int]], int]
WIDTH = {dtype: place for place, dtype in enumerate(("int8", "fp8", "fp16", "bf16", "tf32", "fp32", "fp64"))}
"""Types by rising width; no engine computes faster in a wider one."""


def fuse(
    trace: Trace, groups: Sequence[Sequence[int]], touched: Touched | None = None, *, workspace: bool = True
) -> Trace:
    """Replace each group of ops by one fused op, named after its last member; groups run in the order of their starts.

    The fused op reads the group's external inputs and writes the results that others read or that are kept to the end;
    tensors internal to the group are never in memory. FLOPs add up, and the workspace is the largest of the group's.
    The fused op has no measured duration, because the measured ones belong to other kernels. It computes in the widest
    type of the group, so that no arithmetic is priced too fast. Where an op outside the group needs one of its results
    before the group is complete (or overwrites one of its inputs), the group is cut there into several fused ops, so
    that no cycle arises.

    trace: the trace to rewrite.
    groups: disjoint groups of op ids; the ops of a group share device, engine, kind and phase, and belong to no
        send/recv pair or collective.
    touched: bytes that a fused op touches, given the ids that it reads and writes; by default each operand once.
    workspace: False for a kernel of another engine, which has no workspace.

    Raises TraceError for a group that does not meet these conditions.
    """
    touched_bytes = touched or (
        lambda reads, writes: sum(int(trace.tensor_columns.bytes[t]) for t in (*reads, *writes))
    )
    pieces = _pieces(trace, groups)
    internal = _internal(trace, pieces)
    new = Rewriter(trace)
    ids = [-1 if t.id in internal else new.tensor(t) for t in trace.tensors]
    for t in trace.tensors:
        old = t.replaces
        while old is not None and old in internal:
            old = trace.tensors[old].replaces
        if old is not None and ids[t.id] >= 0:
            new.builder.take_over(ids[t.id], ids[old])
    for fused, members in pieces:
        ops = [trace.ops[op] for op in members]
        produced = {t for op in ops for t in op.writes}
        reads = [t for t in dict.fromkeys(t for op in ops for t in op.reads) if t not in produced]
        writes = [t for op in ops for t in op.writes if t not in internal]
        new_reads, new_writes = [ids[t] for t in reads], [ids[t] for t in writes]
        if not fused:
            new.op(ops[0], reads=new_reads, writes=new_writes)
            continue
        parts: tuple[Expr, ...] = tuple(Same(op) for op in members)
        new.op(
            ops[-1],
            Fused(parts),
            reads=new_reads,
            writes=new_writes,
            flops=sum(op.flops for op in ops),
            bytes=touched_bytes(reads, writes),
            workspace=max(op.workspace for op in ops) if workspace else 0,
            duration=None,
            random=any(op.random for op in ops),
            priority=min(op.priority for op in ops),
            dtype=_widest(ops),
            alternatives=(),
            splits=(),
            function="",
        )
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def _widest(ops: Sequence[Op]) -> str:
    """The widest type in which ops compute; what only moves bytes computes in none."""
    types = [op.dtype for op in ops if op.flops and op.dtype] or [op.dtype for op in ops]
    return max(types, key=lambda dtype: WIDTH.get(dtype, len(WIDTH) if dtype else -1))


def _pieces(trace: Trace, groups: Sequence[Sequence[int]]) -> list[tuple[bool, list[int]]]:
    """The ops of the new trace in order: whether each is fused, and which ops it stands for."""
    group_of = _group_of(trace, groups)
    missing = [len(group) for group in groups]
    replaces = trace.tensor_columns.replaces
    collecting: dict[int, _Piece] = {}
    pieces: list[tuple[bool, list[int]]] = []
    for op in range(len(trace.ops)):
        group, reads, writes = group_of.get(op, -1), trace.reads(op), trace.writes(op)
        overwritten = [old for old in replaces[list(writes)].tolist() if old >= 0]
        for k in [k for k, piece in collecting.items() if k != group and piece.comes_before(reads, overwritten)]:
            pieces.append((True, collecting.pop(k).ops))
        if group < 0:
            pieces.append((False, [op]))
            continue
        piece = collecting.setdefault(group, _Piece([], set(), set()))
        piece.ops.append(op)
        piece.written.update(writes)
        piece.read.update(reads)
        missing[group] -= 1
        # complete groups run in the order of their starts, so that the order does not depend on how ops interleave
        while collecting and not missing[first := next(iter(collecting))]:
            pieces.append((True, collecting.pop(first).ops))
    return pieces


@dataclass
class _Piece:
    """The ops of a group met so far, with the tensors that they write and read."""

    ops: list[int]
    written: set[int]
    read: set[int]

    def comes_before(self, reads: Sequence[int], overwritten: Sequence[int]) -> bool:
        """Whether an op that reads and overwrites these tensors must come after all of this piece."""
        return not self.written.isdisjoint((*reads, *overwritten)) or not self.read.isdisjoint(overwritten)


def _group_of(trace: Trace, groups: Sequence[Sequence[int]]) -> dict[int, int]:
    group_of: dict[int, int] = {}
    c = trace.op_columns
    for k, group in enumerate(groups):
        for op in group:
            traits = [(c.device[i], c.engine.get(i, ""), c.kind[i], c.phase[i]) for i in (op, group[0])]
            if op in group_of or op in c.group or traits[0] != traits[1]:
                raise TraceError(f"fuse: op {c.name[op]!r} cannot be in one op with {c.name[group[0]]!r}")
            group_of[op] = k
    return group_of


def _internal(trace: Trace, pieces: Sequence[tuple[bool, Sequence[int]]]) -> set[int]:
    """The tensors that are only visible inside one fused op, unread ones included."""
    inside = {op: k for k, (fused, ops) in enumerate(pieces) if fused for op in ops}
    kept = set(trace.outputs)
    internal = set()
    for t, producer in enumerate(trace.producer.tolist()):
        if producer not in inside or t in kept:
            continue
        after = int(trace.replaced_by[t])
        users = [*trace.readers(t), *([int(trace.producer[after])] if after >= 0 else [])]
        if all(inside.get(op) == inside[producer] for op in users):
            internal.add(t)
    return internal
