"""LP relaxation at moments of the schedule: a lower bound on the recomputation of every plan.

A moment is the time when one op runs in its place. Each tensor that is read after it is resident then, or its
producer is recomputed later; what that op reads is resident or recomputed, too; and what is resident, together with
what the op at the moment makes and its workspace, fits the budget. Every plan for one device that only drops and
recomputes keeps these conditions, offline or online, however often and in whatever order it recomputes, as long
as weight gradients stay once they are made. So the least time of recomputation under them is a lower bound for all
of them. Several moments stand in one program: what is resident at the next one was resident at this one, or was
produced or recomputed in between. It is Checkmate's program (Jain et al., MLSys 2020) with few stages instead of
one per op, and with memory counted at those moments alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sim.solvers.linear import LinearProgram, Terms
from sim.solvers.schedule import TraceIndex
from sim.trace.index import GRADIENT

MEGABYTE, MICROSECOND = 1e6, 1e3  # keep the factors of the program near 1
TOLERANCE, SLACK = 1e-6, 1e-3  # of the solver: a part, and ns

Keep = Mapping[int, float]
"""Per tensor how far it is resident at a moment, above 0 to 1."""


class Moment:
    """What may be resident when an op runs in its place, and what may be recomputed afterwards.

    at: the op. wanted: tensors made before it that a later op reads, or that are outputs. tensors: those, and what
    their producers read if they are recomputed. again: the ops that may have to be recomputed after this moment.
    pinned: bytes that are resident whatever the plan: inputs still to be read, what the op makes, its workspace.
    An input that no op reads any more may be dropped, so that it counts only where a recomputation reads it.
    until: per op the op from which on it is not recomputed.
    """

    def __init__(self, index: TraceIndex, at: int, until: Sequence[int], leaving: Collection[int] = ()) -> None:
        """leaving: inputs that may be away before their last reader, and return."""
        self.at = at
        trace, producer = index.trace, index.producer
        gradient = trace.tensor_columns.role == GRADIENT
        later = {t for op in range(at, len(index.reads)) for t in index.reads[op]} | set(trace.outputs)
        inputs = {t for t, last in enumerate(index.stays_until) if last >= at}.difference(leaving)
        self.reads = {t for t in index.reads[at] if producer[t] >= 0 or t in leaving}
        self.wanted = {t for t in later if 0 <= producer[t] < at or t in leaving}
        tensors, reruns, stack = set(self.wanted), set[int](), list(self.wanted)
        while stack:
            t = stack.pop()
            op = producer[t]
            if op < 0 or op in reruns or gradient[t] or until[op] <= at:
                continue
            reruns.add(op)
            new = {read for read in index.reads[op] if producer[read] < at} - tensors - inputs
            tensors |= new
            stack += new
        self.tensors, self.reruns = sorted(tensors), sorted(reruns)
        self.pinned = sum(index.size[t] for t in inputs) + made_bytes(index, at)


@dataclass(frozen=True)
class Relaxed:
    """The answer of the linear program. bound: ns of recomputation; keep: per moment what is resident, how far."""

    bound: int
    keep: Sequence[Keep]


class Program:
    """The linear program over some moments, in program order.

    cost: ns per op. held: tensors that are resident at the first moment, all others are not; None leaves that open.
    Without it the program also bounds, per moment, which ops are recomputed at all after it. That follows for whole
    numbers; relaxed, it is what makes the bound no lower than that of any one of the moments alone.
    """

    def __init__(
        self, index: TraceIndex, cost: Sequence[int], moments: Sequence[Moment], held: Collection[int] | None = None
    ) -> None:
        self.index, self.moments, self.held = index, moments, held
        self.rows = LinearProgram()
        self.resident: list[dict[int, int]] = []
        self.reruns: list[dict[int, int]] = []  # between this moment and the next
        self.after: list[dict[int, int]] = []  # ever after this moment
        for k, moment in enumerate(moments):
            fixed = held if k == 0 else None
            self.resident.append({t: self.rows.column(*_limits(moment, t, fixed)) for t in moment.tensors})
            self.reruns.append({op: self.rows.column(cost=cost[op] / MICROSECOND) for op in moment.reruns})
        for k, moment in enumerate(moments):
            last = k == len(moments) - 1
            self.after.append(self.reruns[k] if last else {op: self.rows.column() for op in moment.reruns})
        for k in range(len(moments)):
            self._between(k)
            if held is None and k < len(moments) - 1:
                self._ever_after(k)
        self.limits = [self.rows.row(self._bytes(k), most=0.0) for k in range(len(moments))]

    def relax(self, rooms: Sequence[int]) -> Relaxed | None:
        """The answer for so many bytes at each moment; None where nothing fits."""
        for k, (row, moment) in enumerate(zip(self.limits, self.moments, strict=True)):
            open_ended = k == 0 and self.held is not None
            most = math.inf if open_ended else (rooms[k] - moment.pinned) / MEGABYTE
            if most < 0:
                return None
            self.rows.limit(row, most)
        if not self.rows.columns:
            return Relaxed(0, [{} for _ in self.moments])
        found = self.rows.solve()
        if found.x is None:
            return None
        keep = [{t: float(found.x[c]) for t, c in part.items() if found.x[c] > TOLERANCE} for part in self.resident]
        # whole nanoseconds: what is proven to be above 6 is at least 7
        bound = max(0, math.ceil(found.fun * (1 - TOLERANCE) * MICROSECOND - SLACK))
        return Relaxed(bound, keep)

    # ---- building ----------------------------------------------------------------------------

    def _bytes(self, k: int) -> Terms:
        return [(column, self.index.size[t] / MEGABYTE) for t, column in self.resident[k].items()]

    def _has(self, k: int, tensor: int, reruns: Mapping[int, int]) -> Terms:
        """That a tensor is resident at a moment or its producer is recomputed: less than or equal to minus that."""
        terms = [(self.resident[k][tensor], -1.0)]
        column = reruns.get(self.index.producer[tensor])
        if column is None or self.index.role[tensor] == GRADIENT:  # whose producer may be recomputed for another result
            return terms
        return [*terms, (column, -1.0)]

    def _needs(self, k: int, op: int) -> Iterator[int]:
        """What an op that is recomputed after a moment reads of what was made before it."""
        return (t for t in self.index.reads[op] if t in self.resident[k])

    def _between(self, k: int) -> None:
        """What is read from a moment to the next, and what is resident there, was resident or is recomputed."""
        moment, reruns = self.moments[k], self.reruns[k]
        for t in sorted(wanted_until(self.index, moment, self._next(k))):
            self.rows.row(self._has(k, t, reruns), most=-1.0)
        for op, column in reruns.items():
            for t in self._needs(k, op):
                self.rows.row([*self._has(k, t, reruns), (column, 1.0)], most=0.0)
        if k + 1 < len(self.moments):
            for t, column in self.resident[k + 1].items():
                if t in self.resident[k]:
                    self.rows.row([*self._has(k, t, reruns), (column, 1.0)], most=0.0)

    def _ever_after(self, k: int) -> None:
        """The conditions of one moment alone, over all that is recomputed after it."""
        moment, after = self.moments[k], self.after[k]
        for op, column in after.items():
            follows = self.after[k + 1].get(op)
            less = [] if follows is None else [(follows, -1.0)]
            self.rows.row([(column, 1.0), (self.reruns[k][op], -1.0), *less], most=0.0)
            for t in self._needs(k, op):
                self.rows.row([*self._has(k, t, after), (column, 1.0)], most=0.0)
        for t in sorted(moment.wanted):
            self.rows.row(self._has(k, t, after), most=-1.0)

    def _next(self, k: int) -> int | None:
        return self.moments[k + 1].at if k + 1 < len(self.moments) else None


def wanted_until(index: TraceIndex, moment: Moment, end: int | None) -> set[int]:
    """What was made before a moment and is read after its op and before another; None: to the end, with outputs."""
    last = len(index.reads) if end is None else end
    read = {t for op in range(moment.at + 1, last) for t in index.reads[op]}
    return (read | set(index.trace.outputs) if end is None else read) & moment.wanted


def made_bytes(index: TraceIndex, op: int) -> int:
    """Bytes that an op takes while it runs beside what was resident before."""
    return index.workspace[op] + sum(index.size[t] for t in index.writes[op] if index.replaces[t] < 0)


def _limits(moment: Moment, tensor: int, fixed: Collection[int] | None) -> tuple[float, float]:
    if fixed is not None:
        return float(tensor in fixed), float(tensor in fixed)
    return float(tensor in moment.reads), 1.0
