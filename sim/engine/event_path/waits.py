"""How a device waits: for space, for a tensor, for what is under way; each wait that takes time is a stall."""

from __future__ import annotations

from collections.abc import Generator

from sim.engine.event_path.clock import STARTS, Event, Wake
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.refusals import Asked
from sim.engine.event_path.residency import Transfer
from sim.engine.event_path.space import Request

Steps = Generator[Event, None, None]


class Waits:
    """The waits of one device.

    reason: what it waits for at present, in words, "" for nothing.
    request: (tier, bytes, op, reason) of the space that it waits for.
    dispatched: how far the CPU has come that dispatches the device's ops, in ns.
    """

    def __init__(self, index: int, parts: Parts) -> None:
        self.index = index
        self._stall: tuple[int, int, str, str] | None = None
        self._ending = -1
        self.request: Asked | None = None
        state = self._state = parts.state
        self._clock = state.clock
        self._transfers = parts.transfers
        self._decisions = parts.decisions
        self._lane = state.prepared.main[index]
        self._dispatch = state.prepared.dispatched
        dispatch = state.prepared.dispatch
        self.dispatched = dispatch.once if dispatch else 0
        self._synchronized = dispatch.synchronized if dispatch else frozenset[int]()
        trace = state.prepared.trace
        self._op_names, self._tensor_names = trace.op_columns.name, trace.tensor_columns.name

    @property
    def reason(self) -> str:
        """See the class."""
        if self._stall is not None:
            op, tensor, cause, what = self._stall
            return f"op {self._op_names[op]!r} waits for {what or f'tensor {self._tensor_names[tensor]!r}'} ({cause})"
        return f"op {self._op_names[self._ending]!r} to end" if self._ending >= 0 else ""

    # ---- time --------------------------------------------------------------------------------

    def wake_up(self) -> Wake:
        """What this device can wait for."""
        return self._clock.wake_up(STARTS + self.index)

    def turn(self, rank: int) -> Steps:
        """Go on when all has happened that comes before this rank at this instant."""
        clock = self._clock
        if not clock.is_next(rank):
            yield clock.at(clock.now, rank)
            clock.catch_up()

    def catch_up(self) -> Steps:
        """Let the event queue come up to this device."""
        clock = self._clock
        clock.flush()
        if clock.now > clock.env.now:
            yield clock.at(clock.now, STARTS + self.index)
            clock.catch_up()

    def end_of(self, op: int, end: Wake) -> Steps:
        """Until an op ends that shares bandwidth, so that nobody knows when."""
        self._ending = op
        self._clock.flush()
        yield end
        self._clock.catch_up()

    def stall(self, wake: Event, cause: str, op: int, tensor: int, what: str = "") -> Steps:
        """Wait for an event. cause: as the log names it; what: in words, by default the tensor."""
        clock = self._clock
        start = clock.now
        self._stall, self._ending = (op, tensor, cause, what), -1
        clock.flush()
        yield wake
        clock.catch_up()
        self._stall = None
        if clock.now > start:
            self._state.record.stalled(start, clock.now, self.index, self._lane, op, tensor, cause)

    def launch(self, op: int) -> Steps:
        """Until the CPU has dispatched an op, which it does one after the other, ahead of the device."""
        if not self._dispatch:
            return
        if op in self._synchronized:
            self.dispatched = max(self.dispatched, self._clock.now)
        self.dispatched += self._dispatch[op]
        if self.dispatched > self._clock.now:
            wake = self.wake_up()
            wake.fire(self.dispatched - int(self._clock.env.now))
            yield from self.stall(wake, "launch", op, -1, "the CPU that launches it")

    # ---- tensors -----------------------------------------------------------------------------

    def arrival(self, tensor: int, cause: str, op: int) -> Steps:
        """Until a copy of a tensor arrives, or its transfer is given up."""
        wake = self.wake_up()
        self._state.residency.wait_for(tensor, wake)
        yield from self.stall(wake, cause, op, tensor)

    def transfer_of(self, tensor: int, cause: str, op: int) -> Steps:
        """Until the transfer of a tensor has ended; where it has no space yet, see to that first."""
        waiting = self._state.residency.waiting_for_space(tensor)
        if waiting is not None:
            yield from self.demand(waiting, op)
            return
        wake = self.wake_up()
        self._state.residency.in_flight[tensor].wake_at_end(wake)
        yield from self.stall(wake, cause, op, tensor)

    def demand(self, transfer: Transfer, op: int) -> Steps:
        """A transfer that a device waits for gets space as an op would."""
        yield from self.space(transfer.target, transfer.size, op, self.reading(transfer.tensor))
        if self._state.residency.waiting_for_space(transfer.tensor) is transfer:
            self._transfers.adopt(transfer, op)

    def reading(self, tensor: int) -> str:
        """The reason of a request for the space of a tensor that an op reads."""
        return f"reading {self._tensor_names[tensor]!r}"

    def idle(self, op: int) -> Steps:
        """Until nothing is under way: for ops first, then for copies."""
        while True:
            pending = self._state.ops.pending()
            if pending is None:
                return
            cause, what = pending
            wake = self.wake_up()
            self._state.ops.wait_for_end(wake)
            yield from self.stall(wake, cause, op, -1, what)

    # ---- space -------------------------------------------------------------------------------

    def space(
        self, tier: int, bytes: int, op: int, reason: str, offset: int | None = None, *, asked: bool = False
    ) -> Steps:
        """Return once a request fits and no device came before; ask the policy, then wait.

        asked: the policy has been asked just now.
        """
        space, queue = self._state.space, self._state.space_queue
        place = -1
        while True:
            # first come, first served; `SpaceQueue.wake_waiters` says who may pass
            if space.fits(tier, bytes, offset) and (place >= 0 or not queue.queues[tier]):
                if queue.queues[tier]:
                    space.offer(tier)
                return
            if (
                not asked
                and not space.fits_later(tier, bytes, offset)
                and not space.fits(tier, bytes, offset)
                and self._decisions.relieve(tier, bytes, self.index, op, reason)
            ):
                continue
            request = Request(bytes, offset, self.wake_up())
            queue.join(tier, request, place)
            self.request = (tier, bytes, op, reason)
            what = f"{bytes:,} B in {space.names[tier]!r} for {reason}"
            yield from self.stall(request.wake, "space", op, -1, what)
            self.request, asked = None, False
            place = queue.leave(tier, request)
