"""What a machine lacks for an offload or compression policy is one clear line on the command line."""

from __future__ import annotations

import sys

import pytest

from sim.cli import main
from sim.errors import Infeasible, PolicyError
from sim.experiment import simulate
from sim.hardware.profile import load_profile
from sim.policies import family, names, policy_class
from tests.policies.test_offload_family import CARDS, FAMILY, QUICKER, job, machine, whole

JOB = ("--model", "gpt2", "--batch", "1", "--seq", "64")
LINES = {
    "--profile sunway_sw26010pro --policy swap_all": "swap_all: sunway_sw26010pro has no host tier to offload to",
    "--profile xeon_optane --policy zero_offload": "zero_offload: xeon_optane has no engine 'cpu' to update on",
    "--profile p100 --policy cswap(throughput=0)": "policy 'cswap': throughput is 0; expected bytes/s, 1 or more",
    "--profile p100 --policy zero_offload(bucket=cow)": "policy 'zero_offload': bucket is 'cow'; expected bytes",
    "--profile mt3000_survey_slc --policy slc_cache --set tiers.slc.capacity=0B": (
        "mt3000_survey_slc.toml: tiers.slc.capacity: value '0B': expected more than zero"
    ),
    "--profile mt3000_survey_ssd --policy zero_infinity --set tiers.ssd.capacity=1MB": (
        "the start needs 154,389,504 B in 'ssd' for 'wte.weight'"
    ),
    "--profile a100_40_pcie --policy save_on_cpu --set tiers.host_pageable.capacity=1kB": (
        "512 B in 'host_pageable' for reading 'positions'; 488 B of 1,000 B are free"
    ),
    "--profile p100 --policy uvm(page=0)": "policy 'uvm': page is 0; expected bytes, 1 or more, or a size such as",
    "--profile p100 --policy patrickstar(chunk=0)": "policy 'patrickstar': chunk is 0; expected bytes, 1 or more",
    "--profile p100 --policy swap_all --set links.d2h.to=hots": (
        "p100.toml: links.d2h.to: value 'hots': there is no tier of that name (did you mean 'host'?)"
    ),
    "--profile p100 --policy swap_all --set links.d2h.rate=-5GB/s": (
        "p100.toml: links.d2h.rate: value '-5GB/s': expected a rate such as '25 GB/s', not a negative one"
    ),
    "--profile p100 --policy swap_all --set host=0": (
        "p100.toml: host: there is no key 'host' (did you mean 'tiers.host'?)"
    ),
    "--profile p100 --policy zero_infinity --set tiers.ssd.capacity=1TB": (
        "p100.toml: tiers.ssd.capacity: there is no tier 'ssd' (valid: 'hbm', 'host', 'host_pageable')"
    ),
    "--profile p100 --policy cdma(codec=0)": "policy 'cdma': codec is 0; expected bytes/s, 1 or more, or a rate",
    "--profile p100 --policy flashneuron": (
        "flashneuron: p100 has no drive that the device reads and writes past the host; a100_80_gds has one"
    ),
    "--profile p100 --policy slc_cache": "slc_cache: p100 has no tier of kind 'slc'; mt3000_survey_slc has one",
    "--profile p100 --policy pooled_memory": "p100 has no tier of kind 'pooled' that devices write and read",
    "--profile a100_40_pcie --policy zero_infinity(states=nvme)": "a100_40_pcie has no tier behind 'host' for nvme",
    "--profile a100_80_gds --policy flashneuron --set tiers.nvme.capacity=0B": (
        "a100_80_gds.toml: tiers.nvme.capacity: value '0B': expected more than zero"
    ),
    "--profile a100_80_sxm --policy zero_infinity --set tiers.nvme.capacity=0B": (
        "a100_80_sxm.toml: tiers.nvme.capacity: value '0B': expected more than zero"
    ),
    "--profile p100 --policy swap_all --set tiers.host.pinning=0B/s": (
        "p100.toml: tiers.host.pinning: value '0B/s': expected more than zero"
    ),
    "--profile v100_16 --policy stronghold --set tiers.host.capacity=1MB": (
        "the start needs 154,389,504 B in 'host' for 'wte.weight'"
    ),
    "--profile a100_40_pcie --policy cdma --set links.d2h.codec=0B/s": (
        "a100_40_pcie.toml: links.d2h.codec: value '0B/s': expected more than zero"
    ),
    "--profile a100_40_pcie --policy zero_infinity --set tiers.host.capacity=1MB": (
        "needs 970.4 MB of pinned memory at once; 'host' has 1 MB"
    ),
    "--profile a100_40_pcie --policy swap_all --budget 700MB --set tiers.host.capacity=1kB": (
        "nor do that many fit in 'host' ("
    ),
}


@pytest.mark.parametrize("words", LINES)
def test_what_a_machine_lacks_is_one_line(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tiersim", "run", *JOB, *words.split()])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err.strip()
    assert left.value.code
    assert LINES[words] in said
    assert said.startswith("tiersim: ")
    assert "\n" not in said


@pytest.mark.parametrize("name", [n for n in names() if family(n) == "offload" and "host" in policy_class(n).needs])
def test_a_machine_without_a_host_is_one_line_for_every_policy_that_needs_one(name):
    experts = "experts" in policy_class(name).needs
    trace = job(name) if experts or "inference" in policy_class(name).needs else job()
    with pytest.raises(PolicyError) as refused:
        simulate(trace, "sunway_sw26010pro", name)
    assert str(refused.value).startswith(f"{name}: sunway_sw26010pro has no ")
    assert "\n" not in str(refused.value)


WITHOUT_THE_HOST = {"gist": "nothing leaves", "smartpool": "nothing leaves", "modnn": "it deals out the batch"}
"""Policies that do not need the host's memory, and why."""


@pytest.mark.parametrize("name", sorted({*FAMILY} - {*WITHOUT_THE_HOST}))
def test_a_host_of_a_megabyte_is_one_line_that_names_it(name):
    shared = {tier.name for tier in machine(of=name).tiers if tier.device < 0}
    platform = load_profile(
        CARDS.get(name, "a100_40_pcie"), overrides={f"tiers.{tier}.capacity": "1 MB" for tier in shared}
    )
    budget = int(0.9 * whole(name).summary()["peak_bytes"])
    with pytest.raises(Infeasible) as refused:
        simulate(job(name), platform, QUICKER.get(name, name), budget=budget)
    assert "\n" not in str(refused.value)
    assert any(f"{tier!r}" in str(refused.value) for tier in shared)
