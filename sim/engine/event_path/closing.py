"""The end of a run: outputs are restored, everything under way ends, carried tensors go to where they began."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sim.engine.event_path.device import Device
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.waits import Steps


class Closing:
    """What is done after all devices have walked their ops; device 0 does it."""

    def __init__(self, parts: Parts, devices: Sequence[Device], returned: Collection[int] | None) -> None:
        """returned: which carried tensors, as they were at the start, have to end where they began; see `replay`."""
        self._parts = parts
        self._devices = devices
        self._returned = returned
        self._waits = devices[0].waits
        self._perform = devices[0].perform
        order = parts.prepared.order[0]
        self._last = order[-1] if order else 0

    def steps(self) -> Steps:
        """All of it."""
        trace, lifetimes = self._parts.prepared.trace, self._parts.lifetimes
        for device in self._devices:
            if not device.finished.processed:
                yield device.finished
                self._parts.clock.catch_up()
        yield from self._waits.idle(self._last)
        lifetimes.pin(trace.outputs)  # what leaves to have space for one of them must not be another
        yield from self._restore_outputs()
        ends: dict[int, int] = {}
        for tensor, first in trace.carry:
            yield from self._bring_back(tensor, first, ends)
        yield from self._waits.idle(self._last)
        for tensor, _ in trace.carry:
            lifetimes.release_spare(tensor, ends.get(tensor))
        lifetimes.unpin(trace.outputs)
        yield from self._waits.catch_up()

    def _restore_outputs(self) -> Steps:
        """Recompute the outputs of which no copy is left."""
        residency, perform = self._parts.residency, self._perform
        for tensor in self._parts.prepared.trace.outputs:
            while not residency.copies[tensor] and residency.produced[tensor]:
                producer = perform.restore.producer(tensor, self._last)
                yield from perform.op(producer, why="recompute", counted=False)
                self._parts.record.count("implicit_recomputes")
                yield from self._waits.idle(self._last)

    def _bring_back(self, tensor: int, first: int, ends: dict[int, int]) -> Steps:
        """Have a carried tensor where it was at the start (as `first`), or note where it is to stay instead."""
        parts = self._parts
        tier = parts.residency.began_in.get(first)
        if tier is None:
            return
        ends[tensor] = tier
        if parts.residency.has_copy(tensor, tier):
            return
        whole = [other for other in range(len(parts.space.names)) if self._is_whole(tensor, other)]
        if whole and self._returned is not None and first not in self._returned:
            ends[tensor] = parts.routes.nearest(tensor, whole, tier)
            return
        parts.record.count("returned_moves")
        parts.lifetimes.pin((tensor,))
        yield from self._perform.restore.fetch(tensor, 1 << tier, tier, self._last)
        parts.lifetimes.unpin((tensor,))

    def _is_whole(self, tensor: int, tier: int) -> bool:
        """Whether a tier has a copy that no link compressed."""
        return self._parts.residency.has_copy(tensor, tier) and (tensor, tier) not in self._parts.space.compressed
