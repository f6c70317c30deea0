"""Replays a plan: the one entry of the engine."""

from __future__ import annotations

from collections.abc import Collection

from sim.engine.actions import Actions
from sim.engine.device import Device
from sim.engine.events import Environment
from sim.engine.flows import Flows
from sim.engine.links import Links
from sim.engine.prepare import Prepared, prepare
from sim.engine.state import PLACED, State
from sim.engine.transfer import WAITS, Transfers
from sim.engine.view import View
from sim.engine.work import Work, Works
from sim.errors import Deadlock, Infeasible, OutOfMemory, TiersimError
from sim.hardware.platform import Platform
from sim.log import EventLog
from sim.plan import Plan

RECOMPUTE_LIMIT = 100.0
"""Times the ideal time of a trace that a run may spend on recomputation; published systems stay below 10."""


def replay(
    plan: Plan,
    platform: Platform,
    *,
    fast: bool = True,
    returned: Collection[int] | None = None,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
) -> EventLog:
    """Run a plan on a platform and return its log; equal inputs give equal logs.

    returned: of the tensors that an iteration starts with and gets back from the one before, those whose place at the
    end must be that of the start; None for all. The others stay where they lie.
    recompute_limit: how many times the ideal time of the trace (every op once, one after the other) recomputation may
    take before the run is refused as thrashing; None for no limit.
    fast=False takes the general path for every op: slower, and its log must be equal.
    Raises OutOfMemory and Thrashing (with the partial log), IllegalPlan naming op and tensor, Deadlock naming who
    waits for what, ProfileError and TraceError where trace and platform do not go together.
    """
    prepared = prepare(plan.trace, platform)
    env = Environment()
    state = State(plan, platform, prepared, env)
    state.recompute_limit = recompute_limit
    rates = [pool.rate for pool in platform.pools] + [link.rate for link in platform.links]
    flows = Flows(state, rates, len(platform.pools))
    links = Links(state, prepared.charges, flows)
    transfers = Transfers(state, links)
    works = Works(state, links, flows)
    if plan.online is not None:
        state.online = plan.online()
    actions = Actions(plan, platform, prepared, state, transfers)
    view = View(state, links)

    def after(work: Work) -> None:
        if work.why == "run":
            for act in actions.after.get(work.op, ()):
                actions.apply(act, work.device, work.op, False)

    def settle() -> None:
        if state.queued_for_space:
            if state.wake_waiters():  # it goes as far as it can before anything starts
                state.wanted = True
                return
            transfers.settle()
        works.settle()
        if links.stale:
            links.start_ready(state.now)
        if flows.stale:
            flows.update(state.now)
        state.wanted = False

    works.after = after
    state.settlers.append(settle)
    for op in actions.recomputed:
        for tensor in prepared.reads[op]:
            state.uses[tensor] += 1
    quick = fast and plan.online is None and not plan.keep_dead
    devices = [Device(index, state, transfers, works, actions, view) for index in range(plan.trace.devices)]
    try:
        _place(state, prepared, actions)
        for device in devices:
            exact = state.blocks[prepared.home[prepared.main[device.index]]] is None
            env.process(device.walk(quick and exact))
        closing = env.process(devices[0].close(devices, returned))
        env.run()
        if not closing.processed:
            raise _stuck(state, devices, works)
    except TiersimError as error:
        # SimPy raises a copy of what a process raised; the cause is the original with its fields
        original = error.__cause__ if isinstance(error.__cause__, TiersimError) else error
        if isinstance(original, Infeasible):
            original.log = _log(state, False)
        raise original from None
    return _log(state, True)


def _place(state: State, prepared: Prepared, actions: Actions) -> None:
    """Put what has no producer where it lies at the start."""
    for tensor, producer in enumerate(prepared.producer):
        if producer >= 0:
            continue
        tier, offset = actions.born.get(tensor, (prepared.first_tier[tensor], None))
        if not state.fits(tier, state.size[tensor], offset):
            name = prepared.trace.tensor_columns.name[tensor]
            raise state.out_of_memory(tier, state.size[tensor], -1, f"{name!r}, which is there from the start")
        state.take(tensor, tier, state.size[tensor], -1, PLACED, offset)
        state.began_in[tensor] = tier
        state.arrive(tensor, tier)


def _stuck(state: State, devices: list[Device], works: Works) -> OutOfMemory | Deadlock:
    """Why nothing can happen any more: no space for a device, or waiters that wait for each other."""
    waiters = [f"device {device.index}: {device.waits_for}" for device in devices if device.waits_for]
    for device in devices:
        if device.request is not None:
            return state.out_of_memory(*device.request)
    names = state.prepared.trace.tensor_columns.name
    if all(device.finished.processed for device in devices):
        for tensor, transfer in sorted(state.transfers.items()):
            if transfer.stage == WAITS and not state.fits(transfer.target, transfer.size):
                reason = f"the copy of {names[tensor]!r}, which waits to the end"
                return state.out_of_memory(transfer.target, transfer.size, transfer.op, reason)
    waiters += works.absent()
    waiters += [
        f"the copy of {names[t]!r} to {state.names[transfer.target]!r} {transfer.stage}"
        for t, transfer in sorted(state.transfers.items())
    ]
    return Deadlock("nothing can happen any more", waiters)


def _log(state: State, complete: bool) -> EventLog:
    return EventLog(
        trace=state.prepared.trace,
        platform=state.platform,
        intervals=state.spans.array(),
        changes=state.changes.array(),
        reserved=state.reserved.array(),
        end=max(state.end, state.now),
        complete=complete,
        counters=dict(state.counters),
    )
