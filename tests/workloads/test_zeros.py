"""Fractions of zeros: stated with their source, propagated by a stated model, measured against PyTorch's values."""

from __future__ import annotations

from random import Random

import pytest

from sim.errors import WorkloadError
from sim.trace.io import load, save
from workloads import cnn, transformer, with_zeros
from workloads.zeros import PUBLISHED


def test_nothing_is_stated_unless_asked():
    trace = cnn("vgg-16", 1)
    assert trace.tensor_columns.zeros == {}
    assert "zeros" not in trace.meta


def test_stated_zeros_and_their_source_survive_a_file(tmp_path):
    trace = cnn("googlenet", 1, zeros="cdma")
    save(trace, tmp_path / "t.jsonl.gz")
    back = load(tmp_path / "t.jsonl.gz")
    assert back == trace
    assert "1705.01626" in back.meta["zeros"]
    assert {op.function for op in back.ops} == {"", "relu", "max_pool"}


def test_the_fraction_of_cdma_follows_from_its_mean_ratio():
    assert 1 / (1 / 32 + 1 - PUBLISHED["cdma"][0]) == pytest.approx(2.6, abs=1e-3)


def test_pooling_of_independent_elements_against_counting():
    draw = Random(0)
    trace = cnn("vgg-16", 1, zeros=0.8)
    windows = [[max(draw.gauss(-0.8416, 1), 0) for _ in range(4)] for _ in range(40_000)]  # 80 % below zero
    counted = sum(max(window) == 0 for window in windows) / len(windows)
    assert trace.tensors[trace.tensor_id("pool1.out")].zeros == pytest.approx(counted, abs=0.01)


def test_a_concatenation_has_the_mean_of_its_parts():
    parts = {"3a.1x1.relu": 0.5, "3a.3x3.relu": 0.75, "3a.5x5.relu": 0.25, "3a.pool.proj.relu": 1.0}
    trace = cnn("googlenet", 1, zeros=parts)
    channels = {"3a.1x1.relu": 64, "3a.3x3.relu": 128, "3a.5x5.relu": 32, "3a.pool.proj.relu": 32}
    mean = sum(parts[name] * channels[name] for name in parts) / sum(channels.values())
    assert trace.tensors[trace.tensor_id("3a.concat.out")].zeros == pytest.approx(mean)


@pytest.mark.parametrize(
    ("zeros", "why"),
    [
        (1.5, "zeros: the fraction is 1.5; expected a number from 0 to 1"),
        (True, "the fraction is True"),
        ("symetric", r"zeros: 'symetric' is unknown \(did you mean 'symmetric'\?\)"),
        ({"relu1": 0.5, "relv2": 0.5}, r"zeros: 'relv2' matches no ReLU"),
        ({"relu1": "half"}, "the fraction of 'relu1' is 'half'"),
    ],
)
def test_bad_fractions_are_refused_in_one_line(zeros, why):
    with pytest.raises(WorkloadError, match=why):
        cnn("vgg-16", 1, zeros=zeros)


def test_a_trace_without_relus_has_nothing_to_state():
    with pytest.raises(WorkloadError, match="no ReLU"):
        with_zeros(transformer("gpt2", batch=1, sequence=8), 0.9)
