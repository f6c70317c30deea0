"""docs/validation.md is what its script makes of the committed figures, and the figures are what is simulated now."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("scripts.make_validation")


@pytest.fixture(scope="module")
def figures(script):
    return script.load()


def test_page_is_what_the_script_makes(script, figures):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(figures)


def test_figures_survive_being_written(script, figures):
    assert json.loads(script.dump(figures)) == figures


def test_every_case_is_in_the_figures(script, figures):
    from tests.validation import oracle

    assert {row["case"] for row in figures["memory"]} == set(oracle.rows())
    assert all(f"| {case} |" in script.page(figures) for case in "ABCF")


def test_memory_figures_are_what_is_simulated_now(script, figures):
    sample = list(dict.fromkeys(row["case"] for row in figures["memory"]))[::15]
    assert script.memory_rows(sample) == [row for row in figures["memory"] if row["case"] in sample]


def test_time_figures_are_what_is_simulated_now(script, figures):
    assert script.time_rows() == figures["time"]


def test_printed_figures_are_what_is_computed_now(script, figures):
    assert script.published_rows() == figures["published"]
    assert script.readings() == figures["readings"]


def test_a_changed_figure_changes_the_page(script, figures):
    other = json.loads(json.dumps(figures))
    other["memory"][0]["ours"]["total"] += 2**30
    assert script.page(other) != script.page(figures)


def test_page_says_what_has_not_been_run(script, figures):
    text = script.page(figures)
    assert "No CUDA device was at hand" in text
    assert "python -m sim.measure.grid -o my_machine" in text


def test_what_a_cuda_device_gave_replaces_what_was_not_run(script, figures):
    about = {"model": "gpt2-small", "batch": 8, "sequence": 1024, "precision": "bf16"}
    rows = [
        {**about, "policy": "none", "measured_bytes": 2**30, "simulated_bytes": 2**30, "measured_ns": 10**8}
        | {"simulated_ns": 9 * 10**7, "simulated_by": "keep_all"},
        {**about, "policy": "none", "limit": 2**29, "really": False, "simulated": False},
        {**about, "policy": "save_on_cpu", "not_run": "there was no time left"},
    ]
    text = script.page({**figures, "cuda": {"machine": "A card", "rows": rows}})
    assert "No CUDA device was at hand" not in text
    assert "| none | 1,024.0 | 1,024.0 | 0 | 100.0 | 90.0 | -10.00% |" in text
    assert "in 512 MiB it does not run really and does not run in the simulation" in text
    assert "not run: there was no time left" in text
    assert json.loads(script.dump({"cuda": {"machine": "A card", "rows": rows}}))["cuda"]["rows"] == rows


def test_later_cases_are_what_is_simulated_now(script, figures):
    assert script.more_rows() == figures["more"]


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "needs machine and rows")]
)
def test_a_wrong_file_of_the_grid_is_named_in_one_line(script, text, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "DATA", tmp_path / "data.json")
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    path = tmp_path / "grid.json"
    if text is not None:
        path.write_text(text)
    assert script.main(["--cuda", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert words in said
    assert said.count("\n") == 1
    assert script.main(["--cuda"]) == 2
    assert not (tmp_path / "data.json").exists()
