"""The forward ops of a trace as layers, what each sends to the host, and what is fetched beside its backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sim.solvers.undoing import forward_of
from sim.trace.chain import BACKWARD, backward_ops, forward_ops
from sim.trace.graph import Trace
from sim.trace.op import KINDS
from sim.trace.tensor import ROLE_CODE

FEATURE_MAPS = (ROLE_CODE["activation"], ROLE_CODE["input"])


class Layers:
    """The forward ops of a trace as layers, and its backward ops in runs that undo one layer each."""

    def __init__(self, trace: Trace, heavy: tuple[str, ...], classifier: tuple[str, ...]) -> None:
        self.trace = trace
        c = trace.op_columns
        self.ops: list[list[int]] = []
        self._layer_of: dict[int, int] = {}
        replaces = trace.tensor_columns.replaces
        for op in forward_ops(trace).tolist():
            # an activation function in place belongs to the layer whose result it overwrites
            over = {int(trace.producer[replaces[t]]) if replaces[t] >= 0 else -1 for t in trace.writes(op)}
            if not (over and self.ops and over <= set(self.ops[-1])):
                self.ops.append([])
            self.ops[-1].append(op)
            self._layer_of[op] = len(self.ops) - 1
        kinds = [KINDS[c.kind[ops[0]]] for ops in self.ops]
        self._heavy = [kind in (heavy or (("conv",) if "conv" in kinds else ("matmul", "attention"))) for kind in kinds]
        self._managed = self._count_managed(kinds, classifier)

    def _count_managed(self, kinds: list[str], classifier: tuple[str, ...]) -> int:
        """How many layers, from the first, may send their inputs."""
        managed = len(kinds) - 1
        while managed > 0 and kinds[managed] == "elementwise":
            managed -= 1
        behind = max((n for n, heavy in enumerate(self._heavy) if heavy), default=-1) + 1
        dense = next((n for n in range(behind, len(kinds)) if kinds[n] in classifier), len(kinds))
        return max(min(managed, dense), 0)

    def plain(self, op: int) -> bool:
        """Whether the device itself runs that op, so that it can wait at its end."""
        return not self.trace.op_columns.engine.get(op) and not self.trace.op_columns.group.get(op)

    def sent(self, variant: str) -> dict[int, tuple[int, ...]]:
        """Per layer the inputs that go to the host beside it."""
        trace, phase, device = self.trace, self.trace.op_columns.phase, self.trace.op_columns.device
        found: dict[int, tuple[int, ...]] = {}
        for n in range(self._managed if variant != "none" else 0):
            if (variant == "conv" and not self._heavy[n]) or not all(map(self.plain, self.ops[n])):
                continue
            tensors = []
            for t in dict.fromkeys(t for op in self.ops[n] for t in trace.reads(op)):
                readers = trace.readers(t)
                late = [op for op in readers if phase[op] == BACKWARD]
                last = max((op for op in readers if op not in late), default=-1)
                producer = int(trace.producer[t])
                if (
                    late
                    and producer not in self.ops[n]
                    # else it may not be there when its copy is to begin
                    and (producer < 0 or (self.plain(producer) and device[producer] == device[self.ops[n][0]]))
                    and late[0] > self.ops[n][-1] >= last
                    and self._layer_of.get(last) == n
                    and trace.tensor_columns.role[t] in FEATURE_MAPS
                    and trace.tensor_columns.bytes[t]
                    and t not in trace.outputs
                ):
                    tensors.append(t)
            if tensors:
                found[n] = tuple(tensors)
        return found

    def backward_runs(self) -> Iterator[tuple[int, list[int]]]:
        """Each run of backward ops of one device that undo one layer, in order."""
        undoes, device = forward_of(self.trace), self.trace.op_columns.device
        run: list[int] = []
        behind = len(self.ops) - 1
        for op in backward_ops(self.trace).tolist():
            n = self._layer_of[undoes[op]] if op in undoes else behind
            if run and (n != behind or device[op] != device[run[0]]):
                yield behind, run
                run = []
            run.append(op)
            behind = n
        if run:
            yield behind, run

    def prefetch(self, n: int, before: int, sent: Mapping[int, tuple[int, ...]], fetched: set[int]) -> tuple[int, ...]:
        """The inputs to fetch beside the backward of layer n: the published search, downwards from n - 1."""
        device = self.trace.op_columns.device
        for m in range(n - 1, -1, -1):
            if self.ops[m][-1] > before or device[self.ops[m][0]] != device[before]:
                continue
            if any(t not in fetched for t in sent.get(m, ())):
                return sent[m]
            if self._heavy[m]:
                return ()
        return ()
