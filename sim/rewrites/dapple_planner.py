"""Which layers make up which stage of a synchronous pipeline, on which devices: DAPPLE's planner.

Microbatches go through 1F1B, then all stages sum their gradients and update. What is sent between two stages counts as
a stage of its own. With stage times F and B per microbatch, M microbatches, and AR for the sum of a stage's gradients
over its replicas, an iteration takes, for the stage Q that dominates (the pivot),

    sum of F up to Q + (M - 1) (F_Q + B_Q) + max over s of (AR_s + B_s + … + B_Q, for s > Q less B between Q and s)

A stage on r devices divides each microbatch among them. Each takes its devices from the machines in one of three ways:
`fresh` machines first, those that have devices in use (`append`), or evenly from machines in use (`scatter`).

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021, sections 4.2 and 4.3.
Departs: the pivot is the stage for which the latency is greatest, which the paper's rule finds up to the time of one
microbatch on one stage; with it the latency is the sum of two maxima, one over pivots and one over stages,

    max over Q of (sum of F + B up to Q + (M - 1) (F_Q + B_Q)) + max over s of (AR_s - sum of B before s)

so that the search is exact among these placements, where the paper's is not. A sum over devices goes inside machines
first, then among them, over each network with what the one before has left (`sim.hardware.nodes`); what is sent goes
over the outermost one that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from sim.errors import TraceError

PLACEMENTS = ("fresh", "append", "scatter")


@dataclass(frozen=True)
class LayerTimes:
    """What the planner knows of a layer, for a microbatch on one device.

    forward, backward: ns. sent: bytes that forward hands to the next layer. gradients: bytes.
    """

    forward: int
    backward: int
    sent: int
    gradients: int = 0


@dataclass(frozen=True)
class Machines:
    """Where a pipeline may run.

    devices: of each machine. inside, between: bytes per second of a device to another one of its machine, of another.
    nested: networks inside of the one between all machines, from inside to outside: how many machines next to each
        other each joins, and bytes per second of a device.
    """

    devices: tuple[int, ...]
    inside: int
    between: int
    nested: tuple[tuple[int, int], ...] = ()

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """How many machines are joined, and bytes per second of a device, from one machine to all of them."""
        return ((1, self.inside), *self.nested, (max(len(self.devices), 1), self.between))


class Stage(NamedTuple):
    """A stage: how many layers, and how many devices of each machine."""

    layers: int
    devices: tuple[int, ...]


class _Label(NamedTuple):
    """The stages up to some layer: sums of F + B and of B, and the two maxima."""

    both: Fraction
    backward: Fraction
    pivot: Fraction
    end: Fraction
    stages: tuple[Stage, ...]


_Labels = dict[tuple[int, tuple[int, ...]], list[_Label]]
"""By the number of layers, and of the devices in use of each machine."""


def latency(layers: Sequence[LayerTimes], stages: Sequence[Stage], machines: Machines, micro_batches: int) -> Fraction:
    """Time of an iteration of these stages, ns, by the formula above."""
    times = _stage_times(layers, stages, machines)
    there_and_back = [forward + backward for forward, backward, _ in times]
    steady = [(micro_batches - 1) * each for each in there_and_back]
    # the pivot is the stage whose own work, with what leads to it and back, takes longest
    q = max(range(len(times)), key=lambda s: sum(there_and_back[: s + 1]) + steady[s])
    ends = []
    for s, (_, _, summed) in enumerate(times):
        after = sum(b for _, b, _ in times[s : q + 1]) if s <= q else -sum(b for _, b, _ in times[q + 1 : s])
        ends.append(summed + after)
    return Fraction(sum(f for f, _, _ in times[: q + 1]) + steady[q] + max(ends))


def _stage_times(
    layers: Sequence[LayerTimes], stages: Sequence[Stage], machines: Machines
) -> list[tuple[Fraction, Fraction, Fraction]]:
    """F, B and AR of each stage and of what is sent between two, ns."""
    times, first = [], 0
    for k, stage in enumerate(stages):
        own = layers[first : first + stage.layers]
        if k:
            sent = _sent(layers[first - 1].sent, stages[k - 1].devices, stage.devices, machines)
            times.append((sent, sent, Fraction(0)))
        r = sum(stage.devices)
        forward, backward = (Fraction(sum(getattr(each, way) for each in own), r) for way in ("forward", "backward"))
        times.append((forward, backward, _summed(sum(each.gradients for each in own), stage.devices, machines)))
        first += stage.layers
    return times


def _sent(size: int, start: tuple[int, ...], end: tuple[int, ...], machines: Machines) -> Fraction:
    """Time to hand a microbatch from the devices of a stage to those of the next: each of them sends its part."""
    joined = {k for k, count in enumerate(start) if count} | {k for k, count in enumerate(end) if count}
    rate = next(rate for size, rate in machines.levels if min(joined) // size == max(joined) // size)
    return Fraction(size * 10**9, rate * min(sum(start), sum(end)))


def _summed(size: int, devices: tuple[int, ...], machines: Machines) -> Fraction:
    """Time of an all-reduce among devices, there and back: of g devices in each of k groups, a level of links passes
    (k - 1) / (k g) of the bytes."""
    together, fraction = 1, Fraction(0)
    for joined, rate in machines.levels:
        ends = range(0, len(devices), joined)
        most = max((sum(devices[k : k + joined]) for k in ends), default=0)
        groups = -(-most // together)
        fraction += Fraction(groups - 1, groups * together * rate) if groups > 1 else 0
        together = max(together, most)
    return 2 * size * 10**9 * fraction


def placements(
    used: tuple[int, ...], count: int, machines: Machines, ways: Sequence[str] = PLACEMENTS
) -> Iterator[tuple[int, ...]]:
    """The devices of each machine that a stage of `count` may take, given how many are in use, by each of some ways."""
    free = [most - busy for most, busy in zip(machines.devices, used, strict=True)]
    if count > sum(free):
        return
    found = set()
    for way in ways:
        fresh = [k for k, busy in enumerate(used) if not busy]
        begun = [k for k, busy in enumerate(used) if busy]
        order = [*fresh, *begun] if way == "fresh" else [*begun, *fresh]
        taken, left = [0] * len(used), count
        if way == "scatter":
            for some in (begun or fresh, fresh):
                while left and any(taken[k] < free[k] for k in some):
                    for k in some:
                        if left and taken[k] < free[k]:
                            taken[k], left = taken[k] + 1, left - 1
        else:
            for k in order:
                now = min(left, free[k])
                taken[k], left = now, left - now
        found.add(tuple(taken))
    yield from sorted(found)


def plan(
    layers: Sequence[LayerTimes],
    machines: Machines,
    micro_batches: int,
    *,
    stages: int = 0,
    replicas: int = 0,
    ways: Sequence[str] = PLACEMENTS,
) -> tuple[Stage, ...]:
    """The stages with the least latency; of several, the fewest, then those whose first stages have the most layers.

    stages: how many are asked for; 0 leaves it open.
    replicas: devices of each stage; 0 leaves it open. All devices are used.
    ways: which of `PLACEMENTS` a stage may take.

    Raises TraceError where there are fewer layers or devices than stages.
    """
    n, total = len(layers), sum(machines.devices)
    if stages > min(n, total) or stages * replicas > total:
        nearest = min(n, total // max(replicas, 1))
        raise TraceError(f"plan: {n} layers on {total} devices do not make {stages} stages; nearest: {nearest}")
    search = _Search(layers, machines, micro_batches)
    start = _Label(Fraction(0), Fraction(0), Fraction(0), Fraction(-(10**30)), ())
    reached: _Labels = {(0, (0,) * len(machines.devices)): [start]}
    ends: list[_Label] = []
    for deep in range(1, (stages or min(n, total)) + 1):
        following: _Labels = {}
        for (k, used), labels in reached.items():
            for count in (replicas,) if replicas else range(1, total - sum(used) + 1):
                for devices in placements(used, count, machines, ways):
                    now = tuple(a + b for a, b in zip(used, devices, strict=True))
                    last = deep == stages if stages and replicas else sum(now) == total
                    if last and stages in (0, deep) and k < n:
                        ends += search.grown(labels, k, n, devices)
                    for j in () if last else range(k + 1, n):
                        for label in search.grown(labels, k, j, devices):
                            _keep(following.setdefault((j, now), []), label)
        reached = following
    if not ends:
        raise TraceError(f"plan: {total} devices do not make {stages} stages of {replicas or 'some'} devices each")
    best = min(ends, key=lambda e: (e.pivot + e.end, len(e.stages), [-s.layers for s in e.stages]))
    return best.stages


class _Search:
    """Adds stages to labels."""

    def __init__(self, layers: Sequence[LayerTimes], machines: Machines, micro_batches: int) -> None:
        self.layers, self.machines, self.again = layers, machines, micro_batches - 1
        ways = ("forward", "backward", "gradients")
        self.sums = [[0, *accumulate(getattr(each, way) for each in layers)] for way in ways]

    def grown(self, labels: Sequence[_Label], k: int, j: int, devices: tuple[int, ...]) -> list[_Label]:
        """Labels of stages up to layer k, with another one up to layer j on some devices."""
        forward, backward, gradients = (own[j] - own[k] for own in self.sums)
        r = sum(devices)
        summed, stage = _summed(gradients, devices, self.machines), Stage(j - k, devices)
        return [self._grow(each, k, Fraction(forward, r), Fraction(backward, r), summed, stage) for each in labels]

    def _grow(
        self, label: _Label, k: int, forward: Fraction, backward: Fraction, summed: Fraction, stage: Stage
    ) -> _Label:
        both, before, pivot, end, stages = label
        if stages:  # what is sent comes first
            sent = _sent(self.layers[k - 1].sent, stages[-1].devices, stage.devices, self.machines)
            pivot, end = max(pivot, both + 2 * sent + self.again * 2 * sent), max(end, -before)
            both, before = both + 2 * sent, before + sent
        end, both = max(end, summed - before), both + forward + backward
        pivot = max(pivot, both + self.again * (forward + backward))
        return _Label(both, before + backward, pivot, end, (*stages, stage))


def _keep(labels: list[_Label], new: _Label) -> None:
    """Add a label unless one there is as good in every respect; drop those that it replaces."""

    def as_good(a: _Label, b: _Label) -> bool:
        same = a.stages[-1].devices == b.stages[-1].devices
        return same and a.both <= b.both and a.backward >= b.backward and a.pivot <= b.pivot and a.end <= b.end

    if any(as_good(old, new) for old in labels):
        return
    labels[:] = [old for old in labels if not as_good(new, old)]
    labels.append(new)


__all__ = ["LayerTimes", "Machines", "Stage", "latency", "placements", "plan"]
