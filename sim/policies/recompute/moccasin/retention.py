"""Retention intervals: which runs of a node produce a value, and how long each stays resident; solved by CP-SAT.

Time is a grid of events: stage t has one for each node k <= t, in order, and node k may be recomputed only at its
own event of a later stage. A node has at most `runs` runs, its first in its own stage; each run of its producer
starts one interval of a value. The memory of all intervals that cover an event is within the budget.
The model follows Moccasin (Bartan et al., ICML 2023), and shares nothing with the program in `sim.solvers.milp`.
"""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

from sim.errors import PolicyError
from sim.solvers.nodes import Nodes, NodeValue
from sim.solvers.outcome import Answer


def cp_sat(policy: str) -> Any:
    """The module of OR-Tools' CP-SAT. Raises PolicyError saying how to get it."""
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        if "highspy" in sys.modules:
            why = "can't be loaded beside highspy, which this process has loaded"
            raise PolicyError(f"policy {policy!r} needs OR-Tools, which {why}") from error
        raise PolicyError(f"policy {policy!r} needs OR-Tools: pip install 'tiersim[solvers]'") from error


class Retention:
    """The model for some nodes.

    room: bytes beyond what is resident throughout; None minimises them.
    runs: the most runs of a node.
    """

    def __init__(self, nodes: Nodes, room: int | None, runs: int, policy: str) -> None:
        self.cp = cp_sat(policy)
        self.model = self.cp.CpModel()
        self.nodes = nodes
        self.last = _event(len(nodes) - 1, len(nodes) - 1)
        self.byte = math.gcd(*(value.size for value in nodes.values), *nodes.run_bytes, *nodes.rerun_bytes) or 1
        self.price = math.gcd(*nodes.cost) or 1
        self.active: dict[tuple[int, int], Any] = {}
        self.start: dict[tuple[int, int], Any] = {}
        self.at: dict[tuple[int, int, int], Any] = {}  # node, run, stage -> whether it runs there
        self.count: list[int] = []
        self._intervals: list[Any] = []
        self._demands: list[int] = []
        for k in range(len(nodes)):
            self._node(k, runs)
        for k in range(len(nodes)):
            self._scratch(k)
        for v in range(len(nodes.values)):
            self._value(v)
        self.room = None if room is None else room // self.byte
        if self.room is None:
            worst = sum(value.size for value in nodes.values) + max(nodes.run_bytes, default=0)
            capacity = self.model.NewIntVar(0, worst // self.byte, "")
            self.model.AddCumulative(self._intervals, self._demands, capacity)
            self.model.Minimize(capacity)
        else:
            self.model.AddCumulative(self._intervals, self._demands, max(self.room, 0))
            reruns = [(nodes.cost[k] // self.price, a) for (k, i), a in self.active.items() if i]
            self.model.Minimize(sum(price * a for price, a in reruns))

    # ---- building ----------------------------------------------------------------------------

    def _node(self, k: int, runs: int) -> None:
        """Its runs: the first where it belongs, each other in a later stage than the one before."""
        model = self.model
        self.active[k, 0], self.start[k, 0] = model.NewConstant(1), model.NewConstant(_event(k, k))
        stages = [t for t, again in enumerate(self.nodes.useful[0]) if k in again]
        count = min(runs, 1 + len(stages))
        self.count.append(count)
        for i in range(1, count):
            active = self.active[k, i] = model.NewBoolVar("")
            chosen = [model.NewBoolVar("") for _ in stages]
            for t, one in zip(stages, chosen, strict=True):
                self.at[k, i, t] = one
            model.Add(sum(chosen) == active)
            start = self.start[k, i] = model.NewIntVarFromDomain(
                self.cp.Domain.FromValues([self.last + 1, *(_event(t, k) for t in stages)]), ""
            )
            for t, one in zip(stages, chosen, strict=True):
                model.Add(start == _event(t, k)).OnlyEnforceIf(one)
            model.Add(start == self.last + 1).OnlyEnforceIf(active.Not())
            if i > 1:
                model.AddImplication(active, self.active[k, i - 1])
                model.Add(start > self.start[k, i - 1]).OnlyEnforceIf(active)

    def _scratch(self, k: int) -> None:
        """The bytes of a run beyond the values that it starts."""
        values = [self.nodes.values[v] for v in self.nodes.produced_by[k]]
        first = self.nodes.run_bytes[k] - sum(value.size for value in values if value.fresh)
        again = self.nodes.rerun_bytes[k] - sum(
            value.size for value in values if value.fresh and self._comes_back(value)
        )
        for i in range(self.count[k]):
            if (again if i else first) > 0:
                start, active = self.start[k, i], self.active[k, i]
                self._interval(start, 1, start + 1, active, again if i else first)

    def _interval(self, start: Any, length: Any, end: Any, active: Any, bytes: int) -> None:
        if bytes:
            self._intervals.append(self.model.NewOptionalIntervalVar(start, length, end, active, ""))
            self._demands.append(bytes // self.byte)

    def _value(self, v: int) -> None:
        """One interval for each run of its producer; and each reader runs within one of them."""
        model, value = self.model, self.nodes.values[v]
        count = len(self.nodes)
        held = value.held_until >= 0
        goes = _event(value.overwritten_at, value.overwritten_at) if value.overwritten_at < count else self.last
        ends: list[Any] = []
        begins: list[Any] = []  # whether a run of its producer starts an interval
        for i in range(self.count[value.producer] if self._comes_back(value) else 1):
            start, active = self.start[value.producer, i], self.active[value.producer, i]
            if i and held:  # up to `held_until` the value is resident anyway: a rerun's copy of it is scratch
                rerun, active = active, model.NewBoolVar("")
                runs = {t: one for (k, run, t), one in self.at.items() if (k, run) == (value.producer, i)}
                model.Add(active == sum(one for t, one in runs.items() if t > value.held_until))
                copies = model.NewBoolVar("")
                model.Add(copies == rerun - active)
                self._interval(start, 1, start + 1, copies, value.size if value.fresh else 0)
            begins.append(active)
            end = model.NewIntVar(0, self.last + 1, "")
            ends.append(end)
            model.Add(end >= start).OnlyEnforceIf(active)
            if i and value.overwritten_at < count:  # recomputed, it is overwritten once more, later in the same stage
                for (k, run, t), one in self.at.items():
                    if (k, run) == (value.producer, i):
                        model.Add(end <= _event(t, t)).OnlyEnforceIf(one)
            else:
                model.Add(end <= goes).OnlyEnforceIf(active)
            first = start if value.fresh else start + 1
            length = model.NewIntVar(0, self.last + 1, "")
            self._interval(first, length, end + 1, active, value.size)
            if i:
                model.Add(start > ends[i - 1]).OnlyEnforceIf(active)
        if held:
            model.Add(ends[0] >= (_event(value.held_until, 0) if value.held_until < count else self.last))
        if held and value.overwritten_at < count:  # also where only a first run overwrites it
            model.Add(ends[0] >= goes)
        if value.end:
            self._one_of(v, begins, ends, None, None)
        for k in value.readers:
            for i in range(1 if k == value.producer else 0, self.count[k]):
                self._one_of(v, begins, ends, self.start[k, i], self.active[k, i])

    def _comes_back(self, value: NodeValue) -> bool:
        """Whether a value has intervals of its own when recomputed: a plan may drop it before the end."""
        return not value.once and value.held_until < len(self.nodes)

    def _one_of(self, v: int, begins: list[Any], ends: list[Any], when: Any, active: Any) -> None:
        """Some interval of a value covers an event (the end, without one), if what asks for it is active."""
        model, producer = self.model, self.nodes.values[v].producer
        ways = []
        for j, end in enumerate(ends):
            way = model.NewBoolVar("")
            model.AddImplication(way, begins[j])
            if when is None:
                model.Add(end >= self.last).OnlyEnforceIf(way)
            else:
                model.Add(self.start[producer, j] < when).OnlyEnforceIf(way)
                model.Add(end >= when).OnlyEnforceIf(way)
            ways.append(way)
        if active is None:
            model.AddBoolOr(ways)
        else:
            model.AddBoolOr([*ways, active.Not()])

    # ---- solving -----------------------------------------------------------------------------

    def solve(self, *, work_limit: float, time_limit: float, seed: int) -> Answer:
        """Search with one worker, up to seconds of deterministic time and of wall time.

        The bound is on ns of recomputation, on bytes where they are minimised. A limited answer is
        never `optimal`.
        """
        if self.room is not None and self.room < 0:
            return Answer("infeasible")
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed % (1 << 31)
        solver.parameters.max_deterministic_time = work_limit
        solver.parameters.max_time_in_seconds = time_limit
        status = solver.Solve(self.model)
        if status == self.cp.INFEASIBLE:
            return Answer("infeasible")
        limit = "" if status == self.cp.OPTIMAL else "time" if solver.WallTime() >= 0.98 * time_limit else "work"
        unit = self.byte if self.room is None else self.price
        bound = math.ceil(solver.BestObjectiveBound() - 1e-6) * unit
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return Answer("unknown", max(bound, 0), limit=limit)
        stages: list[list[int]] = [[] for _ in range(len(self.nodes))]
        for (k, _, t), one in sorted(self.at.items(), key=lambda row: row[0]):
            if solver.Value(one):
                stages[t].append(k)
        return Answer("feasible" if limit else "optimal", max(bound, 0), [sorted(s) for s in stages], limit)


def _event(stage: int, node: int) -> int:
    return stage * (stage + 1) // 2 + node
