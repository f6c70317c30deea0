"""docs/published.md is what its script makes of the committed figures; the fixture is whole; figures are current."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from sim.errors import WorkloadError
from tests.validation.published_runs import DATA, read, rows, simulated

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("scripts.make_published")


def test_page_and_error_bars_are_what_the_script_makes(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(script.load())
    assert json.loads(script.BARS.read_text(encoding="utf-8")) == script.bars(script.load())


def test_machines_of_an_error_have_a_row_of_its_kind(script):
    found = script.both(script.load())
    bars = script.bars(script.load())
    for kind in bars.keys() - {"machines"}:
        for name in {row["setup"]["profile"] for row in found}:
            of_it = script.errors([row for row in found if row["setup"]["profile"] == name])[kind]
            assert (name in bars[kind]["machines"]) == bool(of_it), (kind, name)
    alone = [row for row in found if row["setup"]["profile"] not in bars["machines"]["machines"]]
    assert alone
    assert script.errors(alone)["machines"] == []


def test_every_row_is_in_the_page_and_every_source_in_one_set(script):
    page = script.PAGE.read_text(encoding="utf-8")
    assert all(row["id"] in page for row in rows())
    sets = {}
    for row in rows():
        sets.setdefault(script.source_of(row), set()).add(row["set"])
        assert row["address"]
    assert all(len(found) == 1 for found in sets.values())
    assert {row["id"] for row in rows() if row["setup"]} == {run["id"] for run in script.load()["runs"]}


@pytest.mark.parametrize("id", ["tune-02", "hf-02", "fpbert-04"])
def test_figures_are_what_is_simulated_now(script, id):
    known = {run["id"]: run for run in script.load()["runs"]}
    found = simulated(next(row for row in rows() if row["id"] == id))
    assert (found.rate, found.peak) == (pytest.approx(known[id]["rate"], rel=1e-4), known[id]["peak"])


def test_errors_are_those_of_rows_made_by_hand(script):
    def row(id, value, ours, **setup):
        told = {"id": f"x-{id}", "value": str(value), "complete": "A", "set": "check", "peak_memory": "", "metric": ""}
        return {**told, "setup": setup, "ours": {"rate": ours, "peak": None, "refusal": ""}}

    found = [
        row(1, 100, 110, policy="keep_all", profile="a"),
        row(2, 80, 80, policy="full_recompute", profile="a"),
        row(3, 50, 60, policy="keep_all", profile="b"),
    ]
    errors = script.errors(found)
    assert errors["time"] == pytest.approx([0.1, 0, 0.2])
    assert errors["policies"] == pytest.approx([1 / 1.1 - 1])
    assert errors["machines"] == pytest.approx([1.2 / 1.1 - 1])
    assert errors["stacks"] == errors["peak"] == []
    assert script.bar([0.1, -0.3, 0.2]) == {"rows": 3, "median": 0.2, "nine_tenths": 0.3, "worst": 0.3}


def test_layouts_are_compared_where_nothing_else_differs_and_times_are_rates(script):
    def row(id, value, ours, metric="tokens/s", **setup):
        told = {"id": f"x-{id}", "value": str(value), "complete": "A", "set": "check", "peak_memory": ""}
        setup = {"policy": "keep_all", "profile": "a", **setup}
        return {**told, "metric": metric, "setup": setup, "ours": {"rate": ours, "peak": None, "refusal": ""}}

    layouts = [row(1, 10, 11, dp=8, accumulate=2), row(2, 10, 10, dp=4, tp=2, accumulate=4)]
    assert script.errors(layouts)["layouts"] == pytest.approx([1 / 1.1 - 1])
    assert script.errors(layouts)["policies"] == []
    period = "s per iteration (median)"
    policies = [
        row(3, 2, 0.55, period, dp=1, tp=8),
        row(4, 1, 1, period, tp=8, policy="full_recompute", sequence_parallel=True),
    ]
    assert script.errors(policies)["time"] == pytest.approx([0.1, 0])
    assert script.errors(policies)["policies"] == pytest.approx([1 / 1.1 - 1])  # sequence parallelism may differ, too
    assert script.errors(policies)["layouts"] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.replace('""precision"": ""bf16"", ', ""), "has no precision"),
        (lambda r: r.replace(",develop,", ",both,", 1), "set 'both'"),
        (lambda r: r.replace(",A,", ",D,", 1), "grade 'D'"),
    ],
)
def test_a_row_that_says_too_little_is_refused_in_one_line(change, says):
    lines = DATA.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith("tune-02,"))
    with pytest.raises(WorkloadError) as error:
        read("\n".join((lines[0], change(line))))
    assert says in str(error.value)
    assert "tune-02" in str(error.value)
    assert "\n" not in str(error.value)


def test_rows_of_grade_a_that_are_far_off_have_a_reason(script):
    """And no row has one that is not far off any more."""
    lines = [line.split(" | ") for line in script.far(script.both(script.load()))[3:] if line]
    assert {line[0].removeprefix("| ") for line in lines} == set(script.MISSES)
    assert not any(line[3].startswith("not explained |") for line in lines)
