"""Rings, exchanges and sends over several networks, one outside the other, against the same counted rank by rank."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from sim.engine.replay import replay
from sim.errors import LayoutError, ProfileError
from sim.hardware.nodes import placed
from sim.hardware.platform import Network, Platform, rank_link
from sim.hardware.profile import load_profile
from sim.layout import lay_out
from sim.plan import Plan
from sim.trace.builder import TraceBuilder
from sim.trace.op import Ring
from tests.hardware.machine import MACHINE as FULL
from workloads import transformer

GB = 10**9
RACK, SPINE, HALL = (
    Network("rack", 4, 50 * GB, 3_000, 4),
    Network("spine", 16, 20 * GB, 5_000, 4),
    Network("hall", 64, 5 * GB, 9_000),
)


def machine(*networks: Network) -> Platform:
    node = load_profile("a100_80_sxm", overrides={"devices": "4"})
    return replace(node, networks=networks)


def inside(platform: Platform) -> tuple[int, int]:
    """Rate and fixed time of the links inside a node."""
    link = next(link for link in platform.links if (link.source, link.target) == ("hbm@0", "hbm@1"))
    rates = [pool.rate for pool in platform.pools if pool.rate and link.name in {m.name for m in pool.members}]
    return min([link.rate, *rates]), link.fixed


def level(platform: Platform, a: int, b: int) -> int:
    """Over what two devices exchange: 0 inside a node, 1 over the first network, …"""
    sizes = [4, *(network.per_node for network in platform.networks[1:])]
    return next((i for i, size in enumerate(sizes) if a // size == b // size), len(sizes))


def link_of(platform: Platform, axis: str, **ranks: int) -> tuple[int, int]:
    """Rate and fixed time of an axis' link."""
    found = placed(platform, 1, **{"ranks": 1, **ranks})
    link = next(link for link in found.links if link.name == rank_link(axis, 0))
    return link.rate, link.fixed


def pass_ns(rate: int, fixed: int, m: int, p: int) -> float:
    """What one pass of a collective over m bytes takes: each of p ranks sends (p - 1) / p of them."""
    return fixed + m * (p - 1) / p * 10**9 / rate


@pytest.mark.parametrize("networks", [(RACK,), (RACK, SPINE), (RACK, SPINE, HALL)], ids=len)
@pytest.mark.parametrize(("tensor", "replicas"), [(1, 4), (1, 16), (1, 64), (4, 16), (2, 32), (4, 64), (1, 256)])
def test_a_ring_goes_inside_out(networks: tuple[Network, ...], tensor: int, replicas: int) -> None:
    """Each level in turn: those together go round with what the level before has left each of them."""
    platform = machine(*(replace(networks[-1], nodes=0) if n is networks[-1] else n for n in networks))
    devices = [r * tensor for r in range(replicas)]
    figures = [inside(platform), *((n.rate, n.fixed) for n in platform.networks)]
    m, ns, left, together = 10**9, Fraction(0), Fraction(10**9), 1
    for i, (rate, fixed) in enumerate(figures):
        reached = sum(level(platform, 0, d) <= i for d in devices)
        groups = reached // together
        for _ in range(groups - 1):
            ns += fixed + left / groups * 10**9 / rate
        left, together = left / groups, reached
    assert together == replicas
    rate, fixed = link_of(platform, "data", ranks=replicas, tensor=tensor)
    assert pass_ns(rate, fixed, m, replicas) == pytest.approx(float(ns), rel=1e-7)


def test_equal_networks_one_outside_the_other_send_what_one_sends() -> None:
    """But for fixed times: of two levels a ring takes fewer steps."""
    two = machine(replace(RACK, fixed=0), replace(SPINE, rate=RACK.rate, fixed=0))
    one = machine(replace(RACK, fixed=0, nodes=0))
    assert link_of(two, "data", ranks=64) == link_of(one, "data", ranks=64)


@pytest.mark.parametrize("replicas", [4, 16, 32, 64])
def test_an_exchange_among_experts_sends_to_each_rank_over_what_joins_it(replicas: int) -> None:
    platform = machine(RACK, SPINE, replace(HALL, nodes=0))
    figures = [inside(platform), *((n.rate, n.fixed) for n in platform.networks)]
    m, bytes_over = 10**9, [Fraction(0)] * 4
    for other in range(1, replicas):
        bytes_over[level(platform, 0, other)] += Fraction(m, replicas)
    used = [i for i, size in enumerate(bytes_over) if size]
    expected = max(figures[i][1] for i in used) + max(bytes_over[i] * 10**9 / figures[i][0] for i in used)
    rate, fixed = link_of(platform, "expert", ranks=replicas, experts=replicas)
    assert pass_ns(rate, fixed, m, replicas) == pytest.approx(float(expected), rel=1e-7)


@pytest.mark.parametrize(("tensor", "context"), [(1, 16), (1, 64), (4, 16)])
def test_the_slowest_hop_of_a_ring_of_neighbours_counts(tensor: int, context: int) -> None:
    platform = machine(RACK, SPINE, replace(HALL, nodes=0))
    figures = [inside(platform), *((n.rate, n.fixed) for n in platform.networks)]
    places = [rank * tensor for rank in range(context)]
    hops = [figures[level(platform, a, b)] for a, b in zip(places, [*places[1:], places[0]], strict=True)]
    found = link_of(platform, "neighbour", tensor=tensor, context=context, neighbours=True)
    assert found == (min(rate for rate, _ in hops), max(fixed for _, fixed in hops))


def test_stages_send_over_the_innermost_network_that_joins_them() -> None:
    base = transformer(
        {"model_type": "gpt2", "n_layer": 8, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 64},
        batch=8, sequence=16,
    )  # fmt: skip
    _, found = lay_out(base, machine(RACK, SPINE), {"pp": 8, "dp": 4, "micro_batches": 2})  # a stage is a node
    name = {(link.source, link.target): link.name for link in found.links if "-" in link.name}
    assert name["hbm@0", "hbm@1"].startswith("rack@")  # nodes 0 and 1 of the first four
    assert name["hbm@3", "hbm@4"].startswith("spine@")
    pools = {pool.name: pool.rate for pool in found.pools}
    assert (pools["rack_out@0"], pools["spine_out@0"]) == (RACK.rate, SPINE.rate)


def test_the_outermost_network_says_how_many_devices_there_are() -> None:
    base = transformer(
        {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 64},
        batch=128, sequence=2,
    )  # fmt: skip
    lay_out(base, machine(RACK, SPINE), {"dp": 64})
    with pytest.raises(LayoutError, match=r"dp: 'spine' of a100_80_sxm joins 64 devices, and 128 are needed"):
        lay_out(base, machine(RACK, SPINE), {"dp": 128})


OUTER = """
[networks.hall]
source = "a run"
standing = "measured"
per_node = {per_node}
rate = "0.1 GB/s"
fixed = "9 us"
"""


def test_networks_are_in_order_from_inside_to_outside(tmp_path) -> None:
    """Whatever their order in the file."""
    text = FULL.replace("[networks.net]", OUTER.format(per_node=8) + "\n[networks.net]")
    (tmp_path / "m.toml").write_text(text)
    assert [(n.name, n.per_node) for n in load_profile(tmp_path / "m.toml").networks] == [("net", 2), ("hall", 8)]


@pytest.mark.parametrize(
    ("per_node", "nodes", "said"),
    [
        (3, "", "networks.hall.per_node: value 3: joins groups of whole nodes of 2, as 'net' has them; nearest: 4"),
        (2, "", "networks.hall.per_node: value 2: joins groups of whole nodes of 2, as 'net' has them; nearest: 4"),
        (8, "nodes = 3\n", "networks.net.nodes: value 3: 'hall' joins groups of 4 of its nodes; nearest: 4"),
    ],
)
def test_networks_that_do_not_lie_one_outside_the_other_are_named(per_node, nodes, said, tmp_path) -> None:
    text = FULL.replace("[networks.net]", f"[networks.net]\n{nodes}") + OUTER.format(per_node=per_node)
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(ProfileError) as caught:
        load_profile(tmp_path / "m.toml")
    assert f"m.toml: {said}" in str(caught.value)


# ---- one wire for all that goes over it ------------------------------------------------------------------
# (within 1e-4: each of the chunks of a collective ends on a whole nanosecond)


def exchanged(platform: Platform, axis: str, ring_bytes: int, sent: int, later: int = 0) -> tuple[int, int]:
    """When a collective of the first stage, and a send to the second one, which begins at once, end.

    later: ns after which the collective begins.
    """
    b = TraceBuilder()
    x, y, there, z = b.tensor("x", sent, "input"), b.tensor("y", 8), b.tensor("there", sent), b.tensor("z", 8)
    b.op("send", "send", reads=[x], group="p2p", bytes=sent)
    b.op("compute", writes=[y], duration=later)
    b.op("sum", "collective", reads=[y], writes=[z], bytes=ring_bytes, ring=Ring(axis, 4, 2), group="sum")
    b.op("recv", "recv", writes=[there], group="p2p", device=1)
    log = replay(Plan(b.build()), platform)
    ends = {}
    for op, bytes, end in zip(*(log.interval(column).tolist() for column in ("op", "bytes", "end")), strict=True):
        if bytes:
            ends[log.trace.op_columns.name[op]] = end
    return ends["sum"], ends.get("recv", ends.get("send", 0))


def without_latency(*networks: Network, devices: int) -> Platform:
    """A node whose links send 100 GB/s, each way."""
    changes = {"devices": str(devices), "links.nvlink.rate": "100 GB/s", "links.nvlink.egress": "100 GB/s"}
    node = load_profile("a100_80_sxm", overrides={**changes, "links.nvlink.fixed": "0 us"})
    return replace(node, networks=networks)


def test_a_send_and_a_ring_inside_a_node_share_its_links() -> None:
    """Two stages of four ranks in a node of 100 GB/s: 30 GB round the ring, 50 GB to the next stage from the start.

    s   0    100 ms            700 ms      800 ms
        send 100 GB/s | send 50 | ring 50 | send 100 GB/s
    """
    platform = placed(without_latency(devices=8), 2, 1, 4)
    ring, send = exchanged(platform, "tensor", 30 * GB, 50 * GB, 100_000_000)
    assert (ring, send) == (pytest.approx(700_000_000, rel=1e-4), pytest.approx(800_000_000, rel=1e-4))


def test_a_ring_with_its_wires_to_itself_pays_the_latency_of_each_pass() -> None:
    """Three steps of 1 ms, twice, and 30 GB at 100 GB/s, whatever might share the links with it."""
    node = without_latency(devices=8)
    slow = replace(node, links=tuple(replace(ln, fixed=10**6) if "nvlink" in ln.name else ln for ln in node.links))
    ring, _ = exchanged(placed(slow, 2, 1, 4), "tensor", 30 * GB, 8, 10**7)
    assert ring - 10**7 == pytest.approx(306_000_000, rel=1e-4)


def test_a_ring_inside_and_a_send_between_nodes_have_wires_of_their_own() -> None:
    platform = placed(without_latency(replace(HALL, per_node=4, rate=10 * GB, fixed=0), devices=4), 2, 1, 4)
    ring, send = exchanged(platform, "tensor", 30 * GB, 5 * GB)
    assert (ring, send) == (pytest.approx(300_000_000, rel=1e-4), pytest.approx(500_000_000, rel=1e-4))


def test_a_ring_over_several_networks_charges_each_with_its_part() -> None:
    """Four replicas, two in a node: a third of the bytes leave it, each rank's half of what the first pass left.

    Of 6 GB, 4 go at 100 GB/s and 2 at 10: 240 ms alone. Beside a send of 5 GB over the network, which takes half of its
    10 GB/s, the ring has 5 for the third part of its bytes: 15 GB/s in all, until it ends after 400 ms.
    """
    platform = placed(without_latency(replace(HALL, per_node=2, rate=10 * GB, fixed=0), devices=2), 2, 4)
    alone, _ = exchanged(platform, "data", 6 * GB, 8)
    assert alone == pytest.approx(240_000_000, rel=1e-4)
    ring, send = exchanged(platform, "data", 6 * GB, 5 * GB)
    assert ring == pytest.approx(400_000_000, rel=1e-4)
    assert send == pytest.approx(400_000_000 + (5 - 2) / 10 * 1e9, rel=1e-4)


def test_rings_along_two_axes_in_a_node_share_its_links() -> None:
    """Layers divided among two ranks and two replicas of them, in one node: either ring leaves the other one half."""
    platform = placed(without_latency(devices=4), 1, 2, 2)
    b = TraceBuilder()
    x, y = b.tensor("x", 8, "input"), b.tensor("y", 8)
    b.op("data", "collective", reads=[x], writes=[y], bytes=40 * GB, ring=Ring("data", 2, 2), group="data")
    b.op(
        "tensor",
        "collective",
        reads=[x],
        writes=[b.tensor("z", 8)],
        bytes=10 * GB,
        ring=Ring("tensor", 2, 2),
        group="t",
    )
    log = replay(Plan(b.build()), platform)
    ends = sorted(end for end, bytes in zip(log.interval("end"), log.interval("bytes"), strict=True) if bytes)
    assert ends == [pytest.approx(200_000_000, rel=1e-4), pytest.approx(500_000_000, rel=1e-4)]


@pytest.mark.parametrize(
    ("stages", "replicas", "tensor", "across"),
    [(2, 1, 3, True), (2, 3, 1, True), (2, 1, 2, False), (2, 2, 1, False), (3, 1, 4, True), (1, 4, 3, False)],
)
def test_no_stage_and_no_group_that_divides_layers_straddles_two_nodes(
    stages: int, replicas: int, tensor: int, across: bool
) -> None:
    """Nodes of four: a second stage of three devices has the next node to itself, and its ring stays inside that."""
    node = machine(RACK)
    built = placed(node, stages, replicas, tensor=tensor)
    rates = {link.name: link.rate for link in built.links}
    inner = inside(node)[0]
    if stages > 1:
        over = next(name for name in rates if name.endswith("@0-1"))
        assert over.startswith("rack") == across, over
    for axis, ranks in (("tensor", tensor), ("data", replicas if stages > 1 else 1)):
        if ranks > 1:
            assert rates[rank_link(axis, stages - 1)] == pytest.approx(inner, rel=1e-6)


# ---- pools that all devices of a node share ----------------------------------------------------------
# MT-3000: a byte from one cluster's part of the memory to another's is read and written through the CPU's port, of
# 44 GB/s for all of them, and in the memory, of 120 GB/s.


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_through_a_port_that_all_devices_share(ranks: int) -> None:
    """By hand 44 GB/s over two bytes of each of the ranks' links; and as all ranks do that are written out."""
    node, size = load_profile("mt3000_cluster"), 100 * 10**6
    sent = 2 * (ranks - 1) * size // ranks

    def end(platform: Platform, devices: int, ring: Ring | None) -> int:
        b = TraceBuilder({})
        for device in range(devices):
            x, y = b.tensor(f"x{device}", size, "gradient"), b.tensor(f"y{device}", size, "gradient")
            about = {"device": device, "group": "sum", "bytes": sent, "ring": ring}
            b.op(f"sum{device}", "collective", reads=[x], writes=[y], **about)
        return replay(Plan(b.build(outputs=[], carry=[])), platform).end

    one = end(placed(node, 1, ranks), 1, Ring("data", ranks, 2))
    assert one == pytest.approx(sent / (44 / (2 * ranks)), rel=2e-3)
    assert one == pytest.approx(end(node, ranks, None), rel=2e-3)


@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (2, 2), (4, 1)])
def test_sends_through_a_port_that_all_devices_share(stages: int, tensor: int) -> None:
    """Two at once, there and back, of each rank of two stages: by hand 44 GB/s over two bytes of each."""
    platform, size = placed(load_profile("mt3000_cluster"), stages, 1, tensor=tensor), 22 * 10**7
    b = TraceBuilder({})
    for start in (0, 1):
        x = b.tensor(f"x{start}", size, "gradient")
        b.op(f"send{start}", "send", reads=[x], device=start, bytes=size, group=f"g{start}")
    for start, end in ((0, 1), (1, 0)):
        y = b.tensor(f"y{start}", size, "gradient")
        b.op(f"recv{start}", "recv", writes=[y], device=end, bytes=size, group=f"g{start}")
    log = replay(Plan(b.build(outputs=[], carry=[])), platform)
    assert log.end == pytest.approx(size / (44 / (2 * 2 * tensor)), rel=2e-3)


def test_rings_and_sends_are_members_of_what_all_devices_share() -> None:
    """Each is charged for both ends; of a pool the devices that are simulated have their part of a node's."""
    built = placed(load_profile("mt3000_cluster"), 2, 1, tensor=2)
    for name in ("cpu_port", "node_ddr"):
        (pool,) = [pool for pool in built.pools if pool.name == name]
        charges = {member.name: member.charge for member in pool.members}
        assert [charges[each] for each in ("peer@0-1", "peer@1-0", "tensor@0", "tensor@1")] == [2] * 4
        assert pool.rate == {"cpu_port": 22 * GB, "node_ddr": 60 * GB}[name]
