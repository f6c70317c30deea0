"""The smallest budget found: one that was run and fits, above one that was run and does not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sim.experiment import simulate
from sim.hardware.profile import load_profile
from sim.plan import Move, Plan
from sim.policies.base import Policy
from sim.search import fits, largest_batch, smallest_budget
from sim.trace import Trace, TraceBuilder
from tests.engine.test_timeline import machine
from workloads import transformer


def step(scratch: int) -> Trace:
    """`a` (40 B) is offloaded and wanted at the end; `op2` needs 80 B beside it, once `y` (35 B) has been freed."""
    b = TraceBuilder()
    a, x, y, z = (b.tensor(name, size) for name, size in (("a", 40), ("x", 30), ("y", 35), ("z", 1)))
    end = b.tensor("end", 1)
    b.op("make", writes=[a], duration=100)
    b.op("op0", writes=[x], duration=100)
    b.op("op1", reads=[x], writes=[y], duration=10)
    b.op("ends", reads=[y], duration=10)
    b.op("op2", "conv", reads=[x], writes=[z], workspace=scratch, duration=10, phase="backward")
    b.op("last", reads=[a, z], writes=[end], duration=10, phase="backward")
    return b.build(outputs=[end], carry=())


@dataclass(frozen=True, kw_only=True)
class Prefetch(Policy):
    """Sends `a` away and asks for it before `ends`: an offline plan, the same for every budget."""

    moves = True

    def plan(self, problem):
        return Plan(problem.trace, [Move("a", "host", after="make"), Move("a", "hbm", before="ends")])


def test_an_offline_plan_that_prefetches_is_not_monotone_and_what_is_found_fits_and_is_a_boundary():
    trace, platform = step(49), machine(hbm=1000)
    fitting = {budget for budget in range(60, 160) if fits(trace, platform, Prefetch(), budget=budget)}
    assert fitting == {*range(80, 105), *range(120, 160)}  # from 105 on the prefetch fits, and op2 then does not
    found = smallest_budget(trace, platform, Prefetch(), tolerance=0.0)
    assert found == 80  # what op2 needs at least, which is tried by itself


def test_a_policy_that_fails_where_all_would_be_kept_may_fit_in_the_least_that_an_op_needs():
    trace, platform = step(49), machine(hbm=1000)

    @dataclass(frozen=True, kw_only=True)
    class OnlySmall(Policy):
        """Asks for more than there is unless the budget is small."""

        def plan(self, problem):
            return Prefetch().plan(problem) if problem.budget <= 90 else TooMuch().plan(problem)

    assert smallest_budget(trace, platform, OnlySmall()) == 80


@dataclass(frozen=True, kw_only=True)
class TooMuch(Policy):
    """Computes something that is larger than any budget."""

    def plan(self, problem):
        big = TraceBuilder()
        big.op("big", writes=[big.tensor("much", problem.budget + 1)], duration=1)
        return Plan(big.build(carry=()))


def test_no_batch_above_the_limit_is_tried():
    tried = []

    def make(batch: int) -> Trace:
        tried.append(batch)
        b = TraceBuilder()
        b.op("op", reads=[b.tensor("x", batch, "input")], writes=[b.tensor("y", batch)], duration=1)
        return b.build()

    for limit in range(6):
        assert largest_batch(make, machine(hbm=1000), limit=limit) == limit
        assert max(tried, default=0) <= limit


@pytest.mark.parametrize("policy", ["stronghold + full_recompute", "zero_offload + full_recompute", "modnn"])
def test_what_a_policy_divides_or_runs_elsewhere_is_no_least_that_it_needs(policy):
    """The update of the embedding, which reads four times its bytes, is the largest op; these run it on the CPU."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 20_000, "n_positions": 64}
    trace = transformer(config, batch=2, sequence=16, precision="fp32")
    platform = load_profile("a100_40_pcie")
    found = smallest_budget(trace, platform, policy)
    peak = simulate(trace, platform, policy, budget=found).summary()["peak_bytes"]
    assert peak <= found < peak * 1.02
    assert not fits(trace, platform, policy, budget=int(found * 0.98))
