"""The array path against the event path and the reference simulator: equal logs, byte for byte, and equal refusals."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import load_profile
from sim.analysis.peak_memory import home_peak
from sim.conformance.examples import Example, random_examples
from sim.engine import array_path
from sim.engine.prepare import prepare
from sim.engine.replay import replay
from sim.engine.resolve import Resolved
from sim.errors import Infeasible, Thrashing, TiersimError
from sim.experiment import problem_for, reference_run
from sim.hardware.platform import Allocator, Platform
from sim.iterations import run_iteration
from sim.log import CAUSE, INTERVAL_COLUMNS, WHY, EventLog
from sim.plan import Action, Drop, Plan, Recompute
from sim.policies import load
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace, TraceBuilder
from tests.engine.differential import difference
from tests.engine.random_plans import can_run_again, made_by
from workloads import random_dag, transformer, unet

some = settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
AMPLE = 1 << 50


def is_taken(plan: Plan, platform: Platform) -> bool:
    """Whether a run takes the array path from beginning to end."""
    prepared = prepare(plan.trace, platform)
    resolved = Resolved(plan, platform, prepared)
    covered = array_path.covers(plan, platform, prepared, resolved)
    return covered and array_path.run(plan, platform, prepared, resolved, 100.0) is not None


def outcome(plan: Plan, platform: Platform, fast: bool) -> tuple[str, EventLog | None]:
    """In words how a run ends, with all that an error has; and its log, if there is one."""
    try:
        return "done", replay(plan, platform, fast=fast)
    except TiersimError as error:
        fields = {name: value for name, value in vars(error).items() if name != "log"}
        return f"{type(error).__name__}: {error} {fields}", getattr(error, "log", None)


def assert_equal(plan: Plan, platform: Platform) -> None:
    mine, theirs = outcome(plan, platform, True), outcome(plan, platform, False)
    assert mine[0] == theirs[0]
    if mine[1] is None or theirs[1] is None:
        assert mine[1] is theirs[1]
        return
    for part in ("intervals", "changes", "reserved"):
        here, there = getattr(mine[1], part), getattr(theirs[1], part)
        assert here.dtype == there.dtype, part
        assert here.flags.c_contiguous == there.flags.c_contiguous, part
        assert np.array_equal(here, there), part
    assert mine[1] == theirs[1]
    assert list(mine[1].counters.items()) == list(theirs[1].counters.items())


# ---- random plans --------------------------------------------------------------------------------


def rerun_plan(trace: Trace, code: int) -> Plan:
    """A legal schedule: some ops are recomputed before later ones, and what they produce is dropped meanwhile."""
    draw, ops = Random(code), len(trace.ops)
    reruns: dict[int, list[int]] = {}
    for _ in range(draw.randrange(1, 12)):
        anchor = draw.randrange(ops)
        if anchor:
            reruns.setdefault(anchor, []).append(draw.randrange(anchor))
    reruns = {anchor: sorted(chosen) if draw.random() < 0.8 else chosen for anchor, chosen in reruns.items()}
    return Plan(trace, schedule_of(TraceIndex(trace), reruns, prune=draw.random() < 0.3).actions())


def loose_plan(trace: Trace, code: int) -> Plan:
    """Drops and recomputations at random anchors; some are early, some find nothing, some leave a read without."""
    draw, actions = Random(code), list[Action]()
    for _ in range(draw.randrange(1, 8)):
        anchor = draw.randrange(len(trace.ops))
        side = draw.choice(("before", "before", "after"))
        if draw.random() < 0.5:
            earlier = [op for op in range(anchor) if can_run_again(trace, op)] or [anchor]
            actions.append(Recompute(draw.choice(earlier), before=anchor))
        else:
            made = made_by(trace, anchor if side == "after" else anchor - 1)
            tensors = made if made and draw.random() < 0.95 else range(len(trace.tensors))
            actions.append(Drop(draw.choice(tensors), **{side: anchor}))
    return Plan(trace, tuple(actions))


def machine_for(example: Example, code: int) -> Platform:
    """The example's machine, with ample memory or with its budget."""
    platform = example.platform
    return platform if code % 3 == 0 else platform.with_budget(AMPLE)


def lazy_plan(trace: Trace, code: int) -> Plan:
    """One of these, and what is dead is retained: all of it, or some tensors."""
    plan = (rerun_plan, loose_plan)[code % 2](trace, code)
    some = frozenset(t for t in range(len(trace.tensors)) if (t * 7 + code) % 3)
    return replace(plan, keep_dead=some if code % 3 else True)


PLANS = {"nothing": lambda trace, code: Plan(trace), "reruns": rerun_plan, "loose": loose_plan, "lazy": lazy_plan}


@pytest.mark.parametrize("kind", PLANS)
def test_a_straight_run_has_one_log_on_either_path(kind):
    seen = {True: 0, False: 0}

    @some
    @given(random_examples(exact=True, real=2), st.integers(0, 2**20))
    def check(example, code):
        plan, platform = PLANS[kind](example.trace, code), machine_for(example, code)
        seen[is_taken(plan, platform)] += 1
        if plan.trace.devices == 1:
            assert_equal(plan, platform)

    check()
    # which examples are drawn depends on what else the process has imported, so these are far below what was seen
    assert seen[True] > (0.03 if kind in ("loose", "lazy") else 0.15) * sum(seen.values()), seen


@pytest.mark.parametrize("kind", PLANS)
def test_the_reference_simulator_agrees(kind):
    @settings(some, max_examples=40)
    @given(random_examples(exact=True, real=0), st.integers(0, 2**20))
    def check(example, code):
        plan, platform = PLANS[kind](example.trace, code), machine_for(example, code)
        if is_taken(plan, platform):
            assert difference(plan, platform) == ""

    check()


# ---- shipped policies ----------------------------------------------------------------------------

STRAIGHT = (
    *("keep_all", "full_recompute", "selective_recompute", "chen", "every_k", "min_cut", "revolve", "vlad"),
    *("sac_knapsack", "checkmate", "optimizer_in_backward"),
)
"""Policies that plan everything ahead and move nothing."""
ONLINE = ("dtr", "delta", "megtaichi", "lru_tiering", "superneurons", "capuchin")
"""Policies that decide during the run, and say what they do where memory is never short."""
OTHERS = ("swap_all", "save_on_cpu", "zero_offload")


def planned(name: str, budget: float = 0.8) -> tuple[Plan, Platform]:
    """A policy's plan for a small job on an A100, at that share of the peak."""
    machine = load_profile("a100_80_sxm")
    trace = unet(3, update=True) if name == "checkmate" else transformer("gpt2", batch=8, sequence=64)
    limited = machine.with_budget(int(budget * home_peak(reference_run(trace, machine))))
    try:
        return load(name).plan(problem_for(trace, limited)), limited
    except Infeasible:
        return load(name).plan(problem_for(trace, machine)), machine


@pytest.mark.parametrize("name", STRAIGHT)
def test_what_moves_nothing_takes_the_array_path(name):
    plan, limited = planned(name)
    ample = limited.with_budget(AMPLE)
    assert is_taken(plan, ample)
    assert_equal(plan, limited)
    assert_equal(plan, ample)


@pytest.mark.parametrize("name", ONLINE)
def test_an_online_part_is_not_asked_where_memory_is_never_short(name):
    plan, ample = planned(name, 2.0)
    tight = ample.with_budget(int(0.4 * ample.home(0).capacity))
    assert is_taken(plan, ample)
    assert not is_taken(plan, tight)
    assert not is_taken(replace(plan, unpressed=None), ample)
    for machine in (ample, tight):
        assert_equal(plan, machine)


@pytest.mark.parametrize(
    "policy",
    [
        *("dtr", "dtr(heuristic=dtr)", "delta", "delta(watermark=0.1)", "megtaichi", "lru_tiering"),
        *("lru_tiering(watermark=0.1, prefetch=4)", "superneurons", "capuchin", "mt3000_layered"),
    ],
)
def test_what_a_policy_says_of_its_online_part_is_what_that_does(policy):
    seen = {True: 0, False: 0}
    chosen = load(policy)

    @settings(some, max_examples=40)
    @given(random_examples(chosen.needs | {"host"}, exact=True, real=2), st.integers(0, 2**20))
    def check(example, code):
        machine = machine_for(example, code)
        try:
            plan = chosen.plan(problem_for(example.trace, machine))
        except TiersimError:
            return
        seen[is_taken(plan, machine)] += 1
        assert_equal(plan, machine)

    check()
    assert seen[True], seen


def test_a_part_that_acts_ahead_of_need_is_asked_where_less_is_free():
    """With its watermark the job fits, but only if something leaves ahead of need."""
    plan, limited = planned("lru_tiering(watermark=0.2)", 1.1)
    assert not is_taken(plan, limited)
    assert_equal(plan, limited)
    assert replay(plan, limited).counters["pressure_calls"] == 0
    plan, limited = planned("lru_tiering(watermark=0.2)", 1.4)
    assert is_taken(plan, limited)


@pytest.mark.parametrize("name", OTHERS)
def test_what_moves_does_not(name):
    plan, limited = planned(name)
    assert not is_taken(plan, limited.with_budget(AMPLE))


@pytest.mark.parametrize("allocator", ["caching", "pool"])
def test_addresses_take_the_event_path(allocator):
    plan, limited = planned("keep_all")
    tiers = (replace(limited.tiers[0], allocator=Allocator(allocator)), *limited.tiers[1:])
    assert not is_taken(plan, replace(limited, tiers=tiers).with_budget(AMPLE))


def test_an_engine_that_shares_its_bandwidth_takes_the_event_path():
    trace = transformer("gpt2", batch=1, sequence=32)
    assert not is_taken(Plan(trace), load_profile("mt3000_cluster").with_budget(AMPLE))


def test_further_iterations_take_it_too():
    """What an iteration is placed by is where the one before left it: at home."""
    trace, machine = transformer("gpt2", batch=1, sequence=32), load_profile("a100_80_sxm")
    plan = load("full_recompute").plan(problem_for(trace, machine))
    first = run_iteration(trace, plan, machine, last=False)
    second = run_iteration(trace, plan, machine, (first,))
    assert second.plan.place
    assert is_taken(second.plan, machine)
    assert second.log == replay(second.plan, machine, fast=False)


# ---- refusals ------------------------------------------------------------------------------------


def test_thrashing_is_refused_alike():
    trace, machine = transformer("gpt2", batch=1, sequence=32), load_profile("a100_80_sxm")
    plan = load("full_recompute").plan(problem_for(trace, machine))
    refused = []
    for fast in (True, False):
        with pytest.raises(Thrashing) as error:
            replay(plan, machine, fast=fast, recompute_limit=0.01)
        refused.append((str(error.value), error.value.log))
    assert refused[0] == refused[1]


def test_an_end_that_no_column_can_hold_is_refused_alike():
    b = TraceBuilder()
    x = b.tensor("x", 10, "input")
    for i in range(3):
        b.op(f"op{i}", reads=[x], writes=[b.tensor(f"y{i}", 1)], duration=1 << 62)
    plan, machine = Plan(b.build()), load_profile("a100_80_sxm")
    for fast in (True, False):
        with pytest.raises(OverflowError):
            replay(plan, machine, fast=fast, recompute_limit=None)


def odd_ops() -> Trace:
    """Ops that read a tensor twice, read or write nothing, take no time; a result without bytes, an input not read."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 10, "input"), b.tensor("y", 5), b.tensor("z", 0)
    b.tensor("idle", 3, "input")
    b.op("twice", reads=[x, x], writes=[y], duration=0)
    b.op("nothing", reads=[], writes=[], duration=3)
    b.op("last", reads=[y, y], writes=[z], duration=2)
    return b.build()


@pytest.mark.parametrize(
    "actions",
    [
        (),
        (Recompute("nothing", before="nothing"),),
        (Recompute("nothing", before="last"), Drop("y", before="last"), Recompute("twice", before="last")),
        (Drop("z", after="last"), Drop("z", after="last")),
        (Drop("x", after="last"), Drop("x", after="last"), Drop("y", after="last")),
        (Drop("x", tier="host", after="last"),),
        (Drop("z", before="last"),),
        (Drop("x", before="twice"),),
        (Recompute("last", before="twice"),),
        (Recompute("last", before="last"),),
        (Recompute("nothing", after="last"),),
    ],
    ids=str,
)
def test_odd_ops_and_actions(actions):
    trace = odd_ops()
    assert_equal(Plan(trace, actions), load_profile("a100_80_sxm"))


@pytest.mark.parametrize(
    "options",
    [
        {"place": {"idle": "host"}},
        {"place": {"z": "host"}},
    ],
    ids=str,
)
def test_a_plan_that_places_elsewhere_takes_the_event_path(options):
    trace, machine = odd_ops(), load_profile("a100_80_sxm")
    plan = Plan(trace, **options)
    assert not is_taken(plan, machine)
    assert_equal(plan, machine)
    assert outcome(plan, machine, True) != outcome(Plan(trace), machine, True)


@pytest.mark.parametrize("retained", [True, frozenset({1})], ids=str)
def test_what_is_dead_and_retained_is_not_freed(retained):
    trace, machine = odd_ops(), load_profile("a100_80_sxm")
    plan = Plan(trace, keep_dead=retained)
    assert is_taken(plan, machine)
    assert_equal(plan, machine)
    assert outcome(plan, machine, True) != outcome(Plan(trace), machine, True)


@pytest.mark.parametrize("times", [6, 7])
def test_an_op_of_no_time_counts_a_nanosecond(times):
    """The ideal time of the trace is 1 + 3 + 2 ns."""
    actions = [Recompute("twice", before="last")] * times
    plan, machine = Plan(odd_ops(), actions), load_profile("a100_80_sxm")
    assert is_taken(plan, machine)
    for fast in (True, False):
        if times > 6:
            with pytest.raises(Thrashing):
                replay(plan, machine, fast=fast, recompute_limit=1.0)
        else:
            replay(plan, machine, fast=fast, recompute_limit=1.0)


def test_the_first_run_of_a_codec_is_logged_as_such():
    b = TraceBuilder()
    x, code, back = b.tensor("x", 10, "input"), b.tensor("code", 5), b.tensor("back", 10)
    b.op("enc", "codec", reads=[x], writes=[code], duration=5)
    b.op("dec", "codec", reads=[code], writes=[back], duration=7)
    plan, machine = Plan(b.build(outputs=[back]), [Recompute("enc", before="dec")]), load_profile("a100_80_sxm")
    assert is_taken(plan, machine)
    assert_equal(plan, machine)
    why = replay(plan, machine).intervals[:, INTERVAL_COLUMNS.index("why")].tolist()
    assert why == [WHY["codec"], WHY["recompute"], WHY["codec"]]


def test_of_drops_of_one_tensor_at_one_place_the_first_counts():
    b = TraceBuilder()
    tensors = [b.tensor(f"x{i}", 10 + i, "input") for i in range(4)]
    b.op("op", duration=5)
    trace, draw = b.build(outputs=[]), Random(0)
    for _ in range(20):
        drops = tuple(Drop(draw.choice(tensors), **{draw.choice(("before", "after")): 0}) for _ in range(40))
        plan, machine = Plan(trace, drops), load_profile("a100_80_sxm")
        assert is_taken(plan, machine)
        assert_equal(plan, machine)


def test_the_run_without_actions_is_made_once_for_all_capacities(monkeypatch):
    trace, machine = transformer("gpt2", batch=1, sequence=8), load_profile("a100_80_sxm")
    first = replay(Plan(trace), machine)
    again = replay(Plan(trace), machine.with_budget(AMPLE))
    assert again.changes is first.changes
    assert again.intervals is first.intervals
    assert again.platform.budget == AMPLE
    with pytest.raises(ValueError, match="read-only"):
        first.changes[0, 0] = 1
    with pytest.raises(Infeasible):
        replay(Plan(trace), machine.with_budget(home_peak(first) - 1))
    monkeypatch.setattr(array_path, "KEPT_OPS", 0)
    assert replay(Plan(trace), machine).changes is not first.changes
    assert replay(Plan(trace), machine) == first


@pytest.mark.parametrize("profile", ["a100_80_sxm", "mt3000_survey", "cloudmatrix384_die"])
def test_a_budget_changes_no_time(profile):
    machine = load_profile(profile)
    limited = machine.with_budget(AMPLE)
    assert limited.timing_hash == replace(limited, budget=AMPLE).timing_hash
    assert limited.content_hash != machine.content_hash


def test_a_trace_without_ops():
    b = TraceBuilder()
    b.tensor("x", 10, "input")
    plan, machine = Plan(b.build()), load_profile("a100_80_sxm")
    assert is_taken(plan, machine)
    assert_equal(plan, machine)


# ---- planted faults ------------------------------------------------------------------------------


def _late(make):
    """Frees come one step late, as far as there is one."""

    def frees(columns, steps, *arguments):
        key, tensor = make(columns, steps, *arguments)
        step = key // array_path.PHASES
        return key + array_path.PHASES * (step < len(steps.op) - 1), tensor

    return frees


def _swapped(make):
    """The first two rows of one nanosecond change places."""

    def changes(*arguments):
        rows = make(*arguments)
        alike = np.flatnonzero((rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 5] != rows[:-1, 5]))
        if len(alike):
            rows[[alike[0], alike[0] + 1]] = rows[[alike[0] + 1, alike[0]]]
        return rows

    return changes


def _without(cause):
    def forget(make):
        return lambda *arguments: (rows := make(*arguments))[rows[:, 5] != CAUSE[cause]]

    return forget


def _always_legal(make):
    return lambda *arguments: True


FAULTS = {
    "frees one step late": ("_frees", _late),
    "swaps two rows of an instant": ("_changes", _swapped),
    "forgets workspace": ("_changes", _without("workspace")),
    "forgets what is overwritten": ("_changes", _without("overwritten")),
    "takes any read for legal": ("_is_legal", _always_legal),
    "takes no retained tensor for dead": (
        "_are_dead",
        lambda make: lambda columns, steps, dropped, *_: np.zeros(len(dropped.key), np.bool_),
    ),
    "takes any recomputation for short": ("_recomputes_too_much", lambda make: lambda *arguments: False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    trace = random_dag(14, seed=5)
    machine = load_profile("a100_80_sxm")
    big = transformer("gpt2", batch=1, sequence=8)
    plans = [
        Plan(big),
        *(loose_plan(trace, code) for code in range(60)),
        rerun_plan(big, 1),
        load("dtr").plan(problem_for(big, machine)),
    ]

    def check():
        for plan in plans:
            assert_equal(plan, machine)
        test_thrashing_is_refused_alike()

    monkeypatch.setattr(array_path, "KEPT_OPS", 0)  # no run is kept from before
    check()
    name, plant = FAULTS[fault]
    monkeypatch.setattr(array_path, name, plant(getattr(array_path, name)))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
