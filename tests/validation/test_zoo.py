"""The zoo: captured steps have PyTorch's own peaks and FLOPs, and the page says what the rows say."""

from __future__ import annotations

import importlib.util

import pytest

from scripts import make_zoo
from scripts.zoo_page.cases import cases

CASES = cases()
ROWS = {row["model"]: row for row in make_zoo.load()["rows"]}


def check(row):
    """A row holds what the page claims of it, except where it gives a reason."""
    known = row["known"]
    assert row["error"] == ""
    assert row["uncounted"] == {}
    assert row["peak"] == row["tracker"] or "peak" in known
    assert row["flops"] == row["counter"] or "flops" in known
    assert row["layers"] == row["blocks"] or not row["blocks"]
    assert row["stages"] == 0 or row["stages"] >= row["layers"]
    if row["recompute"] and row["checkpointed"]:
        assert row["recompute"] == pytest.approx(row["checkpointed"], rel=1e-3) or "recompute" in known


def lane(name):
    missing = importlib.util.find_spec(CASES[name].library) is None
    marks = [] if CASES[name].short else [pytest.mark.slow]
    return pytest.param(name, marks=[*marks, pytest.mark.skipif(missing, reason=f"needs {CASES[name].library}")])


@pytest.mark.parametrize("name", [lane(name) for name in CASES])
def test_a_step_has_the_figures_of_pytorch(name):
    from scripts.zoo_page.measure import row

    check(row(name, CASES[name]))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_page_holds_what_it_claims(name):
    check(ROWS[name])


def test_the_page_is_what_the_rows_make():
    assert make_zoo.PAGE.read_text(encoding="utf-8") == make_zoo.page(make_zoo.load())


def test_the_zoo_is_large_and_ten_of_it_are_captured_at_every_change():
    assert set(ROWS) == set(CASES)
    assert len({name.partition(",")[0] for name in ROWS}) >= 40
    assert sum(case.short for case in CASES.values()) >= 9
    assert {CASES[name].library for name in ROWS} == {
        "torch",
        "transformers",
        "torchvision",
        "timm",
        "diffusers",
    }


def test_what_the_page_says_of_delta_and_dtr_is_what_was_measured():
    for model in ("llama", "t5"):
        runs = [run for run in make_zoo.load()["evictions"] if run["model"] == model]
        dtr, plain, no_link, by_cost, ahead = runs
        assert dtr["slowdown"] < plain["slowdown"] < ahead["slowdown"]
        assert plain["moved"] == no_link["moved"] == 0
        assert plain["slowdown"] == no_link["slowdown"]
        assert by_cost["slowdown"] == pytest.approx(dtr["slowdown"], abs=2e-3)


@pytest.mark.slow
def test_the_experiment_with_delta_is_repeatable():
    pytest.importorskip("transformers")
    from scripts.zoo_page.evictions import measure

    assert measure() == make_zoo.load()["evictions"]


@pytest.mark.slow
def test_parameters_are_those_that_the_library_builds():
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    named = [name for name, case in CASES.items() if case.library == "transformers"]
    assert len({name.partition(",")[0] for name in named}) >= 33
    for name in named:
        step, _ = CASES[name].build()
        with torch.device("meta"):
            built = sum(parameter.numel() for parameter in step["module"]().parameters())
        assert ROWS[name]["parameters"] == built, name
