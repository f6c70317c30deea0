"""The synthetic families are what their definitions say, to the byte and the nanosecond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import WorkloadError
from sim.trace import Trace
from workloads.synthetic import chain, random_dag, unet, uniform_chain, w1


def liveness_peak(trace: Trace) -> int:
    """Live bytes plus all outputs of each op; non-constants go right after their last use."""
    reads_left = [len(trace.readers(t)) for t in range(len(trace.tensors))]
    size = [t.bytes for t in trace.tensors]
    constant = [bool(p < 0) for p in trace.producer]
    live = peak = sum(s for s, there in zip(size, constant, strict=True) if there)
    for op in trace.ops:
        live += sum(size[t] for t in op.writes)
        peak = max(peak, live)
        for t in dict.fromkeys((*op.reads, *op.writes)):
            reads_left[t] -= t in op.reads
            if not reads_left[t] and not constant[t] and t not in trace.outputs:
                live -= size[t]
    return peak


@pytest.mark.parametrize(
    ("layers", "cost", "peak"),
    [
        (4, 20_346_933, 1_283_457_024),
        (12, 61_107_909, 3_632_267_264),
        (24, 122_249_373, 7_155_482_624),
        (48, 244_532_301, 14_201_913_344),
        (96, 489_098_157, 28_294_774_784),
    ],
)
def test_w1_has_the_published_counts_cost_and_peak(layers: int, cost: int, peak: int) -> None:
    trace = w1(layers)
    assert len(trace.ops) == 22 * layers - 1
    assert sum(trace.producer < 0) == 4 * layers + 1
    assert sum(op.duration or 0 for op in trace.ops) == cost
    assert liveness_peak(trace) == peak
    assert trace.carry == ()
    assert {trace.tensors[t].role for t in trace.outputs} == {"gradient"}
    assert len(trace.outputs) == 4 * layers


def test_w1_saves_and_accumulates_as_defined() -> None:
    trace = w1(2)
    assert [trace.tensors[t].name for t in trace.ops[trace.op_id("h1.fc2.bwd")].reads] == [
        *("h1.add2.d1", "h1.gelu", "h1.w2"),
    ]
    assert "h0.ln1.bwd" not in trace.op_columns.name
    names = list(trace.op_columns.name)
    assert names[names.index("h1.ln2.bwd") + 1].startswith("h1.ln2.add")


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 20))
def test_the_unit_chain_has_the_published_edges(n: int) -> None:
    trace = uniform_chain(n)
    edges = {(int(trace.producer[t]), op.id) for op in trace.ops for t in op.reads}
    forward = {(i - 1, i) for i in range(1, n)}
    backward = {(i - 1, 2 * n - 1 - i) for i in range(1, n)} | {(n + k, n + k + 1) for k in range(n - 1)}
    assert edges == forward | backward
    assert {t.bytes for t in trace.tensors} == {op.duration for op in trace.ops} == {1}


def test_a_chain_is_checked() -> None:
    with pytest.raises(WorkloadError, match="one entry per stage"):
        chain([1, 1], [1], [1, 1, 1], [1, 1])
    with pytest.raises(WorkloadError, match="stage 1 saves 2 bytes, less than its output"):
        chain([1, 1], [1, 1], [1, 1, 3], [1, 2])


@pytest.mark.parametrize("make", [lambda: w1(0), lambda: uniform_chain(0), lambda: random_dag(0, 1), lambda: unet(0)])
def test_nothing_to_build_is_refused(make: object) -> None:
    with pytest.raises(WorkloadError):
        make()  # type: ignore[operator]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 1000), st.integers(1, 6))
def test_random_graphs_use_everything_and_repeat_by_seed(ops: int, seed: int, width: int) -> None:
    trace = random_dag(ops, seed, width=width)
    assert trace == random_dag(ops, seed, width=width)
    forward = [op for op in trace.ops if op.phase == "forward"]
    assert len(forward) == ops
    for op in forward:
        assert trace.readers(op.writes[0])
    updated = {trace.tensors[a].replaces for a, _ in trace.carry}
    assert updated == {t.id for t in trace.tensors if t.role == "weight" and t.replaces is None}


def test_random_graphs_differ_by_seed() -> None:
    assert random_dag(10, 1) != random_dag(10, 2)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8))
def test_skips_of_a_unet_live_from_the_way_down_to_the_way_up(levels: int) -> None:
    trace = unet(levels, 1 << 12)
    for k in range(levels):
        skip = trace.tensor_id(f"down{k}")
        assert trace.op_columns.name[trace.readers(skip)[1]] == f"join{k}"
        assert trace.tensors[skip].bytes == 1 << 12 >> k
    assert sum(op.phase == "forward" for op in trace.ops) == 4 * levels + 1
