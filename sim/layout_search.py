"""Which layout and which memory policy together: all layouts of so many devices, the least promising left out.

    found = search_layouts(trace, "a100_80_sxm", 16, ["keep_all", "full_recompute"])
    print(found.best, found.runner_up)

`layouts` lists those that are valid: tensor parallelism inside a node, with sequence parallelism, context
parallelism, or both; stages, in each schedule that has an order for them, with as many layers each, or with so many
that the slowest part takes the least time, or, under 1F1B, a whole iteration does (`sim.stage_balance`); replicas that
divide the samples, and among which experts may be divided; ZeRO; microbatches. Two things spare a simulation. The least
that a device must hold, its part of the training state that no policy moves, proves that a layout cannot fit. An
estimate of time and memory (the units of the schedule one after the other, bytes of collectives,
`sim.layout_estimate`) orders the rest, of which `most` are simulated: what is left out there is not proven slower, and
the answer says how many those are. Whatever it names has been simulated.

One layout holds for all layers. Colossal-Auto (Liu et al. 2023, arXiv:2302.02599) chooses a sharding for each op of a
block by an integer program, with conversions between them, and memory after it; its paper prints neither the costs that
the program is given nor a strategy that it found for a transformer, and Colossal-AI's solver shares one among repeated
blocks (its pull requests 2854 and 2912). Here layout and memory policy are compared together, each simulated, and with
`by_part` attention, MLP and vocabulary may each be divided by tokens or by heads and columns (`divisions`); ops inside
these parts are not divided apart.

Then the `variants` of the fastest are tried, layouts that differ in how they exchange the same: buckets of gradients,
where gathered weights stay, whether all replicas divide the training state or those of each node, keys and values in
blocks. They are asked for only where a layout without the exposed part of what they exchange would be faster than the
best so far by more than `NEARLY`, at most `most` of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.analysis.peak_memory import home_peak
from sim.analysis.stages import stages
from sim.arguments import explained
from sim.errors import LayoutError, TiersimError, near
from sim.experiment import reference_run, simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.layout import (
    BALANCED,
    DAPPLE,
    DDP,
    Layout,
    check_by_tokens,
    check_context,
    check_division,
    check_experts,
    lay_out,
)
from sim.layout_estimate import Estimate, Estimator
from sim.policies import load
from sim.policies.traits import MANAGED_AS
from sim.report.error_bars import ratio_error
from sim.rewrites.dimensions import TENSOR, dimensions
from sim.rewrites.experts import EXPERTS, is_of_experts
from sim.rewrites.layer_parts import ATTENTION, PARTS, LayerPart, layer_parts
from sim.rewrites.zero import AMONG_REPLICAS
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.kept import kept
from sim.trace.layers import op_layers
from sim.trace.tensor import ROLES
from sim.units import format_percent

Parts = tuple[LayerPart, ...]
POLICIES = ("keep_all", "selective_recompute", "full_recompute")
MOST = 12
NEARLY = 0.005
"""Times that differ by less than this fraction count as equal where only the fastest is asked for, and for variants."""
MOST_DOUBLINGS = 8
SAVED = 1.1
"""By what a policy may save more in one layout than in another."""
WORK, LATER_WORK = 0.15, 0.05
"""Where time is short a layout is simulated the later the more microbatches it has, by this power of their number: each
has all ops once. The first of them counts for the layout that is simulated first, since any answer is worth more than
an estimate of which is the fastest, the second for all others."""
SEARCHED = ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "dualpipe_v")
"""Schedules that a search tries: those whose iterations compute the same, without the one that never overlaps."""
BUCKETS = (0, DDP, 100 << 20)
"""Buckets of gradients that a search tries: one per layer, PyTorch's, and larger ones, for slow starts of transfers."""


@dataclass(frozen=True)
class Found:
    """A layout and a policy, simulated. `makespan_ns` is None where it does not fit, and `why` says so.

    hidden_ns: the makespan without what devices wait for the bytes that `variants` would exchange in another way.
    """

    layout: Layout
    policy: str
    makespan_ns: int | None
    peak_bytes: int
    why: str = ""
    hidden_ns: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **self.layout.said(),
            "policy": self.policy,
            "makespan_ns": self.makespan_ns,
            "peak_bytes": self.peak_bytes,
        }

    def __str__(self) -> str:
        time = self.why if self.makespan_ns is None else f"{self.makespan_ns / 1e6:,.2f} ms"
        return f"{self.layout}; {self.policy}: {time}, {self.peak_bytes / 1e9:.2f} GB"


@dataclass(frozen=True)
class LayoutSearch:
    """What a search found.

    rows: all that was simulated, in the order of the search.
    cannot_fit: layouts whose part of the training state alone is more than a device has.
    left_out: layouts that were not simulated, since `most` came before them in the estimate, or for lack of time;
        variants are not counted.
    unlimited: of a search for the fastest alone, time in ns and peak of each layout with everything kept in unlimited
        memory.
    """

    rows: tuple[Found, ...]
    cannot_fit: int
    left_out: int
    unlimited: Mapping[Layout, tuple[int, int]] = field(default_factory=dict)

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
    def is_close(self) -> bool:
        """Whether the runner-up is slower by no more than the model's own error for two layouts."""
        best, other = self.best, self.runner_up
        if best is None or other is None:
            return False
        error, _ = ratio_error(layouts=True)
        return (other.makespan_ns or 0) <= (best.makespan_ns or 0) * (1 + error)

    @property
    def told(self) -> str:
        """That the runner-up can't be told from the best, for a place behind it; "" where it can."""
        if not self.is_close:
            return ""
        error, on = ratio_error(layouts=True)
        return f" (not told from the best: the model's own error is {format_percent(error)}, {on})"

    @property
    def front(self) -> list[Found]:
        """Those that no other beats in both time and memory, the fastest first."""
        front: list[Found] = []
        for row in self.fitting:
            if not front or row.peak_bytes < front[-1].peak_bytes:
                front.append(row)
        return front


@explained
def search_layouts(
    trace: Trace,
    profile: str | os.PathLike[str],
    devices: int,
    policies: Sequence[str] = POLICIES,
    *,
    budget: int | str | None = None,
    most: int = MOST,
    schedules: Sequence[str] = SEARCHED,
    seconds: float | None = None,
    overrides: Mapping[str, str] | None = None,
    kernels: Callable[[Trace], Trace] | None = None,
    fastest: bool = False,
    by_part: bool = False,
    on_row: Callable[[Found], None] = lambda row: None,
) -> LayoutSearch:
    """The layouts of so many devices with each policy, simulated: the most promising ones.

    trace: an iteration on one device, of the whole global batch.
    devices: how many are used, all of them.
    policies: policies or compositions, by name.
    budget: of each device; None for its capacity.
    most: how many layouts are simulated, and then how many variants; where no layout fits, the others follow, those
        with memory to spare by their estimate first, until one does. As long as none has, every second one is that of
        least memory by its estimate.
    schedules: of pipelines, those to try.
    seconds: wall-clock time after which no further layout is simulated; None for no limit.
    overrides, kernels: as for `lay_out`.
    fastest: whether only the fastest is asked for: then no policy is run in a layout that with everything kept in
        unlimited memory takes longer than the fastest so far, and none where another is about as fast as that, but for
        policies that save work itself; nor a composition with what fits there without it, nor are variants tried.
    by_part: whether variants divide parts of layers by tokens rather than by heads and columns, too (`divisions`).
    on_row: called with each row as it is found.

    Raises LayoutError where no layout has so many devices, a schedule is not one of `SEARCHED`, or `most` is below 1.
    """
    _check(most, schedules)
    node = load_profile(profile, overrides=overrides)
    per_node = _per_node(node, devices)
    if node.devices < 2 <= devices:
        node = load_profile(profile, overrides={**(overrides or {}), "devices": str(min(devices, per_node))})
    estimator = Estimator(trace, node)
    candidates = _distinct(layouts(trace, devices, per_node, schedules), estimator)
    if not candidates:
        raise LayoutError(
            f"devices: no layout of this trace takes {devices}; nearest: {_nearest(trace, devices, node)}"
        )
    capacity = node.home(0).capacity if budget is None else _bytes(budget)
    manages = {word for policy in policies for word in load(policy).manages}

    def may_fit(layout: Layout) -> bool:
        return least_state(trace, layout, manages) <= capacity and _is_held(trace, layout, node, budget)

    fit = list(filter(may_fit, candidates))
    estimates = {layout: estimator.of(layout) for layout in fit} if devices > 1 else {}
    fit = _ranked(fit, estimates, capacity, most, is_short=seconds is not None)
    rows: list[Found] = []
    unlimited: dict[Layout, tuple[int, int]] = {}
    began, tried = time.monotonic(), 0

    def is_late() -> bool:
        return seconds is not None and bool(rows) and time.monotonic() - began > seconds

    for layout in _in_turn(fit, estimates, lambda: any(row.makespan_ns is not None for row in rows)):
        if is_late() or (tried >= most and any(row.makespan_ns is not None for row in rows)):
            break
        tried += 1
        try:
            divided, platform = lay_out(trace, profile, layout, overrides=overrides, kernels=kernels)
        except TiersimError as error:
            rows.append(Found(layout, "", None, 0, str(error)))
            continue
        least = 0
        if fastest:
            unlimited[layout] = _kept(divided, platform)
            least = unlimited[layout][0]
        for policy in policies:
            if is_late():
                break
            if fastest and _is_beaten(policy, layout, least, rows, unlimited):
                continue
            if policy == "keep_all" and layout in unlimited and _is_enough(platform, capacity, unlimited[layout][1]):
                rows.append(Found(layout, policy, *unlimited[layout]))
            else:
                rows.append(_row(layout, policy, divided, platform, budget, by_part))
            on_row(rows[-1])
    if not fastest:
        for layout, names in _worth_varying(rows, most, divisions(trace) if by_part else (), per_node):
            if is_late():
                break
            try:
                divided, platform = lay_out(trace, profile, layout, overrides=overrides, kernels=kernels)
            except TiersimError as error:
                rows.append(Found(layout, "", None, 0, str(error)))
                continue
            for policy in names:
                rows.append(_row(layout, policy, divided, platform, budget))
                on_row(rows[-1])
    return LayoutSearch(tuple(rows), len(candidates) - len(fit), len(fit) - tried, unlimited)


def _check(most: int, schedules: Sequence[str]) -> None:
    """Raise LayoutError for what can't be searched."""
    if most < 1:
        raise LayoutError(f"most: value {most}: expected at least 1; nearest: 1")
    for schedule in schedules:
        if schedule not in SEARCHED:
            raise LayoutError(f"schedules: {schedule!r} is not searched{near(schedule, SEARCHED)}")


def _ranked(
    layouts: Sequence[Layout], estimates: Mapping[Layout, Estimate], capacity: int, most: int, *, is_short: bool
) -> list[Layout]:
    """Layouts in the order in which they are simulated: after the first `most` those that spare most memory."""
    if not estimates:
        return [*layouts]

    def rank(layout: Layout, work: float) -> tuple[int, float]:
        group, time_ns = estimates[layout].rank(capacity)
        return group, time_ns * layout.micro_batches**work

    first = sorted(layouts, key=lambda layout: rank(layout, LATER_WORK if is_short else 0.0))
    if is_short and first:
        soonest = min(first, key=lambda layout: rank(layout, WORK))
        first.remove(soonest)
        first.insert(0, soonest)
    return first[:most] + sorted(first[most:], key=lambda layout: estimates[layout].spare(capacity))


def _is_beaten(
    policy: str, layout: Layout, least: int, rows: Sequence[Found], unlimited: Mapping[Layout, tuple[int, int]]
) -> bool:
    """Whether a policy can't be much faster than what has been found. least: its layout's time in unlimited memory."""
    times = [row.makespan_ns for row in rows if row.makespan_ns is not None]
    if times and min(times) * (1 - NEARLY) * _saving(policy, rows, unlimited) <= least:
        return True
    return any(row.layout == layout and row.makespan_ns and _has_part(policy, row.policy) for row in rows)


def _saving(policy: str, rows: Sequence[Found], unlimited: Mapping[Layout, tuple[int, int]]) -> float:
    """How many times as fast as everything kept a policy may be: 1, but for those that save work itself.

    These are run in any layout as long as they have fitted none, and then taken to save no more than a little above the
    most that they have saved in one.
    """
    if not load(policy).saves:
        return 1.0
    found = [unlimited[row.layout][0] / row.makespan_ns for row in rows if row.policy == policy and row.makespan_ns]
    return max(1.0, SAVED * max(found)) if found else float("inf")


def _has_part(policy: str, other: str) -> bool:
    """Whether a policy is a composition of another one with more, which spares memory and no time."""
    return other in policy.split(" + ")[1:]


def _in_turn(
    layouts: Sequence[Layout], estimates: Mapping[Layout, Estimate], is_found: Callable[[], bool]
) -> Iterator[Layout]:
    """Layouts in their order; as long as none of those before has fitted, every second one is the leanest left."""
    left = dict.fromkeys(layouts)
    lean = iter(sorted(layouts, key=lambda layout: estimates[layout].kept_bytes) if estimates else ())
    leaner = False
    while left:
        layout = next(each for each in (lean if leaner and not is_found() else left) if each in left)
        leaner = bool(estimates) and not leaner
        del left[layout]
        yield layout


def _worth_varying(
    rows: Sequence[Found], most: int, by_part: Sequence[Parts], per_node: int
) -> Iterator[tuple[Layout, list[str]]]:
    """Variants of the layouts of rows, those of the fastest first, each with the policies under which it may be faster
    than all rows, which grow meanwhile; at most so many."""
    tried, number = {row.layout for row in rows}, 0
    first = sorted((row for row in rows if row.makespan_ns is not None), key=lambda row: row.makespan_ns or 0)
    by_layout: dict[Layout, list[Found]] = {}
    for row in first:
        by_layout.setdefault(row.layout, []).append(row)
    for layout, own in by_layout.items():
        for variant in variants(layout, by_part, per_node):
            best = min(row.makespan_ns for row in rows if row.makespan_ns is not None)
            names = [row.policy for row in own if row.hidden_ns < best * (1 - NEARLY)]
            if number == most or not names:
                break
            if variant not in tried:
                tried.add(variant)
                number += 1
                yield variant, names


def divisions(trace: Trace) -> list[Parts]:
    """The sets of parts of layers that ranks of tensor parallelism may divide by tokens, the same in each layer.

    What passes between parts is divided by tokens in any of them, so that no pair of parts needs a conversion of its
    own: these sets, each simulated, are all that an integer program over the parts could choose from.
    """
    sets = (layer_parts(some, "") for number in range(1, len(PARTS)) for some in combinations(PARTS, number))
    return [each for each in sets if _is_valid(check_by_tokens, trace, each, 2)]


def variants(layout: Layout, by_part: Sequence[Parts] = (), per_node: int = 0) -> Iterator[Layout]:
    """Layouts that differ from one only in how the same is exchanged; those that differ in one thing first.

    by_part: of layouts with sequence parallelism, parts of layers that may be divided by tokens.
    per_node: devices of a node; where replicas of several divide the training state, those of each may do so for
        themselves. 0: not known.
    """
    weights: list[dict[str, Any]] = [{}]
    if layout.zero == 3:
        weights.append({"reshard": False})
        weights += [{"reshard_to": n} for n in _divisors(layout.dp)[1:-1] if layout.ep == 1]
    within = per_node // (layout.tp * layout.cp)
    if layout.zero and layout.ep == 1 and 1 < within < layout.dp and layout.dp % within == 0:
        weights.append({"shard_within": within})
    buckets = [{"bucket": size} for size in (BUCKETS if layout.dp * layout.cp > 1 else BUCKETS[:1])]
    blocks = [{"ring_attention": ring} for ring in ((False, True) if layout.cp > 1 else (False,))]
    some = by_part if layout.sequence_parallel else ()
    if layout.cp > 1:  # whose ranks divide attention by tokens
        some = [each for each in some if all(part.part != ATTENTION for part in each)]
    parts = [{"by_tokens": each} for each in (layout.by_tokens, *some)]
    every = list(product(weights, buckets, blocks, parts))
    plain = every[0]
    for each in sorted(every[1:], key=lambda each: sum(a != b for a, b in zip(each, plain, strict=True))):
        changes: dict[str, Any] = {key: value for part in each for key, value in part.items()}
        yield replace(layout, **changes)


def _kept(trace: Trace, platform: Platform) -> tuple[int, int]:
    """Time in ns, and peak, of everything kept in unlimited memory."""
    log = reference_run(trace, platform)
    return log.end, home_peak(log)


def _is_enough(platform: Platform, capacity: int, peak: int) -> bool:
    """Whether what held at most so much in unlimited memory never waits for any in a capacity, and is the same run."""
    return peak <= capacity and all(tier.allocator.name == "exact" for tier in platform.tiers)


def _row(
    layout: Layout, policy: str, trace: Trace, platform: Platform, budget: int | str | None, by_part: bool = False
) -> Found:
    varied = {*AMONG_REPLICAS, "group"}  # axes of the collectives that its variants have in another way
    varied |= {"context", "neighbour"} if layout.cp > 1 else set()
    varied |= {"tensor"} if by_part else set()
    try:
        log = simulate(trace, platform, policy, budget=budget).log
    except TiersimError as error:
        return Found(layout, policy, None, 0, str(error).partition("\n")[0])
    exposed = sum(stage.exposed_ns for stage in stages(log, varied))
    return Found(layout, policy, log.end, home_peak(log), hidden_ns=log.end - exposed)


def _bytes(budget: int | str) -> int:
    from sim.units import parse_bytes

    return budget if isinstance(budget, int) else parse_bytes(budget)


def _per_node(node: Platform, devices: int) -> int:
    return max(node.networks[0].per_node if node.networks else devices, node.devices)


def _nearest(trace: Trace, devices: int, node: Platform) -> int:
    near = sorted(range(1, 2 * devices), key=lambda n: (abs(n - devices), n))
    return next((n for n in near if n != devices and any(layouts(trace, n, _per_node(node, n)))), 1)


def layouts(trace: Trace, devices: int, per_node: int, schedules: Sequence[str] = SEARCHED) -> Iterator[Layout]:
    """The layouts that take exactly so many devices and divide the trace without a rest.

    Stages have as many layers each, or so many that the slowest, or under 1F1B a whole iteration, takes the least time,
    which may be the same.
    """
    samples, sequence = trace.meta.get("batch", 1), trace.meta.get("sequence")
    layers = len({layer for layer in op_layers(trace).tolist() if layer >= 0})
    for tp, cp in _ranks(trace, devices, per_node):
        by_tokens = tp > 1 and isinstance(sequence, int) and _is_valid(check_division, trace, tp, True, cp)
        for pp in _divisors(devices // (tp * cp)):
            dp = devices // (tp * cp * pp)
            if "generate" in trace.meta and devices > tp:
                continue  # nothing is trained
            if (pp > 1 and layers < pp) or samples % dp:
                continue
            zeros = ((0, 1, 2, 3) if pp == 1 else (0, 1)) if dp * cp > 1 else (0,)
            among = _among_experts(trace, dp)
            orders = schedules if pp > 1 else ("1f1b",)
            for n, schedule, zero, ep in product(_divisors(samples // dp), orders, zeros, among):
                if n > 1 and "generate" in trace.meta:
                    continue
                if n > 1 and pp > 1 and n < pp and n != samples // dp:
                    continue  # stages that never work all at once
                if n == 1 and schedule not in ("1f1b", schedules[0]):
                    continue  # one microbatch has one order
                try:
                    layout = Layout(dp, tp, by_tokens, zero, pp, schedule, n, cp=cp, ep=ep)
                except LayoutError:  # no order for these numbers
                    continue
                if pp == 1 or layers % layout.parts == 0:
                    yield layout
                if pp > 1 and layers > layout.parts:
                    yield replace(layout, layers=BALANCED)
                    if schedule == "1f1b" and n > 1:  # whose iterations DAPPLE plans
                        yield replace(layout, layers=DAPPLE)


def _distinct(candidates: Iterable[Layout], estimator: Estimator) -> list[Layout]:
    """Layouts without those that give every part as many layers as one before them."""
    found: dict[Layout, Layout] = {}
    for layout in candidates:
        resolved = estimator.resolved(layout)
        sizes = {*resolved.layers} if isinstance(resolved.layers, tuple) else set()
        found.setdefault(replace(resolved, layers=()) if len(sizes) == 1 else resolved, layout)
    return [*found.values()]


def _ranks(trace: Trace, devices: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Ranks of tensor and of context parallelism that divide a trace, together inside a node."""
    inside = [ranks for ranks in _divisors(devices) if ranks <= per_node]
    for cp, tp in product(inside, inside):
        whole = devices % (tp * cp) == 0 and tp * cp <= per_node
        if whole and _is_valid(check_context, trace, cp) and _is_valid(check_division, trace, tp, False, cp):
            yield tp, cp


def _is_valid(check: Callable[..., None], *arguments: object) -> bool:
    """Whether a check of a layout raises no LayoutError."""
    try:
        check(*arguments)
    except LayoutError:
        return False
    return True


def _among_experts(trace: Trace, replicas: int) -> list[int]:
    """How many of so many replicas may divide the experts of a trace, 1 among them."""
    return [ep for ep in _divisors(replicas) if _is_valid(check_experts, trace, ep)]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _is_held(trace: Trace, layout: Layout, node: Platform, budget: int | str | None) -> bool:
    """Whether weights and optimizer state of a node's devices are no more than all of its memories together hold."""
    devices = min(layout.devices, node.devices)
    limited = node if budget is None else node.with_budget(_bytes(budget))
    every = sum(tier.capacity for tier in limited.tiers if tier.device < devices)  # -1: shared
    return least_state(trace, layout) * devices <= every


def nearest_number(trace: Trace, profile: str | os.PathLike[str], devices: int, **machine: Any) -> int | None:
    """The least doubling of a number of devices over which some layout holds the training state; None for none found.

    machine: `budget` and `overrides` of `search_layouts`.
    """
    node, overrides = load_profile(profile, overrides=machine.get("overrides")), machine.get("overrides") or {}
    per_node = _per_node(node, devices)
    if node.devices < per_node:
        node = load_profile(profile, overrides={**overrides, "devices": str(per_node)})
    for number in (devices << k for k in range(1, MOST_DOUBLINGS)):
        held = (_is_held(trace, each, node, machine.get("budget")) for each in layouts(trace, number, per_node))
        if any(held):
            return number
    return None


def least_state(trace: Trace, layout: Layout, manages: Collection[str] = ()) -> int:
    """The fewest bytes that the device with the most training state holds: the mean over the stages of its parts.

    manages: what policies may move or drop, in words of `Policy.manages`; of that a device need hold nothing.
    """
    parts = kept(trace, "state_by_division", layout.by_tokens, lambda: _by_division(trace, layout.by_tokens))
    total = 0
    for (role, is_divided, is_dealt), sizes in parts.items():
        if MANAGED_AS[role] in manages:
            continue
        share, same = layout.tp if is_divided else 1, (layout.shard_within or layout.dp) * layout.cp
        if is_dealt and layout.ep > 1:
            share, same = share * layout.ep, same // layout.ep
        if layout.zero == 3 or (layout.zero and role != "weight"):
            share *= same
        total += int((sizes // share).sum())
    return total // layout.pp


def _by_division(trace: Trace, by_tokens: Parts) -> dict[tuple[str, bool, bool], NDArray[np.int64]]:
    """Bytes of the tensors of the training state, by role and by whether ranks, and replicas, may divide them."""
    role, size = trace.tensor_columns.role, trace.tensor_columns.bytes
    known = dimensions(trace, by_tokens)
    found: dict[tuple[str, bool, bool], list[int]] = {}
    for t in np.flatnonzero((trace.producer < 0) & np.isin(role, PERSISTENT)).tolist():
        is_dealt = t in known.has[EXPERTS] and is_of_experts(trace, known.family[t])
        found.setdefault((ROLES[role[t]], t in known.has[TENSOR], is_dealt), []).append(int(size[t]))
    return {key: np.array(sizes, np.int64) for key, sizes in found.items()}


__all__ = ["Found", "LayoutSearch", "layouts", "least_state", "search_layouts"]
