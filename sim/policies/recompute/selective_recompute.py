"""Selective recomputation: recompute only what is large and cheap in a transformer layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import PlansFrom, by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.sharing import shared
from sim.rewrites.rewrite import hold_longer
from sim.solvers.checkpoints import by_anchor, cached_casts, cached_results, held_by, named, region_reruns
from sim.solvers.regions import Region, layer_regions
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace
from sim.trace.op import KINDS
from sim.trace.tensor import ROLE_CODE

CORE = ".attn.core"
WEIGHT = ROLE_CODE["weight"]
EXPENSIVE = ("matmul", "conv", "attention")


@dataclass(frozen=True, kw_only=True)
class SelectiveRecompute(RecomputationPlanner):
    """Keep what is expensive to compute, recompute the rest of a layer before its backward.

    recompute="attention_core": the products with K and V, the softmax and its dropout are recomputed, and the
        matrices of sequence x sequence entries are dropped. Source: Korthikanti et al., "Reducing Activation
        Recomputation in Large Transformer Models", MLSys 2023, arXiv:2205.05198. Bounds: on their model
        the activations of a layer fall from sbh (34 + 5as/h) to 34 sbh bytes, for 4 b s^2 h more FLOPs per
        layer: s/(18h) of an iteration's, where the paper's formula counts s/(6h).
    recompute="all_but_matmul": results of matrix products, convolutions and fused attention stay, everything
        else in a layer is recomputed. Source: PyTorch's `create_selective_checkpoint_contexts` with such a
        list round every layer. As under any checkpoint, the layer's inputs are held until the last of its
        backward nodes that saved something has run. The cache also holds a product that is not read again until
        the layer's backward ends: here it is released with the last backward op that reads a result of the layer.
    recompute="every_second_product": the same with another list: of the products with weights every second one of a
        layer is recomputed, beginning with the second, and so are products with a bias (`addmm`) and of two
        activations (`bmm`); other products, fused attention and reduce-scatters stay. Products in FP8 are `mm` of
        torchao's tensors, too. Source: torchtitan's `selective_ac_option = "op"`
        (torchtitan/parallelisms/parallelize_llama.py, 2024).
    Departs: an op that overwrites a kept result, or one of another layer, is not recomputed (see `full_recompute`); the
        cache then holds what has been written over the product.

    recompute: one of the three.
    early_stop: recompute only as far as backward needs it; None follows each source: the whole core (Megatron), or
        early (PyTorch).
    autocast_cache: copies of weights in a narrower type stay until the forward pass ends, as PyTorch's autocast
        keeps them.
    Raises PolicyError where the trace has no layers or, for "attention_core", no op named
    `….attn.core.…`: fused attention keeps no matrices, so there is nothing to recompute.
    """

    recomputes = True
    rewrites = True
    needs = frozenset({"layers"})
    fidelity = "code"
    rarely = "it rewrites only casts of weights that autocast keeps"
    other_values = by_parameter(recompute="attention_core", early_stop=False, autocast_cache=False)

    recompute: Literal["attention_core", "all_but_matmul", "every_second_product"] = "all_but_matmul"
    early_stop: bool | None = None
    autocast_cache: bool = True

    @property
    def plans_from(self) -> PlansFrom:  # type: ignore[override]
        """What is kept after all depends on times and on the budget."""
        return "problem" if self.remove_unnecessary else "structure"

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations, layer by layer."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        trace = problem.trace
        index = TraceIndex(trace)
        layers = layer_regions(index, "selective_recompute")
        drops: Mapping[int, int] = {}
        handed: Mapping[int, int] = {}
        if self.recompute == "attention_core":
            reruns = region_reruns(index, _cores(index, layers), early_stop=bool(self.early_stop))
        else:
            if self.recompute == "all_but_matmul":
                keep = {op for layer in layers for op in _expensive(trace, layer.forward)}
            else:
                weights = _weights(trace)
                keep = {op for layer in layers for op in _torchtitans(trace, layer.forward, weights)}
            stop = self.early_stop is not False
            reruns = region_reruns(index, layers, early_stop=stop, keep=keep, before="saved")
            held = held_by(index, reruns)
            drops, handed = held.drops, held.handed
            trace = hold_longer(hold_longer(trace, held.until), cached_results(index, layers, keep, reruns))
            index = TraceIndex(trace)
        hold = {**named(index, layers), **drops, **(cached_casts(index, layers) if self.autocast_cache else {})}
        schedule = schedule_of(index, by_anchor(reruns), hold=hold, once_recomputed=handed)
        return Plan(trace, self.finished(problem, schedule).actions())


def _expensive(trace: Trace, layer: Iterable[int]) -> Iterator[int]:
    """The ops of a layer that are expensive to compute."""
    kind = trace.op_columns.kind
    return (op for op in layer if KINDS[kind[op]] in EXPENSIVE)


def _torchtitans(trace: Trace, layer: Iterable[int], weights: set[int]) -> Iterator[int]:
    """Every other product of an activation and a weight alone, the first included; fused attention; reduce-scatters."""
    c, count = trace.op_columns, 0
    for op in layer:
        kind = KINDS[c.kind[op]]
        if kind == "attention" or (kind == "collective" and _scatters(trace, op)):
            yield op
        elif kind == "matmul" and _is_mm(trace, op, weights):
            count += 1
            if count % 2:
                yield op


def _scatters(trace: Trace, op: int) -> bool:
    ring, size = trace.op_columns.ring.get(op), trace.tensor_columns.bytes
    less = sum(int(size[t]) for t in trace.writes(op)) < sum(int(size[t]) for t in trace.reads(op))
    return ring is not None and ring.passes == 1 and less


def _is_mm(trace: Trace, op: int, weights: set[int]) -> bool:
    """Whether it multiplies an activation and a weight, and adds nothing."""
    reads = trace.reads(op)
    return len(reads) == 2 and any(t in weights for t in reads)


def _weights(trace: Trace) -> set[int]:
    """The weights, and the tensors made of weights alone: cast, gathered or dequantised."""
    found = set(np.flatnonzero((trace.producer < 0) & (trace.tensor_columns.role == WEIGHT)).tolist())
    for op, kind in enumerate(trace.op_columns.kind):
        reads = trace.reads(op)
        if reads and KINDS[kind] != "matmul" and found.issuperset(reads):
            found.update(trace.writes(op))
    return found


def _cores(index: TraceIndex, layers: list[Region]) -> list[Region]:
    """The ops of each layer's attention core, one region per run of them."""
    names = index.trace.op_columns.name
    found, fused = [], ""
    for layer in layers:
        undoing = {op for op in layer.backward if CORE + "." in names[op]} or layer.backward
        for is_core, group in groupby(layer.forward, key=lambda op: CORE + "." in names[op]):
            if is_core:
                found.append(Region(tuple(group), undoing))
        fused = fused or next((names[op] for op in layer.forward if names[op].endswith(CORE)), "")
    if not found:
        why = f"{fused!r} is fused and keeps no matrices" if fused else f"no op is named '…{CORE}.…'"
        raise PolicyError(f"policy 'selective_recompute' finds no attention core to recompute: {why}")
    return found
