"""A pool of memory: what several nodes carry together, and stalls that fall as its bandwidth grows."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from sim.conformance.order import check_ops
from sim.conformance.replayed import LawBroken, replayed
from sim.errors import OutOfMemory, PolicyError
from sim.experiment import problem_for, simulate
from sim.hardware.platform import Link, Member, Platform, Pool, Tier
from sim.hardware.profile import load_profile
from sim.plan import Drop, Move
from sim.policies.offload import pooled_memory
from sim.policies.offload.pooled_memory import PooledMemory, pool_nodes, pool_rate
from sim.solvers.load_curve import Absence
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, facts, machine

MIB = 1 << 20
SIZE = 256 * MIB


def supernode(budget: int = 1 << 40, **overrides: str) -> Platform:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_profile("cloudmatrix384_die", overrides=changes).with_budget(budget)


def net(count: int, took: int) -> Trace:
    """Results that backward reads, the last first, with an op between that needs the memory of all of them."""
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    kept = []
    for n in range(count):
        kept.append(b.tensor(f"y{n}", SIZE, layer=n))
        b.op(f"f{n}", "conv", reads=[x], writes=kept[-1:], layer=n, duration=took)
    d = b.tensor("d", 1, "temporary")
    b.op("loss", "loss", writes=[d], workspace=count * SIZE, duration=took, phase="backward")
    for n in reversed(range(count)):
        made = b.tensor(f"d{n}", 1, "temporary", layer=n)
        b.op(f"f{n}.bwd", "conv", reads=[d, kept[n], x], writes=[made], layer=n, duration=took, phase="backward")
        d = made
    return b.build(outputs=(), carry=())


LINKS = ("d2h", "h2d", *(f"{way}{n}" for way in ("in", "out") for n in range(1, 6)))
PORTS = {f"links__{link}__rate": "170 GB/s" for link in LINKS}


@pytest.mark.parametrize(
    ("links", "nodes", "rate"),
    [({}, 1, 35), ({}, 4, 140), ({}, 6, 196), (PORTS, 1, 160), (PORTS, 2, 196), (PORTS, 3, 196)],
)
def test_nodes_add_up_to_the_port_of_the_die_and_none_gives_more_than_its_own(links, nodes, rate) -> None:
    platform = supernode(**links)
    assert pool_rate(platform, pool_nodes(platform)[:nodes], "hbm") == rate * 10**9
    # and in a run: all leave at once, so that the last copy ends when all bytes have crossed at that rate
    trace = net(12, took=10)
    done = facts(simulate(trace, platform.with_budget(12 * SIZE + 64), "pooled_memory", nodes=nodes))
    out = [(start, end) for lane, _, start, end in done.moves if lane.startswith(("d2h", "out"))]
    took = max(end for _, end in out) - min(start for start, _ in out)
    assert took == pytest.approx(12 * SIZE / rate, rel=0.05)
    assert set(done.result.plan.notes["nodes"].values()) == {12 * SIZE // nodes}


def test_copies_that_fit_between_uses_cost_no_time_and_stalls_fall_with_the_rate_of_the_pool() -> None:
    budget = 8 * SIZE + 64
    ample = simulate(net(8, took=10**8), supernode(budget), "pooled_memory").summary()["stall_ns"]
    # what the first of backward needs cannot return before the large op has ended
    assert ample["transfer"] == supernode().move_ns(SIZE, "host", "hbm")
    trace, budget = net(24, took=10), 24 * SIZE + 64
    stall = {
        rate: simulate(trace, supernode(budget, pools__die_in__rate=rate, pools__die_out__rate=rate), "pooled_memory")
        for rate in ("98 GB/s", "49 GB/s")
    }
    fast, slow = (stall[rate].log.end for rate in ("98 GB/s", "49 GB/s"))
    assert slow / fast == pytest.approx(2, rel=0.05)


def pair(held: int) -> Trace:
    """Two results that one op reads, 20 ms after the memory of both was needed; `held` bytes for half of that time."""
    b = TraceBuilder()
    x, kept = b.tensor("x", 1, "input"), [b.tensor(f"y{n}", SIZE) for n in range(2)]
    for n in range(2):
        b.op(f"f{n}", "conv", reads=[x], writes=kept[n : n + 1], duration=2 * 10**7)
    b.op("large", reads=[x], workspace=2 * SIZE, duration=10**7)
    b.op("idle", reads=[x], duration=10**7)
    b.op("middle", reads=[x], workspace=held, duration=10**7)
    b.op("use", "conv", reads=kept, writes=[b.tensor("z", 1)], duration=10**7)
    return b.build(outputs=(), carry=())


def test_copies_back_queue_for_the_port_that_they_share() -> None:
    """Each takes 7.7 ms from a node of its own; together they take twice that, through a port as fast as one."""
    narrow = supernode(2 * SIZE + 64, pools__die_in__rate="35 GB/s")
    done = facts(simulate(pair(0), narrow, "pooled_memory"))
    back = sorted(start for lane, _, start, _ in done.moves if lane.startswith(("h2d", "in")))
    (idle, _), (middle, ended), (use, _) = done.ran("idle", "middle", "use")
    assert back == [idle, middle]
    assert use == ended, "both are there in time"


def test_what_is_on_its_way_back_is_counted_for_the_one_before_it() -> None:
    """Beside `middle` there is space for one of them: the other returns when that op has ended."""
    done = facts(simulate(pair(SIZE), supernode(2 * SIZE + 64, pools__die_in__rate="35 GB/s"), "pooled_memory"))
    back = sorted(start for lane, _, start, _ in done.moves if lane.startswith(("h2d", "in")))
    assert back[1] == done.ran("middle")[0][1]


def test_what_nodes_share_is_counted_at_the_lowest_charge_among_them() -> None:
    plain = machine()
    tiers = [Tier(f"node{n}", 1000, 1000, GB, kind="pooled") for n in (1, 2)]
    links = [Link(f"in{n}", f"node{n}", "hbm", 100) for n in (1, 2)]
    port = Pool("port", (Member("in1"), Member("in2", Fraction(2))), 60)
    both = replace(plain, tiers=(*plain.tiers, *tiers), links=(*plain.links, *links), pools=(port,))
    assert pool_rate(both, ("node1",), "hbm") == 60
    assert pool_rate(both, ("node2",), "hbm") == 30
    assert pool_rate(both, ("node1", "node2"), "hbm") == 60


def test_where_all_fits_nothing_moves_and_a_margin_begins_copies_earlier() -> None:
    trace = net(4, took=10**7)
    assert facts(simulate(trace, supernode(), "pooled_memory")).moves == []
    starts = []
    for margin in (0, "5 ms"):
        done = facts(simulate(trace, supernode(6 * SIZE), "pooled_memory", margin=margin))
        starts.append(max(start for lane, _, start, _ in done.moves if lane.startswith(("h2d", "in"))))
    # the last one: a copy of 7.7 ms is to end at 80 ms, or 5 ms earlier, and begins with an op of 10 ms
    assert starts == [70 * 10**6, 60 * 10**6]


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PolicyError, match="pooled_memory: toy has no tier of kind 'pooled' that devices"):
        simulate(net(1, 1), machine(), "pooled_memory")
    with pytest.raises(PolicyError, match="nodes is 0; expected"):
        simulate(net(1, 1), supernode(), "pooled_memory", nodes=0)


def test_a_node_is_free_again_for_what_leaves_when_its_tensor_comes_back() -> None:
    """Tensor 0 is back at op 3, where tensor 2 leaves: its node then holds nothing, the other one tensor 1."""
    nodes = ("host", "pool1")
    away = [Absence(t, size * MIB, left, back, 0, 0, 0) for t, size, left, back in
            ((0, 100, 0, 3), (1, 10, 1, 9), (2, 20, 3, 8), (3, 1, 4, 5))]  # fmt: skip
    sent = dict.fromkeys(nodes, 0)
    where = pooled_memory._spread(dict.fromkeys(nodes, 1 << 40), away, sent)
    assert [where[one] for one in away] == ["host", "pool1", "host", "pool1"]
    assert sent == {"host": 120 * MIB, "pool1": 11 * MIB}
    # and it has space for as much as before: 100 MiB go where 100 MiB have come back from
    full = {"host": 105 * 10**6, "pool1": 20 * 10**6}
    again = [away[0], away[1], Absence(2, 100 * MIB, 3, 8, 0, 0, 0)]
    assert pooled_memory._spread(full, again, dict.fromkeys(nodes, 0))[again[2]] == "host"


def small(*full: str, capacity: str = "600 MB") -> Platform:
    """A supernode for `net(8, ...)`, of which some nodes hold two tensors."""
    return supernode(8 * SIZE + 64, **{f"tiers__{node}__capacity": capacity for node in full})


def test_a_node_without_space_is_passed_over() -> None:
    # a node's share of 24 is 4
    few = supernode(24 * SIZE + 64, tiers__pool1__capacity="600 MB", tiers__pool4__capacity="1 MB")
    done = simulate(net(24, took=10), few, "pooled_memory")
    assert done.plan.notes["nodes"]["pool4"] == 0
    assert done.summary()["peak_by_tier"]["pool1"] == done.plan.notes["nodes"]["pool1"] == 2 * SIZE
    with pytest.raises(
        OutOfMemory, match=r"nor do that many fit in 'host' \(1,000,000 B of 1,000,000 B free\), 'pool1'"
    ):
        simulate(net(8, took=10), small("host", *(f"pool{n}" for n in range(1, 6)), capacity="1 MB"), "pooled_memory")


def test_devices_share_the_space_of_a_node() -> None:
    """Of eight tensors on each of two devices a node of this size has space for three, one of each device."""
    b, d = TraceBuilder(), [0, 0]
    for device in (0, 1):
        d[device] = b.tensor(f"x{device}", 1, "input")
        kept = [b.tensor(f"y{device}.{n}", SIZE) for n in range(8)]
        for n, y in enumerate(kept):
            b.op(f"f{device}.{n}", "conv", reads=[d[device]], writes=[y], device=device, duration=10)
        end = b.tensor(f"d{device}", 1, "temporary")
        b.op(f"loss{device}", "loss", writes=[end], workspace=8 * SIZE, device=device, duration=10, phase="backward")
        for n in reversed(range(8)):
            made, above = b.tensor(f"d{device}.{n}", 1, "temporary"), end
            b.op(f"b{device}.{n}", "conv", reads=[above, kept[n]], writes=[made], device=device, duration=10,
                 phase="backward")  # fmt: skip
            end = made
    full = {f"tiers__{node}__capacity": "900 MB" for node in ("pool1", "pool2")}
    done = simulate(b.build(outputs=(), carry=()), supernode(8 * SIZE + 64, devices="2", **full), "pooled_memory")
    peaks = done.summary()["peak_by_tier"]
    assert peaks["pool1"] == peaks["pool2"] == 2 * SIZE


# ---- fault injection: the policy broken in its mechanism, and what sees it ----------------------------


def stall(platform: Platform) -> int:
    """What `net(8, 100 ms)` waits for copies."""
    return simulate(net(8, took=10**8), platform, "pooled_memory").summary()["stall_ns"]["transfer"]


def test_a_prefetch_that_begins_at_its_use_is_seen_in_the_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = supernode(8 * SIZE + 64)
    copy = platform.move_ns(SIZE, "host", "hbm")
    assert stall(platform) == copy, "only the first of backward has to wait"
    monkeypatch.setattr(pooled_memory, "_starts", lambda _, __, chosen, *___: [(one, one.back) for one in chosen])
    assert stall(platform) == 8 * copy


def test_a_tensor_that_is_lost_in_the_pool_breaks_the_law() -> None:
    """Its node forgets y3 while it is away: there is nothing to bring back, and backward runs f3 again."""
    trace, platform = net(8, took=10**8), supernode(8 * SIZE + 64)
    plan = PooledMemory().plan(problem_for(trace, platform))
    check_ops(replayed(PooledMemory(), plan, trace, platform))
    node = next(a.to for a in plan.actions if isinstance(a, Move) and a.tensor == trace.tensor_id("y3"))
    lost = replace(plan, actions=(*plan.actions, Drop("y3", node, after="f4")))
    with pytest.raises(LawBroken, match=r"op 'f3' is recomputed .*; the policy declares no recomputation"):
        check_ops(replayed(PooledMemory(), lost, trace, platform))


@pytest.mark.parametrize("part", ["device", "node"])
def test_a_capacity_that_is_ignored_does_not_run(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, platform = net(8, took=10**8), small("pool1", "pool2", capacity="1 MB")
    assert simulate(trace, platform, "pooled_memory").log.complete
    if part == "device":
        whole = pooled_memory.longest_away
        monkeypatch.setattr(pooled_memory, "longest_away", lambda curve, limit: whole(curve, 2 * limit))
    else:
        spread = pooled_memory._spread
        monkeypatch.setattr(pooled_memory, "_spread", lambda space, *more: spread(dict.fromkeys(space, 1 << 40), *more))
    with pytest.raises(OutOfMemory):
        simulate(trace, platform, "pooled_memory")
