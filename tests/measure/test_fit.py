"""The fit finds constants that are known, and the file made of them is a profile that has them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sim import load_profile, simulate
from sim.errors import Caution, TiersimError
from sim.hardware.cost import flops_per_second
from sim.measure.doubts import busy, doubts
from sim.measure.fit import LinkFit, Sample, fit_copies, fit_ops
from sim.measure.measured import Measured, profile_of
from sim.measure.profile_text import Links, Machine, profile_text
from workloads import transformer

LAUNCH, BANDWIDTH = 5_000, 2e12
RATES = {("matmul", "bf16"): 250e12, ("matmul", "fp32"): 15e12, ("attention", "bf16"): 150e12}
SHARES = {"elementwise": 1.0, "norm": 0.4, "matmul": 1.2, "attention": 0.8, "optimizer": 0.9}


def known(kind, dtype, flops, size, noise=0.0):
    ns = LAUNCH + size / (SHARES[kind] * BANDWIDTH) * 1e9
    ns += flops / RATES[kind, dtype] * 1e9 if flops else 0
    return Sample(kind, dtype, flops, size, ns * (1 + noise))


def samples(noise=0.0):
    chance = random.Random(1)
    found = []
    for kind, dtype in RATES:
        for n in range(7, 14):
            size = 1 << n
            for wide in (1, 8):  # the same FLOPs over other bytes, so that the two parts can be told apart
                found.append(known(kind, dtype, 2 * size**3, 6 * wide * size**2, chance.uniform(-noise, noise)))
    for kind in ("elementwise", "norm", "optimizer"):
        found += [known(kind, "fp32", 0, 12 << n, chance.uniform(-noise, noise)) for n in range(12, 28, 2)]
    return found


def test_constants_behind_exact_times_are_found():
    fit = fit_ops(samples())
    assert fit.launch_ns == pytest.approx(LAUNCH, rel=1e-6)
    assert fit.bandwidth == pytest.approx(BANDWIDTH, rel=1e-6)
    assert fit.share == pytest.approx(SHARES, rel=1e-5)
    for (kind, dtype), rate in RATES.items():
        assert fit.peak[dtype] * fit.efficiency[kind, dtype] == pytest.approx(rate, rel=1e-6)
    assert max(fit.efficiency.values()) == 1
    assert fit.error == pytest.approx(0, abs=1e-6)


def test_noise_is_reported_and_moves_the_constants_little():
    fit = fit_ops(samples(noise=0.05))
    assert 0.01 < fit.error < 0.05
    assert fit.worst >= fit.error
    assert fit.bandwidth == pytest.approx(BANDWIDTH, rel=0.1)
    assert fit.peak["bf16"] == pytest.approx(250e12, rel=0.1)


def test_fixed_time_and_rate_of_copies_are_found():
    sizes = [1 << n for n in range(12, 28)]
    fit = fit_copies(sizes, [20_000 + size / 25 for size in sizes])
    assert (fit.fixed_ns, fit.rate, fit.error) == pytest.approx((20_000, 25e9, 0), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("sizes", [[], [4096], [4096, 4096]])
def test_too_few_sizes_are_refused(sizes):
    with pytest.raises(TiersimError, match="two sizes"):
        fit_copies(sizes, [1.0] * len(sizes))


def test_too_few_ops_are_refused():
    with pytest.raises(TiersimError, match="too few"):
        fit_ops(samples()[:2])
    with pytest.raises(TiersimError, match="all took the same time"):
        fit_ops([Sample("copy", "fp32", 0, 8 << n, 1000.0) for n in range(10)])


MACHINE = Machine('A "card"', True, "2026-01-31", "2.9", 80 * 10**9, 79 * 10**9, 10**12)


def written(tmp_path, host=True):
    rates = {"d2h": 25e9, "h2d": 26e9, "d2h_pageable": 6e9, "h2d_pageable": 5e9}
    links = Links({name: LinkFit(15_000.0, rate, 0.03) for name, rate in rates.items()}, {"d2h": 0.9, "h2d": 0.5})
    path = tmp_path / "card.toml"
    fit = fit_ops(samples())
    path.write_text(profile_text(MACHINE, fit, fit if host else None, links if host else None), encoding="utf-8")
    return load_profile(str(path))


def test_profile_of_a_card_has_the_constants_that_went_in(tmp_path):
    platform = written(tmp_path)
    card = platform.main_engine(0)
    assert card.launch == LAUNCH
    for (kind, dtype), rate in RATES.items():
        assert flops_per_second(card, kind, dtype) == pytest.approx(rate, rel=1e-3)
    assert platform.home(0).bandwidth == pytest.approx(BANDWIDTH, rel=1e-6)
    assert platform.move_ns(10**9, platform.home(0).name, "host") == pytest.approx(15_000 + 40e6, rel=1e-6)
    assert platform.move_ns(10**9, "host_pageable", platform.home(0).name) == pytest.approx(15_000 + 200e6, rel=1e-6)
    assert {fact.standing for fact in platform.facts} == {"measured", "assumed", "estimate"}
    assert all("2026-01-31" in fact.source for fact in platform.facts if fact.path.endswith(("launch", "rate")))


def test_a_training_step_runs_on_it_with_offload(tmp_path):
    trace = transformer("gpt2-small", batch=1, sequence=128, precision="amp_bf16")
    for policy in ("keep_all", "save_on_cpu", "zero_offload"):
        assert simulate(trace, written(tmp_path), policy).log.complete


def test_profile_of_a_bare_cpu_needs_no_links(tmp_path):
    platform = written(tmp_path, host=False)
    assert platform.links == ()
    assert platform.host is None


def test_a_residual_is_stated_only_of_kinds_with_more_samples_than_constants():
    few = [s for s in samples() if s.kind != "norm"] + [
        known("norm", "fp32", 0, 12 << n, 0.3 * (n > 20)) for n in (12, 24)
    ]
    fit = fit_ops(few)
    assert set(fit.residuals) == set(fit.held_out) == set(SHARES) - {"norm"}
    text = profile_text(MACHINE, fit)
    assert "No residual, too few sizes: norm." in text
    assert "norm 0%" not in text


def test_as_many_samples_as_constants_are_too_few():
    sizes = [known("matmul", "bf16", 2 << 3 * n, 6 << 2 * n) for n in (7, 8)] + [known("norm", "fp32", 0, 1 << 20)]
    with pytest.raises(TiersimError, match="4 measurements are too few for 4 constants"):
        fit_ops([*sizes, known("norm", "fp32", 0, 1 << 24)])


def busy_as(change):
    """What is said of samples of which some are changed."""
    found = [change(sample) for sample in samples(noise=0.05)]
    return doubts(found, fit_ops(found))


def test_nothing_is_said_of_a_machine_that_was_idle():
    assert busy_as(lambda sample: sample) == []
    assert busy([]) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: replace(s, ns=s.ns * 50) if s.kind == "norm" and (s.bytes // 12).bit_length() % 4 == 1 else s,
            "off by more than 50% (norm",
        ),
        (
            lambda s: replace(s, ns=9e9) if s.kind == "optimizer" and s.bytes == 12 << 18 else s,
            "optimizer in fp32 took",
        ),
        (lambda s: replace(s, spread=2.0) if s.kind == "attention" else s, "attention in bf16 took 3.0 times as long"),
        (lambda s: replace(s, waited=0.4), "no core in 40% of the time"),
    ],
)
def test_signs_of_other_programs_are_named(change, words):
    said = busy(busy_as(change))
    assert said.startswith("the machine was probably busy")
    assert words in said
    assert "\n" not in said


def test_a_busy_machine_is_a_caution_and_a_note_of_the_profile(tmp_path):
    measured = Measured(replace(MACHINE, is_cuda=False), [replace(s, waited=0.5) for s in samples()])
    with pytest.warns(Caution, match="the machine was probably busy"):
        text = profile_of(measured)
    assert "The machine was probably busy" in text
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    assert load_profile(str(path)).main_engine(0).launch == LAUNCH
