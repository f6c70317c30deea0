"""Uniform checkpointing: n/k inputs and the insides of k layers."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.errors import PolicyError
from sim.trace import TraceBuilder
from workloads import transformer
from workloads.synthetic import chain, w1


def unlayered(steps: int):
    """A chain whose ops say nothing of layers."""
    b = TraceBuilder()
    x = [b.tensor("x0", 1, "input")]
    for i in range(steps):
        x.append(b.tensor(f"x{i + 1}", 1))
        b.op(f"f{i}", reads=[x[i]], writes=[x[-1]], duration=1)
    g = b.tensor("g", 1, "temporary")
    b.op("loss", "loss", phase="backward", reads=[x[-1]], writes=[g], duration=0)
    for i in reversed(range(steps)):
        new = b.tensor(f"g{i}", 1, "temporary")
        b.op(f"b{i}", phase="backward", reads=[g, x[i], x[i + 1]], writes=[new], duration=2)
        g = new
    return b.build(outputs=[g], carry=())


def test_one_layer_at_a_time_is_full_recomputation(run):
    trace = transformer("gpt2-small", batch=1, sequence=128, dropout=0.1)
    one, full = run(trace, "every_k", k=1), run(trace, "full_recompute", autocast_cache=False)
    assert one.result.log == full.result.log


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 12])
def test_peak_of_a_unit_chain_is_inputs_and_one_segment(k, run):
    facts = run(chain([1] * 12, [2] * 12, [1] * 13, [4] * 12), "every_k", k=k)
    # an input per segment, four bytes per stage of the one that is undone, and a gradient
    assert facts.peak == 12 // k + 4 * k + 1
    assert set(Counter(facts.rerun).values()) == {1}
    assert len(facts.rerun) == 12


def test_layers_that_do_not_divide_leave_a_shorter_last_group(run):
    trace = chain([1] * 10, [2] * 10, [1] * 11, [4] * 10)
    facts = run(trace, "every_k", k=4, skip_last=True)
    assert sorted(facts.rerun) == sorted(f"f{i}" for i in range(8))


def test_memory_falls_and_rises_with_k(run):
    trace = w1(16)
    peaks = {k: run(trace, "every_k", k=k).peak for k in (1, 2, 8, 16)}
    assert peaks[16] > peaks[8] > peaks[2]
    assert peaks[1] < run(trace, "keep_all").peak


def test_without_layers_stages_of_the_chain_are_counted(run):
    facts = run(unlayered(12), "every_k", k=3)
    assert set(Counter(facts.rerun).values()) == {1}
    assert facts.peak <= 12 // 3 + 3 + 3


def test_a_trace_with_neither_is_refused(run):
    b = TraceBuilder()
    y = b.tensor("y", 1)
    b.op("alone", writes=[y])
    with pytest.raises(PolicyError, match="this trace is not a chain: no forward op reads what another produced"):
        run(b.build(outputs=[y]), "every_k")


def test_less_than_one_layer_is_refused(run):
    with pytest.raises(PolicyError, match="k is 0"):
        run(unlayered(3), "every_k", k=0)
