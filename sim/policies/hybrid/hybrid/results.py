"""What is chosen for: forward ops with results that backward reads, and what it costs to do without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.plan import Problem
from sim.solvers.schedule import TraceIndex
from sim.trace.chain import BACKWARD, FORWARD, saved_tensors
from sim.trace.tensor import ROLE_CODE

KEEP, OFFLOAD, RECOMPUTE = range(3)

SMALL = 1000
"""The smallest results, together less than one in so many saved bytes, stay: each copy has a fixed time."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The results of one forward op that backward reads; they are kept, offloaded or recomputed together.

    An input of the iteration that backward reads, too, is like a result of an op that cannot be recomputed.

    op: the op, -1 for an input. device: where it runs, or is read.
    tensors, bytes: its results that backward reads, and their size.
    last: the last op before backward that reads or produces one of them.
    need: the first backward op that reads one.
    out_ns, back_ns: time of their copies to the host and back.
    offloads, recomputes: whether they may be offloaded, and the op recomputed.
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


def results_of(problem: Problem) -> Results:
    """The choices of a trace on a platform."""
    trace, index = problem.trace, TraceIndex(problem.trace)
    c, storages = trace.op_columns, set(trace.view_of.values())
    outputs = frozenset(trace.outputs)
    groups: dict[int, list[int]] = {}
    for t in saved_tensors(trace).tolist():
        if index.size[t] and index.droppable[t] and t not in storages:
            groups.setdefault(index.producer[t], []).append(t)
    sizes = {op: sum(index.size[t] for t in tensors) for op, tensors in groups.items()}
    stays = _small(sizes)
    inputs = [t for t in _inputs(index) if index.size[t] * SMALL > sum(sizes.values())]
    found: list[Saved] = []
    for op, tensors in (*((-1, [t]) for t in inputs), *sorted(groups.items())):
        uses = [*([op] if op >= 0 else []), *(r for t in tensors for r in trace.readers(t))]
        need = min(r for r in uses if index.phase[r] == BACKWARD)
        last = max(r for r in uses if r < need)
        if op in stays or last + 1 >= need:
            continue
        device = index.device[op if op >= 0 else last]
        out, back = _copies(problem, [index.size[t] for t in tensors], device)
        sends = out > 0 and last not in c.engine and last not in c.group and index.device[last] == device
        found.append(
            Saved(op, device, tuple(tensors), sum(index.size[t] for t in tensors), last, need, out, back,
                  offloads=sends, recomputes=op >= 0 and index.recomputable_until[op] >= need)
        )  # fmt: skip
    results = Results(
        index,
        found,
        {s.op: i for i, s in enumerate(found) if s.op >= 0},
        {t: i for i, s in enumerate(found) for t in s.tensors},
        outputs,
        trace.held_until.tolist(),
    )
    # what would take an op of another device or of a group to recompute is not recomputed
    found[:] = [replace(s, recomputes=s.recomputes and _alone(results, s)) for s in found]
    return results


def _inputs(index: TraceIndex) -> list[int]:
    """Inputs of the iteration that one device's forward and backward read."""
    found, trace = [], index.trace
    lasting = (trace.producer >= 0) | (trace.replaced_by >= 0)
    for t in np.flatnonzero(~lasting & (trace.tensor_columns.role == ROLE_CODE["input"])).tolist():
        phases = [index.phase[op] for op in trace.readers(t)]
        alone = len({index.device[op] for op in trace.readers(t)}) == 1
        if alone and FORWARD in phases and BACKWARD in phases and t not in trace.outputs:
            found.append(t)
    return found


def _alone(results: Results, saved: Saved) -> bool:
    index, c = results.index, results.index.trace.op_columns
    return all(
        index.device[op] == saved.device and op not in c.group and op not in c.engine
        for op in (saved.op, *results.behind(saved.op, saved.need))
    )


def _small(size: Mapping[int, int]) -> set[int]:
    """The ops with the smallest results, together less than `SMALL` says."""
    found, left = set(), sum(size.values()) // SMALL
    for op in sorted(size, key=lambda op: (size[op], op)):
        left -= size[op]
        if left < 0:
            break
        found.add(op)
    return found


def _copies(problem: Problem, sizes: Sequence[int], device: int) -> tuple[int, int]:
    """Nanoseconds to copy tensors from a device to the host and back, (0, 0) where there is no way."""
    platform, home = problem.platform, problem.platform.home(device).name
    if (
        platform.host is None
        or not platform.route(home, platform.host.name)
        or not platform.route(platform.host.name, home)
    ):
        return 0, 0
    host = platform.host.name
    return sum(platform.move_ns(b, home, host) for b in sizes), sum(platform.move_ns(b, host, home) for b in sizes)
