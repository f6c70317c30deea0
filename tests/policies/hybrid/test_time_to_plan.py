"""How long the planners of keep, recompute or offload take on real models, and how near they come to the bound."""

from __future__ import annotations

import time

import pytest

from sim.analysis.peak_memory import home_peak
from sim.experiment import problem_for, simulate
from sim.hardware.profile import load_profile
from sim.policies import load
from sim.trace import Trace
from tests.clocks import least
from workloads import transformer

DEEP = {"model_type": "gpt2", "n_layer": 96, "n_embd": 1024, "n_head": 16, "vocab_size": 32000, "n_positions": 1024}


def planned(trace: Trace, policy: str, share: float) -> tuple[float, float, float]:
    """Seconds of processor time to plan so far between the least and the most memory; the makespan, and its bound."""
    machine = load_profile("mt3000_survey", overrides={f"links.{way}.rate": "5 GB/s" for way in ("d2h", "h2d")})
    most, fewest = (home_peak(simulate(trace, machine, p, budget=10**15).log) for p in ("keep_all", "full_recompute"))
    problem = problem_for(trace, machine.with_budget(int(fewest + share * (most - fewest))))
    began = time.process_time()
    plan = load(policy).plan(problem)
    took = time.process_time() - began
    return took, problem.evaluate(plan).end, plan.notes.get("makespan_bound_ns") or 0


@pytest.mark.alone
def test_hybrid_plans_96_layers_in_seconds():
    """In less than five on a machine of 2026; a slower one may take twice as long."""
    trace = transformer(DEEP, batch=8, sequence=1024, precision="amp_bf16")
    for share in (0.1, 0.5):
        assert least(10, lambda share=share: planned(trace, "hybrid", share)[0], tries=3) < 10


@pytest.mark.alone
def test_joint_optimal_is_within_a_percent_of_its_bound_on_24_layers_in_a_minute():
    trace = transformer("gpt2-medium", batch=2, sequence=512, precision="amp_bf16")
    for share in (0.1, 0.5):
        took, end, bound = planned(trace, "joint_optimal", share)
        assert took < 60
        assert 0 < bound <= end <= 1.01 * bound
