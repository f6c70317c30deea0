"""Which candidates are swapped and which recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.eviction.evictable import Lineage
from sim.policies.hybrid.capuchin.link import exposed_ns
from sim.policies.hybrid.capuchin.measured import Candidate, Liveness
from sim.trace.graph import Trace


def recomputable_until(trace: Trace, line: Lineage, live: Liveness) -> list[int]:
    """Per tensor the last op at which it can be recomputed, through its dead ancestors if need be; -1 for never.

    A tensor without a producer lasts until it is overwritten, any other until it is released or, if it can be
    recomputed, as long as that. What depends on a view is left out: its storage may have been freed.
    """
    until = [-1] * len(line.size)
    for op, reads in enumerate(line.reads):
        able = not any(tensor in line.view_of for tensor in trace.reads(op))
        ends = [max(live.last[tensor], until[tensor]) for tensor in reads]
        for tensor in line.writes[op]:
            if able and line.counts[tensor] and tensor not in line.view_of and tensor not in line.views_in:
                until[tensor] = min(ends, default=len(line.reads))
    return until


@dataclass
class Chain:
    """What recomputing a candidate at its back-access takes.

    source: the nearest ancestors that are resident then, or can be fetched.
    ns: the time of the ops from there on, and of the fetches.
    extra: the time that it adds to the recomputation of others, which have it among their sources, in ns.
    """

    source: set[int]
    ns: int
    extra: int = 0

    @property
    def overhead(self) -> int:
        """Time in ns if it is recomputed, too."""
        return self.ns + self.extra


class RecomputationSet:
    """The candidates by memory saving per second (MSPS), and the tensors chosen so far."""

    def __init__(
        self,
        trace: Trace,
        line: Lineage,
        live: Liveness,
        candidates: Sequence[Candidate],
        away: Mapping[int, Candidate],
    ) -> None:
        """away: the tensors that are swapped; one that is away at a back-access is fetched for a recomputation."""
        until = recomputable_until(trace, line, live)
        kept = set(trace.outputs)
        self.chosen: dict[int, Chain] = {}
        self._chains = {
            one.tensor: _chain(line, live, one, away)
            for one in candidates
            if one.tensor not in kept and until[one.tensor] >= live.last[one.tensor]
        }

    def overhead(self, tensor: int) -> int | None:
        """Time in ns that choosing a candidate would cost, None if it cannot be recomputed."""
        chain = self._chains.get(tensor)
        return None if chain is None else chain.overhead

    def leave(self, tensor: int) -> None:
        """Remove a candidate."""
        self._chains.pop(tensor, None)

    def choose(self, tensor: int) -> None:
        """Recompute it: who has it as a source goes back to its sources, and costs more."""
        own = self._chains.pop(tensor)
        times = 1
        for chain in self.chosen.values():
            if tensor in chain.source:
                chain.source = chain.source - {tensor} | own.source
                times += 1
        self.chosen[tensor] = own
        for other, chain in self._chains.items():
            if tensor in chain.source:
                chain.source = chain.source - {tensor} | own.source
                chain.ns += own.ns
                chain.extra = sum(chain.ns for one in self.chosen.values() if other in one.source)
            elif other in own.source:
                chain.extra = times * chain.ns


def _chain(line: Lineage, live: Liveness, one: Candidate, away: Mapping[int, Candidate]) -> Chain:
    """Back from a candidate, over what is dead at its back-access."""
    source: set[int] = set()
    fetches = 0
    ops = {line.producer[one.tensor]}
    stack = list(line.parents[one.tensor])
    seen = set(stack)
    while stack:
        tensor = stack.pop()
        producer = line.producer[tensor]
        if producer < 0 or live.last[tensor] >= one.back:
            source.add(tensor)
            swap = away.get(tensor)
            if swap is not None and swap.evicted < one.back < swap.back:
                fetches += swap.into
        elif producer not in ops:
            ops.add(producer)
            fresh = [parent for parent in line.parents[tensor] if parent not in seen]
            seen.update(fresh)
            stack += fresh
    return Chain(source, sum(line.took[op] for op in ops) + fetches)


# ---- the choice --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Which candidates are swapped and which recomputed, in the order of choice; bytes that had to be saved.

    need: bytes by which memory is exceeded, per tier.
    saved: bytes of all that are evicted, per tier.
    """

    swaps: tuple[Candidate, ...]
    recomputed: tuple[Candidate, ...]
    need: Mapping[str, int]
    saved: Mapping[str, int]


def choose(
    trace: Trace,
    line: Lineage,
    live: Liveness,
    candidates: Sequence[Candidate],
    need: Mapping[str, int],
    *,
    queued: bool,
) -> Choice:
    """Swap by free time while that hides the copies; then per candidate the cheaper of a swap and a recomputation.

    queued: copies count as hidden only if they are behind those of the tensors swapped before, too.

    The rest is looked at by MSPS, greatest first; what cannot be recomputed comes last, by free time. Ties go to the
    larger tensor, then to the lower id.
    """
    missing = dict(need)
    by_free_time = sorted(candidates, key=lambda one: (-one.free_ns, -one.bytes, one.tensor))
    swaps: list[Candidate] = []
    for one in by_free_time:
        if one.free_ns >= 0 and missing[one.home] > 0 and not (queued and _exposed(swaps, one)):
            swaps.append(one)
            missing[one.home] -= one.bytes
    taken = {one.tensor for one in swaps}
    rest = {one.tensor: one for one in by_free_time if one.tensor not in taken and missing[one.home] > 0}
    if not rest:
        return Choice(tuple(swaps), (), need, {home: need[home] - left for home, left in missing.items()})
    recomputation = RecomputationSet(trace, line, live, tuple(rest.values()), {one.tensor: one for one in swaps})
    recomputed = []
    exposed = {home: exposed_ns(one for one in swaps if one.home == home) for home in need}
    while rest:
        one = max(rest.values(), key=lambda each: _msps(each, recomputation.overhead(each.tensor)))
        del rest[one.tensor]
        with_it = _exposed(swaps, one)
        overhead = recomputation.overhead(one.tensor)
        if overhead is not None and overhead <= with_it - exposed[one.home]:
            recomputation.choose(one.tensor)
            recomputed.append(one)
        else:
            recomputation.leave(one.tensor)
            swaps.append(one)
            exposed[one.home] = with_it
        missing[one.home] -= one.bytes
        if missing[one.home] <= 0:
            rest = {tensor: each for tensor, each in rest.items() if each.home != one.home}
    return Choice(tuple(swaps), tuple(recomputed), need, {home: need[home] - left for home, left in missing.items()})


def _exposed(swaps: Sequence[Candidate], one: Candidate) -> int:
    """How long the device would wait if one more tensor were swapped."""
    return exposed_ns((*(swap for swap in swaps if swap.home == one.home), one))


def _msps(one: Candidate, overhead: int | None) -> tuple[float, int, int, int]:
    rate = -1.0 if overhead is None else one.bytes / overhead if overhead else float("inf")
    return rate, one.free_ns if overhead is None else 0, one.bytes, -one.tensor
