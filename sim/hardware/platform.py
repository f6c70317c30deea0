"""The machine: memory tiers, engines that compute, links that copy, and the bandwidth pools that they share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from sim.errors import ProfileError, near
from sim.hardware.transfer_time import Pace, transfer_ns

OP_TIMES = ("sum", "bound")
"""How the two parts of an op's time meet: added up, or the longer one counts (`sim.hardware.cost`)."""

DISPATCHES = ("none", "cpu", "graphs")
"""Who launches ops: nobody that a device waits for, a thread of the CPU, or one graph that has been captured."""

DRIVES = ("nvme", "ssd", "hdd")
"""Kinds of tiers that are drives."""

STANDINGS = ("measured", "vendor", "paper", "estimate", "assumed")
"""How certain a figure is, best first."""


SHARED = "replicas@"


def rank_link(axis: str, device: int) -> str:
    """Name of the link that stands for the network among the symmetric ranks of a device, along one axis."""
    return f"{axis}@{device}"


def shared_link(device: int) -> str:
    """Name of the link that all collectives among the replicas of a device occupy besides that of their axis."""
    return f"{SHARED}{device}"


def shares_wires(axis: str) -> bool:
    """Whether collectives along an axis also occupy the link of `shared_link`, where there is one.

    Ranks that divide layers are next to each other; those that have the same part in different groups are far apart.
    """
    return axis not in ("tensor", "group_data")


def counts_again(link: str) -> bool:
    """Whether a link carries only what other links carry, too: `shared_link`."""
    return link.startswith(SHARED)


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure of a profile.

    path: its key in the file, such as `tiers.hbm.bandwidth`.
    text: the value as written.
    source: where it is from.
    standing: how certain it is, one of `STANDINGS`.
    """

    path: str
    text: str
    source: str
    standing: str


@dataclass(frozen=True, slots=True)
class Allocator:
    """How a tier allocates memory.

    name: `exact`, `caching`, `pool` or `planned`.
    options: (key, value) pairs of that allocator.
    """

    name: str = "exact"
    options: tuple[tuple[str, int | str | bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory.

    name: unique within the platform.
    capacity: usable bytes.
    nominal: bytes as sold.
    bandwidth: bytes/s.
    latency: ns per access.
    write_bandwidth: bytes/s of what ops write there in place from another home, 0 for `bandwidth`.
    kind: `hbm`, `ddr`, `nvme`, `pooled`, ….
    device: the device that owns it, -1 for a memory that all devices share.
    allocator: how it allocates memory.
    pinning: bytes/s at which its pages are locked, once before training; 0 where none have to be, or it is not known.
    """

    name: str
    capacity: int
    nominal: int
    bandwidth: int
    latency: int = 0
    kind: str = "hbm"
    device: int = -1
    allocator: Allocator = Allocator()
    write_bandwidth: int = 0
    pinning: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """A unit that runs ops from a queue, one at a time.

    name: unique within the platform.
    device: the device that owns it, -1 for an engine that all devices share (a host CPU).
    home: the tier where its results are allocated.
    reaches: the tiers that it reads and writes in place, `home` included.
    peak: FLOP/s per dtype.
    efficiency: fraction of the peak per op kind; a key such as `matmul_fp32` is for a kind in one type, the key ""
        for all other kinds.
    bandwidth_share: fraction of the tier's bandwidth per op kind, above 1 where caches help; the key "" is for all
        other kinds.
    launch: fixed ns per op.
    lacks: kinds of op that it cannot run.
    main: whether it runs the device's ops unless they name another engine.
    cores: among which blocks of a product are shared out, 0 where nobody says.
    transposes: types in which it convolves images with channels last, and transposes others there and back.
    """

    name: str
    device: int
    home: str
    reaches: tuple[str, ...]
    peak: Mapping[str, int]
    efficiency: Mapping[str, float] = field(default_factory=dict)
    bandwidth_share: Mapping[str, float] = field(default_factory=dict)
    launch: int = 0
    main: bool = True
    lacks: tuple[str, ...] = field(default=(), repr=False)
    cores: int = field(default=0, repr=False)
    transposes: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two tiers.

    name: unique within the platform.
    source, target: names of the tiers.
    rate: bytes/s.
    fixed: ns per transfer.
    copy_engines: how many transfers run at once.
    codec: bytes/s, counted before compression, at which its copy engines compress or restore; 0 where they cannot, or
        nobody says.
    """

    name: str
    source: str
    target: str
    rate: int
    fixed: int = 0
    copy_engines: int = 1
    codec: int = field(default=0, repr=False)


@dataclass(frozen=True, slots=True)
class Member:
    """A user of a pool.

    name: of a link or an engine.
    charge: bytes that it charges the pool per byte of payload.
    factor: fraction of its own rate that remains while another member of the pool is active (duplex behaviour), 1 for
        no effect.
    """

    name: str
    charge: Fraction = Fraction(1)
    factor: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class Pool:
    """Bandwidth that its members share max-min fairly in charged bytes.

    name: unique within the platform.
    members: the links and engines that share it.
    rate: charged bytes/s, None for no common limit.
    """

    name: str
    members: tuple[Member, ...]
    rate: int | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """What joins nodes.

    name: unique within the platform.
    per_node: devices of a node.
    rate: bytes/s per device, each way.
    fixed: ns per message.
    nodes: how many it joins at most, 0 for any number.
    """

    name: str
    per_node: int
    rate: int
    fixed: int
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a thread of the CPU takes to dispatch an op to a device under one software stack, in ns.

    stack: its name.
    forward, backward, update: per op of that phase.
    once: before the first op of an iteration.
    is_graph: whether the ops have been captured and are replayed as one graph, so that nothing in it waits for the CPU.
    """

    stack: str
    forward: int
    backward: int
    update: int
    once: int = 0
    is_graph: bool = False


class _TierIds(dict[str, int]):
    """Positions by the name of a tier; another name is refused in words, whoever asks for it."""

    def __init__(self, platform: str, ids: Mapping[str, int]) -> None:
        super().__init__(ids)
        self.platform = platform

    def __missing__(self, name: str) -> int:
        raise ProfileError(f"{self.platform}: no tier {name!r}{near(name, self)}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.platform, dict(self))


@dataclass(frozen=True, eq=False)
class Platform:
    """A whole machine, checked. Tiers, engines and links are looked up by name or by position.

    name: of the profile.
    tiers, engines, links, pools: its parts.
    facts: every figure with its source and standing.
    description: one line.
    notes: what to know when reading results.
    energy: joules per op-second by engine and joules per byte by link, where all parts have it.
    budget: bytes of the home tiers if `with_budget` set them, else None.
    op_time: how long ops take, one of `OP_TIMES`.
    networks: what joins such machines, as nodes, to a larger one; used by layouts.
    dispatch: what the CPU that launches takes, by stack; () where the device never waits for it
        (`sim.hardware.dispatch`).

    Raises ProfileError where a part refers to another that does not exist.
    """

    name: str
    tiers: tuple[Tier, ...]
    engines: tuple[Engine, ...]
    links: tuple[Link, ...] = ()
    pools: tuple[Pool, ...] = ()
    facts: tuple[Fact, ...] = ()
    description: str = ""
    notes: tuple[str, ...] = ()
    energy: Mapping[str, float] = field(default_factory=dict)
    budget: int | None = None
    op_time: str = "sum"
    networks: tuple[Network, ...] = ()
    dispatch: tuple[Dispatch, ...] = ()

    def __post_init__(self) -> None:
        tiers = {tier.name for tier in self.tiers}
        users = set(self.lanes)
        problems = []
        parts: tuple[tuple[Tier | Engine | Link | Pool, ...], ...] = (self.tiers, self.engines, self.links, self.pools)
        for part in parts:
            names = [item.name for item in part]
            problems += [f"{self.name}: two parts are called {n!r}" for n in sorted(set(names)) if names.count(n) > 1]
        for engine in self.engines:
            for tier in (engine.home, *engine.reaches):
                if tier not in tiers:
                    problems.append(f"{self.name}: engine {engine.name!r}: no tier {tier!r}{near(tier, tiers)}")
        for link in self.links:
            for tier in (link.source, link.target):
                if tier not in tiers:
                    problems.append(f"{self.name}: link {link.name!r}: no tier {tier!r}{near(tier, tiers)}")
        for pool in self.pools:
            for member in pool.members:
                if member.name not in users:
                    known = near(member.name, users)
                    problems.append(f"{self.name}: pool {pool.name!r}: no link or engine {member.name!r}{known}")
        if not any(engine.main for engine in self.engines):
            problems.append(f"{self.name}: no device has a main engine")
        if problems:
            raise ProfileError(problems)

    # ---- parts by name -----------------------------------------------------------------------

    @cached_property
    def devices(self) -> int:
        """How many devices there are."""
        return max(engine.device for engine in self.engines if engine.main) + 1

    @cached_property
    def tier_ids(self) -> dict[str, int]:
        """Position of each tier by name; for another name a ProfileError with the nearest one."""
        return _TierIds(self.name, {tier.name: i for i, tier in enumerate(self.tiers)})

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes of a log: engines first, then links."""
        return (*(engine.name for engine in self.engines), *(link.name for link in self.links))

    @cached_property
    def lane_energy(self) -> tuple[float, ...] | None:
        """Joules per op-second or per byte of each lane; None unless the profile states that of every lane."""
        known = tuple(self.energy[name] for name in self.lanes if name in self.energy)
        return known if known and len(known) == len(self.lanes) else None

    def tier(self, name: str) -> Tier:
        """A tier by name. Raises ProfileError with the nearest name."""
        return self.tiers[self.tier_ids[name]]

    def main_engine(self, device: int = 0) -> Engine:
        """The engine that runs a device's ops unless they name another. Raises ProfileError for an unknown device."""
        for engine in self.engines:
            if engine.device == device and engine.main:
                return engine
        raise ProfileError(f"{self.name}: no device {device}; it has {self.devices}")

    def engine_for(self, device: int, name: str = "") -> int:
        """Position of the engine that runs an op.

        device: the op's device.
        name: the engine's name, without `@device` where each device has one; "" for the main engine.

        Raises ProfileError for an unknown engine.
        """
        if not name:
            return self.engines.index(self.main_engine(device))
        for i, engine in enumerate(self.engines):
            if engine.name in (name, f"{name}@{device}") and engine.device in (-1, device):
                return i
        known = near(name, [engine.name.partition("@")[0] for engine in self.engines])
        raise ProfileError(f"{self.name}: device {device} has no engine {name!r}{known}")

    def home(self, device: int = 0) -> Tier:
        """The home tier of a device: that of its main engine."""
        return self.tier(self.main_engine(device).home)

    @cached_property
    def host(self) -> Tier | None:
        """The tier that data is offloaded to: the first shared one that device 0 can copy to and from; None if none."""
        home = self.home(0).name
        for tier in self.tiers:
            if tier.device == -1 and self.route(home, tier.name) and self.route(tier.name, home):
                return tier
        return None

    @cached_property
    def drive(self) -> Tier | None:
        """The first drive that device 0 writes and reads itself, over links past the host; None if none."""
        home, ends = self.home(0).name, {(link.source, link.target) for link in self.links}
        for tier in self.tiers:
            if tier.device == -1 and tier.kind in DRIVES and {(home, tier.name), (tier.name, home)} <= ends:
                return tier
        return None

    def cascade(self, first: str) -> tuple[str, ...]:
        """`first` and the tiers behind it that take what does not fit there, nearest first.

        Each next tier is shared by all devices and has links from and to the one before it; of several, the one with
        the highest bandwidth. A host with a drive behind it gives `("host", "nvme")`.
        """
        chain = [first]
        while True:
            ends = {(link.source, link.target) for link in self.links}
            candidates = [
                tier
                for tier in self.tiers
                if tier.device == -1
                and tier.name not in chain
                and {(chain[-1], tier.name), (tier.name, chain[-1])} <= ends
            ]
            if not candidates:
                return tuple(chain)
            chain.append(max(candidates, key=lambda tier: tier.bandwidth).name)

    @property
    def has_peers(self) -> bool:
        """Whether a link goes from one device straight to the next."""
        device = {tier.name: tier.device for tier in self.tiers}
        return any((device[link.source], device[link.target]) == (0, 1) for link in self.links)

    # ---- routes ------------------------------------------------------------------------------

    def route(self, source: str, target: str) -> tuple[int, ...]:
        """Positions of the links of the shortest route (fewest links, then least fixed time); () if none."""
        key = (source, target)
        if key not in self._routes:
            self._routes[key] = self._find_route(source, target)
        return self._routes[key]

    @cached_property
    def _routes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {}

    @cached_property
    def _links_from(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, link in enumerate(self.links):
            found.setdefault(link.source, []).append(i)
        return found

    def _find_route(self, source: str, target: str) -> tuple[int, ...]:
        best: dict[str, tuple[int, int, tuple[int, ...]]] = {source: (0, 0, ())}
        frontier = [source]
        while frontier:
            reached = []
            for here in frontier:
                hops, fixed, path = best[here]
                for i in self._links_from.get(here, ()):
                    link = self.links[i]
                    step = (hops + 1, fixed + link.fixed, (*path, i))
                    if link.target not in best or step < best[link.target]:
                        best[link.target] = step
                        reached.append(link.target)
            frontier = [] if target in best else reached
        return best[target][2] if target in best else ()

    def pace(self, route: tuple[int, ...]) -> Pace:
        """Fixed ns and bytes/s of a transfer alone on these links: the sum of fixed times, the lowest rate."""
        if route not in self._paces:
            links = [self.links[i] for i in route]
            self._paces[route] = Pace(sum(link.fixed for link in links), min(link.rate for link in links))
        return self._paces[route]

    @cached_property
    def _paces(self) -> dict[tuple[int, ...], Pace]:
        return {}

    def step_ns(self, hops: Iterable[tuple[str, str]]) -> int:
        """Fixed ns of a step in which each rank of a ring sends to the next one, the slowest hop's.

        hops: from which tier to which.
        """
        return max((self.pace(route).fixed for hop in hops if (route := self.route(*hop))), default=0)

    def move_ns(self, bytes: int, source: str, target: str) -> int:
        """Nanoseconds of a copy when nothing else uses its route. Raises ProfileError where there is no route."""
        if source == target:
            return 0
        route = self.route(source, target)
        if not route:
            raise ProfileError(f"{self.name}: no route from {source!r} to {target!r}")
        fixed, rate = self.pace(route)
        return transfer_ns(bytes, rate, fixed)

    # ---- variants ----------------------------------------------------------------------------

    def with_budget(self, budget: int) -> Platform:
        """The same machine with `budget` bytes in every device's home tier."""
        homes = {engine.home for engine in self.engines if engine.main}
        tiers = tuple(replace(t, capacity=budget) if t.name in homes else t for t in self.tiers)
        limited = replace(self, tiers=tiers, budget=budget)
        vars(limited)["timing_hash"] = self.timing_hash  # which no capacity has a part in
        return limited

    @cached_property
    def assumed(self) -> tuple[Fact, ...]:
        """The figures that nobody measured or published."""
        return tuple(fact for fact in self.facts if fact.standing == "assumed")

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over everything that affects a replay, as hexadecimal digits."""
        parts: tuple[object, ...]
        parts = (self.name, self.tiers, self.engines, self.links, self.pools, sorted(self.energy.items()))
        if any(engine.lacks for engine in self.engines):
            parts = (*parts, tuple(engine.lacks for engine in self.engines))
        if any(engine.transposes for engine in self.engines):
            parts = (*parts, "transposes", tuple(engine.transposes for engine in self.engines))
        if self.op_time != "sum":
            parts = (*parts, self.op_time, tuple(engine.cores for engine in self.engines))
        if self.dispatch:
            parts = (*parts, self.dispatch)
        if any(link.codec for link in self.links):
            parts = (*parts, tuple(link.codec for link in self.links))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @cached_property
    def timing_hash(self) -> str:
        """The same without capacities: what decides how long ops and copies take."""
        tiers = tuple(replace(tier, capacity=0) for tier in self.tiers)
        return replace(self, tiers=tiers, budget=None, facts=()).content_hash
