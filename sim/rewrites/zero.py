"""The rewrite for ZeRO: replicas of a model keep and update a part of its training state each.

Of d replicas, each keeps 1/d of the optimizer states (level 1), of the gradients too (2), and of the weights too (3).
With P parameters in 16 bits, 16-bit gradients and K = 12 bytes of fp32 states, a replica keeps

    level 0  (2 + 2 + K) P     1  (2 + 2) P + K P / d     2  2 P + (2 + K) P / d     3  (2 + 2 + K) P / d

and sends (d - 1) / d of the parameters so often: 2 times at the levels 0 to 2 (an all-reduce, or a reduce-scatter of
gradients and an all-gather of weights), 3 times at level 3, whose weights are gathered for forward and for backward
(but for those of which no backward op reads the values or a cast: embeddings, biases).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, sections 5 and 7.
Where c ranks divide the tokens of each replica, the state is divided among all d c of them, as Megatron-LM's
distributed optimizer and FSDP over a mesh of shards and context ranks do.
With hybrid sharding (PyTorch's `HYBRID_SHARD`, FSDP2 over a mesh of two dimensions, Megatron-LM's
`--num-distributed-optimizer-instances`) the state is divided among s replicas next to each other alone, a node's: s
stands for d above, weights are gathered and gradients reduce-scattered among these, and each part of the gradients is
then summed by an all-reduce over the d / s replicas that have the same part, 2 (d / s - 1) / (d / s) of 1 / s of them.
FSDP2 issues it behind the reduce-scatter, on a stream of its own; its device waits for a reduce-scatter before it
issues the next one (`FSDPParamGroup.post_backward`). Here the all-reduce is issued there, just before the next one.
Departs: with several microbatches, the levels 2 and 3 reduce and gather once per microbatch, as DeepSpeed and FSDP do
with their default settings. A part is rounded down to whole bytes. Level 3 gathers the weights of a layer together, by
default one layer ahead (as FSDP2 does: the next one in forward, the one before in backward); gathered weights are freed
after their last reader, and one that is not gathered again leaves no part in a group. Where backward reads the cast of
a weight that autograd saved (autocast), the weight itself is gathered none the less, since the hooks of DeepSpeed and
FSDP gather a module's weights before its backward whoever reads them; it is freed after the layer's last op. The casts
stay, since autograd holds them; FSDP's own mixed precision, to which `mixed_bf16` is nearest here, avoids that.
Copies of weights in 8 bits (`workloads.eight_bits`) are made of a replica's part and gathered in place of the weight, a
byte per element and pass, as torchao's `enable_fsdp_float8_all_gather`; for backward that is the transposed copy. The
exchange of scales, a number per weight, is left out.
Gathered module by module, as DeepSpeed's hooks do, each weight has a collective of its own, but for the small ones,
which DeepSpeed does not divide; here they are gathered with the next large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from sim.rewrites.batching import sent
from sim.rewrites.holding import points, with_releases
from sim.rewrites.rewriter import Ints, Rewriter, slice_of
from sim.trace.graph import Trace
from sim.trace.layers import layer_runs
from sim.trace.op import PHASE_CODE, Op, Ring
from sim.trace.origin import Expr, Glue, Microbatch, Part, Same, has_experts
from sim.trace.tensor import ROLE_CODE

LEVELS = (0, 1, 2, 3)
GATHERED = ("layer", "module")
"""What level 3 gathers together."""
PERSISTENT = 10**5
"""Elements of a weight that DeepSpeed leaves whole (`stage3_param_persistence_threshold`)."""
AMONG_REPLICAS = ("data", "expert_data", "data_context", "expert_data_context")
"""Axes of the collectives that sum gradients, and gather what has been divided for them."""
BACKWARD, UPDATE = PHASE_CODE["backward"], PHASE_CODE["update"]
WEIGHT, STATE = ROLE_CODE["weight"], ROLE_CODE["optimizer_state"]


def shard(
    trace: Trace,
    ranks: int,
    level: int,
    reshard: bool = True,
    prefetch: int = 1,
    group: int = 1,
    gathered: str = "layer",
    within: int = 0,
) -> Trace:
    """Keep and update 1 / ranks of the training state on each replica.

    trace: one of so many replicas, with the collectives that sum their gradients (`split_batch_ops`).
    ranks: replicas. Where ranks divide the tokens of each, the state is divided among all of them.
    level: one of `LEVELS`; at 0 the trace itself is returned.
    reshard: whether level 3 frees gathered weights after forward, and gathers them again for backward. Else they stay
        until a backward of their layer, as with FSDP2's `reshard_after_forward=False`, and are sent once less.
    prefetch: how many layers, or modules, ahead level 3 gathers weights: of as many and one more each replica holds all
        of them.
    group: of weights that level 3 frees after forward and needs again, each of so many replicas next to each other
        keeps a part, from which they are gathered until a backward of their layer has done so, as with a number for
        FSDP2's `reshard_after_forward`; 1: each has its own part of the state alone.
    gathered: one of `GATHERED`: the weights of a layer together, or of each module that has a large one.
    within: of the replicas, how many next to each other divide the state, at least two; 0: all of them.
    """
    tokens = trace.origin.context if trace.origin else 1
    if level == 0 or ranks * tokens == 1:
        return trace
    return _Sharding(trace, ranks, level, reshard, prefetch, group, gathered, within % ranks).build()


@dataclass
class _Gather:
    """Weights that a run of ops reads, or of which it reads casts, and the run's first and last op.

    whole: the gathered ones by id.
    unread: those of which it only reads casts.
    kept: weights that an earlier run has gathered, and which.
    near: weights of which an earlier run has left parts in a group, and which.
    parts: of the weights of which it leaves parts itself, these by id; -1 until they are there.
    """

    first: int
    last: int
    weights: list[int]
    unread: list[int]
    whole: dict[int, int] = field(default_factory=dict)
    kept: dict[int, _Gather] = field(default_factory=dict)
    near: dict[int, _Gather] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)


def _among_replicas(op: Op) -> bool:
    return op.ring is not None and op.ring.axis in AMONG_REPLICAS


class _Sharding:
    """The trace as it is rewritten.

    experts: the tensors and ops of which each replica has a share of the experts; they are divided among the `groups`
        replicas that have the same.
    copying: per copy of a weight in 8 bits the op that makes it. At level 3 each replica copies its part of the weight,
        once, and the copies are gathered in its place.
    parts: of which tensors there is only a part.
    ids: the new tensor, or the part, by old id.
    whole: of an updated weight the gathered one, by old id.
    within: replicas that divide the state, where not all of them do; else 0.
    of_group: tensors that are parts of the sum over these alone, and for each what they stand for, in the base.
    waiting: by device, the last parts of gradients that have been summed over a group: with the op and its terms.
    held: gathered weights that nothing reads, and the op of the layer at whose end they are released.
    """

    def __init__(
        self,
        trace: Trace,
        ranks: int,
        level: int,
        reshard: bool,
        prefetch: int,
        group: int,
        gathered: str,
        within: int,
    ) -> None:
        self.trace, self.ranks, self.level, self.reshard, self.within = trace, ranks, level, reshard, within
        self.prefetch, self.group, self.by_module = prefetch, group, gathered == "module"
        self.new = Rewriter(trace, {"zero": level} if reshard else {"zero": level, "reshard": False})
        self.ops, self.tensors = list(trace.ops), list(trace.tensors)
        origin = trace.origin.ops if trace.origin else ()
        groups = ranks // (trace.origin.experts if trace.origin else 1)
        tokens = trace.origin.context if trace.origin else 1
        suffix = "_context" if tokens > 1 else ""
        self.axes = f"{'group' if within else 'data'}{suffix}", f"expert_data{suffix}"
        self.among = dict(zip(self.axes, ((within or ranks) * tokens, groups * tokens), strict=True))
        every = (trace.origin.tensors, trace.origin.ops) if trace.origin else ((), ())
        self.of_experts, self.ops_of_experts = ({i for i, e in enumerate(some) if has_experts(e)} for some in every)
        self.glue = {op for op, expr in enumerate(origin) if isinstance(expr, Glue)}
        self.copying: dict[int, int] = {}
        self.copied: set[int] = set()  # the ops among them that have been written
        self.parts = self._sharded()
        self.ids: list[int] = []
        self.new_ids = np.zeros(0, np.int64)
        self.whole: dict[int, int] = {}
        self.of_group: dict[int, Expr] = {}
        self.waiting: dict[int, tuple[Op, list[int]]] = {}
        self.held: list[tuple[int, int]] = []

    def _sharded(self) -> set[int]:
        """The tensors of which a replica has a part: states, weights at level 3, and what follows from reduced ones."""
        role, producer = self.trace.tensor_columns.role, self.trace.producer
        found = {
            t
            for t in range(len(self.tensors))
            if producer[t] < 0
            and (role[t] == STATE or (self.level == 3 and role[t] == WEIGHT and not self._is_buffer(t)))
            and self._count(t) > 1
        }
        for op in self.ops:
            if self.level == 3 and self._copies(op, found):
                self.copying |= dict.fromkeys(op.writes, op.id)
        found.update(self.copying)
        sends = {op.group: op for op in self.ops if op.kind == "send"}
        arriving = [op for op in self.ops if op.kind == "recv"]  # which may stand before what is sent

        def has_parts(op: Op) -> bool:
            return any(t in found and not self._is_gathered(t, op) for t in op.reads)

        before = -1
        while before < len(found):
            for op in self.ops:
                if _among_replicas(op) or self._updates(op) or (op.id in self.glue and has_parts(op)):
                    found.update(op.writes)
            before = len(found)
            found.update(t for op in arriving if has_parts(sends[op.group]) for t in op.writes)
        return found

    def _is_gathered(self, t: int, op: Op) -> bool:
        """Whether an op reads all of what a replica has a part of: a weight before its update, or a copy of one."""
        return op.phase != "update" and (self.trace.producer[t] < 0 or t in self.copying)

    def _is_buffer(self, t: int) -> bool:
        """Whether forward renews a weight: running statistics, which each replica has whole."""
        renewed = int(self.trace.replaced_by[t])
        return renewed >= 0 and bool(self.trace.op_columns.phase[self.trace.producer[renewed]] < BACKWARD)

    def _copies(self, op: Op, parts: set[int]) -> bool:
        """Whether an op makes copies of a weight of which there are parts, which are weights themselves and stay."""
        roles = {self.tensors[t].role for t in op.writes}
        own = bool(op.reads) and parts.issuperset(op.reads) and op.phase == "forward" and op.kind == "elementwise"
        return own and roles == {"weight"} and all(self.tensors[t].replaces is None for t in op.writes)

    def _updates(self, op: Op) -> bool:
        ranks = self.among[self._axis(op.id, self.ops_of_experts)]
        return op.phase == "update" and op.id not in self.glue and ranks > 1

    def _axis(self, which: int, of_experts: set[int]) -> str:
        """Along which axis a tensor or an op is divided."""
        return self.axes[which in of_experts]

    def _count(self, t: int) -> int:
        """Among how many replicas a tensor is divided."""
        return self.among[self._axis(t, self.of_experts)]

    def build(self) -> Trace:
        for t in self.tensors:
            if t.id in self.parts:
                ranks = self._count(t.id)
                part, size = Part(Same(t.id), 0, 1, ranks), slice_of(t.bytes, 0, 1, ranks)
                shape = t.shape if t.shape == () else None
                self.ids.append(self.new.tensor(t, part, name=f"{t.name}.shard", bytes=size, shape=shape))
            else:
                self.ids.append(self.new.tensor(t))
        self.new_ids = np.array(self.ids, np.int64)
        for t in self.tensors:
            if t.replaces is not None and (t.id in self.parts) == (t.replaces in self.parts):
                self.new.builder.take_over(self.ids[t.id], self.ids[t.replaces])
        gathers, starts = self._gathers()
        copy, copied = self.new.run_copier(), 0
        for op in self._changed(gathers, starts):
            self._copy_between(copied, op.id, copy)
            copied = op.id + 1
            for gather in starts.get(op.id, ()):
                self._gather(gather, op)
            of = gathers.get(op.id)
            if of and of.first == op.id:
                of.whole |= {t: earlier.whole[t] for t, earlier in of.kept.items()}
            self._add(op, of)
            if of and of.last == op.id:
                self.held += [(of.whole[t], self.new.op_count - 1) for t in of.unread]
                if of.parts:
                    self._leave_parts(of, op)
        self._copy_between(copied, len(self.ops), copy)
        for device in list(self.waiting):
            self._sum_over_groups(device)
        ids = {**dict(enumerate(self.ids)), **self.whole}
        carry = [(ids[a], ids[b]) for a, b in self.trace.carry]
        outputs = [ids[t] for t in self.trace.outputs]
        group = self.within or (self.group if self.level == 3 else 1)
        new = self._claimed(self.new.build(outputs=outputs, carry=carry, group=group))
        return with_releases(new, [*points(new), *self.held]) if self.held else new

    def _changed(self, gathers: Mapping[int, _Gather], starts: Mapping[int, Sequence[_Gather]]) -> list[Op]:
        """The ops that are not merely copied: of parts, of the update, collectives, and where something is gathered."""
        c, count = self.trace.op_columns, len(self.ops)
        is_part = np.zeros(len(self.tensors), np.bool_)
        is_part[list(self.parts)] = True
        changed = c.phase == UPDATE
        sums = (op for op, ring in c.ring.items() if ring.axis in AMONG_REPLICAS)
        changed[[*sums, *starts, *(at for each in gathers.values() for at in (each.first, each.last))]] = True
        for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids)):
            changed[np.repeat(np.arange(count), np.diff(start))[is_part[ids]]] = True
        return [self.ops[op] for op in np.flatnonzero(changed).tolist()]

    def _copy_between(self, first: int, stop: int, copy: Callable[[Ints, Ints, Ints, int], None]) -> None:
        """Copy the ops from one to before another, a run per device."""
        c, new = self.trace.op_columns, self.new_ids
        device = c.device[first:stop]
        for run in np.split(np.arange(first, stop), np.flatnonzero(np.diff(device)) + 1):
            if len(run):
                reads, writes = (
                    new[ids[start[run[0]] : start[run[-1] + 1]]]
                    for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids))
                )
                copy(run, reads, writes, int(c.device[run[0]]))

    def _add(self, op: Op, gather: _Gather | None) -> None:
        """An op over parts, over gathered weights, or as it is."""
        whole = gather.whole if gather else {}
        reads, writes = [whole.get(t, self.ids[t]) for t in op.reads], [self.ids[t] for t in op.writes]
        waiting = self.waiting.get(op.device)
        if waiting and (_among_replicas(op) or not set(waiting[0].writes).isdisjoint(op.reads)):
            self._sum_over_groups(op.device)
        if _among_replicas(op):
            self._reduce_scatter(op, reads, writes)
        elif not self.copying.keys().isdisjoint(op.writes):
            self._copy(op)
        elif self._updates(op):
            self._add_part(op, reads, writes)
            fresh = [t for t in op.writes if self.tensors[t].role == "weight"] if self.level < 3 else []
            if fresh:
                self._gather_updated(op, fresh)
        elif op.ring is not None and self.parts.intersection(op.writes):  # a sum over other ranks, of parts
            size = sum(self.new.builder.bytes_of(t) for t in reads)
            self.new.op(op, reads=reads, writes=writes, bytes=sent(size, op.ring))
        else:
            self.new.op(op, reads=reads, writes=writes)

    def _reduce_scatter(self, op: Op, reads: list[int], writes: list[int]) -> None:
        """Sum gradients over the replicas that divide them, each of which gets its part."""
        assert op.ring is not None
        ring = op.ring._replace(passes=1)
        if self.within:
            ring = Ring(ring.axis.replace("data", "group"), ring.ranks * self.within // self.ranks, 1)
            writes = [self._of_group(total, term) for total, term in zip(op.writes, op.reads, strict=True)]
            self.waiting[op.device] = op, writes
        size = sum(self.tensors[t].bytes for t in op.reads)
        name = op.name.replace("all_reduce", "reduce_scatter")
        self.new.op(op, name=name, group=name, reads=reads, writes=writes, ring=ring, bytes=sent(size, ring))

    def _of_group(self, total: int, term: int) -> int:
        """A new tensor for this replica's part of a sum over its group alone. total: over all. term: of a replica."""
        assert self.trace.origin is not None
        like, ranks, origin = self.tensors[total], self._count(total), self.trace.origin
        fields: dict[str, Any] = {"bytes": slice_of(like.bytes, 0, 1, ranks), "shape": () if like.shape == () else None}
        name = f"{like.name}.of_group.shard"
        part = self.new.tensor(like, Part(Same(total), 0, 1, ranks), name=name, replaces=None, **fields)
        self.new.builder.take_over(self.ids[total], part)
        own, of = origin.tensors[term], origin.tensors[total]
        assert isinstance(own, Microbatch)
        stop = own.first + origin.width(own, "data") * self.within
        summed = Microbatch(of.of if isinstance(of, Microbatch) else of, own.first, stop, own.count)
        self.of_group[part] = Part(summed, 0, 1, ranks)
        return part

    def _claimed(self, new: Trace) -> Trace:
        """The same trace in which parts of sums over a group stand for what they are."""
        if not self.of_group:
            return new
        assert new.origin is not None
        tensors = tuple(self.of_group.get(t, expr) for t, expr in enumerate(new.origin.tensors))
        origin = replace(new.origin, tensors=tensors)
        columns = new.tensor_columns, new.op_columns
        return Trace(*columns, outputs=new.outputs, carry=new.carry, meta=new.meta, origin=origin, like=new)

    def _sum_over_groups(self, device: int) -> None:
        """Sum the last parts of gradients of a device over the replicas that have the same parts."""
        op, terms = self.waiting.pop(device)
        ring = Ring("group_data", self.ranks // self.within, 2)
        size = sum(map(self.new.builder.bytes_of, terms))
        fields = {"phase": op.phase, "layer": op.layer, "device": op.device, "dtype": self.tensors[op.writes[0]].dtype}
        fields |= {"bytes": sent(size, ring), "ring": ring, "group": op.name}
        self.new.glue(op.name, "collective", terms, [self.ids[t] for t in op.writes], **fields)

    def _add_part(self, op: Op, reads: list[int], writes: list[int]) -> None:
        """An op on this replica's parts alone."""
        ranks = self.among[self._axis(op.id, self.ops_of_experts)]
        self.new.op(
            op,
            Part(Same(op.id), 0, 1, ranks),
            reads=reads,
            writes=writes,
            flops=slice_of(op.flops, 0, 1, ranks),
            bytes=None if op.bytes is None else slice_of(op.bytes, 0, 1, ranks),
            workspace=-(-op.workspace // ranks),
            duration=None if op.duration is None else -(-op.duration // ranks),
        )

    def _copy(self, op: Op) -> None:
        """Copy the part of a weight, where that has not been done for a gather before."""
        if op.id not in self.copied:
            self.copied.add(op.id)
            self._add_part(op, [self.ids[t] for t in op.reads], [self.ids[t] for t in op.writes])

    def _gather_updated(self, op: Op, fresh: list[int]) -> None:
        """The new weights in place of the old ones, from the parts that each replica has updated."""
        for t in fresh:
            old = self.tensors[t].replaces
            self.whole[t] = self.new.tensor(self.tensors[t], replaces=None if old is None else self.ids[old])
        self._all_gather(
            f"{op.name}.all_gather", [self.ids[t] for t in fresh], [self.whole[t] for t in fresh], fresh, op
        )

    def _all_gather(self, name: str, reads: list[int], writes: list[int], of: list[int], at: Op) -> None:
        """Gather tensors from the replicas that have parts of them, each kind by one collective."""
        for axis, ranks in self.among.items():
            some = [i for i, t in enumerate(of) if self._axis(t, self.of_experts) == axis]
            if not some:
                continue
            own = name if axis == self.axes[0] else f"{name}.experts"
            which = [reads[i] for i in some], [writes[i] for i in some], [of[i] for i in some]
            self._join(own, *which, at, Ring(axis, ranks, 1))

    def _join(self, name: str, reads: list[int], writes: list[int], of: list[int], at: Op, ring: Ring) -> None:
        """Gather tensors over a ring whose ranks have parts of them."""
        size = sum(self.tensors[t].bytes for t in of)
        fields = {"phase": at.phase, "layer": at.layer, "device": at.device, "dtype": self.tensors[of[0]].dtype}
        fields |= {"bytes": sent(size, ring), "ring": ring, "group": name}
        self.new.glue(name, "collective", reads, writes, **fields)

    # ---- level 3 -----------------------------------------------------------------------------

    def _gathers(self) -> tuple[dict[int, _Gather], dict[int, list[_Gather]]]:
        """Per op that reads weights before their update what is gathered for it; per op what to gather before it."""
        of_op: dict[int, _Gather] = {}
        starts: dict[int, list[_Gather]] = {}
        if self.level < 3:
            return of_op, starts
        phase = self.trace.op_columns.phase
        casts = {t: op.reads for op in self.ops if self._casts(op) for t in op.writes}
        before: dict[int, list[_Gather]] = {}  # per device, in order
        held: dict[int, dict[int, _Gather]] = {}  # per device, gathered weights that were not freed
        for run in self._runs([op.id for op in self.ops if phase[op.id] != UPDATE]):
            reading = (op for op in run if self.copying.keys().isdisjoint(self.trace.writes(op)))
            operands = dict.fromkeys(t for op in reading for t in self.trace.reads(op))
            read = [t for t in operands if t in self.parts and self._is_gathered(t, self.ops[run[0]])]
            of_casts = dict.fromkeys(w for t in operands for w in casts.get(t, ()) if phase[run[0]] == BACKWARD)
            unread = [t for t in of_casts if t not in operands]
            if read or unread:
                device, weights = self.ops[run[0]].device, [*read, *unread]
                there = held.setdefault(device, {})
                missing, earlier = [t for t in weights if t not in there], {t: there[t] for t in weights if t in there}
                if self.group > 1:
                    gather = _Gather(run[0], run[-1], weights, unread, near=earlier)
                    for t, of in earlier.items():
                        of.parts[t] = -1
                else:
                    gather = _Gather(run[0], run[-1], missing, unread, kept=earlier)
                of_op.update(dict.fromkeys(run, gather))
                if gather.weights:
                    before.setdefault(device, []).append(gather)
                if self.group > 1 or not self.reshard:
                    there |= dict.fromkeys(missing, gather)
                    for t in weights if phase[run[0]] == BACKWARD else ():
                        del there[t]
        for gathers in before.values():
            place = {id(gather): k for k, gather in enumerate(gathers)}
            for k, gather in enumerate(gathers):
                after = max((place[id(earlier)] + 1 for earlier in gather.near.values()), default=0)
                starts.setdefault(gathers[max(k - self.prefetch, after)].first, []).append(gather)
        return of_op, starts

    def _runs(self, ops: list[int]) -> Iterator[list[int]]:
        """Ops whose weights are gathered together: of a layer, or up to the next op that reads another large weight."""
        for run in layer_runs(self.trace, ops):
            part: list[int] = []
            own: set[int] = set()
            for op in run:
                large = {t for t in self.trace.reads(op) if self._is_large(t)} if self.by_module else set()
                if own and not large <= own:
                    yield part
                    part, own = [], set()
                part.append(op)
                own |= large
            yield part

    def _is_large(self, t: int) -> bool:
        """Whether a tensor is a weight of which there are parts, or a copy of one, and which is worth a collective."""
        gathered = t in self.parts and (self.trace.producer[t] < 0 or t in self.copying)
        return gathered and prod(self.tensors[t].shape or (self.tensors[t].bytes // 2,)) >= PERSISTENT

    def _casts(self, op: Op) -> bool:
        """Whether an op of forward copies weights of which a replica has a part."""
        own = (t in self.parts and self.trace.producer[t] < 0 for t in op.reads)
        return op.phase == "forward" and op.kind == "copy" and bool(op.reads) and all(own)

    def _gather(self, gather: _Gather, at: Op) -> None:
        first = self.ops[gather.first]
        for t in gather.weights:
            if t in self.copying:
                self._copy(self.ops[self.copying[t]])
            tensor = self.tensors[t]
            name = f"{tensor.name}.for.{first.name}"
            gather.whole[t] = self.new.tensor(tensor, Same(t), name=name, role="temporary", replaces=None)
        name = f"{first.name}.all_gather"
        far = [t for t in gather.weights if t not in gather.near]
        self._all_gather(name, [self.ids[t] for t in far], [gather.whole[t] for t in far], far, at)
        if gather.near:
            near = [earlier.parts[t] for t, earlier in gather.near.items()]
            whole = [gather.whole[t] for t in gather.near]
            self._join(f"{name}.near", near, whole, list(gather.near), at, Ring("group", self.group, 1))

    def _leave_parts(self, gather: _Gather, at: Op) -> None:
        """Copy the parts of gathered weights that this replica keeps until they are gathered from its group."""
        for t in gather.parts:
            part, size = Part(Same(t), 0, 1, self.group), slice_of(self.tensors[t].bytes, 0, 1, self.group)
            name = f"{self.tensors[t].name}.part.after.{at.name}"
            fields: dict[str, Any] = {"name": name, "bytes": size, "role": "temporary", "replaces": None}
            gather.parts[t] = self.new.tensor(self.tensors[t], part, shape=None, **fields)
        reads, writes = [gather.whole[t] for t in gather.parts], list(gather.parts.values())
        fields = {"phase": at.phase, "layer": at.layer, "device": at.device, "dtype": at.dtype}
        fields["bytes"] = 2 * sum(map(self.new.builder.bytes_of, writes))
        self.new.glue(f"{at.name}.reshard", "copy", reads, writes, **fields)
