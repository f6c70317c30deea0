"""Chen et al. 2016: memory falls from n to about 2 sqrt(n), for at most one more forward pass."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import PolicyError
from sim.policies.recompute.chen import Chen, equal_segments
from sim.trace import TraceBuilder
from workloads.synthetic import chain, uniform_chain, w1

MIB = 1 << 20


@pytest.mark.parametrize("method", ["search", "sqrt"])
@pytest.mark.parametrize("layers", [4, 16, 64, 100, 256])
def test_peak_is_two_sqrt_n(layers, method, run):
    facts = run(uniform_chain(layers, size=MIB), "chen", method=method)
    assert facts.peak <= (2 * math.isqrt(layers) + 2) * MIB
    assert facts.peak < run(uniform_chain(layers, size=MIB), "keep_all").peak


@pytest.mark.parametrize(("layers", "least"), [(16, 8), (64, 16), (100, 20), (256, 32), (1024, 64)])
def test_printed_minimum_over_segment_counts_is_met(layers, least, run):
    assert min(k + math.ceil(layers / k) for k in range(1, layers + 1)) == least
    assert run(uniform_chain(layers), "chen").peak <= least
    # the graph's first and last step make it a little smaller than the formula's
    assert run(uniform_chain(layers), "chen").peak >= least - 2


def test_peak_grows_as_the_square_root():
    counts = np.array([16, 36, 64, 144, 256, 576, 1024])
    peaks = []
    for n in counts.tolist():
        ends = equal_segments(n, math.isqrt(n))
        longest = max(b - a for a, b in zip([-1, *ends[:-1]], ends, strict=True))
        peaks.append(len(ends) - 1 + longest)
    slope = np.polyfit(np.log(counts), np.log(peaks), 1)[0]
    assert abs(slope - 0.5) < 0.05


def test_measured_peak_grows_as_the_square_root(run):
    counts = [16, 64, 256, 1024]
    peaks = [run(uniform_chain(n), "chen").peak for n in counts]
    assert abs(np.polyfit(np.log(counts), np.log(peaks), 1)[0] - 0.5) < 0.05


def test_no_op_runs_more_than_twice_and_no_backward_op_again(run):
    trace = w1(9)
    facts = run(trace, "chen")
    assert max(Counter(facts.rerun).values()) == 1
    assert all(trace.ops[trace.op_id(name)].phase == "forward" for name in facts.rerun)
    forward = sum(op.phase == "forward" for op in trace.ops)
    assert len(facts.rerun) <= forward


def test_last_segment_does_not_run_again(run):
    facts = run(uniform_chain(16), "chen", method="sqrt", segments=4)
    assert not {"f12", "f13", "f14", "f15"} & set(facts.rerun)
    # f3, f7 and f11 are the checkpoints
    assert sorted(facts.rerun) == sorted(f"f{i}" for i in (0, 1, 2, 4, 5, 6, 8, 9, 10))


def test_threshold_cuts_after_more_than_that_many_bytes(run):
    trace = chain([1] * 6, [1] * 6, [10] * 7, [30] * 6)
    facts = run(trace, "chen", method="threshold", threshold=60)
    assert facts.result.plan.notes["segment_ends"] == (2, 5)
    assert run(trace, "chen", method="threshold", threshold=1000).rerun == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stages=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 50), st.integers(0, 50)), min_size=2, max_size=12
    )
)
def test_random_chains_run_each_op_at_most_twice_and_never_hold_more(stages, run):
    uf, ub, x, more = zip(*stages, strict=True)
    trace = chain(uf, ub, [1, *x], [a + b for a, b in zip(x, more, strict=True)])
    facts, plain = run(trace, "chen"), run(trace, "keep_all")
    assert facts.peak <= plain.peak
    assert all(count == 1 for count in Counter(facts.rerun).values())
    assert facts.time == plain.time + sum(uf[int(name[1:])] for name in facts.rerun)


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "sqare"},
        {"method": "threshold"},
        {"threshold": 5},
        {"segments": 3},
        {"method": "sqrt", "segments": 0},
    ],
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(PolicyError, match="chen"):
        Chen(**wrong)


def test_a_trace_that_is_no_chain_is_refused_naming_the_op(run):
    b = TraceBuilder()
    x = b.tensor("x", 4, "input")
    early, last = b.tensor("early", 4), b.tensor("y", 4)
    b.op("stem", reads=[x], writes=[early, last])
    for i in range(4):
        y = b.tensor(f"y{i}", 4)
        b.op(f"f{i}", reads=[last, early], writes=[y])
        last = y
    with pytest.raises(PolicyError, match=r"'f3' reads 'early'"):
        run(b.build(outputs=[last]), "chen")
