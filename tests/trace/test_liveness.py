"""What is live while ops run, against intervals: a storage from its first producer to the last use of any value."""

from __future__ import annotations

import numpy as np
import pytest

from sim.rewrites.holding import with_releases
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace import Trace
from sim.trace.liveness import LiveSet, freeable, uses
from workloads.synthetic import random_dag, unet, w1
from workloads.transformer import transformer


def traces() -> list[Trace]:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    gpt = transformer(config, batch=1, sequence=8, optimizer="adamw_foreach")
    dags = [random_dag(12, seed) for seed in range(5)]
    made = [np.flatnonzero(dag.producer >= 0).tolist() for dag in dags]
    held = [
        with_releases(dag, [(t, len(dag.ops) - 1) for t in some[::3]]) for dag, some in zip(dags, made, strict=True)
    ]
    return [gpt, unet(3, update=True), w1(3), *dags, *held]


def by_intervals(trace: Trace) -> list[int]:
    """Bytes while each op runs, where nothing is recomputed."""
    count = len(trace.ops)
    held = np.zeros((count, 1), np.int64)[:, 0] + trace.op_columns.workspace
    for tensor in trace.tensors:
        if tensor.replaces is not None:
            continue
        first, last, value = int(trace.producer[tensor.id]), -1, tensor.id
        while value >= 0:
            stays = value in trace.outputs or (trace.producer[value] < 0 and trace.replaced_by[value] < 0)
            last = count if stays else max(last, int(trace.held_until[value]))
            value = int(trace.replaced_by[value])
        held[max(first, 0) : last + 1] += tensor.bytes
    return held.tolist()


@pytest.mark.parametrize("trace", traces(), ids=repr)
def test_a_schedule_counts_each_storage_while_it_is_needed(trace):
    assert schedule_of(TraceIndex(trace), {}).peaks()[1:] == by_intervals(trace)


@pytest.mark.parametrize("trace", traces(), ids=repr)
def test_what_keeps_a_tensor_is_its_readers_and_the_program(trace):
    released = [t for op in trace.ops for t in op.releases]
    readers = [sum(t in op.reads for op in trace.ops) for t in range(len(trace.tensors))]
    assert uses(trace).tolist() == [count + (t in released) for t, count in enumerate(readers)]
    written = {t for op in trace.ops for t in op.writes}
    assert np.flatnonzero(freeable(trace)).tolist() == sorted(written.difference(trace.outputs))


def test_results_take_over_storage_or_are_produced_beside_what_is_live():
    live = LiveSet([10, 10, 4], [-1, 0, -1], [0])
    assert live.run([1, 2], 3) == 17  # 1 overwrites 0, 2 is new, 3 of workspace
    assert (0 in live, 1 in live, live.held) == (False, True, 14)
    assert live.run([2], 1) == 19  # once more beside itself
    assert live.held == 14
    live.free([2, 2, 0])
    assert live.held == 10
    live.run([0], 0)
    assert live.run([1], 0) == 20  # its storage is another's by now: one of the two is given back
    assert live.held == 10
