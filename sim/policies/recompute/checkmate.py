"""Checkmate: the fewest nanoseconds of reruns within the budget, by mixed-integer programming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import Infeasible, PolicyError, near
from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.solvers.grain import by_op, by_stage
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes
from sim.solvers.rounding import rounded
from sim.solvers.runs import Ledger, Runs, runs
from sim.units import format_bytes

METHODS = ("milp", "rounding")
GRAINS = ("op", "stage")
ATTEMPTS = 4
TIGHTER = (1.0, 0.9)  # parts of the budget for which the relaxation is rounded


@dataclass(frozen=True, kw_only=True)
class Checkmate(Policy):
    """Before each op run some earlier ops again, in order and each at most once, for the least total time.

    Source: Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez, "Checkmate: Breaking the Memory
        Wall with Optimal Tensor Rematerialization", MLSys 2020: the frontier-advancing program, and the
        two-phase rounding of its linear relaxation.
    Bounds: relaxation <= optimum <= rounding. The program has O(n^2) binaries for n ops and O(n (n + edges))
        rows; 61 ops take seconds, the relaxation a tenth of that.
    Departs: what is freed when is said by other rows than the paper's, with the same whole solutions and a
        higher bound (see `sim.solvers.milp`). A result that nothing reads any more goes at once, as in the
        paper; the public code keeps it until the stage ends. Several results of an op, workspace and in-place
        writes count as in the engine. Weights, inputs, weight gradients once made, and the update are outside.
        The known plan that the search starts from is the rounding's. Rounding tries many thresholds, at the
        whole budget and at 0.9 of it, and takes the cheapest plan that fits exactly.
        HiGHS, through SciPy, chooses its number of threads; its search does not depend on it.

    method: "milp" is exact; "rounding" is fast, and may find nothing where there is a plan.
    grain: "op", or "stage": the ops of a stage of the chain (of a layer where it is none) run again together,
        and what they read and leave is taken to lie there meanwhile. None: "op" up to `max_ops`, beyond
        that "stage" for rounding, an error for the exact method.
    max_ops: the most nodes to plan for, update ops not counted, at least 2.
    node_limit: nodes of the search tree. time_limit: seconds of search.
    Notes of the plan: `status` is "optimal" only where proven (to one part in a million of the rerun time
        where costs have no common unit above a ten-thousandth), "feasible" for rounding, for stages, and when
        a limit was met; `bound_ns`: no plan of this class has less rerun time; `rerun_ns`; `limit`: "",
        "nodes" or "time"; `time_limited`.
    Raises Infeasible where no plan fits (proven for "milp") naming a budget that does; PolicyError on several
        devices or engines, too many ops, or a limit met before any plan was found.
    """

    recomputes = True
    optimal = True
    solver = "milp"
    slow = True

    method: str = "milp"
    grain: str | None = None
    max_ops: int = 100
    node_limit: int = 10_000
    time_limit: float = 300.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise PolicyError(f"policy 'checkmate': method is {self.method!r}{near(self.method, METHODS)}")
        if self.grain is not None and self.grain not in GRAINS:
            raise PolicyError(f"policy 'checkmate': grain is {self.grain!r}{near(self.grain, GRAINS)}")
        if self.max_ops < 2 or self.node_limit < 1 or self.time_limit <= 0:
            raise PolicyError("policy 'checkmate': max_ops >= 2, node_limit >= 1 and time_limit > 0 are needed")

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations."""
        ledger = Ledger(problem.trace)
        plain = runs(ledger, {})
        if plain.peak() <= problem.budget:
            return noted(problem, plain, "optimal", 0)
        nodes, exact = self._nodes(problem, ledger)
        known, bound = by_rounding(problem, ledger, nodes)
        if bound is None and (exact or known is None):
            raise infeasible(problem, ledger, nodes, "checkmate", proven=exact)
        found, answer = known, Answer("unknown", bound or 0)
        if self.method == "milp" and not (known and rerun_ns(problem, known) <= answer.bound):
            found, answer = self._search(problem, ledger, nodes, known)
        if found is None:
            if answer.limit:
                raise PolicyError(
                    f"policy 'checkmate' met its limit ({answer.limit}) before it found a plan: raise node_limit "
                    "or time_limit, or give more budget"
                )
            raise infeasible(problem, ledger, nodes, "checkmate", proven=exact and answer.status == "infeasible")
        if exact and not answer.limit and rerun_ns(problem, found) <= answer.bound:
            return noted(problem, found, "optimal", answer.bound)
        proven = exact and answer.status == "optimal"
        return noted(problem, found, "optimal" if proven else "feasible", answer.bound, answer.limit)

    def _nodes(self, problem: Problem, ledger: Ledger) -> tuple[Nodes, bool]:
        """What to plan for, and whether that is op by op."""
        ops = body(problem, "checkmate")
        grain = self.grain or ("op" if ops <= self.max_ops or self.method == "milp" else "stage")
        if grain == "stage":
            return by_stage(problem, ledger, "checkmate", self.max_ops), False
        if ops > self.max_ops:
            raise PolicyError(
                f"policy 'checkmate' plans op by op for {self.max_ops} ops at most (max_ops); there are {ops}: "
                "take grain='stage', method='rounding', or the policy 'rockmate'"
            )
        return by_op(problem, ledger, "checkmate"), True

    def _search(self, problem: Problem, ledger: Ledger, nodes: Nodes, known: Runs | None) -> tuple[Runs | None, Answer]:
        """The best plan that fits exactly, and what the last search said."""
        room = problem.budget - nodes.outside
        at_most = None if known is None else rerun_ns(problem, known)
        for _ in range(ATTEMPTS):
            program = Program(nodes, room, at_most=at_most)
            answer = program.minimise(node_limit=self.node_limit, time_limit=self.time_limit)
            if answer.status in ("infeasible", "unknown"):
                return known, answer
            found = runs(ledger, nodes.again(answer.stages), prune=True)
            excess = found.peak() - problem.budget
            if excess <= 0:
                better = known is None or rerun_ns(problem, found) <= rerun_ns(problem, known)
                return found if better else known, answer
            room -= excess  # the solver's tolerance let more lie there than there is room for
        return known, Answer("unknown", answer.bound, limit="tolerance")
