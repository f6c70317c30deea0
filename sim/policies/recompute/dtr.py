"""Dynamic tensor rematerialization: evict the cheapest and stalest tensor when memory is short."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from annotated_types import Ge

from sim.declared import OneOf
from sim.errors import PolicyError
from sim.eviction.evictable import EVICTED_ROLES, Role, lineage_of
from sim.eviction.evictor import DEALLOCATIONS, Evictor, Rules, evictable_tiers
from sim.eviction.ranking import HEURISTICS
from sim.eviction.unpressed import frees_the_dead
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter


@dataclass(frozen=True, kw_only=True)
class Dtr(Policy):
    """Under memory pressure drop the tensor of least (recomputation cost) / (bytes * ns since its last access).

    Whatever is read later is recomputed by its producer, after that producer's own missing inputs. It needs no plan
    and does not look ahead: it knows sizes, the times of ops that have run, and which op produced what.

    Source: Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen, Tatlock, "Dynamic Tensor Remateriali-
        zation", ICLR 2021, arXiv:2006.09616, and the authors' prototype simulator: on its chains and on
        a transformer stack this policy recomputes the same ops, to the nanosecond.
    Bounds: a chain of N unit ops with 2 sqrt(N) slots and `dtr` recomputes at most about N ops; against an
        adversary any heuristic may need Omega(N / slots) times the optimum. A choice takes a few vector
        operations over the candidates and an exact evaluation of those that could win.
    Departs: by the engine's rules, an op that waits for several evicted tensors pins those already recomputed
        while the others are, a recomputed op pins those of its results that are still resident, and at
        the end the outputs pin each other; the prototype may evict them (its printed results do not
        depend on it). The prototype caches its searches of the neighbourhood until a tensor is recomputed: a cached
        search lacks what a view of several tensors has joined meanwhile, and counts results of ops that have not run
        yet and banished tensors; here a neighbourhood is what is evicted around the tensor now. Apart from these
        points, runs of imported logs match the prototype's, eviction by eviction, as a replay of logs that shares no
        code with this one confirms: a view is undefined once its storage was evicted, the time of its op is part of
        the storage's cost, and the op's other inputs are neighbours of the storage. Weight gradients are not
        evicted unless `evicts` says so (the prototype only tells constants from the rest). Nor are results of
        collectives, receives and updates, nor tensors that could not be recomputed because an ancestor was
        overwritten or freed: before a weight is overwritten, evicted tensors that depend on it and are still needed
        are recomputed. An op in place overwrites (where the prototype makes a new tensor), and its result is
        evicted where the overwritten value can be recomputed. An op's cost is its time with nothing else running.

    heuristic: the cost. `dtr`: the producer's time plus that of the evicted neighbourhood: all evicted tensors
        reached through evicted parents only or evicted children only. `dtr_eq`: plus that of the adjacent evicted
        components, nearly the same and cheaper to find. `local`: the producer's time. `none`: 1. Others replace the
        score: `msps` (time of the tensor and its evicted ancestors, over bytes), `lru`, `size` (largest), `random`.
    deallocation: what happens to a tensor after its last read. `eager`: it is evicted, and may be recomputed
        on the way to another. `ignore`: it stays until it is evicted. `banish`: it is freed for good
        as soon as no evicted tensor depends on it; tensors computed from it then stay resident. Until then a read
        of it, once released, does not count as an access.
    ties: of equal scores the tensor that became evictable `last` or `first` is evicted; of scores of 0 the first.
    staleness: `own`, or `neighbourhood` to count from the latest access to anything that the cost counts
        (`dtr` alone), or `none`; for the first four heuristics.
    by_size: whether bytes count; for the first four heuristics.
    evicts: roles of tensors that may be evicted; the prototype's are ("activation", "temporary", "gradient").
    ignore_small: skip tensors smaller than this fraction of the mean size (the prototype: 0.01), unless
        nothing else is left.
    sample: look at a random subset of about 2 sqrt(candidates).
    Raises PolicyError for an unknown choice or role, or a `neighbourhood` that the heuristic does not have.
    """

    online = True
    recomputes = True
    fidelity = "code"
    rarely = "half of the examples fit without dropping anything"
    other_values = by_parameter(
        heuristic="lru",
        deallocation="ignore",
        ties="first",
        staleness="none",
        by_size=False,
        ignore_small=0.5,
        sample=True,
        evicts=("activation",),
    )

    heuristic: Annotated[str, OneOf(HEURISTICS)] = "dtr_eq"
    deallocation: Annotated[str, OneOf(DEALLOCATIONS)] = "eager"
    ties: Literal["last", "first"] = "last"
    staleness: Literal["own", "neighbourhood", "none"] = "own"
    by_size: bool = True
    ignore_small: Annotated[float, Ge(0)] = 0.0
    sample: bool = False
    evicts: tuple[Role, ...] = EVICTED_ROLES

    def __post_init__(self) -> None:
        if self.staleness == "neighbourhood" and self.heuristic != "dtr":
            raise PolicyError(f"dtr: staleness 'neighbourhood' goes with heuristic 'dtr', not {self.heuristic!r}")

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is, with an online part that drops under pressure."""
        rules = Rules(
            self.heuristic, self.deallocation, self.ties, self.staleness, self.by_size, self.ignore_small, self.sample
        )
        online = partial(
            Evictor,
            lineage_of(problem, self.evicts, empty=True),
            rules,
            tiers=tuple(tier.name for tier in problem.platform.tiers),
            evicts=evictable_tiers(problem),
            seed=problem.seed,
        )
        unpressed = frees_the_dead(problem.trace) if self.deallocation == "eager" else None
        return Plan(problem.trace, online=online, keep_dead=True, unpressed=unpressed)
