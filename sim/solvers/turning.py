"""What must run again because it can't all lie there when backward begins: a bound, and plans from rounding it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sim.plan import Problem
from sim.solvers.cuts import Joint
from sim.solvers.outcome import rerun_ns
from sim.solvers.runs import Ledger, Runs, runs
from sim.solvers.unfreeing import unfreed
from sim.trace.chain import BACKWARD
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE

MEGABYTE, MICROSECOND = 1e6, 1e3  # keep the factors of the program near 1
TOLERANCE, SLACK = 1e-6, 1e-3  # of the solver: a part, and ns
LEVELS = (0.999, 0.5, TOLERANCE)  # from which part on an op runs again, the most reruns last
TRIES = 10  # rooms that are tried, each less by what the plans before exceeded the budget
STEP = 400  # at least this part of the budget less each time


@dataclass(frozen=True)
class Least:
    """The answer of the linear program. bound: ns of reruns; again: per op how far it runs again, above 0 to 1."""

    bound: int
    again: Mapping[int, float]


class Turn:
    """The moment at which one op runs, and what lies there or has to be made again afterwards.

    At that moment each result that a later op reads lies there, or its maker runs again later; and each op
    that runs again later finds what it reads there, or that is made again, too. What nothing makes lies there
    while a later op reads it, be it in its place or again. What lies there, what the op makes and its
    workspace fit the budget. This holds of every plan for one device that drops and
    recomputes, offline or online, however often and whenever it runs things again, as long as weight
    gradients stay once they are made. So the least time of reruns under these conditions alone is a lower
    bound on the reruns of every such plan. It is one stage of Checkmate's program (Jain et al., MLSys 2020),
    and therefore small: a variable an op and a value, not their square.

    ledger: the trace. op_ns: time of an op. at: the op; None takes the first of backward.
    """

    def __init__(self, ledger: Ledger, op_ns: Callable[[int], int], at: int | None = None) -> None:
        self.ledger = ledger
        backward = np.flatnonzero(ledger.trace.op_columns.phase == BACKWARD)
        self.at = int(backward[0]) if at is None and len(backward) else at or 0
        self.stays = [until >= self.at for until in ledger.stays_until]
        wanted = {v for op in range(self.at, len(ledger.reads)) for v in ledger.reads[op] if self._counts(v)}
        self.values, self.again = self._reach(wanted)
        self.column = {("value", v): i for i, v in enumerate(self.values)}
        self.column |= {("op", op): len(self.values) + i for i, op in enumerate(self.again)}
        self.cost = np.array([0.0] * len(self.values) + [op_ns(op) / MICROSECOND for op in self.again])
        self.outside = sum(ledger.size[v] for v, stays in enumerate(self.stays) if stays)
        self.outside += _makes(ledger, self.at)
        self._rows(wanted)

    def least(self, budget: int) -> Least | None:
        """The relaxation's answer for so many bytes; None where nothing fits."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        if not len(self.cost):
            return Least(0, {}) if self.outside <= budget else None
        rows, columns, factors = self.cells
        matrix = csr_array((factors, (rows, columns)), shape=(len(self.most) + 1, len(self.cost)))
        room = (budget - self.outside) / MEGABYTE
        found = milp(
            self.cost,
            bounds=Bounds(self.low, self.high),
            constraints=LinearConstraint(matrix, -np.inf, np.append(self.most, room)),
        )
        if found.x is None:
            return None
        far = {op: float(found.x[self.column["op", op]]) for op in self.again}
        # whole nanoseconds: what is proven to be above 6 is at least 7
        bound = max(0, math.ceil(found.fun * (1 - TOLERANCE) * MICROSECOND - SLACK))
        return Least(bound, {op: value for op, value in far.items() if value > TOLERANCE})

    # ---- building ----------------------------------------------------------------------------

    def _counts(self, value: int) -> bool:
        """Whether it is for the plan to say if a value lies there: it has been made, or may have been dropped."""
        return self.ledger.producer[value] < self.at and not self.stays[value]

    def _reach(self, wanted: set[int]) -> tuple[list[int], list[int]]:
        """The values that matter, and the ops that might run again to make them."""
        gradient = self.ledger.trace.tensor_columns.role == ROLE_CODE["gradient"]
        values, again, stack = set(wanted), set[int](), list(wanted)
        while stack:
            value = stack.pop()
            maker = self.ledger.producer[value]
            if maker < 0 or maker in again or gradient[value] or self.ledger.until[maker] <= self.at:
                continue
            again.add(maker)
            new = {v for v in self.ledger.reads[maker] if self._counts(v)} - values
            values |= new
            stack += new
        return sorted(values), sorted(again)

    def _rows(self, wanted: set[int]) -> None:
        ledger, column = self.ledger, self.column
        self.low, self.high = np.zeros(len(self.cost)), np.ones(len(self.cost))
        rows: list[int] = []
        columns: list[int] = []
        factors: list[float] = []
        most: list[float] = []

        def lies_or_comes(value: int, far: int | None) -> None:
            """The value lies there or its maker runs again: at all, or at least as far as another op does."""
            terms = [(column["value", value], -1.0)]
            maker = column.get(("op", ledger.producer[value]))
            terms += [] if maker is None else [(maker, -1.0)]
            terms += [] if far is None else [(far, 1.0)]
            for place, factor in terms:
                rows.append(len(most))
                columns.append(place)
                factors.append(factor)
            most.append(-1.0 if far is None else 0.0)

        for value in sorted(wanted):
            lies_or_comes(value, None)
        for op in self.again:
            for value in ledger.reads[op]:
                if self._counts(value):
                    lies_or_comes(value, column["op", op])
        for value in self.values:
            place = column["value", value]
            if value in ledger.reads[self.at]:
                self.low[place] = 1.0
            if ledger.gone_at[value] < self.at:
                self.high[place] = 0.0
            rows.append(len(most))
            columns.append(place)
            factors.append(ledger.size[value] / MEGABYTE)
        # the last row, what lies there, gets its limit from the budget
        last = len(most)
        self.cells = ([min(row, last) for row in rows], columns, factors)
        self.most = np.array(most)


def by_turning(problem: Problem, ledger: Ledger) -> tuple[Runs | None, int | None]:
    """The cheapest plan from rounding the moment when backward begins, and the bound; None where there is none.

    What the relaxation lets run again runs once, just before backward needs it first, and stays until it is
    read last. That holds more than the one moment shows, so the relaxation gets less room until plans fit.
    Last, what need not go after all stays (`unfreed`). Linear in ops but for the linear programs: a second or
    two for thousands of ops.
    """
    joint = Joint(ledger)
    if not joint.wanted:
        return None, None
    turn = Turn(ledger, problem.cost.op_ns)
    cost = [problem.cost.op_ns(op) for op in range(len(ledger.reads))]
    room, best, bound = problem.budget, None, None
    for _ in range(TRIES):
        least = turn.least(room)
        if least is None:
            break
        bound = least.bound if bound is None else bound
        excess = 0
        for level in LEVELS:
            chosen = [op for op, far in least.again.items() if far >= level]
            found = runs(ledger, joint.again(chosen), prune=True)
            excess = found.peak() - problem.budget
            if excess <= 0:
                found = unfreed(found, cost, problem.budget)
                if best is None or rerun_ns(problem, found) < rerun_ns(problem, best):
                    best = found
        if excess <= 0:
            break
        room -= max(excess, problem.budget // STEP)
    return best, bound


def least_bytes(ledger: Ledger) -> int:
    """Bytes below which no plan gets that drops and recomputes on one device and keeps weight gradients.

    While an op runs there lie: what the op reads and makes, its workspace, and what a later op reads and
    nothing can make again until then, as is all that is there from the start.
    """
    comes, goes = _bound_to_stay(ledger)
    stays: set[int] = set()
    held = most = 0
    for op, reads in enumerate(ledger.reads):
        new = comes.get(op, set()) - stays
        stays |= new
        held += sum(ledger.size[value] for value in new)
        here = sum(ledger.size[value] for value in reads if value not in stays)
        most = max(most, held + here + _makes(ledger, op))
        gone = goes.get(op, set()) & stays
        stays -= gone
        held -= sum(ledger.size[value] for value in gone)
    return most


def _bound_to_stay(ledger: Ledger) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Per op the values that have to lie there from it on, and those for which it is the last such op."""
    trace = ledger.trace
    update = trace.op_columns.phase == PHASE_CODE["update"]
    gradient = trace.tensor_columns.role == ROLE_CODE["gradient"]
    last, outputs = len(ledger.reads), set(trace.outputs)
    comes: dict[int, set[int]] = {}
    goes: dict[int, set[int]] = {}
    for value, maker in enumerate(ledger.producer):
        readers = trace.readers(value)
        end = ledger.stays_until[value] if maker < 0 else last if value in outputs else max(readers, default=maker)
        if maker < 0:
            start = 0
        elif value in outputs or (gradient[value] and any(update[reader] for reader in readers)):
            start = maker + 1  # while the maker runs it counts what it makes
        else:
            start = max(maker + 1, ledger.until[maker])
        end = min(end, ledger.gone_at[value])
        if start <= end:
            comes.setdefault(start, set()).add(value)
            goes.setdefault(end, set()).add(value)
    return comes, goes


def _makes(ledger: Ledger, op: int) -> int:
    """Bytes that an op takes while it runs beside what lay there before."""
    return ledger.workspace[op] + sum(ledger.size[v] for v in ledger.writes[op] if ledger.replaces[v] < 0)
