"""The rewrite that splits the batch into microbatches and accumulates their gradients."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError
from sim.rewrites.dimensions import has_sums
from sim.rewrites.expert_parallel import expert_share
from sim.rewrites.rewriter import Rewriter, slice_of
from sim.rewrites.slots import owner, weights_of
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.op import KIND_CODE, PHASE_CODE, Op, Ring
from sim.trace.origin import Expr, Microbatch, Same, first_same
from sim.trace.series import Mark
from sim.trace.tensor import ROLE_CODE, Tensor

UPDATE = PHASE_CODE["update"]
ALIKE = 4
"""The first microbatch that may follow from two before it: those are the third and the fourth."""
MAIN = re.compile(r".*\.grad\.main(\.\d+)?")
"""Names of ops that bring a gradient to the type in which it is kept: from the second microbatch on they add it."""
OF_AN_EXPERT = re.compile(r"h\d+\.mlp\.expert\d+\.")
"""Names of what `workloads.experts` makes of one expert after another."""


def batch_ops(trace: Trace) -> NDArray[np.bool_]:
    """Whether each op may be split by batch, and parts compute what the whole does. Shape (ops,)."""
    return _splits_by(trace, "batch") | _splits_by(trace, "batch_sum")


def own_ops(trace: Trace) -> NDArray[np.bool_]:
    """Whether parts of each op have statistics of their own samples (batch norm). Shape (ops,)."""
    return _splits_by(trace, "batch_own")


def renewed(trace: Trace, own: NDArray[np.bool_]) -> dict[int, int]:
    """Running statistics: of what ops of `own` overwrite that exists from the start, the new version, by id."""
    replaces = trace.tensor_columns.replaces
    found = ((int(replaces[t]), t) for op in np.flatnonzero(own).tolist() for t in trace.writes(op))
    return {old: t for old, t in found if old >= 0 and trace.producer[old] < 0}


def _splits_by(trace: Trace, way: str) -> NDArray[np.bool_]:
    out = np.zeros(len(trace.ops), np.bool_)
    out[[op for op, ways in trace.op_columns.splits.items() if way in ways]] = True
    return out


def renewing(trace: Trace, versions: Collection[int]) -> set[int]:
    """The ops that do nothing but renew running statistics, as much for a part of the samples as for all."""
    ops = {int(trace.producer[t]) for t in versions}
    return {op for op in ops if all(t in versions for t in trace.writes(op))}


def batched(trace: Trace) -> NDArray[np.bool_]:
    """Whether each tensor has one row per sample, so that a microbatch needs a slice of it. Shape (tensors,).

    These are the inputs and the results of ops that split by `batch`, except gradients of weights, weights, optimizer
    states, and tensors whose shape rules it out (a scalar, a random state). The exceptions, and all results of ops that
    split by `batch_sum`, are sums over the samples or the same for all of them. Of results of `batch_own` those of one
    dimension are statistics. Where one op of backward has several results, that of a weight's name is a gradient of its
    copy in another type, and one in the shape of an operand without rows is that operand's: both are sums. So are the
    gradients that a chunk of head and loss adds to, but for that in the shape of its input.
    """
    c, own = trace.tensor_columns, own_ops(trace)
    splits = _splits_by(trace, "batch") | own
    by_batch_op = np.append(splits, False)[trace.producer]  # -1, no producer, is the last entry
    summed = np.isin(c.role, (*PERSISTENT, ROLE_CODE["gradient"]))
    out: NDArray[np.bool_] = np.where(trace.producer < 0, c.role == ROLE_CODE["input"], by_batch_op & ~summed)
    out[[t for t, shape in c.shape.items() if trace.producer[t] >= 0 and _has_no_rows(shape, c.name[t], trace)]] = False
    statistics = (t for op in np.flatnonzero(own).tolist() for t in trace.writes(op) if len(c.shape.get(t, ())) < 2)
    out[list(statistics)] = False
    weights = weights_of(trace)
    for op in np.flatnonzero(splits & (trace.op_columns.phase == PHASE_CODE["backward"])).tolist():
        if len(made := trace.writes(op)) > 1:
            out[[t for t in made if owner(c.name[t], weights) is not None]] = False
            forms = {t: (c.shape.get(t), c.axes.get(t)) for t in (*trace.reads(op), *made)}
            having, lacking = ({forms[t] for t in trace.reads(op) if out[t] == rows} for rows in (True, False))
            out[[t for t in made if forms[t] in lacking - having - {(None, None)}]] = False
    sums = np.append(_splits_by(trace, "batch_sum"), False)[trace.producer]
    for op in _sums_in_forward(trace):
        of_weights = [t for t in trace.writes(op) if c.shape.get(t) != c.shape.get(trace.reads(op)[2])]
        out[of_weights], sums[of_weights] = False, True
    for t in np.flatnonzero(sums & (c.replaces >= 0)).tolist():  # what is scaled or added to in place is a sum, too
        while (t := int(c.replaces[t])) >= 0:
            out[t] = False
    return out


def _sums_in_forward(trace: Trace) -> list[int]:
    """The products of forward that add to the gradients so far, see `has_sums`."""
    c = trace.op_columns
    products = np.flatnonzero((c.kind == KIND_CODE["matmul"]) & (c.phase == PHASE_CODE["forward"]))
    several = products[np.diff(c.read_start)[products] > 3]
    return [op for op in several.tolist() if has_sums(trace.ops[op])]


def _has_no_rows(shape: tuple[int, ...], name: str, trace: Trace) -> bool:
    """Whether a shape rules out rows of samples: a scalar, or a length that the samples do not divide.

    Of an expert that runs by itself, rows are as many as tokens chose it.
    """
    if shape and OF_AN_EXPERT.match(name):
        return False
    batch, parts = trace.meta.get("batch"), trace.meta.get("microbatches", 1)
    return shape == () or (isinstance(batch, int) and batch > parts and shape[0] % (batch // parts) > 0)


def split_batch(trace: Trace, n: int) -> Trace:
    """Run forward and backward once per microbatch, then the update once; names gain `.mb0`, `.mb1`, ….

    Every op that reads a slice of the batch must have `batch` or `batch_sum` in its `splits`. Gradients of weights
    are accumulated in place, by an op after each microbatch but the first; where they are kept in another type, by the
    op that would convert them, which is the product itself where one kernel does both (`MAIN`). An op that may not be
    split runs once: with microbatch 0 if it reads no slice (a cast of a weight), with the last microbatch if it reads
    an accumulated gradient (an optimizer). Rows of activations and FLOPs are divided evenly, rounded so that they add
    up; workspace (also that of alternatives), durations and bytes touched round up. Each microbatch reads the weights.
    Where an op states the bytes that it touches, they are scaled in proportion to its operands.

    trace: the trace to split.
    n: number of microbatches.

    Departs: durations and workspaces scale linearly with the batch, which measured ones do not.
    Raises TraceError naming an op that cannot be split, or where `meta["batch"]` is not a multiple of n.
    """
    return split_batch_ops(trace, n)[0]


def split_batch_ops(
    trace: Trace,
    n: int,
    ranks: int = 1,
    dealt: bool = False,
    passes: bool = False,
    experts: int = 1,
    once: Collection[int] = (),
    buckets: Sequence[int] = (),
    apart: Sequence[int] = (),
    own_statistics: bool = False,
) -> tuple[Trace, list[tuple[int, int]]]:
    """`split_batch`, and for each new op the old op that it is, or works for, and its microbatch.

    ranks: symmetric replicas, of which the new trace is one; each has n microbatches of its own. The gradients of a
        layer are summed over all of them by one collective, as soon as the last microbatch has produced them; where
        ranks divide the tokens of a replica, over these, too, in place of sums before the update.
    dealt: they are summed after each microbatch, before they are accumulated.
    passes: each microbatch is a pass of a training loop through the model, and repeats what reads no slice and
        what only the pass needs: it casts weights, since it enters autocast's context, whose cache is empty then.
    experts: of the replicas, how many next to each other divide the experts (`sim.rewrites.expert_parallel`).
    once: ops that could run per microbatch (`batch_sum`) and run once, on the sums over this replica's microbatches;
        among replicas their results are summed, in place of what they read. Not with `dealt`.
    buckets: bytes after which a collective among replicas takes no further gradient: of the first, the second, …, the
        last of them for all that follow; a gradient that passes the limit is still in it. None: one per layer.
    apart: per op the part of the model whose gradients no collective shares with others'; () for one part.
    own_statistics: whether each microbatch has statistics of its own samples in ops that split by `batch_own`, as a
        training loop over microbatches has, and replicas without synchronised batch norm. Running statistics are
        renewed by each microbatch in turn, and each replica has its own.
    """
    size = trace.meta.get("batch")
    if n < 1 or (isinstance(size, int) and size % (n * ranks)):
        raise TraceError(f"split_batch: {n * ranks} microbatches do not divide the batch of {size}")
    if n * ranks == 1 and not _sums_over_tokens(trace):
        return trace, [(op, 0) for op in range(len(trace.ops))]
    splits, rows = batch_ops(trace), batched(trace)
    if n * ranks == 1:  # nothing is divided: what waits for sums over tokens comes once, as a whole
        splits, rows = trace.op_columns.phase != UPDATE, np.zeros_like(rows)
    splits[list(once)] = False
    own = own_ops(trace) if own_statistics and n * ranks > 1 else np.zeros_like(splits)
    for _, first in trace.carry:
        if rows[first]:
            raise TraceError(
                f"split_batch: tensor {trace.tensor_columns.name[first]!r} is carried, so that it cannot be split"
            )
    limits = _Buckets(tuple(buckets), tuple(apart) or (0,) * len(trace.ops))
    return _Split(trace, n, splits | own, rows, ranks, dealt, passes, experts, frozenset(once), limits, own).run()


@dataclass(frozen=True)
class _Buckets:
    """Which gradients are summed by one collective.

    limits: bytes of the first, the second, … bucket; () for one per layer. part: of the model, per op.
    """

    limits: tuple[int, ...]
    part: tuple[int, ...]

    def is_full(self, waiting: Sequence[tuple[Tensor, Op, int]], number: int) -> bool:
        """Whether bucket `number` takes no further gradient."""
        size = sum(t.bytes for t, _, _ in waiting)
        return bool(self.limits) and size >= self.limits[min(number, len(self.limits) - 1)]

    def ends(self, last: Op, op: Op) -> bool:
        """Whether an op that follows the last one whose gradient waits is of another bucket."""
        return self.part[op.id] != self.part[last.id] or (not self.limits and op.layer != last.layer)


class _Split:
    """A trace as it is dealt out to n microbatches.

    whole: per tensor the new one that stands for all of it.
    current: per tensor the new one of the microbatch at hand.
    which: for each new op the old one and its microbatch.
    like_tensor, like_op: per tensor and op the new one of an earlier microbatch, which differs in what all differ in.
    reduced: tensors that wait for the collective among replicas, with the op and the microbatch that produced each.
    tokens: ranks that divide the tokens of a replica. joined: of tensors that they have terms of, the sums, which the
        collective among replicas makes in place of the ops of `joining`.
    experts: what this rank has of the experts, None where they are not divided. groups: of replicas that divide them.
    total: microbatches of all groups.
    renewed: the new version of each running statistic, by the old one's id. renewing: the ops that write these alone.
    """

    def __init__(
        self,
        trace: Trace,
        n: int,
        splits: NDArray[np.bool_],
        rows: NDArray[np.bool_],
        ranks: int = 1,
        dealt: bool = False,
        passes: bool = False,
        experts: int = 1,
        once: frozenset[int] = frozenset(),
        buckets: _Buckets | None = None,
        own: NDArray[np.bool_] | None = None,
    ) -> None:
        self.buckets = buckets or _Buckets((), (0,) * len(trace.ops))
        self.trace, self.n = trace, n
        # lists, of which single values are read much faster than of arrays
        self.splits: list[bool] = splits.tolist()
        self.rows: list[bool] = rows.tolist()
        joining = _sums_over_tokens(trace)
        self.tokens = trace.op_columns.ring[joining[0]].ranks if joining else 1
        self.joining = frozenset(joining)
        self.joined = {t: whole for op in joining for t, whole in zip(trace.reads(op), trace.writes(op), strict=True)}
        self.ranks, self.dealt = ranks, dealt and (ranks > 1 or bool(joining))
        self.experts = expert_share(trace, experts, rows) if experts > 1 else None
        self.ops_elsewhere = self.experts.ops_elsewhere if self.experts is not None else frozenset[int]()
        self.members, self.groups = experts, ranks // experts
        self.total = n * self.groups
        self.summed_by_once = {t for op in once for t in trace.reads(op)}
        results = {t for op in once for t in trace.writes(op)} - self.summed_by_once
        if ranks == 1 and not results <= self.joined.keys():  # a single rank's sums are whole, as for any late op
            once, self.summed_by_once = frozenset(), set()
        self.once = once
        self.reduced: list[tuple[Tensor, Op, int]] = []
        self.renewed = {} if own is None else renewed(trace, own)
        self.versions = set(self.renewed.values())
        self.renewing = renewing(trace, self.versions)
        late = _late_ops(trace, splits, rows, self.versions)
        self.late: list[bool] = late.tolist()
        repeated = _repeated_ops(trace, splits, late) if passes and n > 1 else np.zeros_like(splits)
        self.repeated: list[bool] = repeated.tolist()
        about = {"expert_ranks": experts} if experts > 1 else {}
        self.new = Rewriter(trace, {"microbatches": n * ranks * int(trace.meta.get("microbatches", 1)), **about})
        self.tensors, self.ops = list(trace.tensors), list(trace.ops)
        self.same = first_same(max(len(self.tensors), len(self.ops)))
        self.produced_by_split: list[bool] = np.append(splits, False)[trace.producer].tolist()
        self.produced_by_repeated: list[bool] = np.append(repeated, False)[trace.producer].tolist()
        outputs = set(trace.outputs)
        # sums that something outside the microbatches reads; all others are consumed within their microbatch
        self.needed_outside = {
            t.id
            for t in self.tensors
            if self.produced_by_split[t.id]
            and t.id not in self.versions
            and (t.id in outputs or any(not splits[op] for op in trace.readers(t.id)))
        }
        self.whole: dict[int, int] = {}
        self.current: dict[int, int] = {}
        self.which: list[tuple[int, int]] = []
        self.sums: dict[int, int] = {}
        self.slices: dict[int, list[int]] = {}
        self.storages: dict[int, list[int]] = {}  # of a view among them, what its slices are views of
        self.exchanged: dict[int, int] = {}
        self.like_tensor: dict[int, int] = {}
        self.like_op: dict[int, int] = {}

    def run(self) -> tuple[Trace, list[tuple[int, int]]]:
        """The new trace, and `which`."""
        k, marks = 0, list[Mark]()
        while k < self.n:
            marks.append(self.new.builder.mark())
            if k == ALIKE and self.n > ALIKE + 1:
                k += self._go_on(marks, k - 1, self.n - 1 - k)
            self._microbatch(k)
            k += 1
        self._concatenate()
        trace, whole = self.trace, self.whole
        elsewhere = self.experts.elsewhere if self.experts is not None else frozenset[int]()
        for t in [*trace.outputs, *(t for pair in trace.carry for t in pair)]:
            if t not in whole and t not in elsewhere:  # exists from the start and is kept unchanged
                whole[t] = self._whole_tensor(self.tensors[t])
        carry = [(whole[a], whole[b]) for a, b in trace.carry if b not in elsewhere]
        outputs = [whole[t] for t in trace.outputs if t not in elsewhere]
        which: dict[str, Any] = {"ranks": self.ranks, "dealt": self.dealt, "experts": self.members}
        return self.new.build(outputs=outputs, carry=carry, **which), self.which

    def _microbatch(self, k: int) -> None:
        """All that microbatch k runs, and what runs once with it."""
        self.current.clear()
        self.exchanged.clear()
        number = 0
        for op in self.ops:
            if op.id in self.ops_elsewhere:
                continue
            meets = self.reduced and op.group and op.group == self.reduced[-1][1].group
            is_closed = self.reduced and (
                not self.splits[op.id]
                or self.buckets.ends(self.reduced[-1][1], op)
                or self.buckets.is_full(self.reduced, number)
            )
            if is_closed and not meets:
                self._reduce()
                number += 1
            if self.splits[op.id]:
                self._in_microbatch(op, k)
            elif self.repeated[op.id]:
                reads, writes = ([self.place(self.tensors[t], k) for t in ids] for ids in (op.reads, op.writes))
                name, group = _in_microbatch(op, k)
                self._undivided(op, name=name, group=group, reads=reads, writes=writes)
                self.which.append((op.id, k))
            elif op.id in self.joining:
                continue
            elif op.id in self.once:
                if k == self.n - 1:
                    self._once(op)
            elif k == (self.n - 1 if self.late[op.id] else 0):
                reads = [self.whole[t] if t in self.whole else self.place(self.tensors[t], k) for t in op.reads]
                self._undivided(op, reads=reads, writes=[self.place(self.tensors[t], k) for t in op.writes])
                self.which.append((op.id, k))
        if self.reduced:
            self._reduce()

    def _go_on(self, marks: Sequence[Mark], k: int, count: int) -> int:
        """Have as many microbatches follow the last two, k - 1 and k, if they differ in their number alone: how many.

        That is so where the slices are equal. The first ones differ, since they accumulate nothing.
        """
        n = self.total * self.members
        sliced = [t.bytes for t in self.tensors if self.rows[t.id]]
        divided = (op.flops for op in self.ops if self.splits[op.id] and op.id not in self.renewing)
        even = all(size % n == 0 for size in (*sliced, *divided))
        before, between, end = marks[-3:]
        if not even or not self.new.continue_series(before, between, k, count):
            return 0
        step = end.tensors - between.tensors

        def later(tensor: int, further: int) -> int:
            return tensor + further * step if tensor >= between.tensors else tensor

        for pieces in (*self.slices.values(), *self.storages.values()):
            pieces += [later(pieces[-1], i) for i in range(1, count + 1)]
        self.sums = {t: later(total, count) for t, total in self.sums.items()}
        last = self.which[between.ops :]
        self.which += [(op, k + i) for i in range(1, count + 1) for op, _ in last]
        return count

    def first(self, k: int) -> int:
        """The position of microbatch k of this replica's group among those of all."""
        return k * self.groups if self.dealt else k

    def _whole_tensor(self, t: Tensor, **changes: Any) -> int:
        """A tensor that is the same in all microbatches, or this rank's experts of it."""
        if self.experts is None or t.id not in self.experts.has:
            return self.new.tensor(t, **changes)
        return self.new.tensor(t, self.experts.claim(Same(t.id)), **{**self.experts.weights(t), **changes})

    def _undivided(self, op: Op, **changes: Any) -> None:
        """An op that is not split by batch, or this rank's experts of it."""
        if self.experts is None or op.id not in self.experts.ops:
            self.new.op(op, **changes)
            return
        self.new.op(op, self.experts.claim_op(Same(op.id)), **{**self.experts.undivided(op), **changes})

    def place(self, t: Tensor, k: int) -> int:
        """The id that a tensor has in microbatch k."""
        whole, current = self.whole, self.current
        if t.id in current:
            return current[t.id]
        if t.id in self.versions:
            return self._renew(t, k)
        if self.renewed.get(t.id) in self.sums:
            return self.sums[self.renewed[t.id]]
        sliced = self.rows[t.id]
        if self.produced_by_repeated[t.id]:
            current[t.id] = self._whole_tensor(t, name=f"{t.name}.mb{k}")
            return current[t.id]
        if not sliced and not self.produced_by_split[t.id]:
            if t.id not in whole:
                whole[t.id] = self._whole_tensor(t)
                if t.replaces is not None:  # a sum, or a tensor that is the same for all microbatches
                    old = whole[t.replaces] if t.replaces in whole else self.place(self.tensors[t.replaces], k)
                    self.new.builder.take_over(whole[t.id], old)
            return whole[t.id]
        name = f"{t.name}.mb{k}"
        replaces = None if t.replaces is None else self.place(self.tensors[t.replaces], k)
        if t.id in self.like_tensor:
            stands_for = self._of_member(self._of_group(t.id, self.first(k), self.first(k) + 1))
            new = self.new.repeat_tensor(
                self.like_tensor[t.id], stands_for, name, self._bytes_of_member(t, k), replaces
            )
            current[t.id] = new
            return new
        changes: dict[str, object] = {"name": name, "replaces": replaces}
        by_expert = self.experts is not None and int(self.trace.producer[t.id]) in self.experts.ops
        if self.experts is not None and sliced and t.id in self.experts.has:
            changes["saved_for"] = self.experts.saved_for(t, by_expert)
        current[t.id] = self._in_form(t, k, by_expert, **changes)
        if not by_expert:
            self.like_tensor[t.id] = current[t.id]
        return current[t.id]

    def _renew(self, t: Tensor, k: int) -> int:
        """Microbatch k's version of a running statistic, in the storage of the one before; the last is the new one."""
        assert t.replaces is not None
        before, is_last = self.place(self.tensors[t.replaces], k), k == self.n - 1
        of = Same(t.id) if is_last else self._of_group(t.id, self.first(k), self.first(k) + 1)
        new = self.new.tensor(t, of, name=t.name if is_last else f"{t.name}.mb{k}", replaces=before)
        self.current[t.id] = self.sums[t.id] = new
        if is_last:
            self.whole[t.id] = new
        return new

    def _bytes_of_group(self, t: Tensor, k: int) -> int:
        """The bytes of a tensor that a group of replicas has in microbatch k."""
        first = self.first(k)
        return slice_of(t.bytes, first, first + 1, self.total) if self.rows[t.id] else t.bytes

    def _bytes_of_member(self, t: Tensor, k: int) -> int:
        """Those that this replica has."""
        size = self._bytes_of_group(t, k)
        return slice_of(size, 0, 1, self.members) if self.rows[t.id] else size

    def _in_form(self, t: Tensor, k: int, by_expert: bool, **changes: Any) -> int:
        """A tensor of microbatch k: this replica's rows or term, or of its group the part of this rank's experts."""
        first, stop = self.first(k), self.first(k) + 1
        if by_expert:
            assert self.experts is not None
            size = self._bytes_of_group(t, k)
            changes = {**self.experts.rows_or_weights(t, size, self.total), **changes}
            return self.new.tensor(t, self.experts.claim(self._of_group(t.id, first, stop)), **changes)
        if self.rows[t.id]:
            changes["bytes"] = self._bytes_of_member(t, k)
            if t.shape:
                rows, rest = divmod(t.shape[0], self.total * self.members)
                changes["shape"] = None if rest else (rows, *t.shape[1:])
        return self.new.tensor(t, self._of_member(self._of_group(t.id, first, stop)), **changes)

    def _of_group(self, of: int, first: int, stop: int) -> Microbatch | Same:
        """Microbatches of a tensor or an op, counted over all groups of replicas that divide the experts."""
        if self.total * self.members == 1:
            return self.same[of]
        return Microbatch(self.same[of], first, stop, self.total)

    def _of_member(self, of_group: Microbatch | Same) -> Microbatch | Same:
        """This replica's part of what its group has."""
        return of_group if self.experts is None else Microbatch(of_group, 0, 1, self.members)

    def read(self, t: int, k: int, op: Op) -> int:
        """The id of what an op of microbatch k reads for a tensor: its own rows, or its group's for its experts."""
        tensor = self.tensors[t]
        if self.experts is None or not self.experts.crosses(t, op):
            return self.place(tensor, k)
        if t not in self.exchanged:
            self._exchange(tensor, k, op)
        return self.exchanged[t]

    def _exchange(self, t: Tensor, k: int, op: Op) -> None:
        """Send each row of a tensor to the rank of its expert, or back, among the ranks that divide the experts."""
        assert self.experts is not None
        to_experts = op.id in self.experts.ops
        going, arriving = self.experts.together(t.id, to_experts)
        sources, size = [self.place(self.tensors[each], k) for each in going], self.new.builder.bytes_of
        name = f"{t.name}.all_to_all.mb{k}"
        for each in arriving:
            saved = self.experts.saved_for(self.tensors[each], to_experts)
            new = f"{self.tensors[each].name}.all_to_all.mb{k}.out"
            self.exchanged[each] = self._in_form(
                self.tensors[each], k, to_experts, name=new, replaces=None, saved_for=saved
            )
        others = [self.exchanged[each] for each in arriving]
        # the rank with the most rows sends (or receives) most, and the others wait for it
        moved = sum(map(size, others if to_experts else sources)) if self.rows[t.id] else t.bytes
        ring, producer = Ring("expert", self.members, 1), self.ops[int(self.trace.producer[t.id])]
        fields = {"phase": op.phase, "layer": op.layer, "device": op.device, "dtype": t.dtype, "group": name}
        self.new.glue(name, "collective", sources, others, bytes=sent(moved, ring), ring=ring, **fields)
        self.which.append((producer.id, k))

    def _in_microbatch(self, op: Op, k: int) -> None:
        """An op that each microbatch runs."""
        current = self.current
        reads = [self.read(t, k, op) for t in op.reads]
        if self._adds_itself(op):
            self._add_itself(op, k, reads)
            return
        writes = [self.place(self.tensors[t], k) for t in op.writes]
        by_expert = self.experts is not None and op.id in self.experts.ops
        name, group = _in_microbatch(op, k)
        first, stop, members = self.first(k), self.first(k) + 1, 1 if by_expert else self.members
        part, n, of_group = first * members, self.total * members, self._of_group(op.id, first, stop)
        like = self.like_op.get(op.id)
        if like is not None:
            flops = slice_of(op.flops, part, part + 1, n)
            self.new.repeat_op(like, self._of_member(of_group), name, flops, reads, writes, group)
        else:
            share = {} if op.id in self.renewing else share_of_op(self.trace, op, part, n, self.rows)
            stands_for: Expr = self._of_member(of_group)
            if by_expert:
                assert self.experts is not None
                touched = sum(map(self.new.builder.bytes_of, (*reads, *writes)))
                stands_for, share = self.experts.claim_op(of_group), self.experts.share(op, share, touched)
            new = self.new.op(op, stands_for, reads=reads, writes=writes, name=name, group=group, **share)
            if not by_expert and op.counted is None and op.id not in self.renewing:
                self.like_op[op.id] = new
        for t in op.writes:
            if t in self.needed_outside and self.rows[t]:
                if self.ranks > 1:
                    name = self.tensors[t].name
                    raise TraceError(f"split_batch: {name!r} is needed with the rows of all {self.ranks} replicas")
                self.slices.setdefault(t, []).append(current[t])
                if t in self.trace.view_of:  # who reads a view reads its storage
                    self.storages.setdefault(t, []).append(reads[op.reads.index(self.trace.view_of[t])])
            elif t in self.needed_outside:
                ranks = (self.groups if by_expert else self.ranks) * (self.tokens if t in self.joined else 1)
                if not self.dealt or ranks == 1:
                    self._accumulate(t, op, k, current[t])
                if ranks > 1 and (self.dealt or k == self.n - 1) and t not in self.summed_by_once:
                    self.reduced.append((self.tensors[t], op, k))
        self.which += [(op.id, k)] * (self.new.op_count - len(self.which))

    def _adds_itself(self, op: Op) -> bool:
        """Whether an op adds the gradient that it computes or converts to those of the microbatches before."""
        # torch.Tensor.add_ of another type is one kernel (Megatron-LM's DistributedDataParallel, `_make_param_hook`);
        # a product adds as it writes (its `wgrad_gemm_accum_fp32`)
        return len(op.writes) == 1 and op.writes[0] in self.sums and not self.dealt and bool(MAIN.fullmatch(op.name))

    def _add_itself(self, op: Op, k: int, reads: Sequence[int]) -> None:
        """Such an op: it reads the sum so far, too, and writes the new one in its place."""
        (t,) = op.writes
        by_expert = self.experts is not None and op.id in self.experts.ops
        of, fields, whole = self._sum_so_far(t, k, by_expert)
        name = self.tensors[t].name if isinstance(of, Same) else f"{self.tensors[t].name}.sum{k}"
        grown = self.new.tensor(self.tensors[t], of, **{**fields, "name": name, "replaces": self.sums[t]})
        first, members = self.first(k), 1 if by_expert else self.members
        of_group = self._of_group(op.id, first, first + 1)
        share = share_of_op(self.trace, op, first * members, self.total * members, self.rows)
        stands_for: Expr = self._of_member(of_group)
        if by_expert:
            assert self.experts is not None
            touched = sum(map(self.new.builder.bytes_of, (*reads, grown)))
            stands_for, share = self.experts.claim_op(of_group), self.experts.share(op, share, touched)
        if share["bytes"] is not None:
            share["bytes"] += self.new.builder.bytes_of(grown)
        reads = [*reads, self.sums[t]]
        self.new.op(op, stands_for, reads=reads, writes=[grown], name=f"{op.name}.mb{k}", **share)
        self.sums[t] = grown
        if whole:
            self.whole[t] = grown
        ranks = (self.groups if by_expert else self.ranks) * (self.tokens if t in self.joined else 1)
        if ranks > 1 and k == self.n - 1 and t not in self.summed_by_once:
            self.reduced.append((self.tensors[t], op, k))
        self.which += [(op.id, k)] * (self.new.op_count - len(self.which))

    def _once(self, op: Op) -> None:
        """An op of `once`, on this replica's sums; its results wait for the collective."""
        part = Microbatch(Same(op.id), 0, self.n, self.total)
        for t in op.writes:
            stands_for = Microbatch(Same(t), 0, self.n, self.total)
            tensor = self.tensors[t]
            over = None if tensor.replaces is None else self.sums.get(tensor.replaces)
            self.sums[t] = self.new.tensor(tensor, stands_for, name=f"{tensor.name}.sum", replaces=over)
            if t not in self.summed_by_once:
                self.reduced.append((self.tensors[t], op, self.n - 1))
        reads, writes = ([self.sums[t] for t in ids] for ids in (op.reads, op.writes))
        share = share_of_op(self.trace, op, part.first, part.count, self.rows, part.stop)
        self.new.op(op, part, reads=reads, writes=writes, **share)
        self.which.append((op.id, self.n - 1))

    def _accumulate(self, t: int, op: Op, k: int, term: int) -> None:
        """Add microbatch k of a tensor to the sum of those before."""
        of, fields, whole = self._sum_so_far(t, k, self.experts is not None and op.id in self.experts.ops)
        self.sums[t] = _add_up(self.new, self.tensors[t], op, k, of, self.sums.get(t), term, **fields)
        if whole:
            self.whole[t] = self.sums[t]

    def _sum_so_far(self, t: int, k: int, by_expert: bool) -> tuple[Expr, dict[str, Any], bool]:
        """What the sum after microbatch k stands for, how it differs from the tensor, and whether it is all of it."""
        stop = (k + 1) * self.groups if self.dealt else k + 1
        stands_for = self._of_group(t, 0, stop)
        whole = stop == self.total and (by_expert or self.dealt or self.experts is None)
        of: Expr = Same(t) if whole else stands_for if by_expert or self.dealt else self._of_member(stands_for)
        if by_expert and self.experts is not None:
            return self.experts.claim(of), self.experts.weights(self.tensors[t]), whole
        return of, {}, whole

    def _reduce(self) -> None:
        """Sum what waits over the ranks that have it, each kind by one collective."""
        waiting, self.reduced = self.reduced, []
        parts = dict.fromkeys(self.buckets.part[op.id] for _, op, _ in waiting)
        if len(parts) > 1:  # what stages have summed together
            for part in parts:
                self.reduced = [each for each in waiting if self.buckets.part[each[1].id] == part]
                self._reduce()
            return
        own = self.experts.ops if self.experts is not None else frozenset[int]()
        for by_expert, axis, ranks in ((False, "data", self.ranks), (True, "expert_data", self.groups)):
            for joined in (False, True):
                kind = by_expert, joined
                some = [each for each in waiting if (each[1].id in own, each[0].id in self.joined) == kind]
                if some:
                    ring = Ring(f"{axis}_context", ranks * self.tokens, 2) if joined else Ring(axis, ranks, 2)
                    self._sum_over(some, ring, by_expert)

    def _sum_over(self, waiting: list[tuple[Tensor, Op, int]], ring: Ring, by_expert: bool) -> None:
        """Sum tensors over the ranks of a ring, and accumulate the sums where microbatches are dealt."""
        op, k = waiting[-1][1:]
        terms = [self.current[t.id] if self.dealt else self.sums[t.id] for t, _, _ in waiting]
        wholes, sums = [self.joined.get(t.id, t.id) for t, _, _ in waiting], []
        for (t, _, _), whole, term in zip(waiting, wholes, terms, strict=True):
            part: Expr = self._of_group(whole, self.first(k), self.first(k) + self.groups)
            stands_for = part if self.dealt and self.n > 1 else Same(whole)
            name = f"{t.name}.reduced.mb{k}" if self.dealt else f"{t.name}.reduced"
            if by_expert and self.experts is not None:
                fields: dict[str, Any] = self.experts.weights(t)
                stands_for = self.experts.claim(stands_for)
            else:
                fields = {}
            sums.append(self.new.tensor(t, stands_for, **{**fields, "name": name, "replaces": term}))
        size = sum(map(self.new.builder.bytes_of, sums))
        name = f"{waiting[0][0].name}.all_reduce.mb{k}"
        fields = {
            "phase": op.phase,
            "layer": op.layer,
            "device": op.device,
            "group": name,
            "dtype": waiting[0][0].dtype,
        }
        self.new.glue(name, "collective", terms, sums, bytes=sent(size, ring), ring=ring, **fields)
        for (_, of, _), whole, total in zip(waiting, wholes, sums, strict=True):
            if self.dealt and self.n > 1:
                self._accumulate(whole, of, k, total)
            else:
                self.whole[whole] = total
        self.which += [(op.id, k)] * (self.new.op_count - len(self.which))

    def _concatenate(self) -> None:
        """Join the slices that something outside the microbatches reads, on the engine that produced them."""
        for t, pieces in self.slices.items():
            tensor, source = self.tensors[t], self.ops[int(self.trace.producer[t])]
            self.whole[t] = self.new.tensor(tensor)
            fields = {"phase": self.ops[-1].phase, "layer": tensor.layer}
            fields |= {"device": source.device, "engine": source.engine}
            reads = [*pieces, *self.storages.get(t, ())]
            self.new.glue(f"{tensor.name}.concat", "copy", reads, [self.whole[t]], **fields)
            self.which.append((int(self.trace.producer[t]), self.n - 1))


def _in_microbatch(op: Op, k: int) -> tuple[str, str]:
    """The names of an op in microbatch k and of its group, "" for none."""
    return f"{op.name}.mb{k}", f"{op.group}.mb{k}" if op.group else ""


def _sums_over_tokens(trace: Trace) -> list[int]:
    """The collectives before the update that sum gradients over the ranks which divide a replica's tokens."""
    c = trace.op_columns
    found = (op for op, ring in c.ring.items() if (ring.axis, ring.passes) == ("context", 2) and c.phase[op] == UPDATE)
    return [op for op in found if all(len(trace.readers(t)) == 1 for t in trace.reads(op))]


def _late_ops(
    trace: Trace, splits: NDArray[np.bool_], rows: NDArray[np.bool_], versions: Collection[int]
) -> NDArray[np.bool_]:
    """Whether each op must wait for all microbatches. Raises TraceError for an op that cannot be split.

    versions: tensors of which each microbatch writes the next version.
    """
    name, op_name, replaces = trace.tensor_columns.name, trace.op_columns.name, trace.tensor_columns.replaces.tolist()
    # lists, of which single values are read much faster than of arrays
    divided, by_row, producer = splits.tolist(), rows.tolist(), trace.producer.tolist()
    late = [False] * len(divided)
    for op, (reads, writes) in enumerate(zip(trace.distinct_reads, trace.all_writes, strict=True)):
        for t in reads:
            producing_op = producer[t]
            if divided[op]:
                if producing_op >= 0 and late[producing_op]:
                    raise TraceError(
                        f"split_batch: op {op_name[op]!r} needs {name[t]!r}, computed from all microbatches"
                    )
            elif by_row[t]:
                raise TraceError(f"split_batch: op {op_name[op]!r} reads {name[t]!r}, but may not be split by batch")
            elif producing_op >= 0 and (divided[producing_op] or late[producing_op]):
                late[op] = True
        for t in writes:
            old = replaces[t]
            if old < 0 or t in versions:
                continue
            per_microbatch = by_row[old] or (producer[old] >= 0 and divided[producer[old]])
            if divided[op] and not per_microbatch:
                raise TraceError(f"split_batch: op {op_name[op]!r} overwrites {name[old]!r} in every microbatch")
            if not divided[op] and any(divided[r] for r in trace.readers(old)) and not late[op]:
                raise TraceError(f"split_batch: op {op_name[op]!r} overwrites {name[old]!r} before all microbatches")
    return np.array(late, np.bool_)


def _repeated_ops(trace: Trace, splits: NDArray[np.bool_], late: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each op runs as a whole in every microbatch: only its ops read the results, and nothing overwrites them.

    An op that draws random numbers runs once, since it would draw others each time; so does one that makes a weight,
    such as a copy of another in 8 bits, which is kept.
    """
    c, columns = trace.op_columns, trace.tensor_columns
    kept = {*trace.outputs, *(t for pair in trace.carry for t in pair)}
    once = {t for t in range(len(columns.name)) if t in kept or columns.replaces[t] >= 0 or trace.replaced_by[t] >= 0}
    repeated = np.zeros(len(splits), np.bool_)
    for op in reversed(range(len(splits))):
        if splits[op] or late[op] or c.phase[op] == UPDATE or c.random[op] or not once.isdisjoint(trace.writes(op)):
            continue
        readers = [reader for t in trace.writes(op) for reader in trace.readers(t)]
        repeated[op] = bool(readers) and all(splits[reader] or repeated[reader] for reader in readers)
    return repeated


def sent(size: int, ring: Ring) -> int:
    """Bytes that each rank of a ring sends in a collective over that many: (p - 1) / p of them per pass, rounded up.

    To its neighbour it sends all.
    """
    if ring.axis == "neighbour":
        return size
    return -(-ring.passes * (ring.ranks - 1) * size // ring.ranks)


def share_of_op(
    trace: Trace, op: Op, k: int, n: int, rows: Sequence[bool] | NDArray[np.bool_], stop: int = 0
) -> dict[str, Any]:
    """The fields in which part k of n of an op by batch (or those from k to `stop`) differs from the whole.

    rows: which tensors have rows, see `batched`.
    """
    touched = op.bytes
    if touched is not None:
        size = trace.tensor_columns.bytes
        operands = [*op.reads, *op.writes]
        everything = sum(int(size[t]) for t in operands)
        sliced = sum(int(size[t]) for t in operands if rows[t])
        # stated bytes shrink as the operands do: slices to 1/n, weights not at all
        scale = (everything - sliced) * n + sliced if everything else 1
        touched = -(-touched * scale // (max(everything, 1) * n))
    return {
        "flops": slice_of(op.flops, k, stop or k + 1, n),
        "bytes": touched,
        "workspace": -(-op.workspace // n),
        "duration": None if op.duration is None else -(-op.duration // n),
        "alternatives": tuple(replace(other, workspace=-(-other.workspace // n)) for other in op.alternatives),
    }


def _add_up(
    new: Rewriter, t: Tensor, after: Op, k: int, stands_for: Expr, total: int | None, term: int, **changes: Any
) -> int:
    """Add microbatch k of a tensor to the sum over microbatches 0 … k-1, in place. Returns the id of the new sum.

    changes: fields in which the sum differs from the tensor.
    """
    if total is None:
        return term
    name = t.name if isinstance(stands_for, Same) else f"{t.name}.sum{k}"
    grown = new.tensor(t, stands_for, **{**changes, "name": name, "replaces": total})
    new.glue(
        f"{t.name}.sum.add.mb{k}",
        "elementwise",
        [total, term],
        [grown],
        phase=after.phase,
        layer=t.layer,
        device=after.device,
        engine=after.engine,
        dtype=t.dtype,
    )
    return grown
