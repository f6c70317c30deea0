"""The buckets of PyTorch's DistributedDataParallel, which gradients are copied into and back out of.

By default (`gradient_as_bucket_view=False`) DDP allocates its buckets when it wraps the model, as many bytes as all
gradients have. As backward has produced a gradient, one kernel copies it into its bucket, divided by the number of
replicas; the bucket is summed; and when all of backward has been waited for, each sum is copied back into its gradient
(torch/csrc/distributed/c10d/reducer.cpp: `mark_variable_ready_dense`, `finalize_bucket_dense`).
Departs: a bucket is one tensor per gradient, without padding between them; what has no gradient in an iteration is not
in one. Where a stage sends another the sum of a tied head, what it has summed until then is copied back before.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE, Op
from sim.trace.origin import Packed, Same

UPDATE = PHASE_CODE["update"]
SHARED = {"role": "temporary", "saved_for": ""}
"""Fields of all versions of a bucket: no policy takes them for gradients."""


def bucket_copies(trace: Trace) -> Trace:
    """The trace with buckets from its start on, which are summed among replicas in place of the gradients."""
    summed = [op for op, ring in trace.op_columns.ring.items() if _is_of_gradients(trace, op)]
    return _Copying(trace, summed).build() if summed else trace


def _is_of_gradients(trace: Trace, op: int) -> bool:
    """Whether an op sums gradients among replicas in their own storage, before the update."""
    c, replaces = trace.op_columns, trace.tensor_columns.replaces
    ring = c.ring[op]
    if not ring.axis.startswith("data") or ring.passes != 2 or c.phase[op] == UPDATE:
        return False
    return [int(replaces[t]) for t in trace.writes(op)] == list(trace.reads(op))


class _Copying:
    """buckets: per gradient that is summed the bucket that it is copied into, which is empty at first.

    waiting: sums that lie in their buckets, by device, with these: the op, the gradient and the bucket.
    """

    def __init__(self, trace: Trace, summed: Sequence[int]) -> None:
        self.trace, self.summed = trace, frozenset(summed)
        self.new = Rewriter(trace)
        self.sums = {s: g for op in summed for s, g in zip(trace.writes(op), trace.reads(op), strict=True)}
        self.buckets: dict[int, int] = {}
        self.filled: dict[int, int] = {}
        self.waiting: dict[int, list[tuple[Op, int, int]]] = {}

    def build(self) -> Trace:
        """The new trace."""
        new, trace = self.new, self.trace
        ids = new.all_tensors()
        for g in self.sums.values():
            like = trace.tensors[g]
            self.buckets[g] = new.tensor(like, Packed((None,)), name=f"{like.name}.bucket", replaces=None, saved_for="")
        for op in trace.ops:
            if op.phase == "update" or self._reads_sum(op):
                self._finish(op.device, ids)
            if op.id in self.summed:
                self._sum(op, ids)
            else:
                new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
        for device in list(self.waiting):
            self._finish(device, ids)
        outputs = [*(ids[t] for t in trace.outputs), *self.filled.values()]
        carry = [(ids[a], ids[b]) for a, b in trace.carry]
        carry += [(self.filled[g], bucket) for g, bucket in self.buckets.items()]
        return new.build(outputs=outputs, carry=carry)

    def _sum(self, op: Op, ids: Sequence[int]) -> None:
        """Copy the gradients of one collective into their buckets, and sum these."""
        terms, totals = [], []
        for s, g in zip(op.writes, op.reads, strict=True):
            gradient, total = self.trace.tensors[g], self.trace.tensors[s]
            name = f"{gradient.name}.bucket"
            fields = {"name": f"{name}.filled", "replaces": self.buckets[g], **SHARED}
            term = self.new.tensor(gradient, Same(g), **fields)
            self._copy(f"{name}.copy", ids[g], term, op)
            fields = {"name": f"{name}.reduced", "replaces": term, **SHARED}
            self.filled[g] = self.new.tensor(total, Same(s), **fields)
            terms.append(term)
            totals.append(self.filled[g])
            self.waiting.setdefault(op.device, []).append((op, s, self.filled[g]))
        self.new.op(op, reads=terms, writes=totals)

    def _reads_sum(self, op: Op) -> bool:
        """Whether an op reads a sum that lies in its bucket, as one that sends that of a tied head to its stage."""
        return any(s in op.reads for _, s, _ in self.waiting.get(op.device, ()))

    def _finish(self, device: int, ids: Sequence[int]) -> None:
        """Copy what a device has summed back into its gradients."""
        for op, s, total in self.waiting.pop(device, ()):
            self._copy(f"{self.trace.tensors[s].name}.copy", total, ids[s], op)

    def _copy(self, name: str, source: int, target: int, op: Op) -> None:
        size = 2 * self.new.builder.bytes_of(target)
        self.new.glue(name, "copy", [source], [target], bytes=size, phase=op.phase, layer=op.layer, device=op.device)


__all__ = ["bucket_copies"]
