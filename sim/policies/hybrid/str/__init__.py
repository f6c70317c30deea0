"""STR: Checkmate's program with copies on the host, whole or relaxed, rounded and traced back to its sources."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from sim.errors import PolicyError
from sim.plan import Plan, Problem, Recompute
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.joint_optimal.returns import ahead, choice_with, copy_times
from sim.policies.hybrid.joint_optimal.trips import NODES, Choice, Replays
from sim.policies.hybrid.str.tracing import Tracing
from sim.policies.hybrid.str.windows import Windows
from sim.solvers.granularity import by_op
from sim.solvers.located import index_of
from sim.solvers.milp import Program
from sim.solvers.nodes import beyond, body
from sim.solvers.outcome import refused
from sim.solvers.rounding import tightest
from sim.solvers.schedule import schedule_of
from sim.trace.chain import before_update
from sim.trace.graph import Trace

ATTEMPTS = 6
STEP = 25
"""The program is given this part of the budget less where no plan of an answer fits."""
LEVELS = 12


@dataclass(frozen=True, kw_only=True)
class Str(Policy):
    """Swap where the link has time for it, recompute the rest, from what is resident or has a copy on the host.

    Checkmate's program with three more kinds of binaries: in each stage a value may be copied to the host, or
    back, and what has been copied stays there. Copies of one direction take no longer than the window of stages that
    they are made in, or the device waits; the objective is the time of recomputation and of waiting. A value that has
    left is resident again only when it has returned, so that no recomputation starts from what is not there.
    The fast way solves the linear relaxation, rounds what is resident and what has a copy on the host, and traces each
    missing value back to its sources: one with a copy is fetched if the link's time left in the window hides enough
    of it, another one is recomputed, its own sources found alike.
    Source: Wen et al., "STR: Hybrid Tensor Re-Generation to Break Memory Wall for DNN Training", IPDPS 2022; TPDS 2023.
        Neither the paper's exact program nor code was at hand: the rows are this package's reading of its parts.
    Bounds: the program has O(n^2) binaries for n ops, about four times Checkmate's. Without a host, or with a link that
        carries nothing, it is Checkmate's. Within a window it takes no note of when a copy is made: the engine may wait
        where the program does not (see `joint_optimal`).
    Departs: a window is as many stages as take the time of the longest copy, and a copy holds its space for all of it.
        The plan begins a copy back as late as it is in time on the link or, if that is faster or alone fits, when it is
        read. Of the plans that the thresholds of the rounding give the fastest that fits is taken, as the engine
        replays them; where none does, the program is given less memory.

    method: `rounding` is fast; `milp` is exact.
    max_ops: the most ops to plan for, update ops not counted, at least 2.
    time_limit: seconds of search in all, of `milp`.
    Raises Infeasible where no plan was found that fits; PolicyError on several devices or engines, too many ops, or a
        limit reached before any plan was found.
    """

    recomputes = True
    moves = True
    solver = "milp"
    slow = True
    fidelity = "reconstruction"
    rarely = "the fastest plan that fits seldom has to recompute or move anything on nets this small"
    other_values = by_parameter(method="milp")
    unseen = by_parameter(
        max_ops="beyond it a trace is refused; see its own tests",
        time_limit="a search cut short finds the same plan, or none; see its own tests",
    )

    method: Literal["rounding", "milp"] = "rounding"
    max_ops: Annotated[int, Ge(2)] = 60
    time_limit: Annotated[float, Gt(0)] = 60.0

    def too_long(self, trace: Trace) -> str:
        """Where there are more than `max_ops` ops before the update."""
        return beyond(before_update(trace), self.max_ops)

    def plan(self, problem: Problem) -> Plan:
        """Drops, recomputations and moves; notes: `rerun_ns`, `limit`, `time_limited`."""
        body(problem, "str")  # on one device and one engine
        index = index_of(problem)
        if schedule_of(index, {}).peak() <= problem.budget:
            return Plan(problem.trace, notes={"rerun_ns": 0, "limit": "", "time_limited": False})
        if why := self.too_long(problem.trace):
            raise PolicyError(f"policy 'str' {why}")
        nodes = by_op(problem, index, "str", apart=True)
        host = problem.platform.host.name if problem.platform.host else ""
        trips = copy_times(problem, nodes, host)
        replays = Replays(problem, index, nodes, host, ATTEMPTS * 2 * (LEVELS + 2))
        limit = ""
        room, ends = problem.budget - nodes.outside, time.monotonic() + self.time_limit
        for _ in range(ATTEMPTS):
            windows = Windows(nodes, trips)
            program = Program(nodes, room, elsewhere=windows if trips else None)
            tracing = Tracing(nodes, trips, windows.windows)
            if self.method == "milp":
                left = max(ends - time.monotonic(), 0.01)
                answer = program.minimise(node_limit=NODES, time_limit=left)
                limit = answer.limit
                back = [key for key, c in windows.back.items() if answer.stages and program.found[c] > 0.5]
                choices = iter([choice_with(nodes, answer.stages, back)] if answer.stages else [])
            else:
                choices = _rounded(program, windows, tracing)
            for choice in choices:
                for each in (ahead(nodes, trips, choice), choice):
                    replays.look(each)
            if replays.best is not None or limit:
                break
            room -= max(1, problem.budget // STEP)
        if replays.best is None and trips and not limit:  # as where the host is too small for what the program offloads
            whole = Program(nodes, problem.budget - nodes.outside)
            answer = whole.minimise(node_limit=NODES, time_limit=max(ends - time.monotonic(), 0.01))
            limit = answer.limit
            if answer.stages:
                replays.look(choice_with(nodes, answer.stages, []))
        if replays.best is None:
            if limit:
                raise PolicyError(
                    f"policy 'str' found no plan before it met its limit of {limit}; raise time_limit, or the budget"
                )
            raise refused(problem, "str", tightest(index, nodes)[0], proven=False, smallest=False)
        reruns = [action.op for action in replays.best.actions if isinstance(action, Recompute)]
        notes = {
            "rerun_ns": sum(problem.cost.op_ns(problem.trace.op_id(op)) for op in reruns),
            "limit": limit,
            "time_limited": limit == "time",
        }
        return replace(replays.best, notes=notes)


def _rounded(program: Program, windows: Windows, tracing: Tracing) -> Iterator[Choice]:
    """What source tracing makes of the relaxation at each threshold, what is kept the least first."""
    relaxed = program.relax()
    if relaxed is None:
        return
    levels = sorted({round(level, 6) for level in relaxed.keep.values() if level > 1e-6}, reverse=True)
    if len(levels) > LEVELS:
        levels = [levels[i * (len(levels) - 1) // (LEVELS - 1)] for i in range(LEVELS)]
    stages = len(program.nodes)
    for level in dict.fromkeys((2.0, *levels, 0.5)):
        kept = {key for key, far in relaxed.keep.items() if far >= level - 1e-6}
        least = min(level, 0.5)
        values = {v for _, v in windows.out}
        host = {(t, v) for v in values for t in range(stages) if windows.on_host(program.found, t, v) >= least - 1e-6}
        choice = tracing.choice(kept, host)
        if choice is not None:
            yield choice
