"""docs/recompute.md is what its script makes of the committed figures, and the figures are what is simulated now."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from scripts.recompute_page import cases, losses, measure, results, text
from sim.experiment import Prices
from sim.policies import family, names, policy_class
from sim.policies.recompute.relax_and_fix.least_bytes import least_bytes
from sim.policies.recompute.relax_and_fix.moment_search import MomentSearch
from sim.solvers.schedule import TraceIndex

ROOT = Path(__file__).resolve().parent.parent
OURS = {name for name in names() if family(name) == "recompute"}
ANEW = [
    ("gpt2", "full_recompute", 6),
    ("gpt2", "selective_recompute", 5),
    ("llama", "rotor", 3),
    ("llama", "sac_knapsack", 4),
    ("llama", "dtr", 5),
]
"""Job, row and budget of cells that take a moment to run."""
PRACTICES = {"every_k", "full_recompute"}
"""What frameworks do, without a publication that claims something for it."""
OF_NOBODY = re.compile(r"\bSource: (none|this project|our own)\b")


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("scripts.make_recompute")


@pytest.fixture(scope="module")
def figures(script):
    return script.load()


@pytest.fixture(scope="module")
def found(figures):
    return results.results(figures)


@pytest.fixture(scope="module")
def traces():
    return {name: job.trace() for name, job in cases.JOBS.items()}


def test_page_is_what_the_script_makes(script, figures):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(figures)


def test_figures_survive_being_written(script, figures):
    assert json.loads(script.dump(figures)) == figures


def test_there_is_a_figure(script):
    assert script.FIGURE.read_bytes().startswith(b"\x89PNG")
    assert script.FIGURE.stat().st_size < 500_000


def test_every_recomputation_policy_is_measured_on_every_job(script, figures):
    page = script.page(figures)
    for job in cases.JOBS:
        measured = {row["policy"] for row in figures["cells"] if row["job"] == job}
        assert measured == OURS, f"run python scripts/make_recompute.py --measure {' '.join(sorted(OURS - measured))}"
    assert [name for name in sorted(OURS) if f"`{name}`" not in page] == []


def test_every_row_was_asked_at_every_budget(found):
    for result in found.values():
        for entry in cases.entries():
            asked = {row["budget_bytes"] for row in result.cells if row["label"] == entry.label}
            missing = set(result.budgets) - asked
            again = f"run python scripts/make_recompute.py --measure {entry.policy}"
            assert not missing, f"{result.job['job']}: {entry.label}: not measured at {sorted(missing)}: {again}"


@pytest.mark.parametrize(("job", "label", "at"), ANEW)
def test_cells_are_what_is_simulated_now(found, traces, job, label, at):
    result = found[job]
    old = result.at(label, result.budgets[at])
    entry = next(entry for entry in cases.entries() if entry.label == label)
    new = measure.cell(traces[job], result.job, entry, old["parameters"], old["budget_bytes"])
    for key in ("status", "peak_bytes", "makespan_ns", "recompute_ns", "moved_bytes", "activation_bytes"):
        assert new[key] == old[key], f"{label}: {key}: run python scripts/make_recompute.py --measure"


def test_bound_and_floor_are_what_is_computed_now(found, traces):
    for job, result in found.items():
        index = TraceIndex(traces[job])
        assert least_bytes(index) == result.job["floor_bytes"]
        prices = Prices(traces[job], cases.platform())
        search = MomentSearch(index, [prices.op_ns(op) for op in range(len(index.reads))])
        budget, bound = result.job["bounds"][len(result.job["bounds"]) // 2]
        assert cases.proven(search, budget) == pytest.approx(bound, rel=1e-5)


def test_no_plan_lies_below_the_bound_or_above_its_budget(found):
    compared = 0
    for result in found.values():
        for label in result.labels:
            for row in result.of(label):
                assert row["peak_bytes"] <= row["budget_bytes"]
                if not result.free(label):
                    assert row["peak_bytes"] >= result.job["floor_bytes"]
                    assert result.over(row) >= result.bound(row["budget_bytes"]) - 1e-6
                    compared += 1
    assert compared > 150


def test_only_those_that_say_so_do_more_than_recompute(found):
    from sim.policies import policy_class

    for result in found.values():
        for label in result.labels:
            if result.free(label):
                made = policy_class(result.of(label)[0]["policy"])
                assert made.moves or made.rewrites, label


def test_heuristics_plan_and_replay_a_deep_trace_within_seconds(figures):
    """Counted in bare SimPy loops of as many timeouts, since wall time depends on what else runs."""
    quick = {row["label"]: row for row in figures["deep"]}
    for name in ("chen", "dtr", "every_k", "full_recompute", "min_cut", "revolve", "sac_knapsack", "vlad"):
        assert quick[name]["loops"] < 500, name


def test_headlines_are_of_policies_that_exist_and_of_known_standing(figures):
    items = text.headlines()
    labels = {row["label"] for row in figures["cells"]}
    for item in items:
        assert set(item) >= {"system", "policy", "headline", "standing", "shows", "why"}
        assert item["policy"] in names()
        assert item["standing"] in {"abstract", "code", "second-hand", "none"}
        assert item.get("against", "chen") in labels
        assert item["shows"] in text.SHOWS
        assert item["policy"] in OURS


def test_every_published_policy_has_its_headline():
    published = {name for name in OURS if not OF_NOBODY.search(inspect.getdoc(policy_class(name)) or "")} - PRACTICES
    missing = published - {item["policy"] for item in text.headlines()}
    assert not missing, f"docs/recompute_headlines.toml: a [[headline]] for {', '.join(sorted(missing))}"


def test_a_policy_of_nobody_needs_no_headline():
    assert OF_NOBODY.search(inspect.getdoc(policy_class("relax_and_fix")))
    assert not OF_NOBODY.search(inspect.getdoc(policy_class("rotor")))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--measure", "rottor"], "no row is called 'rottor' (did you mean 'rotor'?)"),
        (["--mesure"], "no option is called '--mesure' (did you mean '--measure'?)"),
        (["rotor"], "a row is named after --measure"),
    ],
)
def test_a_misspelt_word_measures_and_writes_nothing(script, words, said, capsys, monkeypatch):
    monkeypatch.setattr(script, "PAGE", None)  # whoever wrote it would fail
    assert script.main(words) == 2
    assert said in capsys.readouterr().err


def test_help_shows_the_ways_to_run_it(script, capsys, monkeypatch):
    monkeypatch.setattr(script, "PAGE", None)
    assert script.main(["--help"]) == 0
    assert "--measure rotor chen" in capsys.readouterr().out


def test_a_changed_figure_changes_the_page(script, figures):
    other = json.loads(json.dumps(figures))
    row = next(row for row in other["cells"] if row["status"] == "ok" and row["label"] == "rotor")
    row["makespan_ns"] += 10**8
    assert script.page(other) != script.page(figures)


def test_a_policy_that_appears_in_the_registry_is_measured(monkeypatch):
    monkeypatch.setattr(cases, "names", lambda: (*names(), "a_new_one"))
    monkeypatch.setattr(cases, "family", lambda name: "recompute" if name == "a_new_one" else family(name))
    assert "a_new_one" in {entry.policy for entry in cases.entries()}


def test_a_loss_to_a_simpler_policy_is_said_with_its_rule(script, figures):
    assert set(losses.RULES) == {*losses.STAGES[1:], *losses.OPS[1:]}
    labels = {entry.label for entry in cases.entries()}
    assert {*losses.STAGES, *losses.OPS} <= labels
    other = json.loads(json.dumps(figures))
    for row in other["cells"]:
        if row["status"] == "ok" and row["label"] == "rockmate":
            row["makespan_ns"] *= 3
    assert "* `rockmate`: +" in script.page(other)
    assert losses.RULES["rockmate"] in script.page(other)


def test_cells_with_the_other_last_step_are_shown_and_never_ranked(figures):
    other = json.loads(json.dumps(figures))
    rows = [row for row in other["cells"] if row["status"] == "ok" and row["label"] == "rotor"]
    budget = results.results(figures)["llama"].budgets[0]
    row = next(row for row in rows if row["job"] == "llama" and row["budget_bytes"] == budget)
    plain = results.results(figures)["llama"]
    other["cells"] = [
        one for one in other["cells"] if one["label"] != "rotor" or results.OPTION not in one["parameters"]
    ]
    parameters = {**row["parameters"], results.OPTION: True}
    other["cells"].append({**row, "parameters": parameters, "makespan_ns": plain.job["makespan_ns"]})
    found = results.results(other)["llama"]
    assert found.overhead("rotor", budget) == plain.overhead("rotor", budget)
    assert found.other("rotor", budget) == 0
    assert found.winner(budget) == plain.winner(budget)
