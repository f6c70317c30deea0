"""What an op needs before it runs: its reads restored, and space for its results.

A read is waited for if its copy is in flight, fetched from another tier, or its producer is recomputed. A result goes
into the storage of what it overwrites, or into space of its own.
"""

from __future__ import annotations

from collections.abc import Generator

from sim.engine.event_path.clock import Event
from sim.engine.event_path.lifetimes import MOVED_OUT
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.residency import LEAVING
from sim.engine.event_path.space import PRODUCED, WORKSPACE
from sim.engine.event_path.state import Work
from sim.engine.event_path.waits import Steps, Waits
from sim.errors import IllegalPlan

Wants = dict[int, list[tuple[int, int, int | None]]]
"""Per tier what to take there: tensor (-1 for workspace), bytes, planned offset."""


class Restore:
    """Restores what the ops of one device read."""

    def __init__(self, parts: Parts, waits: Waits) -> None:
        self._waits = waits
        self._transfers = parts.transfers
        self._record = parts.state.record
        self._prepared = parts.state.prepared
        self._residency = parts.state.residency
        self._copies = parts.state.residency.copies

    def reads(self, op: int, *, fetched: bool = False) -> Generator[Event, None, int]:
        """Have every read where the op's engine can read it; the op to recompute first, or -1.

        fetched: all reads in other tiers have been fetched and waited for before.
        """
        prepared, residency, waits = self._prepared, self._residency, self._waits
        engine = prepared.engine[op]
        reach, home = prepared.reach[engine], prepared.home[engine]
        reads = prepared.reads[op]
        if not fetched:
            copies, in_flight, overwriting = self._copies, residency.in_flight, residency.overwriting
            for tensor in reads:
                held = copies[tensor]
                is_there = held & reach and not held & LEAVING
                if tensor in overwriting or not (is_there or (not held and tensor not in in_flight)):
                    yield from self.fetch(tensor, reach, home, op)  # which else has nothing to do
        for tensor in reads:
            while not self._copies[tensor] & reach:
                if tensor in residency.in_flight:
                    yield from waits.arrival(tensor, "transfer", op)
                elif tensor in residency.awaited or (tensor, home) in residency.reproducing:
                    yield from waits.arrival(tensor, residency.awaited.get(tensor, "peer"), op)
                elif not self._copies[tensor]:
                    if residency.produced[tensor]:
                        return self.producer(tensor, op)
                    yield from waits.arrival(tensor, "peer", op)
                    continue
                yield from self.fetch(tensor, reach, home, op)
        return -1

    def fetch(self, tensor: int, reach: int, home: int, op: int) -> Steps:
        """Start what brings a copy within reach, if there is one elsewhere; do not wait for it."""
        residency, transfers = self._residency, self._transfers
        copies = self._copies[tensor]
        self._check_overwriting(tensor, reach, op)
        if copies & reach:
            if copies & LEAVING:
                read = home if copies & 1 << home else (copies & reach).bit_length() - 1
                transfers.keep_leaving(tensor, read)
            return
        transfer = residency.in_flight.get(tensor)
        if transfer is not None and not transfer.waits:
            return
        if (transfer is None and not copies & ~LEAVING) or (tensor, home) in residency.reproducing:
            return
        if transfer is not None and 1 << transfer.target & reach:
            yield from self._waits.demand(transfer, op)
            return
        yield from self._waits.space(home, self._prepared.size[tensor], op, self._waits.reading(tensor))
        waiting = residency.waiting_for_space(tensor)
        if waiting is not None:
            transfers.call_back(waiting)
        if not self._copies[tensor] & reach and tensor not in residency.in_flight:
            self._record.count("implicit_moves")
            transfers.fetch(tensor, home, self._waits.index, op)

    def _check_overwriting(self, tensor: int, reach: int, op: int) -> None:
        """Raises IllegalPlan where the only copy that could be read is being overwritten."""
        tier = self._residency.overwriting.get(tensor)
        copies = self._copies[tensor]
        if tier is not None and (copies & reach or copies & ~LEAVING) == 1 << tier:
            by = self._op(self._prepared.producer[self._prepared.replaced_by[tensor]])
            raise IllegalPlan(f"{self._read(tensor, op)} is being overwritten by {by!r} and no copy was kept")

    def producer(self, tensor: int, op: int) -> int:
        """The op that can bring a tensor back. Raises IllegalPlan where there is none, for the op that reads it."""
        prepared = self._prepared
        producer = prepared.producer[tensor]
        if producer < 0:
            new = prepared.replaced_by[tensor]
            if new >= 0 and self._residency.produced[new]:
                by = self._op(prepared.producer[new])
                raise IllegalPlan(f"{self._read(tensor, op)} was overwritten by {by!r} and no copy was kept")
            raise IllegalPlan(f"{self._read(tensor, op)} was dropped, and no op produces it")
        if producer in prepared.group_of:
            by = self._op(producer)
            raise IllegalPlan(f"{self._read(tensor, op)} was dropped, and {by!r} cannot be recomputed alone")
        return producer

    def _op(self, op: int) -> str:
        return self._prepared.trace.op_columns.name[op]

    def _read(self, tensor: int, op: int) -> str:
        return f"op {self._op(op)!r}: tensor {self._prepared.trace.tensor_columns.name[tensor]!r}"


class Outputs:
    """Takes the space that the ops of one device need."""

    def __init__(self, parts: Parts, waits: Waits) -> None:
        self._waits = waits
        self._resolved = parts.resolved
        self._transfers = parts.transfers
        self._platform = parts.state.platform
        self._prepared = parts.state.prepared
        self._residency = parts.state.residency
        self._space = parts.state.space
        self._queues = parts.state.space_queue.queues
        self._lifetimes = parts.state.lifetimes

    def overwritable(self, op: int) -> Steps:
        """Wait until nobody copies or reads what an op overwrites; a wait for one may let another begin."""
        prepared, residency, lifetimes = self._prepared, self._residency, self._lifetimes
        olds = [old for old in (prepared.replaces[tensor] for tensor in prepared.writes[op]) if old >= 0]
        while True:
            old = next((old for old in olds if old in residency.in_flight or self._is_read_beside(old, op)), -1)
            if old < 0:
                return
            if old in residency.in_flight:
                yield from self._waits.transfer_of(old, "hazard", op)
                continue  # to the move that may follow it
            while self._is_read_beside(old, op):  # a move that is asked for meanwhile is looked at when all have read
                wake = self._waits.wake_up()
                lifetimes.wait_to_overwrite(old, wake)
                yield from self._waits.stall(wake, "hazard", op, old)

    def _is_read_beside(self, tensor: int, op: int) -> bool:
        """Whether anything but this op pins a tensor: an op on another engine, or of another device."""
        return self._lifetimes.pins[tensor] > (tensor in self._prepared.reads[op])

    def take_space(self, work: Work, engine: int, *, asked: bool = False) -> Steps:
        """Take what an op needs for its results and its workspace, tier by tier, waiting where there is none.

        asked: the policy has been asked for it, in the one tier where it is needed.
        """
        op = work.op
        for tier, blocks in self._wants(work, engine).items():
            has_addresses = self._space.blocks[tier] is not None
            if not has_addresses:
                total = sum(bytes for _, bytes, _ in blocks)
                if self._queues[tier] or not self._space.fits(tier, total):
                    yield from self._waits.space(tier, total, op, "its results", asked=asked)
            for tensor, bytes, offset in blocks:
                if has_addresses:
                    reason = "its results" if tensor >= 0 else "its workspace"
                    yield from self._waits.space(tier, bytes, op, reason, offset)
                self._take(work, tensor, tier, bytes, offset)
        if work.why != "run":
            for _, tensor, tier in work.takeovers:
                self._arrived_meanwhile(work, tensor, tier)

    def _wants(self, work: Work, engine: int) -> Wants:
        """What an op takes where; what it overwrites in place is noted, and takes nothing."""
        prepared, residency, space, op = self._prepared, self._residency, self._space, work.op
        home = prepared.home[engine]
        wants: Wants = {}
        for tensor in prepared.writes[op]:
            old = prepared.replaces[tensor]
            if old >= 0 and residency.copies[old] & prepared.reach[engine]:
                tier = next(t for t in prepared.reach_order[engine] if residency.has_copy(old, t))
                if (old, tier) not in space.compressed:  # in what a link compressed the new value does not fit
                    work.takeovers.append((old, tensor, tier))
                    residency.begin_overwriting(old, tier)
                    continue
            tier, offset = self._birthplace(tensor, engine, op)
            size = prepared.size[tensor]
            if self._residency.is_there(tensor, tier):
                wants.setdefault(tier, []).append((-1, size, None))
            else:
                wants.setdefault(tier, []).append((tensor, size, offset))
                work.fresh.append((tensor, tier))
        if prepared.workspace[op]:
            wants.setdefault(home, []).append((-1, prepared.workspace[op], None))
        return wants

    def _birthplace(self, tensor: int, engine: int, op: int) -> tuple[int, int | None]:
        """Tier and offset for a new value. Raises IllegalPlan where the plan says one that the engine cannot reach."""
        prepared = self._prepared
        tier, offset = self._resolved.born.get(tensor, (prepared.home[engine], None))
        if not prepared.reach[engine] & 1 << tier:
            unit = self._platform.engines[engine].name
            name, names = prepared.trace.op_columns.name[op], prepared.trace.tensor_columns.name
            what = f"op {name!r}: tensor {names[tensor]!r}"
            raise IllegalPlan(f"{what}: {unit!r} can't write in {self._space.names[tier]!r}")
        return tier, offset

    def _take(self, work: Work, tensor: int, tier: int, bytes: int, offset: int | None) -> None:
        """Take one block, for which there is space."""
        if tensor >= 0 and work.why != "run" and self._arrived_meanwhile(work, tensor, tier):
            work.fresh.remove((tensor, tier))
            tensor = -1
        cause = PRODUCED if tensor >= 0 else WORKSPACE
        handle = self._space.take(tensor, tier, bytes, work.op, cause, offset)
        if tensor < 0:
            work.workspace.append((tier, bytes, handle))

    def _arrived_meanwhile(self, work: Work, tensor: int, tier: int) -> bool:
        """Whether a result is there, or on its way, by the time space is taken; else it is to be produced once more."""
        residency, transfers = self._residency, self._transfers
        transfer = residency.in_flight.get(tensor)
        is_arriving = transfer is not None and transfer.target == tier
        if transfer is not None and is_arriving and transfer.waits:
            transfers.cancel(transfer)  # nothing is left to copy
            if not transfer.keep:
                self._lifetimes.release(tensor, transfer.source, work.op, MOVED_OUT)
        elif is_arriving or residency.has_copy(tensor, tier):
            return True
        residency.begin_reproducing(tensor, tier)
        return False
