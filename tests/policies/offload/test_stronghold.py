"""STRONGHOLD: forward times of each window, the one that is chosen, updates beside backward, what the device holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sim.errors import PolicyError
from sim.experiment import simulate
from sim.hardware.profile import load_profile
from sim.policies.offload.stronghold.window import Window
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, machine
from tests.policies.offload.test_zero_offload import layers
from workloads.transformer import transformer

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 128}
INSTANT = 1 << 60


def ends(result) -> dict[str, int]:
    return {row.op: row.end_ns for row in result.events.query("why == 'run'").itertuples()}


@pytest.mark.parametrize(("window", "forward"), [(1, 145), (2, 130), (3, 115), (4, 100), (6, 100)])
def test_ten_layers_with_copies_half_as_long_again_take_as_long_as_counted_by_hand(window, forward) -> None:
    # F = 10, H = 15: (10 - w) 15 + 10, down to the ten layers' own time
    done = simulate(layers(10, 15, 10, 20), machine(cpu_rate=INSTANT), "stronghold", resident=True, window=window)
    assert ends(done)["f9"] == forward
    assert ends(done)["f0.bwd"] == forward + 200
    assert done.log.counters["implicit_moves"] == done.log.counters["returned_moves"] == 0
    assert not departures(done.plan.trace, layers(10, 15, 10, 20))


@pytest.mark.parametrize("copy", [5, 10, 12, 15, 20, 35])
def test_the_smallest_window_that_hides_every_copy_is_chosen(copy) -> None:
    count, forward = 10, 10
    done = simulate(layers(count, copy, forward, 100), machine(cpu_rate=INSTANT), "stronghold", resident=True)
    expected = 1 if copy <= forward else math.ceil(count - (count - 1) * forward / copy)
    assert done.plan.notes["window"] == expected
    assert ends(done)["f9"] == count * forward
    if expected > 1:
        less = simulate(
            layers(count, copy, forward, 100),
            machine(cpu_rate=INSTANT),
            "stronghold",
            resident=True,
            window=expected - 1,
        )
        assert ends(less)["f9"] == max((count - expected + 1) * copy + forward, count * forward) > count * forward


def test_a_slower_link_never_shrinks_the_window() -> None:
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    card = load_profile("a100_40_pcie")
    found = []
    for rate in (100_000, 25_000, 100, 20, 5):
        links = tuple(replace(link, rate=rate * 10**6, fixed=0) for link in card.links)
        found.append(simulate(trace, replace(card, links=links), "stronghold").plan.notes["window"])
    assert found == sorted(found)
    assert found[0] < found[-1]


@pytest.mark.parametrize("window", [1, 2, 4])
def test_the_device_holds_the_weights_of_a_window_and_one_layer(window) -> None:
    done = simulate(layers(10, 1000, 2000, 4000), machine(cpu_rate=INSTANT), "stronghold", resident=True, window=window)
    rows = done.memory[done.memory.tier == "hbm"]
    weights = {t.name for t in done.plan.trace.tensors if t.role == "weight"}
    held = rows[rows.tensor.isin(weights)].groupby("time_ns").delta_bytes.sum().cumsum()
    assert held.max() == (window + 1) * 1000
    assert held.iloc[0] == (window + 1) * 1000  # the first copy has its space
    assert held.iloc[-1] == window * 1000


def test_updates_begin_when_their_gradients_have_arrived_and_first_layers_go_up_last() -> None:
    # 3 layers, weights of 10 B, links of 1 B/ns, updates of 25 ns: backward ends at 100, 140, 180
    trace, on = layers(3, 10, 20, 40), machine(cpu_rate=4 * 10**9)
    done = simulate(trace, on, "stronghold", resident=True, window=1)
    rows = done.events
    runs = {row.op: (row.start_ns, row.end_ns) for row in rows[rows.lane == "cpu"].itertuples()}
    # the device reaches the update of a layer at the end of the next op, and the last when its gradient has arrived
    assert runs == {"adam2": (140, 165), "adam1": (180, 205), "adam0": (205, 230)}
    up = rows[(rows.lane == "h2d") & rows.tensor.str.endswith(".resident")]
    assert list(zip(up.tensor, up.start_ns, up.end_ns, strict=True)) == [("w0.new.resident", 230, 240)]
    assert done.log.end == 240
    assert (
        simulate(
            layers(3, 10, 20, 40), machine(cpu_rate=4 * 10**9), "stronghold", resident=True, window=1, iterations=3
        ).log.end
        == 240
    )


def test_little_memory_takes_the_largest_window_that_fits_and_keeps_to_it() -> None:
    trace = layers(10, 1000, 100, 4000)  # copies take ten times as long as forward: all layers would be needed
    ample = simulate(trace, machine(cpu_rate=INSTANT), "stronghold", resident=True)
    assert ample.plan.notes["window"] == 10
    found = []
    for budget in (5_100, 6_100, 8_100):
        done = simulate(trace, machine(budget, cpu_rate=INSTANT), "stronghold", resident=True)
        assert done.summary()["peak_bytes"] <= budget
        found.append(done.plan.notes["window"])
    # window + 1 layers of 1000 B, gradients of two, and what else there is: less than 100 B
    assert found == [2, 3, 5]


def test_backward_may_ask_for_a_larger_window_than_forward() -> None:
    """Copies of 5 hide behind layers of 10 in forward; in backward behind two of 2 and then three, of 2 each."""
    window = Window.__new__(Window)
    window.__dict__.update(times=[10] * 4 + [2] * 4, copies=[5] * 8, forward=4, weights=[], updates={})
    assert [window.hides(w) for w in (1, 2, 3, 4)] == [False, False, True, True]


def test_a_slower_cpu_asks_for_more_layers_that_are_not_fetched_early() -> None:
    """Updates of the first layers come last: the next iteration must not fetch them before they have ended."""
    found = [
        simulate(layers(10, 5, 10, 100), machine(cpu_rate=rate), "stronghold", resident=True).plan.notes["window"]
        for rate in (INSTANT, GB, GB // 2, GB // 5, GB // 10)
    ]
    assert found == [1, 1, 2, 7, 9]


def test_the_search_finds_the_fastest_window() -> None:
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    card = load_profile("a100_40_pcie")
    each = {w: simulate(trace, card, "stronghold", resident=True, window=w).log.end for w in range(1, 7)}
    searched = simulate(trace, card, "stronghold", resident=True, choice="search")
    assert searched.log.end == min(each.values())
    assert searched.log.end <= simulate(trace, card, "stronghold", resident=True).log.end
    assert searched.plan.notes["window"] == min(each, key=lambda w: (each[w], w))


def test_gradients_that_are_kept_to_the_end_count_to_the_end() -> None:
    trace = layers(3, 10, 20, 40)
    gradients = [trace.tensor_id(f"g{i}") for i in range(3)]
    kept = Trace(trace.tensor_columns, trace.op_columns, outputs=[*trace.outputs, *gradients], carry=trace.carry)
    assert simulate(kept, machine(cpu_rate=INSTANT), "stronghold", resident=True).log.complete


def test_the_first_layers_are_fetched_where_they_are_not_resident_and_recomputation_reads_them() -> None:
    trace = layers(4, 10, 20, 40)
    alone = simulate(trace, machine(cpu_rate=INSTANT), "stronghold", window=1)
    assert ends(alone)["f3"] == 10 + 4 * 20
    step = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16")
    assert simulate(step, machine(), "stronghold + full_recompute").log.complete


def stages(*sizes: int, took: int, count: int = 8) -> Trace:
    """Per device as many layers, with weights of its size in MB, each read by an op of so many microseconds."""
    b = TraceBuilder()
    for device, size in enumerate(sizes):
        y = b.tensor(f"x{device}", 1, "input")
        for i in range(count):
            w, x = b.tensor(f"w{device}.{i}", size * 10**6, "weight", layer=i), y
            y = b.tensor(f"y{device}.{i}", 1, layer=i)
            b.op(f"f{device}.{i}", "matmul", reads=[x, w], writes=[y], layer=i, device=device, duration=took * 1000)
    return b.build()


def test_the_window_fits_every_device_and_hides_the_copies_of_each() -> None:
    one, two = (load_profile("a100_80_sxm", overrides={"devices": str(n)}) for n in (1, 2))

    def window(trace: Trace, budget: int = 1000) -> int:
        card = two if trace.devices == 2 else one
        done = simulate(trace, card, "stronghold", budget=budget * 10**6)
        assert done.log.counters["implicit_moves"] == 0
        return int(done.plan.notes["window"])

    # 10 MB take 415 us, and 100 MB more than 4 ms
    small, large = (window(stages(size, took=1500)) for size in (10, 100))
    assert (small, large) == (1, 6)
    assert window(stages(10, 100, took=1500)) == window(stages(100, 10, took=1500)) == large
    # in 350 MB there are three of 100 MB; those of 10 alone would have more
    assert window(stages(10, took=100), 350) > 2
    assert window(stages(10, 100, took=100), 350) == 2


def test_what_is_wrong_is_named() -> None:
    trace = layers(2, 10, 20, 40)
    with pytest.raises(PolicyError, match="window is -1"):
        simulate(trace, machine(), "stronghold", resident=True, window=-1)
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(trace, machine(host=False), "stronghold")
    with pytest.raises(PolicyError, match="toy has no engine 'cpu'"):
        simulate(trace, replace(machine(), engines=machine().engines[:1]), "stronghold")
