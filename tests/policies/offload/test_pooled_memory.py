"""A pool of memory: what several nodes carry together, and stalls that fall as its bandwidth grows."""

from __future__ import annotations

import pytest

from sim.errors import PolicyError
from sim.experiment import simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.policies.offload.pooled_memory import pool_nodes, pool_rate
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
