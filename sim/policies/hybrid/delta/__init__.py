"""DELTA: under pressure pick by size and staleness, then decide between the link and recomputing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from sim.declared import Rate
from sim.eviction.director import Director, Reload, surroundings_of
from sim.eviction.evictable import EVICTED_ROLES, CandidateSet, Role, lineage_of
from sim.eviction.evictor import Rules
from sim.eviction.unpressed import frees_the_dead, watermark_of
from sim.plan import Memory, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.delta.static_problem import static_problem
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
    Bounds: each choice is greedy. The static problem behind them is a 0-1 knapsack: at the op of the largest footprint
        so many bytes must be away, each tensor at the less expensive of a copy out and back and its producer's
        recomputation. It is solved beside the choices, exactly where what must be away
        is at most 5,000 of the sizes' largest common unit, else from below: no plan that evicts these roles alone
        takes less time of ops and copies than `work_bound_ns`. A choice takes vector operations over the set of
        candidates. The published growth in batch, 2.04 times on ResNet-50 and 2.25 on ResNet-101, fits here, for 19
        to 25 % more time a sample; what it cost there is not given.
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
    Notes of the plan: `work_bound_ns` and `bound_among`, the class; of the static problem `static_op`, `static_need` in
        bytes and `static_ns` beyond every op run once. None on several devices, or where the device reads other tiers
        in place.
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
        static = static_problem(problem, self.evicts, surroundings_of(problem).trips.get(problem.home, {}))
        notes: dict[str, Any] = {}
        if static is not None:
            notes = {
                "work_bound_ns": static.work_ns,
                "bound_among": static.plans,
                "static_op": static.op,
                "static_need": static.need,
                "static_ns": static.cost_ns,
            }
        return Plan(
            problem.trace,
            notes=notes,
            online=partial(
                _Delta,
                lineage_of(problem, self.evicts),
                Rules(heuristic="none", ties=self.ties, reload_is_access=True),
                surroundings_of(problem, rate=self.rate, watermark=self.watermark),
                Reload(self.prefetch, self.prefetch_depth, self.prefetch_forward),
                own_cost=self.recompute_cost == "own",
                adjacent=self.filter == "cost_adjacent",
            ),
            keep_dead=True,
            unpressed=frees_the_dead(problem.trace, watermark_of(problem, self.watermark)),
        )


class _Delta(Director):
    """A director behind either filter. adjacent: whether the filter is `cost_adjacent`."""

    def __init__(self, *parts: Any, adjacent: bool, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._adjacent = adjacent

    def choose(self, candidates: CandidateSet, tier: str, memory: Memory, barred: set[int]) -> int:
        """The candidate that the filter picks, -1 for none."""
        if not self._adjacent:
            return super().choose(candidates, tier, memory, barred)
        found, least, first = -1, 0.0, self.rules.ties == "first"
        allowed = [tensor for tensor in candidates.ids.tolist() if tensor not in barred]
        for tensor in sorted(allowed, key=lambda t: self.table.order[t], reverse=not first):
            cost = self.recompute_ns(tensor)
            if tier in self.trips:
                cost = min(cost, self.copy_ns(tensor, tier))
            below, above = memory.neighbours(tensor, tier)
            bottom = (self.line.size[tensor] + below + above) * (memory.now - int(self.table.accesses[tensor]))
            score = cost / bottom if bottom else float("inf")
            if found < 0 or score < least:
                found, least = tensor, score
        return found
