"""Builds a `Platform` from a checked profile: the parts of a device are repeated for each device.

With one device, parts keep their names. With several, the parts of a device are `hbm@0`, `hbm@1`, …, and a peer link
from device 0 to device 1 is `nvlink@0-1`. The tiers decide what belongs to a device: an engine belongs to the device
of its home tier, a link to that of either end.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from sim.errors import ProfileError
from sim.hardware.platform import Allocator, Dispatch, Engine, Fact, Link, Member, Network, Platform, Pool, Tier
from sim.hardware.schema import BITS, DispatchPart, EnginePart, LinkPart, PoolPart, ProfileFile, TierPart
from sim.trace.op import KINDS


def assemble(name: str, profile: ProfileFile) -> Platform:
    """The machine that a profile describes. Raises ProfileError where its parts do not fit together."""
    return _Assembly(name, profile).platform()


def dispatch_parts(by: str) -> Mapping[str, DispatchPart]:
    """What `dispatch.toml` states for one of `DISPATCHES`, by stack."""
    known = _dispatch_file() if by != "none" else {}
    return {stack: part for stack, part in known.items() if (stack == "graphs") == (by == "graphs")}


@cache
def _dispatch_file() -> Mapping[str, DispatchPart]:
    text = Path(__file__).with_name("dispatch.toml").read_text(encoding="utf-8")
    return {stack: DispatchPart.model_validate(part) for stack, part in tomllib.loads(text).items()}


class _Assembly:
    def __init__(self, name: str, profile: ProfileFile) -> None:
        self.name = name
        self.profile = profile
        self.devices = profile.devices
        self.sharers = profile.sharers
        self.problems: list[str] = []
        self.unused: list[str] = []
        self.energy: dict[str, float] = {}
        # (name, device) of each copy of a possible pool member; the device of a peer link is the one it starts from
        self.copies: dict[str, list[tuple[str, int]]] = {}

    def platform(self) -> Platform:
        self._check_main()
        tiers = tuple(self._tiers())
        engines = tuple(self._engines())
        links = tuple(self._links())
        pools = (*self._pools(), *self._port_pools())
        networks = tuple(self._networks())
        if self.problems:
            raise ProfileError(self.problems)
        return Platform(
            name=self.name,
            tiers=tiers,
            engines=engines,
            links=links,
            pools=pools,
            facts=tuple(self._facts()),
            description=self.profile.description,
            notes=self._notes(),
            energy=self.energy,
            op_time=self.profile.op_time,
            networks=networks,
            dispatch=tuple(self._dispatch()),
        )

    # ---- names -------------------------------------------------------------------------------

    def _on_device(self, tier: str) -> bool:
        return self.profile.tiers[tier].per_device

    def _at(self, part: str, device: int) -> str:
        return part if self.devices == 1 or device < 0 else f"{part}@{device}"

    def _tier_at(self, tier: str, device: int) -> str:
        return self._at(tier, device) if self._on_device(tier) else tier

    def _owners(self, on_device: bool) -> range:
        return range(self.devices) if on_device else range(-1, 0)

    # ---- parts -------------------------------------------------------------------------------

    def _check_main(self) -> None:
        main = [name for name, engine in self.profile.engines.items() if engine.main]
        for name in main:
            home = self.profile.engines[name].home
            if not self._on_device(home):
                path = f"engines.{name}.home"
                self._problem(path, f"value {home!r}: a main engine needs a tier with per_device = true")
        if self.sharers > 1 and self.devices > 1:
            text = f"{self.devices} devices are simulated themselves; one device stands for {self.sharers}"
            self._problem("sharers", f"value {self.sharers}: {text}")
        if len(main) != 1:
            actual = f"{len(main)} are: {', '.join(main)}" if main else "none is"
            self._problem(
                "engines", f"expected one engine with main = true, the one that runs a device's ops; {actual}"
            )

    def _tiers(self) -> Iterator[Tier]:
        for name, part in self.profile.tiers.items():
            for device in self._owners(part.per_device):
                tier = Tier(
                    name=self._at(name, device),
                    kind=part.kind,
                    device=device,
                    allocator=Allocator(part.allocator.name, part.allocator.options),
                    **_given(part, Tier),
                )
                if device < 0:
                    capacity, nominal = self._shared(tier.capacity), self._shared(tier.nominal)
                    tier = replace(
                        tier,
                        capacity=capacity,
                        nominal=nominal,
                        bandwidth=self._shared(tier.bandwidth),
                        write_bandwidth=-(-tier.write_bandwidth // self.sharers),
                    )
                yield tier

    def _engines(self) -> Iterator[Engine]:
        for name, part in self.profile.engines.items():
            for device in self._owners(self._on_device(part.home)):
                copy = self._at(name, device)
                self.copies.setdefault(name, []).append((copy, device))
                if part.power:
                    self.energy[copy] = part.power.value.number
                yield Engine(
                    name=copy,
                    device=device,
                    home=self._tier_at(part.home, device),
                    reaches=tuple(dict.fromkeys(self._reached(part, device))),
                    peak={dtype: self._shared(rate, device < 0) for dtype, rate in _peak(part).items()},
                    efficiency=_efficiency(part),
                    bandwidth_share=self._shares(part),
                    launch=part.launch.value.number,
                    main=part.main,
                    cores=part.cores.value.number if part.cores else 0,
                    lacks=tuple(kind for kind in KINDS if part.unit_of(kind) == "none"),
                    transposes=part.transposed(),
                )

    def _reached(self, part: EnginePart, device: int) -> Iterator[str]:
        """The tiers that an engine reaches: those of its own device; for a shared engine, those of all devices."""
        for tier in (part.home, *part.reaches):
            if device < 0 and self._on_device(tier):
                yield from (self._at(tier, other) for other in range(self.devices))
            else:
                yield self._tier_at(tier, device)

    def _shares(self, part: EnginePart) -> Mapping[str, float]:
        """Shares of the home tier's bandwidth; the file states them relative to what the engine alone can draw."""
        shares = {_op_key(key): figure.value.number for key, figure in part.bandwidth_share.items()}
        if part.bandwidth is None:
            return {key: float(share) for key, share in shares.items()}
        reach = Fraction(part.bandwidth.value.number, self.profile.tiers[part.home].bandwidth.value.number)
        shares.setdefault("", Fraction(1))
        return {key: float(share * reach) for key, share in shares.items()}

    def _links(self) -> Iterator[Link]:
        for name, part in self.profile.links.items():
            for copy, device, start, end in self._ends(name, part):
                self.copies.setdefault(name, []).append((copy, device))
                if part.energy:
                    self.energy[copy] = part.energy.value.number
                link = Link(name=copy, source=start, target=end, **_given(part, Link))
                yield replace(link, rate=self._shared(link.rate, device < 0))

    def _ends(self, name: str, part: LinkPart) -> Iterator[tuple[str, int, str, str]]:
        """Name, device, start and end of each copy of a link."""
        on_device = self._on_device(part.start), self._on_device(part.end)
        if part.peer:
            if not all(on_device):
                wrong = part.end if on_device[0] else part.start
                self._problem(f"links.{name}", f"value {wrong!r}: a peer link joins tiers with per_device = true")
            if self.devices == 1:
                self.unused.append(f"links.{name}.")
            for i in range(self.devices):
                for j in range(self.devices):
                    if i != j:
                        yield f"{name}@{i}-{j}", i, self._at(part.start, i), self._at(part.end, j)
            return
        if part.start == part.end:
            self._problem(f"links.{name}.to", f"value {part.end!r}: a link joins two tiers, unless it has peer = true")
        if part.egress:
            self._problem(f"links.{name}.egress", "only a link with peer = true has this key")
        for device in self._owners(any(on_device)):
            yield self._at(name, device), device, self._tier_at(part.start, device), self._tier_at(part.end, device)

    def _networks(self) -> Iterator[Network]:
        parts = sorted(self.profile.networks.items(), key=lambda each: each[1].per_node)
        for (inner, own), (outer, next_one) in pairwise(parts):
            if next_one.per_node % own.per_node or next_one.per_node == own.per_node:
                nearest = max(round(next_one.per_node / own.per_node), 2) * own.per_node
                key = f"networks.{outer}.per_node"
                what = f"joins groups of whole nodes of {own.per_node}, as {inner!r} has them; nearest: {nearest}"
                self._problem(key, f"value {next_one.per_node}: {what}")
            elif own.nodes is not None and own.nodes * own.per_node != next_one.per_node:
                nodes = next_one.per_node // own.per_node
                key, what = (
                    f"networks.{inner}.nodes",
                    f"{outer!r} joins groups of {nodes} of its nodes; nearest: {nodes}",
                )
                self._problem(key, f"value {own.nodes}: {what}")
        for name, part in parts:
            yield Network(name, part.per_node, part.rate.value.number, part.fixed.value.number, part.nodes or 0)

    # ---- pools -------------------------------------------------------------------------------

    def _pools(self) -> Iterator[Pool]:
        for name, part in self.profile.pools.items():
            if part.duplex == "full":
                self.unused.append(f"pools.{name}.")
                continue
            if part.duplex == "half":
                self.unused.append(f"pools.{name}.factors.")
            users = list(dict.fromkeys((*part.charges, *part.factors)))
            for user in users:
                if user not in self.copies:
                    self.unused += [f"pools.{name}.{table}.{user}" for table in ("charges", "factors")]
            rate, charges = self._charges(name, part, users)
            if rate is not None and not part.per_device:
                behind = part.devices.value.number if part.devices else self.sharers
                rate = max(1, rate // min(self.sharers, behind))
            for copy_of_pool, owners in self._pool_owners(name, part):
                members = [
                    Member(copy, charges[user], self._factor(part, user))
                    for user in charges
                    for copy, device in self.copies.get(user, ())
                    if owners is None or device in owners
                ]
                if members:
                    yield Pool(copy_of_pool, tuple(members), rate)
            if part.per_device or part.devices:
                for user in users:
                    if any(device < 0 for _, device in self.copies.get(user, ())):
                        self._problem(f"pools.{name}", f"value {user!r}: a per-device pool has no shared members")

    def _pool_owners(self, name: str, part: PoolPart) -> Iterator[tuple[str, range | None]]:
        """Each copy of a pool and the devices behind it, None for all and what they share."""
        if not part.per_device and (part.devices is None or part.devices.value.number >= self.devices):
            yield name, None
            return
        behind = part.devices.value.number if part.devices else 1
        for first in range(0, self.devices, behind):
            yield self._at(name, first // behind), range(first, min(first + behind, self.devices))

    def _shared(self, figure: int, shared: bool = True) -> int:
        """What one of the devices that share it has of a figure."""
        return max(1, figure // self.sharers) if shared else figure

    def _notes(self) -> tuple[str, ...]:
        if self.sharers == 1:
            return self.profile.notes
        said = f"One of {self.sharers} devices that use the host at the same time, with its share of what they share."
        return (*self.profile.notes, said)

    def _charges(self, name: str, part: PoolPart, users: list[str]) -> tuple[int | None, dict[str, Fraction]]:
        """The pool's rate, and the bytes that each user charges it per byte of payload."""
        charges = {u: part.charges[u].value.number if u in part.charges else Fraction(1) for u in users}
        if part.duplex != "half":
            return part.rate.value.number if part.rate else None, charges
        if part.rate:
            text = f"value {part.rate.value.text!r}: a half-duplex pool takes the rates of its links"
            self._problem(f"pools.{name}.rate", text)
        # one direction at a time: the fastest link sets the rate, a slower one charges more per byte
        for user in users:
            if user not in self.profile.links:
                self._problem(f"pools.{name}", f"value {user!r}: a half-duplex pool has links only")
        rates = {user: self.profile.links[user].rate.value.number for user in users if user in self.profile.links}
        fastest = max(rates.values(), default=1)
        return fastest, {user: charges[user] * Fraction(fastest, rates[user]) for user in rates}

    def _factor(self, part: PoolPart, user: str) -> Fraction:
        if part.duplex == "half" or user not in part.factors:
            return Fraction(1)
        factor: Fraction = part.factors[user].value.number
        return factor

    def _port_pools(self) -> Iterator[Pool]:
        """Pools that limit what one device can send, and what it can receive, over all its peer links together."""
        for name, part in self.profile.links.items():
            if not part.peer or not part.egress or self.devices == 1:
                continue
            rate = part.egress.value.number
            pairs = [(i, j) for i in range(self.devices) for j in range(self.devices) if i != j]
            for device in range(self.devices):
                outgoing = tuple(Member(f"{name}@{i}-{j}") for i, j in pairs if i == device)
                incoming = tuple(Member(f"{name}@{i}-{j}") for i, j in pairs if j == device)
                yield Pool(f"{name}_out@{device}", outgoing, rate)
                yield Pool(f"{name}_in@{device}", incoming, rate)

    # ---- bookkeeping -------------------------------------------------------------------------

    def _dispatch(self) -> Iterator[Dispatch]:
        """What the CPU that launches takes, by stack; nothing where the device never waits for it."""
        is_graph, scale = self.profile.dispatch == "graphs", self.profile.dispatch_scale.number
        for stack, part in dispatch_parts(self.profile.dispatch).items():
            ns = {name: round(figure.value.number * scale) for name, figure in part.figures()}
            yield Dispatch("eager" if is_graph else stack, **ns, is_graph=is_graph)

    def _facts(self) -> Iterator[Fact]:
        """All figures except those of parts that this machine does not have (peer links of a single device, …)."""
        parts = tuple(path for path in self.unused if path.endswith("."))
        yield from (f for f in self.profile.facts() if f.path not in self.unused and not f.path.startswith(parts))
        for stack, part in dispatch_parts(self.profile.dispatch).items():
            for path, figure in part.figures():
                yield Fact(f"dispatch.{stack}.{path}", figure.value.text, figure.source, figure.standing)

    def _problem(self, path: str, text: str) -> None:
        self.problems.append(f"{path}: {text}")


def _peak(part: EnginePart) -> dict[str, int]:
    """FLOP/s by type: those given, and those that follow from the units."""
    return {dtype: figure.value.number for dtype, figure in part.peak.items()} | part.derived_peak()


def _efficiency(part: EnginePart) -> dict[str, float]:
    """Fractions of the peak by kind: those given; of what runs one element at a time, its part of a vector."""
    table = {_op_key(key): float(f.value.number) for key, f in part.efficiency.items()}
    if part.vector is not None:
        width = part.vector.value.number
        for kind in (kind for kind in KINDS if part.unit_of(kind) == "scalar"):
            table |= {f"{kind}_{dtype}": BITS[dtype] / max(width, BITS[dtype]) for dtype in _peak(part)}
    return table


def _given(part: TierPart | LinkPart, kind: type[Tier] | type[Link]) -> dict[str, Any]:
    """The numbers of a part's figures that what is built of it has fields for, by name."""
    names = {field.name for field in fields(kind)}
    return {key: figure.value.number for key, figure in part.figures() if key in names}


def _op_key(key: str) -> str:
    return "" if key == "default" else key
