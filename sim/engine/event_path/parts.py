"""The parts of one run, made once and tied together: the one place that says which part works with which."""

from __future__ import annotations

from dataclasses import dataclass

from sim.engine.event_path.clock import Clock
from sim.engine.event_path.decisions import Decisions
from sim.engine.event_path.engines import Engines, OpEnd
from sim.engine.event_path.flows import Flows
from sim.engine.event_path.groups import Groups
from sim.engine.event_path.lifetimes import Lifetimes
from sim.engine.event_path.links import Links, Routes
from sim.engine.event_path.record import Record
from sim.engine.event_path.refusals import RecomputeLimit
from sim.engine.event_path.residency import Residency
from sim.engine.event_path.space import Space, SpaceQueue
from sim.engine.event_path.state import OpsUnderWay, State
from sim.engine.event_path.transfers import Transfers
from sim.engine.prepare import Prepared
from sim.engine.resolve import Resolved
from sim.hardware.platform import Platform
from sim.plan import Online


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a device of a run works with: what is known, and whatever acts beside the devices."""

    state: State
    resolved: Resolved
    decisions: Decisions
    transfers: Transfers
    links: Links
    flows: Flows
    routes: Routes
    engines: Engines
    op_end: OpEnd
    groups: Groups
    recompute_limit: RecomputeLimit


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
    state = _state(platform, prepared, resolved, online, lazy)
    flows = Flows(platform, state.clock)
    links = Links(platform, prepared, flows, state.clock)
    routes = Routes(platform, prepared)
    transfers = Transfers(state, links, routes)
    decisions = Decisions(state, resolved, transfers, links, online, lazy)
    op_end = OpEnd(state, decisions)
    return Parts(
        state=state,
        resolved=resolved,
        decisions=decisions,
        transfers=transfers,
        links=links,
        flows=flows,
        routes=routes,
        engines=Engines(state, links, flows, op_end),
        op_end=op_end,
        groups=Groups(state, links, op_end),
        recompute_limit=RecomputeLimit(prepared, recompute_limit),
    )


def _state(
    platform: Platform, prepared: Prepared, resolved: Resolved, online: Online | None, lazy: bool | frozenset[int]
) -> State:
    """Nothing has happened yet. What tells the online part of a change is given it."""
    clock, record = Clock(), Record(platform)
    residency = Residency(len(prepared.size), [tier.name for tier in platform.tiers], clock, online)
    space = Space(platform, prepared.size, clock, record, residency)
    watched = residency.note is not None
    return State(
        platform=platform,
        prepared=prepared,
        clock=clock,
        record=record,
        residency=residency,
        space=space,
        space_queue=SpaceQueue(space, clock),
        lifetimes=Lifetimes(prepared, residency, space, clock, lazy=lazy, watched=watched, waited=resolved.waited),
        ops=OpsUnderWay(clock, residency),
    )
