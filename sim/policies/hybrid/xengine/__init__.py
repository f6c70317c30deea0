"""XEngine: on which engine each op runs, what each memory keeps and what is recomputed, by one integer program."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt

from sim.errors import Infeasible, PolicyError, TiersimError
from sim.plan import Plan, Problem
from sim.policies.base import MANAGES, Policy, by_parameter
from sim.policies.hybrid.xengine.actions import plan_of
from sim.policies.hybrid.xengine.beside import all_on, fastest_beside
from sim.policies.hybrid.xengine.engines import choices_of, on_engines
from sim.policies.hybrid.xengine.program import Answer, Placement, Scene
from sim.solvers.nodes import beyond, nodes_of
from sim.solvers.schedule import TraceIndex
from sim.trace.graph import Trace
from sim.units import format_bytes

ATTEMPTS = 4
STEP = 25
"""The program is given this part of each memory less where the plan of an answer does not fit."""
PLANS = (
    "run each op on one engine, overwrite what has no producer where it lies, and before each op recompute earlier "
    "ones that produce no weight gradient, in program order, each at most once there, and copy each tensor at most "
    "once to each memory, from where it is resident then, with ops and copies one after the other"
)


@dataclass(frozen=True, kw_only=True)
class Xengine(Policy):
    """Engines, recomputation and residency are chosen together, within the capacity of each engine's memory.

    Checkmate's program for several engines: an op runs on one of them, with its operands in that engine's home tier;
    each memory has its own kept values and its own capacity, and a value that is read elsewhere is copied there, in
    the time of the link. The least sum of the times of ops, recomputations and copies is sought.
    Source: Schuler, Membarth, Slusallek, "XEngine: Optimal Tensor Rematerialization for Neural Networks in
        Heterogeneous Environments", ACM TACO 2022: a mixed-integer quadratic program. Its abstract was at hand, its
        rows were not; they are this package's reading of it, with each product of two choices in linear rows.
    Bounds: no schedule takes less than `bound_ns`, one op or copy after the other, that runs each op on one engine,
        recomputes before each op earlier ones, in order, each at most once there, and copies a tensor there at most
        once to each memory. With one engine and copies too expensive to make that is Checkmate's optimum. O(n^2)
        binaries for n ops, for each memory: 14 ops take a second or two, 30 may take the whole time limit.
    Departs: a recomputation runs on the engine of its op, since an op of a trace has one; the paper chooses per run.
        A tensor without a producer begins in the memory that the program chooses, and is copied to others; what
        overwrites it runs there. The program is serial, the engine is not: an op of another engine runs beside the
        device, so that a run may be faster than `serial_ns`, and two runs that need space at once may not fit. Where
        that happens the program is given less memory. A copy that cannot be planned since its source may not exist yet
        is made when it is read. What is recomputed is copied only for an op before which it is recomputed. A measured
        op stays where it was measured. An engine that reads another's memory in place is refused.

        On the shipped profiles of MT-3000 a second engine pays where a tensor that few bytes of are read exceeds the
        zone: with an embedding of 12.8 GB looked up and updated by the CPU and the products on the DSPs, a recommender
        runs in a tenth of the CPU's own time (`mt3000_survey`), and nothing else fits. Where all fits, what the
        CPU gains are launches, 10 us instead of 50, both assumed; in transformers a block has more ops than
        `max_ops`. On `mt3000_cluster` the CPU reads the clusters' memory in place, so that it is refused.

    max_ops: the most ops to plan for, those of the update counted, at least 2.
    node_limit: nodes of the search tree, of each search.
    time_limit: seconds of search in all.
    Notes of the plan: `program`, "optimal" only where the sum is proven to be the least (to one part in a million),
        else "feasible"; `serial_ns`, the sum; `bound_ns`; `engines`, how many ops run on each; `limit`: "", "nodes" or
        "time"; `time_limited`.
    Raises Infeasible where no plan was found that fits, saying so where none of the class does; PolicyError on several
        devices, a platform with one engine or one that reads another's memory in place, too many ops, or a limit
        reached before any plan was found.
    """

    recomputes = True
    moves = True
    rewrites = True
    needs = frozenset({"cpu"})
    solver = "milp"
    manages = MANAGES
    slow = True
    fidelity = "reconstruction"
    rarely = "where all fits on the fastest engine, nothing is copied, recomputed or run elsewhere"
    unseen = by_parameter(
        max_ops="beyond it a trace is refused; see its own tests",
        node_limit="graphs this small are solved at the root; see its own tests",
        time_limit="a search cut short finds the same plan, or none; see its own tests",
    )

    max_ops: Annotated[int, Ge(2)] = 40
    node_limit: Annotated[int, Ge(1)] = 100_000
    time_limit: Annotated[float, Gt(0)] = 60.0

    def plan(self, problem: Problem) -> Plan:
        """The trace with its ops on their engines; recomputations, moves and drops."""
        scene = self._scene(problem)
        whole = {m: problem.platform.tier(m).capacity for m in scene.choices.memories}
        room, limit, ends = dict(whole), "", time.monotonic() + self.time_limit
        for attempt in range(ATTEMPTS):
            answer = self._solved(Placement(scene, room), ends)
            limit = limit or answer.limit
            if not answer.engine:
                break
            plan = plan_of(scene, answer)
            try:
                problem.evaluate(plan)
            except TiersimError:
                room = {m: bytes - max(1, whole[m] // STEP) for m, bytes in room.items()}
                continue
            if attempt:  # what is proven of less memory is not proven of the whole
                answer = replace(answer, status="feasible", bound=0)
            return replace(plan, notes=self._notes(scene, answer, limit))
        if limit:
            raise PolicyError(
                f"policy 'xengine' found no plan before it met its limit of {limit}; raise node_limit or time_limit, "
                "or the budget"
            )
        raise self._refused(problem, scene, whole, ends, proven=not attempt)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """Ops on engines that are fast beside each other: a search, since the program knows of one after the other."""
        try:
            scene = self._scene(problem)
        except PolicyError:
            return {}
        starts = [all_on(scene.choices, m) for m in scene.choices.memories]
        return {"engines beside each other": fastest_beside(problem, scene, starts)}

    def too_long(self, trace: Trace) -> str:
        """Where there are more than `max_ops` ops."""
        return beyond(len(trace.op_columns.name), self.max_ops)

    def _scene(self, problem: Problem) -> Scene:
        """What there is to plan. Raises PolicyError where this policy cannot."""
        trace = problem.trace
        if trace.devices > 1:
            raise PolicyError(f"policy 'xengine' plans for one device; this trace has {trace.devices}")
        if why := self.too_long(trace):
            raise PolicyError(f"policy 'xengine' {why}")
        choices = choices_of(problem)
        able = on_engines(trace, choices, [engines[0] for engines in choices.able])
        runnable = replace(problem, trace=able, cost=problem.cost.over(able, problem.platform))
        index, ops = TraceIndex(trace), range(len(trace.op_columns.name))
        return Scene.of(index, nodes_of(runnable, index, [[op] for op in ops], apart=True), choices)

    def _solved(self, program: Placement, ends: float) -> Answer:
        return program.solve(node_limit=self.node_limit, time_limit=max(ends - time.monotonic(), 0.01))

    def _notes(self, scene: Scene, answer: Answer, limit: str) -> Mapping[str, object]:
        engines = scene.choices.platform.engines
        return {
            "program": answer.status,
            "serial_ns": serial_ns(scene, answer),
            "bound_ns": answer.bound,
            "engines": dict(Counter(engines[e].name for e in answer.engine)),
            "limit": limit,
            "time_limited": limit == "time",
        }

    def _refused(
        self, problem: Problem, scene: Scene, room: Mapping[str, int], ends: float, *, proven: bool
    ) -> Infeasible:
        """The error where nothing fits, with the least budget of any answer of the program."""
        home = problem.home
        least = self._solved(Placement(scene, room, least=home), ends)
        sizes = " and ".join(f"{format_bytes(bytes)} in {m!r}" for m, bytes in room.items())
        what = "no plan of this class fits" if proven else "no plan was found that fits"
        if least.engine:
            more = f"; with as much elsewhere, the program needs {format_bytes(least.used, digits=None)} in {home!r}"
        else:
            more = f"; whatever is in {home!r}, the rest is too small" if least.status == "infeasible" else ""
        about = f" (of plans that {PLANS})" if proven else ""
        return Infeasible(f"policy 'xengine': {what} {sizes}{more}{about}")


def serial_ns(scene: Scene, answer: Answer) -> int:
    """Nanoseconds of an answer's ops, recomputations and copies one after the other."""
    ns, platform, size = scene.choices.ns, scene.choices.platform, scene.index.size
    runs = [*range(len(answer.engine)), *(op for stage in answer.reruns for op in stage)]
    copies = sum(platform.move_ns(size[t], a, b) for _, t, a, b in answer.copies)
    return sum(ns[op, answer.engine[op]] for op in runs) + copies
