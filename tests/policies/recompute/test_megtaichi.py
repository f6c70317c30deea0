"""MegTaiChi (ICS 2022): the score of MegEngine's code, addresses under fragmentation, the partition of the batch."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import load_profile, simulate
from sim.conformance import check_policy, check_values, replayed
from sim.engine.replay import replay
from sim.errors import Deadlock, Infeasible, OutOfMemory, PolicyError
from sim.experiment import problem_for
from sim.hardware.platform import Allocator, Platform
from sim.log import CAUSE, WHY
from sim.plan import Action, Change, Memory, Need, Online
from sim.policies import load
from sim.search import smallest_budget
from sim.trace import Trace, TraceBuilder
from tests.machines import machine as toy_machine
from workloads import cnn, transformer
from workloads.synthetic import random_dag, uniform_chain, w1

ALONE = {"parts": 1, "at_least": 0}
LIKE_DTR = {**ALONE, "neighbours": "both", "own_cost": True, "penalty": 1.0}


def machine(budget: int, fit: str = "") -> Platform:
    """One tier; `fit` of a pool with addresses, "" for a sum of sizes."""
    return toy_machine(budget, speed=10**12, allocator=Allocator("pool", {"fit": fit}) if fit else None)


def peak(log) -> int:
    return int(np.cumsum(log.change("delta")).max(initial=0))


def kept(trace: Trace) -> int:
    return peak(simulate(trace, machine(1 << 60)).log)


def run(trace: Trace, budget: int, fit: str = "", policy: str = "megtaichi", **parameters: Any):
    result = simulate(trace, machine(budget, fit), policy, **parameters)
    assert result.log.complete
    assert result.log.counters["ignored_actions"] == 0
    assert peak(result.log) <= budget
    return result


def reruns(result) -> list[str]:
    log = result.log
    return [log.trace.ops[op].name for op in log.interval("op")[log.interval("why") == WHY["recompute"]]]


def evicted(result) -> list[str]:
    """What was dropped while ops that read it were still to run, in order."""
    log = result.log
    rows = log.changes[log.change("cause") == CAUSE["dropped"]]
    last: dict[int, int] = {}
    for start, why, op in zip(log.interval("start"), log.interval("why"), log.interval("op"), strict=True):
        if why == WHY["run"]:
            for t in log.trace.reads(int(op)):
                last[t] = int(start)
    return [log.trace.tensors[t].name for at, t in rows[:, [0, 3]].tolist() if last.get(t, -1) >= at]


# ---- the score, by hand --------------------------------------------------------------------------------


def candidates(sizes: list[int], gaps: list[int], wide: int) -> Trace:
    """Tensors made one after the other, gaps[i] ns apart; then `wide` bytes are wanted, and then all are read."""
    b = TraceBuilder()
    many = [b.tensor(f"t{i}", size) for i, size in enumerate(sizes)]
    big = b.tensor("wide", wide)
    for i, gap in enumerate(gaps):
        b.op(f"make{i}", writes=[many[i]], duration=gap)
    b.op("make_wide", writes=[big], duration=10)
    b.op("use_wide", reads=[big], duration=10)
    for i in reversed(range(len(sizes))):
        b.op(f"use{i}", reads=[many[i]], duration=10)
    return b.build(outputs=[], carry=())


def test_what_has_no_evicted_neighbours_goes_by_size_and_age_whatever_it_costs():
    # ages when `wide` is wanted: 400, 100 and 0 ns, each from the end of its op
    trace = candidates([50, 100, 60], [100, 300, 100], 70)
    assert evicted(run(trace, 210, **ALONE))[0] == "t0"  # 50 * 400 against 100 * 100
    dear = candidates([50, 100, 60], [4000, 10, 100], 70)
    assert evicted(run(dear, 210, **ALONE))[0] == "t1"  # 50 * 110 against 100 * 100, for any cost
    young = candidates([50, 100, 60], [4000, 300, 100], 70)
    assert evicted(run(young, 210, **ALONE))[0] == "t0"  # that takes 40 times as long to recompute


def test_own_cost_keeps_what_is_dear():
    trace = candidates([100, 90, 60], [1000, 10, 100], 40)
    assert evicted(run(trace, 250, **ALONE))[0] == "t0"  # 100 * 110 against 90 * 100
    assert evicted(run(trace, 250, **ALONE, own_cost=True))[0] == "t1"  # 1000 / 11,000 against 10 / 9,000


def test_free_bytes_beside_a_tensor_count_as_its_own():
    # in order of address: t0 (80), a hole of 40 that `gap` left, t1 (60), t2 (90); the oldest first
    b = TraceBuilder()
    t0, gap, t1, t2 = b.tensor("t0", 80), b.tensor("gap", 40), b.tensor("t1", 60), b.tensor("t2", 90)
    big = b.tensor("wide", 100)
    for t in (t0, gap, t1, t2):
        b.op(f"make_{t}", writes=[t], duration=1000)
    b.op("use_gap", reads=[gap], duration=1)
    b.op("make_wide", writes=[big], duration=10)
    b.op("use_wide", reads=[big], duration=10)
    for t in (t2, t1, t0):
        b.op(f"use_{t}", reads=[t], duration=10)
    trace = b.build(outputs=[], carry=())
    # ages 3001, 1001, 1: by themselves 80 * 3001 is most; with the hole beside both, (80 + 40) and (60 + 40)
    beside = run(trace, 270, "first", **ALONE)
    assert evicted(beside) == ["t0"]  # and the hole of 120 below t1 is enough for 100
    # younger and smaller, but next to the hole: 60 goes where 70 far from it would
    b = TraceBuilder()
    far, gap, near, top = b.tensor("far", 70), b.tensor("gap", 40), b.tensor("near", 60), b.tensor("top", 10)
    wall, big = b.tensor("wall", 5, "weight"), b.tensor("wide", 95)
    b.op("start", reads=[wall], duration=1)
    for t in (far, top, gap, near):
        b.op(f"make_{t}", writes=[t], duration=100)
    b.op("idle", duration=100_000)
    b.op("use_gap", reads=[gap], duration=1)
    b.op("make_wide", writes=[big], duration=10)
    b.op("use_wide", reads=[big], duration=10)
    for t in (near, top, far):
        b.op(f"use_{t}", reads=[t], duration=10)
    trace = b.build(outputs=[], carry=())
    assert evicted(run(trace, 185, "first", **ALONE)) == ["near"]
    assert evicted(run(trace, 185, "first", **ALONE, adjacent=False)) == ["far", "near"]


def test_one_is_evicted_at_a_time_and_no_more_than_makes_a_hole():
    trace = candidates([40, 40, 40, 40], [100, 10, 10, 10], 70)
    result = run(trace, 160, "first", **ALONE)
    assert evicted(result) == ["t0", "t1"]
    assert result.log.counters["pressure_calls"] >= 2


# ---- the score, by a twin that looks at all candidates -----------------------------------------------------


class Twin(Online):
    """Passes everything on, and holds each choice against the least score over all candidates, found afresh."""

    def __init__(self, inner: Any, trace: Trace, times: list[int], penalty: float, adjacent: bool) -> None:
        self.inner, self.trace, self.times = inner(), trace, times
        self.penalty, self.adjacent = penalty, adjacent
        self.here: set[int] = set()
        self.ever: set[int] = set()
        self.used: dict[int, int] = {}
        self.again: dict[int, int] = {}
        self.group: dict[int, list[int]] = {}  # evicted tensor -> its class, one list shared by all members
        self.cost: dict[int, int] = {}  # id of that list -> cost
        self.choices = 0

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        return self.inner.before(op, memory)

    def notice(self, change: Change) -> None:
        self.inner.notice(change)
        t, now = change.tensor, change.now
        if change.what == "read":
            self.used[t] = now
        elif change.what == "came":
            if t in self.ever:
                self.again[t] = self.again.get(t, 0) + 1
                mine = self.group.pop(t)
                self.cost[id(mine)] -= self.times[t]
            else:
                self.used[t] = now
            self.here.add(t)
            self.ever.add(t)
        else:
            self.here.discard(t)
            mine = [t]
            self.cost[id(mine)] = self.times[t]
            self.group[t] = mine
            for other in self.neighbours(t):
                theirs, mine = self.group[other], self.group[t]
                if theirs is not mine:
                    theirs += mine
                    self.cost[id(theirs)] += self.cost[id(mine)]
                    for member in mine:
                        if self.group.get(member) is mine:
                            self.group[member] = theirs

    def neighbours(self, t: int) -> list[int]:
        op = int(self.trace.producer[t])
        around = [*dict.fromkeys(self.trace.reads(op)), *(w for w in self.trace.writes(op) if w != t)]
        return [o for o in around if o in self.group]

    def score(self, t: int, memory: Memory) -> float:
        n = sum(max(self.cost[id(self.group[o])], self.times[o]) for o in self.neighbours(t))
        beside = sum(memory.neighbours(t, "hbm")) if self.adjacent else 0
        size = (self.trace.tensors[t].bytes + beside) / 1024 / 1024
        return (n + 1e-3) * self.penalty ** self.again.get(t, 0) / (size * (memory.now - self.used[t] + 1e-3))

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        answer = list(self.inner.on_pressure(need, memory))
        assert len(answer) <= 1
        free = [t for t in self.here if not memory.is_locked(t) and self.trace.producer[t] >= 0]
        assert bool(answer) == bool(free)
        if answer:
            least = min(self.score(t, memory) for t in free)
            assert self.score(int(answer[0].tensor), memory) == pytest.approx(least, rel=1e-9)
            self.choices += 1
        return answer


@pytest.mark.parametrize(("fit", "penalty"), [("", 1.0001), ("first", 1.0001), ("best", 2.0)])
def test_each_choice_has_the_least_score_of_all_candidates(fit, penalty):
    choices = 0
    for seed in range(8):
        trace = random_dag(20, seed, weights=0.0, max_bytes=1000)
        platform = machine(kept(trace) * (45 + 5 * seed) // 100, fit)
        problem = problem_for(trace, platform)
        plan = load("megtaichi", **ALONE, penalty=penalty).plan(problem)
        times = [problem.cost.op_ns(int(op)) if op >= 0 else 0 for op in trace.producer]
        twins: list[Twin] = []

        def make(plan=plan, trace=trace, times=times, twins=twins) -> Twin:
            twins.append(Twin(plan.online, trace, times, penalty, adjacent=bool(fit)))
            return twins[-1]

        with suppress(OutOfMemory):
            replay(replace(plan, online=make), platform)
        choices += twins[0].choices
    assert choices > 100


# ---- against DTR ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_without_addresses_and_penalty_and_with_dtr_s_neighbours_it_is_dtr(seed):
    # costs of a second and more that leave no ties, so that epsilon decides nothing
    b, plain = TraceBuilder(), random_dag(16, seed, weights=0.0, max_bytes=1000)
    for t in plain.tensors:
        b.tensor(t.name, t.bytes, t.role)
    for i, op in enumerate(plain.ops):
        b.copy_op(op, duration=10**9 + (7919 * i + seed) ** 2 % 1_000_003 * 977)
    trace = b.build(outputs=plain.outputs, carry=())
    budget, seen = kept(trace), 0
    for percent in (95, 90, 85, 80):
        with suppress(OutOfMemory):
            mine = simulate(trace, machine(budget * percent // 100), "megtaichi", **LIKE_DTR)
            other = simulate(trace, machine(budget * percent // 100), "dtr", ties="first")
            assert mine.log.intervals.tolist() == other.log.intervals.tolist()
            seen += len(reruns(mine))
    assert seen


# golden: DTR's authors' prototype simulator with the first of equal scores, extra ops on unit chains; the second
# source is this project's `dtr` (test_dtr.py). Epsilon breaks ties that the prototype leaves to order.
@pytest.mark.parametrize(("n", "slots", "extra"), [(16, 8, 8), (64, 16, 49), (256, 32, 230), (64, 6, 177)])
def test_unit_chains_cost_nearly_what_the_prototype_of_dtr_needs(n, slots, extra):
    trace = uniform_chain(n, duration=10**6)
    log = simulate(trace, machine(slots), "megtaichi", **LIKE_DTR).log
    assert (log.interval("why") == WHY["recompute"]).sum() == pytest.approx(extra, rel=0.15, abs=1)


def failures(policy: str, fit: str, **parameters: Any) -> int:
    count = 0
    for seed in range(6):
        trace = random_dag(25, seed, weights=0.2, max_bytes=1000)
        top = kept(trace)
        for percent in (60, 70, 75, 80, 85):
            try:
                simulate(trace, machine(top * percent // 100, fit), policy, **parameters)
            except (Infeasible, Deadlock):
                count += 1
    return count


def test_under_fragmentation_it_fails_less_often_than_dtr_and_than_without_addresses():
    mine = failures("megtaichi", "first", **ALONE)
    assert mine < failures("megtaichi", "first", **ALONE, adjacent=False) < failures("dtr", "first")


def apart(trace: Trace) -> Trace:
    """The same ops, each activation in a storage of its own, as both systems have it."""
    b = TraceBuilder(dict(trace.meta))
    for t in trace.tensors:
        b.tensor(t.name, t.bytes, t.role, replaces=None if t.role in ("activation", "temporary") else t.replaces)
    for op in trace.ops:
        b.copy_op(op)
    return b.build(outputs=trace.outputs, carry=trace.carry)


def test_resnet_50_needs_a_tenth_less_than_under_dtr_where_memory_has_addresses():
    # printed in the abstract: 11 % less than DTR on ResNet-50 (one source; the machine and the batch are not given)
    in_fp32 = {"engines.gpu.peak.tf32": "19.5 TFLOP/s", "engines.gpu.image_order.tf32": "any"}
    trace, platform = apart(cnn("resnet-50", batch=32)), load_profile("a100_40_pcie", overrides=in_fp32)
    top = kept(trace)

    def least(policy: str, allocator: Allocator, **parameters: Any) -> int:
        """The share of the memory, in percent, from which on every percent more is enough."""
        for percent in range(60, 30, -1):
            limited = platform.with_budget(top * percent // 100)
            tiers = tuple(replace(t, allocator=allocator) if t.name == "hbm" else t for t in limited.tiers)
            try:
                simulate(trace, replace(limited, tiers=tiers), policy, **parameters)
            except OutOfMemory:
                return percent + 1
        return 0

    first_fit, sums = Allocator("pool", {"fit": "first"}), Allocator("exact")
    assert least("megtaichi", first_fit, parts=1) <= 0.9 * least("dtr", first_fit)
    assert least("megtaichi", sums, parts=1) >= least("dtr", sums)


def test_a_budget_that_is_too_small_is_refused_with_who_holds_what():
    trace = w1(3)
    floor = smallest_budget(trace, machine(1 << 40), "megtaichi", tolerance=0.001)
    assert floor is not None
    assert floor < kept(trace)
    run(trace, floor)
    with pytest.raises(OutOfMemory) as refusal:
        run(trace, floor // 2)
    assert refusal.value.holders
    assert refusal.value.need_bytes > refusal.value.free_bytes


# ---- the partition ---------------------------------------------------------------------------------------

TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 40, "n_positions": 64}


def test_the_batch_is_dealt_out_where_evicting_alone_takes_longer_or_fails():
    trace = transformer("gpt2-small", batch=4, sequence=512, precision="bf16", optimizer="adamw_fused")
    platform = load_profile("a100_40_pcie")
    ample = simulate(trace, platform, "megtaichi")
    assert ample.plan.notes == {"parts": 1, "trials": {1: ample.log.end}}
    assert ample.plan.trace is trace
    floor = 0.5 * ample.summary()["peak_bytes"]
    with pytest.raises(OutOfMemory):
        simulate(trace, platform, "megtaichi", budget=int(floor), parts=1)
    tight = simulate(trace, platform, "megtaichi", budget=int(floor))
    parts, trials = tight.plan.notes["parts"], tight.plan.notes["trials"]
    assert parts > 1
    assert trials[1] is None
    assert trials[parts] == tight.log.end == min(t for t in trials.values() if t)
    assert tight.summary()["peak_bytes"] <= floor
    check_values(replayed(load("megtaichi"), tight.plan, trace, platform.with_budget(int(floor))))


def test_parts_that_are_given_are_made():
    trace = transformer(TINY, batch=4, sequence=64)
    for parts in (1, 2, 4):
        result = run(trace, 1 << 40, parts=parts)
        assert len([op for op in result.plan.trace.ops if op.name.startswith("h0.attn.qkv.mb")]) == parts * (parts > 1)
        assert result.plan.trace.meta.get("microbatches", 1) == parts
    assert kept(trace) > peak(run(trace, 1 << 40, parts=2).log) > peak(run(trace, 1 << 40, parts=4).log)


def test_what_cannot_be_dealt_out_is_evicted_alone():
    trace = transformer(TINY, batch=3, sequence=64, loss="chunked")
    tight = int(0.9 * kept(trace))
    result = simulate(trace, machine(tight), "megtaichi")
    assert result.plan.notes["parts"] == 1
    with pytest.raises(PolicyError, match="parts is 2: split_batch: 2 microbatches do not divide the batch of 3"):
        simulate(trace, machine(tight), "megtaichi", parts=2)
    with pytest.raises(PolicyError, match="parts is 3: split_batch: op "):
        simulate(trace, machine(tight), "megtaichi", parts=3)
    b = TraceBuilder({"batch": 2})
    x, y, z = b.tensor("x", 8, "input"), b.tensor("y", 8), b.tensor("z", 8)
    b.op("f", reads=[x], writes=[y], splits=["batch"])
    b.op("g", reads=[y], writes=[z], device=1, splits=["batch"])
    with pytest.raises(PolicyError, match="one device; this trace has 2"):
        load("megtaichi", parts=2).plan(problem_for(b.build(outputs=[z], carry=()), machine(100)))


# ---- the whole ---------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    percent=st.integers(30, 95),
    fit=st.sampled_from(["", "first", "best"]),
    parameters=st.fixed_dictionaries(
        {
            "neighbours": st.sampled_from(["producer", "both"]),
            "own_cost": st.booleans(),
            "threshold": st.sampled_from([None, 0.5, 0.9]),
            "sample": st.booleans(),
            "at_least": st.sampled_from([0, 300, "1 MiB"]),
        }
    ),
)
def test_any_graph_runs_to_the_end_within_the_budget(seed, percent, fit, parameters):
    trace = random_dag(12, seed, weights=0.3, max_bytes=1000)
    try:
        result = run(trace, kept(trace) * percent // 100, fit, **parameters)
    except OutOfMemory:
        return
    ran = result.log.interval("op")[result.log.interval("why") == WHY["run"]]
    assert sorted(ran.tolist()) == list(range(len(result.plan.trace.ops)))


def test_a_threshold_is_kept_to_before_each_op():
    trace = uniform_chain(40, size=100, duration=10)
    result = run(trace, 10_000, **ALONE, threshold=0.1)
    rows = result.log.changes[result.log.change("time") < 400]  # the forward pass: nothing is recomputed
    assert int(np.cumsum(rows[:, 2]).max()) == 1000 + 100  # what the threshold leaves, and the result of an op
    assert reruns(result)
    assert result.log.counters["pressure_calls"] == 0
    assert not reruns(run(trace, 10_000, **ALONE))


def test_small_tensors_go_last():
    trace = candidates([10, 100, 100, 100], [10, 5000, 10, 10], 90)
    assert evicted(run(trace, 310, **ALONE))[0] == "t0"
    assert evicted(run(trace, 310, parts=1, at_least=50))[0] == "t1"
    assert evicted(run(trace, 310, parts=1, at_least="101 B"))[0] == "t0"


@pytest.fixture(scope="module")
def medium():
    return transformer("gpt2-medium", batch=4, sequence=1024, precision="amp_bf16")


def test_gpt2_medium_is_dealt_out_where_dtr_takes_longer(medium):
    platform = load_profile("a100_40_pcie")
    free = simulate(medium, platform, "dtr")
    half = simulate(medium, platform, "megtaichi", budget="10 GB")
    assert half.summary()["peak_bytes"] <= 10**10
    assert half.plan.notes["parts"] == 2
    assert free.log.end < half.log.end < simulate(medium, platform, "dtr", budget="10 GB").log.end
    assert simulate(medium, platform, "megtaichi", budget="8 GB", parts=4).log.complete


@pytest.mark.parametrize(("other", "parameters"), [
    ("dtr", {}),
    ("dtr", {"heuristic": "dtr"}),
    ("dtr", {"heuristic": "lru"}),
    ("delta", {}),
    ("sac_knapsack", {}),
    ("full_recompute", {}),
])  # fmt: skip
def test_it_is_none_of_its_siblings(other, parameters):
    trace, platform = transformer("gpt2", batch=8, sequence=512, precision="amp_bf16"), load_profile("a100_40_pcie")
    budget = int(0.85 * simulate(trace, platform).summary()["peak_bytes"])
    mine = simulate(trace, platform, "megtaichi", budget=budget, parts=1).log
    assert mine != simulate(trace, platform, other, budget=budget, **parameters).log


@pytest.mark.parametrize(("parameters", "fit"), [
    ({"neighbours": "both"}, ""),
    ({"own_cost": True}, ""),
    ({"penalty": 3.0}, ""),
    ({"adjacent": False}, "first"),
    ({"at_least": 0}, ""),
    ({"threshold": 0.5}, ""),
    ({"sample": True}, ""),
])  # fmt: skip
def test_every_parameter_changes_some_run(parameters, fit):
    outcomes: list[list[str]] = [[], []]
    for seed in range(8):
        trace = random_dag(20, seed, weights=0.0, max_bytes=1000)
        platform = machine(kept(trace) * 7 // 10, fit)
        for found, more in zip(outcomes, ({}, parameters), strict=True):
            try:
                result = simulate(trace, platform, "megtaichi", **{"parts": 1, "at_least": 500, **more})
                found.append(result.log.content_hash)
            except OutOfMemory as error:
                found.append(str(error))
    assert outcomes[0] != outcomes[1]


def test_the_plan_can_be_pickled_and_gives_the_same_log():
    trace = w1(4)
    platform = machine(kept(trace) * 7 // 10)
    plan = load("megtaichi").plan(problem_for(trace, platform))
    again = replace(plan, online=partial(pickle.loads(pickle.dumps(plan.online))))
    assert replay(plan, platform) == replay(again, platform)


@pytest.mark.parametrize(("parameters", "text"), [
    ({"parts": 0}, "parts is 0; expected int of at least 1 or None"),
    ({"neighbours": "bth"}, "did you mean 'both'"),
    ({"penalty": 0.5}, "penalty is 0.5; expected float of at least 1"),
    ({"threshold": 0.0}, "threshold is 0.0; expected float above 0 and at most 1"),
    ({"threshold": 1.5}, "threshold is 1.5; expected float above 0 and at most 1"),
    ({"at_least": -1}, "at_least is -1; expected bytes, 0 or more"),
    ({"at_least": "1 MB/s"}, "1 MB/s"),
])  # fmt: skip
def test_wrong_parameters_are_named(parameters, text):
    with pytest.raises(PolicyError, match=text):
        load("megtaichi", **parameters)


@pytest.mark.parametrize("parameters", [{}, {"parts": 1, "own_cost": True, "neighbours": "both", "threshold": 0.8}])
def test_it_keeps_the_law(parameters, tmp_path):
    policy = load("megtaichi", at_least=0, **parameters)
    report = check_policy(policy, examples=20, folder=tmp_path, across_processes=False)
    assert report.passed, report.as_text()
