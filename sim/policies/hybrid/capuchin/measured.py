"""What a measured iteration tells: when each tensor is accessed, how memory would fill, and what is worth evicting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.eviction.evictable import Lineage
from sim.hardware.platform import Platform
from sim.log import FIRST_RUNS, STALL, WHY, EventLog
from sim.plan import Problem
from sim.trace.columns import distinct
from sim.trace.graph import Trace
from sim.trace.liveness import freeable

Ints = NDArray[np.int64]
WAITS = ("transfer", "space", "hazard", "wait")
"""What a device waits for because tensors move."""


@dataclass(frozen=True)
class Timeline:
    """Start and end of each op in ns without the waits for memory; -1 for an op that left no row in the log."""

    start: Ints
    end: Ints


def timeline_of(log: EventLog) -> Timeline:
    """The first run of each op, earlier by what its device had waited for memory until then."""
    count = len(log.trace.ops)
    times = np.full((2, count), -1, np.int64)
    why, device, start, end = (log.interval(name) for name in ("why", "device", "start", "end"))
    ran = np.isin(why, [WHY[name] for name in FIRST_RUNS])
    waited = (why == WHY["stall"]) & np.isin(log.interval("cause"), [STALL[cause] for cause in WAITS])
    for each in distinct(device[ran]).tolist():
        rows, stalls = ran & (device == each), waited & (device == each)
        order = np.argsort(end[stalls], kind="stable")
        total = np.concatenate(([0], np.cumsum((end - start)[stalls][order])))
        lost = total[np.searchsorted(end[stalls][order], start[rows], side="right")]
        times[:, log.interval("op")[rows]] = start[rows] - lost, end[rows] - lost
    return Timeline(times[0], times[1])


# ---- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Liveness:
    """Who would be resident when, if nothing were evicted.

    home: per tensor the tier where it is produced, or first used; "" where nothing uses it.
    last: per tensor the last op at which it is resident; the number of ops where it stays.
    used: per tier that is some device's home the bytes in use while each op runs.
    """

    home: Sequence[str]
    last: Sequence[int]
    used: dict[str, Ints]


def liveness_of(trace: Trace, platform: Platform) -> Liveness:
    """The allocations and releases of an iteration in program order, workspaces included."""
    c, t, count = trace.op_columns, trace.tensor_columns, len(trace.ops)
    engine_of = [platform.engine_for(int(c.device[op]), c.engine.get(op, "")) for op in range(count)]
    produced_in = [platform.engines[engine].home for engine in engine_of]
    last = np.where(freeable(trace), trace.held_until, count)
    last = np.where(trace.replaced_by >= 0, trace.producer[trace.replaced_by], last)
    # what is produced in place takes over its space at the end of the op
    first = np.where(t.replaces >= 0, trace.producer + 1, np.maximum(trace.producer, 0))
    homes = {platform.home(device).name for device in range(trace.devices)}
    change = {home: np.zeros(count + 2, np.int64) for home in homes}
    home = []
    for tensor, producer in enumerate(trace.producer.tolist()):
        by = producer if producer >= 0 else next(iter(trace.readers(tensor)), -1)
        home.append(produced_in[by] if by >= 0 else "")
        if home[-1] in homes:
            change[home[-1]][first[tensor]] += t.bytes[tensor]
            change[home[-1]][last[tensor] + 1] -= t.bytes[tensor]
    used = {name: np.cumsum(delta)[:count] for name, delta in change.items()}
    for op, name in enumerate(produced_in):
        if name in homes:
            used[name][op] += c.workspace[op]
    return Liveness(home, last.tolist(), used)


# ---- candidates --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A tensor and the gap between two of its accesses in which it need not be resident. Times in ns.

    tensor, device: ids; home: the tier that it leaves.
    evicted, back: the ops of the evicted-access and the back-access.
    left, wanted: when the first ends and the second starts.
    out, into: the times of the copies.
    """

    tensor: int
    device: int
    home: str
    bytes: int
    evicted: int
    back: int
    left: int
    wanted: int
    out: int
    into: int

    @property
    def free_ns(self) -> int:
        """Free time: what is left of the gap after a copy out and a copy back."""
        return (self.wanted - self.into) - (self.left + self.out)


def candidates_of(
    problem: Problem, line: Lineage, movable: Sequence[bool], times: Timeline, live: Liveness, host: str
) -> list[Candidate]:
    """Movable tensors with more than one access, each with its gap of most free time at which memory is exceeded.

    Only gaps between ops of one device's main engine count, whose ends the device sees.
    """
    trace, platform = problem.trace, problem.platform
    c = trace.op_columns
    over = {
        home: np.concatenate(([0], np.cumsum(used > platform.tier(home).capacity))) for home, used in live.used.items()
    }
    plain = [op not in c.engine and op not in c.group and times.start[op] >= 0 for op in range(len(trace.ops))]
    readers: list[list[int]] = [[] for _ in line.size]
    for op, reads in enumerate(line.reads):
        for tensor in reads:
            readers[tensor].append(op)
    out_and_back: dict[tuple[str, int], tuple[int, int]] = {}
    found = []
    for tensor, may in enumerate(movable):
        home, bytes, producer = live.home[tensor], line.size[tensor], line.producer[tensor]
        if not may or not readers[tensor] or home not in over or not over[home][-1]:
            continue
        device = line.device[producer]
        accesses = (producer, *readers[tensor])
        if platform.home(device).name != home or any(line.device[op] != device for op in accesses):
            continue
        if (home, bytes) not in out_and_back:
            out_and_back[home, bytes] = platform.move_ns(bytes, home, host), platform.move_ns(bytes, host, home)
        gaps = []
        for a, b in pairwise(accesses):
            if plain[a] and plain[b] and over[home][b] > over[home][a + 1]:
                left, wanted = int(times.end[a]), int(times.start[b])
                gaps.append(Candidate(tensor, device, home, bytes, a, b, left, wanted, *out_and_back[home, bytes]))
        if gaps:
            found.append(max(gaps, key=lambda gap: gap.free_ns))
    return found
