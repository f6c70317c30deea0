"""Hybrids and compositions in a pipeline on the clusters of MT-3000: they keep the law, or refuse several devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.analysis.peak_memory import home_peak
from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.errors import Infeasible
from sim.experiment import reference_run
from sim.layout import lay_out
from sim.policies import load
from sim.policies.hybrid import hybrid
from sim.policies.hybrid.hybrid import drafts, recomputations
from sim.rewrites.values import departures
from workloads import transformer

ALONE = ("str", "poet", "olla", "xengine", "joint_optimal", "olla + hybrid")
SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 200, "n_positions": 64}


@pytest.fixture(scope="module")
def problem():
    """The net on one device; two stages of it, and a machine with nine tenths of what keeping everything takes."""
    base = transformer(SMALL, batch=4, sequence=64, precision="amp_bf16")
    staged, platform = lay_out(base, "mt3000_cluster", {"pp": 2, "micro_batches": 2})
    return base, staged, platform.with_budget(int(0.9 * home_peak(reference_run(staged, platform))))


@pytest.mark.parametrize(
    "policy",
    ["hybrid", "mt3000_layered", "delta", "zero_offload + full_recompute", "layers 0: full_recompute; rest: swap_all"],
)
def test_what_runs_keeps_the_law(policy, problem):
    base, trace, platform = problem
    run = run_policy(load(policy), trace, platform)
    assert run.done, run.error
    assert {each.what for each in departures(run.plan.trace, base)} <= {"repeated"}
    laws = ("capacity", "ops", "order", "tiling", "outcome")  # others compare with a trace that is nobody's rewrite
    assert not [text for law in laws if (text := breaks(CHECKS[law], run))]


@pytest.mark.parametrize("policy", ALONE)
def test_what_plans_for_one_device_says_so(policy, problem):
    _, trace, platform = problem
    run = run_policy(load(policy), trace, platform)
    assert str(run.error).endswith("plans for one device; this trace has 2")


def test_where_no_draft_fits_layers_are_recomputed_if_that_does(problem, monkeypatch):
    _, trace, platform = problem
    layers = run_policy(load("full_recompute"), trace, platform)
    assert layers.done, layers.error
    monkeypatch.setattr(hybrid.MPress, "plan", lambda *of: (_ for _ in ()).throw(Infeasible("nor do stages")))
    for module in (hybrid, recomputations):
        monkeypatch.setattr(module, "replayed", lambda *of: replace(drafts.replayed(*of), lacking=1))
    run = run_policy(load("hybrid"), trace, platform)
    assert run.done, run.error
    assert run.log.end == layers.log.end
    least = platform.with_budget(int(0.5 * home_peak(layers.log)))
    assert "no draft fits" in str(run_policy(load("hybrid"), trace, least).error)


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_a_pipeline_takes_no_longer_than_the_plan_by_its_own_timeline(problem, share):
    _, trace, platform = problem
    tight = platform.with_budget(int(share * platform.home(0).capacity))
    by_stages = run_policy(load("mpress(peers=False)"), trace, tight)
    run = run_policy(load("hybrid"), trace, tight)
    assert run.done
    assert by_stages.done
    assert run.log.end <= by_stages.log.end
