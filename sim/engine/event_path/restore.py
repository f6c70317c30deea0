"""How what an op reads is restored: wait for a copy, fetch one from another tier, or recompute its producer."""

from __future__ import annotations

from collections.abc import Generator

from sim.engine.event_path.clock import Event
from sim.engine.event_path.parts import Parts
from sim.engine.event_path.residency import LEAVING
from sim.engine.event_path.waits import Steps, Waits
from sim.errors import IllegalPlan


class Restore:
    """Restores what the ops of one device read."""

    def __init__(self, parts: Parts, waits: Waits) -> None:
        self._parts = parts
        self._waits = waits
        self._prepared = parts.prepared
        self._residency = parts.residency
        self._copies = parts.residency.copies

    def reads(self, op: int, *, fetched: bool = False) -> Generator[Event, None, int]:
        """Have every read where the op's engine can read it; the op to recompute first, or -1.

        fetched: all reads in other tiers have been fetched and waited for before.
        """
        prepared, residency, waits = self._prepared, self._residency, self._waits
        engine = prepared.engine[op]
        reach, home = prepared.reach[engine], prepared.home[engine]
        reads = prepared.reads[op]
        if not fetched:
            for tensor in reads:
                yield from self.fetch(tensor, reach, home, op)
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
        parts, residency = self._parts, self._residency
        copies = self._copies[tensor]
        self._check_overwriting(tensor, reach, op)
        if copies & reach:
            if copies & LEAVING:
                read = home if copies & 1 << home else (copies & reach).bit_length() - 1
                parts.transfers.keep_leaving(tensor, read)
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
            parts.transfers.call_back(waiting)
        if not self._copies[tensor] & reach and tensor not in residency.in_flight:
            parts.record.count("implicit_moves")
            parts.transfers.fetch(tensor, home, self._waits.index, op)

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
