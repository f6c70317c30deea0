"""The instruction mapping table: peaks that follow from units, kinds that run scalar or not at all, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim import load_profile, simulate
from sim.errors import ProfileError
from sim.hardware.cost import op_times
from sim.hardware.mapping import can_run, mapping_table
from sim.policies import load
from sim.report.listings import profile_page
from sim.trace import TraceBuilder
from sim.trace.op import KINDS
from workloads import transformer

MACHINE = """
description = "an engine described by its units"

[tiers.near]
kind = "hbm"
per_device = true
source = "sheet"
standing = "vendor"
nominal = "32 GB"
capacity = "32 GB"
bandwidth = "1 TB/s"

[engines.unit]
home = "near"
source = "sheet"
standing = "vendor"
launch = "1 us"
{engine}

[fit]
source = "none"
standing = "assumed"
op_time = "no measurement"
transfer_time = "no measurement"
"""

SVE = """
cores = 48
clock = "2.0 GHz"
vector = "512 bit"
units = { fp64 = 2, fp32 = 2, fp16 = 2 }
"""


def machine(engine: str, folder: Path):
    path = folder / "unit.toml"
    path.write_text(MACHINE.replace("{engine}", engine), encoding="utf-8")
    return load_profile(path)


@pytest.mark.parametrize(("engine", "peaks"), [
    # A64FX at 2 GHz as its manufacturer states it: two 512-bit SVE pipes per core
    (SVE, {"fp64": 3.072e12, "fp32": 6.144e12, "fp16": 12.288e12}),
    # A100: 108 multiprocessors of 64 FP32 units, as one vector of 64 lanes; 19.5 TFLOP/s on its sheet
    ('cores = 108\nclock = "1410 MHz"\nvector = "2048 bit"\nunits = { fp32 = 1 }', {"fp32": 19.49e12}),
    # MT-3000 in FP64: 96 cores of 16 VPEs with 3 multiply-add units at 1.2 GHz; stated as 11.6 for the chip
    ('cores = 96\nclock = "1.2 GHz"\nvector = "1024 bit"\nunits = { fp64 = 3 }', {"fp64": 11.0592e12}),
])  # fmt: skip
def test_the_peak_follows_from_cores_clock_vector_and_units(engine, peaks, tmp_path):
    peak = machine(engine, tmp_path).engines[0].peak
    assert peak == pytest.approx(peaks, rel=1e-3)


def test_a_given_peak_stands_beside_derived_ones():
    survey, cluster = (load_profile(name).main_engine().peak for name in ("mt3000_survey", "mt3000_cluster"))
    assert survey["fp16"] == 32_400_000_000_000
    assert survey["fp32"] == 96 * 1_200_000_000 * 32 * 3 * 2 == 4 * cluster["fp32"]
    known = {fact.path: fact.standing for fact in load_profile("mt3000_survey").facts}
    assert known["engines.dsp.cores"] == "paper"
    assert known["engines.dsp.units.fp32"] == "estimate"


def test_an_arm_host_with_sve_is_described_in_the_same_words():
    # NVIDIA states 7.1 TFLOP/s in FP64 for two Grace processors
    cpu = next(engine for engine in load_profile("gh200").engines if engine.name == "cpu")
    assert cpu.peak == {"fp32": 72 * 3_100_000_000 * 4 * 4 * 2, "fp64": 72 * 3_100_000_000 * 4 * 2 * 2}
    assert 2 * cpu.peak["fp64"] == pytest.approx(7.1e12, rel=0.01)


def test_efficiency_and_zone_of_each_kind_follow_from_what_an_arm_host_lacks():
    """Grace: vectors of 128 bit, four elements of fp32, two of fp64. What its GPU lacks runs in the host's zone."""
    cpu = {"engines.cpu.runs.embedding": "scalar", "engines.cpu.runs.conv": "none"}
    platform = load_profile("gh200", overrides=cpu | {"engines.gpu.runs.embedding": "none"})
    table = {(entry.engine, entry.kind): entry for entry in mapping_table(platform)}
    assert {entry.zone for (engine, _), entry in table.items() if engine == "cpu"} == {"host"}
    assert ("cpu", "conv") not in table
    assert ("gpu", "embedding") not in table
    assert table["cpu", "embedding"].efficiency == {"fp32": 32 / 128, "fp64": 64 / 128}
    assert table["cpu", "matmul"].efficiency == {"fp32": 1.0, "fp64": 1.0}
    assert table["cpu", "embedding"].flops["fp32"] == 72 * 3_100_000_000 * 4 * 2
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    trace = transformer(small, batch=1, sequence=16, precision="fp32")
    result = simulate(trace, platform, load("mt3000_layered", mapping="all"))
    ran = {op.kind: result.plan.trace.op_columns.engine.get(op.id, "gpu") for op in result.plan.trace.ops}
    assert (ran["embedding"], ran["matmul"], ran["attention"]) == ("cpu", "gpu", "gpu")


def one_op(kind: str):
    b = TraceBuilder()
    b.op("it", kind, writes=[b.tensor("x", 0)], flops=6_144_000_000, dtype="fp32")
    return b.build()


def test_a_scalar_kind_uses_one_element_of_each_vector(tmp_path):
    # 16 elements of fp32 in 512 bits: 1 ms of arithmetic becomes 16
    platform = machine(SVE + 'runs = { softmax = "scalar" }', tmp_path)
    assert op_times(one_op("matmul"), platform).total.tolist() == [1_001_000]
    assert op_times(one_op("softmax"), platform).total.tolist() == [16_001_000]


def test_a_kind_without_an_entry_is_refused_by_name(tmp_path):
    platform = machine(SVE + 'runs = { default = "none", matmul = "vector" }', tmp_path)
    assert {entry.kind for entry in mapping_table(platform)} == {"matmul"}
    assert simulate(one_op("matmul"), platform).summary()["makespan_ns"] == 1_001_000
    text = "unit: engine 'unit' cannot run ops of kind 'conv', such as 'it'; engines that can: none"
    with pytest.raises(ProfileError, match=text):
        simulate(one_op("conv"), platform)


def test_a_type_without_a_peak_or_a_wider_one_has_no_entry(tmp_path):
    engine = machine('peak = { fp32 = "1 TFLOP/s" }', tmp_path).engines[0]
    assert can_run(engine, "matmul", "bf16")
    assert can_run(engine, "matmul", "")
    assert not can_run(engine, "matmul", "fp64")


def test_every_engine_of_a_shipped_profile_has_its_entries():
    table = mapping_table(load_profile("mt3000_survey"))
    assert [(entry.engine, entry.kind) for entry in table] == [(e, k) for e in ("dsp", "cpu") for k in KINDS]
    matmul = table[0]
    assert (matmul.zone, matmul.efficiency["fp16"], matmul.efficiency["fp64"]) == ("zone", 0.70, 0.80)
    assert (matmul.flops["fp16"], matmul.rate, matmul.launch) == (22_680_000_000_000, 160_000_000_000, 50_000)
    page = profile_page("mt3000_survey")
    assert "instruction mapping table" in page
    assert "norm softmax loss" in page


@pytest.mark.parametrize(("engine", "text"), [
    ("", "engines.unit: an engine needs `peak`, or `units` with `cores`, `clock` and `vector`"),
    ("cores = 4\nunits = { fp32 = 2 }", "engines.unit: `units` without `clock`"),
    ('peak = { fp32 = "1 TFLOP/s" }\ncores = 4', "engines.unit: `cores` without `units`: nothing follows from it"),
    (SVE + 'peak = { fp32 = "1 TFLOP/s" }', "engines.unit: fp32 has a peak and `units`; give one of them"),
    ('peak = { fp32 = "1 TFLOP/s" }\nruns = { conv = "scalar" }', "`runs.conv` is scalar: without `vector`"),
    (SVE + 'efficiency = { conv_fp32 = 0.5 }\nruns = { conv = "none" }', "`efficiency.conv_fp32` and `runs.conv` = "),
    (SVE.replace('"512 bit"', '"32 bit"'), "a vector of 32 bit is narrower than an element of fp64"),
    (SVE + 'runs = { conv = "vectr" }', "runs.conv: value 'vectr': expected one of vector, scalar, none .*'vector'"),
    (SVE + 'runs = { convolution = "none" }', "runs.convolution: key 'convolution': .*did you mean 'conv'"),
    (SVE.replace('"2.0 GHz"', '"2.0"'), "engines.unit.clock: .*a clock such as '1.2 GHz'"),
    (SVE.replace('"512 bit"', '"64 B"'), "engines.unit.vector: .*a width such as '512 bit'"),
    (SVE.replace("cores = 48", "cores = 0"), "engines.unit.cores: value 0: expected a whole number from 1 to 1024"),
])  # fmt: skip
def test_what_does_not_hold_together_is_refused(engine, text, tmp_path):
    with pytest.raises(ProfileError, match=text):
        machine(engine, tmp_path)
