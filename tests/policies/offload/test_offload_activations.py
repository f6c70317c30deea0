"""torchtune's activation offloading: a stash in forward, one op ahead in backward, and what its users measured."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sim.conformance import check_policy
from sim.errors import PolicyError
from sim.experiment import simulate
from sim.policies import load
from sim.policies.offload.offload_activations import OffloadActivations
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine
from workloads import transformer


def net(layers: int, *, size: int = 30, forward: int = 10, backward: int = 20, product: int = 0) -> Trace:
    """Ops that save their results, of `size` bytes; times in ns. product: the op that is a product, 0 for none."""
    b = TraceBuilder()
    results = [b.tensor("x0", 1, "input")]
    for i in range(1, layers + 1):
        results.append(b.tensor(f"x{i}", size))
        kind = "matmul" if i == product else "other"
        b.op(f"f{i}", kind, reads=results[-2:-1], writes=results[-1:], duration=forward, flops=1)
    gradient = b.tensor("g", 1, "temporary")
    b.op("seed", reads=[], writes=[gradient], phase="backward", duration=0)
    for i in range(layers, 0, -1):
        made = b.tensor(f"d{i}", 1, "temporary")
        b.op(f"f{i}.bwd", reads=[gradient, results[i]], writes=[made], phase="backward", duration=backward)
        gradient = made
    return b.build()


def test_the_device_waits_for_the_copy_of_two_saves_ago_and_fetches_one_op_ahead(run) -> None:
    done = run(net(4), "offload_activations", max_fwd_stash_size=2, min_offload_size=1)
    # x1 goes from 10 to 40; f3 ends at 30 and waits for it, f4 ends at 50 and waits for x2 until 70
    assert done.ran("f1", "f2", "f3", "f4") == [(0, 10), (10, 20), (20, 30), (40, 50)]
    assert [move for move in done.moves if move[0] == "d2h"] == [
        ("d2h", "x1", 10, 40),
        ("d2h", "x2", 40, 70),
        ("d2h", "x3", 70, 100),
        ("d2h", "x4", 100, 130),
    ]
    # x4 is still there; behind its op the device waits for x3 and x4 to be out, and both are released
    # x3 and x2 are fetched at once, x1 when f3.bwd has ended, at 180, behind x2
    assert [move for move in done.moves if move[0] == "h2d"] == [
        ("h2d", "x3", 130, 160),
        ("h2d", "x2", 160, 190),
        ("h2d", "x1", 190, 220),
    ]
    backward = [f"f{i}.bwd" for i in (4, 3, 2, 1)]
    assert done.ran(*backward) == [(70, 90), (160, 180), (190, 210), (220, 240)]


@pytest.mark.parametrize(("forward", "backward", "size"), [(10, 20, 30), (40, 50, 30), (10, 50, 30)])
def test_a_period_is_the_longer_of_an_op_and_its_copy(forward: int, backward: int, size: int, run) -> None:
    done = run(net(24, forward=forward, backward=backward, size=size), "offload_activations", min_offload_size=1)
    starts = [a for a, _ in done.ran(*(f"f{i}" for i in range(14, 24)))]
    assert {b - a for a, b in pairwise(starts)} == {max(forward, size)}
    starts = [a for a, _ in done.ran(*(f"f{i}.bwd" for i in range(14, 2, -1)))]
    assert {b - a for a, b in pairwise(starts)} == {max(backward, size)}


@pytest.mark.parametrize("size", [20, 30, 60])
def test_forward_stalls_from_the_save_that_the_copies_lag_behind_by_the_stash(size: int, run) -> None:
    # save i ends at 10 i; copy j ends at 10 + j size: the first wait at save i is for copy i - 5
    done = run(net(30, size=size, backward=100), "offload_activations", min_offload_size=1)
    ends = [end for _, end in done.ran(*(f"f{i}" for i in range(1, 31)))]
    delayed = next(i for i, end in enumerate(ends, 1) if end > 10 * i)
    assert delayed - 1 == next(i for i in range(6, 31) if 10 + (i - 5) * size > 10 * i)


@pytest.mark.parametrize("places", [1, 3, 5])
def test_forward_holds_as_many_saves_as_the_stash_has_places(places: int, run) -> None:
    done = run(net(20, size=1000), "offload_activations", max_fwd_stash_size=places, min_offload_size=1)
    # the saves that the stash keeps, and the result of the op that runs; backward begins with three
    most = 1000 * max(places + 1, 3)
    assert most <= done.peak < most + 100


def test_small_tensors_and_what_the_head_saves_stay(run) -> None:
    assert run(net(6, size=1023), "offload_activations").moves == []
    assert len(run(net(6, size=1024), "offload_activations").out) == 6
    assert sorted(run(net(6, size=1024, product=5), "offload_activations").out) == ["x1", "x2", "x3", "x4"]
    assert len(run(net(6, size=1024, product=5), "offload_activations", head=True).out) == 6


def test_without_streams_it_is_save_on_cpu_without_weights(run) -> None:
    trace = transformer("gpt2", batch=1, sequence=64)
    one = run(trace, "offload_activations", use_streams=False, min_offload_size=0, head=True)
    other = run(trace, "save_on_cpu", pin_memory=True, weights=False)
    assert (one.time, one.peak, one.host_peak) == (other.time, other.peak, other.host_peak)


def test_values_are_those_of_the_plain_run_and_nothing_is_fetched_unasked(run) -> None:
    trace = transformer("gpt2", batch=1, sequence=64)
    for parameters in ({}, {"max_fwd_stash_size": 1, "head": True}, {"duplicates": False}):
        done = run(trace, "offload_activations", **parameters)
        assert not departures(done.result.plan.trace, trace)
        assert done.result.log.counters["implicit_moves"] == 0


def test_it_keeps_the_law_where_small_tensors_are_offloaded_too(tmp_path) -> None:
    for parameters in ({}, {"duplicates": False, "max_fwd_stash_size": 2, "head": True}):
        policy = OffloadActivations(min_offload_size=1, **parameters)
        report = check_policy(policy, examples=15, folder=tmp_path, across_processes=False)
        assert not report.broken, report.as_text()


def test_on_top_of_checkpointing_it_saves_block_inputs_at_next_to_no_time() -> None:
    """torchtune's README, 3 B parameters on an A100: on top of checkpointing 5.5 % less memory, 0.1 % slower.

    Here the smaller model shows the one copy that is not hidden, that of the second block of backward.
    """
    trace = transformer("gpt2-small", batch=8, sequence=1024, precision="amp_bf16")
    plain, both = (
        simulate(trace, "a100_40_pcie", f"full_recompute{more}").summary()
        for more in ("", "; checkpoints: offload_activations(checkpointed=True)")
    )
    assert 0.9 < both["peak_bytes"] / plain["peak_bytes"] < 1
    copy = 15_000 + 8 * 1024 * 768 * 4 / 25
    assert plain["makespan_ns"] < both["makespan_ns"] <= plain["makespan_ns"] + copy
    # the inputs of 12 blocks, the last of which backward needs before its copy is due
    assert 11 <= both["moved_bytes"]["d2h"] / (8 * 1024 * 768 * 4) <= 12


def test_a_machine_without_host_is_refused() -> None:
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(net(2), machine(host=False), "offload_activations")
    with pytest.raises(PolicyError, match="max_fwd_stash_size is 0"):
        load("offload_activations(max_fwd_stash_size=0)")
