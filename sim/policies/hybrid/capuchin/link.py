"""Copies that share a link: those of one direction go one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from sim.policies.hybrid.capuchin.measured import Candidate


def outs_end(swaps: Iterable[Candidate]) -> dict[int, int]:
    """When the copy out of each tensor ends, in ns: first come, first served."""
    ends, free = {}, 0
    for swap in sorted(swaps, key=lambda one: (one.left, one.tensor)):
        free = ends[swap.tensor] = max(free, swap.left) + swap.out
    return ends


def exposed_ns(swaps: Iterable[Candidate]) -> int:
    """How long the device waits for these tensors in all, in ns, if each is copied back as soon as it has left."""
    swaps = list(swaps)
    ends = outs_end(swaps)
    late = free = 0
    for swap in sorted(swaps, key=lambda one: (one.wanted, one.tensor)):
        free = max(free, ends[swap.tensor]) + swap.into
        late += max(free - swap.wanted - late, 0)
    return late


def leads(swaps: Iterable[Candidate]) -> dict[int, int]:
    """How much earlier than alone each copy back must start to be in time beside those that follow it, in ns."""
    lead, free = {}, 1 << 62
    for swap in sorted(swaps, key=lambda one: (-one.wanted, -one.tensor)):
        end = min(free, swap.wanted)
        lead[swap.tensor] = swap.wanted - end
        free = end - swap.into
    return lead
