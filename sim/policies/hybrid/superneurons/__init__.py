"""SuperNeurons: keep or offload what compute-intensive layers produce, and recompute what lies between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from sim.declared import OneOf
from sim.errors import PolicyError
from sim.eviction.replacement import movable_results
from sim.eviction.upcoming import upcoming_of
from sim.plan import Action, Move, Plan, Problem, Unpressed
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.superneurons.cache import Stages, TensorCache
from sim.policies.hybrid.superneurons.segments import (
    Segment,
    gains,
    largest_layer,
    memory_centric,
    merged,
    segment_bytes,
    segments_of,
    speed_centric,
)
from sim.solvers.cascade import cascade
from sim.solvers.located import index_of
from sim.solvers.schedule import Reruns, schedule_of
from sim.trace.chain import BACKWARD
from sim.trace.graph import Trace
from sim.trace.index import TraceIndex
from sim.trace.op import KINDS

EXPENSIVE = ("conv", "matmul", "attention")
"""Kinds of op that are never recomputed."""


@dataclass(frozen=True, kw_only=True)
class SuperNeurons(Policy):
    """Recompute cheap layers in segments, cache the results of expensive ones and fetch them one such layer ahead.

    Three parts. Liveness: every tensor is freed after its last reader. Unified tensor pool: what backward needs of a
    compute-intensive layer is fetched from the host during the backward of the next such layer, which comes
    just before. With the tensor cache results leave only under pressure, the least recently used first, and nothing
    moves while memory lasts. Without it, those of compute-intensive layers leave after their last forward reader.
    Cost-aware recomputation: layers between two checkpoints are cheap, and their results are dropped in forward. A
    segment whose results fit, with the working set of its last backward layer, into l_peak, the
    largest working set of any layer, is recomputed at once for its first backward layer (speed-centric: N runs for N
    layers); another one is recomputed from its start for each backward layer, and only what that layer
    reads stays (memory-centric: N(N + 1)/2).

    A checkpoint is an op of an expensive kind (convolution, matrix product, attention), one that joins what
    several checkpoints lead to, and one in place on the result of a checkpoint. So on convolution nets pooling,
    activations and norms are recomputed, as published; on transformers norms, dropout, casts and pointwise ops,
    which the paper does not speak of.
    Source: Wang, Ye, Zhao, Wu, Li, Song, Xu, Kraska, "SuperNeurons: Dynamic GPU Memory Management for Training Deep
        Neural Networks", PPoPP 2018, arXiv:1801.04380; checkpoints, the segments' modes and the cache also as
        in the authors' public code, which moves results under pressure alone.
    Bounds: with links that take no time, without the cache, and with no checkpoint but those offloaded, a device holds
        l_peak, what is fetched ahead, and what is not an activation. Time O(ops²) for segments that are memory-centric.
    Departs: layers are ops. A pool of 1 KB blocks is a setting of a tier (`allocator = "pool"`). Algorithms of
        convolutions are not chosen by the memory that is free. A segment is not recomputed where its checkpoint
        would have to be kept for it alone and is larger than what is dropped, nor one whose backward follows at
        once. An op that cannot be recomputed, runs beside the device or reads what another device produced is a
        checkpoint. What is fetched stays on the host as well, so that it can leave again for nothing. Tensors beyond
        the host's capacity go on to the tier behind it.

    cache: move results out under pressure only; else each of an offloaded kind after its last forward reader.
    recompute: `cost_aware` as above, or `speed` or `memory` for all segments, or `none`.
    heavy: kinds of op whose results are offloaded and fetched ahead; by default `conv` where the trace has any, else
        `matmul` and `attention`. They are not recomputed.
    Raises PolicyError for an unknown choice or kind, or a platform without a host tier.
    """

    online = True
    recomputes = True
    moves = True
    needs = frozenset({"host"})
    fidelity = "equations"
    plans_ahead = "segments, and the order in which results are needed back, are found in the whole trace"
    rarely = "cheap ops between expensive ones are few in random nets, and nothing moves while memory lasts"
    other_values = by_parameter(cache=False, recompute="memory", heavy=("norm",))

    cache: bool = True
    recompute: Literal["cost_aware", "speed", "memory", "none"] = "cost_aware"
    heavy: tuple[Annotated[str, OneOf(KINDS)], ...] = ()

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations, moves, and the tensor cache; notes: `l_peak`, and per mode the segments' ops."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"superneurons: {platform.name} has no host tier to offload to")
        index = index_of(problem)
        present = {KINDS[kind] for kind in set(trace.op_columns.kind.tolist())}
        heavy = self.heavy or (("conv",) if "conv" in present else ("matmul", "attention"))
        segments, checkpoints = segments_of(index, {*heavy, *EXPENSIVE})
        l_peak = largest_layer(index)
        modes = self._modes(index, segments, l_peak)
        ways = {"speed": speed_centric, "memory": memory_centric}
        reruns = merged(ways[mode](index, segment) for mode in ways for segment in modes[mode])
        layers = [op for op in sorted(checkpoints) if KINDS[trace.op_columns.kind[op]] in heavy]
        offloaded = _offloaded(trace, index, reruns, layers)
        online = partial(
            TensorCache,
            upcoming_of(problem),
            stages=_stages(offloaded),
            device=index.device,
            chain=platform.cascade(platform.host.name),
            homes=tuple(platform.home(device).name for device in range(trace.devices)),
            movable=movable_results(trace),
            size=index.size,
        )
        out = () if self.cache else _eager(offloaded, platform.host.name)
        actions = (*schedule_of(index, reruns).actions(), *cascade(trace, platform, out, platform.host.name))
        notes = {"l_peak": l_peak, **{mode: tuple(each.ops for each in found) for mode, found in modes.items()}}
        return Plan(trace, actions, online=online, notes=notes, unpressed=Unpressed())

    def _modes(self, index: TraceIndex, segments: Sequence[Segment], l_peak: int) -> Mapping[str, list[Segment]]:
        """The segments that are recomputed, by how."""
        modes: dict[str, list[Segment]] = {"speed": [], "memory": []}
        for segment in segments if self.recompute != "none" else ():
            if gains(index, segment):
                fits = segment_bytes(index, segment) <= l_peak
                modes[("speed" if fits else "memory") if self.recompute == "cost_aware" else self.recompute].append(
                    segment
                )
        return modes


@dataclass(frozen=True)
class _Offloaded:
    """A result that may be away between its last forward reader and the op of backward that first needs it."""

    tensor: int
    device: int
    left: int
    back: int


def _offloaded(trace: Trace, index: TraceIndex, reruns: Reruns, layers: Iterable[int]) -> list[_Offloaded]:
    """What these layers produced and backward needs, to read it or to recompute something; by need."""
    c, movable, kept = trace.op_columns, movable_results(trace), set(trace.outputs)
    need: dict[int, int] = {}
    for op in range(len(index.reads)):
        for each in (*reruns.get(op, ()), *([op] if index.phase[op] == BACKWARD else [])):
            for tensor in index.reads[each]:
                need.setdefault(tensor, op)
    found = []
    for layer in layers:
        for tensor in index.writes[layer]:
            back = need.get(tensor, -1)
            users = [layer, *(op for op in trace.readers(tensor) if op < back)]
            alone = {index.device[op] for op in (*users, back)} == {index.device[layer]}
            plain = not any(op in c.engine or op in c.group for op in users)
            if back >= 0 and movable[tensor] and tensor not in kept and alone and plain:
                found.append(_Offloaded(tensor, index.device[layer], users[-1], back))
    return sorted(found, key=lambda one: (one.back, one.tensor))


def _stages(offloaded: Sequence[_Offloaded]) -> dict[int, Stages]:
    """Per device what each of its ops in backward is the first to need."""
    stages: dict[int, dict[int, list[int]]] = {}
    for one in offloaded:
        stages.setdefault(one.device, {}).setdefault(one.back, []).append(one.tensor)
    return {device: tuple(found.items()) for device, found in stages.items()}


def _eager(offloaded: Sequence[_Offloaded], host: str) -> list[Action]:
    """The copies out, but for what is needed first in backward or fetched back at once."""
    out: list[Action] = []
    ahead: dict[int, tuple[int, int]] = {}  # per device the stage before, and the one before that
    for one in offloaded:
        now, before = ahead.get(one.device, (-1, -1))
        if one.back != now:
            now, before = ahead[one.device] = one.back, now
        if before > one.left + 1:
            out.append(Move(one.tensor, host, after=one.left))
    return out
