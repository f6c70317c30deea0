"""Transfers: copies of tensors between tiers, beside the compute.

A transfer takes space at its destination, then joins the queues of its links; without space it waits
outside every queue, first come first served. At most one per tensor at a time.
"""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from functools import partial

from sim.engine.event_path.clock import FOLLOWS
from sim.engine.event_path.lifetimes import MOVED_OUT
from sim.engine.event_path.links import Links, Routes
from sim.engine.event_path.residency import LEAVING, Transfer
from sim.engine.event_path.state import State
from sim.hardware.transfer_time import codec_rate
from sim.plan import Move


class Transfers:
    """Carries out `Move`s, and fetches what an op reads."""

    def __init__(self, state: State, links: Links, routes: Routes) -> None:
        self._tier_ids = state.platform.tier_ids
        self._size = state.prepared.size
        self._clock = state.clock
        self._record = state.record
        self._residency = state.residency
        self._in_flight = state.residency.in_flight
        self._space = state.space
        self._space_queues = state.space_queue.queues
        self._lifetimes = state.lifetimes
        self._ops = state.ops
        self._links = links
        self._routes = routes
        self._links_by_id = state.platform.links
        self._codec: dict[int, int] = {}
        self._outside: list[deque[Transfer]] = [deque() for _ in state.space.names]

    # ---- asking ------------------------------------------------------------------------------

    def move(self, tensor: int, move: Move, target: int, device: int, op: int) -> None:
        """Begin, replace, turn round or follow a transfer, as docs/model.md says."""
        if tensor in self._residency.overwriting:
            self._record.count("ignored_actions")  # the value is about to be overwritten
            return
        if self._lifetimes.put_off:
            self._lifetimes.want_copy(tensor, target)
        transfer = self._in_flight.get(tensor)
        if transfer is None:
            self._begin(tensor, move, target, device, op)
        elif transfer.began >= 0:
            self._redirect(transfer, move, target)
        else:
            (self.call_back if target == transfer.source else self.cancel)(transfer)
            self._begin(tensor, move, target, device, op)
        if self._lifetimes.put_off:
            self._lifetimes.transfer_given_up(tensor, op)

    def _redirect(self, transfer: Transfer, move: Move, target: int) -> None:
        """A transfer that runs is turned round, changed, or followed."""
        if target == transfer.source:
            self._keep_source(transfer)
            transfer.drop_on_arrival(not move.keep)
        elif target == transfer.target and not transfer.followers:
            transfer.drop_on_arrival(False)
            if transfer.keep and not move.keep:
                transfer.release_source()
                self._space.begin_leaving(transfer.tensor, transfer.source)
        else:
            transfer.follow_with(move)

    def _begin(self, tensor: int, move: Move, target: int, device: int, op: int) -> None:
        """A transfer of a tensor that has none under way."""
        residency, space = self._residency, self._space
        held = residency.copies[tensor] & ~LEAVING
        if not held:
            self._record.count("ignored_actions")
            return
        if held & 1 << target or (tensor, target) in residency.reproducing:
            if not move.keep and held != 1 << target:
                source, _ = self._routes.source(tensor, held & ~(1 << target), target)
                self._lifetimes.release(tensor, source, op, MOVED_OUT)
            return
        source, route = self._routes.source(tensor, held, target)
        # a copy that the link compressed is unpacked where the next move takes it
        size = self._size[tensor]
        wire = space.size_in(tensor, source) if space.compressed else size
        sizes = (size, wire) if move.wire is None else (move.wire, move.wire)
        most = None if sizes[1] == size or move.wire == wire else self._codec_pace(tensor, route, sizes[1], move)
        transfer = Transfer(self._end, self._call_off, tensor, (source, target), route, move, sizes, device, op, most)
        residency.begin_transfer(transfer)
        if self._outside[target] or self._space_queues[target] or not space.fits(target, transfer.size):
            self._outside[target].append(transfer)
            space.begin_waiting()
        else:
            self._admit(transfer, op)

    def fetch(self, tensor: int, target: int, device: int, op: int) -> None:
        """A device, which has space for it, needs a tensor; an implicit fetch keeps its source."""
        held = self._residency.held(tensor)
        if tensor in self._residency.overwriting:
            held &= ~(1 << self._residency.overwriting[tensor])
        source, route = self._routes.source(tensor, held, target)
        move = Move(tensor, self._space.names[target], keep=True)
        sizes = (self._size[tensor], self._space.size_in(tensor, source))
        most = None if sizes[0] == sizes[1] else self._codec_pace(tensor, route, sizes[1], move)
        transfer = Transfer(self._end, self._call_off, tensor, (source, target), route, move, sizes, device, op, most)
        self._residency.begin_transfer(transfer)
        self._admit(transfer, op)

    def _codec_pace(self, tensor: int, route: tuple[int, ...], wire: int, move: Move) -> Fraction | None:
        """Bytes/s on the wire that the codec of a copy allows, None where nothing says how fast it is."""
        stated = self._codec.get(tensor) if move.codec is None else move.codec
        if stated is not None:
            self._codec[tensor] = stated
        rates = [rate for rate in (stated, *(self._links_by_id[i].codec for i in route)) if rate]
        return codec_rate(self._size[tensor], wire, min(rates)) if rates and wire and self._size[tensor] else None

    def adopt(self, transfer: Transfer, op: int) -> None:
        """A device whose op waits for a transfer outside the queues has space for it."""
        self._outside[transfer.target].remove(transfer)
        self._space.end_waiting()
        self._admit(transfer, op)

    def keep_leaving(self, tensor: int, source: int) -> None:
        """A copy that leaves is wanted back: its release is cancelled, and who waits for that space asks again."""
        transfer = self._in_flight.get(tensor)
        if transfer is not None and not transfer.keep and transfer.source == source:
            self._keep_source(transfer)

    # ---- from queue to end -------------------------------------------------------------------

    def settle(self) -> None:
        """Let transfers that wait outside in, first come first served, where no device waits for the space."""
        for tier, queue in enumerate(self._outside):
            while queue and not self._space_queues[tier] and self._space.fits(tier, queue[0].size):
                self._space.end_waiting()
                transfer = queue.popleft()
                self._admit(transfer, transfer.op)

    def _admit(self, transfer: Transfer, op: int) -> None:
        """There is space for a transfer: it takes it, for an op, and queues for its links."""
        tensor, target = transfer.tensor, transfer.target
        self._space.begin_arrival(tensor, target, transfer.size, op)
        if not transfer.keep:
            self._space.begin_leaving(transfer.tensor, transfer.source)
        self._links.submit(transfer, transfer.priority, transfer.device)

    def _end(self, transfer: Transfer, now: int) -> None:
        """A copy is complete: release its source, wake who waits, begin what follows."""
        residency, space = self._residency, self._space
        tensor, source, target, op = transfer.tensor, transfer.source, transfer.target, transfer.op
        self._record.ended(now)
        self._record.moved(transfer.began, now, transfer.device, transfer.route, op, tensor, transfer.wire)
        residency.end_transfer(tensor)
        space.end_arrival(tensor, target, transfer.size)
        if not transfer.keep:
            self._space.end_leaving(transfer.tensor, transfer.source)
        residency.arrive(tensor, target)
        if not transfer.keep:
            self._lifetimes.release(tensor, source, op, MOVED_OUT)
        if transfer.drop_target:
            self._lifetimes.release(tensor, target, op, MOVED_OUT)
        if transfer.waiters:
            self._clock.wake(transfer.waiters)
        if transfer.followers:
            self._clock.then(FOLLOWS + tensor, partial(self._follow, transfer))
        else:
            self._last_ended(transfer)

    def _follow(self, transfer: Transfer) -> None:
        """The moves of a tensor that were asked for while it was being copied elsewhere."""
        tensor, moves = transfer.tensor, transfer.followers
        for i, move in enumerate(moves):
            self.move(tensor, move, self._tier_ids[move.to], transfer.device, transfer.op)
            follower = self._in_flight.get(tensor)
            if follower is not None:
                follower.follow_with(*moves[i + 1 :])
                self._lifetimes.free_if_dead(tensor, -1)
                return
        self._last_ended(transfer)

    def _last_ended(self, transfer: Transfer) -> None:
        """Nothing follows: what waited for the end of the tensor's copies happens."""
        self._lifetimes.transfer_ended(transfer.tensor, transfer.op)
        self._ops.note_idle()

    # ---- changes of mind ---------------------------------------------------------------------

    def call_back(self, transfer: Transfer) -> None:
        """Cancel a transfer that has not started: what it was to take stays where it lies, and that is counted."""
        self._record.cancelled(transfer.wire, without_space=transfer.waits)
        self.cancel(transfer)

    def _call_off(self, transfer: Transfer) -> None:
        """Cancel a transfer that has not started and whose tensor nobody needs any more."""
        self.call_back(transfer)
        self._ops.note_idle()

    def cancel(self, transfer: Transfer) -> None:
        """Forget a transfer that has not started."""
        tensor, target, space = transfer.tensor, transfer.target, self._space
        self._residency.end_transfer(tensor)
        if transfer.waits:
            self._outside[target].remove(transfer)
            space.end_waiting()
        else:
            self._links.cancel(transfer)
            if not transfer.keep:
                self._space.end_leaving(transfer.tensor, transfer.source)
                space.offer(transfer.source)  # who counted on that space asks again
            space.give_up_arrival(tensor, target, transfer.size, transfer.op)
        if transfer.waiters:
            self._clock.wake(transfer.waiters)
        if tensor in self._residency.waiters:
            self._residency.wake_waiters(tensor)
        self._clock.poke()

    def _keep_source(self, transfer: Transfer) -> None:
        """The source is not released after all; who counted on that space asks again."""
        if not transfer.keep:
            if not transfer.waits:
                self._space.end_leaving(transfer.tensor, transfer.source)
            transfer.keep_source()
            self._space.offer(transfer.source)
