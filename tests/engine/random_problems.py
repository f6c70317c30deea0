"""Random problems for the differential test: a trace, a platform, a budget and a plan, all from one number.

Wider than the suite's own random traces: several devices, groups of all kinds, a CPU, a vector unit and a codec
beside the main engines, op priorities, pools of every sort, compressed copies, planned places, dead tensors kept,
and an online part that answers by what it sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from random import Random
from zlib import crc32

from sim.errors import TraceError
from sim.hardware.platform import Engine, Link, Member, Platform, Pool, Tier
from sim.plan import Action, Change, Drop, Memory, Move, Need, Online, Plan, Recompute, Wait
from sim.trace import Trace, TraceBuilder
from sim.trace.op import Ring
from tests.engine.reference import simulate

GB = 10**9  # at 1 GB/s one byte takes one nanosecond
RATES = (GB, 2 * GB, GB // 2, 3 * GB, 7 * GB, GB // 3)
SIZES = (10, 20, 7, 40, 1, 100, 0)
TIMES = (10, 20, 1, 50, 0, 100)
CHARGES = (Fraction(1), Fraction(2), Fraction(3), Fraction(1, 2))
FACTORS = (Fraction(1), Fraction(4, 5), Fraction(1, 2), Fraction(2, 3))


@dataclass(frozen=True)
class Problem:
    """A plan and the platform that it runs on."""

    plan: Plan
    platform: Platform


def problem(seed: int) -> Problem:
    """The problem with that number."""
    draw = Random(seed)
    while True:
        devices = draw.choice((1, 1, 2, 2, 3))
        platform = random_platform(draw, devices)
        try:
            trace = random_trace(draw, devices, platform)
        except TraceError:  # a write in place that another device is still to read, say
            continue
        plan = random_plan(draw, trace, platform)
        return Problem(plan, tightened(draw, plan, platform))


# ---- platforms ---------------------------------------------------------------------------------


def random_platform(draw: Random, devices: int) -> Platform:
    """Devices with a memory each, a host, mostly links between neighbours, and what shares bandwidth with what."""
    names = [f"@{d}" if devices > 1 else "" for d in range(devices)]
    ample = 1 << 40
    tiers = [Tier(f"hbm{n}", ample, ample, 10 * GB, device=d) for d, n in enumerate(names)]
    tiers.append(Tier("host", ample, ample, 2 * GB, latency=draw.choice((0, 3)), kind="ddr"))
    sees_host = draw.random() < 0.2
    engines = []
    for d, n in enumerate(names):
        reaches = (f"hbm{n}", "host") if sees_host else (f"hbm{n}",)
        efficiency = draw.choice(({}, {"": 0.5}, {"matmul": 0.8, "": 0.3}))
        share = draw.choice(({}, {"": 0.5}, {"elementwise": 1.25}))
        launch = draw.choice((0, 0, 3))
        engines.append(Engine(f"npu{n}", d, f"hbm{n}", reaches, {"fp32": 10 * GB}, efficiency, share, launch))
    if draw.random() < 0.4:
        engines += [
            Engine(f"vec{n}", d, f"hbm{n}", (f"hbm{n}",), {"fp32": GB}, main=False) for d, n in enumerate(names)
        ]
    if draw.random() < 0.3:
        engines += [
            Engine(f"dma{n}", d, f"hbm{n}", (f"hbm{n}",), {"fp32": GB}, main=False) for d, n in enumerate(names)
        ]
    if draw.random() < 0.5:
        home = "host" if devices > 1 or draw.random() < 0.7 else "hbm"
        reaches = (home, "hbm") if devices == 1 and draw.random() < 0.3 else (home,)
        engines.append(Engine("cpu", -1, home, tuple(dict.fromkeys(reaches)), {"fp32": GB}, launch=2, main=False))
    links = []
    for n in names:
        fixed, copies = draw.choice((0, 0, 1, 7)), draw.choice((1, 1, 2, 3))
        links.append(Link(f"d2h{n}", f"hbm{n}", "host", draw.choice(RATES), fixed, copies))
        links.append(Link(f"h2d{n}", "host", f"hbm{n}", draw.choice(RATES), fixed, copies))
    if draw.random() < 0.3:
        tiers.append(Tier("nvme", ample, ample, GB, latency=5, kind="nvme"))
        links.append(Link("h2n", "host", "nvme", draw.choice(RATES), 1, draw.choice((1, 2))))
        links.append(Link("n2h", "nvme", "host", draw.choice(RATES), 2))
    for d in range(devices):
        for e in range(devices):
            if d != e and draw.random() < 0.7:  # else by the host
                copies = draw.choice((1, 1, 2))
                links.append(Link(f"p{d}{e}", f"hbm@{d}", f"hbm@{e}", draw.choice(RATES), draw.choice((0, 2)), copies))
    pools = tuple(_pool(draw, i, links, engines) for i in range(draw.choice((0, 0, 1, 1, 2))))
    return Platform("random", tuple(tiers), tuple(engines), tuple(links), pools)


def _pool(draw: Random, number: int, links: list[Link], engines: list[Engine]) -> Pool:
    """Some links, and now and then an engine; a rate in common, factors, or both."""
    members = [link.name for link in links if draw.random() < 0.6] or [links[0].name]
    members += [engine.name for engine in engines if draw.random() < 0.2]
    style = draw.choice(("rate", "rate", "factors", "both"))
    rows = []
    for name in members:
        charge = draw.choice(CHARGES) if style != "factors" else Fraction(1)
        rows.append(Member(name, charge, Fraction(1) if style == "rate" else draw.choice(FACTORS)))
    return Pool(f"pool{number}", tuple(rows), None if style == "factors" else draw.choice(RATES))


def tightened(draw: Random, plan: Plan, platform: Platform) -> Platform:
    """With less memory: somewhere between what the neediest op takes and what the plan takes where there is plenty."""
    trace = plan.trace
    used = dict.fromkeys((tier.name for tier in platform.tiers), 0)
    peaks, placed = dict(used), dict(used)
    for _, tier, delta, _, _, cause in simulate(replace(plan, online=None, keep_dead=False), platform).changes:
        used[tier] += delta
        peaks[tier] = max(peaks[tier], used[tier])
        placed[tier] += delta if cause == "placed" else 0
    needs = [
        (op.device, op.workspace + sum(trace.tensors[t].bytes for t in {*op.reads, *op.writes})) for op in trace.ops
    ]
    tiers = []
    for tier in platform.tiers:
        most = max((bytes for device, bytes in needs if device == tier.device), default=0)
        low, high = placed[tier.name] + most, peaks[tier.name] + most // 2
        spare = draw.choice((100, 100, 80, 60, 40, 20, 10, 0, -20))
        is_ample = draw.random() < (0.3 if tier.device >= 0 else 0.8)
        capacity = max(1, low + (high - low) * spare // 100)
        tiers.append(tier if is_ample else replace(tier, capacity=max(capacity, placed[tier.name])))
    return replace(platform, tiers=tuple(tiers))


# ---- traces ------------------------------------------------------------------------------------


def random_trace(draw: Random, devices: int, platform: Platform) -> Trace:
    """Ops that read what there is, some in place, some for groups; on all devices and engines."""
    return _Growing(draw, devices, platform).trace()


@dataclass
class _Growing:
    """A trace as it grows. where: the device that has a value; -1 for what nobody has touched."""

    draw: Random
    devices: int
    platform: Platform
    b: TraceBuilder = field(default_factory=TraceBuilder)
    current: list[int] = field(default_factory=list)  # values that are not overwritten
    where: dict[int, int] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)  # what another device has read: not to be overwritten
    count: int = 0

    def trace(self) -> Trace:
        """Ops, then maybe the releases that a program makes late."""
        draw = self.draw
        for i in range(draw.randint(1, 3)):
            role = draw.choice(("input", "weight", "weight", "optimizer_state"))
            self.value(draw.choice(SIZES), role, draw.randrange(self.devices) if i else 0)
        while not self.count or draw.random() < 0.87:
            kind = draw.random()
            if self.devices > 1 and kind < 0.15:
                self.collective()
            elif self.devices > 1 and kind < 0.35:
                self.send()
            else:
                self.op()
        made = [t for t in self.current if draw.random() < 0.15]
        plain = self.b.build()
        outputs = [*plain.outputs, *(t for t in made if t not in plain.outputs and plain.replaced_by[t] < 0)]
        carry = plain.carry if draw.random() < 0.8 else ()
        return self.b.build(outputs=outputs, carry=carry)

    def value(self, bytes: int, role: str, device: int, replaces: int | None = None) -> int:
        name = f"t{len(self.where)}"
        tensor = self.b.tensor(name, bytes, role, replaces=replaces)
        self.where[tensor] = device
        self.current.append(tensor)
        return tensor

    def near(self, device: int, most: int) -> list[int]:
        """Values to read: mostly this device's own, and late ones."""
        draw = self.draw
        pool = [t for t in self.current if self.where[t] == device or draw.random() < 0.1]
        pool = pool[-6:] if draw.random() < 0.7 else pool
        reads = draw.sample(pool, min(len(pool), draw.randint(0 if draw.random() < 0.2 else 1, most)))
        self.fixed.update(t for t in reads if self.where[t] != device)
        return reads

    def op(self) -> None:
        draw, device = self.draw, self.draw.randrange(self.devices)
        self.count += 1
        reads = self.near(device, 3)
        units = {e.name.partition("@")[0] for e in self.platform.engines if not e.main}
        engine = draw.choice(sorted(units)) if units and draw.random() < 0.3 else ""
        kind = "codec" if engine == "dma" else draw.choice(("matmul", "elementwise", "conv", "optimizer"))
        kind = "codec" if self.count % 11 == 7 else kind
        old = [t for t in reads if self.where[t] == device and t not in self.fixed and draw.random() < 0.25][:1]
        writes = []
        for t in old:
            role = draw.choice(("temporary", "weight"))
            writes.append(self.value(self.b.bytes_of(t), role, device, replaces=t))
            self.current.remove(t)
        for _ in range(draw.choice((1, 1, 1, 2, 0)) - len(old)):
            writes.append(self.value(draw.choice(SIZES), draw.choice(("activation", "gradient", "temporary")), device))
        cost: dict[str, int] = {"duration": draw.choice(TIMES)}
        if draw.random() < 0.35:
            cost = {"flops": draw.choice((0, 30, 100, 77))}
            if draw.random() < 0.3:
                cost["bytes"] = draw.choice((0, 100, 33))
        self.b.op(
            f"op{self.count}",
            kind,
            reads=reads,
            writes=writes,
            device=device,
            engine=engine,
            workspace=draw.choice((0, 0, 0, 8, 30)),
            priority=draw.choice((0, 0, 0, -1, 2)),
            phase=draw.choice(("forward", "backward")),
            **cost,  # type: ignore[arg-type]
        )

    def collective(self) -> None:
        """All devices, or some; in place, into new space or of nothing."""
        draw = self.draw
        members = sorted(draw.sample(range(self.devices), draw.randint(2, self.devices)))
        self.count += 1
        huge = draw.random() < 0.1
        bytes = draw.choice((None, 40, 0, 100)) if not huge else (4 << 20) * draw.choice((1, 2, 3)) + 5
        priority = draw.choice((0, 0, -1, 1))
        passes, axis = draw.choice((1, 2)), draw.choice(("data", "data", "expert", "neighbour"))
        ring = Ring(axis, len(members), passes) if draw.random() < 0.5 else None
        for device in members:
            mine = [t for t in self.current if self.where[t] == device]
            reads = draw.sample(mine, min(len(mine), draw.randint(0, 1)))
            writes = []
            if reads and draw.random() < 0.5 and reads[0] not in self.fixed:
                writes.append(self.value(self.b.bytes_of(reads[0]), "gradient", device, replaces=reads[0]))
                self.current.remove(reads[0])
            elif draw.random() < 0.7:
                writes.append(self.value(draw.choice(SIZES), "gradient", device))
            self.b.op(
                f"all{self.count}.{device}",
                "collective",
                reads=reads,
                writes=writes,
                device=device,
                group=f"all{self.count}",
                priority=priority,
                bytes=bytes,
                ring=ring,
            )

    def send(self) -> None:
        """One value to another device."""
        draw = self.draw
        source, target = draw.sample(range(self.devices), 2)
        mine = [t for t in self.current if self.where[t] == source]
        if not mine:
            return
        self.count += 1
        tensor = draw.choice(mine)
        got = self.value(self.b.bytes_of(tensor), "activation", target)
        priority = draw.choice((0, 0, -1, 1))
        common = {"group": f"send{self.count}", "priority": priority}
        ends = [("send", [tensor], [], source), ("recv", [], [got], target)]
        if draw.random() < 0.3:
            ends.reverse()  # posted ahead
        for kind, reads, writes, device in ends:
            self.b.op(f"{kind}{self.count}", kind, reads=reads, writes=writes, device=device, **common)  # type: ignore[arg-type]


# ---- plans -------------------------------------------------------------------------------------


def random_plan(draw: Random, trace: Trace, platform: Platform) -> Plan:
    """All four verbs at random anchors, some places, and in one plan of two an online part."""
    tiers = [tier.name for tier in platform.tiers]
    actions = []
    for _ in range(draw.choice((0, 2, 5, 10, 20))):
        action = _action(draw, trace, platform, tiers)
        if action is not None:
            actions.append(action)
    place = {}
    if draw.random() < 0.3:
        for t in range(len(trace.tensors)):
            if trace.producer[t] < 0 and draw.random() < 0.5:
                place[t] = draw.choice(tiers)
    plan = Plan(trace, tuple(actions), place=place, keep_dead=draw.random() < 0.15)
    if draw.random() < 0.5:
        away = tuple(tier.name for tier in platform.tiers if tier.device < 0)
        plan = replace(plan, online=partial(Seer, draw.randrange(1 << 30), trace, tuple(tiers), away))
    return plan


def _action(draw: Random, trace: Trace, platform: Platform, tiers: list[str]) -> Action | None:
    c = trace.op_columns
    anchor = draw.randrange(len(trace.ops))
    side = draw.choice(("before", "after"))
    at = {side: anchor}
    device = int(c.device[anchor])
    is_here = side == "before" or (anchor not in c.engine and anchor not in c.group)
    there = _there(trace, anchor if side == "after" else anchor - 1, device)
    verb = draw.choice(("move", "move", "move", "drop", "drop", "recompute", "wait"))
    if verb == "recompute":
        mine = [op for op in range(anchor) if c.device[op] == device and can_run_again(trace, op)]
        earlier = [op for op in mine if _waited_for(trace, op, device) or draw.random() < 0.2]
        return Recompute(draw.choice(earlier), **at) if earlier and is_here else None
    if verb == "wait" and draw.random() < 0.3:  # also for what an engine or a group has still to make
        under_way = [t for t in range(len(trace.tensors)) if 0 <= trace.producer[t] < anchor]
        return Wait(draw.choice(under_way), **at) if under_way and is_here else None
    if not there:
        return None
    tensor = draw.choice(there)
    if verb == "wait":
        return Wait(tensor, **at) if is_here else None
    if verb == "move":
        wire = trace.tensors[tensor].bytes // 2 if draw.random() < 0.15 else None
        priority, keep = draw.choice((0, 0, 0, -1, 2)), draw.random() < 0.3
        return Move(tensor, draw.choice(tiers), keep=keep, priority=priority, wire=wire, **at)
    producer = int(trace.producer[tensor])
    if draw.random() < 0.1 or (producer >= 0 and can_run_again(trace, producer)):
        return Drop(tensor, draw.choice((None, None, *tiers)), **at)
    return None


def can_run_again(trace: Trace, op: int) -> bool:
    """Whether one device alone can recompute it."""
    return op not in trace.op_columns.group


def _waited_for(trace: Trace, op: int, device: int) -> bool:
    """Whether a device that has passed an op has waited for its end."""
    c = trace.op_columns
    return bool(c.device[op] == device) and op not in c.group and op not in c.engine


def _there(trace: Trace, op: int, device: int) -> list[int]:
    """Values that are surely there when that device has come so far, and that nothing has overwritten."""
    found = []
    for t in range(len(trace.tensors)):
        producer, new = int(trace.producer[t]), int(trace.replaced_by[t])
        if producer > op or (producer >= 0 and not _waited_for(trace, producer, device)):
            continue
        if new < 0 or trace.producer[new] > op:
            found.append(t)
    return found


class Seer(Online):
    """Decides at random, and its chance hangs on all that it has seen: one figure amiss, and it does another thing.

    seen: what it was asked and shown, and what it was told, in order.
    """

    def __init__(
        self, seed: int, trace: Trace, tiers: tuple[str, ...], away: tuple[str, ...], *, links: bool = True
    ) -> None:
        """links: it looks at their queues, too, which the event path alone knows."""
        self.trace, self.tiers, self.away, self.links = trace, tiers, away, links
        self.state = seed
        self.told: list[Change] = []
        self.seen: list[object] = []

    def look(self, what: object, memory: Memory) -> Random:
        """All there is to see."""
        told = sorted((change.now, change.what, change.tensor, change.tier) for change in self.told)
        self.told.clear()
        figures = [
            (name, memory.free(name), memory.leaving(name), memory.arriving(name), memory.largest_hole(name))
            for name in self.tiers
        ]
        tensors = [
            (t, memory.where(t), memory.in_flight(t), memory.is_locked(t), memory.last_read(t))
            for t in range(len(self.trace.tensors))
        ]
        ends = [(a, b) for a in self.tiers for b in self.tiers if a != b and self.links]
        links = [(a, b, memory.link_free_at(a, b)) for a, b in ends]
        self.seen.append((what, memory.now, figures, tensors, links, told))
        self.state = crc32(repr(self.seen[-1]).encode(), self.state)
        return Random(self.state)

    def may_drop(self, tensor: int) -> bool:
        producer = int(self.trace.producer[tensor])
        return producer >= 0 and can_run_again(self.trace, producer)

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        draw = self.look(("before", op), memory)
        if draw.random() > 0.3:
            return ()
        loose = [t for t in range(len(self.trace.tensors)) if memory.where(t) and not memory.is_locked(t)]
        if not loose:
            return ()
        tensor = draw.choice(loose)
        verb = draw.random()
        if verb < 0.6:
            return (Move(tensor, draw.choice(self.tiers), keep=draw.random() < 0.5, priority=draw.choice((0, 0, -1))),)
        if verb < 0.7:
            return (Wait(tensor),)
        if not self.may_drop(tensor):
            return ()
        return (Drop(tensor),) if verb < 0.9 else (Recompute(int(self.trace.producer[tensor])),)

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        draw = self.look(need[:4], memory)
        loose = [t for t in memory.residents(need.tier) if not memory.is_locked(t) and memory.in_flight(t) is None]
        draw.shuffle(loose)
        for tensor in loose:
            if need.tier != self.away[0] and draw.random() < 0.6:
                return (Move(tensor, self.away[0]),)
            if self.may_drop(tensor):
                return (Drop(tensor, need.tier),)
        return ()

    def notice(self, change: Change) -> None:
        self.told.append(change)
