"""The drops and moves of a plan, carried out."""

from __future__ import annotations

from collections.abc import Iterable

from sim.engine.event_path.lifetimes import DROPPED, FREED, Lifetimes
from sim.engine.event_path.record import Record
from sim.engine.event_path.residency import Residency
from sim.engine.event_path.transfers import Transfers
from sim.engine.prepare import Prepared
from sim.engine.resolve import Act, Resolved
from sim.errors import IllegalPlan


class Actions:
    """Does what takes no time of a device: a Recompute and a Wait are the device's own."""

    def __init__(
        self,
        prepared: Prepared,
        resolved: Resolved,
        record: Record,
        residency: Residency,
        lifetimes: Lifetimes,
        transfers: Transfers,
    ) -> None:
        self._prepared = prepared
        self._resolved = resolved
        self._record = record
        self._residency = residency
        self._lifetimes = lifetimes
        self._transfers = transfers

    def after(self, op: int, device: int) -> None:
        """The actions after an op that no device stands by."""
        self.apply(self._resolved.after.get(op, ()), device, op)

    def apply(self, acts: Iterable[Act], device: int, op: int, *, online: bool = False) -> None:
        """Drops and moves at an op. online: they answer a question, and must leave pinned tensors alone."""
        produced = self._residency.produced
        for act in acts:
            _, tensor, tier, move = act
            if not produced[tensor]:
                raise self._illegal(act, op, "it has not been produced yet")
            if online and self._lifetimes.pins[tensor]:
                raise self._illegal(act, op, "it is pinned by an op under way")
            if move is not None:
                self._transfers.move(tensor, move, tier, device, op)
            elif self._residency.has_copy(tensor, tier):
                # where the plan keeps dead tensors, dropping one is what frees it
                cause = FREED if self._lifetimes.is_dead(tensor) else DROPPED
                self._lifetimes.release(tensor, tier, op, cause)
            else:
                self._record.count("ignored_actions")

    def _illegal(self, act: Act, op: int, why: str) -> IllegalPlan:
        trace = self._prepared.trace
        tensor, name = trace.tensor_columns.name[act.target], trace.op_columns.name[op]
        return IllegalPlan(f"{act.kind.capitalize()} of tensor {tensor!r} at op {name!r}: {why}")
