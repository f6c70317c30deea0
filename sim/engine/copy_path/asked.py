"""The online part of a run on the copy path: told what has changed, asked before ops and where memory is short.

The rules are those of the event path's `decisions`. What is refused, and what an online part raises, is left to that
path, which starts from the beginning, with a new online part.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.engine.copy_path.copies import Copies
from sim.engine.copy_path.view import View
from sim.engine.copy_path.wires import Elsewhere
from sim.engine.prepare import Prepared
from sim.engine.resolve import Act, Resolved
from sim.hardware.platform import Platform
from sim.plan import Action, Drop, Need, Online, Plan


class Asked:
    """Asks the online part and does what it says.

    asks_before: whether it is asked before each op.
    reached: by op when it was last reached, or was to be recomputed, -1 for never.
    """

    def __init__(
        self,
        plan: Plan,
        online: Online | None,
        platform: Platform,
        prepared: Prepared,
        resolved: Resolved,
        copies: Copies,
    ) -> None:
        self.reached = [-1] * len(prepared.plain)
        self.asks_before = online is not None and type(online).before is not Online.before
        self._online = online
        self._resolved = resolved
        self._copies = copies
        self._producer = prepared.producer
        self._tiers = [tier.name for tier in platform.tiers]
        self._home = self._tiers[prepared.home[prepared.main[0]]]
        self._ids = platform.tier_ids
        self._view = View(copies, self._tiers, platform.tier_ids, prepared.trace, self.reached)
        self._anchor = 0
        if online is not None or plan.keep_dead:
            copies.ask_with(self.relieve)

    def reach(self, op: int, reads: Sequence[int]) -> None:
        """The program has come to an op, which reads these."""
        self._anchor = op
        self.note_reads(op, reads)

    def note_reads(self, op: int, reads: Sequence[int]) -> None:
        """An op is to run, or to be recomputed, and reads these."""
        copies = self._copies
        self.reached[op] = now = copies.now
        if copies.is_told:
            name = self._home
            for tensor in reads:
                copies.news.append(("read", tensor, name, now))

    def tell(self) -> None:
        """Tell the online part what has changed since it was last asked."""
        copies = self._copies
        if self._online is not None and copies.news:
            news = copies.news.copy()
            copies.news.clear()
            try:
                self._online.notice_all(news)
            except Exception as error:
                raise Elsewhere from error

    def before(self, op: int) -> list[Act]:
        """Do what the online part wants before an op of the program.

        If some of it takes the device's time, nothing is done yet, and all of it is returned.
        """
        online = self._online
        if online is None:
            return []
        self._anchor = op
        if self._copies.news:
            self.tell()
        try:
            answer = online.before(op, self._view)
            if self._view.is_short_sighted:
                raise Elsewhere
            if not answer or (type(answer) is list and self._are_dropped(answer, op)):
                return []
            acts = self._resolved.answer(answer, 0)
        except Exception as error:
            raise Elsewhere from error
        for act in acts:
            if act.kind == "wait" or act.kind == "recompute":
                return acts
        self.apply(acts, op)
        return []

    def _are_dropped(self, answer: list[Action], op: int) -> bool:
        """Whether all of an answer are drops of copies by ids, which then have been carried out."""
        copies, ids, drops = self._copies, self._ids, list[tuple[int, int]]()
        for action in answer:
            if type(action) is not Drop or type(action.tensor) is not int or action.tier not in ids:
                return False
            drops.append((action.tensor, ids[action.tier]))
        for tensor, tier in drops:
            if tensor < 0 or self._producer[tensor] >= self._anchor or copies.pins[tensor]:
                raise Elsewhere
            copies.drop(tensor, tier, op)
        return True

    def apply(self, acts: Sequence[Act], op: int) -> None:
        """Drops and moves of an answer, at an op. Raises Elsewhere for what may not be dropped or moved."""
        copies, producer, anchor = self._copies, self._producer, self._anchor
        for act in acts:
            _, tensor, tier, move = act
            if producer[tensor] >= anchor or copies.pins[tensor]:
                raise Elsewhere
            if move is None:
                copies.drop(tensor, tier, op)
            elif move.wire is not None or move.codec is not None:
                raise Elsewhere
            else:
                copies.move(act, op)

    def relieve(self, tier: int, bytes: int, op: int, reason: str) -> bool:
        """Have something leave a tier; whether anything did, or will, if only a release of 0 bytes."""
        copies, online = self._copies, self._online
        if online is None:
            return copies.free_longest_dead(tier)
        deficit = bytes - (copies.capacity[tier] - copies.used[tier]) - copies.leaving[tier]
        need = Need(self._tiers[tier], bytes, max(1, deficit), op, reason)
        copies.count("pressure_calls")
        self.tell()
        try:
            acts = self._resolved.answer(online.on_pressure(need, self._view), 0, pressure=True)
        except Exception as error:
            raise Elsewhere from error
        if self._view.is_short_sighted:
            raise Elsewhere
        before = copies.leaving[tier], len(copies.changes)
        self.apply(acts, op)
        return before != (copies.leaving[tier], len(copies.changes))
