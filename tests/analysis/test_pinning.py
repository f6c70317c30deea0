"""Pinning: as many bytes as the host held at most, at the rate of the profile, and no part of an iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim import load_profile, simulate
from sim.analysis.peak_memory import memory_over_time, peak_bytes, peak_memory
from sim.analysis.pinning import Pinning, pinning
from sim.engine.replay import replay
from sim.errors import ProfileError
from sim.plan import Move, Plan
from sim.trace import TraceBuilder
from tests.policies.offload.conftest import GB, machine
from tests.policies.offload.test_vdnn import net

LAYERS = net([("conv", 30, 20, 20), ("conv", 50, 20, 20), ("conv", 10, 20, 20)])


def pinned(rate: int, policy: str = "swap_all(unit=op)"):
    """The run on a host whose pages are locked at a rate in bytes/s, and beside it one of ordinary memory."""
    toy = machine(pageable=GB)
    tiers = tuple(replace(tier, pinning=rate if tier.name == "host" else 0) for tier in toy.tiers)
    return simulate(LAYERS, replace(toy, tiers=tiers), policy)


def test_what_the_host_held_at_most_is_pinned_once() -> None:
    done = pinned(GB // 4)
    held = done.summary()["peak_by_tier"]["host"]
    assert held > 0
    assert pinning(done.log) == Pinning(held, 4 * held)  # a quarter of a byte a nanosecond
    assert done.summary()["pinning_ns"] == 4 * held


def test_what_is_reserved_for_copies_that_never_begin_is_neither_held_nor_pinned() -> None:
    """w crosses for 300 ns, t and u are queued behind it: t is wanted back at 20, u at 340, and stays 40 ns."""
    b = TraceBuilder()
    w, x = b.tensor("w", 300, "input"), b.tensor("x", 10, "input")
    t, u, y, z = b.tensor("t", 100), b.tensor("u", 20), b.tensor("y", 10), b.tensor("z", 10)
    b.op("first", reads=[x], writes=[t, u], duration=10)
    b.op("second", reads=[x], writes=[y], duration=10)
    b.op("third", reads=[t, y], writes=[z], duration=320)
    b.op("fourth", reads=[u, z], writes=[b.tensor("end", 10)], duration=10)
    out = (Move(w, "host", before="first"), Move(t, "host", after="first"), Move(u, "host", after="first"))
    back = (Move(t, "hbm", before="third"), Move(u, "hbm", before="fourth"))
    toy = machine()
    tiers = tuple(replace(tier, pinning=GB // 4 if tier.name == "host" else 0) for tier in toy.tiers)
    log = replay(Plan(b.build(), (*out, *back)), replace(toy, tiers=tiers))
    assert log.counters["moves_cancelled"] == 1
    assert peak_bytes(log)["host"] == peak_memory(log, "host").bytes == 300 + 20
    assert int(memory_over_time(log, "host")[1].max()) == 320
    assert pinning(log) == Pinning(320, 4 * 320)
    # the device's own memory is taken as it is reserved
    assert peak_bytes(log)["hbm"] == int(log.changes[log.changes[:, 1] == 0, 2].cumsum().max())


def test_no_iteration_pays_for_it() -> None:
    assert pinned(1).log.end == pinned(0).log.end


def test_where_nothing_is_offloaded_nothing_is_pinned_and_without_a_rate_it_is_not_known() -> None:
    assert pinning(pinned(GB, "keep_all").log) == Pinning(0, 0)
    assert pinning(pinned(0).log) == Pinning(0, None)
    assert pinned(0).summary()["pinning_ns"] is None


def test_ordinary_memory_is_not_pinned() -> None:
    assert pinned(GB, "save_on_cpu").summary()["peak_by_tier"]["host_pageable"] > 0
    assert pinned(GB, "save_on_cpu").summary()["pinning_ns"] == 0
    assert pinned(GB, "save_on_cpu(pin_memory=True)").summary()["pinning_ns"] > 0


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"tiers\.host\.pinning: value '0 B/s': expected more than zero"):
        load_profile("p100", overrides={"tiers.host.pinning": "0 B/s"})
