"""Which layers make up which stage of a pipeline, and on how many machines: PipeDream's planner.

Stages are runs of consecutive layers; stage s runs on r_s machines that take microbatches in turn. A stage of layers
i … j takes, per microbatch,

    T(i, j, r) = max(sum of T_l, 2 (r - 1) sum of w_l / rate) / r

and what follows layer k takes 2 a_k / rate to send there and back. The slowest of all these is the time per microbatch
once the pipeline is full; A(j, R) is the least for layers 0 … j on R machines:

    A(j, R) = min over k and r of max(A(k, R - r), 2 a_k / rate, T(k + 1, j, r))

Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018, arXiv:1806.03377, section 3.2;
Narayanan et al., SOSP 2019, section 3.1. Departs: one level of machines; where each stage has one, what it sends may go
over links of different rates. All machines are used.

Where a device holds several parts of the model (`shared`), it takes the sum of their times, and its link the sum of
what its parts hand on to other devices. Which parts are together is the schedule's, so that no cut divides the problem
in two; layers go one by one from part to part as long as that makes the slowest device faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations, pairwise, product
from math import comb
from typing import Any

from sim.errors import TraceError

ALL, TWO_MOVES = 20_000, 20_000
"""Where devices hold several parts: up to how many partitions all are tried; else up to how many pairs of moves of a
layer where no single one helps."""
Scaled = int | Fraction
"""Nanoseconds times the bytes per second of a link: whole numbers, but for stages on several machines."""


@dataclass(frozen=True)
class LayerCost:
    """What a planner knows of a layer.

    time: of forward and backward of a microbatch, ns.
    sent: bytes of a microbatch that its forward hands to the next layer.
    weights: bytes.
    forward: of `time`, that of forward.
    """

    time: int
    sent: int
    weights: int = 0
    forward: int = 0


@dataclass(frozen=True)
class Partition:
    """Stages of a pipeline.

    layers: per stage how many.
    machines: per stage how many.
    slowest: ns per microbatch of what binds: a stage, or what is sent between two.
    """

    layers: tuple[int, ...]
    machines: tuple[int, ...]
    slowest: Fraction


def cost_of(layers: Sequence[LayerCost], sizes: Sequence[int], machines: Sequence[int], rate: int) -> Fraction:
    """Time per microbatch of stages of these sizes on so many machines each, ns. rate: bytes per second."""
    worst: Scaled = 0
    first = 0
    for size, r in zip(sizes, machines, strict=True):
        if first:
            worst = max(worst, _there_and_back(layers[first - 1]))
        own = layers[first : first + size]
        worst = max(worst, _stage(sum(each.time for each in own), sum(each.weights for each in own), r, rate))
        first += size
    return Fraction(worst) / rate


def partition(
    layers: Sequence[LayerCost],
    machines: int,
    rate: int,
    stages: int = 0,
    *,
    replicated: bool = True,
    hops: Sequence[int] = (),
) -> Partition:
    """The partition with the least time per microbatch; of several, the one whose last stages have the fewest layers.

    machines: how many there are, all of which are used.
    rate: bytes per second between two of them.
    stages: how many are asked for; 0 leaves it open.
    replicated: whether a stage may run on several machines.
    hops: where none does, bytes per second from each machine to the next one; () for `rate`.

    Raises TraceError where there are fewer layers than stages.
    """
    n = len(layers)
    if max(stages, 0 if replicated else machines) > n:
        raise TraceError(f"partition: {n} layers do not make {max(stages, machines)} stages; nearest: {n}")
    times, weights = ([0, *accumulate(getattr(each, name) for each in layers)] for name in ("time", "weights"))
    sent = [0, *(_there_and_back(each) for each in layers)]
    slower = _slower(hops, rate)
    best: dict[tuple[int, int, int], tuple[Scaled, tuple[tuple[int, int], ...]]] = {(0, 0, 0): (0, ())}
    deepest = stages or min(n, machines)
    for used in range(1, machines + 1):
        for stage in range(1, deepest + 1) if replicated else range(used, min(used, deepest) + 1):
            for j in range(1, n + 1):
                found = None
                for k in reversed(range(j)):
                    for r in range(1, used + 1) if replicated else (1,):
                        before = best.get((k, used - r, stage - 1))
                        if before is None:
                            continue
                        own = _stage(times[j] - times[k], weights[j] - weights[k], r, rate)
                        handed = sent[k] * slower[stage - 2] if hops and stage > 1 else sent[k]
                        worst = max(before[0], handed, own)
                        if found is None or worst < found[0]:
                            found = worst, (*before[1], (j - k, r))
                if found is not None:
                    best[j, used, stage] = found
    ends = [best[n, machines, s] for s in ([stages] if stages else range(1, deepest + 1)) if (n, machines, s) in best]
    if not ends:
        raise TraceError(f"partition: {machines} machines do not make {stages} stages of one each; nearest: {machines}")
    slowest, rows = min(ends, key=lambda each: each[0])
    return Partition(tuple(size for size, _ in rows), tuple(r for _, r in rows), Fraction(slowest) / rate)


def shared(layers: Sequence[LayerCost], device: Sequence[int], rate: int, hops: Sequence[int] = ()) -> tuple[int, ...]:
    """How many layers each part gets where devices hold several: the slowest device takes as little as can be.

    The best where there are at most `ALL` partitions, or layers between the first and the last one take equal times.
    Else no layer less in one part and more in another makes the slowest device faster, or of equal ones the slowest
    part; nor do two such moves, the first of them from the slowest device, where there are at most `TWO_MOVES` of them.

    layers: of the model, in order. device: of each part, in order; parts next to each other on one device send nothing.
    rate: bytes per second between two devices. hops: from each part to the next one, where these differ; () for `rate`.

    Raises TraceError where there are fewer layers than parts.
    """
    n, parts = len(layers), len(device)
    if parts > n:
        raise TraceError(f"partition: {n} layers do not make {parts} stages; nearest: {n}")
    even = tuple(n * (q + 1) // parts - n * q // parts for q in range(parts))
    starts = even, partition(layers, parts, rate, parts, replicated=False, hops=hops).layers
    slower = _slower(hops, rate) or [1] * (parts - 1)
    times, sent = [0, *accumulate(each.time for each in layers)], [0, *map(_there_and_back, layers)]
    held = [[q for q in range(parts) if device[q] == d] for d in sorted(set(device))]

    handing = [[q for q in own if q + 1 < parts and q + 1 not in own] for own in held]

    def slowness(sizes: Sequence[int], most: Scaled | None = None) -> tuple[Any, ...]:
        """The slowest device's time, how many take it, the slowest part's, and those of all others.

        most: where the slowest device takes longer, the rest is not asked for.
        """
        ends = [0, *accumulate(sizes)]
        each = [of_device(d, ends) for d in range(len(held))]
        slowest = max(each)
        if most is not None and slowest > most:
            return (slowest,)
        own = [times[end] - times[start] for start, end in pairwise(ends)]
        return slowest, each.count(slowest), max(own), sorted(each, reverse=True), sorted(own, reverse=True)

    def of_device(d: int, ends: Sequence[int]) -> Scaled:
        handed: Scaled = 0
        for q in handing[d]:
            handed += slower[q] * sent[ends[q + 1]]
        own = 0
        for q in held[d]:
            own += times[ends[q + 1]] - times[ends[q]]
        return max(own * rate, handed)

    def moved(sizes: tuple[int, ...], givers: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """All ways to have a layer less in one of these parts and one more in another."""
        for a, b in product(givers, range(parts)):
            if a != b and sizes[a] > 1:
                yield tuple(size - (q == a) + (q == b) for q, size in enumerate(sizes))

    def neighbours(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        ends = [0, *accumulate(sizes)]
        yield from moved(sizes, sorted(range(parts), key=lambda q: times[ends[q]] - times[ends[q + 1]]))
        of_slowest = held[max(range(len(held)), key=lambda d: of_device(d, ends))]
        if len(of_slowest) * parts**3 <= TWO_MOVES:
            for each in moved(sizes, of_slowest):
                yield from moved(each, range(parts))

    def descent(sizes: tuple[int, ...]) -> tuple[tuple[object, ...], tuple[int, ...]]:
        best: tuple[int, ...] | None = sizes
        while best is not None:
            sizes, least, tried = best, slowness(best), {best}
            best = None
            for each in neighbours(sizes):
                if each not in tried and slowness(each, least[0]) < least:
                    best = each
                    break
                tried.add(each)
        return least, sizes

    if comb(n - 1, parts - 1) <= ALL:
        cuts = combinations(range(1, n), parts - 1)
        return min((tuple(b - a for a, b in pairwise((0, *each, n))) for each in cuts), key=slowness)
    return min(map(descent, starts))[1]


def _stage(time: int, weights: int, r: int, rate: int) -> Scaled:
    """Time per microbatch of a stage on r machines, ns times the rate."""
    slower = max(time * rate, 2 * (r - 1) * weights * 10**9)
    return slower if r == 1 else Fraction(slower, r)


def _slower(hops: Sequence[int], rate: int) -> list[Scaled]:
    """How many times as long bytes take over each hop as at a rate."""
    return [1 if hop == rate else Fraction(rate, hop) for hop in hops]


def _there_and_back(layer: LayerCost) -> int:
    """Time per microbatch of what a layer sends, ns times the rate."""
    return 2 * layer.sent * 10**9
