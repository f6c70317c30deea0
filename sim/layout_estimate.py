"""How long a layout takes and what its fullest device holds, roughly, without dividing the trace.

The ops' times on one device are divided among replicas, ranks and microbatches (a launch is not), the parts of the
model by `parts_of`, and the units of a schedule are put one after the other in its own order: so bubbles, stages of
unequal times, and microbatches in flight are those of the schedule. Bytes of collectives go at the links' rates, beside
nothing. What stands here orders layouts; it proves nothing about any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from sim.errors import LayoutError
from sim.floors import largest_op
from sim.hardware.cost import op_times
from sim.hardware.nodes import ring_rates
from sim.hardware.platform import Platform
from sim.layout import Layout, part_of_layer, with_layers
from sim.rewrites.dimensions import dimensions
from sim.rewrites.experts import experts_of
from sim.rewrites.experts_in_turn import weights_in_turn
from sim.rewrites.pipeline import parts_of, weight_gradients
from sim.rewrites.schedules import DIVIDED, FOLDED, device_of, unit_orders
from sim.stage_balance import costs_by_share
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.layers import op_layers
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE

Times = NDArray[np.float64]
PHASES = ("forward", "backward", "weight", "update")
STATE, LEVEL_OF = ("optimizer_state", "gradient", "weight"), (1, 2, 3)
"""Kinds of training state, and from which level on ZeRO divides each."""
ROUNDS = 4
"""Microbatches per stage after which each further one takes as long as the slowest device."""
SURE = 0.85
"""The part of a capacity below which an estimate of memory is taken to fit it."""
AGAIN = 4 / 3
"""Times of an iteration that runs forward once more."""


@dataclass(frozen=True)
class Estimate:
    """Nanoseconds of an iteration; bytes of the fullest device.

    state_bytes: of the training state.
    recomputed_bytes: with what passes from layer to layer, all that the largest layer saves, and the largest op.
    kept_bytes: with all activations.
    """

    time_ns: float
    state_bytes: int
    recomputed_bytes: int
    kept_bytes: int

    def rank(self, capacity: int) -> tuple[int, float]:
        """What layouts are ordered by: those that keep everything, or recompute, in a capacity come first, then those
        that have to copy activations."""
        if self.kept_bytes <= capacity:
            return 0, self.time_ns
        return (self.recomputed_bytes > capacity) + (self.state_bytes > capacity), AGAIN * self.time_ns

    def spare(self, capacity: int) -> tuple[float, float]:
        """What layouts are ordered by where memory is what matters: those that surely keep everything come first."""
        return max(self.kept_bytes, SURE * capacity), self.time_ns


class Estimator:
    """Estimates of many layouts of one trace on one node's devices."""

    def __init__(self, trace: Trace, node: Platform) -> None:
        self.trace, self.node = trace, node
        self.total = op_times(trace, node).total.astype(float)
        launch = node.engines[node.engine_for(0, "")].launch
        self.fixed = np.minimum(float(launch), self.total)
        self.later = weight_gradients(trace)
        self.parts: dict[tuple[object, int, bool], tuple[Times, ...]] = {}
        self.layers: dict[bool, tuple[Times, ...]] = {}
        self.sizes: dict[tuple[object, ...], tuple[int, ...] | str] = {}
        self.costs = cache(costs_by_share(trace, node))
        self.family = dimensions(trace).family
        self.experts = experts_of(trace).keys() | weights_in_turn(trace)
        self.largest_op = largest_op(trace, node)[1]
        self.in_update = _most_in_update(trace)
        self.rings = cache(partial(ring_rates, node))

    def of(self, layout: Layout) -> Estimate:
        """The estimate of a layout."""
        layout = self.resolved(layout)
        fixed, shared, saved, passed, state, of_experts = self._by_part(layout)
        ranks, n = layout.tp * layout.cp * layout.dp, layout.micro_batches
        unit = fixed + shared / (ranks * n)  # (parts, phases)
        update, own = PHASES.index("update"), of_experts.sum(axis=1) / np.maximum(state.sum(axis=1), 1)
        shards = layout.dp * layout.cp
        apart = 1 / shards if layout.zero else 1 - own + own / layout.ep
        unit[:, update] = fixed[:, update] + apart * shared[:, update] / layout.tp
        time, most = _scheduled(layout, unit, np.stack([saved, passed], axis=1) / (ranks * n))
        largest = (float(self._by_layer(layout.schedule in DIVIDED)[2].max()) + self.largest_op) / (ranks * n)
        device = [device_of(q, layout.pp, layout.schedule) for q in range(layout.parts)]
        kept, updated = np.zeros(layout.pp), np.zeros(layout.pp)
        divided = [layout.zero >= level for level in LEVEL_OF]
        dense = (state - of_experts) / np.where(divided, shards, 1)
        held = (dense + of_experts / np.where(divided, shards, layout.ep)) / layout.tp  # (parts, kinds of state)
        np.add.at(kept, device, held.sum(axis=1))
        np.add.at(updated, device, held[:, 0])
        most = np.maximum(most, (self.in_update / max(state[:, 0].sum(), 1) * updated)[:, None])
        everything, recomputed = (int(each) for each in (kept[:, None] + most).max(axis=0))
        recomputed = min(everything, recomputed + int(largest))
        return Estimate(time + self._exchanged(layout), int(kept.max()), recomputed, everything)

    def resolved(self, layout: Layout) -> Layout:
        """The layout with the numbers of layers that its parts get, where it says only how they are chosen."""
        if not isinstance(layout.layers, str) or layout.pp == 1:
            return layout
        place = layout.pp, layout.parts, layout.schedule in FOLDED
        key = layout.layers, place, layout.dp, layout.tp * layout.cp, layout.micro_batches
        if key not in self.sizes:
            self.sizes[key] = with_layers(self.trace, self.node, layout, self.costs).layers
        return replace(layout, layers=self.sizes[key])

    def _by_part(self, layout: Layout) -> tuple[Times, ...]:
        """Per part and phase fixed and shared times of the whole batch; per part bytes saved, and bytes passed on to
        other layers; per part and kind of `STATE` its bytes, and of these those of experts."""
        key = layout.layers, layout.parts, layout.schedule in DIVIDED
        if key not in self.parts:
            table = list(part_of_layer(self.trace, layout).values()) or [0]
            by_layer = self._by_layer(layout.schedule in DIVIDED)
            self.parts[key] = tuple(np.zeros((layout.parts, *each.shape[1:])) for each in by_layer)
            for total, each in zip(self.parts[key], by_layer, strict=True):
                np.add.at(total, table, each)
        return self.parts[key]

    def _by_layer(self, divided: bool) -> tuple[Times, ...]:
        """As `_by_part`, per layer. divided: whether gradients of weights are a phase of their own."""
        if divided not in self.layers:
            trace, c = self.trace, self.trace.op_columns
            names = sorted({layer for layer in op_layers(trace).tolist() if layer >= 0})
            layer = np.array(parts_of(trace, {name: i for i, name in enumerate(names)}))
            phase = np.select(
                [c.phase == PHASE_CODE["forward"], c.phase == PHASE_CODE["update"]], [0, PHASES.index("update")], 1
            )
            if divided:
                phase[list(self.later)] = PHASES.index("weight")
            fixed, shared = (np.zeros((max(len(names), 1), len(PHASES))) for _ in range(2))
            np.add.at(fixed, (layer, phase), self.fixed)
            np.add.at(shared, (layer, phase), self.total - self.fixed)
            self.layers[divided] = fixed, shared, *self._bytes(layer, len(fixed))
        return self.layers[divided]

    def _bytes(self, layer: NDArray[np.int64], layers: int) -> tuple[Times, ...]:
        """Per layer what backward reads of forward, and what forward passes on to other layers; per layer and kind of
        `STATE` its bytes, and those of experts."""
        trace, columns, phase = self.trace, self.trace.tensor_columns, self.trace.op_columns.phase
        kind = {ROLE_CODE[role]: k for k, role in enumerate(STATE)}
        saved, passed = np.zeros(layers), np.zeros(layers)
        state, of_experts = np.zeros((layers, len(STATE))), np.zeros((layers, len(STATE)))
        for t, (size, role) in enumerate(zip(columns.bytes.tolist(), columns.role.tolist(), strict=True)):
            made, readers = int(trace.producer[t]), trace.readers(t)
            if made < 0 and role in PERSISTENT and len(readers):
                where = layer[readers[0]], kind.get(role, 0)
                state[where] += size
                of_experts[where] += size * (self.family[t] in self.experts)
            elif role == ROLE_CODE["gradient"] and any(phase[op] == PHASE_CODE["update"] for op in readers):
                where = layer[made], kind[role]
                state[where] += size
                of_experts[where] += size * (self.family[t] in self.experts)
            elif made < 0 or phase[made] != PHASE_CODE["forward"] or columns.replaces[t] >= 0:
                continue
            if any(phase[op] == PHASE_CODE["backward"] for op in readers):
                saved[layer[made]] += size
            if any(phase[op] == PHASE_CODE["forward"] and layer[op] != layer[made] for op in readers):
                passed[layer[made]] += size
        return saved, passed, state, of_experts

    def _exchanged(self, layout: Layout) -> float:
        """Nanoseconds of collectives: of tensor or context parallelism in each layer, and of gradients and weights.

        Each goes over the links and networks that its ranks really cross, at the rate that their ring has there.
        """
        if layout.dp * layout.tp * layout.cp == 1:
            return 0.0
        try:
            ring = self.rings(layout.pp, layout.dp, layout.tp, layout.ep, layout.cp)
        except LayoutError:  # there is no link
            return float("inf")
        trace, n = self.trace, layout.micro_batches
        initial = (trace.producer < 0) & (trace.tensor_columns.role == ROLE_CODE["weight"])
        size, which = trace.tensor_columns.bytes, np.flatnonzero(initial).tolist()
        experts = sum(int(size[t]) for t in which if self.family[t] in self.experts)
        weights = int(size[initial].sum()) - experts
        tokens, layers = int(trace.meta.get("tokens", 1)) / layout.dp, max(int(trace.meta.get("layers", 1)), 1)
        width = float(weights / (24 * layers)) ** 0.5  # 12 h^2 weights of 2 bytes per layer
        seconds, fixed = 0.0, 0.0
        for axis, ranks, others in (("tensor", layout.tp, layout.cp), ("context", layout.cp, layout.tp)):
            if ranks > 1:
                sent = 8 * (ranks - 1) / ranks * tokens / others * 2 * width * layers / layout.pp
                seconds += sent / ring[axis][0]
                fixed += 8 * layers / layout.pp * n * ring[axis][1]
        passes = 3 * n if layout.zero == 3 else n + 1 if layout.zero == 2 else 2
        with_tokens = "_context" if layout.cp > 1 else ""
        summed = [(f"data{with_tokens}", layout.dp * layout.cp, float(weights))]
        own = f"expert_data{with_tokens}" if layout.ep > 1 else f"data{with_tokens}"
        summed.append((own, layout.dp * layout.cp // layout.ep, experts / layout.ep))
        for axis, same, held in summed:
            if same > 1:
                seconds += passes * (same - 1) / same * held / (layout.tp * layout.pp) / ring[axis][0]
        if layout.ep > 1:
            rows = self._routed() / (layout.dp * layout.cp * layout.pp)
            seconds += 4 * (layout.ep - 1) / layout.ep * rows / ring["expert"][0]
        return 1e9 * seconds + fixed

    def _routed(self) -> float:
        """Bytes of the rows of all layers that go to experts, each way."""
        trace, total = self.trace, 0.0
        for layers in (trace.meta.get("expert_loads") or ())[:1]:
            widths = [trace.tensor_columns.shape[trace.tensor_id(name)][-1] for name in self.experts if "gate" in name]
            total = sum(map(sum, layers.values())) * 2.0 * max(widths, default=0)
        return total


def _most_in_update(trace: Trace) -> int:
    """The most bytes that results of the optimizer's ops take at once, beside the state that they replace."""
    c, made, phase = trace.tensor_columns, trace.producer, trace.op_columns.phase
    own = (made >= 0) & (phase[made] == PHASE_CODE["update"]) & (c.replaces < 0)
    change = np.zeros(len(phase) + 1, np.int64)
    np.add.at(change, made[own], c.bytes[own])
    np.subtract.at(change, trace.last_use[own] + 1, c.bytes[own])
    return int(np.cumsum(change).max())


def _scheduled(layout: Layout, unit: Times, held: Times) -> tuple[float, Times]:
    """When the last unit ends, in ns, and per device the most bytes of each kind that activations take.

    unit: nanoseconds per part and phase, of a microbatch (of an update once).
    held: bytes of each kind per part and microbatch, from its forward to the end of its backward.
    """
    stages, n = layout.pp, layout.micro_batches
    few = n if layout.schedule in ("gpipe", "naive") else min(n, -(-max(ROUNDS * stages, 2) // stages) * stages)
    orders = unit_orders(layout.schedule, stages, layout.chunks, few)
    last, divided = layout.parts - 1, layout.schedule in DIVIDED
    ended: dict[tuple[int, str, int], float] = {}
    clock, at = np.zeros(stages), [0] * stages
    in_flight, most = np.zeros((stages, held.shape[1])), np.zeros((stages, held.shape[1]))
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s, order in enumerate(orders):
            while at[s] < len(order):
                q, phase, k = order[at[s]]
                needs = {"forward": (q - 1, phase, k), "backward": (q + 1, phase, k), "weight": (q, "backward", k)}
                need = needs.get(phase)
                if phase == "backward" and q == last:
                    need = (q, "forward", k)
                if need and need[0] >= 0 and need not in ended:
                    break
                begin = max(clock[s], ended.get(need, 0.0) if need else 0.0)
                clock[s] = ended[q, phase, k] = begin + unit[q, PHASES.index(phase)]
                if phase == "forward":
                    in_flight[s] += held[q]
                    most[s] = np.maximum(most[s], in_flight[s])
                elif phase == ("weight" if divided else "backward"):
                    in_flight[s] -= held[q]
                at[s] += 1
    device = [device_of(q, stages, layout.schedule) for q in range(layout.parts)]
    each = np.zeros(stages)
    np.add.at(each, device, unit[:, :3].sum(axis=1))
    return float(clock.max() + (n - few) * each.max()), most


__all__ = ["Estimate", "Estimator"]
