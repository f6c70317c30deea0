"""Which layout and which memory policy together: all layouts of so many devices, the least promising left out.

    found = search_layouts(trace, "a100_80_sxm", 16, ["keep_all", "full_recompute"])
    print(found.best, found.runner_up)

`layouts` lists those that are valid: tensor parallelism inside a node, with sequence parallelism; stages that divide
the layers; replicas that divide the samples; ZeRO; microbatches. Two things spare a simulation. The least that a device
must hold, its part of the training state, proves that a layout cannot fit. An estimate of time (arithmetic, bubble,
bytes of collectives) orders the rest, of which `most` are simulated: what is left out there is not proven slower, and
the answer says how many those are. Whatever it names has been simulated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from sim.errors import LayoutError, TiersimError
from sim.experiment import simulate
from sim.hardware.cost import op_times
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.layout import Layout, divisible, lay_out
from sim.rewrites.dimensions import TENSOR, dimensions
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.layers import op_layers
from sim.trace.tensor import ROLE_CODE

POLICIES = ("keep_all", "selective_recompute", "full_recompute")
MOST = 12


@dataclass(frozen=True)
class Found:
    """A layout and a policy, simulated. `makespan_ns` is None where it does not fit, and `why` says so."""

    layout: Layout
    policy: str
    makespan_ns: int | None
    peak_bytes: int
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**self.said(), "policy": self.policy, "makespan_ns": self.makespan_ns, "peak_bytes": self.peak_bytes}

    def said(self) -> dict[str, Any]:
        """The keys of the layout that are not their defaults."""
        plain = Layout()
        values = {field.name: getattr(self.layout, field.name) for field in fields(Layout)}
        return {key: value for key, value in values.items() if value != getattr(plain, key)}

    def __str__(self) -> str:
        layout = ", ".join(f"{key} {value}" for key, value in self.said().items()) or "one device"
        time = self.why if self.makespan_ns is None else f"{self.makespan_ns / 1e6:,.2f} ms"
        return f"{layout}; {self.policy}: {time}, {self.peak_bytes / 1e9:.2f} GB"


@dataclass(frozen=True)
class LayoutSearch:
    """What a search found.

    rows: all that was simulated, in the order of the search.
    cannot_fit: layouts whose part of the training state alone is more than a device has.
    left_out: layouts that were not simulated, since more than `most` came before them in the estimate.
    """

    rows: tuple[Found, ...]
    cannot_fit: int
    left_out: int

    @property
    def fitting(self) -> list[Found]:
        """What fits, the fastest first; of equal times the one with less memory."""
        fits = [row for row in self.rows if row.makespan_ns is not None]
        return sorted(fits, key=lambda row: (row.makespan_ns, row.peak_bytes))

    @property
    def best(self) -> Found | None:
        """The fastest that fits."""
        return next(iter(self.fitting), None)

    @property
    def runner_up(self) -> Found | None:
        """The fastest with another layout than the best."""
        return next((row for row in self.fitting if self.best and row.layout != self.best.layout), None)

    @property
    def front(self) -> list[Found]:
        """Those that no other beats in both time and memory, the fastest first."""
        front: list[Found] = []
        for row in self.fitting:
            if not front or row.peak_bytes < front[-1].peak_bytes:
                front.append(row)
        return front


def search_layouts(
    trace: Trace,
    profile: str | os.PathLike[str],
    devices: int,
    policies: Sequence[str] = POLICIES,
    *,
    budget: int | str | None = None,
    most: int = MOST,
    overrides: dict[str, str] | None = None,
    kernels: Callable[[Trace], Trace] | None = None,
    on_row: Callable[[Found], None] = lambda row: None,
) -> LayoutSearch:
    """The layouts of so many devices with each policy, simulated: the most promising ones.

    trace: an iteration on one device, of the whole global batch.
    devices: how many are used, all of them.
    policies: policies or compositions, by name.
    budget: of each device; None for its capacity.
    most: how many layouts are simulated.
    overrides, kernels: as for `lay_out`.
    on_row: called with each row as it is found.

    Raises LayoutError where no layout has so many devices.
    """
    node = load_profile(profile, overrides=overrides)
    per_node = _per_node(node, devices)
    if node.devices < 2 <= devices:
        node = load_profile(profile, overrides={**(overrides or {}), "devices": str(min(devices, per_node))})
    candidates = list(layouts(trace, devices, per_node))
    if not candidates:
        raise LayoutError(
            f"devices: no layout of this trace takes {devices}; nearest: {_nearest(trace, devices, node)}"
        )
    capacity = node.home(0).capacity if budget is None else _bytes(budget)
    fit = [each for each in candidates if least_state(trace, each) <= capacity]
    ordered = sorted(fit, key=partial(estimate, trace, node)) if devices > 1 else fit
    rows: list[Found] = []
    for layout in ordered[:most]:
        try:
            divided, platform = lay_out(trace, profile, layout, overrides=overrides, kernels=kernels)
        except TiersimError as error:
            rows.append(Found(layout, "", None, 0, str(error)))
            continue
        for policy in policies:
            rows.append(_row(layout, policy, divided, platform, budget))
            on_row(rows[-1])
    return LayoutSearch(tuple(rows), len(candidates) - len(fit), max(len(ordered) - most, 0))


def _row(layout: Layout, policy: str, trace: Trace, platform: Platform, budget: int | str | None) -> Found:
    try:
        summary = simulate(trace, platform, policy, budget=budget).summary()
    except TiersimError as error:
        return Found(layout, policy, None, 0, str(error).partition("\n")[0])
    homes = {platform.home(device).name for device in range(trace.devices)}
    peak = max(size for tier, size in summary["peak_by_tier"].items() if tier in homes)
    return Found(layout, policy, summary["makespan_ns"], peak)


def _bytes(budget: int | str) -> int:
    from sim.units import parse_bytes

    return budget if isinstance(budget, int) else parse_bytes(budget)


def _per_node(node: Platform, devices: int) -> int:
    return max(node.networks[0].per_node if node.networks else devices, node.devices)


def _nearest(trace: Trace, devices: int, node: Platform) -> int:
    near = sorted(range(1, 2 * devices), key=lambda n: (abs(n - devices), n))
    return next((n for n in near if n != devices and any(layouts(trace, n, _per_node(node, n)))), 1)


def layouts(trace: Trace, devices: int, per_node: int) -> Iterator[Layout]:
    """The layouts that take exactly so many devices and divide the trace without a rest."""
    heads, samples = divisible(trace), trace.meta.get("batch", 1)
    layers, sequence = len({layer for layer in op_layers(trace).tolist() if layer >= 0}), trace.meta.get("sequence")
    dense = "expert_loads" not in trace.meta and "lora_rank" not in trace.meta and trace.meta.get("loss") != "chunked"
    for tp in _divisors(devices):
        if tp > 1 and (tp > per_node or not dense or not heads or heads % tp):
            continue
        by_tokens = tp > 1 and isinstance(sequence, int) and sequence % tp == 0
        for pp in _divisors(devices // tp):
            dp = devices // (tp * pp)
            if (pp > 1 and (not layers or layers % pp)) or samples % dp:
                continue
            for n in _divisors(samples // dp):
                if n > 1 and pp > 1 and n < pp and n != samples // dp:
                    continue  # stages that never work all at once
                for zero in (0, 1, 2, 3) if dp > 1 and pp == 1 else (0, 1) if dp > 1 else (0,):
                    yield Layout(dp, tp, by_tokens, zero, pp, micro_batches=n)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def least_state(trace: Trace, layout: Layout) -> int:
    """The fewest bytes that the device with the most training state holds: the mean over the stages of its parts."""
    role, size = trace.tensor_columns.role, trace.tensor_columns.bytes
    divided = dimensions(trace).has[TENSOR] if layout.tp > 1 else frozenset()
    total = 0
    for t in range(len(role)):
        if trace.producer[t] >= 0 or role[t] not in PERSISTENT:
            continue
        share = layout.tp if t in divided else 1
        if layout.dp > 1 and (layout.zero == 3 or (layout.zero and role[t] != ROLE_CODE["weight"])):
            share *= layout.dp
        total += int(size[t]) // share
    return total // layout.pp


def estimate(trace: Trace, node: Platform, layout: Layout) -> float:
    """Nanoseconds, roughly: the ops of a device with their bubble, and the bytes of collectives at the links' rates."""
    launches = node.engines[node.engine_for(0, "")].launch * len(trace.ops)
    work = int(op_times(trace, node).total.sum()) - launches
    n, weights = layout.micro_batches, _weights(trace)
    inside = max((node.links[i].rate for i in node.route(node.home(0).name, node.home(1).name)), default=1)
    outside = node.networks[0].rate if node.networks else inside
    tokens, layers = int(trace.meta.get("tokens", 1)) / layout.dp, max(int(trace.meta.get("layers", 1)), 1)
    width = (weights / (24 * layers)) ** 0.5  # 12 h^2 weights of 2 bytes per layer
    between = 8 * (layout.tp - 1) / layout.tp * tokens * 2 * width * layers / layout.pp / inside
    passes = 3 * n if layout.zero == 3 else n + 1 if layout.zero == 2 else 2
    ring = inside if layout.devices <= node.devices else outside
    gradients = passes * (layout.dp - 1) / layout.dp * weights / (layout.tp * layout.pp) / ring
    busy: float = max(work, 0) / layout.devices + launches * n / layout.pp + between * 1e9
    return busy * (n + layout.pp - 1) / n + gradients * 1e9


def _weights(trace: Trace) -> int:
    """Bytes of all weights."""
    initial = (trace.producer < 0) & (trace.tensor_columns.role == ROLE_CODE["weight"])
    return int(trace.tensor_columns.bytes[initial].sum())


__all__ = ["Found", "LayoutSearch", "estimate", "layouts", "least_state", "search_layouts"]
