"""What a plan decides: its drops and moves carried out, its online part asked."""

from __future__ import annotations

from collections.abc import Iterable

from sim.engine.event_path.lifetimes import DROPPED, FREED
from sim.engine.event_path.links import Links
from sim.engine.event_path.state import State
from sim.engine.event_path.transfers import Transfers
from sim.engine.event_path.view import View
from sim.engine.resolve import Act, Resolved
from sim.errors import IllegalPlan
from sim.plan import Need, Online

TAKE_TIME = ("wait", "recompute")


class Decisions:
    """Does what takes no time of a device: a Recompute and a Wait are the device's own.

    asks_before: whether the online part is asked before each op.
    """

    def __init__(
        self,
        state: State,
        resolved: Resolved,
        transfers: Transfers,
        links: Links,
        online: Online | None,
        lazy: bool | frozenset[int],
    ) -> None:
        """lazy: dead tensors, all or these, stay until memory is short."""
        self._trace = state.prepared.trace
        self._record = state.record
        self._residency = state.residency
        self._space = state.space
        self._lifetimes = state.lifetimes
        self._resolved = resolved
        self._transfers = transfers
        self._online = online
        self._lazy = lazy
        self._view = View(state, links)
        self.asks_before = online is not None and type(online).before is not Online.before

    # ---- planned -----------------------------------------------------------------------------

    def after(self, op: int, device: int) -> None:
        """The actions after an op that no device stands by."""
        self.apply(self._resolved.after.get(op, ()), device, op)

    def apply(self, acts: Iterable[Act], device: int, op: int, *, online: bool = False) -> None:
        """Drops and moves at an op. online: they answer a question, and must leave pinned tensors alone."""
        lifetimes, produced, copies = self._lifetimes, self._residency.produced, self._residency.copies
        pins, dead, release = lifetimes.pins, lifetimes.dead, lifetimes.release
        for act in acts:
            _, tensor, tier, move = act
            if not produced[tensor]:
                raise self._illegal(act, op, "it has not been produced yet")
            if online and pins[tensor]:
                raise self._illegal(act, op, "it is pinned by an op under way")
            if move is not None:
                self._transfers.move(tensor, move, tier, device, op)
            elif copies[tensor] & 1 << tier:
                # where the plan keeps dead tensors, dropping one is what frees it
                release(tensor, tier, op, FREED if tensor in dead else DROPPED)
            else:
                self._record.count("ignored_actions")

    def _illegal(self, act: Act, op: int, why: str) -> IllegalPlan:
        trace = self._trace
        tensor, name = trace.tensor_columns.name[act.target], trace.op_columns.name[op]
        return IllegalPlan(f"{act.kind.capitalize()} of tensor {tensor!r} at op {name!r}: {why}")

    # ---- online ------------------------------------------------------------------------------

    def tell(self) -> None:
        """Tell the online part what has changed since it was last asked: only then does it need to know."""
        if self._online is not None and self._residency.news:
            news = self._residency.news.copy()
            self._residency.news.clear()
            self._online.notice_all(news)

    def before(self, op: int, device: int) -> list[Act]:
        """Do what the online part wants before an op that a device has reached.

        If some of it takes the device's time, nothing is done yet, and all of it is returned.
        """
        if self._online is None:
            return []
        self.tell()
        answer = self._online.before(op, self._view)
        if not answer:
            return []
        acts = self._resolved.answer(answer, device)
        for act in acts:
            if act[0] in TAKE_TIME:
                return acts
        self.apply(acts, device, op, online=True)
        return []

    def relieve(self, tier: int, bytes: int, device: int, op: int, reason: str) -> bool:
        """Have something leave a tier; whether anything did, or will, if only a release of 0 bytes."""
        space, record = self._space, self._record
        if self._online is None:
            return bool(self._lazy) and self._lifetimes.free_longest_dead(tier)
        changes = record.changes.rows
        deficit = bytes - space.free(tier) - space.leaving[tier]
        need = Need(space.names[tier], bytes, max(1, deficit), op, reason)
        record.count("pressure_calls")
        self.tell()
        # where the plan keeps dead tensors, they are the online part's to drop
        answer = self._resolved.answer(self._online.on_pressure(need, self._view), device, pressure=True)
        before = space.leaving[tier], len(changes)
        self.apply(answer, device, op, online=True)
        return before != (space.leaving[tier], len(changes))
