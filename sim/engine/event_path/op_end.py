"""The end of an op, on whatever engine: results arrive, the actions after it, what nobody needs any more is freed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sim.engine.event_path.actions import Actions
from sim.engine.event_path.clock import AFTERS, FREES, Clock
from sim.engine.event_path.lifetimes import Lifetimes
from sim.engine.event_path.ops_under_way import OpsUnderWay
from sim.engine.event_path.record import Record
from sim.engine.event_path.residency import Residency
from sim.engine.event_path.space import WORKSPACE, Space
from sim.engine.event_path.work import Work
from sim.engine.prepare import Prepared


class OpEnd:
    """A device takes the three steps one by one; `together` takes them for ops that no device stands by."""

    def __init__(
        self,
        prepared: Prepared,
        clock: Clock,
        record: Record,
        residency: Residency,
        space: Space,
        lifetimes: Lifetimes,
        ops: OpsUnderWay,
        actions: Actions,
    ) -> None:
        self._prepared = prepared
        self._clock = clock
        self._record = record
        self._residency = residency
        self._space = space
        self._lifetimes = lifetimes
        self._ops = ops
        self._actions = actions

    def deliver(self, work: Work) -> None:
        """Give workspace back, let results arrive, and unpin what the op used."""
        op, residency, lifetimes = work.op, self._residency, self._lifetimes
        for tier, bytes, handle in work.workspace:
            self._space.give(-1, tier, bytes, op, WORKSPACE, handle)
        for old, new, tier in work.takeovers:
            residency.end_overwriting(old)
            if new < 0:
                lifetimes.release_overwritten(old, tier, op)
            else:
                lifetimes.take_over(old, new, tier, op)
                residency.deliver(new, tier)
        for tensor, tier in work.fresh:
            residency.deliver(tensor, tier)
        if work.counted:
            lifetimes.note_reads(op, first=work.why == "run")
        lifetimes.unpin_operands(op)

    def free(self, work: Work) -> None:
        """Free what no op still to run and no planned recomputation reads, and the program does not hold."""
        self._lifetimes.free_after(work.op)
        for old, _, _ in work.takeovers:
            self._lifetimes.free_if_dead(old, work.op)

    def together(self, ended: Sequence[Work], cause: str) -> None:
        """All steps for ops that end together. cause: of the stall of whoever waits for them."""
        clock = self._clock
        self._ops.end(cause, len(ended))
        self._record.ended(clock.now)
        for work in ended:
            self.deliver(work)
        if clock.is_next(FREES + ended[-1].op):
            for work in ended:
                self._after(work)
            for work in ended:
                self.free(work)
        else:
            for work in ended:
                clock.later(AFTERS + work.op, partial(self._after, work))
                clock.later(FREES + work.op, partial(self.free, work))
        self._ops.note_idle()
        clock.poke()

    def _after(self, work: Work) -> None:
        if work.why == "run":
            self._actions.after(work.op, work.device)
