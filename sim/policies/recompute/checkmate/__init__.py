"""Checkmate: the least recomputation time within the budget, by mixed-integer programming."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from sim.declared import OneOf
from sim.deprecation import formerly
from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Beside, by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.checkmate.segments import segmented
from sim.solvers.granularity import GRANULARITIES, by_op, by_stage
from sim.solvers.located import index_of
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes, body, counts_all
from sim.solvers.outcome import STAGED, Answer, in_stages, planned, refused, rerun_ns
from sim.solvers.rounding import BUDGETS, Cheapest, by_rounding, tightest
from sim.solvers.schedule import Schedule, TraceIndex, schedule_of
from sim.trace.chain import FORWARD

ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Checkmate(RecomputationPlanner):
    """Before each op recompute some earlier ops, in order and each at most once, for the least total time.

    Source: Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez, "Checkmate: Breaking the Memory
        Wall with Optimal Tensor Rematerialization", MLSys 2020: the frontier-advancing program, and the
        two-phase rounding of its linear relaxation.
    Bounds: relaxation <= optimum <= rounding. The optimum is over plans on one device that keep weights, inputs,
        weight gradients and values still to be overwritten in place, and before each op that precedes the update
        recompute earlier ones that produce no weight gradient, in program order, each at most once there, and what was
        overwritten in place once more for each op. Another order, or an input dropped after its last read, may need
        less. The program has O(n^2) binaries for n ops and O(n (n + edges)) rows; 61 ops take seconds, the relaxation a
        tenth of that.
    Departs: other rows than the paper's say what is freed when, with the same integer solutions and a
        higher bound (see `sim.solvers.milp`). A result is freed right after its last read, as in the
        paper; the public code keeps it until the stage ends. Several results of an op, workspace and in-place
        writes count as in the engine. Weights, inputs, weight gradients once produced, and the update are outside;
        an op that produces a weight gradient runs once.
        Where the search finds nothing better, the plan is the fastest that fits among roundings at the whole
        budget and Chen et al.'s segments of each length; the authors start their solver from the fastest of Chen's and
        other plans, which SciPy does not allow. Rounding tries many thresholds and some random draws, for several
        budgets, and takes the cheapest plan that fits exactly; the public code tries nine thresholds, for nine tenths
        of the budget. Both round each value of each stage independently, which near the smallest budget takes several
        times the optimum (why: `sim.solvers.rounding`).
        The search perturbs costs at random by up to 1 %, as the public code does; once it has proven its plan best, it
        is repeated with the exact costs.
        SciPy cannot set HiGHS's number of threads; so far the same problem has given the same plan.

    method: "milp" is exact; "rounding" is fast, and may find nothing where there is a plan. None: "milp" up to
        `max_ops`, beyond that "rounding".
    granularity: "op", or "stage": the ops of a stage of the chain (of a layer where the trace is not a chain) are
        recomputed together, and their inputs and results are taken to be resident meanwhile; an op that can't be
        recomputed, such as one that updates running statistics in place, is left out. None: "op" up to `max_ops`,
        beyond that "stage" for rounding, an error for the exact method where it was asked for.
    max_ops: the most nodes to plan for, update ops not counted, at least 2.
    node_limit: nodes of the search tree, of each search.
    time_limit: seconds of search in all.
    Notes of the plan: `status` is "optimal" only where proven (to one part in a million of the recomputation time
        where costs have no common unit above a ten-thousandth), else "feasible": rounding above the bound,
        stages, a limit reached; `bound_ns`: no plan of this class recomputes for less time; `rerun_ns`; `limit`: "",
        "nodes" or "time"; `time_limited`.
    Raises Infeasible where no plan of that class fits (proven for "milp") naming a budget that does; PolicyError on
        several devices or engines, too many ops, or a limit reached before any plan was found.
    """

    recomputes = True
    optimal = f"among plans that {STAGED}"
    solver = "milp"
    fidelity = "equations"
    slow = True
    rarely = "the cheapest plan that fits seldom recomputes anything on nets this small"
    other_values = by_parameter(
        remove_unnecessary=Beside(True, method="rounding"),
        method="rounding",
        granularity="stage",
        max_ops=Beside(6, granularity="stage"),
        node_limit=1,
        time_limit=1e-6,
    )
    unseen = by_parameter(node_limit="graphs this small are solved at the root; see its own tests")

    method: Literal["milp", "rounding"] | None = None
    granularity: Annotated[str, OneOf(GRANULARITIES)] | None = field(default=None, metadata=formerly("grain"))
    max_ops: Annotated[int, Ge(2)] = 100
    node_limit: Annotated[int, Ge(1)] = 10_000
    time_limit: Annotated[float, Gt(0)] = 300.0

    def in_class(self, plan: Plan) -> bool:
        """Whether earlier ops are recomputed before an op in order, each at most once there, and nothing else."""
        return in_stages(plan)

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        index = index_of(problem)
        plain = schedule_of(index, {})
        if plain.peak() <= problem.budget:
            return planned(problem, plain, status="optimal", bound=0)
        nodes, exact = self._nodes(problem, index)
        method = self.method or ("milp" if body(problem, "checkmate") <= self.max_ops else "rounding")
        budgets = BUDGETS if method == "rounding" else 1
        search, bound = by_rounding(
            problem, index, nodes, lambda schedule: self.finished(problem, schedule), budgets=budgets
        )
        if method == "milp":
            phase = problem.trace.op_columns.phase
            search.look(segmented(nodes, [phase[part[0]] == FORWARD for part in nodes.members]))
        known, least, smallest = search.best, search.best, False
        if least is None:
            least, smallest = tightest(index, nodes)
            if least.peak() <= problem.budget:
                known = self.finished(problem, least)
        impossible = exact and bound is None
        if known is not None and (method == "rounding" or rerun_ns(problem, known) == bound):
            status = "optimal" if exact and rerun_ns(problem, known) == bound else "feasible"
            return planned(problem, known, status=status, bound=bound if exact else None)
        if method == "rounding" or impossible:
            raise refused(problem, "checkmate", least, proven=impossible, smallest=smallest)
        search.best = known
        schedule, answer = self._search(problem, index, nodes, search, exact)
        if schedule is not None:
            bound = max(bound or 0, answer.bound) if exact else None
            proven = exact and (answer.status == "optimal" or rerun_ns(problem, schedule) == bound)
            status = "optimal" if proven else "feasible"
            return planned(problem, schedule, status=status, bound=bound, limit=answer.limit)
        if answer.status == "infeasible" or not answer.limit:
            # no limit reached: what the search finds exceeds the budget at an op that the program does not consider
            proven = exact and answer.status == "infeasible"
            raise refused(problem, "checkmate", least, proven=proven, smallest=smallest)
        raise PolicyError(
            f"policy 'checkmate' found no plan before it met its limit of {answer.limit}; raise node_limit or "
            f"time_limit, or the budget: {least.peak():,} B are known to do"
        )

    def _nodes(self, problem: Problem, index: TraceIndex) -> tuple[Nodes, bool]:
        """What to plan for, and whether that is op by op and counts all memory."""
        ops = body(problem, "checkmate")
        granularity = self.granularity or ("op" if ops <= self.max_ops or self.method == "milp" else "stage")
        if granularity == "stage":
            return by_stage(problem, index, "checkmate", self.max_ops), False
        if ops > self.max_ops:
            raise PolicyError(
                f"policy 'checkmate' plans op by op for {self.max_ops} ops at most (max_ops); there are {ops}: "
                "take granularity='stage', method='rounding', or the policy 'rockmate'"
            )
        return by_op(problem, index, "checkmate"), counts_all(index, ops)

    def _search(
        self, problem: Problem, index: TraceIndex, nodes: Nodes, start: Cheapest, exact: bool
    ) -> tuple[Schedule | None, Answer]:
        """The best plan that fits exactly, and what the search said of it.

        First with costs perturbed by up to 1 %, as in the public code, and without the known plan: a row that
        excludes more expensive plans hides from the solver those from which it finds better ones. Then, where that
        ended with a proof and more is asked, once more with the exact costs and that row, which the proof needs.
        """
        known, at_most = start.best, start.reckoned
        whole, ends = problem.budget - nodes.outside, time.monotonic() + self.time_limit
        room, bound = whole, 0
        proving, answer = False, Answer("unknown")
        for _ in range(ATTEMPTS):
            left = max(ends - time.monotonic(), 0.01)
            program = Program(nodes, room, at_most=round(at_most) if proving else None)
            answer = program.minimise(node_limit=self.node_limit, time_limit=left)
            if room < whole:  # what is proven of less than the budget is not proven of the budget
                answer = replace(answer, bound=bound, status="feasible" if answer.stages else "unknown")
            bound = max(bound, answer.bound)
            if not answer.stages:
                break
            schedule = schedule_of(index, nodes.reruns(answer.stages), prune=True)
            excess = schedule.peak() - problem.budget
            if excess > 0:
                room -= excess  # the solver's tolerance lets a plan exceed the budget a little
                continue
            at_most = min(at_most, sum(nodes.cost[i] for stage in answer.stages for i in stage))
            schedule = self.finished(problem, schedule)
            if known is None or rerun_ns(problem, schedule) <= rerun_ns(problem, known):
                known = schedule
            if proving or answer.limit or not exact or answer.bound == rerun_ns(problem, known):
                return known, answer
            proving = True
        return known, replace(answer, status="infeasible" if answer.status == "infeasible" else "feasible")
