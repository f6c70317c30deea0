"""The parts of one run, made once and tied together; a part gets those that it works with."""

from __future__ import annotations

from dataclasses import dataclass

from sim.engine.event_path.actions import Actions
from sim.engine.event_path.clock import Clock
from sim.engine.event_path.engines import Engines
from sim.engine.event_path.flows import Flows
from sim.engine.event_path.groups import Groups
from sim.engine.event_path.lifetimes import Lifetimes
from sim.engine.event_path.links import Links
from sim.engine.event_path.op_end import OpEnd
from sim.engine.event_path.ops_under_way import OpsUnderWay
from sim.engine.event_path.record import Record
from sim.engine.event_path.refusals import RecomputeLimit
from sim.engine.event_path.residency import Residency
from sim.engine.event_path.routes import Routes
from sim.engine.event_path.space import Space
from sim.engine.event_path.space_queue import SpaceQueue
from sim.engine.event_path.transfers import Transfers
from sim.engine.event_path.view import View
from sim.engine.prepare import Prepared
from sim.engine.resolve import Resolved
from sim.hardware.platform import Platform
from sim.plan import Online


@dataclass(frozen=True, slots=True)
class Parts:
    """What a device of a run works with."""

    platform: Platform
    prepared: Prepared
    resolved: Resolved
    online: Online | None
    lazy: bool | frozenset[int]
    clock: Clock
    record: Record
    residency: Residency
    space: Space
    space_queue: SpaceQueue
    lifetimes: Lifetimes
    links: Links
    flows: Flows
    routes: Routes
    transfers: Transfers
    actions: Actions
    ops: OpsUnderWay
    op_end: OpEnd
    engines: Engines
    groups: Groups
    recompute_limit: RecomputeLimit
    view: View


def assemble(
    platform: Platform,
    prepared: Prepared,
    resolved: Resolved,
    online: Online | None,
    *,
    lazy: bool | frozenset[int],
    recompute_limit: float | None,
) -> Parts:
    """The parts of a new run. lazy: dead tensors, all or these, stay until memory is short."""
    clock, record = Clock(), Record()
    size, charges = prepared.size, prepared.charges
    residency = Residency(len(size), [tier.name for tier in platform.tiers], clock, online)
    space = Space(platform, size, clock, record, residency)
    space_queue = SpaceQueue(space, clock)
    lifetimes = Lifetimes(prepared, residency, space, clock, lazy=lazy, watched=online is not None)
    rates = [pool.rate for pool in platform.pools] + [link.rate for link in platform.links]
    flows = Flows(rates, len(platform.pools), clock)
    links = Links(platform, charges, flows, clock)
    routes = Routes(platform, prepared)
    ops = OpsUnderWay(clock, residency)
    transfers = Transfers(
        platform, prepared, clock, record, residency, space, space_queue, lifetimes, links, routes, ops
    )
    actions = Actions(prepared, resolved, record, residency, lifetimes, transfers)
    op_end = OpEnd(prepared, clock, record, residency, space, lifetimes, ops, actions)
    return Parts(
        platform=platform,
        prepared=prepared,
        resolved=resolved,
        online=online,
        lazy=lazy,
        clock=clock,
        record=record,
        residency=residency,
        space=space,
        space_queue=space_queue,
        lifetimes=lifetimes,
        links=links,
        flows=flows,
        routes=routes,
        transfers=transfers,
        actions=actions,
        ops=ops,
        op_end=op_end,
        engines=Engines(platform, prepared, clock, record, residency, links, flows, ops, op_end),
        groups=Groups(platform, prepared, clock, record, residency, links, ops, op_end),
        recompute_limit=RecomputeLimit(prepared, recompute_limit),
        view=View(platform, clock, space, residency, lifetimes, links),
    )
