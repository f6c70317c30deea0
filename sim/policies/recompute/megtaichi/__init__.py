"""MegTaiChi: evict by cost, size, age and the free memory beside, and partition tensors where that is not enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from sim.declared import Size
from sim.errors import Deadlock, Infeasible, PolicyError, TraceError
from sim.eviction.evictable import EVICTED_ROLES, CandidateSet, Lineage, Role, ScoreTable, lineage_of
from sim.eviction.evictor import Evictor, Rules, evictable_tiers
from sim.eviction.neighbourhood import Price
from sim.eviction.ranking import Ranking
from sim.eviction.unpressed import frees_the_dead
from sim.hardware.cost import op_times
from sim.plan import Action, Drop, Memory, Need, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.recompute.megtaichi.producer_classes import ProducerClasses
from sim.rewrites.batching import split_batch
from sim.trace.graph import Trace
from sim.units import to_bytes

EPSILON = 1e-3
MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class MegTaiChi(Policy):
    """Two parts: tensor partition before the run, tensor eviction while it runs.

    Eviction: when no free block is large enough for a request, the tensor of least
        (N + ε) · penalty^k / ((bytes + free bytes just below and above it) / MiB · (ns since its last use + ε))
    is evicted, one at a time until a block is large enough, so that adjacent free blocks merge. N is the time to
    recompute its evicted neighbours (see `neighbours`), k how often it has been recomputed, ε = 0.001. A tensor that
    is read later is recomputed.
    Partition: the samples of the batch are split into parts that run one after the other and whose
    gradients are added up. One trial run per number of parts, from one on, measures its time, and the
    first number after which more parts are no faster is taken.

    Source: Hu et al., "MegTaiChi: Dynamic Tensor-Based Memory Management Optimization for DNN Training", ICS 2022,
        of which the abstract is public; score, neighbours and the loop round an allocation are those of MegEngine's
        public code (imperative/src/impl/interpreter).
    Bounds: a choice takes vector operations over the candidates, and, where the tier has addresses, a look at
        the free space beside each. With `neighbours` "both", `own_cost`, a `penalty` of 1 and a tier without addresses
        it chooses as `dtr` with `dtr_eq`, up to ε.
    Departs (a reconstruction). Partition: the paper splits tensors over several devices, each along the dimension of
        least communication, as the first iterations showed; how is not public. Here it is one device,
        every tensor along the batch, in time instead of space, and trial runs decide. Eviction: the code takes
        bytes read and written as the cost of an op and as its clock, here both are time; it forgets the cost of
        a whole component when the tensor that represents it is recomputed, here only that tensor's; it never evicts
        what is smaller than `at_least`, here that is evicted when nothing larger is left. Where nothing
        is left to evict the code compacts memory, and here memory is out. The allocator is the tier's:
        `pool` with best fit is nearest to MegEngine's. When tensors are evicted, and which are dead, follows `dtr` with
        `eager`.

    parts: how many parts the batch is split into; None: see above.
    neighbours: whose components of evicted tensors N counts: those of the inputs of its `producer` and of that
        op's other results, one for each, as in the code; or of `both` its parents and its children, each component
        once, as DTR.
    own_cost: whether N counts the tensor's own producer, too.
    penalty: factor of the score for each recomputation of the tensor so far, at least 1.
    adjacent: whether the adjacent free bytes count.
    at_least: bytes, or text such as "1 MiB", below which a tensor is evicted last.
    threshold: share of the memory, above 0, to evict down to before each op, whether it needs it or not; None: only
        on demand.
    sample: look at a random subset of about 2 sqrt(candidates).
    evicts: roles of tensors that may be evicted.
    Raises PolicyError for a wrong parameter, or where the batch cannot be split into `parts`.
    """

    online = True
    recomputes = True
    rewrites = True
    splits_batch = True
    slow = True  # up to three trial runs
    fidelity = "reconstruction"
    rarely = "half of the examples fit as they are, and a partition is tried only where that is not so"
    other_values = by_parameter(
        parts=2,
        neighbours="both",
        own_cost=True,
        penalty=2.0,
        adjacent=False,
        at_least=1 << 26,
        threshold=0.5,
        sample=True,
        evicts=("activation",),
    )
    unseen = by_parameter(adjacent="it takes many small holes; see its own tests")

    parts: Annotated[int, Ge(1)] | None = None
    neighbours: Literal["producer", "both"] = "producer"
    own_cost: bool = False
    penalty: Annotated[float, Ge(1)] = 1.0001
    adjacent: bool = True
    at_least: Size = MEBIBYTE
    threshold: Annotated[float, Gt(0), Le(1)] | None = None
    sample: bool = False
    evicts: tuple[Role, ...] = EVICTED_ROLES

    @property
    def smallest(self) -> int:
        """`at_least` in bytes."""
        return to_bytes(self.at_least)

    def plan(self, problem: Problem) -> Plan:
        """The trace, partitioned or not, with an online part that drops; notes: `parts`, and ns of each trial."""
        return self._tried(problem) if self.parts is None else self._given(problem, self.parts)

    def _given(self, problem: Problem, parts: int) -> Plan:
        """The batch dealt out as asked for."""
        if parts > 1 and problem.trace.devices > 1:
            raise PolicyError(f"policy 'megtaichi': parts are of one device; this trace has {problem.trace.devices}")
        try:
            return self._over(problem, split_batch(problem.trace, parts), {"parts": parts})
        except TraceError as error:
            raise PolicyError(f"policy 'megtaichi': parts is {parts}: {error}") from None

    def _tried(self, problem: Problem) -> Plan:
        """The first number of parts after which more are no faster; the most that could be made if none fits."""
        plan = self._over(problem, problem.trace, {"parts": 1})
        best: Plan | None = None
        fastest: int | None = None
        took: dict[int, int | None] = {}
        for count in _divisors(problem.trace):
            if count > 1:
                try:
                    trace = split_batch(problem.trace, count)
                except TraceError:
                    break  # what cannot be dealt out to two parts cannot be dealt out to more
                if fastest is not None and _least_ns(problem, trace) >= fastest:
                    break
                plan = self._over(problem, trace, {"parts": count})
            now, pressed = _trial(problem, plan)
            took[count] = now
            if now is not None and (fastest is None or now < fastest):
                best, fastest = plan, now
            elif fastest is not None:
                break
            if not pressed:
                break  # nothing went: less memory is of no use
        chosen = best or plan
        return replace(chosen, notes={**chosen.notes, "trials": took})

    def _over(self, problem: Problem, trace: Trace, notes: dict[str, Any]) -> Plan:
        """A trace with the online part."""
        platform = problem.platform
        asked = replace(problem, trace=trace)
        evicts = evictable_tiers(asked)
        online = partial(
            _Evictor,
            lineage_of(asked, self.evicts),
            self,
            tiers=tuple(tier.name for tier in platform.tiers),
            evicts=evicts,
            seed=problem.seed,
            addressed=tuple(name for name in evicts if platform.tier(name).allocator.name != "exact"),
            room={name: platform.tier(name).capacity for name in evicts},
        )
        unpressed = frees_the_dead(trace) if self.threshold is None else None
        return Plan(trace, online=online, keep_dead=True, notes=notes, unpressed=unpressed)


def _divisors(trace: Trace) -> list[int]:
    """Numbers of parts that deal the batch out evenly; one alone on several devices, or where no batch is known."""
    batch = trace.meta.get("batch")
    if not isinstance(batch, int) or trace.devices > 1:
        return [1]
    return [count for count in range(1, batch + 1) if batch % count == 0]


def _least_ns(problem: Problem, trace: Trace) -> int:
    """What the main engine computes, in ns: no run takes less."""
    times = op_times(trace, problem.platform).total.copy()
    times[list(trace.op_columns.engine)] = 0
    return int(times.sum())


def _trial(problem: Problem, plan: Plan) -> tuple[int | None, bool]:
    """How long a plan takes, in ns, None where it does not fit; and whether memory was short."""
    try:
        log = problem.evaluate(plan)
    except (Infeasible, Deadlock):
        return None, True
    return log.end, log.counters["pressure_calls"] > 0


class _Evictor(Evictor):
    """An evictor that takes one tensor at a time, and looks at the space beside it."""

    def __init__(
        self,
        lineage: Lineage,
        policy: MegTaiChi,
        *,
        tiers: Sequence[str],
        evicts: Sequence[str],
        seed: int,
        addressed: Sequence[str],
        room: Mapping[str, int],
    ) -> None:
        rules = Rules(heuristic="none", ties="first", sample=policy.sample)
        super().__init__(lineage, rules, tiers=tiers, evicts=evicts, seed=seed)
        self._policy = policy
        self._addressed = addressed if policy.adjacent else ()
        self._room = room
        self.price = ProducerClasses(
            lineage, self.kin, self.table, self.evicted, both=policy.neighbours == "both", own=policy.own_cost
        )
        self._beside = _Beside(lineage, self.table, self.price)
        self.ranking = self._beside
        self._large = self.table.size >= policy.smallest

    def _arrive(self, tensor: int, now: int) -> None:
        if self._produced[tensor]:
            self._beside.penalty[tensor] *= self._policy.penalty
        super()._arrive(tensor, now)

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """What the dead ask for; then evictions down to the threshold, if there is one."""
        answer = list(super().before(op, memory))
        if self._policy.threshold is None:
            return answer
        barred = self.pinned.union(self.line.reads[op])  # the op needs them next
        for tier, room in self._room.items():
            evicted = sum(self.line.size[int(a.tensor)] for a in answer if isinstance(a, Drop) and a.tier == tier)
            excess = room - memory.free(tier) - evicted - int(self._policy.threshold * room)
            while excess > 0 and (tensor := self.choose(self.candidates[tier], tier, memory, barred)) >= 0:
                barred.add(tensor)
                if not memory.is_locked(tensor):
                    answer += self._drop(tensor, tier)
                    excess -= self.line.size[tensor]
        return answer

    def _drop(self, tensor: int, tier: str) -> list[Action]:
        self.candidates[tier].remove(tensor)
        self._leaving[tensor] = tier
        if self.copies[tensor] != self.bit[tier]:
            return [Drop(tensor, tier)]
        self._lose(tensor)
        return [Drop(tensor, tier), *self._drop_views(tensor)]

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """The least candidate alone: its space then adjoins that of others, which changes their scores."""
        return super().on_pressure(need._replace(short=1), memory)

    def choose(self, candidates: CandidateSet, tier: str, memory: Memory, barred: set[int]) -> int:
        """The least of the large ones, else the least of all."""
        ids = self._subset(candidates) if self.rules.sample else candidates.ids
        for some in (ids[self._large.take(ids)], ids, candidates.ids):
            if tier in self._addressed:
                for tensor in some.tolist():
                    self._beside.free[tensor] = sum(memory.neighbours(tensor, tier))
            found = self.ranking.least(candidates, memory.now, barred, some) if len(some) else -1
            if found >= 0:
                return found
        return -1


class _Beside(Ranking):
    """Scores (weight + ε) · penalty / ((bytes + adjacent free bytes) / MiB · (staleness + ε)); the least goes.

    penalty: per tensor, grows with each recomputation.
    free: per tensor, bytes, as looked at last.
    """

    def __init__(self, lineage: Lineage, table: ScoreTable, price: Price) -> None:
        super().__init__(lineage, table, price, by_size=True, staleness="own", ties="first")
        self.penalty = np.ones(len(lineage.size))
        self.free = np.zeros(len(lineage.size))

    def _scores(self, ids: NDArray[np.int64], now: int) -> NDArray[np.float64]:
        table = self._table
        scores: NDArray[np.float64] = (table.weight.take(ids) + EPSILON) * self.penalty.take(ids)
        scores /= (table.size.take(ids) + self.free.take(ids)) / MEBIBYTE
        scores /= now - table.access.take(ids) + EPSILON
        return scores

    def _quotient(self, tensor: int, now: int, limit: float) -> float | None:
        found = self._price.exact(tensor, limit) if self._price else None
        if found is None:
            return None
        size = (self._table.size[tensor] + self.free[tensor]) / MEBIBYTE
        top = (found[0] + EPSILON) * self.penalty[tensor]
        return float(top / size / (now - self._table.accesses[tensor] + EPSILON))
