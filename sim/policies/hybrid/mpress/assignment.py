"""Which technique each saved tensor of an overloaded stage gets: a peer's memory, the host's, or recomputation."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, inf

import numpy as np

from sim.plan import Problem
from sim.policies.hybrid.mpress.timeline import Ints, Timeline
from sim.rewrites.rewriter import slice_of
from sim.solvers.lanes import Lanes
from sim.solvers.spans import swappable
from sim.trace.chain import BACKWARD, saved_tensors
from sim.trace.index import TraceIndex
from sim.trace.tensor import ROLE_CODE

PEER, RECOMPUTE, HOST = "peer", "recompute", "host"
TECHNIQUES = (PEER, RECOMPUTE, HOST)
"""In the order in which they are taken where none costs less time."""

MAY_LEAVE = (ROLE_CODE["activation"], ROLE_CODE["temporary"])
WEIGHTS = 16
"""Sum of the integers that say how a tensor is striped."""


@dataclass(frozen=True, eq=False)
class Saved:
    """What forward leaves for backward. Times in ns, sizes in bytes.

    left: the op of forward that uses it last. back: the op of backward that uses it first.
    begin, need: when the one ends and the other begins.
    copyable: whether it can be copied to another tier and back, in parts, too.
    """

    tensor: int
    bytes: int
    device: int
    left: int
    back: int
    begin: int
    need: int
    copyable: bool


@dataclass(frozen=True)
class Copy:
    """A tensor's stay in another tier, or that of a stripe of it.

    share: its part of the whole, in units of the sum over the stripes.
    out, back: when the copies begin. out_ns, back_ns: how long they take.
    late_ns: how long the device waits for them, since there is no time for both beside its work.
    """

    tier: str
    bytes: int
    share: int
    out: int
    out_ns: int
    back: int
    back_ns: int
    late_ns: int


@dataclass(frozen=True, eq=False)
class Choice:
    """What happens to a tensor.

    ns: the time that it is expected to add. copies: where it goes. chain: the ops that recompute it, in order.
    """

    saved: Saved
    technique: str
    ns: int
    copies: Sequence[Copy] = ()
    chain: Sequence[int] = ()


@dataclass(eq=False)
class Assignment:
    """The choices, and what they leave: one greedy pass over the stages that hold too much.

    most: of a tensor's stripes. margin: per device bytes below the budget to aim at. banned: (tensor, technique) that
    are not to be used.
    """

    problem: Problem
    times: Timeline
    index: TraceIndex
    most: int
    margin: Mapping[int, int] = field(default_factory=dict)
    banned: Collection[tuple[int, str]] = ()
    choices: dict[int, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        platform = self.problem.platform
        self._homes = [platform.home(device) for device in range(platform.devices)]
        self._load = [stage.load.copy() for stage in self.times.stages]
        self._lanes = Lanes()
        self._gone: dict[int, int] = {}  # per tensor that is dropped, the op of backward before which it is back

    # ---- the pass ------------------------------------------------------------------------------

    def choose(self) -> bool:
        """Assign techniques until no device holds more than it may; whether that was possible.

        First the tensors that save most bytes for the time that they add.
        """
        candidates: dict[int, list[Saved]] = {}
        for one in saved(self.problem, self.times):
            candidates.setdefault(one.device, []).append(one)
        # the fullest first: what it lends out no other stage can
        order = sorted(candidates, key=lambda device: (-int(self._load[device].max()), device))
        for device in order:
            self._relieve(device, candidates[device])
        return not any(self._over(device) for device in range(len(self._load)))

    def _limit(self, device: int) -> int:
        return self._homes[device].capacity - self.margin.get(device, 0)

    def _over(self, device: int) -> int:
        """Bytes beyond what a device may hold."""
        return max(int(self._load[device].max(initial=0)) - self._limit(device), 0)

    def _spare(self, device: int, one: Saved) -> int:
        """Bytes that a device has left at every moment at which a tensor could be away, of whatever device."""
        meanwhile = self._load[device][self.times.stages[device].during(one.begin, one.need)]
        return self._limit(device) - int(meanwhile.max(initial=0))

    def _relieve(self, device: int, candidates: Sequence[Saved]) -> None:
        """Take tensors of one device while it holds too much."""
        heap = []
        if self._over(device):
            for i, one in enumerate(candidates):
                if (choice := self._best(one)) is not None:
                    heap.append((_rank(choice), i))
        heapq.heapify(heap)
        while heap and self._over(device):
            rank, i = heapq.heappop(heap)
            one = candidates[i]
            if self._spare(device, one) >= 0:
                continue  # memory is not short while it could be away
            choice = self._best(one)
            if choice is None:
                continue
            if heap and _rank(choice) > max(rank, heap[0][0]):
                heapq.heappush(heap, (_rank(choice), i))  # it costs more since
                continue
            self._take(choice)

    # ---- a tensor ------------------------------------------------------------------------------

    def instead(self, choice: Choice) -> Choice | None:
        """The next best technique for a tensor."""
        return self._best(choice.saved, choice.technique)

    def _best(self, one: Saved, without: str = "") -> Choice | None:
        """The technique that adds the least time."""
        ways = {PEER: self._to_peers, RECOMPUTE: self._recomputed, HOST: self._to_host}
        left = (way for way in TECHNIQUES if way != without and (one.tensor, way) not in self.banned)
        found = (ways[way](one) for way in left)
        return min((choice for choice in found if choice is not None), key=lambda choice: choice.ns, default=None)

    def _to_peers(self, one: Saved) -> Choice | None:
        """In the memory of the fewest other devices with which both copies take no longer than it is away."""
        donors = list(self._donors(one)) if self.most and one.copyable else []
        best: Choice | None = None
        for count in range(1, min(len(donors), self.most) + 1):
            choice = self._striped(one, donors[:count])
            if choice is not None and (best is None or choice.ns < best.ns):
                best = choice
            if best is not None and best.ns == 0:
                break
        return best

    def _donors(self, one: Saved) -> Iterator[int]:
        """Devices with a link of their own to this one, the one with most free space first."""
        platform, home = self.problem.platform, self._homes[one.device].name
        room = []
        for device, tier in enumerate(self._homes):
            if device == one.device or not self._joined(home, tier.name):
                continue
            spare = self._spare(device, one)
            rate = platform.pace(platform.route(home, tier.name)).rate
            if spare > 0 and self._limit(device) >= int(self.times.stages[device].load.max(initial=0)):
                room.append((-rate, -spare, device))
        yield from (device for _, _, device in sorted(room))

    def _joined(self, one: str, other: str) -> bool:
        """Whether a copy goes from one tier to the other and back without a stay in a third."""
        platform = self.problem.platform
        return len(platform.route(one, other)) == 1 and len(platform.route(other, one)) == 1

    def _striped(self, one: Saved, donors: Sequence[int]) -> Choice | None:
        """Parts in proportion to the rates of the links, None where a part does not fit."""
        platform, home = self.problem.platform, self._homes[one.device].name
        tiers = [self._homes[device].name for device in donors]
        shares = _shares([platform.pace(platform.route(home, tier)).rate for tier in tiers])
        total = sum(shares)
        if one.bytes < total:
            return None
        copies, first = [], 0
        for device, tier, share in zip(donors, tiers, shares, strict=True):
            part = slice_of(one.bytes, first, first + share, total)
            first += share
            if part > self._spare(device, one):
                return None
            copies.append(self._trip(one, tier, part, share))
        return Choice(one, PEER, max(copy.late_ns for copy in copies), copies)

    def _to_host(self, one: Saved) -> Choice | None:
        host = self.problem.platform.host
        if host is None or not one.copyable:
            return None
        trip = self._trip(one, host.name, one.bytes, 1)
        return Choice(one, HOST, trip.late_ns, (trip,))

    def _trip(self, one: Saved, tier: str, size: int, share: int) -> Copy:
        """A copy out as soon as the link is free, and one back just in time; when it is needed if that is too soon."""
        platform, home = self.problem.platform, self._homes[one.device].name
        out_ns, back_ns = platform.move_ns(size, home, tier), platform.move_ns(size, tier, home)
        there, here = platform.route(home, tier), platform.route(tier, home)
        out = self._lanes.earliest(there, one.begin, out_ns)
        back = self._lanes.latest(here, one.need, back_ns)
        if back >= out + out_ns:
            return Copy(tier, size, share, out, out_ns, back, back_ns, 0)
        late = max(out + out_ns - one.need, 0)
        back = self._lanes.earliest(here, one.need + late, back_ns)
        return Copy(tier, size, share, out, out_ns, back, back_ns, back + back_ns - one.need)

    def _recomputed(self, one: Saved) -> Choice | None:
        """From what is there when it is needed back, None where nothing can bring it back."""
        chain = self.chain(one)
        if not chain:
            return None
        return Choice(one, RECOMPUTE, sum(self.problem.cost.op_ns(op) for op in chain), chain=chain)

    def chain(self, one: Saved) -> Sequence[int]:
        """The ops that recompute a tensor, in order; () where one of them can't."""
        index, found, stack = self.index, set[int](), [one.tensor]
        if not index.droppable[one.tensor] or one.tensor in self.problem.trace.outputs:
            return ()
        while stack:
            op = index.producer[stack.pop()]
            if op in found:
                continue
            if op in index.communicating or not index.can_recompute(op, one.back):
                return ()
            found.add(op)
            stack += [t for t in index.reads[op] if not self._is_there(t, one)]
        return sorted(found)

    def _is_there(self, tensor: int, one: Saved) -> bool:
        """Whether a tensor can be read when `one` is recomputed: it is used later on, or no device brings it back."""
        index = self.index
        if index.producer[tensor] < 0 or index.producer[tensor] in index.communicating:
            return True
        if self._gone.get(tensor, -1) >= one.back:
            return False
        readers = self.problem.trace.readers(tensor)
        return bool(readers) and readers[-1] >= one.back

    def _take(self, choice: Choice) -> None:
        """Settle what happens to a tensor."""
        one = choice.saved
        self.choices[one.tensor] = choice
        stage, load = self.times.stages[one.device], self._load[one.device]
        if choice.technique == RECOMPUTE:
            self._gone[one.tensor] = one.back
            load[_first(stage.start, one.begin) : bisect_left(stage.ops, one.back)] -= one.bytes
        for copy in choice.copies:
            home = self._homes[one.device].name
            self._lanes.take(self.problem.platform.route(home, copy.tier), copy.out, copy.out_ns)
            self._lanes.take(self.problem.platform.route(copy.tier, home), copy.back, copy.back_ns)
            gone = one.begin if copy.late_ns else copy.out + copy.out_ns  # where late, the device waits for the space
            load[_first(stage.start, gone) : self.fetched(one, copy)] -= copy.bytes
            for device, tier in enumerate(self._homes):
                if tier.name == copy.tier:
                    self._load[device][self.times.stages[device].during(copy.out, one.need)] += copy.bytes

    def fetched(self, one: Saved, copy: Copy) -> int:
        """The position of the op before which a copy back is asked for: reached by the time that it has to begin."""
        stage = self.times.stages[one.device]
        latest = int(np.searchsorted(stage.reached, copy.back, side="right")) - 1
        return min(max(latest, bisect_right(stage.ops, one.left)), bisect_left(stage.ops, one.back))


def saved(problem: Problem, times: Timeline) -> Iterator[Saved]:
    """What a device's forward leaves for its own backward, in the order of production."""
    trace = problem.trace
    c, size, producer = trace.op_columns, trace.tensor_columns.bytes.tolist(), trace.producer.tolist()
    phase, device = c.phase.tolist(), c.device.tolist()
    may_leave = swappable(trace, MAY_LEAVE)
    for t in saved_tensors(trace).tolist():
        readers = trace.readers(t)
        back = next(op for op in readers if phase[op] == BACKWARD)
        left = max([op for op in readers if op < back], default=producer[t])
        if size[t] and device[left] == device[back] and times.end[left] < times.start[back]:
            copyable = t in may_leave and trace.tensor_columns.replaces[t] < 0
            yield Saved(t, size[t], device[left], left, back, times.end[left], times.start[back], bool(copyable))


def _rank(choice: Choice) -> tuple[float, int]:
    """First what saves most bytes for the time that it adds; of those that add none the largest."""
    return (choice.ns / choice.saved.bytes if choice.ns else -inf, -choice.saved.bytes)


def _first(start: Ints, moment: int) -> int:
    """The position of the first op that begins at a moment or later."""
    return int(np.searchsorted(start, moment))


def _shares(rates: Sequence[int]) -> list[int]:
    """Small integers in proportion to these rates."""
    shares = [max(round(WEIGHTS * rate / sum(rates)), 1) for rate in rates]
    return [share // gcd(*shares) for share in shares]
