"""What an allocator reserves beyond what is allocated in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.log import EventLog, Ints


@dataclass(frozen=True)
class Fragmentation:
    """Bytes of one tier, at the end of each nanosecond.

    reserved_peak_bytes: the most that the allocator reserved.
    allocated_peak_bytes: the most that was allocated.
    unused_peak_bytes: the largest difference of the two at one time.
    fraction: the part of the reserved peak in which nothing was allocated.
    largest_hole_bytes: the size of the largest free block when it was smallest. Known for tiers whose allocator needs
        no contiguous space (`exact`), None for all others.
    """

    tier: str
    allocator: str
    reserved_peak_bytes: int
    allocated_peak_bytes: int
    unused_peak_bytes: int
    fraction: float
    largest_hole_bytes: int | None


def fragmentation(log: EventLog) -> tuple[Fragmentation, ...]:
    """One entry for each tier that was used, in the platform's order."""
    table = []
    for i, tier in enumerate(log.platform.tiers):
        times, used = _levels(log.change("time"), log.change("tier"), log.change("delta"), i)
        taken_at, taken = _levels(log.reserved[:, 0], log.reserved[:, 1], log.reserved[:, 2], i)
        if not len(times):
            continue
        if len(taken_at):
            every = np.union1d(times, taken_at)
            lived, held = _at(every, times, used), _at(every, taken_at, taken)
        else:  # an allocator that reserves nothing beyond what is allocated
            lived = held = used
        top = int(np.argmax(held))
        table.append(
            Fragmentation(
                tier=tier.name,
                allocator=tier.allocator.name,
                reserved_peak_bytes=int(held[top]),
                allocated_peak_bytes=int(lived.max()),
                unused_peak_bytes=int((held - lived).max()),
                fraction=float(1 - lived[top] / held[top]) if held[top] else 0.0,
                largest_hole_bytes=tier.capacity - int(used.max()) if tier.allocator.name == "exact" else None,
            )
        )
    return tuple(table)


def _levels(time: Ints, tiers: Ints, delta: Ints, tier: int) -> tuple[Ints, Ints]:
    """Times at which a tier's level changed, and the level after all changes of that time."""
    rows = tiers == tier
    time, level = time[rows], np.cumsum(delta[rows])
    last = np.concatenate((time[1:] != time[:-1], [True])) if len(time) else np.zeros(0, bool)
    return time[last], level[last]


def _at(every: Ints, times: Ints, levels: Ints) -> Ints:
    i = np.searchsorted(times, every, "right") - 1
    return np.where(i < 0, 0, levels[i])
