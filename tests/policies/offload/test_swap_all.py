"""Swapping everything: each saved activation leaves after its last forward use and is back one block early."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import OutOfMemory, PolicyError
from sim.experiment import simulate
from sim.log import WHY
from tests.policies.offload.conftest import GB, facts, machine
from tests.strategies import budgets, platforms, traces
from workloads.synthetic import chain, uniform_chain, w1

FOUR = chain([20] * 4, [40] * 4, [10] * 5, [10] * 4)  # four stages, 10 bytes each


def test_each_copy_runs_when_the_hand_drawn_timeline_says(run) -> None:
    # x4 and x3 would have to come back at once; x2 is needed by b2, so it comes when block 3 starts, at
    # 80; x1 when block 2 starts, at 120
    done = run(FOUR, "swap_all")
    assert done.moves == [
        ("d2h", "x1", 40, 50),
        ("d2h", "x2", 60, 70),
        ("h2d", "x2", 80, 90),
        ("h2d", "x1", 120, 130),
    ]
    assert done.time == run(FOUR, "keep_all").time == 240
    assert done.result.log.counters["implicit_moves"] == 0


def test_prefetching_further_ahead_starts_earlier(run) -> None:
    # both start at 80 now, and queue in the order of need
    assert run(FOUR, "swap_all", ahead=2).moves[2:] == [("h2d", "x2", 80, 90), ("h2d", "x1", 90, 100)]
    # by ops: b1 is the fourth backward op, so two ops before it is b3, at 80, too; none before it is b1 itself
    assert run(FOUR, "swap_all", unit="op", ahead=2).moves[2:] == [("h2d", "x2", 80, 90), ("h2d", "x1", 90, 100)]
    late = run(FOUR, "swap_all", unit="op", ahead=0)
    # b2 and b1 each wait for theirs; x3 is wanted by b3 at the instant at which it is sent, so its copy never starts
    assert late.moves[2:] == [("h2d", "x2", 120, 130), ("h2d", "x1", 170, 180)]
    assert late.time == 240 + 10 + 10


def test_it_needs_less_memory_where_copies_keep_up(run) -> None:
    trace = w1(4)
    plain, swapped = run(trace, "keep_all"), run(trace, "swap_all", on=machine(rate=400 * GB))
    assert len(swapped.out) > 20
    assert swapped.peak < 0.65 * plain.peak
    assert swapped.time == plain.time
    # the last layer's largest result is still on its way out when its block's prefetches start
    assert set(swapped.out) - set(swapped.back) == {"h3.gelu"}


def test_a_copy_that_has_not_ended_is_called_back_and_nobody_waits(run) -> None:
    done = run(FOUR, "swap_all", on=machine(rate=GB // 100))  # each copy takes 1000 ns
    assert done.time == 1040  # x1's copy began at 40: nothing waits for it but the end of the run
    assert done.result.events.query("why == 'stall' and cause != 'drain'").empty
    assert not done.back


def test_a_trace_without_layers_counts_every_op_as_a_block(run) -> None:
    done = run(uniform_chain(5, 10, 20), "swap_all", unit="op", ahead=1)
    assert done.out
    assert done.out == done.back


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PolicyError, match=r"unit is 'blok'; expected 'block' or 'op' \(did you mean 'block'"):
        simulate(FOUR, machine(), "swap_all", unit="blok")
    with pytest.raises(PolicyError, match="ahead is -1"):
        simulate(FOUR, machine(), "swap_all", ahead=-1)
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(FOUR, machine(host=False), "swap_all")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_goes_out_comes_back_unless_it_was_called_back(data: st.DataObject) -> None:
    trace, platform = data.draw(traces(cpu=False)), data.draw(platforms(host=True))
    budget = data.draw(st.one_of(st.just(1 << 40), budgets(trace)))
    parameters = {"unit": data.draw(st.sampled_from(["block", "op"])), "ahead": data.draw(st.integers(0, 3))}
    try:
        done = facts(simulate(trace, platform, "swap_all", budget=budget, **parameters))
    except OutOfMemory:
        return
    log = done.result.log
    assert log.counters["implicit_moves"] == 0
    runs = log.intervals[log.interval("why") == WHY["run"]]
    started = {int(row[5]): int(row[0]) for row in runs}
    asked = {trace.tensors[a.tensor].name: a for a in done.result.plan.actions if a.before is not None}
    ends = {tensor: end for lane, tensor, _, end in done.moves if lane == "d2h"}
    for tensor, bytes in done.out.items():
        # the prefetch is asked for before that op, which may start later, once it has space
        assert done.back.get(tensor, bytes) == bytes
        if tensor not in done.back:
            assert ends[tensor] >= _reached(log, asked[tensor].before, started)
    assert set(done.back) <= set(done.out)


def _reached(log, op: int, started: dict[int, int]) -> int:
    """When the device reached an op: the end of the op before it."""
    return max((start for other, start in started.items() if other < op), default=0)
