"""Where the results of an op go: into the storage of what it overwrites, or into space of their own."""

from __future__ import annotations

from sim.engine.event_path.lifetimes import MOVED_OUT
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.space import PRODUCED, WORKSPACE
from sim.engine.event_path.waits import Steps, Waits
from sim.engine.event_path.work import Work
from sim.errors import IllegalPlan

Wants = dict[int, list[tuple[int, int, int | None]]]
"""Per tier what to take there: tensor (-1 for workspace), bytes, planned offset."""


class Outputs:
    """Takes the space that the ops of one device need."""

    def __init__(self, parts: Parts, waits: Waits) -> None:
        self._parts = parts
        self._waits = waits
        self._prepared = parts.prepared
        self._residency = parts.residency

    def overwritable(self, op: int) -> Steps:
        """Wait until nobody copies or reads what an op overwrites; a wait for one may let another begin."""
        prepared, residency, lifetimes = self._prepared, self._residency, self._parts.lifetimes
        olds = [old for old in (prepared.replaces[tensor] for tensor in prepared.writes[op]) if old >= 0]
        while True:
            old = next((old for old in olds if old in residency.in_flight or self._is_read_beside(old, op)), -1)
            if old < 0:
                return
            if old in residency.in_flight:
                yield from self._waits.transfer_of(old, "hazard", op)
            else:
                wake = self._waits.wake_up()
                lifetimes.wait_to_overwrite(old, wake)
                yield from self._waits.stall(wake, "hazard", op, old)

    def _is_read_beside(self, tensor: int, op: int) -> bool:
        """Whether anything but this op pins a tensor: an op on another engine, or of another device."""
        return self._parts.lifetimes.pins[tensor] > (tensor in self._prepared.reads[op])

    def take_space(self, work: Work, engine: int) -> Steps:
        """Take what an op needs for its results and its workspace, tier by tier, waiting where there is none."""
        parts, op = self._parts, work.op
        for tier, blocks in self._wants(work, engine).items():
            has_addresses = parts.space.blocks[tier] is not None
            if not has_addresses:
                yield from self._waits.space(tier, sum(bytes for _, bytes, _ in blocks), op, "its results")
            for tensor, bytes, offset in blocks:
                if has_addresses:
                    reason = "its results" if tensor >= 0 else "its workspace"
                    yield from self._waits.space(tier, bytes, op, reason, offset)
                self._take(work, tensor, tier, bytes, offset)
        if work.why != "run":
            for i, (_, tensor, tier) in enumerate(work.takeovers):
                if self._arrived_meanwhile(work, tensor, tier):
                    work.successor_is_there(i)

    def _wants(self, work: Work, engine: int) -> Wants:
        """What an op takes where; what it overwrites in place is noted, and takes nothing."""
        prepared, residency, space, op = self._prepared, self._residency, self._parts.space, work.op
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
            if self._is_there(tensor, tier):
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
        tier, offset = self._parts.resolved.born.get(tensor, (prepared.home[engine], None))
        if not prepared.reach[engine] & 1 << tier:
            unit = self._parts.platform.engines[engine].name
            name, names = prepared.trace.op_columns.name[op], prepared.trace.tensor_columns.name
            what = f"op {name!r}: tensor {names[tensor]!r}"
            raise IllegalPlan(f"{what}: {unit!r} can't write in {self._parts.space.names[tier]!r}")
        return tier, offset

    def _is_there(self, tensor: int, tier: int) -> bool:
        """Whether a tier has, or is about to have, a copy of a result, so that its recomputation is workspace."""
        transfer = self._residency.in_flight.get(tensor)
        is_arriving = transfer is not None and not transfer.waits and transfer.target == tier
        return is_arriving or self._residency.has_copy(tensor, tier)

    def _take(self, work: Work, tensor: int, tier: int, bytes: int, offset: int | None) -> None:
        """Take one block, for which there is space."""
        if tensor >= 0 and work.why != "run" and self._arrived_meanwhile(work, tensor, tier):
            work.fresh.remove((tensor, tier))
            tensor = -1
        cause = PRODUCED if tensor >= 0 else WORKSPACE
        handle = self._parts.space.take(tensor, tier, bytes, work.op, cause, offset)
        if tensor < 0:
            work.workspace.append((tier, bytes, handle))

    def _arrived_meanwhile(self, work: Work, tensor: int, tier: int) -> bool:
        """Whether a result is there, or on its way, by the time space is taken; else it is to be produced once more."""
        residency, transfers = self._residency, self._parts.transfers
        transfer = residency.in_flight.get(tensor)
        is_arriving = transfer is not None and transfer.target == tier
        if transfer is not None and is_arriving and transfer.waits:
            transfers.cancel(transfer)  # nothing is left to copy
            if not transfer.keep:
                self._parts.lifetimes.release(tensor, transfer.source, work.op, MOVED_OUT)
        elif is_arriving or residency.has_copy(tensor, tier):
            return True
        residency.begin_reproducing(tensor, tier)
        return False
