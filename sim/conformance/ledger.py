"""The suite's own ledger: who held what where and when, read from a log, and of the plan what it recomputes.

It shares no code with the engine. A `Stay` is one copy of a tensor in one tier, from the row that took its
space to the row that gave it back; a `Work` is one run of an op; a `Copy` is one transfer of a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from sim.log import CAUSE, FIRST_RUNS, WHY, EventLog
from sim.trace.graph import Trace

FOREVER = 1 << 62
MADE, MOVED_IN, PLACED = CAUSE["made"], CAUSE["moved in"], CAUSE["placed"]
OVERWRITTEN, FREED, CALLED_OFF = CAUSE["overwritten"], CAUSE["freed"], CAUSE["called off"]
RUN, RECOMPUTE, MOVE, CODEC, STALL = (WHY[name] for name in ("run", "recompute", "move", "codec", "stall"))
FIRST = tuple(WHY[name] for name in FIRST_RUNS)


@dataclass(slots=True, eq=False)
class Stay:
    """A tensor's copy in a tier. Times in ns.

    row: the change that took its space.
    take: when that was.
    come: when its value was complete, FOREVER if it never was.
    release: when its space was released, FOREVER if it remains.
    work, copy: the run that produced it, or the transfer that copied it.
    heir: the tensor that took over its storage.
    """

    row: int
    tensor: int
    tier: int
    bytes: int
    cause: int
    take: int
    come: int = FOREVER
    release: int = FOREVER
    gone_by: int = -1
    work: Work | None = None
    copy: Copy | None = None
    heir: Stay | None = None
    forebear: Stay | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One run of an op: from start to end (ns) on a lane, -1 for a member of a group, which runs on links."""

    op: int
    start: int
    end: int
    device: int
    lane: int
    why: int


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One transfer over the links `route` from tier to tier (positions); `bytes` are those on the wire."""

    tensor: int
    op: int
    start: int
    end: int
    route: tuple[int, ...]
    source: int
    target: int
    bytes: int


class Ledger:
    """A log's rows as stays, works and copies.

    log: of a run. It says of an op on an engine whether a run is a recomputation; of a collective it has the bytes on
        its links alone, see `_why_of_groups`.
    planned: how often the plan recomputes each op; None where an online part may ask for any.
    faults: rows that contradict others.
    """

    def __init__(self, log: EventLog, planned: Mapping[int, int] | None = MappingProxyType({})) -> None:
        self.log = log
        self.trace: Trace = log.trace
        self.engines = len(log.platform.engines)
        self.faults: list[str] = []
        self.tier_names = [tier.name for tier in log.platform.tiers]
        self.names = self.trace.tensor_columns.name
        self.op_names = self.trace.op_columns.name
        self.planned = planned
        self.works, self.group_moves, self.copies = self._intervals()
        self.works_of: dict[int, list[Work]] = defaultdict(list)
        for work in sorted(self.works, key=lambda work: (work.start, work.end)):
            self.works_of[work.op].append(work)
        self.stays = self._stays()
        self.of: dict[int, list[Stay]] = defaultdict(list)
        for stay in self.stays:
            self.of[stay.tensor].append(stay)
        self._complete()

    # ---- intervals ---------------------------------------------------------------------------

    def _intervals(self) -> tuple[list[Work], list[Copy], list[Copy]]:
        group, members = self.trace.op_columns.group, defaultdict(list)
        for op, name in sorted(group.items()):
            members[name].append(op)
        works: list[Work] = []
        groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        hops: list[tuple[int, int, int, int, int, int]] = []
        for start, end, device, lane, why, op, tensor, _, size in self.log.intervals.tolist():
            if end < start or start < 0 or end > self.log.end:
                self.faults.append(f"an interval from {start} to {end} ns in a log that ends at {self.log.end}")
            if why in (RUN, RECOMPUTE, CODEC):
                works.append(Work(op, start, end, device, lane, why))
            elif why == MOVE and tensor < 0:
                groups.setdefault((op, start, end), []).append((lane - self.engines, size))
            elif why == MOVE:
                hops.append((tensor, op, start, end, lane - self.engines, size))
        links, tier = self.log.platform.links, self.log.platform.tier_ids
        moves, whys = [], self._why_of_groups(list(groups), members)
        for (op, start, end), rows in groups.items():
            for link, size in rows:
                ends = tier[links[link].source], tier[links[link].target]
                moves.append(Copy(-1, op, start, end, (link,), *ends, size))
            device = self.trace.op_columns.device
            why = whys[op, start, end]
            works += [Work(m, start, end, int(device[m]), -1, why) for m in members.get(group.get(op, ""), ())]
        copies: list[Copy] = []
        for tensor, op, start, end, link, size in hops:
            ends = tier[links[link].source], tier[links[link].target]
            last = copies[-1] if copies else None
            # the rows of one route follow each other
            same = last is not None and (last.tensor, last.op, last.start, last.end) == (tensor, op, start, end)
            if last is not None and same and last.target == ends[0] and start < end:
                copies[-1] = Copy(tensor, op, start, end, (*last.route, link), last.source, ends[1], size)
            else:
                copies.append(Copy(tensor, op, start, end, (link,), *ends, size))
        return works, moves, copies

    def _why_of_groups(
        self, runs: list[tuple[int, int, int]], members: Mapping[str, list[int]]
    ) -> dict[tuple[int, int, int], int]:
        """Whether each run of a group (op, start, end) is its first, a recomputation, or one that nothing asks for.

        It is a recomputation where a member's result was given up since the run before, or the plan asks for it: as
        often as it does, less the runs of the first kind, since a plan recomputes what it gave up.
        """
        changes, group = self.log.changes, self.trace.op_columns.group
        given_up = changes[changes[:, 2] < 0][:, [0, 3]]
        by_group: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for run in sorted(runs, key=lambda run: run[1:]):
            by_group[group.get(run[0], "")].append(run)
        found: dict[tuple[int, int, int], int] = {}
        for name, mine in by_group.items():
            found[mine[0]] = RUN
            if len(mine) == 1:
                continue
            results = [t for op in members.get(name, ()) for t in self.trace.writes(op)]
            released = given_up[np.isin(given_up[:, 1], results), 0]
            restored = [bool(((released >= before[2]) & (released <= run[1])).any()) for before, run in pairwise(mine)]
            asked = max((self.planned.get(op, 0) for op in members.get(name, ())), default=0) if self.planned else 0
            left = len(mine) if self.planned is None else asked - sum(restored)
            for run, is_restored in zip(mine[1:], restored, strict=True):
                found[run] = RECOMPUTE if is_restored or left > 0 else RUN
                left -= not is_restored
        return found

    # ---- stays -------------------------------------------------------------------------------

    def _stays(self) -> list[Stay]:
        replaces = self.trace.tensor_columns.replaces
        held: dict[tuple[int, int], Stay] = {}
        stays: list[Stay] = []
        overwritten: Stay | None = None
        clock = 0
        for row, (time, tier, delta, tensor, _, cause) in enumerate(self.log.changes.tolist()):
            if time < clock:
                self.faults.append(f"row {row} of the changes goes back in time, from {clock} to {time} ns")
            clock = time
            if tensor < 0:
                continue
            key, where = (tensor, tier), f"{self.names[tensor]!r} in {self.tier_names[tier]!r} at {time} ns"
            if cause in (MADE, MOVED_IN, PLACED):
                if key in held:
                    self.faults.append(f"{where}: space is taken for a copy that is resident already")
                stay = Stay(row, tensor, tier, delta, cause, time)
                if overwritten is not None and overwritten.tensor == replaces[tensor] and cause == MADE:
                    overwritten.heir, stay.forebear = stay, overwritten
                overwritten = None
                held[key] = stay
                stays.append(stay)
                continue
            stay_there = held.pop(key, None)
            if stay_there is None:
                self.faults.append(f"{where}: space is released that was not held")
                continue
            if stay_there.bytes != -delta:
                self.faults.append(f"{where}: {stay_there.bytes} B were taken and {-delta} B are released")
            stay_there.release, stay_there.gone_by = time, cause
            overwritten = stay_there if cause == OVERWRITTEN else None
        return stays

    def _complete(self) -> None:
        """When the value of each stay was complete, and the run or transfer that gave it."""
        producer = self.trace.producer
        arrivals: dict[tuple[int, int], list[Copy]] = defaultdict(list)
        for copy in sorted(self.copies, key=lambda copy: (copy.start, copy.end)):
            arrivals[copy.tensor, copy.target].append(copy)
        for stay in self.stays:
            if stay.cause == MOVED_IN and stay.gone_by != CALLED_OFF:
                self._match(stay, arrivals[stay.tensor, stay.tier])
        for stay in self.stays:
            if stay.cause == PLACED:
                stay.come = stay.take
            elif stay.cause == MADE:
                works = self.works_of.get(int(producer[stay.tensor]), [])
                if stay.forebear is not None:
                    found = next((work for work in works if work.end == stay.take), None)
                else:
                    found = next((work for work in works if work.start >= stay.take), None)
                if found is not None and found.end <= stay.release:
                    stay.work, stay.come = found, found.end
        self.unmatched = [copy for left in arrivals.values() for copy in left]

    def _match(self, stay: Stay, arrivals: list[Copy]) -> None:
        """The first transfer within a stay."""
        for copy in arrivals:
            if copy.start >= stay.take and copy.end <= stay.release:
                stay.copy, stay.come = copy, copy.end
                arrivals.remove(copy)
                return

    @cached_property
    def reach(self) -> list[set[int]]:
        """Per engine the tiers that it reads in place."""
        ids = self.log.platform.tier_ids
        return [{ids[engine.home], *(ids[name] for name in engine.reaches)} for engine in self.log.platform.engines]

    def engine_of(self, work: Work) -> int:
        """The engine whose reach decides what a run can read."""
        if work.lane >= 0:
            return work.lane
        return self.log.platform.engine_for(work.device, self.trace.op_columns.engine.get(work.op, ""))

    def remaining(self) -> list[Stay]:
        """What is still held when the log ends."""
        return [stay for stay in self.stays if stay.release == FOREVER]
