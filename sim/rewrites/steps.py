"""The rewrite that divides an iteration's batch among consecutive steps, each with an update of its own.

What PipeDream does with the samples that other schedules sum over: minibatch k is a forward, a backward and an update.
A forward may run on weights that are some updates old. The version that it reads is then kept for its backward, so
that both have the same one (weight stashing), and the origin says how old it is (`Same.behind`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.errors import TraceError
from sim.rewrites.batching import batch_ops, batched, own_ops, renewed, renewing, share_of_op
from sim.rewrites.rewriter import Rewriter, slice_of
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.origin import Same

UPDATE = PHASE_CODE["update"]


class Version(NamedTuple):
    """A version of a weight: the tensor whose storage it has, and the one with its value."""

    storage: int
    value: int


class Steps(NamedTuple):
    """Consecutive steps.

    trace: of all of them.
    which: for each op the one of an iteration that it is, and its step.
    versions: of each weight that is kept in several versions, those at the start and after each step.
    """

    trace: Trace
    which: list[tuple[int, int]]
    versions: list[list[Version]]


def updated(trace: Trace) -> frozenset[int]:
    """The initial tensors to which the result of an op of the update is carried."""
    phase, producer = trace.op_columns.phase, trace.producer
    return frozenset(first for last, first in trace.carry if producer[last] >= 0 and phase[producer[last]] == UPDATE)


def consecutive_steps(trace: Trace, n: int, behind: Sequence[int] = ()) -> Steps:
    """n steps, step k on part k of n of the batch.

    Names gain `.mb0`, `.mb1`, …. Rows, FLOPs, workspaces and durations divide as in `split_batch`; the ops that do not
    divide by batch (casts of weights, the update) run in every step. A weight that an op reads `behind` times is
    updated into storage of its own. Batch norm has the statistics of the step's samples.

    trace: an iteration on one device.
    n: how many steps.
    behind: per op how many updates older the weights are that it reads; by default 0 for all.

    Raises TraceError where the batch does not divide, or an op that cannot be split reads rows.
    """
    samples = trace.meta.get("batch")
    if isinstance(samples, int) and samples % n:
        raise TraceError(f"steps: the batch of {samples} does not divide into {n}")
    return _Steps(trace, n, behind or [0] * len(trace.ops)).run()


class _Steps:
    """The trace as it is written.

    versions: per step the ids of the tensors at its start, by old id; -1 where they are not there yet.
    """

    def __init__(self, trace: Trace, n: int, behind: Sequence[int]) -> None:
        self.trace, self.n, self.behind = trace, n, behind
        own = own_ops(trace)
        own[list(renewing(trace, set(renewed(trace, own).values())))] = False
        self.splits, self.rows, self.weights = batch_ops(trace) | own, batched(trace), updated(trace)
        self.tensors, self.ops = list(trace.tensors), list(trace.ops)
        self.new = Rewriter(trace, {"steps": n})
        self.versions: list[list[int]] = []
        self.apart = {t for op in self.ops if behind[op.id] for t in op.reads if t in self.weights}
        for op in self.ops if n > 1 else ():
            rows = next((t for t in op.reads if self.rows[t] and not self.splits[op.id]), None)
            if rows is not None:
                name = trace.tensor_columns.name[rows]
                raise TraceError(f"steps: op {op.name!r} reads {name!r}, but may not be split by batch")

    def run(self) -> Steps:
        """All steps."""
        which: list[tuple[int, int]] = []
        for k in range(self.n):
            ids = self._tensors(k)
            self.versions.append(ids)
            for op in self.ops:
                share = share_of_op(self.trace, op, k, self.n, self.rows) if self.splits[op.id] else {}
                behind = min(self.behind[op.id], k)
                self.new.op(
                    op,
                    Same(op.id, k, behind),
                    **{
                        "name": f"{op.name}.mb{k}",
                        "group": f"{op.group}.mb{k}" if op.group else "",
                        **share,
                        "reads": [self.versions[k - behind][t] if t in self.weights else ids[t] for t in op.reads],
                        "writes": [ids[t] for t in op.writes],
                    },
                )
                which.append((op.id, k))
        trace, last, first = self.trace, self.versions[-1], self.versions[0]
        carry = [(last[a], first[b]) for a, b in trace.carry]
        outputs = [last[t] for t in trace.outputs]
        new = self.new.build(outputs=outputs, carry=carry, iterations=self.n, steps=True)
        return Steps(new, which, [self._kept(t) for t in sorted(self.apart)])

    def _kept(self, weight: int) -> list[Version]:
        """All versions of a weight."""
        end = next(last for last, first in self.trace.carry if first == weight)
        storage = self.trace.replaced_by[weight]
        storage = end if storage < 0 else int(storage)
        start = self.versions[0][weight]
        return [Version(start, start), *(Version(ids[storage], ids[end]) for ids in self.versions)]

    def _tensors(self, k: int) -> list[int]:
        """The ids of all tensors in step k."""
        trace, n = self.trace, self.n
        carried = {first: last for last, first in trace.carry}
        ids = [-1] * len(self.tensors)
        for t in self.tensors:
            if trace.producer[t.id] < 0 and k > 0:
                if t.id in carried:
                    ids[t.id] = self.versions[-1][carried[t.id]]
                    continue
                if t.role in ("weight", "optimizer_state"):
                    if trace.replaced_by[t.id] >= 0:
                        raise TraceError(f"steps: tensor {t.name!r} is overwritten, and nothing is carried to it")
                    ids[t.id] = self.versions[-1][t.id]
                    continue
            changes: dict[str, object] = {"name": f"{t.name}.mb{k}", "replaces": None}
            if self.rows[t.id]:
                changes["bytes"] = slice_of(t.bytes, k, k + 1, n)
                if t.shape:
                    rows, rest = divmod(t.shape[0], n)
                    changes["shape"] = None if rest else (rows, *t.shape[1:])
            if trace.producer[t.id] < 0 and k == 0 and not self.rows[t.id]:
                changes["name"] = t.name
            ids[t.id] = self.new.tensor(t, Same(t.id, k), **changes)
        for t in self.tensors:
            if t.replaces is not None and t.replaces not in self.apart:
                self.new.builder.take_over(ids[t.id], ids[t.replaces])
        return ids
