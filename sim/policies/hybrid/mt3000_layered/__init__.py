"""The layered scheme that a survey proposes for MT-3000: six parts, each with a switch of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Lt

from sim.errors import Infeasible, PolicyError
from sim.eviction.director import Reload, surroundings_of
from sim.eviction.evictable import lineage_of
from sim.eviction.evictor import Rules
from sim.eviction.unpressed import frees_the_dead, watermark_of
from sim.plan import Online, Plan, Problem, Unpressed
from sim.policies.base import MANAGED_AS, MANAGES, Beside, Policy, by_parameter
from sim.policies.hybrid.mt3000_layered.codecs import encoded
from sim.policies.hybrid.mt3000_layered.engines import mapped
from sim.policies.hybrid.mt3000_layered.layers import Layered, Switches
from sim.policies.hybrid.mt3000_layered.zones import borders_of, intense_results
from sim.policies.recompute.tso import Tso
from sim.rewrites.values import approximate
from sim.trace.graph import Trace


@dataclass(frozen=True, kw_only=True)
class Mt3000Layered(Policy):
    """Activations in the acceleration zone, under pressure to DDR or recomputed, between checkpoints that stay.

    Each part has a switch. Tiering: results are produced in the zone; under pressure one is moved to DDR, and a miss
    brings it back. Checkpoints: the outputs of residency groups, maximal runs of stages whose working set fits the
    zone, leave last; results of compute-intensive ops never cross to DDR, but are dropped and recomputed in the zone.
    Mapping: each kind of op runs on the engine, and so in the zone, for which the platform's instruction mapping table
    gives the least time, copies of operands included; recompute costs are looked up there. Release: what leaves is the
    candidate of least (time to recompute) / (bytes * time since its last use), and DELTA's director drops it where that
    costs less than a copy out and back. Streams: copies run beside the ops, out ahead of need and back ahead of reads.
    Codec: what crosses is encoded in half the bytes before and decoded after. Mode: `delta` reloads in backward while
    other results are recomputed; `tso` never uses the link: segments of the chain are kept or recomputed as the dynamic
    program of the policy `tso` chooses.

    Source: Li, Tang, Qiao, Lyu, a survey of memory optimisation for large-model training on domestic platforms, 2026,
        section 6.5, which sketches the scheme and measures nothing.
    Bounds: where everything fits nothing leaves the zone, but what ops of another zone read and write. A choice takes
        vector operations over the candidates. In mode `tso` no byte crosses between the zones.
    Departs: a reconstruction, since the survey names the parts and not how they meet. Only results that can be
        recomputed leave the zone. A switch that is off leaves what the others do: without tiering, or in mode `tso`,
        results are dropped; without checkpoints, release and mode `tso` nothing is dropped; without release the order
        is that of tiering, and the link is preferred. Where the trace is not a chain on one device there are no
        borders. A border is evicted when nothing else is left. "High compute intensity" is read as arithmetic that
        takes longer than the bytes touched. The mapping table is data of the profile: peaks may follow from cores,
        vectors and units, efficiencies are given; of MT-3000 no kind is known that a zone lacks. The knapsack is chosen
        from greedily, as in `delta`. Mode `tso` chooses between keeping and recomputing alone, captured graphs are left
        to the policy `tso`, and what it plans the other switches but mapping do not change; where no segments fit, or
        the trace is not a chain, it drops under pressure. The codec is for activations, of which the survey's gradients
        that are decoded "before recompute in backward" are read to speak; it is off by default, for it changes values.
        A tensor is encoded where a trial run without codec offloads it, even if this run then keeps the code in the
        zone; scales of blocks take no bytes. Recomputation shares the stream of the ops, as the engine has one for each
        device.

    tiering: what is offloaded first, `lru`, or `frequency` for the least recently used of those read fewer than `hits`
        times, then the rest; `none` for nothing.
    hits: reads from which a tensor counts as frequently used.
    checkpoints: keep borders, and compute-intensive results out of DDR.
    intensity: FLOPs per byte touched above which an op is compute-intensive; None for the balance of its engine.
    mapping: choose the engine of each kind of op by the mapping table, for ops on `activations` alone, or for `all`:
        then weights, gradients and states cross with their ops (`manages`); `none` runs ops where the trace has them.
    release: choose by recompute cost, bytes and staleness, then between DDR and recomputation.
    streams: copies beside the ops; without, the device waits for each copy.
    watermark: with streams, share of the zone that is kept free by copying out ahead of need.
    codec: `half` encodes what crosses in the type of half the width (fp32 as fp16, 16 bits as 8) until its first use in
        backward. Lossy: the values that backward reads are approximate (`lossless` is False).
    mode: `delta`, `tso` or `none`: neither reloads ahead nor a ban on the link.
    prefetch: in mode `delta`, how many tensors are looked at before an op of the backward, youngest first.
    Notes: `engines`, by kind of op where it runs if not on the main engine; `groups` (first stage, last stage) and
        `borders`, names of the checkpoints, or in mode `tso` its `segments`; `approximate`, names of the tensors that
        backward reads decoded.
    Raises PolicyError for an unknown choice, `hits` below 1, a negative `intensity` or `prefetch`, or a watermark that
        is not a share below 1; ProfileError where an op would run on an engine that lacks its kind.
    """

    online = True
    recomputes = True
    moves = True
    rewrites = True
    fidelity = "reconstruction"
    rarely = "it moves only what is more expensive to recompute, and rewrites only for another engine or a codec"
    other_values = by_parameter(
        tiering="none",
        hits=Beside(9, tiering="frequency"),
        checkpoints=False,
        mapping="none",
        intensity=1e9,
        release=False,
        streams=False,
        watermark=0.3,
        codec="half",
        mode="tso",
        prefetch=1,
    )

    tiering: Literal["lru", "frequency", "none"] = "lru"
    hits: Annotated[int, Ge(1)] = 2
    checkpoints: bool = True
    intensity: Annotated[float, Ge(0)] | None = None
    mapping: Literal["activations", "all", "none"] = "activations"
    release: bool = True
    streams: bool = True
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.1
    codec: Literal["none", "half"] = "none"
    mode: Literal["delta", "tso", "none"] = "delta"
    prefetch: Annotated[int, Ge(0)] = 5

    def __post_init__(self) -> None:
        if (
            self.checkpoints or self.mapping != "none" or self.mode == "tso" or self.codec != "none"
        ):  # a trait by parameters
            what = "checkpoints, engines of kinds of op, and what is encoded, are found in the whole trace"
            object.__setattr__(self, "plans_ahead", what)
        if self.codec != "none":
            object.__setattr__(self, "lossless", False)
        if self.mapping == "all":
            object.__setattr__(self, "manages", MANAGES)

    def plan(self, problem: Problem) -> Plan:
        """The trace as mapped and encoded, with an online part that drops and moves; in mode `tso` drops and reruns."""
        problem, engines = self._mapped(problem)
        if self.mode == "tso" and (segments := _segments(problem)):
            notes = {**segments.notes, "engines": engines}
            return replace(segments, trace=problem.trace, online=Online, notes=notes, unpressed=Unpressed())
        groups, borders = borders_of(problem) if self.checkpoints else ([], [])
        names = problem.trace.tensor_columns.name
        notes = {"engines": engines, "groups": tuple(groups), "borders": tuple(names[t] for t in borders)}
        plan, host = self._online(problem, notes), problem.platform.host
        if self.codec == "none" or host is None:
            return plan
        trace = encoded(problem, plan, host.name)
        if trace is problem.trace:
            return plan
        return self._online(_over(problem, trace), {**notes, "approximate": approximate(trace)})

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """Ops on the engines of the mapping table, which may run beside each other."""
        problem, engines = self._mapped(problem)
        return {"engines by the mapping table": Plan(problem.trace)} if engines else {}

    def _mapped(self, problem: Problem) -> tuple[Problem, Mapping[str, str]]:
        """The problem with the trace's ops where the table sends them, and which kinds those are."""
        if self.mapping == "none":
            return problem, {}
        roles = [role for role, managed in MANAGED_AS.items() if managed in self.manages]
        trace, engines = mapped(problem, roles=roles, crossing=self.mode != "tso")
        return (_over(problem, trace), engines) if engines else (problem, {})

    def _online(self, problem: Problem, notes: Mapping[str, Any]) -> Plan:
        """The trace as it is, with the online part. notes: the plan's, with the `borders`."""
        stays = intense_results(problem, self.intensity) if self.checkpoints else np.zeros(len(problem.trace.tensors))
        order = ("local", "last") if self.release else ("lru", "first")
        offloads = self.tiering != "none" and self.mode != "tso"
        online = partial(
            Layered,
            lineage_of(problem),
            Rules(heuristic=order[0], ties=order[1], reload_is_access=True),
            surroundings_of(problem, watermark=self.watermark if self.streams else 0.0, offloads=offloads),
            Reload("lifo" if self.mode == "delta" else "none", self.prefetch),
            switches=Switches(
                drops=self.checkpoints or self.release or self.mode == "tso",
                directs=self.release,
                hits=self.hits if self.tiering == "frequency" else 0,
                streams=self.streams,
                stays=stays.astype(bool).tolist(),
                borders=[problem.trace.tensor_id(name) for name in notes["borders"]],
            ),
        )
        headroom = watermark_of(problem, self.watermark if self.streams else 0.0)
        unpressed = frees_the_dead(problem.trace, headroom)
        return Plan(problem.trace, online=online, keep_dead=True, notes=notes, unpressed=unpressed)


def _over(problem: Problem, trace: Trace) -> Problem:
    """The same problem for a trace rewritten from its own."""
    return replace(problem, trace=trace, cost=problem.cost.over(trace, problem.platform))


def _segments(problem: Problem) -> Plan | None:
    """Segments of the chain, kept or recomputed; None where there are none that fit."""
    try:
        return Tso(modes=("eager", "checkpoint")).plan(problem)
    except (PolicyError, Infeasible):
        return None
