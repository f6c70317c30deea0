"""Colossal-Auto on one device: hand-drawn timelines of weights that come and go, Rotor where none has to."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import load_profile
from sim.errors import Infeasible, PolicyError
from sim.experiment import problem_for, simulate
from sim.hardware.platform import Platform
from sim.log import WHY
from sim.policies import policy_class
from sim.policies.recompute.colossal_auto.weight_offload import Pager, units_of
from sim.solvers.regions import chain_of
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace, TraceBuilder
from tests.clocks import count_replays
from tests.machines import machine as toy_machine
from workloads import transformer
from workloads.synthetic import chain, uniform_chain, w1

BIG = 1 << 60

machine = partial(toy_machine, host=BIG)
"""An engine, its memory, and a host."""


def weighted(weights: list[int], *, shared: tuple[int, int] | None = None, update: bool = False) -> Trace:
    """Stages of 10 ns forward and 20 ns backward, activations of one byte, and a weight each of so many bytes."""
    b = TraceBuilder({"model": "weighted"})
    w = [b.tensor(f"w{i}", size, "weight") for i, size in enumerate(weights)]
    if shared:
        w[shared[1]] = w[shared[0]]
    x = [b.tensor("x0", 1, "input")]
    gradients = []
    for i in range(len(weights)):
        x.append(b.tensor(f"x{i + 1}", 1, layer=i))
        b.op(f"f{i}", reads=[x[i], w[i]], writes=[x[-1]], layer=i, duration=10)
    gradient = b.tensor("d", 1, "temporary")
    b.op("loss", "loss", phase="backward", reads=[x[-1]], writes=[gradient], duration=0)
    for i in reversed(range(len(weights))):
        made = b.tensor(f"d{i}", 1, "temporary", layer=i)
        gradients.append(b.tensor(f"g{i}", 1, "gradient", layer=i))
        reads = [gradient, x[i], w[i]]
        b.op(f"b{i}", phase="backward", reads=reads, writes=[made, gradients[-1]], layer=i, duration=20)
        gradient = made
    carry = []
    for i, g in zip(reversed(range(len(weights))), gradients, strict=True):
        if update:
            new = b.tensor(f"w{i}.new", weights[i], "weight", replaces=w[i])
            b.op(f"u{i}", "optimizer", phase="update", reads=[w[i], g], writes=[new], duration=10)
            carry.append((new, w[i]))
    return b.build(outputs=[new for new, _ in carry] or [*gradients, gradient], carry=carry)


def peak(log) -> int:
    at_home = log.change("tier") == log.platform.tier_ids[log.platform.home(0).name]
    return int(np.cumsum(log.change("delta")[at_home]).max())


def moved(log) -> int:
    return int(log.interval("bytes")[log.interval("why") == WHY["move"]].sum())


# ---- timelines drawn by hand ---------------------------------------------------------------------


def test_a_synchronous_copy_stalls_every_visit():
    # one weight fits: f0 f1 (f2 loss b2) b1 b0 are five visits, each 10 ns late; 90 ns of ops
    log = simulate(weighted([10] * 3), machine(20), "colossal_auto", offload="synchronous").log
    assert (log.end, moved(log)) == (90 + 5 * 10, 5 * 10)
    assert peak(log) <= 20


def test_a_copy_that_starts_a_visit_ahead_is_hidden_but_for_the_first():
    # two weights fit: while one stage runs the next one's comes, in as long as a forward takes
    log = simulate(weighted([10] * 4), machine(32), "colossal_auto", window=1).log
    assert log.end == 4 * 30 + 10
    assert peak(log) <= 32


def test_weights_go_back_after_their_update_and_end_where_they_began():
    # two visits, one more for the update, and the way back: four copies of each weight
    log = simulate(weighted([10, 10], update=True), machine(19), "colossal_auto").log
    # the last stage's forward and backward are one visit, and so one copy less
    assert moved(log) == 10 * (4 + 3)
    assert peak(log) <= 19


# ---- what is chosen ------------------------------------------------------------------------------


def pager_of(trace: Trace) -> tuple[Pager, list]:
    platform = machine()
    problem = problem_for(trace, platform)
    line = chain_of(problem, "test")
    assert platform.host is not None
    return Pager(problem, line, schedule_of(TraceIndex(trace), {}), platform.host), units_of(problem, line)


def test_a_weight_costs_two_copies_and_a_shared_one_four():
    pager, units = pager_of(weighted([10, 10, 10, 10], shared=(0, 2)))
    assert [unit.bytes for unit in units] == [10, 10, 10]
    assert [pager.exposed(unit, 0) for unit in units] == [4 * 10, 2 * 10, 10]  # the last stage is visited once
    # f0 f1 (f2 b3) … : a forward, of 10 ns, hides a copy of 10 bytes; before the first there is none
    assert [pager.exposed(unit, 1) for unit in units] == [10, 0, 0]


def test_what_is_absent_is_what_lies_outside_the_visits():
    pager, units = pager_of(weighted([7, 7, 7]))
    # steps: f0 f1 f2 loss b2 b1 b0
    assert pager.absent(units[0], 0).tolist() == [0, 7, 7, 7, 7, 7, 0]
    assert pager.absent(units[1], 0).tolist() == [7, 0, 7, 7, 7, 0, 7]
    assert pager.absent(units[1], 1).tolist() == [0, 0, 0, 0, 0, 0, 7]  # it would return before it has left
    assert pager.absent(units[2], 0).tolist() == [7, 7, 0, 0, 0, 7, 7]


def test_no_more_goes_than_has_to():
    trace = weighted([10] * 6)
    full = peak(simulate(trace, machine()).log)
    for less, units in ((5, 1), (10, 1), (15, 2), (20, 2)):
        plan = simulate(trace, machine(full - less), "colossal_auto").plan
        assert plan.notes["offloaded_bytes"] <= 10 * (units + 1)
        assert plan.notes["offloaded_bytes"] >= 10 * units


def test_offload_wins_where_the_link_is_fast_and_recomputation_where_it_is_slow():
    trace = w1(4)
    top = peak(simulate(trace, machine()).log)
    budget = int(0.8 * top)
    rotor = simulate(trace, machine(budget), "rotor").log.end
    fast = simulate(trace, machine(budget, rate=10**12), "colossal_auto")
    slow = simulate(trace, machine(budget, rate=10**6), "colossal_auto")
    assert fast.log.end < rotor
    assert fast.plan.notes["offloaded_bytes"] > 0 == slow.plan.notes["offloaded_bytes"]
    assert slow.log.end == rotor


def test_recomputation_and_offload_go_together_below_what_either_reaches():
    trace = w1(4)
    with pytest.raises(Infeasible) as rotor:
        simulate(trace, machine(1), "rotor")
    with pytest.raises(Infeasible) as both:
        simulate(trace, machine(1), "colossal_auto")
    floor = both.value.floor_bytes
    assert floor is not None
    assert floor < (rotor.value.floor_bytes or 0)
    log = simulate(trace, machine(floor), "colossal_auto").log
    assert peak(log) <= floor
    assert (log.interval("why") == WHY["recompute"]).any()
    assert moved(log) > 0


# ---- Rotor where nothing goes --------------------------------------------------------------------


def events(result) -> list:
    return [list(result.log.events.itertuples(index=False)), list(result.log.memory.itertuples(index=False))]


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("trace", [w1(3), uniform_chain(12)], ids=["w1", "chain"])
def test_without_offload_it_is_rotor(trace, share):
    budget = int(share * peak(simulate(trace, machine()).log))
    rotor = events(simulate(trace, machine(budget), "rotor"))
    assert events(simulate(trace, machine(budget), "colossal_auto", offload="none")) == rotor
    without_host = Platform("toy", machine(budget).tiers[:1], machine().engines)
    assert events(simulate(trace, without_host, "colossal_auto")) == events(simulate(trace, without_host, "rotor"))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    weights=st.lists(st.integers(0, 30), min_size=2, max_size=7),
    share=st.floats(0.2, 1.1),
    update=st.booleans(),
    rate=st.sampled_from([10**8, 10**9, 10**10]),
)
def test_it_keeps_the_budget_is_never_slower_than_rotor_and_names_the_smallest_budget(weights, share, update, rate):
    trace = weighted(weights, update=update)
    budget = max(1, int(share * schedule_of(TraceIndex(trace), {}).peak()))
    try:
        log = simulate(trace, machine(budget, rate=rate), "colossal_auto").log
    except Infeasible as refused:
        floor = refused.floor_bytes
        assert floor is not None
        assert budget < floor
        with pytest.raises(Infeasible):
            simulate(trace, machine(floor - 1, rate=rate), "colossal_auto")
        budget = floor
        log = simulate(trace, machine(budget, rate=rate), "colossal_auto").log
    assert peak(log) <= budget
    assert log.counters["ignored_actions"] == log.counters["implicit_recomputes"] == 0
    try:
        assert log.end <= simulate(trace, machine(budget, rate=rate), "rotor").log.end
    except Infeasible:
        assert moved(log) > 0


# ---- real traces and refusals --------------------------------------------------------------------


def test_gpt2_medium_is_planned_within_a_few_dozen_replays(monkeypatch):
    trace = transformer("gpt2-medium", batch=4, sequence=1024, precision="amp_bf16")
    platform = load_profile("mt3000_survey")
    plain = schedule_of(TraceIndex(trace), {}).peak()
    replays = count_replays(monkeypatch, policy_class("colossal_auto"))
    result = simulate(trace, platform, "colossal_auto", budget=int(0.6 * plain))
    assert 0 < len(replays) <= 40
    assert peak(result.log) <= int(0.6 * plain)
    assert result.log.end < simulate(trace, platform, "rotor", budget=int(0.6 * plain)).log.end


def test_a_full_host_leaves_recomputation():
    trace = w1(3)
    budget = int(0.8 * peak(simulate(trace, machine()).log))
    roomy = simulate(trace, machine(budget, rate=10**12), "colossal_auto")
    cramped = simulate(trace, machine(budget, rate=10**12, host=1), "colossal_auto")
    assert roomy.log.end < cramped.log.end == simulate(trace, machine(budget), "rotor").log.end


def test_a_trace_that_is_no_chain_names_the_op():
    b = TraceBuilder({"model": "crossed"})
    x = b.tensor("x", 1, "input")
    t = [b.tensor(f"t{i}", 1) for i in range(4)]
    b.op("f0", reads=[x], writes=t[:2], duration=1)
    b.op("f1", reads=t[:1], writes=t[2:3], duration=1)
    b.op("f2", reads=t[1:3], writes=t[3:], duration=1)
    with pytest.raises(PolicyError, match=r"policy 'colossal_auto': this trace is not a chain: op 'f2' reads 't1'"):
        simulate(b.build(outputs=(t[3],), carry=()), machine(), "colossal_auto")


@pytest.mark.parametrize(("wrong", "message"), [
    ({"offload": "async"}, "offload is 'async'.*did you mean 'asynchronous'"),
    ({"share": 0.0}, "share is 0.0; expected float above 0 and at most 1"),
    ({"window": 0}, "window is 0; expected int of at least 1"),
])  # fmt: skip
def test_wrong_parameters_are_refused(wrong, message):
    with pytest.raises(PolicyError, match=message):
        simulate(chain([1] * 3, [1] * 3, [1] * 4, [1] * 3), machine(), "colossal_auto", **wrong)
