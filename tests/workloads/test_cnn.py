"""Convolution nets: published sizes, the life of their tensors, and the algorithms a convolution may take."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sim.errors import WorkloadError
from sim.experiment import simulate
from sim.hardware.profile import load_profile
from sim.rewrites.rewrite import choose_implementation
from workloads import cnn, cnn_names
from workloads.convnets import GOOGLENET
from workloads.convolution_algorithms import RATE, TILE_FLOPS, Convolution

PUBLISHED = {
    # parameters as the reference implementations count them; multiply-adds of one image in millions
    "alexnet": (60_965_224, 724),
    "vgg-16": (138_357_544, 15_470),
    "googlenet": (6_998_552, 1_582),
    "resnet-50": (25_557_032, 4_089),
    "resnet-101": (44_549_160, 7_801),
    "resnet-152": (60_192_808, 11_513),
    "inception-v4": (42_679_816, 12_250),
}


def test_there_are_published_figures_for_every_net():
    assert set(cnn_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_multiply_adds_are_the_published_ones(name):
    trace = cnn(name, 2)
    parameters, millions = PUBLISHED[name]
    assert trace.meta["parameters"] == parameters
    products = [o for o in trace.ops if o.phase == "forward" and o.kind in ("conv", "matmul")]
    assert sum(o.flops for o in products) / (2 * 2e6) == pytest.approx(millions, rel=0.002)


@pytest.mark.parametrize("name", PUBLISHED)
def test_memory_and_arithmetic_of_images_grow_with_the_batch(name):
    small, large = cnn(name, 2), cnn(name, 6)
    for kind in ("conv", "pool"):
        assert 3 * sum(o.flops for o in small.ops if o.kind == kind) == sum(
            o.flops for o in large.ops if o.kind == kind
        )

    def kept(trace):
        return sum(t.bytes for t in trace.tensors if t.saved_for and t.shape and len(t.shape) == 4)

    assert 3 * kept(small) == kept(large)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_weight_gets_a_gradient_and_a_new_value(name):
    trace = cnn(name, 2)
    weights = [t for t in trace.tensors if t.role == "weight" and trace.producer[t.id] < 0]
    gradients = [t for t in trace.tensors if t.role == "gradient"]
    parameters = [t for t in weights if not t.name.endswith(("running_mean", "running_var", "batches"))]
    assert sorted(t.bytes for t in parameters) == sorted(t.bytes for t in gradients)
    assert all(trace.replaced_by[t.id] >= 0 for t in weights)
    assert {b for _, b in trace.carry} >= {t.id for t in weights}


def test_layers_number_what_repeats():
    found = {name: 1 + max(t.layer for t in cnn(name, 1).tensors) for name in PUBLISHED}
    assert found == {
        "alexnet": 8,
        "vgg-16": 16,
        "googlenet": 9,
        "resnet-50": 16,
        "resnet-101": 33,
        "resnet-152": 50,
        "inception-v4": 16,
    }


def test_micro_batches_hold_fewer_activations_and_add_gradients_in_place():
    platform = load_profile("a100_80_sxm")
    whole, parts = cnn("resnet-50", 8), cnn("resnet-50", 8, micro_batches=4)
    assert simulate(parts, platform).summary()["peak_bytes"] < 0.6 * simulate(whole, platform).summary()["peak_bytes"]
    assert parts.meta["parameters"] == whole.meta["parameters"]
    assert parts.meta["model_flops"] == whole.meta["model_flops"]
    assert any(o.name == "mb3.stem.norm" for o in parts.ops)


def test_a_relu_in_place_makes_no_second_feature_map():
    new, over = (cnn("vgg-16", 4, inplace_relu=inplace) for inplace in (False, True))
    maps = [t.bytes for t in new.tensors if t.name.startswith("relu") and t.name.endswith(".out")]
    assert saved(over) == saved(new)  # backward reads the result of a ReLU, never its input
    assert storages(new) - storages(over) == sum(maps) + 2 * 4 * 4 * 4096  # and of the two dense layers


def saved(trace):
    return sum(t.bytes for t in trace.tensors if t.saved_for)


def storages(trace):
    return sum(t.bytes for t in trace.tensors if t.replaces is None and t.role == "activation")


def test_cudnn_keeps_no_indices_and_overwrites_the_gradient_of_a_relu_in_place():
    trace = cnn("googlenet", 4, kernels="cudnn")
    assert not [t.name for t in trace.tensors if "indices" in t.name]
    read = {trace.tensors[t].name for t in trace.reads(trace.op_id("pool1.bwd"))}
    assert {"pool1.out", "conv1.relu.out"} <= read
    undone = [o for o in trace.ops if o.name.endswith("relu.bwd")]
    new = {o.name for o in undone if trace.tensors[o.writes[0]].replaces is None}
    # the gradient of what was concatenated is a part of the whole's, which others still read
    assert new == {
        f"{module}.{part}.relu.bwd" for module, *_ in GOOGLENET for part in ("1x1", "3x3", "5x5", "pool.proj")
    }
    # a gradient that the shortcut of a residual block reads as well is not overwritten, or this would be refused
    assert simulate(cnn("resnet-50", 2, kernels="cudnn"), load_profile("a100_80_sxm")).log.complete


def test_vdnn_trades_time_against_workspace():
    trace, platform = cnn("vgg-16", 16), load_profile("a100_40_pcie")
    runs = {a: simulate(trace, platform, "vdnn", variant="all", algorithm=a).summary() for a in "mp"}
    assert runs["p"]["makespan_ns"] < runs["m"]["makespan_ns"]
    assert runs["p"]["peak_bytes"] > runs["m"]["peak_bytes"]


def test_a_batch_norm_can_be_run_again_after_its_statistics_were_renewed():
    trace, platform = cnn("resnet-50", 4), load_profile("a100_40_pcie")
    events = simulate(trace, platform, "full_recompute").log.events
    again = set(events.loc[events["why"] == "recompute", "op"])
    assert "block1.1.norm" in again
    assert not {op for op in again if op.endswith("statistics")}


# ---- algorithms ------------------------------------------------------------------------------------

SHAPE = Convolution(batch=4, channels=8, size=(12, 10), filters=16, kernel=(3, 3), padding=(1, 1))


def test_a_convolution_counts_its_multiply_adds_one_by_one():
    shape = Convolution(batch=2, channels=4, size=(7, 6), filters=6, kernel=(3, 2), stride=2, padding=(1, 0), groups=2)
    image = np.zeros((7 + 2, 6))
    places = [
        (y, x)
        for y, x in itertools.product(range(0, image.shape[0], 2), range(0, image.shape[1], 2))
        if y + 3 <= image.shape[0] and x + 2 <= image.shape[1]
    ]
    assert shape.result[0] * shape.result[1] == len(places)
    assert shape.flops == 2 * 2 * 6 * len(places) * (4 // 2) * 3 * 2


def test_workspaces_are_the_closed_forms():
    gemm, fft, winograd = SHAPE.implementations("fp32")
    assert [i.name for i in (gemm, fft, winograd)] == ["gemm", "fft", "winograd"]
    assert gemm.workspace == 4 * (8 * 9) * (4 * 12 * 10)
    assert fft.workspace == 8 * (14 * (12 // 2 + 1)) * (4 * 8 + 8 * 16 + 4 * 16)
    tiles = 3 * 3
    assert winograd.workspace == 4 * 36 * (4 * 8 * tiles + 8 * 16 + 4 * 16 * tiles)
    assert SHAPE.implementations("bf16")[0].workspace == gemm.workspace // 2


def test_time_factors_approach_their_limits_with_many_channels():
    wide = Convolution(batch=64, channels=4096, size=(64, 64), filters=4096, kernel=(3, 3), padding=(1, 1))
    gemm, _, winograd = wide.implementations("fp32")
    assert gemm.time_factor == pytest.approx(1 / RATE["gemm"], rel=1e-3)
    assert winograd.time_factor == pytest.approx(1 / 4 / RATE["winograd"], rel=0.01)  # 36 products for 144


def test_larger_filters_favour_the_fourier_transform():
    factors = []
    for k in (3, 5, 7, 9):
        shape = Convolution(batch=32, channels=64, size=(28, 28), filters=64, kernel=(k, k), padding=(k // 2, k // 2))
        factors.append(next(i.time_factor for i in shape.implementations("fp32") if i.name == "fft"))
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"kernel": (1, 1), "padding": (0, 0)}, []),
        ({"stride": 2}, ["gemm"]),
        ({"kernel": (5, 5)}, ["gemm", "fft"]),
        ({"kernel": (1, 7)}, ["gemm", "fft"]),
    ],
)
def test_an_algorithm_is_offered_where_it_applies(changes, names):
    shape = Convolution(**{**vars(SHAPE), **changes})
    assert [i.name for i in shape.implementations("fp32")] == names


def test_winograd_transforms_compute_the_convolution_with_the_flops_that_are_counted():
    """F(4, 3) in one dimension, written with shared sums, against the plain convolution; each operation counts."""

    class Counted:
        flops = 0

        def __init__(self, value):
            self.value = value

        def _do(self, value):
            Counted.flops += 1
            return Counted(value)

        def __add__(self, other):
            return self._do(self.value + other.value)

        def __sub__(self, other):
            return self._do(self.value - other.value)

        def __rmul__(self, factor):
            return self._do(factor * self.value)

    def counted(transform, values):
        Counted.flops = 0
        return [x.value for x in transform([Counted(v) for v in values])], Counted.flops

    def data(d):
        a, b, c, e = d[4] - 4 * d[2], d[3] - 4 * d[1], d[4] - d[2], 2 * (d[3] - d[1])
        return [4 * d[0] - 5 * d[2] + d[4], a + b, a - b, c + e, c - e, 4 * d[1] - 5 * d[3] + d[5]]

    def filters(g):
        s, t, u = g[0] + g[2], (1 / 24) * g[0] + (1 / 6) * g[2], (1 / 12) * g[1]
        return [(1 / 4) * g[0], (-1 / 6) * (s + g[1]), (-1 / 6) * (s - g[1]), t + u, t - u, g[2]]

    def result(m):
        p, q, r, s = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
        return [m[0] + p + r, q + 2 * s, p + 4 * r, q + 8 * s + m[5]]

    rng = np.random.default_rng(0)
    d, g = rng.normal(size=6), rng.normal(size=3)
    (wide, data_flops), (small, filter_flops) = counted(data, d), counted(filters, g)
    out, result_flops = counted(result, [a * b for a, b in zip(wide, small, strict=True)])
    np.testing.assert_allclose(out, np.correlate(d, g, "valid"), atol=1e-12)
    assert {"input": 12 * data_flops, "filter": 9 * filter_flops, "result": 10 * result_flops} == TILE_FLOPS


def test_a_chosen_algorithm_brings_its_workspace_both_ways():
    trace = cnn("alexnet", 4)
    op = trace.ops[trace.op_id("conv3.bwd")]
    assert op.alternatives == trace.ops[trace.op_id("conv3")].alternatives
    faster = choose_implementation(trace, {"conv3.bwd": "winograd"})
    assert faster.ops[op.id].workspace == next(i.workspace for i in op.alternatives if i.name == "winograd")
    assert faster.ops[op.id].flops < op.flops


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "resnet50"}, "did you mean 'resnet-50'"),
        ({"batch": 0}, "batch: needs an integer of at least 1"),
        ({"batch": 3, "micro_batches": 2}, "micro_batches: 2 does not divide batch 3"),
        ({"image": 16}, "image: too small"),
        ({"dropout": 1.0}, "dropout: needs a number from 0 up to 1"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"kernels": "cudn"}, "did you mean 'cudnn'"),
        ({"precision": "fp4"}, "precision 'fp4' is unknown"),
        ({"precision": "mixed_fp8"}, "precision 'mixed_fp8' is about linear layers of transformers; here it is 'bf16'"),
    ],
)
def test_wrong_arguments_are_named(given, message):
    with pytest.raises(WorkloadError, match=message):
        cnn(**{"name": "alexnet", "batch": 2, **given})
