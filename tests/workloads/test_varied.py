"""Steps of several lengths as one trace: its time is the sum of the steps, its memory that of the neediest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import load_profile, simulate
from sim.conformance import check_values, replayed
from sim.errors import WorkloadError
from sim.experiment import reference_run
from sim.plan import Plan
from sim.policies import load
from sim.rewrites.rewrite import unroll
from sim.trace import Trace
from workloads import joined, transformer, varied_lengths
from workloads.synthetic import w1

TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 40, "n_positions": 64}
MACHINE = load_profile("a100_40_pcie")


def peak(trace: Trace) -> int:
    return int(np.cumsum(reference_run(trace, MACHINE).change("delta")).max())


def inputs(trace: Trace) -> int:
    return sum(t.bytes for t in trace.tensors if t.role == "input" and trace.producer[t.id] < 0)


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    precision=st.sampled_from(["fp32", "amp_bf16"]),
    optimizer=st.sampled_from(["adamw_foreach", "adamw_loop", "sgd_momentum"]),
)
def test_time_is_the_sum_of_the_steps_and_memory_that_of_the_neediest(lengths, precision, optimizer):
    options = {"batch": 2, "precision": precision, "optimizer": optimizer}
    steps = [transformer(TINY, sequence=length, **options) for length in lengths]
    whole = varied_lengths(TINY, sequences=lengths, **options)
    assert reference_run(whole, MACHINE).end == sum(reference_run(step, MACHINE).end for step in steps)
    # what has no producer is resident from the start: the inputs of all steps beside each
    assert peak(whole) == max(peak(step) - inputs(step) for step in steps) + sum(map(inputs, steps))
    assert len(whole.ops) == sum(len(step.ops) for step in steps)
    assert whole.meta["sequences"] == lengths
    assert whole.meta["tokens"] == 2 * sum(lengths)
    assert whole.meta["batch"] == 2


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd_momentum"])
def test_steps_of_one_length_run_as_the_unrolled_step_does(optimizer):
    step = transformer(TINY, batch=1, sequence=16, optimizer=optimizer)
    mine, other = reference_run(joined([step] * 3), MACHINE), reference_run(unroll(step, 3), MACHINE)
    assert mine.trace.op_columns.name == other.trace.op_columns.name
    assert mine.end == other.end
    assert np.array_equal(mine.intervals, other.intervals)
    assert np.array_equal(np.sort(mine.change("delta")), np.sort(other.change("delta")))


def test_weights_are_carried_from_step_to_step_and_from_the_end_to_the_start():
    whole = varied_lengths(TINY, batch=1, sequences=[8, 16], optimizer="sgd_momentum")
    first = whole.tensor_id("wte.weight#0")
    (last,) = [a for a, b in whole.carry if b == first]
    assert whole.tensors[last].name == "wte.weight.new#1"
    between = whole.tensors[last].replaces
    assert whole.tensors[between].name == "wte.weight.new#0"
    assert whole.tensors[between].replaces == first
    assert {whole.ops[op].name.rpartition("#")[2] for op in whole.readers(between)} == {"1"}


@pytest.mark.parametrize("policy", ["dtr", "full_recompute"])
def test_policies_run_it_and_compute_the_same(policy):
    whole = varied_lengths(TINY, batch=2, sequences=[8, 64, 24])
    result = simulate(whole, MACHINE, policy)
    check_values(replayed(load(policy), result.plan, whole, MACHINE))


def test_a_trace_without_weights_is_just_repeated():
    step = w1(3)
    assert reference_run(joined([step, step]), MACHINE).end == 2 * reference_run(step, MACHINE).end


def test_steps_of_different_models_are_refused():
    wider = {**TINY, "n_embd": 64}
    with pytest.raises(WorkloadError, match=r"step 1 starts with '.*' of .* B, which step 0 does not leave"):
        joined([transformer(TINY, batch=1, sequence=8), transformer(wider, batch=1, sequence=8)])
    with pytest.raises(WorkloadError, match="at least one step"):
        joined([])


def test_it_is_as_if_nothing_had_been_done_to_one_step():
    step = transformer(TINY, batch=1, sequence=8)
    assert simulate(joined([step]), MACHINE).log.end == simulate(step, MACHINE).log.end
    assert replayed(load("keep_all"), Plan(joined([step])), joined([step]), MACHINE).done
