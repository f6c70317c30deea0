"""The table of what the sources name is true of the tree, and its page is what the table makes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from sim.hardware import load_profile, profile_names
from sim.policies import FAMILIES, family, names

ROOT = Path(__file__).resolve().parent.parent


coverage = importlib.import_module("scripts.make_coverage")
TABLE = coverage.load_table()
ITEMS = coverage.items(TABLE)


def test_the_table_has_no_problems():
    assert coverage.problems(TABLE) == []


def test_the_page_is_what_the_table_makes():
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert page == coverage.page(TABLE), "run python scripts/make_coverage.py"


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["item"][:40])
def test_an_item_has_a_status_and_its_files_are_there(item):
    assert coverage.status_of(item) in coverage.STATUSES
    there, missing = coverage.carriers(item)
    assert all((ROOT / path).is_file() for path in there)
    if coverage.status_of(item) == "done":
        assert there
        assert not missing
    if coverage.status_of(item) in ("left out", "context"):
        assert item["note"]


def test_every_policy_of_the_tree_stands_in_the_table():
    named = {name for item in ITEMS for name in item.get("policies", ())}
    assert {name for name in names() if family(name) in FAMILIES} - named == set()


def test_a_policy_that_no_item_names_stands_there_by_itself():
    (found,) = coverage.unnamed({"group": [{"items": [{"policies": [name for name in names() if name != "vlad"]}]}]})
    assert (found["policies"], found["source"]) == (["vlad"], "not named")
    assert found["item"].startswith("`vlad`: ")
    assert len(found["item"]) > len("`vlad`: ")
    assert coverage.status_of(found) == "done"


def test_every_profile_of_the_tree_stands_in_the_table():
    named = {path for item in ITEMS for path in item.get("files", ())}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hardware_profiles").glob("*.toml")}
    assert there - named == set()


def test_a_profile_that_no_item_names_stands_there_by_itself():
    files = [f"hardware_profiles/{name}.toml" for name in profile_names() if name != "p100"]
    (found,) = coverage.unnamed_profiles({"group": [{"items": [{"files": files}]}]})
    assert (found["files"], found["source"]) == (["hardware_profiles/p100.toml"], "not named")
    assert found["item"] == load_profile("p100").description


def test_every_source_is_one_of_the_three():
    for item in ITEMS:
        source = item["source"]
        assert any(name in source for name in TABLE["sources"]) or source.startswith(("all", "baseline", "not named"))


def problem_of(**changes):
    item = {"item": "x", "source": "survey 1", "files": ["README.md"]} | changes
    return coverage.problems({"group": [{"items": [item]}]})


def test_a_file_that_is_gone_is_a_problem():
    assert problem_of() == []
    assert problem_of(files=["sim/gone.py"]) == ["x: sim/gone.py does not exist"]


def test_an_item_without_status_or_file_is_a_problem():
    assert problem_of(files=[]) == ["x: names neither a file nor a status"]
    assert problem_of(files=[], status="left out") == ["x: a status needs a note"]
    assert problem_of(status="maybe", note="?") == ["x: no status is called 'maybe'"]


def test_a_planned_policy_that_is_there_is_no_longer_not_yet():
    (problem,) = problem_of(policies=["keep_all"], status="not yet", note="planned")
    assert problem.startswith("x: 'not yet', but its policies are there")
    assert problem_of(policies=["keep_all"], status="partly", note="half of it") == []
    assert problem_of(policies=["no_such_policy"], status="not yet", note="planned") == []


def test_a_policy_that_is_missing_makes_its_item_not_yet():
    item = {"item": "x", "source": "survey 1"}
    assert coverage.status_of(item | {"policies": ["no_such_policy"]}) == "not yet"
    assert coverage.status_of(item | {"policies": ["keep_all"]}) == "done"
    assert coverage.status_of(item | {"policies": ["keep_all", "no_such_policy"]}) == "partly"
