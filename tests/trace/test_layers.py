"""Which layer an op has, and where consecutive ops are divided by layer."""

from __future__ import annotations

import numpy as np

from sim.trace import TraceBuilder
from sim.trace.layers import has_layers, layer_runs, op_layers, tensor_layers


def trace_of(*rows):
    """One op per row (phase, layer of the op, layer of its result, device); each reads the result before it."""
    b, before = TraceBuilder(), []
    for i, (phase, layer, of_result, device) in enumerate(rows):
        result = b.tensor(f"t{i}", 8, layer=of_result)
        b.op(f"op{i}", reads=before, writes=[result], phase=phase, layer=layer, device=device)
        before = [result] if i + 1 < len(rows) and rows[i + 1][3] == device else []
    return b.build()


def test_an_op_without_a_layer_has_that_of_what_it_produces():
    trace = trace_of(("forward", 3, 5, 0), ("forward", -1, 5, 0), ("forward", -1, -1, 0))
    assert op_layers(trace).tolist() == [3, 5, -1]
    assert tensor_layers(trace).tolist() == [3, 5, -1]


def test_of_several_results_the_highest_layer_counts():
    b = TraceBuilder()
    b.op("op", writes=[b.tensor("a", 8, layer=2), b.tensor("b", 8, layer=4), b.tensor("c", 8)])
    assert op_layers(b.build()).tolist() == [4]


def test_layers_are_those_of_forward_ops():
    assert has_layers(trace_of(("forward", -1, 0, 0), ("backward", -1, -1, 0)))
    assert not has_layers(trace_of(("forward", -1, -1, 0), ("backward", 0, 0, 0)))


ROWS = [
    *[("forward", layer, layer, 0) for layer in (0, 0, -1, 1, 2, 2, 3, 0, 1)],
    *[("backward", layer, layer, 0) for layer in (1, 1, 0, -1, -1)],
]


def test_a_run_ends_with_its_layer():
    runs = layer_runs(trace_of(*ROWS), range(len(ROWS)))
    assert runs == [[0, 1], [2], [3], [4, 5], [6], [7], [8], [9, 10], [11], [12, 13]]


def test_several_layers_may_count_as_one_until_they_begin_again():
    ops = [op for op in range(len(ROWS)) if op != 2]
    assert layer_runs(trace_of(*ROWS), ops, every=2) == [[0, 1, 3], [4, 5, 6], [7, 8], [9, 10], [11], [12, 13]]
    assert layer_runs(trace_of(*ROWS), ops, every=100)[:2] == [[0, 1, 3, 4, 5, 6], [7, 8]]


def test_devices_have_runs_of_their_own():
    rows = [("forward", layer, layer, device) for layer in (0, 1) for device in (0, 1, 0)]
    assert layer_runs(trace_of(*rows), np.arange(6).tolist()) == [[0, 2], [1], [3, 5], [4]]
