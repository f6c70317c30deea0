"""DELTA: under pressure pick by size and staleness, then decide between the link and recomputing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from sim.declared import Rate
from sim.eviction.evictable import EVICTED_ROLES, CandidateSet, Lineage, Role, ScoreTable, lineage_of
from sim.eviction.evictor import Evictor, Rules, evictable_tiers
from sim.eviction.neighbourhood import CostClasses
from sim.hardware.transfer_time import transfer_ns
from sim.plan import Action, Change, Drop, Memory, Move, Need, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.units import parse_rate


@dataclass(frozen=True, kw_only=True)
class Delta(Policy):
    """Evict the largest and stalest tensor: offload it if that is no more expensive than recomputing it, else drop it.

    Three parts. The filter takes the candidate of least 1 / (bytes * ns since its last access). The
    director divides the time of a copy out and back by the time to recompute: above 1 the tensor is
    dropped, else moved to the host. Once a tensor has been offloaded and reloaded, the measured time, queueing
    included, replaces the estimate; a copy that is still resident on the host makes leaving free. The
    prefetcher keeps the tensors that are resident on the host alone in a queue and, before each op, copies back
    those at its front as far as memory is free beyond the op's results. A tensor read before that is
    copied while the device waits; a dropped one is recomputed. A dead tensor is freed at once.

    Source: Tang, Li, Wang, Jia et al., "DELTA: Dynamically Optimizing GPU Memory beyond Tensor
        Recomputation", 2022, arXiv:2203.15980; ACM TACO 2024. The steps are those of a public
        annotated copy of its PyTorch code.
    Bounds: each choice is greedy; the problem is a 0-1 knapsack. A choice takes vector operations over the
        set of candidates.
    Departs: the code takes the link at 0.35 * 32 GiB/s whatever the machine; here the platform's route
        decides unless `bandwidth` is given. It divides the director's quotient by size and staleness
        too, which changes what "above 1" means: left out. It reloads in the forward pass as well: see
        `prefetch_forward`. The copy on the host stays after a reload until the tensor is dead. Where the
        host has no space a tensor is dropped. Op times are those with nothing else running.

    filter: `stale_size` as above, or `cost_adjacent`, least min(recompute, copy) / ((bytes + adjacent free bytes)
        * staleness), which scores each candidate one by one.
    recompute_cost: `classes`, with the adjacent evicted components as in `dtr_eq`, or `own`, the producer's.
    bandwidth: bytes/s of both directions in the director's eyes, or text such as "11 GB/s"; None: the platform's.
    prefetch: take the queue from the oldest (`fifo`) or the youngest (`lifo`, the order in which backward
        needs them), or `none`.
    prefetch_depth: how many from that end are looked at before an op.
    watermark: share of the device's memory that is kept free: before each op tensors that the director would offload
        are copied out ahead of need, overlapping with compute, in the filter's order; 0 waits for pressure, as
        published. Nothing is dropped ahead of need, since a drop takes no time.
    prefetch_forward: also reload while forward ops run.
    ties: of equal scores the tensor that became evictable `last` or `first` is evicted.
    evicts: roles of tensors that may be evicted.
    Raises PolicyError for an unknown choice or role, a depth below 0, a watermark that is not a share below 1, or a
        bandwidth below 1 or without its unit.
    """

    online = True
    recomputes = True
    moves = True
    fidelity = "equations"
    rarely = "it moves only what is more expensive to recompute than to copy"
    other_values = by_parameter(
        filter="cost_adjacent",
        recompute_cost="own",
        bandwidth=10**9,
        prefetch="lifo",
        prefetch_depth=1,
        prefetch_forward=True,
        watermark=0.1,
        ties="first",
        evicts=("activation",),
    )

    filter: Literal["stale_size", "cost_adjacent"] = "stale_size"
    recompute_cost: Literal["classes", "own"] = "classes"
    bandwidth: Rate | None = None
    prefetch: Literal["fifo", "lifo", "none"] = "fifo"
    prefetch_depth: Annotated[int, Ge(0)] = 5
    prefetch_forward: bool = False
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.0
    ties: Literal["last", "first"] = "last"
    evicts: tuple[Role, ...] = EVICTED_ROLES

    @property
    def rate(self) -> int | None:
        """The bandwidth in bytes/s, None for the platform's."""
        return parse_rate(self.bandwidth) if isinstance(self.bandwidth, str) else self.bandwidth

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is, with an online part that drops and moves."""
        platform, trace = problem.platform, problem.trace
        host = platform.host.name if platform.host else None
        online = partial(
            _Director,
            lineage_of(problem, self.evicts),
            self,
            tiers=tuple(tier.name for tier in platform.tiers),
            evicts=tuple(tier for tier in evictable_tiers(problem) if tier != host),
            seed=problem.seed,
            host=host,
            trips=_trips(problem, host, self.rate),
            homes=tuple(platform.home(device).name for device in range(trace.devices)),
            kept={tier.name: int(self.watermark * tier.capacity) for tier in platform.tiers},
        )
        return Plan(trace, online=online, keep_dead=True)


def _trips(problem: Problem, host: str | None, rate: int | None) -> dict[str, dict[int, tuple[int, int]]]:
    """Per tier that has a route to the host and back, per size in bytes: ns out, ns back."""
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


class _Director(Evictor):
    """An evictor that moves instead of dropping where that costs no more, and reloads when memory is free."""

    def __init__(
        self,
        lineage: Lineage,
        policy: Delta,
        *,
        tiers: tuple[str, ...],
        evicts: tuple[str, ...],
        seed: int,
        host: str | None,
        trips: dict[str, dict[int, tuple[int, int]]],
        homes: tuple[str, ...],
        kept: dict[str, int],
    ) -> None:
        rules = Rules(heuristic="none", ties=policy.ties, reload_is_access=True)
        super().__init__(lineage, rules, tiers=tiers, evicts=evicts, seed=seed)
        self._policy = policy
        self._host = host
        self._trips = trips
        self._homes = homes
        self._kept = kept
        self._early = False  # current evictions are ahead of need
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
            if tier != self._host:
                self._away.pop(tensor, None)
        elif self._host is not None and tier != self._host and self.copies[tensor] == self.bit[self._host]:
            self._away[tensor] = tier
        elif tier == self._host:
            self._away.pop(tensor, None)

    # ---- the director ------------------------------------------------------------------------

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """What the filter picks, dropped or moved, until the bytes are enough."""
        self._room = memory.free(self._host) if self._host else 0
        return super().on_pressure(need, memory)

    def evict(self, tensor: int, need: Need, memory: Memory) -> Action | None:
        """A move to the host if it has space and the director's quotient is at most 1, else a drop; see `Delta`."""
        under_way, host = memory.in_flight(tensor), self._host
        if under_way is not None:
            # still a candidate: an offload in flight that kept the source; now the source may be freed
            return Move(tensor, under_way) if under_way == host else None
        if host is None or need.tier not in self._trips:
            return None if self._early else Drop(tensor, need.tier)
        if self.copies[tensor] & self.bit[host]:
            return Move(tensor, host)  # a clean copy is resident: nothing is copied
        size = self.line.size[tensor]
        if size > self._room or self.copy_ns(tensor, need.tier) > self.recompute_ns(tensor):
            return None if self._early else Drop(tensor, need.tier)
        self._room -= size
        self._began[tensor] = (host, memory.now)
        return Move(tensor, host)

    def copy_ns(self, tensor: int, tier: str) -> int:
        """Out and back: as measured for this tensor where it has been, else as the route says."""
        out, back = self._trips[tier][self.line.size[tensor]]
        return self._took.get((tensor, str(self._host)), out) + self._took.get((tensor, tier), back)

    def recompute_ns(self, tensor: int) -> int:
        """The time to recompute it, with its evicted components if the policy says so."""
        if self._policy.recompute_cost == "own":
            return self.kin.cost[tensor]
        return self._classes.cost(tensor)

    # ---- the filter --------------------------------------------------------------------------

    def choose(self, candidates: CandidateSet, tier: str, memory: Memory, barred: set[int]) -> int:
        """The candidate that the filter picks, -1 for none."""
        if self._policy.filter == "stale_size":
            return super().choose(candidates, tier, memory, barred)
        found, least, first = -1, 0.0, self._policy.ties == "first"
        allowed = [tensor for tensor in candidates.ids.tolist() if tensor not in barred]
        for tensor in sorted(allowed, key=lambda t: int(self.table.order[t]), reverse=not first):
            cost = self.recompute_ns(tensor)
            if tier in self._trips:
                cost = min(cost, self.copy_ns(tensor, tier))
            below, above = memory.neighbours(tensor, tier)
            bottom = (self.line.size[tensor] + below + above) * (memory.now - int(self.table.access[tensor]))
            score = cost / bottom if bottom else float("inf")
            if found < 0 or score < least:
                found, least = tensor, score
        return found

    # ---- the prefetcher ----------------------------------------------------------------------

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """Free dead tensors and prepare the update; then evict ahead of need, or else reload."""
        answer = list(super().before(op, memory))
        policy = self._policy
        if policy.watermark and (early := self._ahead(op, memory, answer)):
            return answer + early
        if not self._away or policy.prefetch == "none" or (self.line.forward[op] and not policy.prefetch_forward):
            return answer
        tier = self._homes[self.line.device[op]]
        freed = sum(self.line.size[int(a.tensor)] for a in answer if isinstance(a, Drop) and a.tier == tier)
        room = memory.free(tier) + freed - self.line.makes[op] - self._kept[tier]
        queue = reversed(self._away) if policy.prefetch == "lifo" else iter(self._away)
        for tensor in list(islice(queue, policy.prefetch_depth)):
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
        pinned_now = [t for t in (*self.line.reads[op], *dropped) if t not in self.pinned]
        self.pinned.update(pinned_now)
        self._early = True
        try:
            return list(self.on_pressure(Need(tier, self.line.makes[op], short, op, "what comes next"), memory))
        finally:
            self._early = False
            self.pinned.difference_update(pinned_now)
