"""One run: how it starts, what is granted at the end of an instant, how it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sim.engine.event_path.device import Device
from sim.engine.event_path.parts import Parts, assemble
from sim.engine.event_path.refusals import out_of_memory, stuck_transfer, waiting_transfers
from sim.engine.event_path.waits import Steps
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
    state = parts.state
    state.clock.settle_with(Settling(parts).settle)
    for op in resolved.recomputed:
        state.lifetimes.expect_reads(prepared.reads[op])
    has_addresses = [state.space.blocks[prepared.home[lane]] is not None for lane in prepared.main]
    devices = [Device(i, parts, fast=fast and not addresses) for i, addresses in enumerate(has_addresses)]
    try:
        _place(parts)
        for device in devices:
            state.clock.env.process(device.walk())
        closing = state.clock.env.process(Closing(parts, devices, returned).steps())
        state.clock.env.run()
        if not closing.processed:
            raise _stuck(parts, devices)
        parts.decisions.tell()
    except TiersimError as error:
        # SimPy raises a copy of what a process raised; the cause is the original with its fields
        original = error.__cause__ if isinstance(error.__cause__, TiersimError) else error
        if isinstance(original, Infeasible):
            original.attach(state.record.log(prepared.trace, platform, state.clock.now, False))
        raise original from None
    return state.record.log(prepared.trace, platform, state.clock.now, True)


def _place(parts: Parts) -> None:
    """Place tensors without a producer where they are at the start."""
    prepared, space = parts.state.prepared, parts.state.space
    for tensor, producer in enumerate(prepared.producer):
        if producer >= 0:
            continue
        tier, offset = parts.resolved.born.get(tensor, (prepared.first_tier[tensor], None))
        size = prepared.size[tensor]
        if not space.fits(tier, size, offset):
            name = prepared.trace.tensor_columns.name[tensor]
            request = (tier, size, -1, f"{name!r}, which is resident from the start")
            raise out_of_memory(parts.state, request)
        space.take(tensor, tier, size, -1, PLACED, offset)
        parts.state.residency.place(tensor, tier)


def _stuck(parts: Parts, devices: list[Device]) -> TiersimError:
    """Why nothing can happen any more: no space for a device or a copy, or waiters that wait for each other."""
    request = next((device.waits.request for device in devices if device.waits.request is not None), None)
    if request is None and all(device.finished.processed for device in devices):
        request = stuck_transfer(parts.state)
    if request is not None:
        return out_of_memory(parts.state, request)
    waiters = [f"device {device.index}: {device.waits.reason}" for device in devices if device.waits.reason]
    waiters += parts.groups.absent()
    waiters += waiting_transfers(parts.state)
    return Deadlock("nothing can happen any more", waiters)


class Settling:
    """The end of an instant, when nobody acts any more: grants space, starts ops and copies, shares bandwidth."""

    def __init__(self, parts: Parts) -> None:
        self._space = parts.state.space
        self._space_queue = parts.state.space_queue
        self._transfers = parts.transfers
        self._engines = parts.engines
        self._links = parts.links
        self._flows = parts.flows

    def settle(self) -> bool:
        """Do it; whether it has to be done once more, after devices that have got space."""
        if self._space.waiting:
            if self._space_queue.wake_waiters():  # a device goes as far as it can before anything starts
                return True
            self._transfers.settle()
        if self._engines.stale:
            self._engines.settle()
        if self._links.stale:
            self._links.settle()
        self._flows.settle()
        return False


class Closing:
    """What is done after all devices have walked their ops; device 0 does it."""

    def __init__(self, parts: Parts, devices: Sequence[Device], returned: Collection[int] | None) -> None:
        """returned: which carried tensors, as they were at the start, have to end where they began; see `replay`."""
        self._parts = parts
        self._state = parts.state
        self._devices = devices
        self._returned = returned
        self._waits = devices[0].waits
        self._perform = devices[0].perform
        order = parts.state.prepared.order[0]
        self._last = order[-1] if order else 0

    def steps(self) -> Steps:
        """All of it."""
        trace, lifetimes = self._state.prepared.trace, self._state.lifetimes
        for device in self._devices:
            if not device.finished.processed:
                yield device.finished
                self._state.clock.catch_up()
        yield from self._waits.idle(self._last)
        lifetimes.pin(trace.outputs)  # what leaves to have space for one of them must not be another
        yield from self._restore_outputs()
        ends: dict[int, int] = {}
        # what belongs elsewhere leaves the devices first: what belongs there may need its space
        for carried in self._carried():
            for tensor, first in carried:
                yield from self._bring_back(tensor, first, ends)
            yield from self._waits.idle(self._last)
            for tensor, _ in carried:
                lifetimes.release_spare(tensor, ends.get(tensor))
        lifetimes.unpin(trace.outputs)
        yield from self._waits.catch_up()

    def _carried(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The pairs of `Trace.carry` that began in a tier behind the devices, and the others."""
        pairs, began = self._state.prepared.trace.carry, self._state.residency.began_in
        platform = self._state.platform
        homes = {platform.tier_ids[engine.home] for engine in platform.engines if engine.main}
        behind = {pair for pair in pairs if began.get(pair[1]) not in {None, *homes}}
        return [pair for pair in pairs if pair in behind], [pair for pair in pairs if pair not in behind]

    def _restore_outputs(self) -> Steps:
        """Recompute the outputs of which no copy is left."""
        residency, perform = self._state.residency, self._perform
        for tensor in self._state.prepared.trace.outputs:
            while not residency.copies[tensor] and residency.produced[tensor]:
                producer = perform.restore.producer(tensor, self._last)
                yield from perform.op(producer, why="recompute", counted=False)
                self._state.record.count("implicit_recomputes")
                yield from self._waits.idle(self._last)

    def _bring_back(self, tensor: int, first: int, ends: dict[int, int]) -> Steps:
        """Have a carried tensor where it was at the start (as `first`), or note where it is to stay instead."""
        state = self._state
        tier = state.residency.began_in.get(first)
        if tier is None:
            return
        ends[tensor] = tier
        if state.residency.has_copy(tensor, tier):
            return
        whole = [other for other in range(len(state.space.names)) if self._is_whole(tensor, other)]
        if whole and self._returned is not None and first not in self._returned:
            ends[tensor] = self._parts.routes.nearest(tensor, whole, tier)
            return
        state.record.count("returned_moves")
        state.lifetimes.pin((tensor,))
        yield from self._perform.restore.fetch(tensor, 1 << tier, tier, self._last)
        state.lifetimes.unpin((tensor,))

    def _is_whole(self, tensor: int, tier: int) -> bool:
        """Whether a tier has a copy that no link compressed."""
        return self._state.residency.has_copy(tensor, tier) and (tensor, tier) not in self._state.space.compressed
