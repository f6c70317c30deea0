"""The rewrite from an eager stack, one kernel per op, to one that fuses what streams through the same elements.

A group is what a code generator or a hand-written kernel makes one loop of: ops of `STREAMED` kinds in one layer, with
nothing but each other between them, over as many elements. A reduction of each row joins them; a sum over rows (the
gradient of a bias) joins only what reduces no row. What forward makes and backward alone reads again may be recomputed
in the kernel that reads it, so that it is never saved.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from sim.rewrites.fuse import STREAMED, fuse
from sim.rewrites.fused_update import tiles, touched_once
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.layers import op_layers
from sim.trace.op import KIND_CODE, PHASE_CODE
from sim.trace.tensor import ROLE_CODE

FORWARD, BACKWARD, UPDATE = (PHASE_CODE[phase] for phase in ("forward", "backward", "update"))
ROW_WISE = tuple(KIND_CODE[kind] for kind in ("norm", "softmax", "loss"))
REDUCE = KIND_CODE["reduce"]
OPTIMIZER = KIND_CODE["optimizer"]
WEIGHT = ROLE_CODE["weight"]
STREAMED_CODES = frozenset(KIND_CODE[kind] for kind in STREAMED)
WIDTHS = {"fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2}
UPDATED = tuple(ROLE_CODE[role] for role in ("weight", "optimizer_state"))
MICROBATCH = re.compile(r"(?:^|\.)(mb\d+)(?:\.|$)")
"""The part of an op's name that says of which microbatch it is."""
ACCUMULATES = (".grad.accumulate", ".grad.main")
"""How ops are named that add a microbatch's gradient to those before, or bring it to the type in which it is kept:
autograd and its hooks do, outside of a compiled graph."""
MATMUL, GRADIENT = KIND_CODE["matmul"], ROLE_CODE["gradient"]


def fuse_streams(
    trace: Trace, recomputed: Collection[int], groups: Sequence[Sequence[int]], *, update: bool, stack: str
) -> Trace:
    """The trace with each group one kernel.

    recomputed: forward ops whose results backward computes once more in the kernels that read them.
    groups: as `stream_groups` finds them.
    update: whether the optimizer's ops become one kernel per tile, as `fuse_updates` joins them.
    stack: its name, noted in the trace.
    """
    c = trace.op_columns
    if update:
        optimizer = [op for op in range(len(c.name)) if c.kind[op] == OPTIMIZER and op not in c.group]
        groups = [*groups, *tiles(trace, optimizer)]
    role, size = trace.tensor_columns.role, trace.tensor_columns.bytes

    def touched(reads: Sequence[int], writes: Sequence[int]) -> int:
        if any(role[t] in UPDATED for t in writes):
            return touched_once(trace, reads, writes)
        return sum(int(size[t]) for t in (*reads, *writes))

    return fuse(trace, groups, touched, recomputed=recomputed, streams=True, meta={"stack": stack})


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


def stream_groups(trace: Trace, columns: bool = True) -> list[list[int]]:
    """The ops that one kernel computes, in groups, single ops included.

    columns: whether sums over rows join what reduces no row.
    """
    return _Groups(trace, columns).found()


class _Groups:
    """Joins each streamed op with the producers of what it reads, where they are as far from the start.

    of_weights: ops that read weights alone: the sum of 1 and a norm's weight, a copy in another type. Their results are
        the same for all samples, so they do not join a kernel that may run for some of these.
    depth: how many ops that are not streamed lie, at most, on a way from the start to an op. Between two streamed ops
    of one depth there is none.
    microbatch: of an op, as its name says; each runs the kernels of its own, and adds its gradients when it has them.
    """

    def __init__(self, trace: Trace, columns: bool) -> None:
        self.trace, self.columns = trace, columns
        c = trace.op_columns
        self.kind, self.phase, self.layer = c.kind.tolist(), c.phase.tolist(), op_layers(trace).tolist()
        self.device, self.producer = c.device.tolist(), trace.producer.tolist()
        found = map(MICROBATCH.search, c.name)
        self.microbatch = [match.group(1) if match else "" for match in found]
        self.size, self.dtypes, self.shapes = (
            trace.tensor_columns.bytes.tolist(),
            trace.tensor_columns.dtype,
            trace.tensor_columns.shape,
        )
        self.role = trace.tensor_columns.role.tolist()
        self.root = list(range(len(c.name)))
        self.of_weights: set[int] = set()
        self.rows: dict[int, bool] = {}  # by root: whether a reduction of rows is in it
        self.sums: dict[int, bool] = {}
        self.space: dict[int, int] = {}

    def streamed(self, op: int) -> bool:
        c = self.trace.op_columns
        if c.name[op].endswith(ACCUMULATES):
            return False
        return self.kind[op] in STREAMED_CODES and self.phase[op] != UPDATE and op not in c.group and op not in c.ring

    def found(self) -> list[list[int]]:
        """All groups, each in program order."""
        depth = self.depths()
        for op in range(len(self.root)):
            if not self.streamed(op):
                continue
            reads = self.trace.reads(op)
            makers = {self.producer[t] for t in reads} - {-1}
            if reads and all(self.role[t] == WEIGHT or self.producer[t] in self.of_weights for t in reads):
                self.of_weights.add(op)
            sums = self.kind[op] == REDUCE and self.is_sum_over_rows(op)
            self.rows[op] = self.kind[op] in ROW_WISE or (self.kind[op] == REDUCE and not sums)
            self.sums[op] = sums
            self.space[op] = self.elements(op)
            if sums and not self.columns:
                continue
            for p in sorted(makers):
                alike = depth[p] == depth[op] and self.microbatch[p] == self.microbatch[op]
                if self.streamed(p) and alike and self.joins(p, op):
                    self.join(self.find(p), self.find(op))
        groups: dict[int, list[int]] = {}
        for op in range(len(self.root)):
            if op in self.space:
                groups.setdefault(self.find(op), []).append(op)
        return list(groups.values())

    def depths(self) -> list[int]:
        """Per op its depth: the least, or where only streamed ops of one greater depth read it, theirs."""
        count, streamed = len(self.root), [self.streamed(op) for op in range(len(self.root))]
        depth = [0] * count
        readers: list[list[int]] = [[] for _ in range(count)]
        for op in range(count):
            for p in {self.producer[t] for t in self.trace.reads(op)} - {-1}:
                depth[op] = max(depth[op], depth[p] + (not streamed[p]))
                readers[p].append(op)
        ends = {self.producer[t] for t in self.trace.outputs}
        for op in reversed(range(count)):
            later = {depth[r] for r in readers[op] if streamed[r] and self.phase[r] == self.phase[op]}
            if streamed[op] and op not in ends and len(later) == 1 and all(streamed[r] for r in readers[op]):
                depth[op] = max(depth[op], *later)
        return depth

    def joins(self, a: int, b: int) -> bool:
        c = self.trace.op_columns
        place = [(self.phase[op], self.layer[op], self.device[op], c.engine.get(op, "")) for op in (a, b)]
        if place[0] != place[1] or (a in self.of_weights) != (b in self.of_weights):
            return False
        a, b = self.find(a), self.find(b)
        if (self.rows[a] or self.rows[b]) and (self.sums[a] or self.sums[b]):
            return False
        few, many = sorted((self.space[a], self.space[b]))
        # one number per row goes with the loop over rows that makes or reads it
        return few == many or (few > 0 and many % few == 0 and (self.rows[a] or self.rows[b]))

    def join(self, a: int, b: int) -> None:
        first, second = min(a, b), max(a, b)
        if first == second:
            return
        self.root[second] = first
        for flags in (self.rows, self.sums):
            flags[first] |= flags[second]
        self.space[first] = max(self.space[first], self.space[second])

    def find(self, op: int) -> int:
        while self.root[op] != op:
            self.root[op] = self.root[self.root[op]]
            op = self.root[op]
        return op

    def elements(self, op: int) -> int:
        """How many elements the op goes through: those of the largest operand or result but weights."""
        counts = [self.count(t) for t in (*self.trace.reads(op), *self.trace.writes(op)) if self.role[t] not in UPDATED]
        return max(counts, default=0)

    def count(self, t: int) -> int:
        shape = self.shapes.get(t)
        if shape is None:
            return int(self.size[t]) // WIDTHS.get(self.dtypes[t], 1)
        found = 1
        for n in shape:
            found *= n
        return found

    def is_sum_over_rows(self, op: int) -> bool:
        """Whether a reduction leaves one number per column: its result is as long as a row of what it reads."""
        made = self.trace.writes(op)
        read = [t for t in self.trace.reads(op) if self.role[t] not in UPDATED]
        if not made or not read:
            return True
        shape = self.shapes.get(max(read, key=lambda t: self.size[t]))
        return shape is None or not shape or self.count(made[0]) % shape[-1] == 0


def recomputed_inside(trace: Trace, groups: Sequence[Sequence[int]]) -> set[int]:
    """The ops that hand-written kernels compute once more in backward, because they save what enters them instead.

    In each group: what only its own ops and streamed ops of backward read, and draws no random numbers, is recomputed
    if what has to be saved for that takes fewer bytes.
    """
    c, size = trace.op_columns, trace.tensor_columns.bytes
    persistent = set(PERSISTENT)
    found: set[int] = set()
    outputs = set(trace.outputs)
    grouped = {op: k for k, group in enumerate(groups) for op in group}
    saved = {
        t
        for op in range(len(c.name))
        if c.phase[op] == BACKWARD
        for t in trace.reads(op)
        if trace.producer[t] >= 0 and c.phase[trace.producer[t]] == FORWARD
    }
    for k, group in enumerate(groups):
        if c.phase[group[0]] != FORWARD:
            continue
        spared: set[int] = set()
        for op in group:
            inner = [t for t in trace.writes(op) if t in saved]
            if not inner or not can_recompute(trace, op):
                continue
            readers = [r for t in inner for r in trace.readers(t)]
            outside = any(c.phase[r] == FORWARD and grouped.get(r) != k for r in readers) or outputs.intersection(inner)
            if not outside and all(c.phase[r] == FORWARD or r in grouped for r in readers):
                spared.update(inner)
        again, leaves = _closure(trace, spared, set(group))
        if any(not can_recompute(trace, op) for op in again):
            continue
        new = {t for t in leaves if t not in saved and trace.producer[t] >= 0}
        new -= {t for t in new if trace.tensor_columns.role[t] in persistent}
        if sum(int(size[t]) for t in new) < sum(int(size[t]) for t in spared):
            found |= again
            saved |= new
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
            stack += trace.reads(producer)
    return ops, leaves


def can_recompute(trace: Trace, op: int) -> bool:
    """Whether backward may compute an op once more: it draws nothing, and what it reads is as it was."""
    c, replaces = trace.op_columns, trace.tensor_columns.replaces
    if c.random[op] or any(replaces[t] >= 0 for t in trace.writes(op)):
        return False
    over = (int(trace.replaced_by[t]) for t in trace.reads(op))
    return all(t < 0 or c.phase[trace.producer[t]] == UPDATE for t in over)
