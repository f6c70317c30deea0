"""Megatron-LM's offloading by layer: L - n layers are held, and each is fetched as many layers ahead, less one."""

from __future__ import annotations

import pytest

from sim.conformance import check_policy
from sim.errors import PolicyError
from sim.experiment import simulate
from sim.policies.offload.layer_offload import LayerOffload
from sim.rewrites.codecs import elements
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine
from workloads import transformer


def stack(layers: int, *, size: int = 30, forward: int = 10, backward: int = 20) -> Trace:
    """A stack of layers that each save a tensor of `size` bytes, which none but its own layer reads; times in ns."""
    b = TraceBuilder()
    hidden, saved = b.tensor("x", 1, "input"), []
    for i in range(layers):
        saved.append(b.tensor(f"a{i}", size))
        b.op(f"h{i}", reads=[hidden], writes=saved[-1:], duration=forward, layer=i)
        hidden = b.tensor(f"x{i}", 1)
        b.op(f"h{i}.out", reads=saved[-1:], writes=[hidden], duration=0, layer=i)
    gradient = b.tensor("g", 1, "temporary")
    b.op("loss", "loss", reads=[hidden], writes=[gradient], duration=1)
    for i in reversed(range(layers)):
        made = b.tensor(f"d{i}", 1, "temporary")
        fields = {"phase": "backward", "layer": i, "duration": backward}
        b.op(f"h{i}.out.bwd", reads=[gradient, saved[i]], writes=[made], **fields)
        gradient = made
    return b.build()


def test_a_layer_is_out_before_the_layer_that_takes_its_place_and_back_one_layer_ahead(run) -> None:
    done = run(stack(4), "layer_offload", layers=2, min_elements=1)
    assert [move for move in done.moves if move[0] == "d2h"] == [("d2h", "a0", 10, 40), ("d2h", "a1", 40, 70)]
    # layer 2 waits for a0, layer 3 for a1
    assert done.ran("h0", "h1", "h2", "h3", "loss") == [(0, 10), (10, 20), (40, 50), (70, 80), (80, 81)]
    # a1 begins with the backward of layer 2, a0 with that of layer 1, which itself waits for a1
    assert [move for move in done.moves if move[0] == "h2d"] == [("h2d", "a1", 101, 131), ("h2d", "a0", 131, 161)]
    assert done.ran(*(f"h{i}.out.bwd" for i in (3, 2, 1, 0))) == [(81, 101), (101, 121), (131, 151), (161, 181)]


@pytest.mark.parametrize("layers", [1, 4, 8, 10])
def test_what_the_first_n_layers_save_is_offloaded_once_and_the_device_holds_the_others(layers: int, run) -> None:
    trace = transformer("gpt2", batch=1, sequence=64)
    plain = run(trace, "keep_all")
    done = run(trace, "layer_offload", layers=layers, min_elements=1)
    assert not departures(done.result.plan.trace, trace)
    assert done.out == done.back
    # a layer's own results leave with it; the input of the first one is of no layer
    of = {int(name[1 : name.index(".")]) for name in done.out if name.startswith("h")}
    assert of == set(range(layers))
    assert done.peak <= plain.peak
    assert done.result.log.counters["implicit_moves"] == 0


@pytest.mark.parametrize(("layers", "stall"), [(1, 0), (4, 0), (6, 0), (7, 2 * 7 * 60)])
def test_no_copy_is_hidden_where_one_layer_is_held_and_all_where_two_are(layers: int, stall: int, run) -> None:
    done = run(stack(8, size=60, forward=100, backward=100), "layer_offload", layers=layers, min_elements=1)
    assert done.time == 8 * 200 + 1 + stall


def test_without_a_number_it_takes_the_fewest_layers_that_fit(run) -> None:
    trace = stack(8, size=1000)
    peak = run(trace, "keep_all").peak
    assert run(trace, "layer_offload", peak, min_elements=1).moves == []
    for budget in (peak - 1000, peak - 3000):
        done = run(trace, "layer_offload", budget, min_elements=1)
        assert done.peak <= budget
        count = len(done.out)
        fits = [run(trace, "layer_offload", layers=n, min_elements=1).peak <= budget for n in range(8)]
        assert len(run(trace, "layer_offload", layers=fits.index(True), min_elements=1).out) == count


def test_small_tensors_stay(run) -> None:
    trace = transformer("gpt2", batch=1, sequence=64)
    every, large = (run(trace, "layer_offload", layers=5, min_elements=least).out for least in (1, 64 * 768 + 1))
    count = {t.name: elements(t) for t in trace.tensors}
    assert large.keys() == {name for name in every if count[name] > 64 * 768}
    assert 0 < len(large) < len(every)


def test_it_keeps_the_law_where_small_tensors_are_offloaded_too(tmp_path) -> None:
    report = check_policy(LayerOffload(min_elements=1), examples=12, folder=tmp_path, across_processes=False)
    assert not report.broken, report.as_text()


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(stack(2), machine(host=False), "layer_offload")
    with pytest.raises(PolicyError, match="layers is 4; of 4 the last one stays: at most 3"):
        simulate(stack(4), machine(), "layer_offload(layers=4)")
