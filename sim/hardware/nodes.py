"""A machine of many nodes as a layout uses it: one device per stage, which stands for its symmetric ranks.

The platform describes one node. Of `stages * ranks` devices, ranks of a stage next to each other, of these those of a
replica, and of these those that divide the layers for the same tokens, and none of these groups on two nodes where it
fits into one (of 8 devices a node, six are used where a stage has six), the devices that are simulated get their share
of what a node's devices share: of n nodes and s stages on N devices, capacity and rates of a shared part are multiplied
by n s / N, so that eight offloading cards have an eighth of a host each. Hosts of several nodes count as one memory of
their sum.

Two stages exchange data over the links inside a node where their first ranks share one, else over the network. The
ranks of a stage sum and gather over rings, inside nodes first and then among them (hierarchical): of m bytes among p
ranks, g per node on k nodes, a reduce-scatter or an all-gather takes

    (g - 1) (a + m / (g b)) + (k - 1) (A + m / (k g B))

with a fixed time a and rate b inside a node, A and B per device between nodes; an all-reduce takes both. With one node
this is the ring's (p - 1) (a + m / (p b)). What each rank sends to its neighbour takes as long as the slowest hop:
max(a, A) + m / min(b, B). In an all-to-all of m bytes each rank sends m / p to
each other one, all at once:

    max(a, A) + max((g - 1) m / (p b), (p - g) m / (p B))

Where several networks lie one outside the other (in a rack, between racks), each adds a term of its own: of q groups
that the inner ones join, with r ranks in each, (q - 1) (A' + m / (q r B')); an all-to-all sends what stays inside each
over that network alone, and each has its own wires. Two stages exchange data over the innermost one that joins them.

What a device sends to other stages and round its rings shares the links inside the node, and each network, fairly, and
so does what it receives. A ring that uses several of them charges each with its part of the bytes; and what all devices
of a node share, where the links between them are members of it, as MT-3000's clusters do a port and the memory. Where
ranks divide tokens, what they exchange in attention and the sums of gradients beside it go one after the other, if both
are inside nodes or both between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, permutations

from sim.errors import LayoutError
from sim.hardware.platform import Engine, Link, Member, Network, Platform, Pool, Tier, rank_link, shared_link


def placed(
    platform: Platform,
    stages: int,
    ranks: int,
    tensor: int = 1,
    experts: int = 1,
    context: int = 1,
    group: int = 1,
    neighbours: bool = False,
    shards: int = 1,
) -> Platform:
    """The machine with a device per stage and, where each stands for several, a link for the network among its ranks.

    platform: one node. Its own devices are used as they are where they suffice.
    ranks: replicas. tensor, context: ranks among which the layers and the tokens of each are divided. experts: replicas
        that divide experts. group: replicas that keep gathered weights together. neighbours: whether ranks of `context`
        send to the next one, too. shards: replicas that divide the training state, where not all of them do.

    Raises LayoutError where the platform states no links inside the node, or no network, and needs them.
    """
    if ranks * tensor * context == 1 and stages <= platform.devices:
        return platform
    return _Placement(platform, stages, ranks, tensor, experts, context, group, neighbours, shards).platform()


def hop_rates(platform: Platform, device: Sequence[int], ranks: int = 1) -> tuple[int, ...]:
    """Bytes per second of a rank of each part of a model to its counterpart in the next one, over the link that they
    have; 0 where both are on one device.

    platform: one node. device: of each part, one of its stage's. ranks: devices of a stage.

    Raises LayoutError as `placed` does.
    """
    stages = max(device, default=0) + 1
    if ranks == 1 and stages <= platform.devices:
        homes = [platform.home(d).name for d in device]
        routes = [platform.route(start, end) if start != end else () for start, end in pairwise(homes)]
        if any(start != end and not route for (start, end), route in zip(pairwise(homes), routes, strict=True)):
            raise LayoutError(f"devices: {platform.name} has no link from one device to the next; nearest: 1")
        return tuple(min((platform.links[i].rate for i in route), default=0) for route in routes)
    placement = _Placement(platform, stages, ranks, 1, 1, 1, 1, False)
    return tuple(placement.hop(a, b).rate if a != b else 0 for a, b in pairwise(device))


def ring_rates(
    platform: Platform, stages: int, replicas: int, tensor: int = 1, experts: int = 1, context: int = 1
) -> dict[str, tuple[int, int]]:
    """Per axis along which ranks exchange (`rank_link`) bytes per second of what each sends, and ns of one pass.

    Arguments as for `placed`, which raises the same errors.
    """
    placement = _Placement(platform, stages, replicas, tensor, experts, context, 1, False)
    return {axis: placement.rate_of(axis, ranks, on) for axis, ranks, on in placement.rings() if ranks > 1}


class _Placement:
    """What is built of a node.

    ranks: devices of a stage.
    per_node: devices of a node that are used. nodes: how many.
    share: of a shared part that the simulated devices get.
    inner: the link from device 0 to device 1, None for none. inner_rate: bytes/s of a ring inside a node.
    """

    def __init__(
        self,
        node: Platform,
        stages: int,
        replicas: int,
        tensor: int,
        experts: int,
        context: int,
        group: int,
        neighbours: bool,
        shards: int = 1,
    ) -> None:
        self.experts, self.group, self.neighbours, self.shards = experts, group, neighbours, shards
        self.node, self.stages, self.ranks = node, stages, replicas * tensor * context
        self.replicas, self.tensor, self.context = replicas, tensor, context
        total = stages * self.ranks
        self.per_node = total if total <= node.devices else self._used(node.devices)
        self.nodes = -(-total // self.per_node)
        self.share = Fraction(self.nodes * stages, total)
        self.levels = self._levels(total)
        if self.nodes > 1 and not self.levels:
            raise LayoutError(
                f"devices: {node.name} states no network between nodes of {node.devices} device(s), and {total} are "
                f"needed; nearest: {node.devices}"
            )
        self.tier_device = {tier.name: tier.device for tier in node.tiers}
        self.inner, self.inner_rate = self._inner()

    def _used(self, devices: int) -> int:
        """Devices of a node that are used: as many as whole stages take, or whole groups that divide layers and tokens,
        so that neither straddles two nodes where it fits into one."""
        units = (self.ranks, self.tensor * self.context, self.tensor, 1)
        unit = next(unit for unit in units if unit <= devices)
        return devices // unit * unit

    def _levels(self, total: int) -> list[tuple[int, Network]]:
        """From inside to outside the devices that each network joins, at most all that are used, and the network."""
        networks = self.node.networks if self.nodes > 1 else ()
        joined = [min(network.per_node // self.node.devices * self.per_node, total) for network in networks[1:]]
        return [(size, network) for size, network in zip((*joined, total), networks, strict=False)]

    def _inner(self) -> tuple[Link | None, int]:
        """That link, and what one of it carries while each device that is used sends over its own."""
        link = self._peer(0, 1)
        if link is None:
            return None, 0
        rates = [link.rate]
        for pool in self.node.pools:
            charge = sum((member.charge for member in pool.members if member.name == link.name), Fraction(0))
            if pool.rate is not None and charge:
                share = self.share if self._is_of_all(pool) else 1
                rates.append(max(int(pool.rate * share / charge), 1))
        return link, min(rates)

    def _peer(self, start: int, end: int) -> Link | None:
        """The link from one device to another."""
        ends = (start, end)
        found = (x for x in self.node.links if (self.tier_device[x.source], self.tier_device[x.target]) == ends)
        return next(found, None)

    def _is_of_all(self, pool: Pool) -> bool:
        """Whether links of several devices to what they share are in a pool, or what they share itself."""
        peers = {link.name for link in self.node.links if self._is_peer(link)}
        owners = {self._owner(member.name) for member in pool.members if member.name not in peers}
        return len(owners) > 1 or -1 in owners

    # ---- names -------------------------------------------------------------------------------

    def _at(self, name: str, stage: int) -> str:
        stem = name.partition("@")[0]
        return stem if self.stages == 1 else f"{stem}@{stage}"

    def _tier(self, name: str, stage: int) -> str:
        return self._at(name, stage) if self.tier_device[name] >= 0 else name

    def _scaled(self, rate: int) -> int:
        return max(int(rate * self.share), 1)

    # ---- parts -------------------------------------------------------------------------------

    def platform(self) -> Platform:
        """The machine."""
        node = self.node
        energy = dict(node.energy)
        links = (*self._links(), *self._between(), *self._among_ranks())
        for name, joules in node.energy.items():
            if name.endswith("@0"):
                energy |= {self._at(name, stage): joules for stage in range(self.stages)}
        return replace(
            node,
            tiers=tuple(self._tiers()),
            engines=tuple(self._engines()),
            links=links,
            pools=(*self._pools(links), *self._egress(links)),
            energy=energy,
        )

    def _tiers(self) -> Iterator[Tier]:
        for tier in self.node.tiers:
            if tier.device == 0:
                yield from (replace(tier, name=self._at(tier.name, s), device=s) for s in range(self.stages))
            elif tier.device < 0:
                yield replace(
                    tier,
                    capacity=self._scaled(tier.capacity),
                    nominal=self._scaled(tier.nominal),
                    bandwidth=self._scaled(tier.bandwidth),
                    write_bandwidth=self._scaled(tier.write_bandwidth) if tier.write_bandwidth else 0,
                )

    def _engines(self) -> Iterator[Engine]:
        for engine in self.node.engines:
            if engine.device == 0:
                for s in range(self.stages):
                    reaches = tuple(self._tier(t, s) for t in engine.reaches if self.tier_device[t] <= 0)
                    home = self._tier(engine.home, s)
                    yield replace(engine, name=self._at(engine.name, s), device=s, home=home, reaches=reaches)
            elif engine.device < 0:
                reached: dict[str, None] = {}
                for t in engine.reaches:
                    if self.tier_device[t] == 0:
                        reached |= {self._tier(t, s): None for s in range(self.stages)}
                    elif self.tier_device[t] < 0:
                        reached[t] = None
                peak = {dtype: self._scaled(rate) for dtype, rate in engine.peak.items()}
                yield replace(engine, reaches=tuple(reached), peak=peak)

    def _owner(self, name: str) -> int:
        """The device of an engine or a link, -1 for a shared one; of a link between devices the one that it leaves."""
        for engine in self.node.engines:
            if engine.name == name:
                return engine.device
        link = next(link for link in self.node.links if link.name == name)
        start, end = self.tier_device[link.source], self.tier_device[link.target]
        return start if start >= 0 else end

    def _is_peer(self, link: Link) -> bool:
        return min(self.tier_device[link.source], self.tier_device[link.target]) >= 0

    def _links(self) -> Iterator[Link]:
        """Those of a device, and those that all share."""
        for link in self.node.links:
            if self._is_peer(link):
                continue
            owner = self._owner(link.name)
            if owner < 0:
                yield replace(link, rate=self._scaled(link.rate))
            elif owner == 0:
                for s in range(self.stages):
                    start, end = self._tier(link.source, s), self._tier(link.target, s)
                    yield replace(link, name=self._at(link.name, s), source=start, target=end)

    def _between(self) -> Iterator[Link]:
        """The links from stage to stage, of the ranks that are simulated."""
        home = [self._tier(self.node.home(0).name, s) for s in range(self.stages)]
        for i, j in permutations(range(self.stages), 2):
            over = self.hop(i, j)
            name = f"{over.name.partition('@')[0]}@{i}-{j}"
            if isinstance(over, Link):
                yield replace(over, name=name, source=home[i], target=home[j])
            else:
                yield Link(name, home[i], home[j], over.rate, over.fixed)

    def hop(self, i: int, j: int) -> Link | Network:
        """What joins the first ranks of two stages: a link inside a node, or the innermost network."""
        first, second = i * self.ranks, j * self.ranks
        if first // self.per_node == second // self.per_node:
            return self._inside()
        return next(network for size, network in self.levels if first // size == second // size)

    def _inside(self) -> Link:
        if self.inner is None:
            raise LayoutError(f"devices: {self.node.name} has no link from one device to the next; nearest: 1")
        return self.inner

    def rings(self) -> Iterator[tuple[str, int, list[int]]]:
        """Along which axis how many ranks exchange, and how many are on a node, and in reach of each network."""
        of_levels = [list(self._along(size)) for size in (self.per_node, *(size for size, _ in self.levels))]
        for which in zip(*of_levels, strict=True):
            axis, ranks, _ = which[0]
            yield axis, ranks, [together for _, _, together in which]

    def _along(self, size: int) -> Iterator[tuple[str, int, int]]:
        """Along which axis how many ranks exchange, and how many of them are on so many devices next to each other."""
        together = min(size, self.tensor)  # those that divide layers are next to each other
        around = max(min(size // self.tensor, self.context), 1)
        beside = max(min(size // (self.tensor * self.context), self.replicas), 1)
        same, apart = self.replicas // self.experts, max(beside // self.experts, 1)
        yield "tensor", self.tensor, together
        yield "context", self.context, around
        if self.neighbours:
            yield "neighbour", self.context, around
        if self.shards == 1:
            yield "data", self.replicas, beside
        if self.experts > 1:
            yield from (("expert", self.experts, min(beside, self.experts)), ("expert_data", same, apart))
        if (group := max(self.group, self.shards)) > 1:
            yield "group", group, min(beside, group)
        if self.shards > 1:  # and those that have the same part of the state
            yield "group_data", self.replicas // self.shards, max(beside // self.shards, 1)
        if self.context > 1:  # gradients and states, of which the ranks that divide tokens have the same
            among, near = (self.replicas, beside) if self.shards == 1 else (group, min(beside, group))
            yield f"{'data' if self.shards == 1 else 'group'}_context", among * self.context, near * around
            if self.experts > 1:
                yield "expert_data_context", same * self.context, apart * around

    def _among_ranks(self) -> Iterator[Link]:
        """Per stage a link for the rings of its ranks: its rate is for what each sends, its fixed time for one pass."""
        fastest: dict[int, int] = {}
        for axis, ranks, on in self.rings():
            if ranks == 1:
                continue
            rate, fixed = self.rate_of(axis, ranks, on)
            for s in range(self.stages):
                home = self._tier(self.node.home(0).name, s)
                yield Link(rank_link(axis, s), home, home, rate, fixed)
                fastest[s] = max(fastest.get(s, 0), rate if axis != "tensor" else 0)
        if max(self.experts, self.group) > 1 or self._sums_beside_attention():  # over the same wires
            for s, rate in fastest.items():
                home = self._tier(self.node.home(0).name, s)
                yield Link(shared_link(s), home, home, rate)

    def rate_of(self, axis: str, ranks: int, on: list[int]) -> tuple[int, int]:
        """Rate and fixed time of what so many ranks exchange along an axis, so many of them on a node, and so on."""
        return {"expert": self._all_to_all, "neighbour": self._hop}.get(axis, self._ring)(ranks, on)

    def _sums_beside_attention(self) -> bool:
        """Whether keys and values go over the same wires as sums of gradients: all inside a node, or all between."""
        of_sums = ("context", "data_context", "group_context")
        spans = {axis: (ranks, on[0]) for axis, ranks, on in self.rings() if axis in of_sums}
        inside = all(g == ranks for ranks, g in spans.values())
        return self.context > 1 and (inside or all(g == 1 for _, g in spans.values()))

    def _spans(self, ranks: int, on: list[int]) -> Iterator[tuple[int, int, Network]]:
        """Per network that a ring of so many ranks needs: ranks that are together before it, and with it.

        on: how many are on each node, and in reach of each network.
        """
        before = on[0]
        for together, (_, network) in zip((*on[1:-1], ranks), self.levels, strict=False):
            if together > before:
                yield before, together, network
                before = together

    def _ring(self, ranks: int, on: list[int]) -> tuple[int, int]:
        """Rate and fixed time of a ring of so many ranks, so many on a node, and in reach of each network."""
        seconds, fixed, g = Fraction(0), 0, on[0]
        if g > 1:
            seconds += Fraction(g - 1, g * self.inner_rate) if self._inside() else 0
            fixed += (g - 1) * self._inside().fixed
        for before, together, network in self._spans(ranks, on):
            k = -(-together // before)
            seconds += Fraction(k - 1, k * before * network.rate)
            fixed += (k - 1) * network.fixed
        return int(Fraction(ranks - 1, ranks) / seconds), fixed

    def _hop(self, ranks: int, on: list[int]) -> tuple[int, int]:
        """Rate and fixed time of what every rank of a ring sends to the next one, the slowest hop's."""
        hops = [(self.inner_rate, self._inside().fixed)] if on[0] > 1 else []
        hops += [(network.rate, network.fixed) for _, _, network in self._spans(ranks, on)]
        return min(rate for rate, _ in hops), max(fixed for _, fixed in hops)

    def _all_to_all(self, ranks: int, on: list[int]) -> tuple[int, int]:
        """Rate and fixed time of an all-to-all among so many ranks, by how many are together.

        Of what a rank sends, (g - 1) / (ranks - 1) stays inside its node, beside what leaves it; the slowest counts.
        """
        inside = Fraction(on[0] - 1, self.inner_rate) if on[0] > 1 and self._inside() else Fraction(0)
        seconds, fixed = inside, self._inside().fixed if on[0] > 1 else 0
        for before, together, network in self._spans(ranks, on):
            seconds = max(seconds, Fraction(together - before, network.rate))
            fixed = max(fixed, network.fixed)
        return int(Fraction(ranks - 1) / seconds), fixed

    # ---- pools -------------------------------------------------------------------------------

    def _pools(self, links: Sequence[Link]) -> Iterator[Pool]:
        peers = {link.name for link in self.node.links if self._is_peer(link)}
        for pool in self.node.pools:
            members = [member for member in pool.members if member.name not in peers]
            owners = {self._owner(member.name) for member in members}
            if not members or not owners & {0, -1}:
                continue
            if owners == {0}:
                for s in range(self.stages):
                    own = tuple(replace(member, name=self._at(member.name, s)) for member in members)
                    yield Pool(self._at(pool.name, s), (*own, *self._between_devices(pool, links, s)), pool.rate)
                continue
            copies: list[Member] = []
            for member in members:
                if self._owner(member.name) < 0:
                    copies.append(member)
                elif self._owner(member.name) == 0:
                    copies += [replace(member, name=self._at(member.name, s)) for s in range(self.stages)]
            # a pool of some of a node's devices, such as a PCIe switch, is shared by fewer
            behind = min(sum(owner >= 0 for owner in owners), self.per_node) or self.per_node
            rate = None if pool.rate is None else max(int(pool.rate * self.share * self.per_node / behind), 1)
            yield Pool(pool.name, (*copies, *self._between_devices(pool, links)), rate)

    def _between_devices(self, pool: Pool, links: Sequence[Link], stage: int = -1) -> Iterator[Member]:
        """What crosses a pool on its way from device to device: to other stages inside a node, and round rings.

        stage: the only one that it is of, -1 for a pool of all devices.
        """
        of_pool = {member.name: member for member in pool.members}
        ways = [(end, self._peer(*way)) for end, way in (("source", (0, 1)), ("target", (1, 0)))]
        charged = {end: of_pool[link.name] for end, link in ways if link is not None and link.name in of_pool}
        if not charged or self.inner is None:
            return
        stem = self.inner.name.partition("@")[0]
        if stage < 0:  # each link is one way for one device and the other way for another
            charged = dict([next(iter(charged.items()))])
        for end, member in charged.items():
            for link in links:
                at = stage < 0 or getattr(link, end) == self._tier(self.node.home(0).name, stage)
                if at and link.name.startswith(f"{stem}@") and "-" in link.name:
                    yield replace(member, name=link.name)
        charge = sum(Fraction(member.charge) for member in charged.values())
        like = next(iter(charged.values()))
        for axis, ranks, on in self.rings():
            part = self._charges(axis, ranks, on).get(stem) if ranks > 1 else None
            if part:
                for s in range(self.stages) if stage < 0 else (stage,):
                    yield replace(like, name=rank_link(axis, s), charge=charge * part)

    def _egress(self, links: tuple[Link, ...]) -> Iterator[Pool]:
        """What a stage can send, and receive, of all that goes over the same wires, inside and between nodes: that
        of other stages, and round its rings."""
        rates = {self.inner.name.partition("@")[0]: self.inner_rate} if self.inner is not None else {}
        rates |= {network.name: network.rate for _, network in self.levels}
        rings = [(axis, self._charges(axis, ranks, on)) for axis, ranks, on in self.rings() if ranks > 1]
        for stem, rate in rates.items():
            own = [link for link in links if link.name.startswith(f"{stem}@") and "-" in link.name]
            for s in range(self.stages):
                home = self._tier(self.node.home(0).name, s)
                round_it = tuple(Member(rank_link(axis, s), part[stem]) for axis, part in rings if part.get(stem))
                for way, end in (("out", "source"), ("in", "target")):
                    members = *(Member(link.name) for link in own if getattr(link, end) == home), *round_it
                    if len(members) > 1 and (way == "out" or len(members) > len(round_it)):
                        yield Pool(f"{stem}_{way}@{s}", members, rate)

    def _charges(self, axis: str, ranks: int, on: list[int]) -> dict[str, Fraction]:
        """Of each byte that a rank sends along an axis, how much goes over links inside nodes and over each network.

        A ring uses one after the other, each at its full rate for its part of the time: what it charges is the mean.
        """
        inside = self.inner.name.partition("@")[0] if self.inner is not None else ""
        spans = [*self._spans(ranks, on)]
        if axis == "neighbour":  # as the rank whose hop is the slowest
            hops = [(self.inner_rate, inside)] if on[0] > 1 else []
            return {min([*hops, *((network.rate, network.name) for _, _, network in spans)])[1]: Fraction(1)}
        if axis == "expert":
            found = {network.name: Fraction(together - before, ranks - 1) for before, together, network in spans}
            return {inside: Fraction(on[0] - 1, ranks - 1), **found}
        whole, found = Fraction(ranks - 1, ranks), {inside: Fraction(on[0] - 1, on[0])}
        for before, together, network in spans:
            k = -(-together // before)
            found[network.name] = Fraction(k - 1, k * before)
        return {stem: part / whole for stem, part in found.items()}
