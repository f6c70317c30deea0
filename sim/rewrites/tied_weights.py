"""Weights that several stages of a pipeline read: each stage has a copy, with gradient, states and update of its own.

So it is with a head that is tied to the embedding: of Megatron-LM's stages the first and the last have the weight, its
gradient, its master and its states. Each sums its term of the gradient over the microbatches, the terms are summed over
the two (`_allreduce_embedding_grads` of `megatron/core/distributed/finalize_model_grads.py`), and each updates its own
copy, which stays the same as the other one. DeepSpeed's `TiedLayerSpec` does the same.

The norm by which gradients are clipped counts the weight once, as Megatron-LM's does; the factor is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sim.rewrites.batching import sent
from sim.rewrites.rewriter import GLUE, Rewriter, slice_of
from sim.rewrites.slots import OPTIMIZER, initial_weights, parameters_of, slots_of
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.op import KINDS, PHASE_CODE, Op, Ring
from sim.trace.origin import Expr, Fused, Same, Slots

BACKWARD, UPDATE = PHASE_CODE["backward"], PHASE_CODE["update"]


class Tied(NamedTuple):
    """A trace with copies of weights.

    part: of every op. sums: ops of backward that sum gradients of several stages, or follow from such sums alone.
    late: those of them on a stage that a copy is on: they come with its update.
    """

    trace: Trace
    part: list[int]
    late: frozenset[int]
    sums: list[int]


def with_kept_terms(trace: Trace, part: Sequence[int], sums: Collection[int]) -> tuple[Trace, list[int]]:
    """The trace with terms of gradients in the type in which gradients are kept, and the part of every op.

    Megatron-LM's hook adds what each stage computes to a gradient in fp32, and the stages sum these.

    part: the part of the model of every op. sums: ops of backward that add up gradients of several devices, or follow
    from such sums alone. Where one that adds is read by one that converts its result alone, each term is converted, and
    they are added in that type.
    """
    c, size = trace.op_columns, trace.tensor_columns.bytes
    kept: dict[int, int] = {}
    for add in sums:
        readers = trace.readers(trace.writes(add)[0])
        if len(trace.reads(add)) > 1 and len(readers) == 1 and readers[0] in sums:
            (total,), (then,) = trace.writes(add), readers
            if KINDS[c.kind[then]] == "copy" and [size[t] > size[total] for t in trace.writes(then)] == [True]:
                kept[add] = then
    if not kept:
        return trace, list(part)
    new, at, converting = Rewriter(trace), list[int](), frozenset(kept.values())
    ids = new.all_tensors({trace.writes(op)[0] for op in kept})
    for op in trace.ops:
        if op.id in converting:
            continue
        if op.id not in kept:
            new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
            at.append(part[op.id])
            continue
        converts = trace.ops[kept[op.id]]
        like, terms = trace.tensors[converts.writes[0]], list[int]()
        for i, t in enumerate(op.reads, 1):
            name = trace.tensors[t].name
            terms.append(new.tensor(like, Same(t), name=f"{name}.main"))
            new.op(converts, GLUE, name=f"{converts.name}.{i}", reads=[ids[t]], writes=[terms[-1]])
            at.append(part[trace.producer[t]])
        touched = None if op.bytes is None else sum(map(new.builder.bytes_of, terms)) + like.bytes
        both, writes = Fused((Same(op.id), Same(converts.id))), [ids[t] for t in converts.writes]
        new.op(op, both, reads=terms, writes=writes, dtype=converts.dtype, bytes=touched)
        at.append(part[op.id])
    outputs = [ids[t] for t in trace.outputs]
    return new.build(outputs=outputs, carry=[(ids[a], ids[b]) for a, b in trace.carry]), at


def with_copies(trace: Trace, part: Sequence[int], device: Sequence[int], sums: Collection[int]) -> Tied:
    """The trace with a copy of each weight on every further device that reads it.

    part: the part of the model of every op. device: where each part runs.
    sums: ops of backward that add up gradients of several devices, which becomes an all-reduce among these. Without
        them the device that reads the weight first sums the terms, and sends the others the result.

    A weight whose update cannot be told from others' has no copies.
    """
    copies = [each for each in _copies(trace, part, device, sums) if each.find()]
    if not copies:
        return Tied(trace, list(part), frozenset(), list(sums))
    return _Copying(trace, part, device, copies).build(sums)


@dataclass
class _Copy:
    """What a device has of a weight that another one keeps.

    part: of the model, which reads it there. own: ops of that device.
    tensors, ops: of which it has copies; of an op with which slots of how many, () for all that it does.
    """

    trace: Trace
    weight: int
    part: int
    own: Collection[int]
    sums: Collection[int]
    tensors: set[int] = field(default_factory=set)
    ops: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def find(self) -> bool:
        """Fill `tensors` and `ops`. Returns whether what is updated of the weight can be updated here."""
        trace, of = self.trace, parameters_of(self.trace)
        self.parameter = of[self.weight]
        last_of = {first: last for last, first in trace.carry}
        for op in self.own:
            for t in trace.reads(op):
                if of[t] == self.parameter and (trace.producer[t] < 0 or trace.producer[t] not in self.own):
                    self._add(t, forward=True)
        waiting = list(self.tensors)
        while waiting:
            first = waiting.pop()
            if first not in last_of or last_of[first] in self.tensors:
                continue
            known = set(self.tensors)
            if not self._add(last_of[first]):
                return False
            waiting += self.tensors - known
        return self.weight in self.tensors

    def _add(self, t: int, forward: bool = False) -> bool:
        """Have a copy of a tensor, if it follows from the weight, its states and its gradients alone."""
        trace = self.trace
        if t in self.tensors:
            return True
        op = int(trace.producer[t])
        if op < 0:
            is_kept = trace.tensor_columns.role[t] in PERSISTENT
            self.tensors.update({t} if is_kept else ())
            return is_kept
        phase = trace.op_columns.phase[op]
        if (phase < BACKWARD) != forward or (phase == BACKWARD and op not in self.sums):
            return False
        reads, writes, slots = self.operands(op)
        if t not in writes:
            return False
        has_own = [self._add(each, forward) for each in reads]
        if op in trace.op_columns.ring and not any(has_own):  # what is sent is their sum, not the terms
            return False
        self.ops[op] = slots
        self.tensors.update(writes)
        return True

    def operands(self, op: int) -> tuple[list[int], list[int], tuple[tuple[int, ...], int]]:
        """What an op reads and writes of the weight's tensors, with scalars, and by which slots; nothing if it mixes.

        The slots are () of 0 where it does nothing else.
        """
        trace, of, shape = self.trace, parameters_of(self.trace), self.trace.tensor_columns.shape
        slots = slots_of(trace, op) if trace.op_columns.kind[op] == OPTIMIZER else []
        if len(slots) > 1:
            own = [k for k, slot in enumerate(slots) if slot.parameter == self.parameter]
            reads = [t for k in own for t in (*slots[k].reads, *slots[k].shared)]
            return reads, [t for k in own for t in slots[k].writes], (tuple(own), len(slots))
        reads, writes = list(trace.reads(op)), list(trace.writes(op))
        mine = all(of[t] == self.parameter or shape.get(t) in ((), (1,)) for t in reads)
        if not mine or any(of[t] != self.parameter for t in writes) or trace.op_columns.random[op]:
            return [], [], ((), 0)
        return reads, writes, ((), 0)


def _copies(trace: Trace, part: Sequence[int], device: Sequence[int], sums: Collection[int]) -> Iterator[_Copy]:
    """A copy for each weight and each device that reads it and is not the first to do so."""
    phase = trace.op_columns.phase
    for weight in initial_weights(trace).values():
        parts = [part[op] for op in trace.readers(weight) if phase[op] < UPDATE]
        for at in dict.fromkeys(device[q] for q in parts[1:]):
            if at != device[parts[0]]:
                own = {op for op in range(len(part)) if phase[op] < UPDATE and device[part[op]] == at}
                yield _Copy(trace, weight, next(q for q in parts if device[q] == at), own, sums)


class _Copying:
    """The trace with these copies; those of an op come before it, which may overwrite what they read.

    ids: the new tensors by old id. own: the same for those of each copy.
    """

    def __init__(self, trace: Trace, part: Sequence[int], device: Sequence[int], copies: Sequence[_Copy]) -> None:
        self.trace, self.part, self.device, self.copies = trace, part, device, copies
        self.new, self.tensors = Rewriter(trace), list(trace.tensors)
        self.ids, self.own = self.new.all_tensors(), [self._tensors(copy) for copy in copies]
        self.parts, self.late, self.sums = list[int](), set[int](), list[int]()

    def build(self, sums: Collection[int]) -> Tied:
        """The new trace. sums: see `with_copies`."""
        trace, ids = self.trace, self.ids
        for op in trace.ops:
            here = [(copy, own) for copy, own in zip(self.copies, self.own, strict=True) if op.id in copy.ops]
            first = self.new.op_count
            terms = self._terms(op, [copy.part for copy, _ in here]) if op.id in sums and here else {}
            for copy, own in here:
                if terms:
                    self._join(op, terms, copy.part, own, f".stage{self.device[copy.part]}")
                else:
                    self._copy(op, copy, own)
            if terms:
                self._join(op, terms, self.part[op.id], dict(enumerate(ids)), "")
            else:
                self._keep(op)
            added = range(first, self.new.op_count)
            self.parts += [*(copy.part for copy, _ in here), self.part[op.id]]
            self.late.update(added[:-1] if op.phase == "backward" else ())
            self.sums += added if op.id in sums else ()
        outputs = [*(ids[t] for t in trace.outputs), *(own[t] for own in self.own for t in trace.outputs if t in own)]
        carry = [(ids[a], ids[b]) for a, b in trace.carry]
        carry += [(own[a], own[b]) for own in self.own for a, b in trace.carry if b in own]
        return Tied(self.new.build(outputs=outputs, carry=carry), self.parts, frozenset(self.late), self.sums)

    def _tensors(self, copy: _Copy) -> dict[int, int]:
        """The tensors of a copy, whose names begin with that of the copied weight."""
        weight, found = self.tensors[copy.weight].name, dict[int, int]()
        for t in sorted(copy.tensors):
            name = self.tensors[t].name.removeprefix(f"{weight}.").removeprefix(weight)
            named = f"{weight}.stage{self.device[copy.part]}{name and f'.{name}'}"
            found[t] = self.new.tensor(self.tensors[t], name=named, replaces=None)
        for t, own in found.items():
            if (old := self.tensors[t].replaces) in found:
                self.new.builder.take_over(own, found[old])
        return found

    def _terms(self, op: Op, others: Sequence[int]) -> dict[int, list[int]]:
        """What an op adds up, by device; {} where there is not a term on each device that needs the sum."""
        found: dict[int, list[int]] = {}
        for t in op.reads:
            found.setdefault(self._at(int(self.trace.producer[t])), []).append(t)
        return found if found.keys() == {self.device[q] for q in (self.part[op.id], *others)} else {}

    def _at(self, op: int) -> int:
        """The device of an op."""
        return self.device[self.part[op]]

    def _join(self, op: Op, terms: dict[int, list[int]], part: int, own: dict[int, int], mark: str) -> None:
        """A device's member of the all-reduce of an op's terms, which puts the sum in the place of its own."""
        at = terms[self.device[part]]
        (t,) = op.writes
        self.new.builder.take_over(own[t], self.ids[at[0]])
        fields: dict[str, Any] = {"name": f"{op.name}{mark}", "kind": "collective", "group": f"{op.name}.all_reduce"}
        size = sent(self.tensors[t].bytes, Ring("data", len(terms), 2))
        self.new.op(op, reads=[self.ids[each] for each in at], writes=[own[t]], flops=0, bytes=size, **fields)

    def _keep(self, op: Op) -> None:
        """An op as it is, of its device's weights."""
        reads = {t: self.ids[t] for t in op.reads}
        for copy, own in zip(self.copies, self.own, strict=True):
            if op.id in copy.own:
                reads.update((t, own[t]) for t in op.reads if t in own)
        self.new.op(op, reads=[reads[t] for t in op.reads], writes=[self.ids[t] for t in op.writes])

    def _copy(self, op: Op, copy: _Copy, own: dict[int, int]) -> None:
        """The copy of an op, or of what it does for the weight."""
        reads, writes, (slots, count) = copy.operands(op.id)
        stands_for: Expr = Slots(Same(op.id), slots, count) if count else Same(op.id)
        mark = f".stage{self.device[copy.part]}"
        changes: dict[str, Any] = {"name": f"{op.name}{mark}", "group": op.group and f"{op.group}{mark}"}
        if count:
            size = self.trace.tensor_columns.bytes
            some, every = (*reads, *writes), (*op.reads, *op.writes)
            share, total = sum(int(size[t]) for t in some), max(sum(int(size[t]) for t in every), 1)
            changes |= {
                "flops": slice_of(op.flops, 0, share, total),
                "bytes": None if op.bytes is None else slice_of(op.bytes, 0, share, total),
                "workspace": -(-op.workspace * share // total),
                "duration": None if op.duration is None else -(-op.duration * share // total),
            }
        known = [own.get(t, self.ids[t]) for t in reads]
        self.new.op(op, stands_for, reads=known, writes=[own[t] for t in writes], **changes)


__all__ = ["Tied", "with_copies", "with_kept_terms"]
