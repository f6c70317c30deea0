"""The rewrite from an eager stack, one kernel per op, to one that fuses what streams through the same elements.

A group is what a code generator or a hand-written kernel makes one loop of: ops of `STREAMED` kinds in one layer, with
nothing but each other between them, over as many elements. A reduction of each row joins them; a sum over rows (the
gradient of a bias) joins only what reduces no row. What forward makes and backward alone reads again may be recomputed
in the kernel that reads it, so that it is never saved.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import repeat

import numpy as np

from sim.rewrites.compared import Compared
from sim.rewrites.fuse import STREAMED, Fusion, fusion
from sim.rewrites.fused_update import tiles, touched_once
from sim.trace.columns import row_sums
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.layers import op_layers
from sim.trace.op import KIND_CODE, PHASE_CODE
from sim.trace.tensor import ROLE_CODE

FORWARD, BACKWARD, UPDATE = (PHASE_CODE[phase] for phase in ("forward", "backward", "update"))
ROW_WISE = tuple(KIND_CODE[kind] for kind in ("norm", "softmax", "loss"))
REDUCE = KIND_CODE["reduce"]
OPTIMIZER = KIND_CODE["optimizer"]
WEIGHT = ROLE_CODE["weight"]
STREAMED_CODES = tuple(KIND_CODE[kind] for kind in STREAMED)
MICROBATCH = re.compile(r"(?:^|\.)(mb\d+)(?:\.|$)")
"""The part of an op's name that says of which microbatch it is."""
ACCUMULATES = (".grad.accumulate", ".grad.main")
"""How ops are named that add a microbatch's gradient to those before, or bring it to the type in which it is kept:
autograd and its hooks do, outside of a compiled graph."""
MATMUL, GRADIENT = KIND_CODE["matmul"], ROLE_CODE["gradient"]


def fuse_streams(
    trace: Trace,
    recomputed: Collection[int],
    groups: Sequence[Sequence[int]],
    *,
    update: bool,
    stack: str,
    claimed: bool = True,
) -> Fusion:
    """The trace with each group one kernel.

    recomputed: forward ops whose results backward computes once more in the kernels that read them.
    groups: as `stream_groups` finds them.
    update: whether the optimizer's ops become one kernel per tile, as `fuse_updates` joins them.
    stack: its name, noted in the trace.
    claimed: see `fusion`.
    """
    c = trace.op_columns
    if update:
        optimizer = [op for op in np.flatnonzero(c.kind == OPTIMIZER).tolist() if op not in c.group]
        groups = [*groups, *tiles(trace, optimizer)]
    role = trace.tensor_columns.role.tolist()

    def touched(reads: Sequence[int], writes: Sequence[int]) -> Sequence[int]:
        if any(role[t] in PERSISTENT for t in writes):
            return touched_once(trace, reads, writes)
        return (*reads, *writes)

    meta = {"stack": stack}
    return fusion(trace, groups, touched, recomputed=recomputed, streams=True, meta=meta, claimed=claimed)


def accumulating_products(trace: Trace) -> list[list[int]]:
    """The products that compute a weight's gradient, each with the op that alone reads it, to keep it in fp32."""
    c, tensors, found = trace.op_columns, trace.tensor_columns, list[list[int]]()
    for op in range(len(c.name)):
        if not c.name[op].endswith(ACCUMULATES) or op in c.group:
            continue
        (kept,) = trace.writes(op)
        added = [t for t in trace.reads(op) if t != tensors.replaces[kept]]
        product = int(trace.producer[added[0]]) if len(added) == 1 else -1
        alone = product >= 0 and c.kind[product] == MATMUL and len(trace.writes(product)) == 1
        if alone and len(trace.readers(added[0])) == 1 and tensors.dtype[added[0]] != tensors.dtype[kept] == "fp32":
            found.append([product, op])
    return found


def stream_groups(trace: Trace, columns: bool = True, compared: Compared | None = None) -> list[list[int]]:
    """The ops that one kernel computes, in groups, single ops included.

    columns: whether sums over rows join what reduces no row.
    compared: what asks about the trace's sizes.
    """
    return _Groups(trace, columns, compared or Compared(trace)).found()


class _Groups:
    """Joins each streamed op with the producers of what it reads, where they are as far from the start.

    place: of an op what all ops of its kernel have in common. Of its name that is the microbatch: each runs the kernels
        of its own, and adds its gradients when it has them.
    of_weights: ops that read weights alone: the sum of 1 and a norm's weight, a copy in another type. Their results are
        the same for all samples, so they do not join a kernel that may run for some of these.
    depth: how many ops that are not streamed lie, at most, on a way from the start to an op. Between two streamed ops
        of one depth there is none.
    """

    def __init__(self, trace: Trace, columns: bool, compared: Compared) -> None:
        self.trace, self.columns, self.compared = trace, columns, compared
        c = trace.op_columns
        self.phase, self.kind, self.producer = c.phase.tolist(), c.kind.tolist(), trace.producer.tolist()
        self.reads = trace.distinct_reads
        self.streamed = (np.isin(c.kind, STREAMED_CODES) & (c.phase != UPDATE)).tolist()
        for op, name in enumerate(c.name):
            if self.streamed[op] and (name.endswith(ACCUMULATES) or op in c.group or op in c.ring):
                self.streamed[op] = False
        found = [MICROBATCH.search(name) if "mb" in name else None for name in c.name]
        microbatch = [match.group(1) if match else "" for match in found]
        engine = map(c.engine.get, range(len(c.name))) if c.engine else repeat("")
        places = list(zip(self.phase, op_layers(trace).tolist(), c.device.tolist(), microbatch, engine))
        number = {place: k for k, place in enumerate(dict.fromkeys(places))}
        self.place = [number[place] for place in places]
        self.root = list(range(len(c.name)))
        self.of_weights: set[int] = set()
        self.rows: dict[int, bool] = {}  # by root: whether a reduction of rows is in it
        self.sums: dict[int, bool] = {}
        self.largest = list(range(len(c.name)))  # by root: which of its ops goes through most elements

    def found(self) -> list[list[int]]:
        """All groups, each in program order."""
        depth, ops = self.depths(), [op for op, streamed in enumerate(self.streamed) if streamed]
        kind, place, producer, streamed = self.kind, self.place, self.producer, self.streamed
        weight = (self.trace.tensor_columns.role == WEIGHT).tolist()
        for op in ops:
            reads = self.reads[op]
            producers = {producer[t] for t in reads}
            if reads and self.of_weights.issuperset([producer[t] for t in reads if not weight[t]]):
                self.of_weights.add(op)
            sums = kind[op] == REDUCE and self.compared.sums_over_rows(op)
            self.rows[op] = kind[op] in ROW_WISE or (kind[op] == REDUCE and not sums)
            self.sums[op] = sums
            if sums and not self.columns:
                continue
            for p in sorted(producers):
                if p >= 0 and streamed[p] and depth[p] == depth[op] and place[p] == place[op]:
                    self.join(p, op)
        groups: dict[int, list[int]] = {}
        for op in ops:
            groups.setdefault(self.find(op), []).append(op)
        return list(groups.values())

    def depths(self) -> list[int]:
        """Per op its depth: the least, or where only streamed ops of one greater depth read it, theirs."""
        count, streamed, phase, producer = len(self.root), self.streamed, self.phase, self.producer
        depth = [0] * count
        readers: list[list[int]] = [[] for _ in range(count)]
        for op, reads in enumerate(self.reads):
            least = 0
            for t in reads:
                p = producer[t]
                if p >= 0:
                    behind = depth[p] if streamed[p] else depth[p] + 1
                    if behind > least:
                        least = behind
                    readers[p].append(op)
            depth[op] = least
        ends = {self.producer[t] for t in self.trace.outputs}
        fusible = {op for op in range(count) if streamed[op]}
        for op in sorted(fusible - ends, reverse=True):
            if fusible.issuperset(readers[op]):
                later = {depth[r] for r in readers[op] if phase[r] == phase[op]}
                if len(later) == 1:
                    depth[op] = max(depth[op], *later)
        return depth

    def join(self, a: int, b: int) -> None:
        """Make one kernel of those of two ops, where one loop computes both."""
        if (a in self.of_weights) != (b in self.of_weights):
            return
        a, b = self.find(a), self.find(b)
        rows = self.rows[a] or self.rows[b]
        if rows and (self.sums[a] or self.sums[b]):
            return
        first, second = min(a, b), max(a, b)
        if first == second:
            return
        few, many = self.largest[first], self.largest[second]
        if self.compared.larger(few, many) == few:
            few, many = many, few
        # one number per row goes with the loop over rows that makes or reads it
        if self.compared.of_ops[few] != self.compared.of_ops[many] and not (rows and self.compared.divides(few, many)):
            return
        self.root[second], self.largest[first] = first, many
        for flags in (self.rows, self.sums):
            flags[first] |= flags[second]

    def find(self, op: int) -> int:
        """The first op of its kernel as far as it is known."""
        while self.root[op] != op:
            self.root[op] = self.root[self.root[op]]
            op = self.root[op]
        return op


def recomputed_inside(trace: Trace, groups: Sequence[Sequence[int]], compared: Compared | None = None) -> set[int]:
    """The ops that hand-written kernels compute once more in backward, because they save what enters them instead.

    In each group: what only its own ops and streamed ops of backward read, and draws no random numbers, is recomputed
    if what has to be saved for that takes fewer bytes.
    compared: what asks about the trace's sizes.
    """
    compared, may_rerun = compared or Compared(trace), recomputable(trace)
    phase, producer = trace.op_columns.phase.tolist(), trace.producer.tolist()
    persistent = np.isin(trace.tensor_columns.role, PERSISTENT).tolist()
    found: set[int] = set()
    outputs = set(trace.outputs)
    grouped = {op: k for k, group in enumerate(groups) for op in group}
    saved = {
        t
        for op in np.flatnonzero(trace.op_columns.phase == BACKWARD).tolist()
        for t in trace.distinct_reads[op]
        if producer[t] >= 0 and phase[producer[t]] == FORWARD
    }

    def is_read_by_kernels(op: int) -> bool:
        readers = (r for t in trace.all_writes[op] for r in trace.readers(t))
        return all(phase[r] == FORWARD or r in grouped for r in readers)

    for k, group in enumerate(groups):
        if phase[group[0]] != FORWARD:
            continue
        spared: set[int] = set()
        for op in group:
            inner = [t for t in trace.all_writes[op] if t in saved]
            if not inner or not may_rerun[op]:
                continue
            readers = [r for t in inner for r in trace.readers(t)]
            outside = any(phase[r] == FORWARD and grouped.get(r) != k for r in readers) or outputs.intersection(inner)
            if not outside and is_read_by_kernels(op):
                spared.update(inner)
        again, leaves = _closure(trace, spared, set(group))
        if not spared or not all(may_rerun[op] and is_read_by_kernels(op) for op in again):
            continue
        new = [t for t in sorted(leaves) if t not in saved and producer[t] >= 0 and not persistent[t]]
        if compared.are_fewer(new, sorted(spared)):
            found |= again
            saved.update(new)
    return found


def _closure(trace: Trace, wanted: Collection[int], group: Collection[int]) -> tuple[set[int], set[int]]:
    """The ops of a group that make some tensors, and what these read that is in memory anyway, outside the kernel."""
    phase = trace.op_columns.phase
    ops, leaves = set[int](), set[int]()
    stack = list(wanted)
    while stack:
        t = stack.pop()
        producer = int(trace.producer[t])
        seen = t not in wanted and any(phase[r] != FORWARD or r not in group for r in trace.readers(t))
        if producer not in group or seen:
            leaves.add(t)
        elif producer not in ops:
            ops.add(producer)
            stack += trace.distinct_reads[producer]
    return ops, leaves


def recomputable(trace: Trace) -> list[bool]:
    """Per op whether backward may compute it once more: it draws nothing, and what it reads is as it was."""
    c, replaces, over = trace.op_columns, trace.tensor_columns.replaces, trace.replaced_by
    overwritten = (over >= 0) & (c.phase[trace.producer[over]] != UPDATE)
    in_place = row_sums(c.write_start, (replaces >= 0)[c.write_ids].astype(np.int64))
    gone = row_sums(c.read_start, overwritten[c.read_ids].astype(np.int64))
    return (~c.random & (in_place == 0) & (gone == 0)).tolist()  # type: ignore[no-any-return]
