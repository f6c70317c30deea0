"""The cut of the data-flow graph: against every partition of small graphs, and the paper's 4M."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from sim.experiment import simulate
from sim.policies.offload.zero_offload.cut import cheapest_cut, crossing
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine

M = 1000
"""Parameters."""


def adam(*, clipped: bool = False) -> Trace:
    """One weight in 16 bits; its Adam as separate ops on fp32 moments and master, then the conversion."""
    b = TraceBuilder()
    x, w = b.tensor("x", 1, "input"), b.tensor("w", 2 * M, "weight")
    y, g = b.tensor("y", 50), b.tensor("g", 2 * M, "gradient")
    b.op("forward", "matmul", reads=[x, w], writes=[y], duration=10)
    b.op("backward", "matmul", reads=[x, y, w], writes=[g], phase="backward", duration=20)
    scale = []
    if clipped:  # the norm of the gradient, and of the activation beside it, which only the device has
        scale = [b.tensor("scale", 4)]
        b.op("norm", "reduce", reads=[g, y, x, w], writes=scale, phase="update", duration=5)
    states = {name: b.tensor(name, 4 * M, "optimizer_state") for name in ("m", "v", "master")}
    new = {name: b.tensor(f"{name}.new", 4 * M, "optimizer_state", replaces=old) for name, old in states.items()}
    step = {"phase": "update", "duration": 5}
    b.op("first", "optimizer", reads=[g, *scale, states["m"]], writes=[new["m"]], **step)
    b.op("second", "optimizer", reads=[g, *scale, states["v"]], writes=[new["v"]], **step)
    b.op("step", "optimizer", reads=[new["m"], new["v"], states["master"]], writes=[new["master"]], **step)
    fresh = b.tensor("w.new", 2 * M, "weight", replaces=w)
    b.op("convert", "optimizer", reads=[new["master"]], writes=[fresh], **step)
    carry = [(new[name], states[name]) for name in states]
    return b.build(outputs=[*new.values(), fresh], carry=[*carry, (fresh, w)])


def users(trace: Trace) -> list[tuple[int, set[str]]]:
    """Per value its bytes and the ops that produce, read or overwrite it; what is carried is one value."""
    first, found = dict(trace.carry), []
    ops = [(op.name, {*op.reads, *op.writes} | {trace.tensors[t].replaces for t in op.writes}) for op in trace.ops]
    for tensor in trace.tensors:
        if tensor.id not in first.values():  # else counted with the value that is carried to it
            same = {tensor.id, first.get(tensor.id, tensor.id)}
            found.append((tensor.bytes, {name for name, touched in ops if same & touched}))
    return found


def by_hand(values: list[tuple[int, set[str]]], on_cpu: set[str]) -> int:
    """Bytes of the values with ops on both sides."""
    return sum(size for size, names in values if names & on_cpu and names - on_cpu)


def subsets(names):
    return map(set, chain.from_iterable(combinations(names, k) for k in range(len(names) + 1)))


def test_every_partition_that_offloads_anything_of_adam_crosses_at_least_4m() -> None:
    trace = adam()
    update = [op.name for op in trace.ops if op.phase == "update"]
    values = users(trace)
    costs = {frozenset(cpu): by_hand(values, cpu) for cpu in subsets(update)}
    assert all(crossing(trace, {trace.op_id(n) for n in cpu}) == cost for cpu, cost in costs.items())
    assert costs.pop(frozenset()) == 0
    assert min(costs.values()) == 4 * M == costs[frozenset(update)]
    assert [cpu for cpu, cost in costs.items() if cost == 4 * M] == [frozenset(update)]
    assert [trace.op_columns.name[op] for op in cheapest_cut(trace)] == update


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_with_the_states_on_the_cpu_crosses_fewer_bytes(seed) -> None:
    draw = random.Random(seed)
    b = TraceBuilder()
    x, w = b.tensor("x", 1, "input"), b.tensor("w", 3, "weight")
    made = [b.tensor(f"g{i}", draw.randint(1, 9), "gradient") for i in range(3)]
    b.op("backward", "matmul", reads=[x, w], writes=made, phase="backward")
    for i in range(7):
        reads = draw.sample(made, draw.randint(1, 3))
        made.append(b.tensor(f"t{i}", draw.randint(1, 9), "temporary"))
        b.op(f"free{i}", "elementwise", reads=reads, writes=made[-1:], phase="update")
    state, fresh = b.tensor("s", 5, "optimizer_state"), b.tensor("w.new", 3, "weight")
    new = b.tensor("s.new", 5, "optimizer_state", replaces=state)
    b.op("step", "optimizer", reads=[*draw.sample(made, 3), state], writes=[new], phase="update")
    b.op("write", "copy", reads=[new, *draw.sample(made, 1)], writes=[fresh], phase="update")
    trace = b.build(outputs=[new, fresh], carry=[(new, state), (fresh, w)])
    free = [op.name for op in trace.ops if op.phase == "update" and op.name not in ("step", "write")]
    values = users(trace)
    least = min(by_hand(values, {"step", "write", *cpu}) for cpu in subsets(free))
    found = cheapest_cut(trace)
    assert crossing(trace, {*found}) == by_hand(values, {trace.op_columns.name[op] for op in found}) == least


def test_an_op_that_reads_much_of_the_device_stays_there_and_its_result_comes_down() -> None:
    trace = adam(clipped=True)
    cut = {trace.op_columns.name[op] for op in cheapest_cut(trace)}
    assert cut == {"first", "second", "step", "convert"}
    assert by_hand(users(trace), cut) == 4 * M + 4 < by_hand(users(trace), cut | {"norm"})
    moved = {}
    for partition in ("phase", "cut"):
        done = simulate(trace, machine(), "zero_offload", partition=partition)
        assert not departures(done.plan.trace, trace)
        moved[partition] = done.summary()["moved_bytes"]
        engine = {row.op: row.lane for row in done.events.query("why == 'run'").itertuples()}
        assert (engine["norm"] == "cpu") == (partition == "phase")
    assert moved["cut"] == {"d2h": 2 * M + 4, "h2d": 2 * M}
    assert sum(moved["phase"].values()) > sum(moved["cut"].values())
    # with the norm on the device no update reads another's result but its own tile's, so that it can be delayed
    delayed = simulate(trace, machine(), "zero_offload", partition="cut", delayed=True)
    assert {d.what for d in departures(delayed.plan.trace, trace) if d.op} == {"stale"}
