"""The rewrite that makes one op of several: a fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.errors import TraceError
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.origin import Expr, Fused, Same

Touched = Callable[[Sequence[int], Sequence[int]], int]


def fuse(
    trace: Trace, groups: Sequence[Sequence[int]], touched: Touched | None = None, *, workspace: bool = True
) -> Trace:
    """Each group of ops as one op, with the name of the last of them; groups run in the order in which they begin.

    It reads what the group reads and others make, and writes what others read or what stays to the end; a tensor
    that only the group knows is never in memory. FLOPs add up, and the workspace is the largest of theirs; there is
    no measured duration, for those were of other kernels. Where an op of no group, or of another one, needs what a
    group has made so far (or overwrites what it reads), the group is cut there: several fused ops, not a cycle.

    groups: disjoint, each of ops of one device, engine, kind and phase that are in no send/recv pair or collective.
    touched: bytes that a fused op touches, from ids of what it reads and writes; by default each operand once.
    workspace: False for a kernel of another engine, which has none of theirs.
    Raises TraceError for a group that is none.
    """
    whole = touched or (lambda reads, writes: sum(int(trace.tensor_columns.bytes[t]) for t in (*reads, *writes)))
    pieces = _pieces(trace, groups)
    gone = _internal(trace, pieces)
    new = Rewriter(trace)
    ids = [-1 if t.id in gone else new.tensor(t) for t in trace.tensors]
    for t in trace.tensors:
        old = t.replaces
        while old is not None and old in gone:
            old = trace.tensors[old].replaces
        if old is not None and ids[t.id] >= 0:
            new.builder.take_over(ids[t.id], ids[old])
    for fused, members in pieces:
        ops = [trace.ops[op] for op in members]
        made = {t for op in ops for t in op.writes}
        reads = [t for t in dict.fromkeys(t for op in ops for t in op.reads) if t not in made]
        writes = [t for op in ops for t in op.writes if t not in gone]
        mine, own = [ids[t] for t in reads], [ids[t] for t in writes]
        if not fused:
            new.op(ops[0], reads=mine, writes=own)
            continue
        parts: tuple[Expr, ...] = tuple(Same(op) for op in members)
        new.op(
            ops[-1],
            Fused(parts),
            reads=mine,
            writes=own,
            flops=sum(op.flops for op in ops),
            bytes=whole(reads, writes),
            workspace=max(op.workspace for op in ops) if workspace else 0,
            duration=None,
            random=any(op.random for op in ops),
            priority=min(op.priority for op in ops),
            dtype=max(ops, key=lambda op: int(trace.touched[op.id])).dtype,
            alternatives=(),
            splits=(),
        )
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def _pieces(trace: Trace, groups: Sequence[Sequence[int]]) -> list[tuple[bool, list[int]]]:
    """The ops of the new trace in order: whether it is fused, and which ops it stands for."""
    group_of = _group_of(trace, groups)
    left = [len(group) for group in groups]
    replaces = trace.tensor_columns.replaces
    collecting: dict[int, _Piece] = {}
    found: list[tuple[bool, list[int]]] = []
    for op in range(len(trace.ops)):
        own, reads, writes = group_of.get(op, -1), trace.reads(op), trace.writes(op)
        over = [old for old in replaces[list(writes)].tolist() if old >= 0]
        for k in [k for k, piece in collecting.items() if k != own and piece.comes_before(reads, over)]:
            found.append((True, collecting.pop(k).ops))
        if own < 0:
            found.append((False, [op]))
            continue
        piece = collecting.setdefault(own, _Piece([], set(), set()))
        piece.ops.append(op)
        piece.made.update(writes)
        piece.read.update(reads)
        left[own] -= 1
        # complete groups follow each other as they begin, so that the order does not depend on how ops interleave
        while collecting and not left[first := next(iter(collecting))]:
            found.append((True, collecting.pop(first).ops))
    return found


@dataclass
class _Piece:
    """Ops of a group met so far, with what they make and read."""

    ops: list[int]
    made: set[int]
    read: set[int]

    def comes_before(self, reads: Sequence[int], over: Sequence[int]) -> bool:
        """Whether an op that reads and overwrites these must come after all of it."""
        return not self.made.isdisjoint((*reads, *over)) or not self.read.isdisjoint(over)


def _group_of(trace: Trace, groups: Sequence[Sequence[int]]) -> dict[int, int]:
    group_of: dict[int, int] = {}
    c = trace.op_columns
    for k, group in enumerate(groups):
        for op in group:
            one = [(c.device[i], c.engine.get(i, ""), c.kind[i], c.phase[i]) for i in (op, group[0])]
            if op in group_of or op in c.group or one[0] != one[1]:
                raise TraceError(f"fuse: op {c.name[op]!r} cannot be in one op with {c.name[group[0]]!r}")
            group_of[op] = k
    return group_of


def _internal(trace: Trace, pieces: Sequence[tuple[bool, Sequence[int]]]) -> set[int]:
    """The tensors that a fused op makes and nobody else ever sees; those that nobody reads among them."""
    inside = {op: k for k, (fused, ops) in enumerate(pieces) if fused for op in ops}
    kept = set(trace.outputs)
    gone = set()
    for t, maker in enumerate(trace.producer.tolist()):
        if maker not in inside or t in kept:
            continue
        after = int(trace.replaced_by[t])
        users = [*trace.readers(t), *([int(trace.producer[after])] if after >= 0 else [])]
        if all(inside.get(op) == inside[maker] for op in users):
            gone.add(t)
    return gone
