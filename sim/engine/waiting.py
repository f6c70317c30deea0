"""How a device waits: for space, first come first served, for a tensor, or for what is under way; each a stall."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from sim.engine.actions import Act, Actions
from sim.engine.events import STARTS, At, Event, Wake
from sim.engine.state import MOVED_IN, Request, State
from sim.engine.transfer import Transfer, Transfers
from sim.engine.work import Works
from sim.log import STALL, WHY
from sim.plan import Memory, Need

Steps = Generator[Event, None, None]


class Waiting:
    """A device as far as it waits, and asks the policy for room."""

    def __init__(
        self,
        index: int,
        state: State,
        transfers: Transfers,
        works: Works,
        actions: Actions,
        view: Memory,
    ) -> None:
        self.index = index
        self.waits_for = ""
        self.request: tuple[int, int, int, str] | None = None
        self.finished = Wake(state.env, STARTS + index)
        self._state = state
        self._transfers = transfers
        self._works = works
        self._actions = actions
        self._view = view
        self._lane = state.prepared.main[index]
        self._home = state.prepared.home[self._lane]
        self._reach = state.prepared.reach[self._lane]

    def _room(self, tier: int, bytes: int, op: int, reason: str, offset: int | None = None) -> Steps:
        """Return once a request fits and no device came before; ask the policy, then wait."""
        state = self._state
        queue = state.space_waiters[tier]
        place = -1
        while True:
            # first come, first served; `State.wake_waiters` says who may pass
            if state.fits(tier, bytes, offset) and (place >= 0 or not queue):
                if queue:
                    state.stale_tiers.add(tier)
                    state.poke()
                return
            if not state.fits_later(tier, bytes, offset) and not state.fits(tier, bytes, offset):
                if state.online is not None:  # where it keeps the dead, they are its to drop
                    if self._ask(tier, bytes, op, reason):
                        continue
                elif state.keep_dead and state.free_the_dead(tier):
                    continue
            place = len(queue) if place < 0 else place
            if place == 0:
                state.stale_tiers.discard(tier)  # what was given back before, it has seen
            request = Request(bytes, offset, self._wake())
            queue.insert(place, request)
            state.queued_for_space += 1
            state.poke()
            self.request = (tier, bytes, op, reason)
            what = f"{bytes:,} B in {state.names[tier]!r} for {reason}"
            yield from self._stall(request.event, "space", op, -1, what)
            self.request = None
            place = queue.index(request)
            del queue[place]
            state.queued_for_space -= 1

    def _ask(self, tier: int, bytes: int, op: int, reason: str) -> bool:
        """Ask the online policy to make room; whether its answer did anything at all, if only a release of 0 bytes."""
        state = self._state
        if state.online is None:
            return False
        missing = bytes - (state.capacity[tier] - state.used[tier]) - state.leaving[tier]
        need = Need(state.names[tier], bytes, max(1, missing), op, reason)
        state.counters["pressure_calls"] += 1
        answer = self._actions.answer(state.online.on_pressure(need, self._view), self.index, pressure=True)
        was = state.leaving[tier], len(state.changes.rows)
        self._apply(answer, op, True)
        return was != (state.leaving[tier], len(state.changes.rows))

    def _wake(self) -> Wake:
        """What this device can wait for."""
        return Wake(self._state.env, STARTS + self.index)

    def _turn(self, rank: int) -> Steps:
        """Go on when all has happened that comes before this rank at this instant."""
        state = self._state
        if not state.env.is_next(state.now, rank):
            yield At(state.env, state.now - int(state.env.now), rank)
            state.now = int(state.env.now)

    def _arrival(self, tensor: int, cause: str, op: int) -> Steps:
        event = self._wake()
        self._state.on_arrival.setdefault(tensor, []).append(event)
        yield from self._stall(event, cause, op, tensor)

    def _stall(self, event: Event, cause: str, op: int, tensor: int, what: str = "") -> Steps:
        state = self._state
        start = state.now
        subject = what or f"tensor {self._tensor(tensor)!r}"
        self.waits_for = f"op {self._name(op)!r} waits for {subject} ({cause})"
        state.flush()
        yield event
        state.now = int(state.env.now)
        self.waits_for = ""
        if state.now > start:
            state.spans.rows += (start, state.now, self.index, self._lane, WHY["stall"], op, tensor, STALL[cause], 0)

    def _demand(self, transfer: Transfer, op: int) -> Steps:
        """A transfer that a device waits for gets space as an op would."""
        state = self._state
        yield from self._room(transfer.target, transfer.size, op, f"reading {self._tensor(transfer.tensor)!r}")
        if self._transfers.outside(transfer.tensor) is transfer:
            state.take(transfer.tensor, transfer.target, transfer.size, op, MOVED_IN)
            self._transfers.adopt(transfer)

    def _drain(self, op: int) -> Steps:
        """Wait until nothing is under way: for ops first, then for copies."""
        state = self._state
        while True:
            if state.running["engine"]:
                cause, what = "engine", "the end of all ops on other engines"
            elif state.running["peer"]:
                cause, what = "peer", "the end of all groups"
            elif state.transfers:
                cause, what = "drain", "the end of all copies"
            else:
                return
            event = self._wake()
            state.idle_waiters.append(event)
            yield from self._stall(event, cause, op, -1, what)

    def _apply(self, batch: Iterable[Act], op: int, strict: bool) -> None:
        """Drops and moves."""
        for act in batch:
            self._actions.apply(act, self.index, op, strict)

    def _name(self, op: int) -> str:
        return self._state.prepared.trace.op_columns.name[op]

    def _tensor(self, tensor: int) -> str:
        return self._state.prepared.trace.tensor_columns.name[tensor]
