"""The study's page is what its data say, and the data are what the program finds."""

from __future__ import annotations

import random
import re

import pandas as pd
import pytest

from scripts.make_mt3000 import PAGES, page
from scripts.mt3000_page import study, tables
from scripts.mt3000_page.findings import (
    SURE,
    Cell,
    Correlations,
    cells,
    leads,
    predictions,
    pressure,
    turning_rate,
    winning,
)
from scripts.mt3000_page.words import WORDS
from sim import simulate
from sim.errors import Infeasible


@pytest.mark.parametrize("language", PAGES)
def test_every_number_of_the_page_follows_from_its_data(language):
    assert page(study.load(), language) == PAGES[language].read_text(encoding="utf-8"), "run scripts/make_mt3000.py"


def test_a_number_that_is_changed_shows():
    data = study.load()
    run = next(run for run in study.runs() if run.job == "GPT-2 medium" and run.machine == "mt3000_survey")
    best = Cell(data[run.key], run).best()["policy"]
    data[run.key]["rows"][best]["makespan_ns"] *= 3
    assert page(data, "en") != PAGES["en"].read_text(encoding="utf-8")


def test_both_languages_give_the_same_figures():
    english, chinese = (re.findall(r"\| [^|\n]*\d[^|\n]* (?=\|)", page(study.load(), each)) for each in ("en", "zh"))
    assert [each for each in english if not re.search(r"[a-z]{4}", each)] == [
        each for each in chinese if not re.search(r"[a-z]{4}|[一-龥]", each)
    ]


@pytest.mark.parametrize("policy", ["full_recompute", "swap_all"])
@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("machines", 1),
        ("rates", 0),
        ("h2d alone", 2),
        ("draws", 5),
        ("chosen", 3),
        ("elsewhere", 2),
        ("elsewhere", 40),
        ("fused", 0),
        ("clusters", 2),
        ("clusters", 4),
    ],
)
def test_runs_of_the_data_are_what_the_program_finds(part, number, policy):
    run = [run for run in study.runs() if run.part == part and run.job == "GPT-2 medium"][number]
    cell = study.load()[run.key]
    trace, platform = study.placed(run)
    try:
        found = simulate(trace, platform, policy, budget=cell["budget"]).log.end
    except Infeasible:
        found = None
    assert found == cell["rows"][policy].get("makespan_ns")


def drawn_cell(times, stack="eager", **figures):
    """A draw with the times of policies, of which `full_recompute` recomputes and others copy."""
    changed = {path.replace("__", "."): f"{value:g} GB/s" for path, value in figures.items()}
    run = study.Run("chosen", "GPT-2", "mt3000_survey", changed, tuple(times), options={"stack": stack})
    rows = {
        policy: {"fits": bool(ns), "makespan_ns": ns, "recompute_ns": 9 * (policy == "full_recompute"),
                 "moved_bytes": {} if policy == "full_recompute" else {"d2h": 1}, "unlimited_ns": 1}
        for policy, ns in times.items()
    }  # fmt: skip
    return ("GPT-2", "mt3000_survey", tuple(f"{path}={text}" for path, text in changed.items())), Cell(
        {"budget": 1, "rate": 1, "rows": rows}, run
    )


def test_a_policy_wins_the_draws_in_which_none_is_faster_by_more_than_can_be_told():
    near = int(1000 * (1 + SURE)) - 1
    found = dict(
        drawn_cell({"swap_all": swap, "g10": g10, "full_recompute": again}, links__d2h__rate=rate)
        for rate, (swap, g10, again) in enumerate(
            [(1000, near, 2000), (0, 1000, near), (0, 0, 0), (2000, 1000, 2000)], 1
        )
    )
    assert winning(found) == {"GPT-2": {"swap_all": 0.25, "g10": 0.75, "full_recompute": 0.25}}


def test_draws_elsewhere_are_counted_by_job_and_machine_and_judged_by_the_ratio():
    """Of two draws on a machine copying is the faster in one, at a pressure below the border; the other is at none."""
    run = next(run for run in study.runs() if run.part == "elsewhere" and run.machine == "ascend_910b")
    wants = study.wanted(run.job, run.options)[0]
    unlimited = 3 * 10**9  # a forward pass takes a second
    found = {}
    for rate, copies, again in ((2, 1000, 2000), (20, 2000, 1000)):
        rows = {
            name: {"fits": True, "unlimited_ns": unlimited,
                   "makespan_ns": again if name == "full_recompute" else copies,
                   "recompute_ns": 9 * (name == "full_recompute"),
                   "moved_bytes": {} if name == "full_recompute" else {"d2h": 1}}
            for name in study.DRAWN
        }  # fmt: skip
        cell = Cell({"budget": wants - 10**9, "rate": rate * 10**8, "rows": rows}, run)
        found[run.job, run.machine, (f"links.d2h.rate={rate}",)] = cell
    made = predictions(found, at=1.0)
    assert [(round(ratio, 6), faster, right) for _, _, ratio, faster, right in made] == [
        (5.0, "copies", False),
        (0.5, "recomputation", False),
    ]
    assert all(right for *_, right in predictions(dict([next(iter(found.items()))]), at=6.0))
    line = tables.elsewhere_table(found, WORDS["en"]).splitlines()[2]
    assert line == f"| {run.job} | `ascend_910b` | 2 | 50 % | 50 % | 50 % | 50 % | 50 % | 1 / 2 |"


def test_a_figure_leads_by_its_rank_among_draws_of_the_same_stack():
    """A faster link makes copying win by more, whatever the stack; the other figure is the stack's."""
    found = dict(
        drawn_cell({"swap_all": base + 1000 // rate, "full_recompute": 1000}, stack, links__d2h__rate=rate,
                   tiers__zone__bandwidth=(7 * rate) % 5 + base)
        for stack, base in (("eager", 1000), ("fused", 100)) for rate in (1, 2, 3, 4)
    )  # fmt: skip
    assert leads(found).by_figure[0] == ("links.d2h.rate", pytest.approx(-1.0))


def test_pressure_is_the_time_to_copy_over_a_third_of_the_iteration():
    name = "GPT-2 medium"
    wanted = study.wanted(name)[0]
    third = 10**9
    row = {"makespan_ns": 3 * third, "unlimited_ns": 3 * third, "recompute_ns": 0, "moved_bytes": {}}
    rows = {"keep_all": {"fits": True, **row}}
    run = study.Run("machines", name, "mt3000_survey", {}, ("keep_all",))
    cell = Cell({"budget": wanted - 4 * 10**9, "rate": 2 * 10**9, "rows": rows}, run)
    assert pressure(cell) == pytest.approx(2.0)  # 2 s to copy 4 GB, 1 s of forward


def test_the_answer_turns_between_the_rates_at_which_another_is_the_faster():
    """Read from the sweep's rows: the fastest that only copies, and the fastest that only recomputes, at each rate."""
    copying = {}
    for (job, _, _), cell in cells(study.load(), "rates").items():
        ran = {name: row["makespan_ns"] for name, row in cell.rows.items() if row["fits"]}
        if job == "GPT-2 medium":
            recomputing = min(ran[name] for name in ("full_recompute", "sac_knapsack") if name in ran)
            copying[cell.rate / 1e9] = min(ran[name] for name in ("swap_all", "g10") if name in ran) < recomputing
    slower, faster = (max(r for r, wins in copying.items() if not wins), min(r for r, wins in copying.items() if wins))
    assert slower < turning_rate(cells(study.load(), "rates")) < faster


def test_a_correlation_that_chance_reaches_is_not_told():
    """Of figures without an effect one in twenty exceeds the bound of 100 draws; one with an effect always does."""
    rng = random.Random(0)
    told = 0
    for _ in range(50):
        figures = [[rng.random() for _ in range(100)] for _ in range(2)]
        table = pd.DataFrame({"noise": figures[0], "real": figures[1], "ratio": figures[1]}).rank()
        values = [(name, float(table[name].corr(table["ratio"]))) for name in ("noise", "real")]
        found = dict(Correlations(values, 100).told)
        assert "real" in found
        told += "noise" in found
    assert told <= 7
