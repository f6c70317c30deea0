"""Which results of forward to keep for backward, as a minimum cut; and what is then run again, where."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from sim.errors import PolicyError
from sim.plan import Problem
from sim.solvers.runs import Ledger
from sim.trace.chain import BACKWARD, FORWARD

CHEAP = ("elementwise", "norm", "softmax", "copy", "codec")
"""Kinds of op that are worth running again: they are bound by memory, not by arithmetic."""

FAR = 100
TOTAL = 1 << 29
UNCUT = 1 << 30


class Joint:
    """The forward and backward ops of a trace as one graph to be cut between them.

    forward: ids of the forward ops on whose results backward depends, directly or not. distance: per
    tensor how many ops lie between it and the nearest backward op that it leads to, at least 1.
    """

    def __init__(self, ledger: Ledger) -> None:
        trace = ledger.trace
        c = trace.op_columns
        self.ledger = ledger
        self.backward: list[int] = np.flatnonzero(c.phase == BACKWARD).tolist()
        self.first = self.backward[0] if self.backward else len(ledger.reads)
        self.wanted = {
            t
            for op in self.backward
            for t in ledger.reads[op]
            if ledger.producer[t] >= 0 and c.phase[ledger.producer[t]] == FORWARD
        }
        self.distance: dict[int, int] = dict.fromkeys(self.wanted, 1)
        reached: set[int] = set(self.wanted)
        self.forward: list[int] = []
        for op in reversed(np.flatnonzero(c.phase == FORWARD).tolist()):
            near = min((self.distance[t] for t in ledger.writes[op] if t in self.distance), default=0)
            if not near:
                continue
            if not reached.isdisjoint(ledger.writes[op]):
                self.forward.append(op)
                reached.update(ledger.reads[op])
            for t in ledger.reads[op]:
                self.distance[t] = min(self.distance.get(t, near + 1), near + 1)
        self.forward.reverse()

    def weight(self, tensor: int) -> float:
        """What keeping a tensor counts: its bytes, 10 % more for each op between it and backward, up to 100."""
        if self.ledger.producer[tensor] < 0:
            return 0.0  # it is there anyway
        return float(self.ledger.size[tensor] * 1.1 ** min(self.distance.get(tensor, FAR), FAR))

    def kept(self, again: Collection[int]) -> set[int]:
        """The tensors that stay from forward to backward if some ops are run again there."""
        reads = [t for op in again for t in self.ledger.reads[op]]
        remade = {t for op in again for t in self.ledger.writes[op]}
        return {t for t in (*reads, *self.wanted) if self.ledger.producer[t] >= 0 and t not in remade}

    def kept_bytes(self, again: Collection[int]) -> int:
        """Bytes of `kept`."""
        return sum(self.ledger.size[t] for t in self.kept(again))

    def cut(self, banned: Collection[int]) -> list[int]:
        """The forward ops to run again so that what is kept weighs least; banned ops are not run again.

        Weights are rounded to a 2**29-th of their sum, at least 1.
        """
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        ledger = self.ledger
        tensors = sorted(
            {t for op in self.forward for t in (*ledger.reads[op], *ledger.writes[op]) if ledger.producer[t] >= 0}
        )
        if not tensors:
            return []
        enter = {t: 2 + 2 * i for i, t in enumerate(tensors)}  # the tensor leaves by the node after
        node = {op: 2 + 2 * len(tensors) + i for i, op in enumerate(self.forward)}
        weights = np.array([self.weight(t) for t in tensors])
        scale = TOTAL / max(float(weights.sum()), 1.0)
        edges = [(enter[t], enter[t] + 1, max(1, int(w * scale))) for t, w in zip(tensors, weights, strict=True)]
        edges += [(enter[t] + 1, 1, UNCUT) for t in tensors if t in self.wanted]
        for op in self.forward:
            edges += [(enter[t] + 1, node[op], UNCUT) for t in ledger.reads[op] if t in enter]
            edges += [(node[op], enter[t], UNCUT) for t in ledger.writes[op] if t in enter]
            if op in banned:
                edges.append((0, node[op], UNCUT))
        count = 2 + 2 * len(tensors) + len(self.forward)
        tail, head, capacity = (np.array(column) for column in zip(*edges, strict=True))
        graph = coo_array((capacity.astype(np.int32), (tail, head)), shape=(count, count)).tocsr()
        left = (graph - maximum_flow(graph, 0, 1).flow).tocsr()
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        here = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        # what cannot be reached in the residual graph lies on backward's side
        needed = {t for t in tensors if t in self.wanted and enter[t] not in here}
        chosen = []
        for op in reversed(self.forward):
            if node[op] not in here and not needed.isdisjoint(ledger.writes[op]):
                chosen.append(op)
                needed.update(t for t in ledger.reads[op] if t in enter and enter[t] not in here)
        return chosen[::-1]

    def again(self, chosen: Collection[int]) -> dict[int, list[int]]:
        """Run each chosen op once, just before the first backward op that needs it; the result is for `runs`."""
        ledger, ran, left = self.ledger, set[int](), set(chosen)
        found: dict[int, list[int]] = {}
        for op in self.backward:
            stack = [ledger.producer[t] for t in ledger.reads[op]]
            needed: set[int] = set()
            while stack:
                maker = stack.pop()
                if maker in left and maker not in ran and maker not in needed:
                    needed.add(maker)
                    stack += [ledger.producer[t] for t in ledger.reads[maker]]
            if needed:
                found[op] = sorted(needed)
                ran |= needed
        return found

    def dear(self, aggressive: bool = False) -> set[int]:
        """Ops that are not run again: random ones, those not cheap by kind, and those that cannot be.

        Unless `aggressive`, also those whose results are less than a quarter of their operands, and those
        that a backward op of a dear kind reads.
        """
        ledger, ops = self.ledger, self.ledger.trace.ops
        found = set()
        for op in self.forward:
            what = ops[op]
            reads = [t for t in ledger.reads[op] if ledger.producer[t] >= 0]
            made = sum(ledger.size[t] for t in ledger.writes[op])
            readers = [r for t in ledger.writes[op] for r in ledger.trace.readers(t) if r >= self.first]
            stop = max(readers, default=self.first)
            never = what.random or what.kind not in CHEAP or not ledger.can_run_again(op, stop)
            reduces = 4 * made < sum(ledger.size[t] for t in reads)
            read_by_dear = any(ops[r].phase == "backward" and ops[r].kind not in CHEAP for r in readers)
            if never or (not aggressive and (reduces or read_by_dear)):
                found.add(op)
        return found


def joint_of(problem: Problem, policy: str) -> Joint:
    """The graph to cut. Raises PolicyError where there is none."""
    if problem.trace.devices > 1:
        raise PolicyError(f"policy {policy!r} needs a trace on one device; this one has {problem.trace.devices}")
    joint = Joint(Ledger(problem.trace))
    if not joint.wanted:
        raise PolicyError(f"policy {policy!r} needs a trace with a backward phase that reads what forward makes")
    return joint
