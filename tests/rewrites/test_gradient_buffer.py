"""Buffers of gradients that exist from the start: their bytes, where they lie, and when they change a peak."""

from __future__ import annotations

import pytest

from sim import simulate
from sim.analysis.peak_memory import memory_over_time
from sim.errors import LayoutError, PolicyError
from sim.layout import Layout, lay_out
from sim.rewrites.gradient_buffer import gradient_buffers
from sim.rewrites.ranks import all_ranks
from sim.rewrites.values import departures
from sim.trace import Trace
from tests.rewrites.test_overlap import network
from tests.rewrites.test_replicas import CONFIG, line, peaks
from workloads import transformer

LAYOUTS = [
    {"micro_batches": 2},
    {"dp": 2},
    {"dp": 2, "micro_batches": 2, "zero": 1},
    {"tp": 2, "pp": 2, "micro_batches": 2},
    {"dp": 2, "pp": 2, "schedule": "zb_h1", "micro_batches": 4},
]


def base(samples: int = 8, precision: str = "megatron_bf16") -> Trace:
    return transformer(CONFIG, batch=samples, sequence=16, precision=precision, loss="fused")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("precision", "each"), [("mixed_bf16", 2), ("megatron_bf16", 4)])
def test_one_buffer_per_weight(layout: dict, precision: str, each: int) -> None:
    """As many elements as weights; the same time, since none of them is ever copied; the same values."""
    whole = base(precision=precision)
    (plain, machine), (trace, _) = (
        lay_out(whole, "a100_80_sxm", {**layout, "gradient_buffer": given}) for given in (False, True)
    )
    buffers = sum(t.bytes for t in trace.tensors if t.name.endswith(".buffer"))
    weights = sum(t.bytes for t in trace.tensors if t.role == "weight" and trace.producer[t.id] < 0)
    assert buffers * 2 == weights * each
    assert {each.what for each in departures(trace, whole)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), whole)} <= {"repeated"}
    before, after = (simulate(each, machine).summary() for each in (plain, trace))
    assert after["makespan_ns"] == before["makespan_ns"]
    assert after["peak_bytes"] >= before["peak_bytes"]


def test_they_are_there_from_the_first_op_to_the_next_iteration() -> None:
    layers, size = 5, 1000
    trace = gradient_buffers(network([size] * layers, forward=10, backward=10, ranks=1))
    time, used = memory_over_time(simulate(trace, line(1)).log)
    weights = gradients = layers * size
    assert used[time == 0].max() >= weights + gradients
    assert peaks(trace, line(1))[0] == 20 * layers
    plain = peaks(network([size] * layers, forward=10, backward=10, ranks=1), line(1))[1][0]
    assert 0 <= peaks(trace, line(1))[1][0] - (weights + gradients) <= layers + 3  # a byte per activation
    assert plain <= peaks(trace, line(1))[1][0]
    assert simulate(trace, line(1), iterations=3).summary()["peak_bytes"] == peaks(trace, line(1))[1][0]


def test_one_microbatch_peaks_as_the_second_of_two_without_them() -> None:
    """In a second microbatch the gradients of the first are there anyway; so are its own ids and labels, int64."""
    trace, machine = lay_out(base(32), "a100_80_sxm", {"gradient_buffer": True})
    second, _ = lay_out(base(64), "a100_80_sxm", {"micro_batches": 2})
    first, _ = lay_out(base(32), "a100_80_sxm", {})
    peak = [simulate(each, machine).summary()["peak_bytes"] for each in (first, trace, second)]
    assert peak[0] < peak[1] == peak[2] - 2 * 8 * 32 * 16


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp": 2, "zero": 2, "gradient_buffer": True}, "gradient_buffer: holds all gradients, .* .zero 2.; nearest"),
        ({"gradient_buffer": 1}, "gradient_buffer: needs true or false, has 1"),
    ],
)
def test_a_value_that_means_nothing_is_refused(layout: dict, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout(**layout)


@pytest.mark.parametrize("name", ["zero_offload", "patrickstar", "g10", "zero_offload + full_recompute"])
def test_policies_that_move_gradients_leave_buffers_alone(name):
    trace = transformer("gpt2", batch=2, sequence=8, precision="megatron_bf16")
    with pytest.raises(PolicyError, match=r"manages gradients, and gradient_buffer keeps them"):
        simulate(trace, "h100", name, parallel={"gradient_buffer": True})
    simulate(trace, "h100", "full_recompute", parallel={"gradient_buffer": True})
