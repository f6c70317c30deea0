"""How long planners take: the page is what its data make, the fits are regressions, sizes are those of traces."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
from pathlib import Path

import pytest

from sim import load_profile
from sim.hardware.cost import op_times
from sim.trace.chain import chain

ROOT = Path(__file__).resolve().parent.parent


planning = importlib.import_module("scripts.make_planning")
DATA = json.loads(planning.DATA.read_text(encoding="utf-8"))


def test_the_page_is_what_the_data_make():
    text = planning.PAGE.read_text(encoding="utf-8")
    assert planning.page(text, DATA) == text, "run python scripts/make_planning.py"


@pytest.mark.parametrize(("kind", "a", "b"), [("power", -7.0, 3.0), ("exponential", -4.0, 0.3)])
def test_a_law_without_noise_is_found_and_nothing_is_uncertain(kind, a, b):
    runs = [(n, math.exp(a + b * (math.log(n) if kind == "power" else n))) for n in (5, 8, 13, 21)]
    best = planning.laws(runs)[0]
    assert (best.kind, best.a, best.b) == (kind, pytest.approx(a), pytest.approx(b))
    assert best.at(50) == pytest.approx([a + b * (math.log(50) if kind == "power" else 50)] * 3, abs=1e-6)
    assert planning.reached(best, runs[2][1]) == 13


def test_nineteen_of_twenty_further_runs_lie_in_the_interval():
    draw, hits, trials = random.Random(7), 0, 2000
    for _ in range(trials):
        runs = [(n, math.exp(draw.gauss(2 * math.log(n), 0.5))) for n in (4, 6, 8, 12, 16) for _ in range(3)]
        _, low, high = planning.fit("power", runs).at(100)
        hits += low <= draw.gauss(2 * math.log(100), 0.5) <= high
    assert hits / trials == pytest.approx(0.95, abs=0.015)


def test_what_a_model_gives_a_planner_to_plan_over_is_what_its_trace_has():
    for layers in (1, 2, 5):
        trace, model = planning.gpt_of(layers), planning.Model("", layers)
        assert sum(op.phase != "update" for op in trace.ops) == model.ops
        assert len(chain(trace, op_times(trace, load_profile("a100_40_pcie")).total).stages) == model.stages


def test_a_search_that_met_its_limit_counts_for_nothing():
    assert planning.timed("checkmate(method=milp, time_limit=1e-6)", planning.chain_of(8, 0), 0.5)["ended"] == "limit"
    assert planning.timed("checkmate(method=milp)", planning.chain_of(4, 1), 0.55)["ended"] == "optimal"
    assert planning.timed("rotor", planning.chain_of(4, 1), 0.01)["ended"] == "infeasible"
    rows = [{"stages": n, "seed": k, "cpu_s": 1.0, "ended": "optimal"} for n in (4, 8) for k in range(3)]
    rows[-1]["ended"] = "limit"
    assert planning.solved("checkmate", rows) == [(9, 1.0)] * 3


def test_a_law_is_scaled_by_the_geometric_mean_of_what_gpts_took():
    law = planning.Law("power", -7.0, 2.0, 0.1, (1.0, 2.0, 3.0))
    n = planning.Model("", 1).ops
    rows = [{"layers": 1, "cpu_s": factor * math.exp(law.at(n)[0]), "ended": ended}
            for factor, ended in ((0.01, "optimal"), (0.0001, "limit"), (5.0, "infeasible"))]  # fmt: skip
    found = planning.scaled(law, "checkmate", {"gpt": {"checkmate": rows}})
    assert found.at(300)[0] - law.at(300)[0] == pytest.approx(math.log(0.001))
    assert planning.scaled(law, "poet", {"gpt": {"checkmate": rows}}) is None


def test_every_planner_has_enough_lengths_to_leave_one_out():
    for name, rows in DATA["planners"].items():
        assert len({n for n, _ in planning.solved(name, rows)}) >= 4, name


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0304, "30 ms"), (1.5, "1.5 s"), (90, "1.5 min"), (86400 * 400, "1.1 years"), (2e19, "10^12 years")],
)
def test_times_are_said_in_the_unit_that_fits(seconds, text):
    assert planning.said(math.log(seconds)) == text


def test_the_dynamic_program_grows_as_its_paper_says():
    """O(L^3 slots): Herrmann et al. 2019."""
    law = planning.fit("power", planning.solved("rotor", DATA["planners"]["rotor"]))
    assert law.b == pytest.approx(3, abs=0.3)
    assert re.search(r"`rotor` grows as n\^(2\.[789]|3\.[0123])", planning.PAGE.read_text(encoding="utf-8"))
