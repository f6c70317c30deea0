"""Planners count what lies on the device: an optimizer's states on the host take nothing of its budget."""

from __future__ import annotations

import pytest

from sim.errors import Infeasible, OutOfMemory
from sim.experiment import problem_for, simulate
from sim.solvers.located import index_of
from sim.solvers.schedule import schedule_of
from sim.trace import TraceBuilder
from tests.machines import machine

PLATFORM = machine(host=1 << 40, cpu="host")
STEADY = ("chen", "checkmate", "relax_and_fix", "rotor", "twremat", "moccasin", "rockmate", "joint_optimal", "vlad")


def net(state: int, scratch: int = 0, layers: int = 6):
    """Layers whose optimizer step runs on the host's processor, with so many bytes of state and of workspace."""
    b = TraceBuilder()
    x, w = b.tensor("x", 10, "input"), b.tensor("w", 10, "weight")
    results = [x]
    for i in range(layers):
        results.append(b.tensor(f"y{i}", 60 + 7 * i))
        b.op(f"f{i}", "matmul", reads=[results[-2], w], writes=[results[-1]], duration=100 + 10 * i, layer=i)
    g = b.tensor("g", 20, "temporary")
    b.op("loss", "loss", phase="backward", reads=[results[-1]], writes=[g], duration=10)
    for i in reversed(range(layers)):
        before, g = g, b.tensor(f"d{i}", 20, "temporary")
        reads = [before, results[i], results[i + 1], w]
        b.op(f"b{i}", "matmul", phase="backward", reads=reads, writes=[g], duration=200, layer=i)
    dw, new = b.tensor("dw", 10, "gradient"), b.tensor("w.new", 10, "weight", replaces=w)
    b.op("bw", "matmul", phase="backward", reads=[g, x], writes=[dw], duration=10)
    reads, writes = [w, dw], [new]
    if state:
        moment = b.tensor("m", state, "optimizer_state")
        reads.append(moment)
        writes.append(b.tensor("m.new", state, "optimizer_state", replaces=moment))
    step = {"phase": "update", "engine": "cpu", "duration": 10, "workspace": scratch}
    b.op("step", "optimizer", reads=reads, writes=writes, **step)
    return b.build()


def test_a_schedule_counts_what_the_engine_counts():
    trace = net(5000, scratch=3000)
    index = index_of(problem_for(trace, PLATFORM))
    assert schedule_of(index, {}).peak() == simulate(trace, PLATFORM, "keep_all").summary()["peak_bytes"] < 1000


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("budget", [330, 400, 10_000])
def test_state_on_the_host_changes_no_plan(name, budget):
    if name == "moccasin":
        pytest.importorskip("ortools", reason="OR-Tools solves it")

    def outcome(trace):
        try:
            return simulate(trace, PLATFORM, name, budget=budget).log.end
        except (Infeasible, OutOfMemory) as error:
            return str(error)

    assert outcome(net(5000)) == outcome(net(0))
