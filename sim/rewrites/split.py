"""Rewrites of storage: split a tensor into parts (chunks, fractions), pack several into one (packs, pages)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from sim.errors import TraceError
from sim.rewrites.rewriter import Rewriter, slice_of
from sim.trace.graph import Trace
from sim.trace.op import Op
from sim.trace.origin import Expr, Packed, Part, Same

Cuts = tuple[int, ...]


def split_tensors(
    trace: Trace, parts: Mapping[int | str, int | Sequence[int]], *, ops: Iterable[int | str] = ()
) -> Trace:
    """Split tensors into parts that can be kept and moved independently.

    All values that share a storage, or are carried to it, are split alike. Ops read and write all parts of a split
    tensor, except those in `ops`.

    trace: the trace to rewrite.
    parts: tensor -> number of equal parts, or weight of each part: `{"w": 4}`, or `{"w": (3, 7)}` for 30 % and 70 %.
    ops: ops to split along with their tensors, one op per part. They must be elementwise (kind `elementwise`,
        `optimizer` or `copy`), and all their operands must be split.

    Raises TraceError for a tensor with too few bytes, different splits of one storage, or an op that cannot be split.
    """
    cuts = _spread(trace, {trace.tensor_id(t): _cuts(split) for t, split in parts.items()})
    divided = {trace.op_id(op) for op in ops}
    new = Rewriter(trace)
    ids: list[list[int]] = [[] for _ in trace.tensors]
    for t in trace.tensors:
        marks = cuts.get(t.id)
        if marks is None:
            ids[t.id] = [new.tensor(t)]
            continue
        if t.bytes < marks[-1]:
            raise TraceError(f"split: tensor {t.name!r} has {t.bytes} bytes, too few for parts of 1/{marks[-1]}")
        ids[t.id] = [
            new.tensor(
                t,
                Part(Same(t.id), first, stop, marks[-1]),
                name=f"{t.name}.part{k}",
                bytes=slice_of(t.bytes, first, stop, marks[-1]),
                shape=None,
            )
            for k, (first, stop) in enumerate(pairwise(marks))
        ]
    for t in trace.tensors:
        if t.replaces is not None:
            for mine, old in zip(ids[t.id], ids[t.replaces], strict=True):
                new.builder.take_over(mine, old)
    for op in trace.ops:
        if op.id in divided:
            _split_op(new, op, ids, cuts)
        else:
            new.op(op, reads=[i for t in op.reads for i in ids[t]], writes=[i for t in op.writes for i in ids[t]])
    carry = [pair for last, first in trace.carry for pair in zip(ids[last], ids[first], strict=True)]
    return new.build(outputs=[i for t in trace.outputs for i in ids[t]], carry=carry)


def _cuts(split: int | Sequence[int]) -> Cuts:
    weights = [1] * split if isinstance(split, int) else list(split)
    if not weights or min(weights) < 1:
        raise TraceError(f"split: {split!r} is neither a number of parts nor a list of positive weights")
    marks = [0]
    for weight in weights:
        marks.append(marks[-1] + weight)
    return tuple(marks)


def _spread(trace: Trace, cuts: dict[int, Cuts]) -> dict[int, Cuts]:
    """The same cuts for all tensors that share a storage with a split tensor or are carried to it."""
    partners: dict[int, list[int]] = {}
    links = [(t, int(r)) for t, r in enumerate(trace.tensor_columns.replaces.tolist()) if r >= 0]
    for a, b in (*links, *trace.carry):
        partners.setdefault(a, []).append(b)
        partners.setdefault(b, []).append(a)
    todo, spread = list(cuts), dict(cuts)
    while todo:
        t = todo.pop()
        for other in partners.get(t, ()):
            if other not in spread:
                spread[other] = spread[t]
                todo.append(other)
            elif spread[other] != spread[t]:
                names = trace.tensor_columns.name
                raise TraceError(f"split: {names[t]!r} and {names[other]!r} share a storage but are split differently")
    return spread


def _split_op(new: Rewriter, op: Op, ids: list[list[int]], cuts: Mapping[int, Cuts]) -> None:
    marks = {cuts.get(t) for t in (*op.reads, *op.writes)}
    (mark,) = marks if len(marks) == 1 else (None,)
    if mark is None or op.kind not in ELEMENTWISE:
        raise TraceError(f"split: op {op.name!r} ({op.kind}) is not elementwise over tensors that are all split alike")
    total = mark[-1]
    for k, (first, stop) in enumerate(pairwise(mark)):
        share = stop - first
        new.op(
            op,
            Part(Same(op.id), first, stop, total),
            name=f"{op.name}.part{k}",
            reads=[ids[t][k] for t in op.reads],
            writes=[ids[t][k] for t in op.writes],
            flops=slice_of(op.flops, first, stop, total),
            bytes=None if op.bytes is None else slice_of(op.bytes, first, stop, total),
            workspace=-(-op.workspace * share // total),
            duration=None if op.duration is None else -(-op.duration * share // total),
        )


ELEMENTWISE = ("elementwise", "optimizer", "copy")
"""Kinds of op that compute each element of a result from the same elements of their operands only."""


def pack_tensors(trace: Trace, packs: Mapping[str, Sequence[int | str]]) -> Trace:
    """Pack tensors into larger ones that are kept and moved as a unit.

    A pack has a slot for the storage of each member. An op that writes or overwrites a member produces a new version
    of the pack in place, and needs the previous version; every reader reads the version current at its position. The
    pack exists from its first member on, until all members are dead. Ops touch the same number of bytes as before.

    trace: the trace to rewrite.
    packs: pack name -> its tensors, in order.

    Raises TraceError where a tensor is in two packs, or a pack is only partly carried.
    """
    slot = _slots(trace, packs)
    packing = _Packing(trace, {pack: len(members) for pack, members in packs.items()}, slot)
    for op in trace.ops:
        packing.add(op)
    return packing.end()


def _slots(trace: Trace, packs: Mapping[str, Sequence[int | str]]) -> dict[int, tuple[str, int]]:
    """Per packed tensor, all values of a storage alike, its pack and the number of its slot."""
    replaces = trace.tensor_columns.replaces.tolist()
    slot: dict[int, tuple[str, int]] = {}
    for pack, members in packs.items():
        for k, member in enumerate(members):
            t = trace.tensor_id(member)
            while replaces[t] >= 0:
                t = replaces[t]
            if t in slot:
                name = trace.tensor_columns.name[t]
                raise TraceError(f"pack: the storage of {name!r} is in {slot[t][0]!r} and {pack!r}")
            slot[t] = (pack, k)
    for t in sorted(range(len(replaces)), key=lambda t: trace.producer[t]):  # an old value before the new one
        if replaces[t] in slot:
            slot[t] = slot[replaces[t]]
    return slot


class _Packing:
    """A trace while its tensors are packed.

    plain: per tensor that is in no pack the new one, else -1.
    roots: per pack the first value of each slot.
    content: per pack what each slot holds now.
    version: per pack the tensor that holds it now; counts: how many there were.
    first, first_content: version and content when the trace begins.
    """

    def __init__(self, trace: Trace, slots: Mapping[str, int], slot: Mapping[int, tuple[str, int]]) -> None:
        self.trace, self.slot = trace, slot
        replaces = trace.tensor_columns.replaces.tolist()
        self.roots = {pack: [0] * count for pack, count in slots.items()}
        for t, (pack, k) in slot.items():
            if replaces[t] < 0:
                self.roots[pack][k] = t
        self.new = Rewriter(trace)
        self.plain = [self.new.tensor(t) if t.id not in slot else -1 for t in trace.tensors]
        for t, old in enumerate(replaces):
            if old >= 0 and t not in slot:
                self.new.builder.take_over(self.plain[t], self.plain[old])
        self.content: dict[str, list[Expr | None]] = {pack: [None] * count for pack, count in slots.items()}
        self.version: dict[str, int] = {}
        self.counts = dict.fromkeys(slots, 0)
        for pack, members in self.roots.items():
            initial = [t for t in members if trace.producer[t] < 0]
            for t in initial:
                self.content[pack][slot[t][1]] = Same(t)
            if initial:
                self._renew(pack)
        self.first = dict(self.version)
        self.first_content = {pack: list(held) for pack, held in self.content.items()}

    def _renew(self, pack: str) -> None:
        """A new version of a pack, in place of the previous one."""
        members = [self.trace.tensors[t] for t in self.roots[pack]]
        layers = {t.layer for t in members}
        fresh = self.new.tensor(
            members[0], Packed(tuple(self.content[pack])),
            name=f"{pack}.v{self.counts[pack]}" if self.counts[pack] else pack,
            bytes=sum(t.bytes for t in members),
            layer=layers.pop() if len(layers) == 1 else -1,
            shape=None, dtype="", zeros=None,
        )  # fmt: skip
        if pack in self.version:
            self.new.builder.take_over(fresh, self.version[pack])
        self.version[pack] = fresh
        self.counts[pack] += 1

    def _now(self, t: int) -> int:
        """What holds a tensor now."""
        return self.version[self.slot[t][0]] if t in self.slot else self.plain[t]

    def add(self, op: Op) -> None:
        """An op, which needs and renews the packs that it writes into."""
        slot = self.slot
        written = dict.fromkeys(slot[t][0] for t in op.writes if t in slot)
        reads = [self._now(t) for t in op.reads]
        reads += [self.version[pack] for pack in written if pack in self.version]
        for t in op.writes:
            if t in slot:
                pack, k = slot[t]
                self.content[pack][k] = Same(t)
        for pack in written:
            self._renew(pack)
        writes = [self.plain[t] for t in op.writes if t not in slot] + [self.version[pack] for pack in written]
        touched = int(self.trace.touched[op.id])
        changed = bool(written) or any(t in slot for t in op.reads)
        self.new.op(op, reads=list(dict.fromkeys(reads)), writes=writes, bytes=touched if changed else op.bytes)

    def end(self) -> Trace:
        """The new trace. Raises TraceError where a pack is only partly carried."""
        trace, slot = self.trace, self.slot
        kept = dict.fromkeys(self._now(t) for t in trace.outputs)
        carry = [(self.plain[a], self.plain[b]) for a, b in trace.carry if a not in slot and b not in slot]
        pairs = {(Same(a), Same(b)) for a, b in trace.carry if a in slot or b in slot}
        for pack, first in self.first.items():
            both = zip(self.content[pack], self.first_content[pack], strict=True)
            ends = [(a, b) for a, b in both if b is not None]
            carried = [pair for pair in ends if pair in pairs]
            if carried:
                if len(carried) < len(ends):
                    raise TraceError(f"pack: {pack!r} holds tensors that are carried and tensors that are not")
                carry.append((self.version[pack], first))
                pairs.difference_update(carried)
        if pairs:
            raise TraceError("pack: a tensor is carried to one outside its pack")
        return self.new.build(outputs=kept, carry=carry)
