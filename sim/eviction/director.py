"""DELTA's director: an evictor that weighs the link against recomputation, offloads ahead of need, and reloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from sim.eviction.evictable import Lineage, ScoreTable
from sim.eviction.evictor import Evictor, Rules, evictable_tiers
from sim.eviction.neighbourhood import CostClasses
from sim.hardware.transfer_time import transfer_ns
from sim.native import mypyc_attr
from sim.plan import Action, Change, Drop, Memory, Move, Need, Problem


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class Reload:
    """When tensors that are resident on the host alone are copied back ahead of their reads.

    order: take the queue from the oldest (`fifo`) or the youngest (`lifo`), or `none`.
    depth: how many from that end are looked at before an op.
    forward: also while forward ops run.
    """

    order: str = "fifo"
    depth: int = 5
    forward: bool = False


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class Surroundings:
    """The platform as a director sees it.

    tiers: of the platform; evicts: those from which tensors are evicted.
    host: where they are offloaded to, None for nowhere.
    trips: per tier that has a route to the host and back, per size in bytes: ns out, ns back.
    homes: per device its home tier.
    kept: per tier the bytes that are kept free by copying out ahead of need.
    seed: for what is drawn.
    """

    tiers: tuple[str, ...]
    evicts: tuple[str, ...]
    host: str | None
    trips: Mapping[str, Mapping[int, tuple[int, int]]]
    homes: tuple[str, ...]
    kept: Mapping[str, int]
    seed: int


def surroundings_of(
    problem: Problem, *, rate: int | None = None, watermark: float = 0.0, offloads: bool = True
) -> Surroundings:
    """The surroundings of a problem.

    rate: bytes/s of both directions; None for the platform's.
    watermark: share of each tier that is kept free.
    offloads: whether there is a host for the director.
    """
    platform, trace = problem.platform, problem.trace
    host = platform.host.name if platform.host else None
    return Surroundings(
        tiers=tuple(tier.name for tier in platform.tiers),
        evicts=tuple(tier for tier in evictable_tiers(problem) if tier != host),
        host=host if offloads else None,
        trips=_trips(problem, host, rate) if offloads else {},
        homes=tuple(platform.home(device).name for device in range(trace.devices)),
        kept={tier.name: int(watermark * tier.capacity) for tier in platform.tiers},
        seed=problem.seed,
    )


def _trips(problem: Problem, host: str | None, rate: int | None) -> dict[str, dict[int, tuple[int, int]]]:
    platform = problem.platform
    sizes = sorted(set(problem.trace.tensor_columns.bytes.tolist()))
    trips: dict[str, dict[int, tuple[int, int]]] = {}
    for tier in evictable_tiers(problem):
        if host is None or tier == host or not (platform.route(tier, host) and platform.route(host, tier)):
            continue
        if rate is None:
            trips[tier] = {b: (platform.move_ns(b, tier, host), platform.move_ns(b, host, tier)) for b in sizes}
        else:
            trips[tier] = {b: (transfer_ns(b, rate),) * 2 for b in sizes}
    return trips


@mypyc_attr(allow_interpreted_subclasses=True)
class Director(Evictor):
    """Moves instead of dropping where that costs no more, and reloads when memory is free.

    rules: the filter, which picks what is evicted. own_cost: whether recomputing a tensor counts its own producer
    alone, not the evicted components around it.
    """

    def __init__(
        self, lineage: Lineage, rules: Rules, around: Surroundings, reload: Reload, *, own_cost: bool = False
    ) -> None:
        super().__init__(lineage, rules, tiers=around.tiers, evicts=around.evicts, seed=around.seed)
        self.host = around.host
        self.trips = around.trips
        self.early = False  # current evictions are ahead of need
        self._homes = around.homes
        self._kept = around.kept
        self._reload = reload
        self._own_cost = own_cost
        self._classes = CostClasses(self.kin, ScoreTable(lineage), self.evicted)
        self.price = self._classes
        self._away: dict[int, str] = {}  # resident on the host alone, oldest first: the tier it left
        self._began: dict[int, tuple[str, int]] = {}  # copies in flight: where to, since when
        self._took: dict[tuple[int, str], int] = {}  # ns that the last copy of a tensor to a tier took
        self._room = 0

    # ---- what happens ------------------------------------------------------------------------

    def notice(self, change: Change) -> None:
        """Update the state, the queue of offloaded tensors, and the times of copies."""
        what, tensor, tier, now = change
        there = self.copies[tensor]
        super().notice(change)
        if what == "read":
            if tensor in self._away and tensor not in self._began:
                self._began[tensor] = (self._away[tensor], now)  # the device fetches it
        elif what == "came":
            if there and tensor in self._began and self._began[tensor][0] == tier:
                self._took[tensor, tier] = now - self._began.pop(tensor)[1]
            if there and self.released(tensor):
                self.free_later(tensor)  # it died in flight
            if tier != self.host:
                self._away.pop(tensor, None)
        elif self.host is not None and tier != self.host and self.copies[tensor] == self.bit[self.host]:
            self._away[tensor] = tier
        elif tier == self.host:
            self._away.pop(tensor, None)

    def in_flight(self) -> list[int]:
        """The tensors of copies that have begun and not ended, oldest first."""
        return list(self._began)

    # ---- the director ------------------------------------------------------------------------

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """What the filter picks, dropped or moved, until the bytes are enough."""
        self._room = memory.free(self.host) if self.host else 0
        return super().on_pressure(need, memory)

    def evict(self, tensor: int, need: Need, memory: Memory) -> Action | None:
        """A move to the host if it has space and dropping is not preferred, else a drop."""
        under_way, host = memory.in_flight(tensor), self.host
        if under_way is not None:
            # still a candidate: an offload in flight that kept the source; now the source may be freed
            return Move(tensor, under_way) if under_way == host else None
        if host is None or need.tier not in self.trips:
            return self.dropped(tensor, need.tier)
        if self.copies[tensor] & self.bit[host]:
            return Move(tensor, host)  # a clean copy is resident: nothing is copied
        size = self.line.size[tensor]
        if size > self._room or self.prefers_drop(tensor, need.tier):
            return self.dropped(tensor, need.tier)
        self._room -= size
        self._began[tensor] = (host, memory.now)
        return Move(tensor, host)

    def dropped(self, tensor: int, tier: str) -> Action | None:
        """A drop, None ahead of need: a drop takes no time."""
        return None if self.early else Drop(tensor, tier)

    def _stays(self, tensor: int, tier: str, memory: Memory) -> bool:
        """Whether `evict` has no move for it, so that ahead of need it need not be ranked."""
        under_way, host = memory.in_flight(tensor), self.host
        if under_way is not None or host is None or tier not in self.trips:
            return under_way is None or under_way != host
        if self.copies[tensor] & self.bit[host]:
            return False
        return self.line.size[tensor] > memory.free(host) or self.prefers_drop(tensor, tier)

    def prefers_drop(self, tensor: int, tier: str) -> bool:
        """Whether a copy out and back takes longer than recomputing it."""
        return self.copy_ns(tensor, tier) > self.recompute_ns(tensor)

    def copy_ns(self, tensor: int, tier: str) -> int:
        """Out and back: as measured for this tensor where it has been, else as the route says."""
        out, back = self.trips[tier][self.line.size[tensor]]
        return self._took.get((tensor, str(self.host)), out) + self._took.get((tensor, tier), back)

    def recompute_ns(self, tensor: int) -> int:
        """The time to recompute it, with its evicted components unless its own cost is asked for."""
        if self._own_cost:
            return self.kin.cost[tensor]
        return self._classes.cost(tensor)

    # ---- the prefetcher ----------------------------------------------------------------------

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """Free dead tensors and prepare the update; then evict ahead of need, or else reload."""
        answer = list(super().before(op, memory))
        reload, tier = self._reload, self._homes[self.line.device[op]]
        if self._kept[tier] and (early := self._ahead(op, memory, answer)):
            return answer + early
        if not self._away or reload.order == "none" or (self.line.forward[op] and not reload.forward):
            return answer
        freed = sum(self.line.size[int(a.tensor)] for a in answer if isinstance(a, Drop) and a.tier == tier)
        room = memory.free(tier) + freed - self.line.makes[op] - self._kept[tier]
        queue = reversed(self._away) if reload.order == "lifo" else iter(self._away)
        for tensor in list(islice(queue, reload.depth)):
            size = self.line.size[tensor]
            if size > room:
                break
            if self._away[tensor] != tier or tensor in self._began or self.released(tensor):
                continue
            room -= size
            self._began[tensor] = (tier, memory.now)
            answer.append(Move(tensor, tier, keep=True))
        return answer

    def _ahead(self, op: int, memory: Memory, answer: list[Action]) -> list[Action]:
        """Moves of what the filter picks, but for what the op reads, until the watermark is free beside its results."""
        tier = self._homes[self.line.device[op]]
        freed = sum(self.line.size[int(a.tensor)] for a in answer if isinstance(a, Drop) and a.tier == tier)
        short = self._kept[tier] + self.line.makes[op] - memory.free(tier) - memory.leaving(tier) - freed
        if short <= 0:
            return []
        dropped = [int(a.tensor) for a in answer if isinstance(a, Drop)]
        staying = (t for t in self.candidates[tier].ids.tolist() if self._stays(t, tier, memory))
        pinned_now = [t for t in (*self.line.reads[op], *dropped, *staying) if t not in self.pinned]
        self.pinned.update(pinned_now)
        self.early = True
        try:
            return list(self.on_pressure(Need(tier, self.line.makes[op], short, op, "what comes next"), memory))
        finally:
            self.early = False
            self.pinned.difference_update(pinned_now)
