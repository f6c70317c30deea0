"""A pool of memory: what several nodes carry together, and stalls that fall as its bandwidth grows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.conformance.order import check_ops
from sim.conformance.replayed import LawBroken, replayed
from sim.errors import OutOfMemory, PolicyError
from sim.experiment import problem_for, simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.plan import Drop, Move
from sim.policies.offload import pooled_memory
from sim.policies.offload.pooled_memory import PooledMemory, pool_nodes, pool_rate
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import facts, machine

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


def test_where_all_fits_nothing_moves_and_a_margin_begins_copies_earlier() -> None:
    trace = net(4, took=10**7)
    assert facts(simulate(trace, supernode(), "pooled_memory")).moves == []
    starts = []
    for margin in (0, "5 ms"):
        done = facts(simulate(trace, supernode(6 * SIZE), "pooled_memory", margin=margin))
        starts.append(min(start for lane, _, start, _ in done.moves if lane.startswith(("h2d", "in"))))
    assert starts[1] <= starts[0]


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PolicyError, match="pooled_memory: toy has no tier of kind 'pooled' that devices"):
        simulate(net(1, 1), machine(), "pooled_memory")
    with pytest.raises(PolicyError, match="nodes is 0; expected"):
        simulate(net(1, 1), supernode(), "pooled_memory", nodes=0)


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
        monkeypatch.setattr(pooled_memory, "_spread", lambda _, *more: spread(supernode(), *more))
    with pytest.raises(OutOfMemory):
        simulate(trace, platform, "pooled_memory")
