"""Mixture of experts in two tiers: experts that are read are on the device, the others in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Beside, Policy, by_parameter
from sim.policies.offload.moe_tiering.cache import Experts, Wanted
from sim.policies.offload.moe_tiering.visits import Visit, experts_of, visits_of
from sim.trace.graph import Trace


@dataclass(frozen=True, kw_only=True)
class MoeTiering(Policy):
    """Experts begin in the host's memory; once a layer's router has chosen, those that are missing are fetched.

    A device holds a number of experts. Where a router has chosen, and where the next of its experts begins, those still
    to come are fetched in the order in which they run, as far as there are slots; the least recently used leaves for
    them, without a copy where the host still has its value. Backward knows the choice from its beginning. While the
    experts of a layer run, those of the next layer are predicted and fetched into slots that are left, behind what
    is certain. Under memory pressure experts leave, too.
    Source: the layered scheme that a survey of memory optimisation for training sketches for mixtures of experts
        (active ones in HBM, inactive ones in DDR), without figures; cache and speculation as in Eliseev, Mazur,
        "Fast Inference of Mixture-of-Experts Language Models with Offloading", arXiv:2312.17238.
    Bounds: with a slot for each expert every one is fetched at most once per iteration; with fewer than a layer reads,
        each of its visits once. Misses with least recent use are at least those with `belady`.
    Departs: experts that a device updates need its memory for that; `zero_offload(weights=host) + moe_tiering` updates
        them on the host. An expert runs where the trace has it, not when it arrives, and never on the CPU; so missing
        ones are fetched in the order in which they run, not those with the most tokens first. Where all fit, they begin
        on the host all the same. Of replacements, least frequent use is left out. The prediction of a router that is
        applied a layer early is drawn: it is right for each expert with the probability given.

    slots: experts per device, None for as many as its memory holds.
    replacement: `lru`, or `belady`, which sends away the expert that is needed last, as no online policy can.
    speculate: what is predicted of the next layer: `none`; `previous`, its experts in the iteration before; `router`,
        those that it will choose, each with probability `accuracy`, else another one of the layer.
    accuracy: of that prediction.
    Notes of the plan: `experts`, how many; `visits`, how often a layer's experts are read.
    Raises PolicyError for a number below 1, a platform without a host tier, or a trace without experts that have
    weights of their own.
    """

    online = True
    moves = True
    needs = frozenset({"host", "experts"})
    manages = ("weights",)
    fidelity = "reconstruction"
    plans_ahead = "it reads from the trace which experts a router has chosen, once that has run"
    other_values = by_parameter(
        slots=1,
        replacement=Beside("belady", slots=2),
        speculate=Beside("router", slots=2),
        accuracy=Beside(0.1, speculate="router", slots=2),
    )

    slots: Annotated[int, Ge(1)] | None = None
    replacement: Literal["lru", "belady"] = "lru"
    speculate: Literal["none", "previous", "router"] = "none"
    accuracy: Annotated[float, Gt(0), Le(1)] = 0.9

    def plan(self, problem: Problem) -> Plan:
        """Where experts begin, and the online part that fetches and evicts them."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"moe_tiering: {platform.name} has no host tier for experts")
        experts = experts_of(trace, platform)
        if not experts:
            raise PolicyError(
                "moe_tiering: the trace has no experts with weights of their own; a config needs "
                "experts_implementation = 'loop'"
            )
        visits = visits_of(trace, experts)
        tensors = {name: _versions(trace, weights) for name, weights in experts.items()}
        size = trace.tensor_columns.bytes.tolist()
        movable = [False] * len(size)
        for ids in tensors.values():
            for t in ids:
                movable[t] = True
        uses: dict[str, list[int]] = {}
        if self.replacement == "belady":
            for visit in visits:
                for name, op in visit.first:
                    uses.setdefault(name, []).append(op)
        chain = platform.cascade(platform.host.name)
        online = partial(
            Experts,
            tensors=tensors,
            wanted=self._wanted(problem, visits),
            uses=uses,
            slots=self.slots,
            chain=chain,
            homes=tuple(platform.home(device).name for device in range(trace.devices)),
            movable=movable,
            size=size,
        )
        notes = {"experts": len(experts), "visits": len(visits)}
        return Plan(trace, place=self._place(problem, experts, chain), online=online, notes=notes)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """Experts on the host, where an op of its processor reads them without a copy."""
        return {"experts on the host": self.plan(problem)}

    def _place(self, problem: Problem, experts: dict[str, list[int]], chain: Sequence[str]) -> dict[int, str]:
        """Where experts begin: the host, or where it is full the tier behind; later, where an iteration left them."""
        carried = {first for _, first in problem.trace.carry} if problem.history else set()
        left = {name: problem.platform.tier(name).capacity for name in chain}
        place = {}
        for weights in experts.values():
            for t in weights:
                size = int(problem.trace.tensor_columns.bytes[t])
                tier = next((name for name in chain if left[name] >= size), chain[0])
                left[tier] -= size
                if t not in carried:
                    place[t] = tier
        return place

    def _wanted(self, problem: Problem, visits: Sequence[Visit]) -> dict[int, Wanted]:
        """Per op at which something may be fetched, the experts to come and those predicted."""
        predicted = self._predicted(problem, visits)
        homes = [problem.platform.home(device).name for device in range(problem.trace.devices)]
        wanted: dict[int, Wanted] = {}
        for k, visit in enumerate(visits):
            names = tuple(name for name, _ in visit.first)
            wanted[visit.routed] = homes[visit.device], names, predicted[k]
            for i, (_, op) in enumerate(visit.first):
                wanted[op] = homes[visit.device], names[i:], predicted[k]
        return wanted

    def _predicted(self, problem: Problem, visits: Sequence[Visit]) -> list[tuple[str, ...]]:
        """Per visit what is expected of the next one of its device; in backward that is known."""
        draw = Random(problem.seed)
        old: dict[int, list[Visit]] = {}  # of each device
        if self.speculate == "previous" and problem.history:
            past = problem.history[-1].trace
            for visit in visits_of(past, experts_of(past, problem.platform)):
                if visit.forward:
                    old.setdefault(visit.device, []).append(visit)
        every: dict[str, set[str]] = {}
        for expert in experts_of(problem.trace, problem.platform):
            every.setdefault(expert.rpartition("expert")[0], set()).add(expert)
        found: list[tuple[str, ...]] = []
        passed: dict[int, int] = {}
        for k, visit in enumerate(visits):
            passed[visit.device] = passed.get(visit.device, 0) + visit.forward
            following = next((v for v in visits[k + 1 :] if v.device == visit.device), None)
            if following is None or self.speculate == "none":
                found.append(())
            elif not following.forward:
                found.append(tuple(name for name, _ in following.first))
            elif self.speculate == "previous":
                before = old.get(visit.device, [])[passed[visit.device] :]
                found.append(tuple(name for name, _ in before[0].first) if before else ())
            else:
                guesses = []
                for name, _ in following.first:
                    others = sorted(every[name.rpartition("expert")[0]] - {name})
                    right = draw.random() < self.accuracy or not others
                    guesses.append(name if right else draw.choice(others))
                found.append(tuple(dict.fromkeys(guesses)))
        return found


def _versions(trace: Trace, weights: Sequence[int]) -> tuple[int, ...]:
    """Tensors that the storages of these hold, one after the other."""
    found = []
    for t in weights:
        while t >= 0:
            found.append(t)
            t = int(trace.replaced_by[t])
    return tuple(found)
