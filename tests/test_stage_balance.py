"""How many layers each stage gets on a machine of several networks, against the simulation of every way to cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from sim import simulate
from sim.hardware.nodes import hop_rates, placed, ring_rates
from sim.hardware.platform import Network, Platform, rank_link
from sim.hardware.profile import load_profile
from sim.layout import Layout, lay_out, with_layers
from sim.layout_estimate import Estimator
from sim.trace.layers import op_layers
from workloads import cnn, transformer

GB = 10**9
RACK, HALL = Network("rack", 1, 50 * GB, 3_000, 2), Network("hall", 2, 2 * GB, 9_000)
STAGES, MICRO_BATCHES = 4, 4


def machine(*networks: Network, devices: int = 1) -> Platform:
    in_fp32 = {"engines.gpu.peak.tf32": "19.5 TFLOP/s", "engines.gpu.image_order.tf32": "any"}
    return replace(load_profile("a100_80_sxm", overrides={"devices": str(devices), **in_fp32}), networks=networks)


@pytest.fixture(scope="module")
def every_cut():
    """Layers per stage, and how long an iteration takes: four stages, two in each rack, which a slow network joins."""
    trace, found = cnn("alexnet", batch=64), {}
    layers = len({layer for layer in op_layers(trace).tolist() if layer >= 0})
    for cut in combinations(range(1, layers), STAGES - 1):
        sizes = tuple(b - a for a, b in pairwise((0, *cut, layers)))
        layout = {"pp": STAGES, "micro_batches": MICRO_BATCHES, "layers": sizes}
        found[sizes] = simulate(*lay_out(trace, machine(RACK, HALL), layout), budget="1 TB").log.end
    assert len(found) == 35
    return trace, found


@pytest.mark.parametrize("how", ["balanced", "dapple"])
def test_layers_are_cut_where_little_goes_over_the_slow_network(how, every_cut):
    """Within 3 % of the best cut there is; taken for one fast network, the machine would be 37 % slower."""
    trace, found = every_cut
    layout = Layout(pp=STAGES, micro_batches=MICRO_BATCHES, layers=how)
    chosen = with_layers(trace, machine(RACK, HALL), layout).layers
    mistaken = with_layers(trace, machine(replace(RACK, nodes=0)), layout).layers
    assert found[chosen] < 1.03 * min(found.values())
    assert found[mistaken] > 1.3 * min(found.values())


@pytest.mark.parametrize(
    ("devices", "stages", "ranks"), [(1, 4, 1), (1, 4, 2), (2, 4, 1), (2, 8, 1), (4, 3, 4), (4, 4, 2)]
)
def test_what_planners_read_is_what_is_built(devices, stages, ranks):
    """Hops and rings of a plan have the rates of the links that the layout gets."""
    node = machine(replace(RACK, per_node=devices), replace(HALL, per_node=2 * devices), devices=devices)
    built = placed(node, stages, ranks)
    rate = {link.name: (link.rate, link.fixed) for link in built.links}
    over = {(link.source, link.target): link.rate for link in built.links}
    homes = [built.home(stage).name for stage in range(stages)]
    assert hop_rates(node, range(stages), ranks) == tuple(over[pair] for pair in pairwise(homes))
    there_and_back = [*range(stages), *reversed(range(stages))]
    back = [over[pair] for pair in pairwise(reversed(homes))]
    assert hop_rates(node, there_and_back, ranks) == (*(over[pair] for pair in pairwise(homes)), 0, *back)
    if ranks > 1:
        assert ring_rates(node, stages, ranks)["data"] == rate[rank_link("data", 0)]


def test_an_estimate_counts_each_network_that_gradients_cross():
    """Eight replicas of one device: in two of a rack the bytes are halved, then they go round among four racks."""
    trace = transformer(
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 16, "vocab_size": 64},
        batch=8, sequence=16,
    )  # fmt: skip
    weights = sum(t.bytes for t in trace.tensors if t.role == "weight" and trace.producer[t.id] < 0)
    wanted = 2 * weights * ((1 / 2) / RACK.rate + (3 / 4) / 2 / HALL.rate) * 1e9
    with_networks = Estimator(trace, machine(RACK, HALL)).of(Layout(dp=8)).time_ns
    fast = 10**15
    free = Estimator(trace, machine(replace(RACK, rate=fast), replace(HALL, rate=fast))).of(Layout(dp=8)).time_ns
    assert with_networks - free == pytest.approx(wanted, rel=1e-3)
