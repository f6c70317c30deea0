"""What recomputing and copying cost: energy where the platform states it, else time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.hardware.cost import op_times
from sim.plan import Move, Plan, Problem, Recompute
from sim.solvers.nodes import Nodes
from sim.solvers.trip import Trip

QUANTA = 10**9
"""Into so many parts the largest price is divided where prices are energy; the others are rounded down."""


@dataclass(frozen=True, eq=False)
class Prices:
    """What a plan costs beyond every op run once.

    joules: of a unit of the prices; None where they are ns.
    nodes: per node, to recompute it.
    trips: per value that may leave, of its copies out and back.
    """

    joules: float | None
    nodes: Sequence[int]
    trips: Mapping[int, Trip]

    def of_plan(self, plan: Plan, nodes: Nodes, home: str) -> int:
        """What a plan's recomputations and copies cost: a value is copied out once, and stays on the host."""
        node_of = {op: i for i, part in enumerate(nodes.members) for op in part}
        value_of = {t: v for v, value in enumerate(nodes.values) for t in value.tensors}
        total, out = 0, set()
        for action in plan.actions:
            if isinstance(action, Recompute):
                total += self.nodes[node_of[plan.trace.op_id(action.op)]]
            elif isinstance(action, Move):
                v = value_of[plan.trace.tensor_id(action.tensor)]
                if action.to == home:
                    total += self.trips[v].back
                elif v not in out:
                    total += self.trips[v].out
                    out.add(v)
        return total


def prices_of(problem: Problem, nodes: Nodes, times: Mapping[int, Trip], host: str) -> Prices:
    """Energy: an engine's power for as long as an op takes, and that of the links of a route per byte. Else `times`."""
    platform = problem.platform
    each = platform.lane_energy
    if each is None:
        return Prices(None, nodes.cost, times)
    power = each[platform.engine_for(0)]
    again = [power * ns / 1e9 for ns in nodes.cost]
    ways = [platform.route(problem.home, host), platform.route(host, problem.home)] if host else [(), ()]
    byte = [sum(each[len(platform.engines) + link] for link in way) for way in ways]
    trips = {v: [joules * nodes.values[v].size for joules in byte] for v in times}
    unit = max((*again, *(price for trip in trips.values() for price in trip)), default=0.0) / QUANTA or 1.0
    units = {v: Trip(*(int(price / unit) for price in trip)) for v, trip in trips.items()}
    return Prices(unit, [int(price / unit) for price in again], units)


def once(problem: Problem) -> tuple[int, float | None]:
    """Every op run once: ns, one after the other; and joules, None where the platform does not state them."""
    ns = [problem.cost.op_ns(op) for op in range(len(problem.trace.op_columns.name))]
    each = problem.platform.lane_energy
    if each is None:
        return sum(ns), None
    engine = op_times(problem.trace, problem.platform).engine.tolist()
    return sum(ns), sum(took / 1e9 * each[i] for took, i in zip(ns, engine, strict=True))
