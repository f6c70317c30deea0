"""How long ops and copies take alone, and by which route copies go: written from docs/model.md."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import product
from math import ceil
from typing import NamedTuple

from sim.hardware.platform import Dispatch, Engine, Platform
from sim.trace import Trace
from sim.trace.op import Ring

NANO = 10**9
WIDER = {
    "bf16": ("fp16", "tf32", "fp32"),
    "fp16": ("bf16", "tf32", "fp32"),
    "tf32": ("fp32",),
    "fp32": ("fp64",),
    "fp64": (),
    "fp8": ("fp16", "bf16", "fp32"),
    "int8": ("fp16", "bf16", "fp32"),
}


class Parts(NamedTuple):
    """Of one op: fixed ns, and bytes that flow afterwards at up to `rate` bytes/s."""

    fixed: int
    bytes: int
    rate: Fraction


def _stack_of(trace: Trace, platform: Platform) -> Dispatch | None:
    """What is known of the CPU under the stack of the trace, else under the eager one, else the first."""
    for name in (trace.meta.get("stack", "eager"), "eager"):
        for known in platform.dispatch:
            if known.stack == name:
                return known
    return platform.dispatch[0] if platform.dispatch else None


def dispatch_of(trace: Trace, platform: Platform, op: int) -> int:
    """How long the CPU takes to dispatch an op; nothing for one that the host itself runs."""
    known = _stack_of(trace, platform)
    if known is None or engine_of(trace, platform, op).device == -1:
        return 0
    return {"forward": known.forward, "backward": known.backward, "update": known.update}[trace.ops[op].phase]


def once_of(trace: Trace, platform: Platform) -> int:
    """How long the CPU takes before it dispatches the first op of a device."""
    known = _stack_of(trace, platform)
    return 0 if known is None else known.once


def waits_for_the_device(trace: Trace, platform: Platform, op: int) -> bool:
    """Whether the program asks the device for a number before an op: of scaled gradients, before the first update."""
    known = _stack_of(trace, platform)
    if known is None or known.is_graph or trace.meta.get("precision") != "amp_fp16":
        return False
    device = trace.ops[op].device
    updates = [o.id for o in trace.ops if o.device == device and o.phase == "update"]
    return op in [o for o in updates if engine_of(trace, platform, o).device != -1][:1]


def engine_of(trace: Trace, platform: Platform, op: int) -> Engine:
    """The engine that runs an op: the one it names (`name`, or `name@device`), else its device's main one."""
    o = trace.ops[op]
    for engine in platform.engines:
        mine = engine.device in (-1, o.device)
        if o.engine and mine and engine.name in (o.engine, f"{o.engine}@{o.device}"):
            return engine
        if not o.engine and engine.main and engine.device == o.device:
            return engine
    raise AssertionError(f"no engine for op {o.name!r}")


def exactly(figure: float) -> Fraction:
    """A figure as people write it: 0.1 is one tenth."""
    return Fraction(repr(float(figure)))


def touched_bytes(trace: Trace, op: int) -> int:
    """As stated, else the sum of the operands."""
    o = trace.ops[op]
    return sum(trace.tensors[t].bytes for t in (*o.reads, *o.writes)) if o.bytes is None else o.bytes


def parts_of(trace: Trace, platform: Platform, op: int) -> Parts:
    """launch + FLOPs / (efficiency * peak), and bytes at share * bandwidth; a measured duration replaces all of it."""
    o, engine = trace.ops[op], engine_of(trace, platform, op)
    share = exactly(engine.bandwidth_share.get(o.kind, engine.bandwidth_share.get("", 1.0)))
    home = next(tier for tier in platform.tiers if tier.name == engine.home)
    rate = Fraction(max(1, round(home.bandwidth * share)))
    if o.duration is not None:
        return Parts(o.duration, 0, rate)
    fixed = engine.launch
    if o.flops:
        names = (o.dtype, *WIDER.get(o.dtype, ())) if o.dtype else tuple(engine.peak)[:1]
        dtype = next(name for name in names if name in engine.peak)
        by_kind = [engine.efficiency.get(key) for key in (f"{o.kind}_{dtype}", o.kind, "")]
        efficiency = next((figure for figure in by_kind if figure is not None), 1.0)
        fixed += ceil(o.flops * NANO / (engine.peak[dtype] * exactly(efficiency)))
    return Parts(fixed, touched_bytes(trace, op), rate)


def away_ns(platform: Platform, engine: Engine, kind: str, away: dict[str, int], written: dict[str, int]) -> int:
    """Extra ns for operands that are read or written in place in other tiers than the engine's home."""
    tiers = {tier.name: tier for tier in platform.tiers}
    share = exactly(engine.bandwidth_share.get(kind, engine.bandwidth_share.get("", 1.0)))
    home = max(1, round(tiers[engine.home].bandwidth * share))
    extra = Fraction(0)
    for name in {**away, **written}:
        tier = tiers[name]
        for bytes, bandwidth in ((away, tier.bandwidth), (written, tier.write_bandwidth or tier.bandwidth)):
            rate = max(1, round(bandwidth * share))
            extra += Fraction(bytes.get(name, 0) * NANO, rate) - Fraction(bytes.get(name, 0) * NANO, home)
        extra += tier.latency
    return max(0, ceil(extra))


def route_of(platform: Platform, source: str, target: str) -> tuple[int, ...]:
    """Of all ways without a tier twice: fewest links, then least fixed time, then the first links."""
    if source == target:
        return ()
    ways = _ways(platform, (source,), target)
    return min(ways, key=lambda way: (len(way), sum(platform.links[i].fixed for i in way), way), default=())


def _ways(platform: Platform, visited: tuple[str, ...], target: str) -> Iterable[tuple[int, ...]]:
    for i, link in enumerate(platform.links):
        if link.source != visited[-1] or link.target in visited:
            continue
        if link.target == target:
            yield (i,)
        else:
            for rest in _ways(platform, (*visited, link.target), target):
                yield (i, *rest)


def nearest(platform: Platform, held: Iterable[str], target: str) -> str | None:
    """Of the tiers that hold a copy the one with the shortest route to `target`; None where none has one."""
    names = [tier.name for tier in platform.tiers]
    ranked = []
    for name in held:
        way = route_of(platform, name, target)
        if way:
            ranked.append((len(way), sum(platform.links[i].fixed for i in way), names.index(name), name))
    return min(ranked)[-1] if ranked else None


def ring_of(platform: Platform, homes: list[str]) -> tuple[int, ...]:
    """The links from each member of a collective to the next, each link once."""
    hops = zip(homes, homes[1:] + homes[:1], strict=True)
    links: dict[int, None] = {}
    for source, target in hops:
        links.update(dict.fromkeys(route_of(platform, source, target)))
    return tuple(links)


def exchange_ns(platform: Platform, homes: list[str], ring: Ring | None) -> int:
    """Fixed ns of a collective with all its members: round the ring once per pass, or to all or the next at once."""
    per_pass = len(homes) - 1
    if ring is not None and ring.axis in ("expert", "neighbour"):
        per_pass = 1
    waits = [0]
    for place, source in enumerate(homes):
        waits.append(sum(platform.links[i].fixed for i in route_of(platform, source, homes[place - len(homes) + 1])))
    return max(waits) * per_pass * (1 if ring is None else ring.passes)


def crossings(names: Iterable[str], platform: Platform) -> list[tuple[int, str, Fraction, Fraction]]:
    """(pool, user, charge, factor) of each pool that each of these links or engines is in."""
    rows = []
    for name, (p, pool) in product(names, enumerate(platform.pools)):
        rows += [(p, name, member.charge, member.factor) for member in pool.members if member.name == name]
    return rows
