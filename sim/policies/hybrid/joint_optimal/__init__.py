"""Joint optimum: keep, recompute or offload each tensor, by one mixed-integer program with the link's time in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt

from sim.errors import PolicyError
from sim.plan import Plan, Problem, Recompute
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.joint_optimal.by_moments import WIDE, by_moments, drafted
from sim.policies.hybrid.joint_optimal.copies import Copies
from sim.policies.hybrid.joint_optimal.trips import ATTEMPTS, NODES, STEP, Replays, choice_of, movable
from sim.solvers.granularity import by_op
from sim.solvers.located import index_of
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes, body, counts_all
from sim.solvers.outcome import Answer, in_stages, once_ns, refused
from sim.solvers.rounding import tightest
from sim.solvers.schedule import schedule_of
from sim.solvers.trip import host_of, trip

PLANS = (
    "keep weights, inputs, outputs, weight gradients and what is overwritten in place, copy anything else to the host "
    "and back, before each op that precedes the update recompute earlier ones that produce no weight gradient, in "
    "program order, each at most once there, and bring nothing back there that is resident or recomputed there"
)
"""The plans that the program chooses from, and that its bound is about."""


@dataclass(frozen=True, kw_only=True)
class JointOptimal(Policy):
    """Keep, recompute or offload: the three are decided together, with what the link can carry meanwhile.

    Checkmate's program, in which a value may also leave for the host and return. Before each op it divides time in
    two: while earlier ops are recomputed, or the device waits, and while the op itself runs. In each the copies of one
    direction take together no longer than it lasts; a value leaves when its copy is complete, and takes space from
    the moment when its return begins. The objective is the time of recomputation and of waiting. The answer is made
    into a plan, replayed by the engine, and changed one decision at a time as long as that makes it faster. Where it
    stays above the bound, `hybrid`'s drafts are replayed, too.
    Source: this project. Recomputation is that of Jain et al., "Checkmate", MLSys 2020; copies beside it in one program
        as in Patil et al., "POET", ICML 2022, and Wen et al., "STR", IPDPS 2022, with time where those have costs.
    Bounds: no plan of the class is faster than `makespan_bound_ns`: the program counts memory only when an op begins
        and when it ends, and lets copies be cut into pieces; the engine does neither. Without a host it is Checkmate's
        program, whose optimum a plan always reaches. O(n^2) binaries for n ops, about eight times Checkmate's.
        Weights and states stay in both classes. So policies that move them, too (`g10`, `sentinel`, `zero_offload`,
        `weight_streaming`), are of neither, and may be faster than a bound, or fit where it says that nothing does.
    Departs: from no paper.

    max_ops: the most ops for that program, update ops not counted, at least 2. A larger trace has the linear program at
        moments, whose bound is about all plans that drop, recompute and copy in whatever way; its shares are rounded,
        and scheduled and improved as `hybrid` does it; the plan of `relax_and_fix` is looked at, too.
    moments: number of moments then.
    time_limit: seconds of search in all; the plan has no bound where the linear program takes longer. An exact program
        ends after 10,000 nodes, too, as `checkmate`'s does: `limit` is then "nodes".
    replays: runs of the engine at most, to make the answer into a plan.
    Notes of the plan: `status` is "optimal" only where its makespan is the bound (to one part in a million where times
        have no common unit above a ten-thousandth), else "feasible"; `optimal_among` and `bound_among`: the class;
        `makespan_bound_ns`, `rerun_ns`; `limit`: "", "nodes" or "time"; `time_limited`.
    Raises Infeasible where no plan was found that fits, saying so where none of the class does; PolicyError on several
        devices or engines, a host that the device reads in place, or a limit reached before any plan was
        found.
    """

    recomputes = True
    moves = True
    optimal = f"among plans that {PLANS}"
    solver = "milp"
    fidelity = "equations"
    slow = True
    rarely = "the fastest plan that fits seldom has to recompute or move anything on nets this small"
    other_values = by_parameter(max_ops=6, time_limit=1e-6)
    unseen = by_parameter(
        moments="it changes what is proven, seldom the plan; see its own tests",
        replays="on the small problems that were tried one run and 400 come to the same plan",
    )

    max_ops: Annotated[int, Ge(2)] = 60
    moments: Annotated[int, Ge(1)] = 6
    time_limit: Annotated[float, Gt(0)] = 20.0
    replays: Annotated[int, Ge(1)] = 400

    def in_class(self, plan: Plan) -> bool:
        """Whether a plan recomputes earlier ops before an op in order, each at most once there, and moves nothing."""
        return in_stages(plan)

    def plan(self, problem: Problem) -> Plan:
        """Drops, recomputations and moves."""
        ops, index = body(problem, "joint_optimal"), index_of(problem)
        host = host_of(problem, "joint_optimal")
        once = once_ns(problem)
        if schedule_of(index, {}).peak() <= problem.budget:
            return self._planned(problem, Plan(problem.trace), problem.evaluate(Plan(problem.trace)).end, once, "")
        if ops > self.max_ops:
            plan, end, more = by_moments(problem, index, host, self.moments, self.time_limit)
            bound = None if more is None else once + more
            return self._planned(problem, plan, end, bound, "time" if more is None else "", WIDE)
        exact = counts_all(index, ops)
        nodes = by_op(problem, index, "joint_optimal", apart=True)
        replays = Replays(problem, index, nodes, host, self.replays)
        ends = time.monotonic() + self.time_limit
        answer = self._search(problem, nodes, replays, once, ends)
        if replays.best is None:
            if answer.limit:
                raise PolicyError(
                    f"policy 'joint_optimal' found no plan before it met its limit of {answer.limit}; raise the budget"
                    f"{', or time_limit' if answer.limit == 'time' else ''}"
                )
            least, smallest = tightest(index, nodes)
            proven = exact and answer.status == "infeasible"
            raise refused(problem, "joint_optimal", least, proven=proven, smallest=smallest and not host, plans=PLANS)
        bound = once + answer.bound if exact else None
        if bound is None or replays.end > bound:
            for plan in drafted(problem):
                replays.take(plan, bound or 0)
        return self._planned(problem, replays.best, replays.end, bound, answer.limit)

    def _search(self, problem: Problem, nodes: Nodes, replays: Replays, once: int, ends: float) -> Answer:
        """Look at the plans that the program chooses, and say what it has proven.

        First without the host, which is quick, then with it. Where no plan of an answer fits, the program is
        given a little less memory.
        """
        room, host = problem.budget - nodes.outside, host_of(problem, "joint_optimal")
        trips = {v: trip(problem.platform, host, nodes.values[v].size) for v in movable(nodes)} if host else {}
        proven = Answer("unknown")
        for attempt in range(ATTEMPTS):
            for copies in (None, Copies(nodes, trips)) if trips else (None,):
                left = max(ends - time.monotonic(), 0.01)
                if copies is None and trips:
                    left /= 4
                program = Program(nodes, room, elsewhere=copies)
                answer = program.minimise(node_limit=NODES, time_limit=left)
                if not attempt and (copies is not None or not trips):
                    proven = answer
                if answer.stages:
                    replays.improve(choice_of(program, copies, answer.stages), once + proven.bound)
            if replays.best is not None or not answer.stages or answer.limit:
                break
            room -= max(1, problem.budget // STEP)
        if replays.best is None and answer.limit:  # with less memory: what it would have found nobody knows
            return replace(proven, status="unknown", limit=answer.limit)
        return proven

    def _planned(
        self, problem: Problem, plan: Plan, end: int, bound: int | None, limit: str, plans: str = PLANS
    ) -> Plan:
        """The plan with its notes. Where a CPU launches, times do not add up, and nothing is proven of actions."""
        bound = None if problem.platform.dispatch and plan.actions else bound
        proven = bound is not None and end <= bound * (1 + 1e-6)
        reruns = [action.op for action in plan.actions if isinstance(action, Recompute)]
        notes = {
            "status": "optimal" if proven else "feasible",
            "optimal_among": f"plans that {plans}" if proven else "",
            "bound_among": f"plans that {plans}",
            "makespan_bound_ns": bound,
            "rerun_ns": sum(problem.cost.op_ns(problem.trace.op_id(op)) for op in reruns),
            "limit": limit,
            "time_limited": limit == "time",
        }
        return replace(plan, notes=notes)
