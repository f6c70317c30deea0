"""Blocks that NCCL's stream holds: by hand, and where none is held as the engine's own allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim import load_profile, simulate
from sim.analysis import card_reading
from sim.analysis.recorded_streams import _asked, recorded_exchanges, recorded_in_paddle, reserved_with_streams
from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.hardware.platform import Dispatch, Link, Platform, rank_link
from sim.layout import lay_out
from sim.plan import Plan
from sim.rewrites.ranks import all_ranks
from sim.rewrites.rewriter import with_columns
from sim.trace import Trace, TraceBuilder
from sim.trace.launched import AWAITED
from sim.trace.op import Ring
from tests.rewrites.test_replicas import line
from workloads import transformer

MIB = 2**20
SMALL = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 256, "n_embd": 256, "n_layer": 3, "n_head": 4}
CACHING = {"tiers.hbm.allocator": "caching"}
POLICIES = ("keep_all", "full_recompute", "swap_all", "vdnn", "gist", "capuchin", "lru_tiering")
LAYERS, GATHERED, MS = 6, 32 * MIB, 10**6
AHEAD = Dispatch("eager", 10, 10, 10)
"""A CPU that takes 10 ns per op, on a machine on which each takes a millisecond."""


def layers(between: bool, passes: int = 1, axis: str = "tensor") -> Trace:
    """Six times a collective whose result a product reads; between these another op or none."""
    b = TraceBuilder()
    x, own = b.tensor("x", MIB, "input"), b.tensor("own", MIB, "input")
    for i in range(LAYERS):
        whole = b.tensor(f"whole{i}", GATHERED, "temporary")
        ring = Ring(axis, 2, passes)
        b.op(f"gather{i}", "collective", reads=[x], writes=[whole], bytes=1, ring=ring, duration=MS)
        if between:
            b.op(f"beside{i}", "matmul", reads=[own], writes=[b.tensor(f"z{i}", 64)], duration=MS)
        b.op(f"product{i}", "matmul", reads=[whole], writes=[b.tensor(f"y{i}", 64)], duration=MS)
    return b.build()


def machine(bare: Platform) -> Platform:
    """A machine whose first device has a caching allocator, a link for collectives and a quick CPU."""
    tier = replace(bare.tiers[0], allocator=replace(bare.tiers[0].allocator, name="caching"))
    rings = (Link(rank_link(axis, 0), tier.name, tier.name, 10**9) for axis in ("tensor", "data"))
    return replace(bare, tiers=(tier, *bare.tiers[1:]), links=(*bare.links, *rings), dispatch=(AHEAD,))


def segments(trace: Trace, pytorch: str, launches: int, bare: Platform | None = None) -> int:
    """How many segments of the gathered size the first device's allocator takes."""
    log = replay(Plan(trace), machine(bare or line(1, 1)))
    recorded = recorded_exchanges(log, 0, pytorch)
    reserved = reserved_with_streams(log, 0, recorded, launches)
    assert reserved is not None
    return reserved // GATHERED


@pytest.mark.parametrize(
    ("between", "passes", "pytorch", "expected"),
    [
        (False, 1, "2.1", LAYERS),
        (False, 1, "2.2", 1),  # a gather that is waited for at once
        (False, 2, "2.7.1", LAYERS),  # an all-reduce
        (True, 1, "2.3.0a0", LAYERS),
        (True, 2, "2.8", 1),
        (True, 1, "2.13", 1),
    ],
)
def test_which_collectives_hold_their_blocks(between: bool, passes: int, pytorch: str, expected: int) -> None:
    """A CPU far ahead reuses none of what is recorded, and all else at once."""
    assert segments(layers(between, passes), pytorch, 1024) == expected


@pytest.mark.parametrize("ahead", [1, 2, 3, 5])
def test_a_cpu_that_is_fewer_layers_ahead_reuses_more(ahead: int) -> None:
    """Three kernels each: of 3 n pending, a layer asks for its block as the gather n layers before has ended."""
    assert segments(layers(True), "2.3", 3 * ahead) == ahead


def test_what_another_device_runs_does_not_fill_the_queue_of_this_one() -> None:
    """Each has a thread that launches: of 6 pending, a device is two layers ahead, whatever runs beside it."""
    b = TraceBuilder()
    x, own, other = (b.tensor(name, MIB, "input") for name in ("x", "own", "other"))
    for i in range(LAYERS):
        whole = b.tensor(f"whole{i}", GATHERED, "temporary")
        ring = Ring("tensor", 2, 1)
        b.op(f"gather{i}", "collective", reads=[x], writes=[whole], bytes=1, ring=ring, duration=MS)
        for k, read in enumerate((own, whole)):
            b.op(f"product{i}.{k}", "matmul", reads=[read], writes=[b.tensor(f"y{i}.{k}", 64)], duration=MS)
        for k in range(12):
            made = b.tensor(f"z{i}.{k}", 64)
            b.op(f"beside{i}.{k}", "matmul", reads=[other], writes=[made], device=1, duration=MS // 4)
    assert segments(b.build(), "2.3", 6, line(2, 1)) == 2


def test_an_op_of_several_kernels_fills_the_queue_with_all_of_them() -> None:
    """Adam in a loop is eight calls for each parameter: a layer has ten kernels."""
    b = TraceBuilder({"optimizer": "adamw_loop"})
    x, w = b.tensor("x", MIB, "input"), b.tensor("w", 64, "weight")
    for i in range(LAYERS):
        whole, ring = b.tensor(f"whole{i}", GATHERED, "temporary"), Ring("tensor", 2, 1)
        b.op(f"gather{i}", "collective", reads=[x], writes=[whole], phase="update", bytes=1, ring=ring, duration=MS)
        w, old = b.tensor(f"w{i}", 64, "weight", replaces=w), w
        b.op(f"optimizer.w{i}", "optimizer", reads=[old], writes=[w], phase="update", duration=MS)
        made = b.tensor(f"y{i}", 64)
        b.op(f"product{i}", "matmul", reads=[whole], writes=[made], phase="update", duration=MS)
    trace = b.build()
    assert [segments(trace, "2.3", 10 * ahead) for ahead in (1, 2, 3)] == [1, 2, 3]


def test_a_tensor_of_two_collectives_is_held_until_both_have_ended() -> None:
    """By hand: of two gathers of one tensor the CPU knows that the first has ended, as it asks for another block."""
    b = TraceBuilder()
    x, whole, later = b.tensor("x", MIB, "input"), b.tensor("whole", GATHERED), b.tensor("later", GATHERED)
    b.op("make", "matmul", reads=[x], writes=[whole], duration=MS)
    for i in range(2):
        made, ring = b.tensor(f"y{i}", 64), Ring("tensor", 2, 2)
        b.op(f"gather{i}", "collective", reads=[whole], writes=[made], bytes=1, ring=ring, duration=MS)
    b.op("later", "matmul", reads=[x], writes=[later], duration=MS)
    log = replay(Plan(b.build()), machine(line(1, 1)))
    for recorded, expected in (([1], 1), ([2], 2), ([1, 2], 2), ([2, 1], 2)):
        assert (reserved_with_streams(log, 0, recorded, 2) or 0) // GATHERED == expected


@pytest.mark.parametrize(("stack", "expected"), [("eager", 3), ("fused", 1)])
def test_megatrons_cpu_waits_for_each_send(stack: str, expected: int) -> None:
    """Three sums, each followed by a send: it knows that what came before has ended."""
    b = TraceBuilder({"stack": stack})
    x = b.tensor("x", MIB, "input")
    for i in range(3):
        whole = b.tensor(f"whole{i}", GATHERED, "temporary")
        b.op(f"sum{i}", "collective", reads=[x], writes=[whole], bytes=1, ring=Ring("tensor", 2, 2), duration=MS)
        b.op(f"use{i}", "matmul", reads=[whole], writes=[b.tensor(f"y{i}", 64)], duration=MS)
        b.op(f"send{i}", "send", reads=[x], bytes=1, group=f"s{i}", duration=MS)
        b.op(f"recv{i}", "recv", writes=[b.tensor(f"r{i}", 64)], device=1, bytes=1, group=f"s{i}", duration=MS)
    assert segments(b.build(), "2.7", 1024, line(2, 1)) == expected


def test_a_cpu_that_waits_for_the_device_reuses_all() -> None:
    """AMP's loss scale is read before the update: what forward has held is free for it."""
    b = TraceBuilder({"precision": "amp_fp16"})
    x = b.tensor("x", MIB, "input")
    for i, phase in enumerate(("forward", "update")):
        whole = b.tensor(f"whole{i}", GATHERED, "temporary")
        kwargs = {"ring": Ring("tensor", 2, 2), "duration": MS, "bytes": 1, "phase": phase}
        if phase == "update":
            b.op("step", "elementwise", reads=[x], writes=[b.tensor("s", 64)], duration=MS, phase=phase)
        b.op(f"sum{i}", "collective", reads=[x], writes=[whole], **kwargs)
        b.op(f"use{i}", "matmul", reads=[whole], writes=[b.tensor(f"y{i}", 64)], duration=MS, phase=phase)
    assert segments(b.build(), "2.7", 1024) == 1


@pytest.mark.parametrize(
    "policy", ["keep_all", "full_recompute", "swap_all", "vdnn", "lru_tiering", "gist", "capuchin"]
)
def test_where_nothing_is_held_it_is_the_engines_own_allocator(policy: str) -> None:
    platform = load_profile("a100_40_pcie", overrides={**CACHING, "dispatch": "cpu"})
    trace = transformer(SMALL, batch=8, sequence=256, precision="amp_bf16", attention="eager")
    log = simulate(trace, platform, policy).log
    rows = log.reserved[log.reserved[:, 1] == 0]
    assert reserved_with_streams(log, 0, [], 1024) == rows[:, 2].cumsum().max()


def test_a_layout_reserves_more_under_an_older_version() -> None:
    trace = transformer(SMALL, batch=8, sequence=256, precision="mixed_bf16", attention="flash", loss="vocab_parallel")
    machine = load_profile("a100_80_sxm", overrides={"devices": "8", "dispatch": "cpu", **CACHING})
    log = simulate(*lay_out(trace, machine, {"tp": 4, "sequence_parallel": True, "async_sums": True})).log
    (new,), (middle,), (old,) = (card_reading(log, version) for version in ("2.8", "2.3", "2.1"))
    assert new == card_reading(log)[0]
    assert new.tensors < middle.tensors <= old.tensors
    assert {(each.context, each.communicators) for each in (middle, old)} == {(new.context, new.communicators)}


@pytest.mark.parametrize(("axis", "expected"), [("data", LAYERS), ("tensor", 1)])
def test_paddle_holds_what_replicas_exchange_and_nothing_of_tensor_parallelism(axis: str, expected: int) -> None:
    log = replay(Plan(layers(True, axis=axis)), machine(line(1, 1)))
    assert (reserved_with_streams(log, 0, recorded_in_paddle(log, 0), 1024) or 0) // GATHERED == expected


@pytest.mark.parametrize("layout", [{"tp": 2, "sum_each": True}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_every_rank_reads_what_the_one_that_stands_for_all_does(layout: dict) -> None:
    """Members of a group have one interval in the log, and one communicator."""
    trace = transformer(SMALL, batch=4, sequence=256, precision="mixed_bf16", attention="flash", loss="vocab_parallel")
    machine = load_profile("a100_80_sxm", overrides={"devices": "8", "dispatch": "cpu", **CACHING})
    divided, platform = lay_out(trace, machine, layout)
    every = all_ranks(divided)
    (one,) = card_reading(simulate(divided, platform).log, "2.3")
    both = card_reading(simulate(every, machine).log, "2.3")
    assert len(both) == 2
    assert {each.communicators for each in both} == {one.communicators}
    assert {each.tensors for each in both} == {one.tensors}


@pytest.mark.parametrize("wrong", ["two", "", None, 2.3, b"2.3", "-1.0", True])
def test_what_is_no_version_is_refused(wrong: object) -> None:
    log = replay(Plan(layers(True)), machine(line(1, 1)))
    with pytest.raises(TiersimError, match="pytorch: needs a version"):
        recorded_exchanges(log, 0, wrong)  # type: ignore[arg-type]


def test_after_a_wait_the_cpu_has_dispatched_an_op_when_it_starts_and_the_next_one_a_dispatch_later() -> None:
    """By hand, 1 us a dispatch and 5 an op: the wait is over at 6 us, op 1 starts at 7, and op 2 is dispatched at 8."""
    b = TraceBuilder()
    for i in range(3):
        b.op(f"op{i}", "matmul", reads=[b.tensor(f"x{i}", 64, "input")], writes=[b.tensor(f"y{i}", 64)], duration=5_000)
    trace = b.build()
    trace = with_columns(trace, {**trace.meta, AWAITED: [1]})
    log = replay(Plan(trace), replace(machine(line(1, 1)), dispatch=(Dispatch("eager", 1_000, 1_000, 1_000),)))
    asked = _asked(log, [(1_000, 6_000, 0), (7_000, 12_000, 1), (12_000, 17_000, 2)], 100)
    assert {op: found for op, ((_, found),) in asked.items()} == {0: 1_000, 1: 7_000, 2: 8_000}
