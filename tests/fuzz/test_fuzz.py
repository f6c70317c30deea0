"""Whatever a file or a word holds, its reader answers or refuses it in words; `tests/fuzz/run.py` hunts for longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from sim.errors import TiersimError
from sim.sweeps.study import load_study
from tests.fuzz.readers import READERS, run_case
from tests.fuzz.run import hunt, joined

FOLDERS = ("run folder", "comparison folder", "sweep folder", "store", "explain", "export")
"""Readers that run things: a case takes as long as thirty of the others."""

LONG_AGO = {
    "chakra ranks": (3557,),  # a node that is a number of thousands of digits
    "comparison folder": (35, 1361),  # asked without a batch; a row that does not say whether it fits
    "policy": (13, 195),  # layers of a number of 31 digits
    "profile": (10,),
    "quantity": (100_046,),  # a number of thousands of digits after -p
    # counters that are a number; a cell that fits and has no time; one without a policy; half a character in its name
    "sweep folder": (25, 138, 1392, 8330),
    "run folder": (505,),  # asked without a sequence
    "store": (16_041,),  # no row at all
}
"""By reader the numbers of cases that once ended in a traceback, or in a line of thousands of characters."""


@pytest.mark.parametrize("name", READERS)
def test_right_input_is_answered(name, tmp_path):
    for i, start in enumerate(READERS[name].starts()):
        folder = tmp_path / str(i)
        for part, file in start.items():
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            (folder / part).write_bytes(file.right)
        READERS[name].read(folder)


@pytest.mark.parametrize("name", READERS)
def test_wrong_input_is_answered_or_refused_in_words(name, tmp_path):
    numbers = {*range(4 if name in FOLDERS else 25), *LONG_AGO.get(name, ())}
    for number in sorted(numbers):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_case(name, number, folder)


@pytest.mark.parametrize("name", READERS)
def test_more_wrong_input_is_answered_or_refused_in_words(name):
    found = hunt(name, first=1000, cases=20 if name in FOLDERS else 300)
    assert not found["faults"], "\n".join(found["faults"])


def test_a_hunt_goes_on_where_another_ended():
    whole = hunt("quantity", first=0, cases=60)
    parts = joined(hunt("quantity", first=0, cases=25), hunt("quantity", first=25, cases=35))
    varying = ("slowest_s", "most_bytes")
    assert {k: v for k, v in parts.items() if k not in varying} == {k: v for k, v in whole.items() if k not in varying}
    elsewhere = hunt("quantity", first=26, cases=3)
    assert joined(whole, elsewhere) is elsewhere


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", READERS)
def test_a_hundred_thousand_cases_are_answered_or_refused_in_words(name):
    found = hunt(name, first=10_000, cases=int(os.environ.get("TIERSIM_FUZZ_CASES", "100000")))
    assert not found["faults"], "\n".join(found["faults"])


@pytest.mark.parametrize("name", ["profile", "store", "policy"])
def test_a_case_is_repeated_by_its_number(name, tmp_path):
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        READERS[name].write(Random("7"), folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        written.append([(path.relative_to(folder), path.read_bytes()) for path in files])
    assert written[0] == written[1]


def test_the_command_for_more_repeats_a_single_case_and_adds_its_counts(tmp_path):
    path = Path(__file__).with_name("run.py")
    counts = tmp_path / "counts.json"
    words = [sys.executable, str(path), "--first", "5", "--json", str(counts), "--cases"]
    for cases, reader in (("3", "quantity"), ("2", "DTR log"), ("1", "quantity")):
        done = subprocess.run([*words, cases, reader], capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"{reader}: {cases} cases")
    found = {each["reader"]: each["cases"] for each in json.loads(counts.read_text())}
    assert found == {"DTR log": 2, "quantity": 1}


@pytest.mark.parametrize(
    ("study", "words"),
    [
        ({"seed": list(range(1000)), "batch": list(range(1, 2001))}, "cross to 2,000,000 cells"),
        ({"seed": list(range(10)), "most_cells": 9}, "cross to 10 cells, and most_cells allows 9"),
        (
            {"policy": [{"name": "chen", **{f"a{i}": list(range(1000)) for i in range(4)}}]},
            r"1(,000){4} policies",
        ),
    ],
)
def test_a_study_of_more_cells_than_it_allows_is_refused_before_any_is_built(study, words):
    with pytest.raises(TiersimError, match=words):
        load_study({"model": ["gpt2"], "profile": ["p100"], "policy": ["keep_all"], **study}).cells()
