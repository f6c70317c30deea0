"""Lower bounds: by hand on the drawing in conftest, and against brute force over random traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.analysis import bounds
from sim.engine.replay import replay
from sim.errors import OutOfMemory
from sim.hardware.platform import Engine, Platform, Tier
from sim.plan import Plan
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from tests.solvers.reruns import least_time, small_graphs

from .conftest import HBM, HOST, OUT, log_of, machine


def test_one_engine_cannot_beat_the_sum_of_its_ops(step):
    found = bounds(step)
    assert (found.critical_path_ns, found.engine_load_ns, found.transfer_ns, found.time_ns) == (410, 410, 0, 410)
    assert (found.makespan_ns, found.time_distance) == (770, 770 / 410 - 1)


def test_no_plan_holds_less_than_the_largest_op_needs(step):
    found = bounds(step)  # f: x 50, w 100, a 200; all else could be on the host
    assert (found.working_set_bytes, found.pinned_bytes, found.memory_bytes, found.op) == (350, 0, 350, "f")
    assert (found.peak_bytes, found.memory_distance) == (410, 410 / 350 - 1)


def test_without_another_tier_weights_stay(step):
    found = bounds(replace(step, platform=replace(step.platform, links=()), intervals=step.intervals[:2]))
    # h: y 10, a 200, gw 100, and w, whose storage w2 takes over
    assert (found.working_set_bytes, found.pinned_bytes, found.memory_bytes, found.op) == (310, 100, 410, "h")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=small_graphs(), less=st.integers(1, 3))
def test_no_legal_plan_fits_below_the_floor_even_if_it_drops_what_it_cannot_make_again(trace, less):
    """Brute force over all orders of runs and drops, those of inputs after their last read included."""
    tier = Tier("hbm", 1 << 30, 1 << 30, 10**9, device=0)
    alone = Platform("toy", (tier,), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}),), ())
    floor = bounds(replay(Plan(trace), alone)).memory_bytes
    assume(floor > less)
    assert least_time(trace, floor - less, staged=False, keep_inputs=False) is None
    with pytest.raises(OutOfMemory):
        replay(Plan(trace), alone.with_budget(floor - less))


def test_what_an_op_overwrites_is_held_once(step):
    update = bounds(log_of(only_update(), replace(machine(), links=()), [], [(0, HBM, 100, 0, -1, "placed")]))
    assert (update.working_set_bytes, update.pinned_bytes, update.memory_bytes) == (100, 0, 100)


def only_update() -> Trace:
    b = TraceBuilder()
    w = b.tensor("w", 100, "weight")
    b.op("u", reads=[w], writes=[b.tensor("w2", 100, "weight", replaces=w)])
    return b.build()


def test_a_partial_log_has_no_distance_in_time(step):
    assert bounds(replace(step, complete=False)).time_distance is None


def test_what_was_placed_out_of_reach_has_to_come_and_what_is_carried_has_to_return():
    b = TraceBuilder()
    w = b.tensor("w", 300, "weight")
    b.op("u", reads=[w], writes=[b.tensor("w2", 300, "weight", replaces=w)], duration=10)
    on_host = log_of(b.build(), machine(), [], [(0, HOST, 300, w, -1, "placed")])
    assert bounds(on_host).transfer_ns == 300  # links of 1 byte a ns
    assert bounds(on_host).time_ns == 300
    compressed = log_of(
        b.build(), machine(), [(0, 30, 0, OUT + 1, "move", 0, w, "", 30)], [(0, HOST, 300, w, -1, "placed")]
    )
    assert bounds(compressed).transfer_ns == 300  # in 30, but out 300
    on_device = log_of(b.build(), machine(), [], [(0, HBM, 300, w, -1, "placed")])
    assert bounds(on_device).transfer_ns == 0


def test_the_chain_through_two_engines_is_longer_than_either_is_busy():
    b = TraceBuilder()
    x, y, z = (b.tensor(name, 1) for name in "xyz")
    b.op("a", writes=[x], duration=10)
    b.op("b", reads=[x], writes=[y], duration=20, engine="cpu")
    b.op("c", reads=[y], writes=[z], duration=10)
    found = bounds(log_of(b.build(), machine(), []))
    assert (found.critical_path_ns, found.engine_load_ns) == (40, 20)


def test_a_stage_waits_for_the_one_before_it():
    b = TraceBuilder()
    x, y, z = (b.tensor(name, 8) for name in "xyz")
    b.op("first", writes=[x], duration=10)
    b.op("send", "send", reads=[x], group="p")
    b.op("recv", "recv", writes=[y], group="p", device=1)
    b.op("second", reads=[y], writes=[z], duration=25, device=1)
    found = bounds(log_of(b.build(), machine(devices=2), []))
    assert (found.critical_path_ns, found.engine_load_ns) == (35, 25)


# ---- brute force -------------------------------------------------------------------------------


@st.composite
def traces(draw) -> Trace:
    """Sources (some weights, some overwritten in the end) and up to six ops with two engines and two devices."""
    b = TraceBuilder()
    there = [
        b.tensor(f"s{i}", draw(st.integers(0, 9)), draw(st.sampled_from(["weight", "input"])))
        for i in range(draw(st.integers(1, 3)))
    ]
    taken: set[int] = set()
    readers: dict[int, set[int]] = {}
    for i in range(draw(st.integers(1, 6))):
        device = draw(st.integers(0, 1))
        reads = draw(st.lists(st.sampled_from([t for t in there if t not in taken]), max_size=3)) if there else []
        for tensor in reads:
            readers.setdefault(tensor, set()).add(device)
        # what another device reads it may not overwrite
        replaces = draw(st.sampled_from([None, *(t for t in reads if readers[t] == {device})]))
        size = b.bytes_of(replaces) if replaces is not None else draw(st.integers(0, 9))
        new = b.tensor(f"t{i}", size, draw(st.sampled_from(["weight", "activation"])), replaces=replaces)
        taken |= {replaces} if replaces is not None else set()
        b.op(
            f"op{i}",
            reads=reads,
            writes=[new],
            duration=draw(st.integers(0, 9)),
            workspace=draw(st.integers(0, 5)),
            engine=draw(st.sampled_from(["", "", "cpu"])),
            device=device,
        )
        there.append(new)
    return b.build()


@given(trace=traces())
def test_the_critical_path_is_the_longest_of_all_chains(trace):
    ops = trace.ops
    ends: list[int] = []
    for op in ops:
        before = [ends[q.id] for q in ops[: op.id] if set(q.writes) & set(op.reads)]
        before += [ends[q.id] for q in ops[: op.id] if not q.engine and q.device == op.device]
        ends.append(max(before, default=0) + op.duration)
    loads: dict[tuple, int] = {}
    for op in ops:
        key = (op.engine, 0 if op.engine else op.device)
        loads[key] = loads.get(key, 0) + op.duration
    found = bounds(log_of(trace, machine(devices=2), []))
    assert (found.critical_path_ns, found.engine_load_ns) == (max(ends), max(loads.values()))


@given(trace=traces(), linked=st.booleans())
def test_the_floor_is_the_largest_set_that_must_be_there_together(trace, linked):
    platform = machine(devices=2)
    platform = platform if linked else replace(platform, links=())
    sources = [t.id for t in trace.tensors if trace.producer[t.id] < 0]
    log = log_of(trace, platform, [], [(0, HBM, trace.tensors[t].bytes, t, -1, "placed") for t in sources])

    def storage(tensor: int) -> int:
        older = trace.tensors[tensor].replaces
        return tensor if older is None else storage(older)

    floor = 0
    for op in trace.ops:
        held: dict[object, int] = {}
        if not op.engine and op.device == 0:
            held["workspace"] = op.workspace
            # storages: a tensor and what takes it over lie in one place
            held |= {storage(t): trace.tensors[t].bytes for t in (*op.reads, *op.writes)}
        if not linked:
            for source in sources:
                chain = [t for t in range(len(trace.tensors)) if storage(t) == source]
                used = [q.id for q in trace.ops if set(chain) & {*q.reads, *q.writes}]
                if (set(chain) & set(trace.outputs)) or (used and used[-1] >= op.id):
                    held[source] = trace.tensors[source].bytes
        floor = max(floor, sum(held.values()))
    found = bounds(log, "hbm")
    assert found.memory_bytes == floor
    assert found.working_set_bytes + found.pinned_bytes == floor
    assert found.working_set_bytes >= 0 <= found.pinned_bytes


def test_the_tier_may_be_named(step):
    assert bounds(step, "host").memory_bytes == 0
    assert bounds(step, "host").memory_distance is None
    with pytest.raises(Exception, match="no tier 'hbn'"):
        bounds(step, "hbn")
