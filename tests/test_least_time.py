"""The proven bound: by hand, never beaten by a run of its class, nearly reached, and silent about other runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim import LowerBound, Plan, TraceBuilder, load_policy, load_profile, lower_bound, simulate
from sim.analysis.peak_memory import home_peak
from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.hardware.platform import Engine, Link, Tier
from sim.plan import Move, Recompute
from sim.policies import names
from sim.rewrites.holding import with_releases
from tests.machines import GB, machine
from tests.policies.hybrid.joint_plans import small_graph
from tests.policies.hybrid.test_hybrid import random_chain
from tests.policies.hybrid.test_joint_optimal import made_late, read_first_and_last
from workloads import transformer
from workloads.synthetic import uniform_chain

# ---- by hand -----------------------------------------------------------------------------------


def test_where_all_fits_the_bound_is_every_op_once():
    trace = uniform_chain(6, duration=10)
    bound = lower_bound(trace, machine(100))
    assert (bound.makespan_ns, bound.weaker) == (bound.ops_ns, "") == (120, "")
    assert bound.above(simulate(trace, machine(100)).log) == 0.0


def test_copies_and_recomputation_share_what_a_tensor_costs():
    # its copy takes 100 ns, of which 54 pass before `wide`; the other 46 hundredths are recomputed, 50 ns in all
    assert lower_bound(made_late(), machine(110, host=1000)).makespan_ns == 574 + 23
    assert lower_bound(made_late(), machine(110)).makespan_ns == 574 + 50 + 200  # `long` is recomputed for it, too
    assert lower_bound(made_late(), machine(110), "240 B").makespan_ns == 574


def test_an_input_may_leave_and_return():
    trace, platform = read_first_and_last(), machine(210, host=1000)
    plan = Plan(trace, [Move("x", "host", after="first"), Move("x", "hbm", before="long")])
    bound, log = lower_bound(trace, platform, 420), replay(plan, machine(420, host=1000))
    assert not bound.outside(log)
    assert bound.makespan_ns <= log.end


def test_where_no_plan_fits_it_says_so():
    bound = lower_bound(uniform_chain(6), machine(1, host=100))
    assert bound.makespan_ns is None
    assert bound.text().startswith("no plan fits 1 B among those that run the ops as they are")


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_of_small_graphs_that_was_proven_best_is_below_it(seed):
    """`joint_optimal` plans op by op there, with a program of its own."""
    trace = small_graph(seed, 4)
    peak = home_peak(simulate(trace, machine()).log)
    platform = machine(int(0.8 * peak), host=10_000, rate=random.Random(seed).choice((10**8, GB, 3 * GB)))
    bound = lower_bound(trace, platform)
    try:
        result = simulate(trace, platform, "joint_optimal", time_limit=10.0)
    except TiersimError:
        return
    assert bound.above(result.log) >= 0.0


def test_the_smallest_tensor_that_counts_may_leave():
    # 20,000 bytes are the budget, so that a tensor of one byte counts: it leaves instead of being recomputed
    b = TraceBuilder({"model": "hand"})
    x, small, none = b.tensor("x", 0, "input"), b.tensor("small", 1), b.tensor("none", 0)
    wide, end = b.tensor("wide", 20_000), b.tensor("end", 0)
    b.op("make", reads=[x], writes=[small], duration=1000)
    b.op("pad", reads=[x], writes=[none], duration=10)
    b.op("widen", reads=[none], writes=[wide], duration=10)
    b.op("narrow", reads=[wide], writes=[end], duration=10)
    last = b.tensor("last", 0)
    b.op("last", reads=[end, small], writes=[last], duration=10)
    trace, platform = b.build(outputs=[last]), machine(20_000, host=1000)
    plan = Plan(trace, [Move(small, "host", after="make"), Move(small, "hbm", after="narrow")])
    log = replay(plan, platform)
    assert not beaten(lower_bound(trace, platform), log)
    assert log.end == 1041


# ---- no run of the class is below it -------------------------------------------------------------

JOINED = ("full_recompute; checkpoints: swap_all", "layers 0: full_recompute; rest: swap_all", "olla + hybrid")
QUICK = (*(name for name in names() if not load_policy(name).slow), *JOINED)
ALWAYS = ("hybrid", "dtr", "swap_all")


def beaten(bound: LowerBound, log) -> bool:
    """Whether a run of the class takes less than the bound, or fits where none should."""
    if bound.outside(log):
        return False
    return bound.makespan_ns is None or log.end < bound.makespan_ns


def problem(seed: int):
    """A small net and a machine whose memory is short, both drawn."""
    draw = random.Random(seed)
    kind = draw.choice(("graph", "in place", "chain", "layers"))
    if kind == "layers":
        trace = random_chain(seed, between=draw.random() < 0.5)[0]
    elif kind == "chain":
        trace = uniform_chain(draw.randint(5, 16), duration=draw.choice((1, 10, 1000)))
    else:
        trace = small_graph(seed, draw.randint(4, 9), in_place=kind == "in place")
    rate = draw.choice((None, 10**8, 3 * 10**8, GB, 3 * GB))
    budget = int(home_peak(simulate(trace, machine()).log) * draw.uniform(0.35, 0.98))
    link = {"host": 0 if rate is None else 1 << 50, "rate": rate, "fixed": draw.choice((0, 0, 2))}
    return trace, machine(budget, **link, copy_engines=draw.choice((1, 1, 2)))


def who_beats_it(seed: int) -> list[str]:
    """The policies that take less than the bound."""
    trace, platform = problem(seed)
    bound, found = lower_bound(trace, platform), []
    for name in (*ALWAYS, *random.Random(seed).sample(QUICK, 3)):
        try:
            log = simulate(trace, platform, name).log
        except TiersimError:
            continue
        found += [name] * beaten(bound, log)
    return found


@settings(max_examples=15)
@given(seed=st.integers(0, 100_000))
@example(seed=7)
def test_no_policy_beats_the_bound(seed):
    assert not who_beats_it(seed)


@pytest.fixture(scope="module")
def gpt2():
    trace = transformer("gpt2", batch=4, sequence=512, precision="amp_bf16")
    links = {f"links.{way}.rate": "10 GB/s" for way in ("d2h", "h2d")}
    return trace, load_profile("mt3000_survey", overrides=links).with_budget(3_064_000_000)


def test_on_a_real_model_the_best_is_so_near_that_a_bound_too_high_by_one_in_a_hundred_is_beaten(gpt2):
    trace, platform = gpt2
    bound = lower_bound(trace, platform)
    assert bound.makespan_ns > bound.ops_ns
    above = {name: bound.above(simulate(trace, platform, name).log) for name in ("hybrid", "twremat", "full_recompute")}
    assert 0.0 <= above["hybrid"] < 0.01
    assert min(above.values()) == above["hybrid"]
    # a bound that is too high by one in a hundred would be seen
    high = replace(bound, makespan_ns=round(1.01 * bound.makespan_ns))
    assert beaten(high, simulate(trace, platform, "hybrid").log)


# ---- what is not of the class --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("zero_offload + full_recompute", "changes what is computed"),
        ("weight_streaming + full_recompute", "copies weights"),
        ("g10", "copies weights"),
        ("sentinel", "copies weights"),
    ],
)
def test_what_other_policies_do_is_named(gpt2, policy, why):
    trace, platform = gpt2
    log, bound = simulate(trace, platform, policy).log, lower_bound(trace, platform)
    assert bound.outside(log) == why
    assert bound.above(log) is None


def with_weight():
    """A weight that two ops read and an update overwrites, with its gradient."""
    b = TraceBuilder({"model": "hand"})
    x, w, y, g = b.tensor("x", 8, "input"), b.tensor("w", 8, "weight"), b.tensor("y", 8), b.tensor("g", 8, "gradient")
    new = b.tensor("w+", 8, "weight", replaces=w)
    b.op("forward", reads=[x, w], writes=[y], duration=100)
    b.op("backward", reads=[y, w], writes=[g], phase="backward", duration=100)
    b.op("update", reads=[w, g], writes=[new], phase="update", duration=100)
    return b.build()


@pytest.mark.parametrize(
    ("actions", "place", "why"),
    [
        ([], {}, ""),
        ([Move("y", "host", after="forward")], {}, ""),
        ([Move("y", "host", after="forward", wire=4)], {}, "compresses what it copies"),
        ([Move("w", "host", keep=True, after="forward")], {}, "copies weights"),
        ([Move("g", "host", after="backward")], {}, "copies weight gradients"),
        ([Recompute("backward", before="update")], {}, "recomputes weight gradients"),
        ([], {"x": "host"}, "places inputs elsewhere"),
        ([Move("y", "drive", after="forward")], {}, "copies to 'drive'"),
        ([Move("y", "behind", after="forward")], {}, ""),
    ],
)
def test_a_run_of_another_class_is_told_by_its_log(actions, place, why):
    small = machine(100, host=1000)
    tiers = (*small.tiers, Tier("drive", 1000, 1000, GB, kind="nvme"), Tier("behind", 1000, 1000, GB, kind="nvme"))
    ends = (("hbm", "drive"), ("drive", "hbm"), ("host", "behind"), ("behind", "host"))
    platform = replace(small, tiers=tiers, links=(*small.links, *(Link(f"{a}-{b}", a, b, GB // 2) for a, b in ends)))
    trace = with_weight()
    assert lower_bound(trace, platform).outside(replay(Plan(trace, actions, place=place), platform)) == why


def test_a_tier_on_the_way_to_the_host_is_not_the_host():
    # the link behind it is slow: copies to it take less than the bound counts for copies to the host
    tiers = (Tier("hbm", 100, 100, GB, device=0), Tier("near", 1000, 1000, GB, device=0), Tier("host", 1000, 1000, GB))
    ends = (("hbm", "near", GB), ("near", "hbm", GB), ("near", "host", GB // 10), ("host", "near", GB // 10))
    links = tuple(Link(f"{a}-{b}", a, b, rate) for a, b, rate in ends)
    platform = replace(machine(100), tiers=tiers, links=links)
    trace = with_weight()
    bound = lower_bound(trace, platform)
    to_near, to_host = (Plan(trace, [Move("y", tier, after="forward")]) for tier in ("near", "host"))
    assert bound.outside(replay(to_near, platform)) == "copies to 'near'"
    assert bound.outside(replay(to_host, platform)) == ""


def test_how_long_the_program_holds_a_tensor_does_not_matter():
    trace = with_weight()
    held = with_releases(trace, [(trace.tensor_id("y"), 2)])
    assert held.content_hash != trace.content_hash
    assert not lower_bound(trace, machine(100)).outside(replay(Plan(held), machine(100)))


# ---- where it is weaker ----------------------------------------------------------------------------


def test_what_the_program_does_not_count_leaves_the_ops_alone():
    trace = uniform_chain(8, duration=10)
    reaching = (Engine("npu", 0, "hbm", ("hbm", "host"), {"fp32": GB}),)
    cases = {
        "reads 'host' in place": lower_bound(trace, replace(machine(4, host=100), engines=reaching)),
        "16 ops, more than 15": lower_bound(trace, machine(4, host=100), max_ops=15),
        "took too long": lower_bound(trace, machine(4, host=100), seconds=1e-9),
    }
    for why, bound in cases.items():
        assert why in bound.weaker
        assert bound.makespan_ns == bound.ops_ns == 160


def test_on_two_devices_it_is_that_of_the_ops():
    b = TraceBuilder({"model": "two"})
    a, c = b.tensor("a", 1), b.tensor("c", 1)
    b.op("first", writes=[a], duration=30)
    b.op("second", reads=[a], writes=[c], device=1, duration=20)
    bound = lower_bound(b.build(outputs=[c], carry=()), machine(10, devices=2))
    assert (bound.makespan_ns, bound.weaker) == (50, "the budget does not count: 2 devices")
