"""An online part that evicts under pressure: what is resident where, what is pinned, and what is evicted first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from operator import truediv
from random import Random

import numpy as np
from numpy.typing import NDArray

from sim.eviction.evictable import CandidateSet, Kin, Lineage, ScoreTable
from sim.eviction.ranking import ranking_for
from sim.native import mypyc_attr
from sim.plan import Action, Change, ChangeFields, Drop, Memory, Need, Online, Problem, Recompute

DEALLOCATIONS = ("ignore", "eager", "banish")


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class Rules:
    """How an evictor decides; see the parameters of the policy `dtr`."""

    heuristic: str = "dtr_eq"
    deallocation: str = "eager"
    ties: str = "last"
    staleness: str = "own"
    by_size: bool = True
    ignore_small: float = 0.0
    sample: bool = False
    reload_is_access: bool = False


def evictable_tiers(problem: Problem) -> tuple[str, ...]:
    """The tiers in which results are allocated: the homes of all engines."""
    return tuple(dict.fromkeys(engine.home for engine in problem.platform.engines))


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Evictor(Online):
    """Tracks residency through `notice`, frees dead tensors, and drops the least candidate under pressure.

    The plan must say `keep_dead`, so that dead tensors are freed here and nowhere else. A tensor is pinned from
    the moment an op that reads it is opened until that op ends; a dead tensor that was recomputed on the way
    to another one stays until it is evicted.
    """

    def __init__(self, lineage: Lineage, rules: Rules, *, tiers: Sequence[str], evicts: Sequence[str], seed: int):
        count = len(lineage.size)
        self.line = lineage
        self._inputs, self._results, self._producers = lineage.reads, lineage.writes, lineage.producer
        self.rules = rules
        self.tiers = tuple(tiers)
        self.candidates = {tier: CandidateSet() for tier in evicts}
        self.bit = {tier: 1 << i for i, tier in enumerate(tiers)}
        self.copies = [0] * count
        self.evicted = [False] * count  # produced, evicted, and part of the graph
        self.fixed = [False] * count  # something that its recomputation needs cannot be recomputed
        self.kin = Kin(lineage)
        self.table = ScoreTable(lineage)
        self._orders = self.table.order
        self.random = Random(seed)
        self.ranking, self.price = ranking_for(
            rules.heuristic,
            lineage,
            self.kin,
            self.table,
            self.evicted,
            staleness=rules.staleness,
            by_size=rules.by_size,
            ties=rules.ties,
            random=self.random,
        )
        self.pinned: set[int] = set()
        self._views = lineage.view_of
        self._is_eager, self._banishes = rules.deallocation == "eager", rules.deallocation == "banish"
        self._reload_is_access, self._counts_bytes = rules.reload_is_access, rules.ignore_small > 0
        self._may_go = list(lineage.evictable)  # and not fixed
        self._pins = [0] * count
        self._produced = [False] * count
        self._banished = [False] * count
        self._strays: set[int] = set()  # banished, but recomputed together with another result
        self._released = [False] * count
        self._holders = list(lineage.holders)
        self._at: dict[int, int] = {}
        self._due: list[int] = []
        self._ended = -1
        self._order = self._order_before = 0  # before the last op that has ended, too
        self._leaving: dict[int, str] = {}
        self._overwritten: list[int] = []
        self._produced_bytes = self._produced_count = 0

    # ---- what happens ------------------------------------------------------------------------

    def notice(self, change: Change) -> None:
        """The same for one."""
        Evictor.notice_all(self, (change,))

    def notice_all(self, changes: Sequence[ChangeFields]) -> None:
        """Update the state."""
        copies, access, pins, leaving = self.copies, self.table.accesses, self._pins, self._leaving
        views, bit, sets, pinned, may_go = self._views, self.bit, self.candidates, self.pinned, self._may_go
        for what, tensor, tier, now in changes:
            if views and tensor in views:
                self._notice_view((what, tensor, tier, now))
            elif what == "read":
                if self._overwritten:
                    self._lose_overwritten()
                self._ended = -1
                pins[tensor] += 1
                pinned.add(tensor)
                if not self._banishes or not self._released[tensor]:
                    # under banishing a recomputation on the way to another tensor does not count as an access
                    access[tensor] = now
                if tensor in leaving:
                    self.stay(tensor)
            elif what == "came":
                held = copies[tensor]
                copies[tensor] = held | bit[tier]
                if not held:
                    self._arrive(tensor, now)
                elif self._reload_is_access:
                    access[tensor] = now
                if may_go[tensor] and tier in sets:
                    sets[tier].add(tensor)
            else:
                copies[tensor] = held = copies[tensor] & ~bit[tier]
                if leaving.pop(tensor, "") != tier and tier in sets:  # what was to leave is none already
                    sets[tier].remove(tensor)
                if held or self.evicted[tensor]:
                    continue
                if pins[tensor]:
                    self._overwritten.append(tensor)
                elif self.line.counts[tensor] and not self._banished[tensor]:
                    self.evicted[tensor] = True
                    if self.price is not None:
                        self.price.went(tensor)

    def _notice_view(self, change: ChangeFields) -> None:
        """A view comes and goes with its storage; whoever reads it reads that, too."""
        what, view, tier, now = change
        if what == "came":
            self.copies[view] |= self.bit[tier]
            producer = self.line.producer[view]
            if self._ended != producer:
                self._end(producer)
            if not self._produced[view]:
                self._produced[view] = True
                self.table.accesses[self.line.view_of[view]] = now
        elif what == "went":
            self.copies[view] &= ~self.bit[tier]

    def _drop_views(self, storage: int) -> list[Action]:
        """Drop the views of an evicted storage: without it they are undefined."""
        views, bits = self.line.views_in.get(storage, ()), self.bit.items()
        return [Drop(view, tier) for view in views for tier, bit in bits if self.copies[view] & bit]

    def _arrive(self, tensor: int, now: int) -> None:
        """It is resident after it was nowhere: its producer has ended, or it exists from the beginning."""
        producer, again = self._producers[tensor], self._produced[tensor]
        if not again:
            self._produced[tensor] = True
            self.table.accesses[tensor] = now
            if self._counts_bytes and self.line.evictable[tensor] and self.line.size[tensor]:
                self._produced_bytes += self.line.size[tensor]
                self._produced_count += 1
        if producer < 0:
            return
        if self._ended != producer:
            self._end(producer)
        # results come before the reads that the op unlocks; of a first run the first result comes last
        made = self._results[producer]
        if made[0] != tensor:
            self._orders[tensor] = self._order_before + made.index(tensor)
        else:
            self._orders[tensor] = self._order_before if again else self._order_before + len(made)
        if again:
            if self._banished[tensor]:
                self._strays.add(tensor)
            if self.evicted[tensor]:
                self.evicted[tensor] = False
                if self.price is not None:
                    self.price.came(tensor)

    def _end(self, op: int) -> None:
        """An op has ended: what it read is evictable again, later than all before."""
        self._ended = op
        pins, orders, pinned = self._pins, self._orders, self.pinned
        self._order_before = self._order
        at = self._order + len(self._results[op]) + 1
        for tensor in self._inputs[op]:
            orders[tensor] = at
            at += 1
            if pins[tensor] > 1:
                pins[tensor] -= 1
            else:
                pins[tensor] = 0
                pinned.discard(tensor)
                if self._banishes and self._released[tensor]:
                    self._due.append(tensor)
        self._order = at

    def _lose(self, tensor: int) -> None:
        """Its last copy goes."""
        if self.line.counts[tensor] and not self._banished[tensor]:
            self.evicted[tensor] = True
            if self.price is not None:
                self.price.went(tensor)

    def _lose_overwritten(self) -> None:
        """Tensors overwritten in place are lost after the results have arrived, and join what is evicted then."""
        lost, self._overwritten = self._overwritten, []
        for tensor in lost:
            if not self.copies[tensor]:
                self._lose(tensor)

    def stay(self, tensor: int) -> None:
        """An eviction was cancelled, because the tensor is needed or never left: it is a candidate again."""
        candidates = self.candidates[self._leaving.pop(tensor)]
        if self._may_go[tensor]:
            candidates.add(tensor)

    # ---- the dead ----------------------------------------------------------------------------

    def released(self, tensor: int) -> bool:
        """Whether all its readers have run, and the program has released it."""
        return self._released[tensor]

    def free_later(self, tensor: int) -> None:
        """Look at a dead tensor again before the next op."""
        self._due.append(tensor)

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """Free what the op before was the last to use; save what this one would make impossible to make."""
        if self._overwritten:
            self._lose_overwritten()
        line, reads, writes = self.line, self._inputs, self._results
        device = line.device[op]
        done = self._at.get(device, -1)
        self._at[device] = op
        if done >= 0:
            if not writes[done]:
                self._end(done)
            holders, freeable = self._holders, line.freeable
            let_go = line.releases[done] if line.releases and done in line.releases else ()
            for tensor in (*reads[done], *let_go) if let_go else reads[done]:
                holders[tensor] = left = holders[tensor] - 1
                if not left and freeable[tensor]:
                    self._due.append(tensor)
            for tensor in writes[done]:
                if not holders[tensor] and freeable[tensor] and tensor not in let_go:
                    self._due.append(tensor)
        self._ended = -1
        answer: list[Action] = self._free_the_dead(memory) if self._due else []
        if op in line.views:
            for storage in self.kin.add_views(op):
                if self.rules.heuristic == "local":  # other weights are lower bounds, and stay so
                    self.table.weight[storage] = self.kin.cost[storage]
        if op in line.overwrites:
            for old in line.overwrites[op]:
                missed, all_of_it = self._made_from(old)
                answer += [Recompute(p) for p in sorted({line.producer[t] for t in missed})]
                self._fix(all_of_it)
        return answer

    def _free_the_dead(self, memory: Memory) -> list[Action]:
        answer: list[Action] = []
        line, released, due = self.line, self._released, self._due
        self._due = []
        for tensor in due if len(due) == 1 else dict.fromkeys(due):  # one that died in flight is due twice
            if not self._produced[tensor] or memory.is_locked(tensor):
                self._due.append(tensor)  # an op beside the device has not ended
                continue
            released[tensor] = True
            if self._banishes:
                if not self._banished[tensor] and not self._has_evicted_child(tensor):
                    answer += self._banish(tensor)
            elif not line.counts[tensor] or self.fixed[tensor]:  # it cannot be recomputed
                missed, all_of_it = self._made_from(tensor)
                if missed:
                    self._due.append(tensor)
                else:
                    self._fix(all_of_it)
                    self._add_drops(tensor, answer)
            elif self._is_eager or not line.evictable[tensor]:
                self._add_drops(tensor, answer)
        return answer

    def _add_drops(self, tensor: int, answer: list[Action]) -> None:
        """Add the drops of all its copies, and of its views, to an answer, unless it is leaving."""
        if tensor in self._leaving:
            return
        copies, sets = self.copies[tensor], self.candidates
        for tier, bit in self.bit.items():
            if copies & bit:
                answer.append(self.line.drop(tensor, tier))
                if tier in sets:
                    sets[tier].remove(tensor)
                    self._leaving[tensor] = tier
        if self._views:
            answer += self._drop_views(tensor)

    def _has_evicted_child(self, tensor: int) -> bool:
        strays, copies, kin = self._strays, self.copies, self.kin
        if any(self.evicted[c] or (c in strays and not copies[c]) for c in kin.children[tensor]):
            return True
        made_from, storage = kin.views_made_from.get(tensor, ()), self.line.view_of
        return any(not copies[view] and not self._banished[storage[view]] for view in made_from)

    def _banish(self, tensor: int) -> list[Action]:
        """Free it for good; its children cannot be recomputed any more."""
        self._banished[tensor] = True
        if self.evicted[tensor]:
            self.evicted[tensor] = False
            if self.price is not None:
                self.price.vanished(tensor)
        self._fix(c for c in self.kin.children[tensor] if self.copies[c] and not self._banished[c])
        answer: list[Action] = []
        self._add_drops(tensor, answer)
        return answer

    def _made_from(self, tensor: int) -> tuple[list[int], set[int]]:
        """The tensors that cannot be recomputed without this one, down to those that are resident and needed.

        Two answers: those among them that are evicted and still needed; all of them.
        """
        missed: list[int] = []
        seen, stack = {tensor}, [tensor]
        while stack:
            for child in self.kin.children[stack.pop()]:
                if child in seen or not self._produced[child] or self.fixed[child]:
                    continue
                seen.add(child)
                if self.evicted[child] or self._released[child]:
                    stack.append(child)
                    if not self._released[child]:
                        missed.append(child)
        seen.remove(tensor)
        return missed, seen

    def _fix(self, tensors: Iterable[int]) -> None:
        """They cannot be recomputed: their resident copies stay until the last read.

        Under banishing, a released tensor stays until it is read once more, as the authors have it.
        """
        for tensor in tensors:
            self.fixed[tensor] = True
            self._may_go[tensor] = False
            if self._released[tensor] and self.copies[tensor] and self.rules.deallocation != "banish":
                self._due.append(tensor)
            for candidates in self.candidates.values():
                candidates.remove(tensor)

    # ---- pressure ----------------------------------------------------------------------------

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """The least candidates, one after the other, until their bytes are enough."""
        self._lose_overwritten()
        self._ended = -1
        candidates = self.candidates.get(need.tier)
        if candidates is None:
            return ()
        for tensor in [t for t, tier in self._leaving.items() if tier == need.tier]:
            if self.copies[tensor] & self.bit[need.tier] and memory.in_flight(tensor) is None:
                self.stay(tensor)
        answer: list[Action] = []
        freed = 0
        if self.rules.deallocation == "banish" and self._due:
            answer = self._free_the_dead(memory)
            freed = sum(self.line.size[int(a.tensor)] for a in answer if isinstance(a, Drop) and a.tier == need.tier)
        barred = self.pinned
        while freed < need.short and len(candidates):
            tensor = self.choose(candidates, need.tier, memory, barred)
            if tensor < 0:
                break
            action = None if memory.is_locked(tensor) else self.evict(tensor, need, memory)
            if action is None:
                barred = barred | {tensor}
                continue
            answer.append(action)
            freed += self.line.size[tensor]
            candidates.remove(tensor)
            self._leaving[tensor] = need.tier
            if isinstance(action, Drop) and self.copies[tensor] == self.bit[need.tier]:
                self._lose(tensor)
                if self._views:
                    answer += self._drop_views(tensor)
        return answer

    def choose(self, candidates: CandidateSet, tier: str, memory: Memory, barred: set[int]) -> int:
        """The candidate in a tier that goes next, -1 for none; never one of the barred."""
        rules, now = self.rules, memory.now
        if rules.ignore_small or rules.sample:
            ids = self._subset(candidates)
            found = self.ranking.least(candidates, now, barred, ids) if len(ids) else -1
            if found >= 0:
                return found
        return self.ranking.least(candidates, now, barred)

    def _subset(self, candidates: CandidateSet) -> NDArray[np.int64]:
        """The candidates that are large enough, or that steps of 1 … sqrt(candidates) hit."""
        ids, random = candidates.ids, self.random
        if self.rules.sample:
            stride = isqrt(len(ids))
            hit = list(accumulate(random.randint(1, stride) for _ in range(len(ids))))
            ids = ids[[at - 1 for at in hit if at <= len(ids)]]
        mean = float(truediv(self._produced_bytes, max(self._produced_count, 1)))
        return ids[self.table.size.take(ids) >= self.rules.ignore_small * mean]

    def evict(self, tensor: int, need: Need, memory: Memory) -> Action | None:
        """What makes it leave the tier; None if it cannot now."""
        return Drop(tensor, need.tier) if memory.in_flight(tensor) is None else None


__all__ = ["DEALLOCATIONS", "Evictor", "Rules", "evictable_tiers"]
