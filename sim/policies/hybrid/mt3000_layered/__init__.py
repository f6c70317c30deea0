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
from sim.plan import Online, Plan, Problem
from sim.policies.base import Beside, Policy, by_parameter
from sim.policies.hybrid.mt3000_layered.codecs import encoded
from sim.policies.hybrid.mt3000_layered.layers import Layered, Switches
from sim.policies.hybrid.mt3000_layered.zones import borders_of, intense_results
from sim.policies.recompute.tso import Tso
from sim.rewrites.values import approximate


@dataclass(frozen=True, kw_only=True)
class Mt3000Layered(Policy):
    """Activations in the acceleration zone, under pressure to DDR or recomputed, between checkpoints that stay.

    Each part has a switch. Tiering: results are produced in the zone; under pressure one is moved to DDR, and a miss
    brings it back. Checkpoints: the outputs of residency groups, maximal runs of stages whose working set fits the
    zone, leave last; results of compute-intensive ops never cross to DDR, but are dropped and recomputed in the
    zone. Release: what leaves is the candidate of least (time to recompute) / (bytes * time since its last use), and
    DELTA's director drops it where that costs less than a copy out and back. Streams: copies run beside the ops, out
    ahead of need and back ahead of reads. Codec: what crosses is encoded in half the bytes before and decoded after.
    Mode: `delta` reloads in backward while other results are recomputed;
    `tso` never uses the link: segments of the chain are kept or recomputed as the dynamic program of the policy
    `tso` chooses.

    Source: Li, Tang, Qiao, Lyu, a survey of memory optimisation for large-model training on domestic platforms, 2026,
        section 6.5, which sketches the scheme and measures nothing.
    Bounds: nothing leaves where everything fits. A choice takes vector operations over the candidates. In mode `tso`
        no byte crosses between the zones.
    Departs: a reconstruction, since the survey names the parts and not how they meet. Only results that can be
        recomputed leave the zone. A switch that is off leaves what the others do: without tiering, or in mode `tso`,
        results are dropped; without checkpoints, release and mode `tso` nothing is dropped; without release the order
        is that of tiering, and the link is preferred. Where the trace is not a chain on one device there are no
        borders. A border is evicted when nothing else is left. "High compute intensity" is read as arithmetic that
        takes longer than the bytes touched. The knapsack is chosen from greedily, as in `delta`. Mode `tso` chooses
        between keeping and recomputing alone, captured graphs are left to the policy `tso`, and what it plans
        the other switches do not change; where no segments fit, or the trace is not a chain, it drops under pressure.
        The codec is for activations, of which the survey's gradients that are decoded "before recompute in
        backward" are read to speak; it is off by default, for it changes values. A tensor is encoded where a trial run
        without codec offloads it, even if this run then keeps the code in the zone; scales of blocks take no bytes.
        Recomputation shares the stream of the ops, as the engine has one for each device.

    tiering: what is offloaded first, `lru`, or `frequency` for the least recently used of those read fewer than
        `hits` times, then the rest; `none` for nothing.
    hits: reads from which a tensor counts as frequently used.
    checkpoints: keep borders, and compute-intensive results out of DDR.
    intensity: FLOPs per byte touched above which an op is compute-intensive; None for the balance of its engine.
    release: choose by recompute cost, bytes and staleness, then between DDR and recomputation.
    streams: copies beside the ops; without, the device waits for each copy.
    watermark: with streams, share of the zone that is kept free by copying out ahead of need.
    codec: `half` encodes what crosses in the type of half the width (fp32 as fp16, 16 bits as 8) until its first use in
        backward. Lossy: the values that backward reads are approximate (`lossless` is False).
    mode: `delta`, `tso` or `none`: neither reloads ahead nor a ban on the link.
    prefetch: in mode `delta`, how many tensors are looked at before an op of the backward, youngest first.
    Notes: `groups` (first stage, last stage) and `borders`, names of the checkpoints, or in mode `tso` its `segments`;
        `approximate`, names of the tensors that backward reads decoded.
    Raises PolicyError for an unknown choice, `hits` below 1, a negative `intensity` or `prefetch`, or a watermark that
        is not a share below 1.
    """

    online = True
    recomputes = True
    moves = True
    rewrites = True
    fidelity = "reconstruction"
    rarely = "it moves only what is more expensive to recompute than to copy, and rewrites the trace for a codec alone"
    other_values = by_parameter(
        tiering="none",
        hits=Beside(9, tiering="frequency"),
        checkpoints=False,
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
    release: bool = True
    streams: bool = True
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.1
    codec: Literal["none", "half"] = "none"
    mode: Literal["delta", "tso", "none"] = "delta"
    prefetch: Annotated[int, Ge(0)] = 5

    def __post_init__(self) -> None:
        if self.checkpoints or self.mode == "tso" or self.codec != "none":  # traits that parameters decide
            object.__setattr__(self, "plans_ahead", "checkpoints, and what is encoded, are found in the whole trace")
        if self.codec != "none":
            object.__setattr__(self, "lossless", False)

    def plan(self, problem: Problem) -> Plan:
        """The trace, encoded or not, with an online part that drops and moves; in mode `tso` drops and reruns."""
        if self.mode == "tso" and (segments := _segments(problem)):
            return replace(segments, trace=problem.trace, online=Online)  # nothing is left to decide during the run
        groups, borders = borders_of(problem) if self.checkpoints else ([], [])
        names = problem.trace.tensor_columns.name
        notes = {"groups": tuple(groups), "borders": tuple(names[t] for t in borders)}
        plan, host = self._online(problem, notes), problem.platform.host
        if self.codec == "none" or host is None:
            return plan
        trace = encoded(problem, plan, host.name)
        if trace is problem.trace:
            return plan
        cost = problem.cost.over(trace, problem.platform)
        return self._online(replace(problem, trace=trace, cost=cost), {**notes, "approximate": approximate(trace)})

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
        return Plan(problem.trace, online=online, keep_dead=True, notes=notes)


def _segments(problem: Problem) -> Plan | None:
    """Segments of the chain, kept or recomputed; None where there are none that fit."""
    try:
        return Tso(modes=("eager", "checkpoint")).plan(problem)
    except (PolicyError, Infeasible):
        return None
