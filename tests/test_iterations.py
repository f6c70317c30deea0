"""Iterations follow each other: what is carried begins where the one before left it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from sim.analysis import residence
from sim.engine.replay import replay
from sim.experiment import simulate
from sim.iterations import continued
from sim.plan import Action, Drop, Move, Plan, Problem
from sim.policies.base import Policy
from sim.rewrites.rewrite import unroll
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine
from workloads.transformer import transformer


def step(name: str = "w") -> Trace:
    """A weight of 100 bytes, read for 50 ns and then updated in 10 ns; another that is only read."""
    b = TraceBuilder()
    w, c, x = b.tensor(name, 100, "weight"), b.tensor("c", 20, "weight"), b.tensor("x", 1, "input")
    y, new = b.tensor("y", 1), b.tensor(f"{name}.new", 100, "weight", replaces=w)
    b.op("idle", "other", reads=[x], writes=[b.tensor("z", 1)], duration=500)
    b.op("use", "matmul", reads=[w, c, x], writes=[y], duration=50)
    b.op("update", "optimizer", reads=[y, w], writes=[new], phase="update", duration=10)
    return b.build()


@dataclass(frozen=True, kw_only=True)
class Sends(Policy):
    """Carries out some actions on the trace as it is; what is placed is placed."""

    moves = True
    actions: tuple[Action, ...] = ()
    place: Mapping[int, str] = field(default_factory=dict)

    def plan(self, problem: Problem) -> Plan:
        return Plan(problem.trace, self.actions, self.place)


AWAY = Sends(actions=(Move("w.new", "host", after="update"),))


def moves(result) -> list[tuple[str, str, int, int]]:
    rows = result.events.query("why == 'move'")
    return list(zip(rows.lane, rows.tensor, rows.start_ns.astype(int), rows.end_ns.astype(int), strict=True))


def test_one_iteration_brings_back_what_it_sent_away() -> None:
    result = simulate(step(), machine(), AWAY)
    assert moves(result) == [("d2h", "w.new", 560, 660), ("h2d", "w.new", 660, 760)]
    assert result.log.counters["returned_moves"] == 1
    assert residence(result.log)[result.log.trace.tensor_id("w.new")] == ("hbm",)


@pytest.mark.parametrize("iterations", [2, 3])
def test_the_next_iteration_begins_where_it_was_left(iterations) -> None:
    result = simulate(step(), machine(), AWAY, iterations=iterations)
    # the first leaves it in the host; the others fetch it when it is read, and end as they began
    assert moves(result) == [("h2d", "w", 500, 600), ("d2h", "w.new", 660, 760)]
    assert result.log.counters["returned_moves"] == 0
    assert residence(result.log)[result.log.trace.tensor_id("w.new")] == ("host",)
    first = result.warm_up[0].log
    assert (first.end, first.counters["returned_moves"]) == (660, 0)
    assert all(run.log.end == 760 for run in result.warm_up[1:])


def test_what_a_plan_places_itself_is_brought_there_each_time() -> None:
    policy = Sends(actions=AWAY.actions, place={0: "hbm"})
    result = simulate(step(), machine(), policy, iterations=2)
    for log in (result.log, result.warm_up[0].log):
        assert (log.end, log.counters["returned_moves"]) == (760, 1)


def test_iterations_one_by_one_are_those_of_an_unrolled_trace() -> None:
    trace = step()
    one_by_one = simulate(trace, machine(), AWAY, iterations=2)
    twice = unroll(trace, 2)
    anchors = tuple(Move(f"w.new#{i}", "host", after=f"update#{i}") for i in range(2))
    # the second iteration's first op hides what the copy out takes of the first: the rest is the same
    whole = simulate(twice, machine(), Sends(actions=anchors))
    hidden, returned = 100, 100
    assert whole.log.end - returned == one_by_one.warm_up[0].log.end + one_by_one.log.end - hidden


def test_a_spare_copy_does_not_outlast_an_iteration_and_one_elsewhere_does() -> None:
    spare = Sends(actions=(Move("c", "host", keep=True, after="use"),))
    result = simulate(step(), machine(), spare, iterations=2)
    assert result.log.end == result.warm_up[0].log.end
    assert [row[:2] for row in moves(result)] == [("d2h", "c")]  # again: it began without
    away = Sends(actions=(*spare.actions, Drop("c", after="update")))
    result = simulate(step(), machine(), away, iterations=2)
    assert [row[:2] for row in moves(result)] == [("h2d", "c")]
    assert result.log.counters["returned_moves"] == 0


def test_other_lengths_have_the_same_weights_by_name() -> None:
    first = simulate(step(), machine(), AWAY, iterations=2).warm_up[0]
    b = TraceBuilder()
    b.tensor("more", 5, "input")
    w = b.tensor("w", 100, "weight")
    b.op("use", reads=[w], writes=[b.tensor("y", 1)])
    assert continued(Plan(b.build()), (first,)).place == {1: "host"}
    assert continued(Plan(step("v")), (first,)).place == {1: "hbm"}  # c, and not v


def test_shipped_policies_repeat_themselves() -> None:
    tiny = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 512}
    trace = transformer(tiny, batch=2, sequence=64)
    for policy in ("keep_all", "swap_all", "lru_tiering", "zero_offload", "dtr", "delta"):
        once, twice = simulate(trace, machine(), policy), simulate(trace, machine(), policy, iterations=3)
        assert once.log.content_hash == twice.log.content_hash


def test_a_result_is_held_against_unlimited_memory_on_the_traces_that_it_ran() -> None:
    traces = [step(), unroll(step(), 2), unroll(step(), 3)]
    for count in (1, 2, 4):
        result = simulate(traces, machine(), iterations=count)
        assert result.summary()["unlimited_ns"] == result.log.end
        assert result.summary()["overhead"] == 0


def test_unlimited_memory_begins_where_its_own_iteration_before_ended() -> None:
    b = TraceBuilder()
    w, g = b.tensor("w", 100, "weight"), b.tensor("g", 1)
    b.op("use", reads=[w], writes=[g], duration=100)
    new = b.tensor("w.new", 100, "weight", replaces=w)
    b.op("adam", "optimizer", reads=[g, w], writes=[new], phase="update", engine="cpu", duration=10)
    trace = b.build()
    first = simulate(trace, machine()).log.end
    for count in (2, 3):
        s = simulate(trace, machine(), iterations=count).summary()
        assert s["makespan_ns"] < first  # the weight is on the host already
        assert s["unlimited_ns"] == s["makespan_ns"]


@dataclass(frozen=True, kw_only=True)
class Tries(Sends):
    """The same, but it replays its plan before it returns it."""

    def plan(self, problem: Problem) -> Plan:
        plan = super().plan(problem)
        problem.evaluate(plan)
        return plan


@pytest.mark.parametrize("after", ["update", "use"])
def test_an_iteration_that_a_policy_has_replayed_is_the_one_that_it_would_be(after, monkeypatch) -> None:
    """Away at the end, the weight comes back in the last iteration alone; sent earlier, its update brings it back."""
    tensor = "w.new" if after == "update" else "w"
    actions = (Move(tensor, "host", after=after),)
    plain = simulate(step(), machine(), Sends(actions=actions), iterations=3)
    replays = []
    monkeypatch.setattr("sim.iterations.replay", lambda *args, **given: replays.append(args) or replay(*args, **given))
    tried = simulate(step(), machine(), Tries(actions=actions), iterations=3)
    # those that it asked for, and the first once more where only the last of all iterations brings the weight back
    assert len(replays) == (4 if after == "update" else 3)
    for a, b in zip([*plain.warm_up, plain], [*tried.warm_up, tried], strict=True):
        assert np.array_equal(a.log.intervals, b.log.intervals)
        assert np.array_equal(a.log.changes, b.log.changes)
        assert a.log.counters == b.log.counters
