"""The study's page is what its data say, and the data are what the program finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from sim import simulate
from sim.errors import Infeasible

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("make_mt3000", SCRIPTS / "make_mt3000.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_number_of_the_page_follows_from_its_data(page):
    assert page.page(page.study.load()) == page.PAGE.read_text(encoding="utf-8"), "run python scripts/make_mt3000.py"


def test_a_number_that_is_changed_shows(page):
    data = page.study.load()
    at = page.study.key("machines", "GPT-2 medium", "mt3000_survey", {})
    best = page.Cell(data[at], tuple(data[at]["rows"])).best()["policy"]
    data[at]["rows"][best]["makespan_ns"] *= 3
    assert page.page(data) != page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("policy", ["full_recompute", "swap_all"])
@pytest.mark.parametrize(("part", "number"), [("machines", 1), ("rates", 0), ("h2d alone", 2), ("draws", 5)])
def test_runs_of_the_data_are_what_the_program_finds(page, part, number, policy):
    study = page.study
    of_part = [run for run in study.runs() if run[0] == part and run[1] == "GPT-2 medium"]
    _, name, where, figures, _ = of_part[number]
    cell = study.load()[study.key(part, name, where, figures)]
    try:
        found = simulate(study.job(name), study.machine(where, figures), policy, budget=cell["budget"]).log.end
    except Infeasible:
        found = None
    assert found == cell["rows"][policy].get("makespan_ns")


def test_pressure_is_the_time_to_copy_over_a_third_of_the_iteration(page):
    name = "GPT-2 medium"
    wanted = page.study.wanted(name)[0]
    third = 10**9
    row = {"makespan_ns": 3 * third, "unlimited_ns": 3 * third, "recompute_ns": 0, "moved_bytes": {}}
    rows = {"keep_all": {"fits": True, **row}}
    cell = page.Cell({"budget": wanted - 4 * 10**9, "rate": 2 * 10**9, "rows": rows}, ("keep_all",))
    assert page.pressure(name, cell) == pytest.approx(2.0)  # 2 s to copy 4 GB, 1 s of forward
