"""The plan of a guided iteration, and what it learns from how the last one went."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.eviction.evictable import lineage_of
from sim.log import STALL, WHY, EventLog
from sim.plan import Action, Drop, Move, Problem, Run
from sim.policies.hybrid.capuchin.choosing import Choice, choose
from sim.policies.hybrid.capuchin.link import leads, outs_end
from sim.policies.hybrid.capuchin.measured import Ints, candidates_of, liveness_of, timeline_of


@dataclass(frozen=True)
class Guide:
    """What is swapped and recomputed, and when copies back begin.

    choice: the tensors.
    starts: per device its ops on the main engine, in order, and when each starts, in ns.
    out_end: per swapped tensor the end of its copy out, in ns.
    room: per tier the bytes that are free while each op runs and everything chosen is away.
    lead: per swapped tensor how much earlier than its copy needs it returns, in ns.
    """

    choice: Choice
    starts: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    out_end: Mapping[int, int]
    room: Mapping[str, Ints]
    lead: Mapping[int, int]

    @property
    def back(self) -> dict[int, int]:
        """The back-access of each tensor that is recomputed."""
        return {one.tensor: one.back for one in self.choice.recomputed}

    def in_triggers(self) -> dict[int, int]:
        """Per swapped tensor the op before which its copy back begins: in time, but not while memory is full.

        A copy that is needed before another one does not begin after it, as far as its own bounds allow.
        """
        swaps = sorted(self.choice.swaps, key=lambda each: (each.back, each.tensor))
        latest: list[int] = []
        behind = dict.fromkeys(self.starts, 1 << 62)  # per device the first of those needed later
        for one in reversed(swaps):
            starts = self.starts[one.device][1]
            when = one.wanted - one.into - self.lead.get(one.tensor, 0)
            behind[one.device] = min(bisect_right(starts, when) - 1, behind[one.device])
            latest.append(behind[one.device])
        room = {home: free.copy() for home, free in self.room.items()}
        triggers: dict[int, int] = {}
        before = dict.fromkeys(self.starts, 0)
        for one, wish in zip(swaps, reversed(latest), strict=True):
            ops, starts = self.starts[one.device]
            full = np.flatnonzero(room[one.home][one.evicted + 1 : one.back] < one.bytes)
            clear = one.evicted + 1 + (int(full[-1]) + 1 if len(full) else 0)
            earliest = max(bisect_left(ops, clear), bisect_left(starts, self.out_end[one.tensor]), before[one.device])
            before[one.device] = place = min(max(wish, earliest), bisect_left(ops, one.back))
            triggers[one.tensor] = ops[place]
            room[one.home][ops[place] : one.back] -= one.bytes
        return triggers

    def actions(self, host: str) -> list[Action]:
        """Two moves per swapped tensor, a drop per recomputed one. Copies that start together queue as needed."""
        triggers = self.in_triggers()
        out: list[Action] = [Move(one.tensor, host, after=one.evicted) for one in self.choice.swaps]
        drops: list[Action] = [Drop(one.tensor, one.home, after=one.evicted) for one in self.choice.recomputed]
        wanted = sorted(self.choice.swaps, key=lambda one: (one.back, one.tensor))
        return [*out, *drops, *(Move(one.tensor, one.home, before=triggers[one.tensor]) for one in wanted)]

    def after(self, log: EventLog, share: float) -> Guide:
        """The same, with earlier in-triggers for tensors that were in flight when an op of their device needed them."""
        late = (log.interval("why") == WHY["stall"]) & np.isin(log.interval("cause"), [STALL["transfer"]])
        waits = set(zip(log.interval("tensor")[late].tolist(), log.interval("op")[late].tolist()))
        lead = dict(self.lead)
        for one in self.choice.swaps:
            if (one.tensor, one.back) in waits:
                lead[one.tensor] = lead.get(one.tensor, 0) + round(share * one.into)
        return replace(self, lead=lead)


def guide_from(problem: Problem, measured: Run, movable: Sequence[bool], *, queued: bool) -> Guide:
    """The first guide, from the measured iteration."""
    trace, platform = problem.trace, problem.platform
    assert platform.host is not None
    line, times, live = lineage_of(problem), timeline_of(measured.log), liveness_of(trace, platform)
    need = {home: max(int(used.max(initial=0)) - platform.tier(home).capacity, 0) for home, used in live.used.items()}
    candidates = candidates_of(problem, line, movable, times, live, platform.host.name)
    start_of = {op: start for op, start in enumerate(times.start.tolist()) if start >= 0}
    choice = choose(trace, line, live, candidates, need, queued=queued)
    room = {home: platform.tier(home).capacity - used for home, used in live.used.items()}
    for one in (*choice.swaps, *choice.recomputed):
        room[one.home][one.evicted + 1 : one.back] += one.bytes
    starts = {}
    for device in range(trace.devices):
        ops = [op for op in start_of if line.device[op] == device and op not in trace.op_columns.engine]
        starts[device] = ops, [start_of[op] for op in ops]
    out_end, lead = {}, {}
    for home in need:
        swaps = [one for one in choice.swaps if one.home == home]
        out_end.update(outs_end(swaps))
        if queued:
            lead.update(leads(swaps))
    return Guide(choice, starts, out_end, room, lead)
