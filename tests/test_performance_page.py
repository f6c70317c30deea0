"""docs/performance.md is what its script makes of the committed figures, which are of the cases that it names."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sim.policies import load

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("scripts.make_performance")


@pytest.fixture(scope="module")
def data(script):
    return json.loads(script.DATA.read_text(encoding="utf-8"))


def test_the_page_is_what_the_script_makes(script, data):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(data)


def test_another_figure_makes_the_page_stale(script, data):
    changed = copy.deepcopy(data)
    case = script.PEERS[0].case
    changed["cases"][script.key(*case)]["cpu_s"] *= 2
    assert script.page(changed) != script.page(data)


def test_every_case_that_the_page_names_was_measured_or_given_up(script, data):
    given_up = {name.split(" ", 2)[2] for name, record in data["cases"].items() if record["status"] != "ok"}
    for kind, runs in script.CURVES.items():
        for depth in (n for n in script.DEPTHS if n <= script.LARGEST[kind]):
            for policy, share in runs:
                assert load(policy)
                name = script.key(kind, depth, policy, share)
                assert name in data["cases"] or name.split(" ", 2)[2] in given_up, name
    assert {script.key(*peer.case) for peer in script.PEERS} <= data["cases"].keys()
    assert data["commands"].keys() == script.COMMANDS.keys()
    assert len(data["compiled"]) == sum(len(script.CURVES[kind]) for kind, _ in script.COMPILED)


def test_ratios_are_those_of_the_seconds(data):
    for record in data["cases"].values():
        if record["status"] == "ok":
            assert record["ratio"] == pytest.approx(record["cpu_s"] / record["bare_s"], rel=0.02)


def test_a_case_runs_in_a_process_of_its_own_and_leaves_the_collector_alone(script):
    source = (ROOT / "benchmarks" / "simulate.py").read_text()
    assert "import gc" not in source
    found = script.run_case("w1", 3, "dtr(heuristic=dtr_eq)", 0.8)
    assert found["status"] == "ok"
    assert found["ops"] == 22 * 3 - 1
    assert 0 < found["bare_s"] < found["cpu_s"] * 100


def test_the_chain_is_rotors():
    """Its ideal time and its peak, from the parameters of the chain: L blocks of 1 + 2 ms, 17 A saved by each."""
    from benchmarks.simulate import MIB, rotor_chain
    from sim import load_profile
    from sim.analysis.peak_memory import home_peak
    from sim.experiment import reference_run

    log = reference_run(rotor_chain(5), load_profile("a100_40_pcie"))
    assert log.end == 5 * 3_000_000
    # the input, all that is saved, the first gradient, and what the first backward needs beside it
    assert home_peak(log) == 16 * MIB * (1 + 17 * 5 + 1 + 17)


def test_a_case_that_does_not_fit_says_so():
    words = [sys.executable, "-m", "benchmarks.simulate", "chain", "6", "keep_all", "0.5"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["status"] == "OutOfMemory"
