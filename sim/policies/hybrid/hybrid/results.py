"""What is chosen for: forward results that backward or recomputation reads; and what a choice recomputes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sim.solvers.schedule import TraceIndex
from sim.trace.chain import FORWARD

KEEP, OFFLOAD, RECOMPUTE = range(3)


@dataclass(frozen=True, slots=True)
class Saved:
    """The results of one forward op that backward reads; they are kept, offloaded or recomputed together.

    An input of the iteration that backward reads, too, is like a result of an op that cannot be recomputed.
    So are results that forward alone reads, if something can be recomputed from them: kept or offloaded they save
    the recomputation of their own op. They are released in forward where nothing is recomputed from them.

    op: the op, -1 for an input. device: where it runs, or is read.
    tensors, bytes: its results that backward reads, and their size.
    last: the last op before backward that reads or produces one of them.
    need: the first backward op that reads one, or before which something may be recomputed from it.
    out_ns, back_ns: time of their copies to the host and back.
    offloads, recomputes: whether they may be offloaded, and the op recomputed.
    sends_early: whether their copies may start when the op ends, before their last read.
    forward_only: whether backward itself reads none.
    """

    op: int
    device: int
    tensors: tuple[int, ...]
    bytes: int
    last: int
    need: int
    out_ns: int
    back_ns: int
    offloads: bool
    recomputes: bool
    sends_early: bool
    forward_only: bool = False


@dataclass(frozen=True, eq=False)
class Results:
    """All that is chosen for, and which ops have to be recomputed with one.

    saved: in program order.
    by_op: the place in `saved` of an op; of: that of a tensor.
    """

    index: TraceIndex
    saved: Sequence[Saved]
    by_op: Mapping[int, int]
    of: Mapping[int, int]
    outputs: frozenset[int]
    held_until: Sequence[int]

    def among(self, saved: Sequence[Saved]) -> Results:
        """The same where these, in program order, are all that is chosen for."""
        by_op = {s.op: i for i, s in enumerate(saved) if s.op >= 0}
        return replace(self, saved=saved, by_op=by_op, of={t: i for i, s in enumerate(saved) for t in s.tensors})

    @cached_property
    def read_by(self) -> list[list[int]]:
        """Per op the places in `saved` of what it reads, in order."""
        return [[self.of[t] for t in reads if t in self.of] for reads in self.index.reads]

    def ways(self, i: int) -> list[int]:
        """What may be chosen for one of `saved`."""
        s = self.saved[i]
        return [KEEP, *([OFFLOAD] if s.offloads else []), *([RECOMPUTE] if s.recomputes else [])]

    def is_lost(self, tensor: int, op: int) -> bool:
        """Whether a forward result for which there is no choice has been released or overwritten when an op runs."""
        index = self.index
        producer = index.producer[tensor]
        if producer < 0 or index.phase[producer] != FORWARD or tensor in self.of or tensor in self.outputs:
            return False
        return index.overwritten_at[tensor] < op or self.held_until[tensor] < op

    def behind(self, op: int, need: int) -> list[int]:
        """The ops that are recomputed before an op for it alone, where that is recomputed before `need`."""
        found: set[int] = set()
        stack = [op]
        while stack:
            for t in self.index.reads[stack.pop()]:
                producer = self.index.producer[t]
                if producer not in found and self.is_lost(t, need):
                    found.add(producer)
                    stack.append(producer)
        return sorted(found)

    def settled(self, choice: Sequence[int]) -> tuple[list[int], dict[int, list[int]]]:
        """The same choice with every op recomputed that another's recomputation takes, and what is recomputed where."""
        now = list(choice)
        while True:
            reruns = self.reruns(now)
            places = {self.by_op[op] for ops in reruns.values() for op in ops if op in self.by_op}
            more = [i for i in places if now[i] != RECOMPUTE]
            if not more:
                return now, reruns
            for i in more:
                now[i] = RECOMPUTE

    def reruns(self, choice: Sequence[int]) -> dict[int, list[int]]:
        """Per backward op the ops recomputed just before it: each chosen op where its results are first read."""
        index = self.index
        absent = {s.op: s.last for s, way in zip(self.saved, choice, strict=True) if way == RECOMPUTE}
        waiting = {t: s.op for s in self.saved if s.op in absent for t in s.tensors}
        found: dict[int, list[int]] = {}
        for op in range(len(index.reads)) if absent else ():
            stack = [waiting[t] for t in index.reads[op] if t in waiting and absent.get(waiting[t], op) < op]
            here: set[int] = set()
            while stack:
                rerun = stack.pop()
                if rerun in here:
                    continue
                here.add(rerun)
                absent.pop(rerun, None)
                for t in index.reads[rerun]:
                    if waiting.get(t) in absent or self.is_lost(t, op):
                        stack.append(index.producer[t])
            if here:
                found[op] = sorted(here)
        return found
