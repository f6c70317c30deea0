"""Transfers: copies of tensors between tiers, beside the compute.

A transfer takes space at its destination, then joins the queues of its links; without space it waits
outside every queue, first come first served. One a tensor at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sim.engine.events import COPIES, FOLLOWS, Wake
from sim.engine.links import Job, Links
from sim.engine.state import FREED, LEAVING, MOVED_IN, MOVED_OUT, State
from sim.errors import IllegalPlan
from sim.log import WHY
from sim.plan import Move

MOVE = WHY["move"]
WAITS, QUEUED, RUNS = "waits for space", "queued", "runs"


class Transfer(Job):
    """One copy under way, from the tier `source` to `target` (positions in the platform).

    size: bytes it takes at its destination. drop_target: the copy goes again as soon as it has come.
    """

    __slots__ = (
        *("device", "drop_target", "followers", "keep", "op", "owner", "priority", "size", "source"),
        *("stage", "target", "tensor", "waiting", "wire"),
    )

    def __init__(
        self,
        owner: Transfers,
        tensor: int,
        ends: tuple[int, int],
        move: Move,
        sizes: tuple[int, int],
        device: int,
        op: int,
    ) -> None:
        self.owner = owner
        self.tensor = tensor
        self.source, self.target = ends
        self.keep = move.keep
        self.priority = move.priority
        self.size, self.wire = sizes
        self.device = device
        self.op = op
        self.stage = WAITS
        self.followers: list[Move] | None = None
        self.waiting: list[Wake] | None = None
        self.drop_target = False
        # the fields of Job, set here: a call less for each copy
        self.route = owner.route(*ends)
        self.bytes = self.wire
        self.key = ()
        self.rank = COPIES + tensor
        self.chunk = 0
        self.began = self.ends = -1
        self.flow = None
        self.is_waiting = False

    def wake_at_end(self, event: Wake) -> None:
        """Trigger an event when the copy is complete, or when it is given up."""
        self.waiting = [*(self.waiting or ()), event]

    def started(self) -> None:
        """From now on it can't be replaced."""
        self.stage = RUNS

    def done(self, now: int) -> None:
        """The copy is complete."""
        self.owner.end(self, now)


class Transfers:
    """Carries out `Move`s."""

    def __init__(self, state: State, links: Links) -> None:
        self._state = state
        self._links = links
        self._lanes = len(state.platform.engines)
        self._outside: list[deque[Transfer]] = [deque() for _ in state.names]
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._sources: dict[tuple[int, int], int] = {}

    # ---- asking ------------------------------------------------------------------------------

    def move(self, tensor: int, move: Move, target: int, device: int, op: int) -> None:
        """Begin, replace, turn round or follow a transfer, as the contract says."""
        state = self._state
        if state.overwriting and tensor in state.overwriting:
            state.counters["ignored_actions"] += 1  # the value is about to be gone
            return
        if tensor in state.pending:
            state.pending[tensor].pop(target, None)  # the copy there is wanted again
        self._begin(tensor, move, target, device, op)
        if tensor in state.pending and tensor not in state.transfers and not state.locks[tensor]:
            # the transfer that a release waited for was replaced, and nothing came in its place
            state.release_pending(tensor, op)
            state.bury(tensor, op)

    def _begin(self, tensor: int, move: Move, target: int, device: int, op: int) -> None:
        state = self._state
        now = state.transfers.get(tensor)
        if now is not None:
            if now.stage != RUNS:
                (self.call_back if target == now.source else self.cancel)(now)
            elif target == now.source:
                self._keep_source(now)
                now.drop_target = not move.keep
                return
            elif target == now.target and not now.followers:
                now.drop_target = False
                if now.keep and not move.keep:
                    self._release_source(now)
                return
            else:
                now.followers = [*(now.followers or ()), move]
                return
        held = state.copies[tensor] & ~LEAVING
        if not held:
            state.counters["ignored_actions"] += 1
            return
        if held & 1 << target or (tensor, target) in state.making:
            if not move.keep and held != 1 << target:
                self.release_copy(tensor, self._nearest(tensor, held & ~(1 << target), target), op, MOVED_OUT)
            return
        source = self._nearest(tensor, held, target)
        # a copy that the link compressed is unpacked where the next move takes it
        full = state.size[tensor]
        sizes = (full, state.size_in(tensor, source)) if move.wire is None else (move.wire, move.wire)
        transfer = Transfer(self, tensor, (source, target), move, sizes, device, op)
        state.transfers[tensor] = transfer
        if not self._outside[target] and not state.space_waiters[target] and state.fits(target, transfer.size):
            self._admit(transfer)
        else:
            self._outside[target].append(transfer)
            state.queued_for_space += 1

    def fetch(self, tensor: int, target: int, device: int, op: int) -> Transfer:
        """A demand: the device has taken the space already; an implicit fetch keeps its source."""
        state = self._state
        held = state.copies[tensor] & ~LEAVING
        if tensor in state.overwriting:
            held &= ~(1 << state.overwriting[tensor])
        source = self._nearest(tensor, held, target)
        move = Move(tensor, state.names[target], keep=True)
        sizes = (state.size[tensor], state.size_in(tensor, source))
        transfer = Transfer(self, tensor, (source, target), move, sizes, device, op)
        state.transfers[tensor] = transfer
        state.arriving[target] += transfer.size
        self._queue(transfer)
        return transfer

    def outside(self, tensor: int) -> Transfer | None:
        """The tensor's transfer if it still waits for space."""
        transfer = self._state.transfers.get(tensor)
        return transfer if transfer is not None and transfer.stage == WAITS else None

    def adopt(self, transfer: Transfer) -> None:
        """A device that waits for a transfer outside the queues has taken space for it."""
        self._outside[transfer.target].remove(transfer)
        self._state.queued_for_space -= 1
        self._state.arriving[transfer.target] += transfer.size
        self._queue(transfer)

    def keep_leaving(self, tensor: int, source: int) -> None:
        """A copy that leaves is wanted back: its release is cancelled, and who waits for that space asks again."""
        transfer = self._state.transfers.get(tensor)
        if transfer is not None and not transfer.keep and transfer.source == source:
            self._keep_source(transfer)

    def release_copy(self, tensor: int, tier: int, op: int, cause: int) -> None:
        """Release a copy now, or when its last reader or its copy has done with it."""
        state = self._state
        busy = state.transfers.get(tensor)
        if state.locks[tensor] or (busy is not None and tier in (busy.source, busy.target)):
            state.release_later(tensor, tier, cause)
        else:
            state.release(tensor, tier, op, cause)

    # ---- stages ------------------------------------------------------------------------------

    def _admit(self, transfer: Transfer) -> None:
        state = self._state
        tier = transfer.target
        if state.blocks[tier] is None:
            state.used[tier] += transfer.size
            state.changes.rows += (state.now, tier, transfer.size, transfer.tensor, transfer.op, MOVED_IN)
        else:
            state.take(transfer.tensor, tier, transfer.size, transfer.op, MOVED_IN)
        state.arriving[transfer.target] += transfer.size
        self._queue(transfer)

    def _queue(self, transfer: Transfer) -> None:
        state = self._state
        transfer.stage = QUEUED
        if not transfer.keep:
            state.leaving[transfer.source] += state.size_in(transfer.tensor, transfer.source)
            state.copies[transfer.tensor] |= LEAVING

        transfer.key = (transfer.priority, state.now, transfer.device, next(self._links.sequence))
        self._links.submit(transfer)
        state.poke()

    def end(self, transfer: Transfer, now: int) -> None:
        """A copy is complete: release its source, wake who waits, begin what follows."""
        state = self._state
        if now > state.end:
            state.end = now
        tensor, source, target, op = transfer.tensor, transfer.source, transfer.target, transfer.op
        for link in transfer.route:
            lane = self._lanes + link
            state.spans.rows += (transfer.began, now, transfer.device, lane, MOVE, op, tensor, 0, transfer.wire)
        del state.transfers[tensor]
        state.arriving[target] -= transfer.size
        state.set_size_in(tensor, target, transfer.size)
        if transfer.keep:
            state.arrive(tensor, target)
        else:
            self._unmark_leaving(transfer)
            state.arrive(tensor, target)
            self.release_copy(tensor, source, op, MOVED_OUT)
        if transfer.drop_target:
            self.release_copy(tensor, target, op, MOVED_OUT)
        if transfer.waiting:
            state.wake(transfer.waiting)
        if transfer.followers:
            state.then(FOLLOWS + tensor, lambda: self._follow(transfer))
        else:
            self._tidy(tensor, op)

    def _tidy(self, tensor: int, op: int) -> None:
        """After the last copy of a tensor for now: the releases that waited for it."""
        state = self._state
        if not state.locks[tensor] and tensor in state.pending:
            state.release_pending(tensor, op)
        if state.uses[tensor] <= 0:
            state.bury(tensor, -1)
        state.note_idle()

    def _follow(self, transfer: Transfer) -> None:
        """The moves of a tensor that were asked for while it was being copied elsewhere."""
        state, tensor = self._state, transfer.tensor
        moves = transfer.followers or []
        for i, move in enumerate(moves):
            self.move(tensor, move, state.platform.tier_ids[move.to], transfer.device, transfer.op)
            follower = state.transfers.get(tensor)
            if follower is not None:
                follower.followers = [*(follower.followers or ()), *moves[i + 1 :]]
                return
        self._tidy(tensor, transfer.op)

    def call_back(self, transfer: Transfer) -> None:
        """Cancel a transfer that has not started: what it was to take stays where it lies, and that is counted."""
        counters = self._state.counters
        counters["moves_cancelled"] += 1
        counters["cancelled_bytes"] += transfer.wire
        if transfer.stage == WAITS:
            counters["moves_without_space"] += 1
        self.cancel(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Forget a transfer that has not started."""
        state, target = self._state, transfer.target
        del state.transfers[transfer.tensor]
        if transfer.stage == WAITS:
            self._outside[target].remove(transfer)
            state.queued_for_space -= 1
        else:
            self._links.cancel(transfer)
            if not transfer.keep:
                self._unmark_leaving(transfer)
                state.stale_tiers.add(transfer.source)  # who counted on that space asks again
            state.arriving[target] -= transfer.size
            state.give(transfer.tensor, target, transfer.size, transfer.op, FREED)
        state.wake(transfer.waiting or ())
        waiting = state.on_arrival.pop(transfer.tensor, None)
        if waiting:
            state.wake(waiting)
        state.poke()

    def _keep_source(self, transfer: Transfer) -> None:
        if not transfer.keep:
            if transfer.stage != WAITS:
                self._unmark_leaving(transfer)
            transfer.keep = True
            self._state.stale_tiers.add(transfer.source)
            self._state.poke()

    def _release_source(self, transfer: Transfer) -> None:
        state = self._state
        transfer.keep = False
        state.leaving[transfer.source] += state.size_in(transfer.tensor, transfer.source)
        state.copies[transfer.tensor] |= LEAVING

    def _unmark_leaving(self, transfer: Transfer) -> None:
        state = self._state
        state.leaving[transfer.source] -= state.size_in(transfer.tensor, transfer.source)
        state.copies[transfer.tensor] &= ~LEAVING

    def settle(self) -> None:
        """Let transfers that wait outside in, first come first served, where no device waits for the space."""
        state = self._state
        for tier, queue in enumerate(self._outside):
            while queue and not state.space_waiters[tier] and state.fits(tier, queue[0].size):
                state.queued_for_space -= 1
                self._admit(queue.popleft())

    # ---- routes ------------------------------------------------------------------------------

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """Positions of the links from one tier to another; () if there are none."""
        key = (source, target)
        if key not in self._routes:
            names = self._state.names
            self._routes[key] = self._state.platform.route(names[source], names[target])
        return self._routes[key]

    def nearest(self, tensor: int, tiers: Iterable[int], target: int) -> int:
        """Of these tiers the one with the shortest route to `target`, or any where there is none."""
        linked = sum(1 << tier for tier in tiers if self.route(tier, target))
        return self._nearest(tensor, linked, target) if linked else next(iter(tiers))

    def _nearest(self, tensor: int, held: int, target: int) -> int:
        """Of the tiers that hold a tensor, the one with the shortest route to `target`."""
        if (held, target) in self._sources:
            return self._sources[held, target]
        state = self._state
        best: tuple[int, int, int] | None = None
        for tier in range(len(state.names)):
            if held & 1 << tier:
                route = self.route(tier, target)
                if route:
                    rank = (len(route), state.platform.pace(route).fixed, tier)
                    best = rank if best is None or rank < best else best
        if best is None:
            name = state.prepared.trace.tensor_columns.name[tensor]
            where = ", ".join(repr(state.names[t]) for t in range(len(state.names)) if held & 1 << t)
            raise IllegalPlan(f"tensor {name!r}: no route from {where} to {state.names[target]!r}")
        self._sources[held, target] = best[2]
        return best[2]
