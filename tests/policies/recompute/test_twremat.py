"""TWRemat: any graph, log memory on chains, all kept on cliques; never below the optimum, and between its siblings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.speed import bare
from sim.conformance import check_policy
from sim.errors import Infeasible, PolicyError
from sim.policies.recompute import twremat
from sim.policies.recompute.twremat import Twremat
from sim.trace import Trace, TraceBuilder
from tests.clocks import cpu_s, least
from tests.solvers.reruns import least_time, small_graphs
from workloads import transformer
from workloads.synthetic import chain, random_dag, unet, w1


@pytest.mark.parametrize("steps", [8, 64, 512])
def test_a_chain_is_reversed_in_logarithmic_memory_like_bisection(steps, run):
    # x0, a snapshot and a gradient a halving; extra steps of bisection: (l / 2) log2 l
    trace = chain([1] * steps, [2] * steps, [1] * (steps + 1), [1] * steps)
    facts, halvings = run(trace, "twremat", eager=True), steps.bit_length() - 1
    assert facts.peak <= 2 * halvings + 4
    assert len(facts.rerun) <= steps // 2 * halvings
    assert facts.result.plan.notes["width"] == 2


def clique(ops: int) -> Trace:
    """Each forward op reads all before it; each backward op reads all forward results up to its own."""
    b = TraceBuilder({"model": "clique"})
    made: list[int] = []
    for i in range(ops):
        made.append(b.tensor(f"f{i}.out", 1))
        b.op(f"f{i}", reads=made[:-1], writes=made[-1:], duration=1)
    gradient: list[int] = []
    for i in reversed(range(ops)):
        fresh = b.tensor(f"b{i}.out", 1, "temporary")
        b.op(f"b{i}", phase="backward", reads=[*made[: i + 1], *gradient], writes=[fresh], duration=2)
        gradient = [fresh]
    return b.build(outputs=gradient, carry=())


def test_of_a_complete_graph_everything_stays(run):
    trace = clique(12)
    facts = run(trace, "twremat", eager=True)
    assert facts.result.plan.notes["width"] == 12
    assert facts.rerun == []
    with pytest.raises(Infeasible, match="13 B would do") as refused:
        run(trace, "twremat", 12)
    assert refused.value.floor_bytes == facts.peak == 13


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=small_graphs(), share=st.floats(0.5, 1))
def test_never_faster_than_the_best_of_all_orders_of_runs(trace, share, run):
    budget = max(1, int(share * run(trace, "keep_all").peak))
    best = least_time(trace, budget, staged=False)
    floor, facts = attempt(run, trace, budget)
    if floor == budget:
        assert best is not None
        assert facts.time >= best
    assert budget <= floor
    assert facts.peak <= floor


def attempt(run, trace, budget):
    """The budget and the run, or those of the budget that a refusal names."""
    try:
        return budget, run(trace, "twremat", budget)
    except Infeasible as error:
        refused = error
    assert refused.floor_bytes is not None
    return refused.floor_bytes, run(trace, "twremat", refused.floor_bytes)


def test_on_small_nets_it_is_mostly_the_best_of_all_orders_of_runs(run):
    ratios = []
    for seed in range(30):
        trace = random_dag(4, seed, max_bytes=9, max_ns=9, weights=0, update=False)
        low, high = run(trace, "twremat", eager=True).peak, run(trace, "keep_all").peak
        for budget in range(low, high):
            best = least_time(trace, budget, staged=False)
            assert best is not None
            ratios.append(run(trace, "twremat", budget).time / best)
    assert len(ratios) == 35
    assert ratios.count(1) >= 30
    assert max(ratios) < 1.13


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), ops=st.integers(2, 40), width=st.integers(1, 6), share=st.floats(0.4, 1))
def test_any_graph_runs_within_the_budget_or_is_refused_with_one_that_does(seed, ops, width, share, run):
    trace = random_dag(ops, seed, width=width)
    plain = run(trace, "keep_all")
    budget = int(share * plain.peak)
    floor, facts = attempt(run, trace, budget)
    assert budget <= floor <= plain.peak
    assert facts.time == plain.time + facts.result.plan.notes["rerun_ns"]
    assert all(trace.ops[trace.op_id(name)].phase == "forward" for name in facts.rerun)


def test_a_net_with_long_skips_needs_no_chain(run):
    trace = unet(5)
    plain = run(trace, "keep_all")
    facts = run(trace, "twremat", int(0.85 * plain.peak))
    assert plain.time < facts.time < 1.2 * plain.time


def test_more_memory_is_used_to_save_time_and_all_of_it_saves_all(run):
    trace = w1(8)
    plain = run(trace, "keep_all")
    times = [run(trace, "twremat", int(share * plain.peak)).time for share in (0.3, 0.45, 0.6, 0.8, 1)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == plain.time
    assert times[0] > plain.time


@pytest.mark.parametrize("share", [0.9, 0.65])
def test_a_transformer_takes_less_time_than_with_rotor_because_it_is_planned_op_by_op(share, run):
    trace = transformer("gpt2-medium", batch=4, sequence=512, precision="bf16")
    plain = run(trace, "keep_all")
    budget = int(share * plain.peak)
    facts = run(trace, "twremat", budget)
    assert plain.time < facts.time < run(trace, "rotor", budget).time
    assert facts.result.plan.notes["width"] <= 8


@pytest.mark.alone
@pytest.mark.parametrize("trace", [
    transformer("gpt2-medium", batch=4, sequence=512, precision="bf16"), w1(96),
], ids=["gpt2-medium", "w1-96"])  # fmt: skip
def test_planning_takes_no_longer_than_a_few_hundred_bare_loops(trace, run):
    budget = 7 * run(trace, "keep_all").peak // 10
    limit = 500 * min(cpu_s(bare, len(trace.ops)) for _ in range(5))  # 180 and 280 loops were measured
    assert least(limit, lambda: cpu_s(run, trace, "twremat", budget), tries=3) < limit


SIBLINGS = ("rotor", "chen", "dtr", "vlad", "revolve", "every_k", "full_recompute", "min_cut", "sac_knapsack")


@pytest.mark.parametrize("sibling", [*SIBLINGS, "keep_all"])
def test_it_is_none_of_its_siblings(sibling, run):
    trace = w1(6)
    budget = int(0.6 * run(trace, "keep_all").peak)
    facts = run(trace, "twremat", budget)
    try:
        other = run_of(run, trace, sibling, budget)
    except Infeasible:
        return
    assert events(facts) != events(other)


def test_it_is_neither_checkmate_nor_moccasin_nor_rockmate(run):
    trace = w1(2)
    budget = int(0.55 * run(trace, "keep_all").peak)
    facts = run(trace, "twremat", budget)
    for sibling, parameters in (("checkmate", {"method": "rounding"}), ("rockmate", {"levels": 2})):
        assert events(facts) != events(run(trace, sibling, budget, **parameters))


def run_of(run, trace, policy, budget):
    if policy == "dtr":  # decides while it runs: its recomputations are the engine's
        from sim.experiment import simulate
        from tests.policies.recompute.conftest import Facts

        platform = run(trace, "keep_all").result.platform.with_budget(budget)
        result = simulate(trace, platform, policy)
        return Facts(result, 0, result.log.end, [])
    return run(trace, policy, budget)


def events(facts):
    log = facts.result.log
    return list(zip(log.interval("op").tolist(), log.interval("why").tolist(), strict=True))


def test_every_parameter_changes_some_run(run):
    trace = w1(6)
    budget = int(0.4 * run(trace, "keep_all").peak)
    default = events(run(trace, "twremat", budget))
    assert default != events(run(trace, "twremat", budget, order="min_degree"))
    assert default != events(run(trace, "twremat", budget, eager=True))


def test_eager_is_the_same_whatever_the_budget_and_refused_below_its_peak(run):
    trace = w1(3)
    facts = run(trace, "twremat", eager=True)
    assert facts.rerun
    assert events(run(trace, "twremat", facts.peak, eager=True)) == events(facts)
    with pytest.raises(Infeasible) as refused:
        run(trace, "twremat", facts.peak - 1, eager=True)
    assert refused.value.floor_bytes == facts.peak


def test_where_the_schedule_of_least_memory_grows_too_long_a_larger_one_is_named(run, monkeypatch):
    # wide random graphs have no small separators, so the recursion runs ops again without end
    trace = random_dag(90, 1, width=16, weights=0, update=False)
    plain = run(trace, "keep_all").peak
    floors = []
    for longest in (20, 1):
        monkeypatch.setattr(twremat, "LONGEST", longest)
        with pytest.raises(Infeasible) as refused:
            run(trace, "twremat", plain // 8)
        floors.append(refused.value.floor_bytes)
        assert run(trace, "twremat", floors[-1]).peak <= floors[-1]
    assert floors[0] < floors[1] < plain
    with pytest.raises(PolicyError, match="over 1 reruns an op; take eager=False"):
        run(trace, "twremat", eager=True)


def test_update_ops_and_what_they_overwrite_run_once(run):
    trace = transformer("gpt2-small", batch=2, sequence=256, precision="amp_bf16", optimizer="adamw_loop")
    facts = run(trace, "twremat", eager=True)
    assert facts.rerun
    assert np.isin([trace.ops[trace.op_id(name)].phase for name in facts.rerun], ["forward"]).all()


def test_it_keeps_every_law(tmp_path):
    report = check_policy(Twremat(), examples=25, name="twremat", folder=tmp_path, across_processes=False)
    assert report.passed, report.as_text()


def test_wrong_parameters_and_several_devices_are_refused(run):
    with pytest.raises(PolicyError, match="did you mean 'min_fill'"):
        Twremat(order="minfill")
    b = TraceBuilder()
    t = b.tensor("t", 1)
    b.op("here", writes=[t])
    b.op("there", reads=[], writes=[b.tensor("u", 1)], device=1)
    with pytest.raises(PolicyError, match="on one device; this one has 2"):
        Twremat().plan(_Asked(b.build(outputs=(t,), carry=())))


class _Asked:
    """As much of a problem as a refusal looks at."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.budget = trace, 1


def test_its_mark_says_that_it_is_a_reconstruction():
    assert Twremat.fidelity == "reconstruction"
