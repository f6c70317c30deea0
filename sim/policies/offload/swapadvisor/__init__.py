"""SwapAdvisor: a genetic search over the order of ops and the buffers of each size class, with Belady's swaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from sim.errors import Deadlock, Infeasible, PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.olla.graph import graph_of
from sim.policies.offload.swapadvisor.planning import Program
from sim.policies.offload.swapadvisor.search import Genes, Search
from sim.rewrites.rewrite import reorder
from sim.solvers.cascade import cascade
from sim.trace.index import TraceIndex


@dataclass(frozen=True, kw_only=True)
class SwapAdvisor(Policy):
    """Search for the order of ops, and for the buffers of each size, whose swaps take the least time.

    A chromosome is a topological order and an allocation: each distinct tensor size uses the buffers of one size class,
    and memory holds so many buffers of each. From it follow the swaps: walking the order, an op's tensors take
    buffers of their class; if none is free, the one whose next use is farthest leaves, after its latest use, without
    a copy where the host still has one; and a tensor returns as early as its own copy out and the last user of its
    buffer let it. Fitness is the time of a replay. Crossover takes the order of one parent up to a cut, and the rest in
    that of the other; mutation moves ops within their legal range, and changes classes and counts, which are
    repaired to fit.
    Source: Huang, Jin, Li, "SwapAdvisor: Push Deep Learning Beyond the GPU Memory Limit via Smart Swapping", ASPLOS
        2020, doi:10.1145/3373376.3378530. Rates of mutation and the selection are this package's.
    Bounds: never slower than its start, program order with a class for each size, or the finest classes whose buffers
        fit; no swap where everything fits. Each generation replays at most as many plans as the population has. Where
        no classes fit it keeps everything, and may be refused where `swap_all` is not; slower than that where buffers
        of one class are idle while another's are short. Both follow from the published size classes.
    Headline: 53 to 99 % of the throughput of unlimited memory at up to 12 times the memory's size. Here, on `p100` with
        16 images and 60 % of the memory, ResNet-50 reaches 60 %, 100 generations after 58 %.
    Departs: weights, gradients of weights, inputs, outputs and what is overwritten in place stay, beside the buffers.
        Buffers have no addresses: the plan never needs more than their bytes. The search ends after generations,
        not after a time. One device and one engine. Tensors beyond the host's capacity go on to the tier behind it.

    population: chromosomes that are alive.
    generations: how many times they are replaced.
    Notes of the plan: `start_ns`, `best_ns`: times of the start and of the best; `generations`, how many it took.
    Raises PolicyError for a population below 2, negative generations, several devices or engines, or a platform
    without a host tier.
    """

    moves = True
    rewrites = True
    needs = frozenset({"host"})
    solver = "genetic"
    slow = True
    fidelity = "reconstruction"
    rarely = "it moves and reorders only where memory is short"
    unseen = by_parameter(
        population="a search shows only where its start stalls; see its own tests",
        generations="a search shows only where its start stalls; see its own tests",
    )

    population: Annotated[int, Ge(2)] = 8
    generations: Annotated[int, Ge(0)] = 20

    def plan(self, problem: Problem) -> Plan:
        """The fittest plan."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"swapadvisor: {platform.name} has no host tier to swap to")
        _check(problem)
        try:
            whole = problem.evaluate(Plan(trace))
        except Infeasible:
            pass
        else:
            return Plan(trace, notes={"start_ns": whole.end, "best_ns": whole.end, "generations": 0})
        home, host, program = problem.home, platform.host.name, Program(trace)
        graph = graph_of(TraceIndex(trace), holds=True)

        def plan_of(genes: Genes) -> Plan | None:
            moves = program.swaps(genes.order, genes.allocation, home, host)
            if moves is None:
                return None
            new = trace if _is_program_order(genes.order) else reorder(trace, genes.order)
            return Plan(new, cascade(new, platform, moves, host))

        def time(genes: Genes) -> float:
            plan = plan_of(genes)
            try:
                return float("inf") if plan is None else problem.evaluate(plan).end
            except (Infeasible, Deadlock):
                return float("inf")

        search = Search(program, [set(earlier) for earlier in graph.before], problem.budget, time, problem.seed)
        start = search.start()
        if start is None:
            return Plan(trace)  # no classes fit: the run says what is short
        ideal = sum(problem.cost.op_ns(op) for op in range(len(trace.ops)))
        best, history = search.run(start, self.population, self.generations, ideal)
        notes = {"start_ns": search.time(start), "best_ns": history[-1], "generations": len(history) - 1}
        found = plan_of(best)
        return Plan(trace) if found is None else replace(found, notes=notes)


def _is_program_order(order: Sequence[int]) -> bool:
    return all(i == op for i, op in enumerate(order))


def _check(problem: Problem) -> None:
    """Raise PolicyError where one order does not decide what is held at once."""
    trace, platform = problem.trace, problem.platform
    if trace.devices > 1:
        raise PolicyError(f"swapadvisor plans for one device; this trace has {trace.devices}")
    main = platform.engine_for(0)
    for op, engine in sorted(trace.op_columns.engine.items()):
        if platform.engine_for(0, engine) != main:
            raise PolicyError(f"swapadvisor plans for one engine; op {trace.op_columns.name[op]!r} runs on {engine!r}")
