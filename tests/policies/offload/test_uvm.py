"""Unified memory: faults before each copy in, the least recently used leaves, a page is in one place alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.errors import OutOfMemory, PolicyError
from sim.experiment import simulate
from sim.hardware.platform import Link, Tier
from sim.hardware.profile import load_profile
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, machine
from tests.policies.offload.test_lru_tiering import accesses


def test_a_miss_takes_a_fault_per_page_and_the_device_waits(run) -> None:
    # c pushes a out, from 200 on; a has three pages of 4 bytes: three faults of 5 ns, then 10 bytes, once b has left
    done = run(accesses("A B C"), "uvm", 20, page=4, fault=5)
    assert done.moves[:3] == [("d2h", "a", 200, 210), ("d2h", "b", 310, 320), ("h2d", "a", 320, 345)]
    assert done.ran("2C", "end.a") == [(210, 310), (345, 445)]
    assert run(accesses("A B C"), "uvm", 20, page=10, fault=0).ran("end.a") == [(330, 430)]


def test_pages_are_in_one_place_and_each_eviction_copies_them_out(run) -> None:
    text = "A B C a b c a b c"
    paged, tiered = (run(accesses(text), name, 20) for name in ("uvm", "lru_tiering"))
    assert max(paged.out.values()) > 10
    assert paged.out == paged.back
    assert sum(paged.out.values()) > sum(tiered.out.values())
    assert paged.host_peak < tiered.host_peak


def test_the_least_recently_used_leaves(run) -> None:
    done = run(accesses("A B C a D E"), "uvm", 30, fault=0)
    assert [tensor for lane, tensor, _, _ in done.moves if lane == "d2h"][:2] == ["b", "c"]


def step() -> Trace:
    """Two weights of 40 bytes, each read forward and updated in place."""
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    old, new = [], []
    for i in range(2):
        old.append(b.tensor(f"w{i}", 40, "weight"))
        b.op(f"f{i}", reads=[x, old[i]], writes=[b.tensor(f"y{i}", 1)], duration=10)
    for i in range(2):
        new.append(b.tensor(f"w{i}.new", 40, "weight", replaces=old[i]))
        b.op(f"u{i}", reads=[old[i]], writes=[new[i]], phase="update", duration=10)
    return b.build(outputs=new, carry=list(zip(new, old)))


def test_weights_that_do_not_fit_begin_in_the_host_and_migrate(run) -> None:
    done = run(step(), "uvm", 50, fault=0)
    # w0 leaves for w1 (10 to 50, 90); the update has w0 back for w1, and writes it in place; w1 began in the host
    assert done.moves[:2] == [("d2h", "w0", 10, 50), ("h2d", "w1", 50, 90)]
    assert done.peak <= 50
    assert done.host_peak <= 81  # the input, too
    with pytest.raises(OutOfMemory):
        run(step(), "uvm", 40)
    with pytest.raises(OutOfMemory, match="the start"):
        run(step(), "lru_tiering", 50)


def test_what_the_engine_reads_in_place_does_not_fault() -> None:
    on = machine(50)
    near = replace(on, engines=(replace(on.engines[0], reaches=("hbm", "host")), *on.engines[1:]))
    log = simulate(step(), near, "uvm").log
    assert log.end < simulate(step(), on, "uvm").log.end
    # w1 begins in the host and is read and overwritten there: 40 bytes are cheaper to read than to bring in
    assert not [row for row in log.events.itertuples() if row.why == "move"]


def test_where_all_fits_nothing_happens(run) -> None:
    assert not run(step(), "uvm").moves
    assert run(accesses("A B C a b c"), "uvm").time == run(accesses("A B C a b c"), "keep_all").time


def test_a_full_host_overflows_to_the_drive_behind_it() -> None:
    on = machine(20)
    small = (on.tiers[0], replace(on.tiers[1], capacity=15), Tier("ssd", ROOMY, ROOMY, GB, kind="nvme"))
    links = (*on.links, Link("write", "host", "ssd", GB), Link("read", "ssd", "host", GB))
    trace = accesses("A B C D")
    with pytest.raises(OutOfMemory):
        simulate(trace, replace(on, tiers=small[:2]), "uvm")
    assert simulate(trace, replace(on, tiers=small, links=links), "uvm").log.complete


def test_bad_values_are_refused() -> None:
    for wrong in ({"page": 0}, {"fault": -1}, {"fault": "5 GB"}):
        with pytest.raises(PolicyError, match=next(iter(wrong))):
            simulate(step(), machine(), "uvm", **wrong)
    with pytest.raises(PolicyError, match="no host tier"):
        simulate(step(), machine(host=False), "uvm")


def test_what_another_device_reads_at_this_moment_is_fetched_when_that_has_ended():
    b = TraceBuilder()
    x, small = b.tensor("x", 100, "input"), b.tensor("small", 100, "input")
    one, two = b.tensor("one", 10), b.tensor("two", 10)
    b.op("long", reads=[x], writes=[one], duration=1000)
    b.op("beside", reads=[small, x], writes=[two], device=1, duration=10)
    trace = b.build(outputs=(one, two))
    log = simulate(trace, load_profile("a100_80_sxm", overrides={"devices": "2"}), "uvm").log
    assert log.complete
    assert log.end > 1010
