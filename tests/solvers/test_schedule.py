"""Orders of runs: legal whatever is recomputed, exact in the peak that they foretell."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.conformance.random_traces import random_traces
from sim.engine.replay import replay
from sim.log import WHY
from sim.plan import Plan
from sim.rewrites.holding import with_releases
from sim.solvers.schedule import TraceIndex, backward_slice, schedule_of
from sim.trace import Trace, TraceBuilder
from sim.trace.liveness import LiveSet
from tests.machines import machine
from workloads.synthetic import chain, random_dag, uniform_chain

ROOMY = 1 << 60


def replayed(trace: Trace, found, devices: int = 1):
    log = replay(Plan(trace, found.actions()), machine(ROOMY, devices=devices))
    assert log.counters["ignored_actions"] == 0
    assert log.counters["implicit_recomputes"] == 0
    return log


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ops=st.integers(1, 20),
    count=st.integers(0, 30),
    prune=st.booleans(),
    released=st.integers(0, 8),
)
def test_any_ops_may_run_again_anywhere_and_the_peak_is_the_engines(seed, ops, count, prune, released):
    trace = random_dag(ops, seed)
    draw = random.Random(seed)
    made = np.flatnonzero(trace.producer >= 0).tolist()
    tensors = draw.sample(made, min(released, len(made)))
    trace = with_releases(trace, [(t, draw.randrange(len(trace.ops))) for t in tensors])
    index = TraceIndex(trace)
    reruns: dict[int, list[int]] = {}
    for _ in range(count):
        reruns.setdefault(draw.randrange(len(trace.ops)), []).append(draw.randrange(len(trace.ops)))
    ends = {t: draw.randrange(len(trace.ops)) for t in tensors}
    found = schedule_of(index, reruns, prune=prune, once_recomputed=ends)
    log = replayed(trace, found)
    assert int(np.cumsum(log.change("delta")).max()) == found.peak()
    assert int((log.interval("why") == WHY["recompute"]).sum()) == found.rerun_count()
    assert log.interval("op").tolist() == [op for op, _ in found.steps]


def walked(found, device=None):
    """Bytes held per step, and per tensor that returns the step, and that after which it was freed: step by step."""
    index = found.index
    uses, freed, returns, held = list(index.uses), {}, [], []
    for op, anchor in found.steps:
        for t in index.reads[op] if anchor >= 0 else ():
            uses[t] += 1
    live = LiveSet(index.size, index.replaces, index.starts_on(device))
    for i, ((op, anchor), dropped) in enumerate(zip(found.steps, found.drops, strict=True)):
        here = device is None or index.device[op] == device
        reads, writes = (index.reads[op], index.writes[op]) if here else ((), ())
        returns += [(i, t, freed.get(t, -1)) for t in writes if uses[t] and t not in live]
        held.append(live.run(writes, index.workspace[op] if here else 0))
        released = index.releases.get(op, ()) if anchor < 0 else ()
        for t in (*reads, *released):
            uses[t] -= 1
        gone = [t for t in (*reads, *writes, *released) if uses[t] <= 0 and index.freeable[t] and t in live]
        gone += [t for t in dropped if here and t in live]
        freed.update(dict.fromkeys(gone, i))
        live.free(gone)
    return held, returns


@settings(max_examples=100, deadline=None)
@given(data=st.data(), devices=st.integers(1, 2), seed=st.integers(0, 10**6), count=st.integers(0, 20))
def test_residency_is_what_walking_the_steps_finds(data, devices, seed, count):
    trace, draw = data.draw(random_traces(devices=devices)), random.Random(seed)
    index, reruns = TraceIndex(trace), {}
    for _ in range(count):
        reruns.setdefault(draw.randrange(len(trace.ops)), []).append(draw.randrange(len(trace.ops)))
    for prune in (False, True):
        found = schedule_of(index, reruns, prune=prune)
        for device in range(trace.devices):
            assert found.peaks(device)[1:] == walked(found, device)[0]
        held, returns = walked(found)
        assert found.residency().held.tolist() == held
        columns = [column.tolist() for column in found.residency().returns()]
        assert sorted(zip(*columns, strict=True)) == sorted(returns)


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize(("end", "gone"), [("b1", ["x1"]), ("b0", ["x1"]), ("f2", [])])
def test_what_the_program_lets_go_of_later_is_wanted_as_what_is_read_later(end, gone, prune):
    """x1 is read in forward alone; its producer is recomputed before b1, and the program lets go of x1 at `end`."""
    b = TraceBuilder()
    x = [b.tensor(f"x{i}", 10, "input" if not i else "activation") for i in range(4)]
    g = [b.tensor(f"g{i}", 1, "temporary") for i in range(2)]
    for i in range(3):
        b.op(f"f{i}", reads=[x[i]], writes=[x[i + 1]], releases=[x[1]] if end == f"f{i}" else [])
    b.op("b1", phase="backward", reads=[x[3]], writes=g[:1], releases=[x[1]] if end == "b1" else [])
    b.op("b0", phase="backward", reads=[g[0], x[0]], writes=g[1:], releases=[x[1]] if end == "b0" else [])
    trace = b.build(outputs=g[1:], carry=())
    found = schedule_of(TraceIndex(trace), {3: [0]}, prune=prune)
    assert [trace.tensor_columns.name[t] for one in found.drops for t in one] == gone
    assert found.rerun_count() == (1 if gone or not prune else 0)
    assert int(np.cumsum(replayed(trace, found).change("delta")).max()) == found.peak()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), ops=st.integers(2, 30), count=st.integers(0, 40), released=st.integers(0, 8))
def test_drops_are_those_that_looking_ahead_from_each_step_finds(seed, ops, count, released):
    trace, draw = random_dag(ops, seed), random.Random(seed)
    made = np.flatnonzero(trace.producer >= 0).tolist()
    tensors = draw.sample(made, min(released, len(made)))
    trace = with_releases(trace, [(t, draw.randrange(len(trace.ops))) for t in tensors])
    index, reruns = TraceIndex(trace), {}
    for _ in range(count):
        reruns.setdefault(draw.randrange(len(trace.ops)), []).append(draw.randrange(len(trace.ops)))
    plan = schedule_of(index, reruns)

    def uses(step, t):
        op, anchor = plan.steps[step]
        return t in trace.reads(op) or (anchor < 0 and t in trace.op_columns.releases.get(op, ()))

    for step, (op, _) in enumerate(plan.steps):
        expected = []
        for t in dict.fromkeys((*trace.reads(op), *trace.writes(op))):
            later = range(step + 1, len(plan.steps))
            touched = [s for s in later if t in trace.reads(plan.steps[s][0]) or t in trace.writes(plan.steps[s][0])]
            if not touched or t not in trace.writes(plan.steps[touched[0]][0]) or not index.droppable[t]:
                continue
            again = touched[0]
            is_released = plan.steps[again][1] < 0 and t in trace.op_columns.releases.get(plan.steps[again][0], ())
            if is_released or any(uses(s, t) for s in range(again + 1, len(plan.steps))):
                expected.append(t)
        assert list(plan.drops[step]) == expected


def test_a_tensor_goes_after_the_last_read_before_it_is_made_again():
    trace = chain([1] * 3, [1] * 3, [1] * 4, [1] * 3)
    name = trace.op_id
    found = schedule_of(TraceIndex(trace), {name("b1"): [name("f0")]})
    drops = [(trace.op_columns.name[op], gone) for (op, _), gone in zip(found.steps, found.drops, strict=True) if gone]
    assert drops == [("f1", [trace.tensor_id("x1")])]


def test_what_is_read_after_an_overwrite_does_not_run_again():
    b = TraceBuilder()
    w, x = b.tensor("w", 4, "weight"), b.tensor("x", 4, "input")
    y, z = b.tensor("y", 4), b.tensor("z", 4)
    new = b.tensor("w.new", 4, "weight", replaces=w)
    f = b.op("f", reads=[w, x], writes=[y], duration=1)
    step = b.op("step", phase="update", reads=[w], writes=[new], duration=1)
    late = b.op("late", reads=[y], writes=[z], phase="update", duration=1)
    trace = b.build(outputs=[new, z])
    index = TraceIndex(trace)
    assert index.can_recompute(f, step)
    assert not index.can_recompute(f, late)
    assert not index.can_recompute(step, late)
    assert schedule_of(index, {late: [f, step]}).rerun_count() == 0


def test_pruning_leaves_out_what_nobody_reads():
    trace = uniform_chain(4)
    index = TraceIndex(trace)
    anchor = trace.op_id("b2")
    reruns = {anchor: [trace.op_id("f0"), trace.op_id("f3")]}
    assert schedule_of(index, reruns).rerun_count() == 2
    # b1 reads what f0 makes, nobody reads what f3 makes
    pruned = schedule_of(index, reruns, prune=True)
    assert [trace.op_columns.name[op] for op, at in pruned.steps if at >= 0] == ["f0"]


def test_held_tensors_go_later():
    trace = chain([1] * 3, [1] * 3, [1] * 4, [1] * 3)
    name, index = trace.op_id, TraceIndex(trace)
    reruns = {name("b1"): [name("f0")]}
    found = schedule_of(index, reruns, hold={trace.tensor_id("x1"): name("f2")})
    gone = [trace.op_columns.name[op] for (op, _), drops in zip(found.steps, found.drops, strict=True) if drops]
    assert gone == ["f2"]
    replayed(trace, found)


@pytest.mark.parametrize(("again", "gone"), [(True, {"b1": ["x1"]}), (False, {})])
def test_what_the_program_holds_goes_sooner_only_where_it_is_a_recomputed_copy(again, gone):
    """The program holds x1 until b0; nothing reads it after b1."""
    b = TraceBuilder()
    x = [b.tensor(f"x{i}", 10, "input" if not i else "activation") for i in range(3)]
    g = [b.tensor(f"g{i}", 1, "temporary") for i in range(2)]
    b.op("f0", reads=[x[0]], writes=[x[1]])
    b.op("f1", reads=[x[1]], writes=[x[2]])
    b.op("b1", phase="backward", reads=[x[1], x[2]], writes=g[:1])
    b.op("b0", phase="backward", reads=[g[0], x[0]], writes=g[1:], releases=[x[1]])
    trace = b.build(outputs=g[1:], carry=())
    found = schedule_of(TraceIndex(trace), {2: [0]} if again else {}, once_recomputed={x[1]: 2})
    names, held = trace.op_columns.name, trace.tensor_columns.name
    late = {names[op]: [held[t] for t in one] for (op, _), one in zip(found.steps, found.drops, strict=True) if op > 1}
    assert {op: dropped for op, dropped in late.items() if dropped} == gone
    assert int(np.cumsum(replayed(trace, found).change("delta")).max()) == found.peak()


def test_slice_is_what_the_wanted_tensors_need():
    trace = uniform_chain(5)
    index = TraceIndex(trace)
    ops = [trace.op_id(f"f{i}") for i in range(5)]
    assert backward_slice(index, ops[1:], [trace.tensor_id("f2.out")]) == ops[1:3]


def collective_pair() -> Trace:
    """Two devices: each makes a part, all-reduces it, and needs the sum in backward."""
    b = TraceBuilder()
    sums, parts = [], []
    for d in range(2):
        x = b.tensor(f"x{d}", 8, "input")
        parts.append(b.tensor(f"p{d}", 8))
        sums.append(b.tensor(f"s{d}", 8))
        b.op(f"f{d}", reads=[x], writes=[parts[d]], device=d, layer=0, duration=5)
    for d in range(2):
        b.op(f"sum{d}", "collective", reads=[parts[d]], writes=[sums[d]], device=d, layer=0, group="g", bytes=8)
    for d in range(2):
        y = b.tensor(f"y{d}", 8)
        b.op(f"use{d}", reads=[sums[d]], writes=[y], device=d, layer=0, duration=5)
        g = b.tensor(f"grad{d}", 8, "temporary")
        b.op(f"b{d}", phase="backward", reads=[y, sums[d]], writes=[g], device=d, layer=0, duration=5)
    return b.build(outputs=(), carry=())


def test_collectives_run_again_together_or_not_at_all():
    trace = collective_pair()
    index = TraceIndex(trace)
    name = trace.op_id
    both = {name(f"b{d}"): [name(f"f{d}"), name(f"sum{d}")] for d in range(2)}
    log = replayed(trace, schedule_of(index, both), devices=2)
    assert int((log.interval("why") == WHY["recompute"]).sum()) == 2  # the log calls a collective a move
    assert int((log.interval("why") == WHY["move"]).sum()) == 4  # two links, twice
    alone = schedule_of(index, {name("b0"): [name("f0"), name("sum0")]})
    assert alone.rerun_count() == 1
    replayed(trace, alone, devices=2)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_run_again_is_the_plain_run(seed):
    trace = random_dag(12, seed)
    found = schedule_of(TraceIndex(trace), {})
    assert found.actions() == ()
    log = replayed(trace, found)
    assert found.peak() == int(np.cumsum(log.change("delta")).max())
