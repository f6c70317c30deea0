"""POET: recompute or page, whichever takes the least energy, within a deadline, by one integer program."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from sim.declared import Time
from sim.errors import Infeasible, PolicyError
from sim.plan import Plan, Problem, Recompute
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.joint_optimal.returns import ahead, choice_with, copy_times
from sim.policies.hybrid.joint_optimal.trips import ATTEMPTS, NODES, STEP, Replays
from sim.policies.hybrid.poet.pages import Pages
from sim.policies.hybrid.poet.prices import Prices, once, prices_of
from sim.solvers.granularity import by_op
from sim.solvers.located import index_of
from sim.solvers.milp import Program
from sim.solvers.nodes import Nodes, beyond, body, counts_all
from sim.solvers.outcome import Answer, refused
from sim.solvers.rounding import tightest
from sim.solvers.schedule import schedule_of
from sim.solvers.trip import Trip, host_of
from sim.trace.chain import before_update
from sim.trace.graph import Trace
from sim.units import format_bytes, format_time, parse_time

PLANS = (
    "keep weights, inputs, outputs, weight gradients and what is overwritten in place, before each op that precedes "
    "the update recompute earlier ones that produce no weight gradient, in program order, each at most once there, "
    "copy anything else to the host from before that on, hold what leaves and nothing reads there until the op has "
    "ended, and when an op has ended bring back what was copied before and is neither resident nor recomputed there"
)
"""The plans that the program chooses from, and that its bound is about."""


@dataclass(frozen=True, kw_only=True)
class Poet(Policy):
    """Recompute a result, or copy it to the host and back: whichever takes the least energy in all, within a deadline.

    Checkmate's program with two more kinds of binaries: a value that is resident when a stage begins may be copied to
    the host in it, where it then stays; and what is there may be copied back when a stage ends. The objective is
    the energy of recomputation and of copies: the engine's power for as long as an op takes, and the energy per byte of
    the links. Where the profile does not state the energy of every engine and link it is their time, as if nothing
    overlapped. The plan that the answer stands for is replayed twice, with copies back when they are read and ahead of
    that, and the faster is taken.
    Source: Patil, Jain, Dutta, Stoica, Gonzalez, "POET: Training Neural Networks on Tiny Devices with Integrated
        Rematerialization and Paging", ICML 2022: its program, and its public code.
    Bounds: no plan of the class takes less energy (`energy_bound_j`), or time of ops and copies (`work_bound_ns`). Its
        copies take no time in the program, the engine's do: the makespan is not minimised. O(n^2) binaries for n ops,
        about three times Checkmate's.
    Departs: what nothing reads in a stage cannot be freed in it, as published; the public code has no such row, and
        may free what was never held. The rows for freeing are those of `sim.solvers.milp`, with the same integer
        solutions. Weights, inputs, weight gradients once produced, and the update are outside, several results of an
        op and workspace count as in the engine, and an op that produces a weight gradient runs once.
        The deadline bounds ops and copies one after another, as if nothing overlapped, so that the
        run, in which copies run beside ops, never ends later; the public code's row counts ops alone. The host is taken
        to be large: copies to tiers behind it cost nothing in the program.

    deadline: when the run must have ended, in ns or as a text such as "20 ms"; None for no deadline.
    restore_by: `recompute` and `copy` are the ablations, without copies and without recomputation.
    max_ops: the most ops to plan for, update ops not counted, at least 2.
    time_limit: seconds of search in all.
    Notes of the plan: `minimises`: "energy" or "time of ops and copies"; `status` is "optimal" only where the plan
        costs no more than the bound (to one part in a million), else "feasible"; `optimal_among` and `bound_among`: the
        class; `energy_bound_j` or `work_bound_ns`; `rerun_ns`; `limit`: "" or "time"; `time_limited`.
    Raises Infeasible where no plan was found that fits, naming a budget that does, or none that meets the
        deadline, naming the least time; PolicyError on several devices or engines, a host that the device reads in
        place, too many ops, or a limit reached before any plan was found.
    """

    recomputes = True
    moves = True
    solver = "milp"
    slow = True
    fidelity = "equations"
    rarely = "the plan that costs least seldom has to recompute or move anything on nets this small"
    other_values = by_parameter(restore_by="recompute", deadline=1)
    unseen = by_parameter(
        max_ops="beyond it a trace is refused; see its own tests",
        time_limit="a search cut short finds the same plan, or none; see its own tests",
    )

    deadline: Time | None = None
    restore_by: Literal["both", "recompute", "copy"] = "both"
    max_ops: Annotated[int, Ge(2)] = 60
    time_limit: Annotated[float, Gt(0)] = 60.0

    @property
    def ends(self) -> int | None:
        """The deadline in ns."""
        return parse_time(self.deadline) if isinstance(self.deadline, str) else self.deadline

    def too_long(self, trace: Trace) -> str:
        """Where there are more than `max_ops` ops before the update."""
        return beyond(before_update(trace), self.max_ops)

    def plan(self, problem: Problem) -> Plan:
        """Drops, recomputations and moves."""
        problem = problem.on_engines()  # what it minimises has no part of a CPU that launches
        ops, index = body(problem, "poet"), index_of(problem)
        host = "" if self.restore_by == "recompute" else host_of(problem, "poet")
        serial, _ = once(problem)
        if schedule_of(index, {}).peak() <= problem.budget:
            if self.ends is not None and serial > self.ends:
                raise self._late(problem, serial, least_is_known=True)
            return self._planned(problem, Plan(problem.trace), 0, Answer("optimal"), None)
        if why := self.too_long(problem.trace):
            raise PolicyError(f"policy 'poet' {why}")
        exact = counts_all(index, ops)
        nodes = by_op(problem, index, "poet", apart=True)
        if self.restore_by == "copy":
            nodes = replace(nodes, last_rerun=range(ops))
        times = copy_times(problem, nodes, host)
        prices = prices_of(problem, nodes, times, host)
        replays = Replays(problem, index, nodes, host, 2 * ATTEMPTS)
        until = time.monotonic() + self.time_limit
        answer = self._search(problem, nodes, prices, times, replays, serial, until)
        if replays.best is None or self._is_late(replays.end):
            if self.ends is not None and not answer.limit:
                answer = self._in_time(problem, nodes, times, serial, until)
            if answer.limit:
                raise PolicyError(
                    f"policy 'poet' found no plan before it met its limit of {answer.limit}; raise time_limit, or the "
                    "budget"
                )
            least, smallest = tightest(index, nodes)
            proven = exact and answer.status == "infeasible"
            raise refused(problem, "poet", least, proven=proven, smallest=smallest and not host, plans=PLANS)
        cost = prices.of_plan(replays.best, nodes, problem.home)
        return self._planned(problem, replays.best, cost, answer if exact else None, prices.joules)

    # ---- search ------------------------------------------------------------------------------

    def _search(
        self,
        problem: Problem,
        nodes: Nodes,
        prices: Prices,
        times: dict[int, Trip],
        replays: Replays,
        serial: int,
        until: float,
    ) -> Answer:
        """Replay the plans of the program's answer, and say what it has proven.

        Where none fits, the program is given less memory, and where none is in time, less of that.
        """
        room = problem.budget - nodes.outside
        spare = None if self.ends is None else self.ends - serial
        proven = Answer("unknown")
        for attempt in range(ATTEMPTS + 1):
            if attempt == ATTEMPTS:  # as where the host is too small for what the program copies there
                room, prices = problem.budget - nodes.outside, replace(prices, trips={})
            program, pages = _program(nodes, prices, times, room, spare)
            answer = program.minimise(node_limit=NODES, time_limit=max(until - time.monotonic(), 0.01))
            if not attempt:
                proven = answer
            if not answer.stages:
                if 0 < attempt < ATTEMPTS and not answer.limit:
                    continue
                break
            choice = choice_with(nodes, answer.stages, pages.brought(program.found))
            for each in (ahead(nodes, times, choice), choice):
                replays.look(each)
            if replays.best is not None and not self._is_late(replays.end):
                break
            if replays.best is None:
                room -= max(1, problem.budget // STEP)
            elif spare is not None and self.ends is not None:
                spare -= replays.end - self.ends
        return proven

    def _is_late(self, end: int) -> bool:
        return self.ends is not None and end > self.ends

    def _in_time(self, problem: Problem, nodes: Nodes, times: dict[int, Trip], serial: int, until: float) -> Answer:
        """The least time of plans that fit. Raises Infeasible where there are any, but none that meets the deadline."""
        program, _ = _program(nodes, Prices(None, nodes.cost, times), times, problem.budget - nodes.outside, None)
        answer = program.minimise(node_limit=NODES, time_limit=max(until - time.monotonic(), 1.0))
        if self.ends is not None and answer.stages and serial + answer.bound > self.ends:
            raise self._late(problem, serial + answer.bound, least_is_known=answer.status == "optimal")
        return answer

    # ---- what it says ------------------------------------------------------------------------

    def _late(self, problem: Problem, least: int, *, least_is_known: bool = True) -> Infeasible:
        what = "the least time is" if least_is_known else "any takes at least"
        return Infeasible(
            f"policy 'poet': no plan of this class that fits {format_bytes(problem.budget)} meets the deadline of "
            f"{format_time(self.ends or 0)}; {what} {format_time(least)}, ops and copies one after another "
            f"(of plans that {PLANS})"
        )

    def _planned(self, problem: Problem, plan: Plan, cost: int, answer: Answer | None, joules: float | None) -> Plan:
        """The plan with its notes. cost: beyond every op run once, in units of so many joules, or in ns."""
        serial, energy = once(problem)
        base, unit = (float(serial), 1.0) if energy is None else (energy, joules or 0.0)
        bound = None if answer is None else base + unit * answer.bound
        proven = bound is not None and base + unit * cost <= bound * (1 + 1e-6)
        limit = answer.limit if answer else ""
        within = "" if self.ends is None else f", and take at most {format_time(self.ends)}, one thing after another"
        among = f"plans that {PLANS}{within}"
        notes = {
            "minimises": "time of ops and copies" if energy is None else "energy",
            "status": "optimal" if proven else "feasible",
            "optimal_among": among if proven else "",
            "bound_among": among,
            "work_bound_ns": round(bound) if bound is not None and energy is None else None,
            "energy_bound_j": bound if energy is not None else None,
            "rerun_ns": sum(
                problem.cost.op_ns(problem.trace.op_id(action.op))
                for action in plan.actions
                if isinstance(action, Recompute)
            ),
            "limit": limit,
            "time_limited": limit == "time",
        }
        return replace(plan, notes=notes)


def _program(
    nodes: Nodes, prices: Prices, times: dict[int, Trip], room: int, spare: int | None
) -> tuple[Program, Pages]:
    """The program. spare: ns that recomputation and copies may take together, None for any."""
    pages = Pages(nodes, prices.trips)
    copies = [price for trip in prices.trips.values() for price in (trip.out, trip.back)]
    program = Program(replace(nodes, cost=prices.nodes), room, elsewhere=pages, prices=copies)
    if spare is not None:
        work = [(column, nodes.cost[i]) for (t, i), column in program.run.items() if i < t] + pages.work(times)
        unit = max((ns for _, ns in work), default=0) / 1000 or 1.0
        program.row([(column, ns / unit) for column, ns in work], most=spare / unit)
    return program, pages
