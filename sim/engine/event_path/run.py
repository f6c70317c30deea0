"""One run, event by event: its parts tied together, its devices started, and what is done at the end of an instant."""

from __future__ import annotations

from collections.abc import Collection

from sim.engine.event_path.closing import Closing
from sim.engine.event_path.device import Device
from sim.engine.event_path.parts import Parts, assemble
from sim.engine.event_path.refusals import out_of_memory, stuck_transfer, waiting_transfers
from sim.engine.event_path.settling import Settling
from sim.engine.prepare import Prepared
from sim.engine.resolve import Resolved
from sim.errors import Deadlock, Infeasible, TiersimError
from sim.hardware.platform import Platform
from sim.log import CAUSE, EventLog
from sim.plan import Plan

PLACED = CAUSE["placed"]


def run(
    plan: Plan,
    platform: Platform,
    prepared: Prepared,
    resolved: Resolved,
    *,
    fast: bool,
    returned: Collection[int] | None,
    recompute_limit: float | None,
) -> EventLog:
    """The log of a plan's run; for what it takes and raises see `replay`."""
    online = None if plan.online is None else plan.online()
    parts = assemble(platform, prepared, resolved, online, lazy=plan.keep_dead, recompute_limit=recompute_limit)
    parts.clock.settle_with(Settling(parts).settle)
    for op in resolved.recomputed:
        parts.lifetimes.expect_reads(prepared.reads[op])
    devices = [Device(index, parts) for index in range(prepared.trace.devices)]
    may_be_fast = fast and online is None and not plan.keep_dead
    try:
        _place(parts)
        for device in devices:
            has_addresses = parts.space.blocks[prepared.home[prepared.main[device.index]]] is not None
            parts.clock.env.process(device.walk(may_be_fast and not has_addresses))
        closing = parts.clock.env.process(Closing(parts, devices, returned).steps())
        parts.clock.env.run()
        if not closing.processed:
            raise _stuck(parts, devices)
    except TiersimError as error:
        # SimPy raises a copy of what a process raised; the cause is the original with its fields
        original = error.__cause__ if isinstance(error.__cause__, TiersimError) else error
        if isinstance(original, Infeasible):
            original.attach(parts.record.log(prepared.trace, platform, parts.clock.now, False))
        raise original from None
    return parts.record.log(prepared.trace, platform, parts.clock.now, True)


def _place(parts: Parts) -> None:
    """Place tensors without a producer where they are at the start."""
    prepared, space = parts.prepared, parts.space
    for tensor, producer in enumerate(prepared.producer):
        if producer >= 0:
            continue
        tier, offset = parts.resolved.born.get(tensor, (prepared.first_tier[tensor], None))
        size = prepared.size[tensor]
        if not space.fits(tier, size, offset):
            name = prepared.trace.tensor_columns.name[tensor]
            request = (tier, size, -1, f"{name!r}, which is resident from the start")
            raise out_of_memory(prepared, parts.platform, space, parts.residency, request)
        space.take(tensor, tier, size, -1, PLACED, offset)
        parts.residency.place(tensor, tier)


def _stuck(parts: Parts, devices: list[Device]) -> TiersimError:
    """Why nothing can happen any more: no space for a device or a copy, or waiters that wait for each other."""
    prepared, space, residency = parts.prepared, parts.space, parts.residency
    request = next((device.waits.request for device in devices if device.waits.request is not None), None)
    if request is None and all(device.finished.processed for device in devices):
        request = stuck_transfer(prepared, space, residency)
    if request is not None:
        return out_of_memory(prepared, parts.platform, space, residency, request)
    waiters = [f"device {device.index}: {device.waits.reason}" for device in devices if device.waits.reason]
    waiters += parts.groups.absent()
    waiters += waiting_transfers(prepared, space, residency)
    return Deadlock("nothing can happen any more", waiters)
