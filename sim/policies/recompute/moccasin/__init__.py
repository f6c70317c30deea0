"""Moccasin: the least recomputation time, each op run a few times at most, by constraint programming."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt

from sim.declared import OneOf
from sim.deprecation import formerly
from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Beside, by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.moccasin.retention import Retention, cp_sat
from sim.solvers.granularity import GRANULARITIES, by_op, by_stage
from sim.solvers.located import index_of
from sim.solvers.nodes import Nodes, body, counts_all
from sim.solvers.outcome import STAGED, in_stages, planned, refused, rerun_ns
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of

FLOOR_WORK = 10.0  # deterministic seconds to look for the smallest budget that so few runs per op fit


@dataclass(frozen=True, kw_only=True)
class Moccasin(RecomputationPlanner):
    """Run each op at most `runs` times, keep each result for one interval per run, and minimise the total time.

    Source: Bartan, Li, Teague, Lott, Dilkina, "Moccasin: Efficient Tensor Rematerialization for Neural
        Networks", ICML 2023: retention intervals on a grid of events, a cumulative constraint for memory.
    Bounds: the optimum of Checkmate's plans that run no op more than `runs` times. Where the true optimum runs an op
        more often, other policies take less time or fit in less memory: a chain of 8 equal stages fits in 3 units with
        6 runs per op, in 5 with 2. O(n runs) intervals for n ops, against Checkmate's O(n^2) binaries. A good plan
        is found early; the proof takes long where many ops have equal costs (61 equal ops: the optimum within
        seconds, no proof within a minute).
    Departs: the paper first reduces the peak of the plan without recomputation, and starts from that; here the solver
        starts from nothing, and looks for the least peak only where nothing fits, to name a budget that
        does. Several results of an op, workspace and in-place writes count as in the engine. Weights, inputs,
        weight gradients once produced, and the update are outside. Ops that produce weight gradients run once.

    runs: the most runs of an op, its first one counted (C_v in the paper), at least 1.
    granularity: "op", or "stage": the ops of a stage of the chain (of a layer where the trace is not a chain) are
        recomputed together, without those that can't be. None: "op" up to `max_ops` ops, "stage" beyond.
    max_ops: the most nodes to plan for, at least 2.
    work_limit: deterministic seconds of search.
    time_limit: seconds of search by the clock.
    Notes of the plan: `status` is "optimal" only where proven, among plans with so few runs per op, "feasible" for
        stages and where a limit was reached; `optimal_among`: that class; `bound_ns`, `rerun_ns`, `limit` ("",
        "work" or "time"), `time_limited`.
    Raises PolicyError without OR-Tools (the extra `solvers`), on several devices or engines, and when a limit
        was reached before any plan was found; Infeasible where none fits with so few runs per op.
    """

    recomputes = True
    optimal = f"among plans that {STAGED}, and run no op more often than the parameter 'runs' says"
    solver = "cp"
    fidelity = "equations"
    slow = True
    rarely = "the cheapest plan that fits seldom recomputes anything on nets this small"
    other_values = by_parameter(
        runs=3, granularity="stage", max_ops=Beside(6, granularity="stage"), work_limit=1e-3, time_limit=1e-6
    )
    unseen = by_parameter(
        remove_unnecessary="what it proves best op by op leaves nothing to remove; docs/recompute.md shows it by stage"
    )

    runs: Annotated[int, Ge(1)] = 2
    granularity: Annotated[str, OneOf(GRANULARITIES)] | None = field(default=None, metadata=formerly("grain"))
    max_ops: Annotated[int, Ge(2)] = 150
    work_limit: Annotated[float, Gt(0)] = 30.0
    time_limit: Annotated[float, Gt(0)] = 300.0

    @property
    def _class(self) -> str:
        return f"{STAGED}, and run no op more than {self.runs} times"

    def in_class(self, plan: Plan) -> bool:
        """Whether earlier ops are recomputed in order, each at most once before an op and `runs` times in all."""
        return in_stages(plan, self.runs)

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        cp_sat("moccasin")
        index = index_of(problem)
        plain = schedule_of(index, {})
        if plain.peak() <= problem.budget:
            return planned(problem, plain, status="optimal", bound=0, plans=self._class)
        ops = body(problem, "moccasin")
        granularity = self.granularity or ("op" if ops <= self.max_ops else "stage")
        if granularity == "op" and ops > self.max_ops:
            what = f"plans op by op for {self.max_ops} ops at most (max_ops); there are {ops}: take granularity='stage'"
            raise PolicyError(f"policy 'moccasin' {what}")
        exact = granularity == "op" and counts_all(index, ops)
        nodes = (
            by_op(problem, index, "moccasin")
            if granularity == "op"
            else by_stage(problem, index, "moccasin", self.max_ops)
        )
        model = Retention(nodes, problem.budget - nodes.outside, self.runs, "moccasin")
        answer = model.solve(work_limit=self.work_limit, time_limit=self.time_limit, seed=problem.seed)
        if answer.status == "unknown":
            raise PolicyError(
                f"policy 'moccasin' found no plan before it met its limit of {answer.limit}; raise work_limit, "
                "time_limit or the budget"
            )
        schedule = None
        if answer.status != "infeasible":
            schedule = self.finished(problem, schedule_of(index, nodes.reruns(answer.stages), prune=True))
        if schedule is None or schedule.peak() > problem.budget:
            least, smallest = self._least(problem, index, nodes)
            proven = exact and schedule is None
            if proven or least.peak() > problem.budget:
                raise refused(problem, "moccasin", least, proven=proven, smallest=smallest, plans=self._class)
            # where not all is counted, a plan may hold more or less than is reckoned
            return planned(problem, self.finished(problem, least), status="feasible", bound=None, plans=self._class)
        is_best = exact and (answer.status == "optimal" or rerun_ns(problem, schedule) <= answer.bound)
        status, bound = "optimal" if is_best else "feasible", answer.bound if exact else None
        return planned(problem, schedule, status=status, bound=bound, limit=answer.limit, plans=self._class)

    def _least(self, problem: Problem, index: TraceIndex, nodes: Nodes) -> tuple[Schedule, bool]:
        """The plan of least memory that is found, and whether that is proven."""
        model = Retention(nodes, None, self.runs, "moccasin")
        answer = model.solve(work_limit=min(self.work_limit, FLOOR_WORK), time_limit=self.time_limit, seed=problem.seed)
        return schedule_of(index, nodes.reruns(answer.stages), prune=True), answer.status == "optimal"
