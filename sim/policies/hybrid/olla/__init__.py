"""OLLA: first the order of the ops, then the addresses of what they hold, each by an integer program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated

from annotated_types import Ge, Gt

from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Beside, PlansFrom, Policy, by_parameter
from sim.policies.hybrid.olla.address_program import Placed, lowest
from sim.policies.hybrid.olla.addresses import Lifetime, laid_out, lifetimes, most_live
from sim.policies.hybrid.olla.graph import Graph, graph_of
from sim.policies.hybrid.olla.listing import by_net
from sim.policies.hybrid.olla.order_program import Found, OrderProgram
from sim.policies.hybrid.olla.trade import actions_of, host_of, movable, order_of, recomputable
from sim.policies.hybrid.olla.trade_program import Trade, TradeProgram
from sim.policies.sharing import shared
from sim.policies.traits import Managed
from sim.rewrites.holding import points, with_releases
from sim.rewrites.order import as_early
from sim.rewrites.rewrite import reorder
from sim.solvers.located import index_of
from sim.trace.graph import Trace
from sim.trace.index import TraceIndex
from sim.trace.op import PHASE_CODE

NODES = 100_000
UPDATE = PHASE_CODE["update"]


@dataclass(frozen=True, kw_only=True)
class Olla(Policy):
    """Run the ops in the order that holds least at its peak; then give each tensor an address, without holes.

    An order keeps every dependence: an op follows the producers of what it reads, and one that writes in place follows
    all readers of what it overwrites. Known orders are program order, program order with each op of the update as early
    as possible, and two by list scheduling. If none of them reaches the lower bound (what has been taken and is still
    needed in every order while some op runs) and there are few ops, the integer program looks for a lower one: which op
    runs at which step of its span, and what is preserved from step to step. Addresses are for tiers with the
    `planned` allocator; lifetimes that nest are stacked as a pyramid from the bottom, the others lie at the lowest free
    offset; if they end higher than the most bytes that are ever live and are few, the second program decides of each
    two that meet which lies below the other.
    Source: Steiner et al., "MODeL: Memory Optimizations for Deep Learning" (first called OLLA), ICML 2023,
        arXiv:2210.12924: order and addresses as two programs, spans, early updates, the pyramid.
    Bounds: the peak is never above program order's, with the same ops and no recomputation or copy. For n ops and b
        blocks of memory: O(n^2) binaries for the order, O(b^2) for addresses; heuristics O(n log n), O(b^2), and O(n b)
        for the bound. ResNet-50 (425 ops) has its order in 0.1 s and addresses in 3 s, GPT-2 small in 0.3 s and 1 s.
    Departs: one op per step where the paper's steps may have several; edges that force updates early give a known
        order here, and restrict no program; the lower bound over ancestors and descendants is ours, as are list
        schedules as known orders. Workspaces have addresses from the tier's top; the layout leaves space for them.
        Random ops keep their seeds wherever they run. What has no producer, what is overwritten in place and outputs
        are neither spilled nor rematerialised, and nothing is spilled to a host that the device reads in place. The
        program counts bytes, as the paper's does, and a run the time of each copy. A plan of this program gives no
        addresses, since what returns from the host has none. On larger traces another policy can spill or recompute in
        the order found here: `olla + hybrid`.

    holds: whether what the program holds beyond its last reader is held until the same op. The paper's executor runs
        a graph, which holds nothing.
    spill, rematerialise: whether, where no order fits the budget, blocks may leave for the host and return, and ops may
        be recomputed, decided together with the order: the least bytes copied (twice a block) and generated.
    more_steps: how many recomputations at most.
    max_ops: the most ops for the program of the order; 12 take seconds, 16 up to a minute, on graphs with many orders.
    max_blocks: the most blocks and workspaces for the program of the addresses.
    time_limit: seconds for each program; a plan after one that took longer is `time_limited`.
    Notes of the plan: `peak_bytes` and `program_order_bytes`, the peaks of both orders; `bound_bytes`: no order's peak
        is lower; `order_status`: "optimal" or "feasible"; `order_by`: "program order", "early updates", "list
        scheduling" or "integer program". With addresses `end_bytes`, where the highest block ends;
        `live_bytes`, the most that is live; `address_status`. Where no order fits and there is a choice `trade_status`:
        "optimal", "feasible", "infeasible" or "unknown"; the peaks are those without it. `limit`: "", "time" or
        "nodes"; `time_limited`.
    Raises PolicyError on several devices or engines, and where more than `max_ops` ops are to be spilled among or
        rematerialised.
    """

    rewrites = True
    solver = "milp"
    saves = MappingProxyType({"release": "its executor runs a graph, which holds nothing beyond the last reader"})
    fidelity = "equations"
    other_values = by_parameter(
        holds=True,
        spill=True,
        rematerialise=True,
        more_steps=Beside(1, rematerialise=True),
        max_ops=0,
        max_blocks=0,
        time_limit=1e-6,
    )
    unseen = by_parameter(max_blocks="it changes addresses, which no log shows; see its own tests")

    holds: bool = False
    spill: bool = False
    rematerialise: bool = False
    more_steps: Annotated[int, Ge(1)] = 3
    max_ops: Annotated[int, Ge(0)] = 12
    max_blocks: Annotated[int, Ge(0)] = 30
    time_limit: Annotated[float, Gt(0)] = 60.0

    @property
    def manages(self) -> tuple[Managed, ...]:  # type: ignore[override]
        """An order owns nothing; so another policy can decide what leaves."""
        return ("activations", "gradients") if self.spill or self.rematerialise else ()

    @property
    def moves(self) -> bool:  # type: ignore[override]
        """Whether it may spill."""
        return self.spill

    @property
    def recomputes(self) -> bool:  # type: ignore[override]
        """Whether it may rematerialise."""
        return self.rematerialise

    @property
    def plans_from(self) -> PlansFrom:  # type: ignore[override]
        """Whether anything is spilled or rematerialised depends on the budget."""
        return "problem" if self.spill or self.rematerialise else "machine"

    def plan(self, problem: Problem) -> Plan:
        """The trace in its new order, and addresses where the tier has them."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        trace, index = problem.trace, index_of(problem)
        _check(problem)
        graph = graph_of(index, holds=self.holds)
        known = [(graph.peak(order), rank, by, order) for rank, (by, order) in enumerate(_known(graph, index.phase))]
        peak, _, by, order = min(known)
        found = Found(peak <= graph.least)
        if not found.proven and len(graph) <= self.max_ops:
            found = OrderProgram(graph, peak).solve(nodes=NODES, seconds=self.time_limit)
            if found.order is not None and graph.peak(found.order) < peak:
                peak, by, order = graph.peak(found.order), "integer program", found.order
        notes = {
            "peak_bytes": peak,
            "program_order_bytes": graph_of(index, holds=True).peak(range(len(graph))),
            "bound_bytes": peak if found.proven else graph.least,
            "order_status": "optimal" if found.proven else "feasible",
            "order_by": by,
        }
        limits = [found.limit]
        if peak > problem.budget and (self.spill or self.rematerialise):
            traded = self._traded(problem, graph, index)
            notes |= {"trade_status": traded.status, "limit": traded.limit, "time_limited": traded.limit == "time"}
            if traded.steps:
                return self._trading(problem, traded, graph, notes)
        place: dict[int, str | tuple[str, int]] = {}
        tier = problem.platform.home(0)
        if tier.allocator.name == "planned":
            lives = lifetimes(graph, order, int(dict(tier.allocator.options).get("rounding", 1)))
            placed = self._placed(lives)
            blocks = (*graph.always, *graph.blocks)
            offsets = placed.layout.offsets[: len(blocks)]
            place = {b.tensors[0]: (tier.name, offset) for b, offset in zip(blocks, offsets, strict=True)}
            notes |= {"end_bytes": placed.layout.end, "live_bytes": most_live(lives)}
            notes["address_status"] = "optimal" if placed.proven else "feasible"
            limits.append(placed.limit)
        limit = next((limit for limit in ("time", "nodes") if limit in limits), "")
        notes |= {"limit": limit, "time_limited": limit == "time"}
        return Plan(_reordered(trace, order, holds=self.holds), place=place, notes=notes)

    def _traded(self, problem: Problem, graph: Graph, index: TraceIndex) -> Trade:
        """Order, spilling and rematerialisation together. Raises PolicyError for more ops than it takes."""
        if len(graph) > self.max_ops:
            raise PolicyError(
                f"policy 'olla' spills and rematerialises up to max_ops = {self.max_ops} ops; this trace has "
                f"{len(graph)}: on a larger one another policy can do so in the order found here, as in `olla + hybrid`"
            )
        again = recomputable(graph, index) if self.rematerialise else ()
        blocks = movable(graph) if self.spill and host_of(problem) else ()
        program = TradeProgram(graph, problem.budget, again, blocks, self.more_steps if again else 0)
        return program.solve(nodes=NODES, seconds=self.time_limit)

    def _trading(self, problem: Problem, traded: Trade, graph: Graph, notes: Mapping[str, object]) -> Plan:
        """The plan of an answer: the order of first runs, and the actions between them."""
        trace = _reordered(problem.trace, order_of(traded), holds=self.holds)
        index = index_of(replace(problem, trace=trace))
        actions = actions_of(traded, graph, index, problem.home, host_of(problem))
        return Plan(trace, actions, notes=notes)

    def _placed(self, lives: Sequence[Lifetime]) -> Placed:
        """The lowest layout that is found."""
        layout = laid_out(lives)
        proven = layout.end <= most_live(lives)
        if proven or len(lives) > self.max_blocks:
            return Placed(layout, proven)
        return lowest(lives, layout, nodes=NODES, seconds=self.time_limit)


def _check(problem: Problem) -> None:
    """Raise PolicyError where order alone does not decide what is held at once."""
    trace, platform = problem.trace, problem.platform
    if trace.devices > 1:
        raise PolicyError(f"policy 'olla' plans for one device; this trace has {trace.devices}")
    main = platform.engine_for(0)
    for op, engine in sorted(trace.op_columns.engine.items()):
        if platform.engine_for(0, engine) != main:
            name = trace.op_columns.name[op]
            raise PolicyError(f"policy 'olla' plans for one engine; op {name!r} runs on {engine!r}")


def _known(graph: Graph, phase: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """Orders that are quickly found, and what each is called."""
    yield "program order", range(len(graph))
    yield (
        "early updates",
        list(as_early(len(graph), {op: graph.before[op] for op, p in enumerate(phase) if p == UPDATE})),
    )
    for below in (True, False):
        yield "list scheduling", by_net(graph, below=below)


def _reordered(trace: Trace, order: Sequence[int], *, holds: bool) -> Trace:
    """The trace in an order, with its release points or without."""
    if list(order) == list(range(len(order))) and (holds or not points(trace)):
        return trace
    new = reorder(trace, order)
    return new if holds else with_releases(new, ())
