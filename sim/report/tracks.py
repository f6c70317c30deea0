"""What a trace viewer shows of a log: tracks, slices on them, flows between slices, counters.

Nothing here depends on a file format; `timeline` writes the files.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.analysis.peak_memory import memory_over_time
from sim.hardware.platform import Link, Platform
from sim.log import STALLS, WHY, WHYS, EventLog
from sim.trace.columns import distinct
from sim.trace.op import KINDS, PHASES
from sim.trace.tensor import ROLES

Ints = NDArray[np.int64]
Args = dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Track:
    """A row of the viewer.

    process: a device's index, or `platform.devices` for what all share.
    lane: position in `platform.lanes`.
    slot: 0, or k for what overlaps slots 0..k-1 of the same lane (a link with several copy engines).
    """

    name: str
    process: int
    lane: int
    slot: int
    is_main: bool


@dataclass(frozen=True, slots=True)
class Counter:
    """A step curve of bytes over time (ns); both columns have the same shape."""

    name: str
    process: int
    times: Ints
    bytes: Ints


@dataclass(frozen=True, eq=False)
class Scene:
    """A log as tracks. Slices are the rows of `log.intervals`, each on exactly one track."""

    log: EventLog

    @cached_property
    def processes(self) -> tuple[str, ...]:
        """Names of the groups of tracks: each device, then what all share."""
        return (*(f"device {i}" for i in range(self.log.platform.devices)), "shared")

    @cached_property
    def order(self) -> Ints:
        """Rows of `log.intervals` in order of start, then end; copies first where both are equal."""
        log = self.log
        late = log.interval("why") != WHY["move"]
        return np.lexsort((late, log.interval("end"), log.interval("start")))

    @cached_property
    def _slots(self) -> Ints:
        """Per row of `log.intervals` its slot: the lowest one of its lane that is free at its start."""
        slots = np.zeros(len(self.log.intervals), np.int64)
        start, end, lane = (self.log.interval(name) for name in ("start", "end", "lane"))
        for number in distinct(lane):
            rows = self.order[lane[self.order] == number]
            ends = np.maximum.accumulate(end[rows])
            if (ends[:-1] <= start[rows][1:]).all():
                continue
            busy: list[tuple[int, int]] = []  # (until, slot)
            idle: list[int] = []
            for row, begin, until in zip(rows.tolist(), start[rows].tolist(), end[rows].tolist()):
                while busy and busy[0][0] <= begin:
                    heapq.heappush(idle, heapq.heappop(busy)[1])
                slot = heapq.heappop(idle) if idle else len(busy)
                heapq.heappush(busy, (until, slot))
                slots[row] = slot
        return slots

    @cached_property
    def tracks(self) -> tuple[Track, ...]:
        """All engines and links, busy or not, in the order of `platform.lanes`; extra slots behind their lane."""
        platform, lane = self.log.platform, self.log.interval("lane")
        found = []
        for number, name in enumerate(platform.lanes):
            slots = int(self._slots[lane == number].max(initial=0)) + 1
            process = _process_of_lane(platform, number)
            main = number < len(platform.engines) and platform.engines[number].main
            for slot in range(slots):
                label = name if slot == 0 else f"{name} ({slot + 1})"
                found.append(Track(label, process, number, slot, main and slot == 0))
        return tuple(found)

    @cached_property
    def track_of(self) -> Ints:
        """Per row of `log.intervals` the position of its track in `tracks`."""
        first = np.zeros(len(self.log.platform.lanes), np.int64)
        for position in range(len(self.tracks) - 1, -1, -1):
            first[self.tracks[position].lane] = position
        return first[self.log.interval("lane")] + self._slots

    # ---- slices --------------------------------------------------------------------------------

    def describe(self, row: list[int]) -> tuple[str, Args]:
        """Name and arguments of one row of `log.intervals`: what ran, moved or waited, and why."""
        _, _, device, lane, why, op, tensor, cause, bytes = row
        trace, platform = self.log.trace, self.log.platform
        ops, tensors = trace.op_columns, trace.tensor_columns
        kind = WHYS[why]
        args: Args = {"why": kind}
        if kind == "stall":
            args["cause"] = STALLS[cause]
            name = f"stall: {STALLS[cause]}" if STALLS[cause] else "stall"
        elif kind == "move" and tensor >= 0:
            name = tensors.name[tensor]
        else:
            name = ops.name[op] if op >= 0 else kind
            if kind == "recompute":
                name = f"recompute {name}"
        if op >= 0:
            args |= {"op": ops.name[op], "kind": KINDS[ops.kind[op]], "phase": PHASES[ops.phase[op]]}
        if tensor >= 0:
            args |= {"tensor": tensors.name[tensor], "role": ROLES[tensors.role[tensor]]}
        layer = int(tensors.layer[tensor]) if tensor >= 0 and (kind == "move" or op < 0) else -1
        if layer < 0 <= op:
            layer = int(ops.layer[op])
        if layer >= 0:
            args["layer"] = layer
        if lane >= len(platform.engines):
            link = platform.links[lane - len(platform.engines)]
            args |= {"from": link.source, "to": link.target}
        if bytes:
            args["bytes"] = bytes
        if device >= 0:
            args["device"] = device
        return name, args

    # ---- flows ---------------------------------------------------------------------------------

    @cached_property
    def flows(self) -> tuple[tuple[int, int], ...]:
        """Pairs of rows of `log.intervals`: a copy, and the run that first reads the copied tensor.

        The run starts when the copy has ended or later, on an engine that reaches the copy's destination, while the
        tensor is still resident there. A copy over several links gives a flow from the link whose end the reader
        reaches. A copy that nobody reads there gives none.
        """
        log, platform = self.log, self.log.platform
        rows, first_link = log.intervals, len(platform.engines)
        readers, gone = self._readers, self._gone
        reaches = [{platform.tier_ids[name] for name in engine.reaches} for engine in platform.engines]
        found = []
        moves = np.flatnonzero((rows[:, 4] == WHY["move"]) & (rows[:, 3] >= first_link) & (rows[:, 6] >= 0))
        for row in moves.tolist():
            _, end, _, lane, _, _, tensor, _, _ = rows[row].tolist()
            tier = platform.tier_ids[platform.links[lane - first_link].target]
            removals = gone.get((tensor, tier), ())
            after = bisect_left(removals, end)
            until = removals[after] if after < len(removals) else None
            runs = readers.get(tensor, ())
            for position in range(bisect_left(runs, (end,)), len(runs)):
                start, _, engine, reader = runs[position]
                if until is not None and start > until:
                    break
                if engine < first_link and tier in reaches[engine]:
                    found.append((row, reader))
                    break
        return tuple(found)

    @cached_property
    def _readers(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """Per moved tensor who reads it: (start, end, lane, row), in order of start."""
        rows, columns = self.log.intervals, self.log.trace.op_columns
        moved = set(rows[rows[:, 4] == WHY["move"], 6].tolist())
        found: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        runs = np.isin(rows[:, 4], [WHY["run"], WHY["recompute"], WHY["codec"]]) & (rows[:, 5] >= 0)
        starts, reads = columns.read_start.tolist(), columns.read_ids.tolist()
        for row in self.order[runs[self.order]].tolist():
            start, end, _, lane, _, op = rows[row, :6].tolist()
            for tensor in set(reads[starts[op] : starts[op + 1]]) & moved:
                found[tensor].append((start, end, lane, row))
        return {tensor: sorted(runs) for tensor, runs in found.items()}

    @cached_property
    def _gone(self) -> dict[tuple[int, int], list[int]]:
        """Per tensor and tier the times at which its last byte there was released."""
        left: dict[tuple[int, int], int] = defaultdict(int)
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for time, tier, delta, tensor, _, _ in self.log.changes.tolist():
            if tensor >= 0:
                left[tensor, tier] += delta
                if delta < 0 and left[tensor, tier] == 0:
                    found[tensor, tier].append(time)
        return found

    # ---- counters ------------------------------------------------------------------------------

    @cached_property
    def counters(self) -> tuple[Counter, ...]:
        """Bytes in use per tier, and bytes that its allocator reserved where it keeps a reserve."""
        log, platform, found = self.log, self.log.platform, []
        used = [memory_over_time(log, tier.name) for tier in platform.tiers]
        kept = [log.reserved[log.reserved[:, 1] == number] for number in range(len(platform.tiers))]
        curves = [("in use", *curve) for curve in used]
        curves += [("reserved", rows[:, 0], np.cumsum(rows[:, 2])) for rows in kept]
        for (label, times, levels), tier in zip(curves, (*platform.tiers, *platform.tiers), strict=True):
            if len(times):
                process = tier.device if tier.device >= 0 else platform.devices
                keep = level_points(times, levels)
                found.append(Counter(f"{tier.name} {label}", process, times[keep], levels[keep]))
        return tuple(found)


def level_points(times: Ints, levels: Ints) -> NDArray[np.intp]:
    """Positions of the changes that draw a level: the last one of each time, and the highest one where it is higher.

    times: ns, rising, repeated where several changes fall on one nanosecond; levels: after each change, not below 0.
    So what is released and taken again at once makes no dip, and still the curve has the maximum of all levels.
    """
    if not len(times):
        return np.zeros(0, np.intp)
    first = np.flatnonzero(np.diff(times, prepend=times[0] - 1))
    last = np.append(first[1:], len(times)) - 1
    top = np.lexsort((levels, times))[last]  # times rise, so each keeps its range of positions
    return distinct(np.concatenate((last, top[levels[top] > levels[last]])))


def _process_of_lane(platform: Platform, lane: int) -> int:
    if lane < len(platform.engines):
        device = platform.engines[lane].device
    else:
        device = _device_of_link(platform, platform.links[lane - len(platform.engines)])
    return device if device >= 0 else platform.devices


def _device_of_link(platform: Platform, link: Link) -> int:
    """The device that a link belongs to: its source's, else its target's, -1 for a link between shared tiers."""
    source, target = platform.tier(link.source).device, platform.tier(link.target).device
    return source if source >= 0 else target


def events(scene: Scene) -> Iterator[tuple[int, int, int]]:
    """(time, row, what) of all begins (what 0) and ends (what 1) of slices, so that a viewer can nest them.

    In order of time; within one nanosecond ends of longer slices, then slices of no length, then begins.
    """
    rows = scene.order
    start, end = scene.log.interval("start")[rows], scene.log.interval("end")[rows]
    empty = start == end
    place = np.arange(len(rows), dtype=np.int64)
    time = np.concatenate((start, end))
    rank = np.concatenate((np.where(empty, 1, 2), np.where(empty, 1, 0)))
    what = np.repeat([0, 1], len(rows))
    order = np.lexsort((what, np.tile(place, 2), rank, time))
    both = np.tile(rows, 2)
    yield from zip(time[order].tolist(), both[order].tolist(), what[order].tolist())
