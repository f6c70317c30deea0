"""What `tiersim policies --new` writes passes what it will be held to, for every kind, outside and inside the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sim.errors import PolicyError
from sim.scaffold import KINDS, class_name, write_policy

ROOT = Path(__file__).resolve().parents[1]
NEW = {f"my_{kind}": (kind, family) for kind, family in KINDS.items()} | {
    "my_dropper": ("online", "recompute"),
    "my_hybrid": ("online", "hybrid"),
    "my_compressor": ("recompute", "compression"),
}
"""Policies to start: kind and family by name."""
PLANNED = "my_planned"
"""A policy that an item of the table of coverage names before it is there."""
ITEM = f'{{ item = "A planned system", source = "survey 9.9", policies = ["{PLANNED}"] }}'
PARTS = (
    *("sim", "workloads", "hardware_profiles", "tests", "docs", "scripts", "notebooks", "benchmarks"),
    *("pyproject.toml", "mkdocs.yml", "README.md"),
)


def run(folder, *words):
    """A Python module in a folder, on the sources there or on ours."""
    where = folder if (folder / "sim").is_dir() else ROOT
    env = {**os.environ, "PYTHONPATH": str(where)}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with new policies."""
    folder = tmp_path_factory.mktemp("outside")
    for name, (kind, family) in NEW.items():
        assert run(folder, *start(name, kind, family)).split() == [f"{name}.py", f"test_{name}.py"]
    return folder


def start(name, kind, family):
    """The command that starts a policy; a family only where it is not the kind's own."""
    return ("sim", "policies", "--new", name, "--kind", kind, *(() if KINDS[kind] == family else ("--family", family)))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the tree with new policies in it, one of them planned: an item of the table of coverage names it."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / part, folder / part)
    with (folder / "docs" / "coverage.toml").open("a", encoding="utf-8") as table:
        table.write(f'\n[[group]]\ntitle = "Planned"\nitems = [\n  {ITEM},\n]\n')
    for name, (kind, family) in {**NEW, PLANNED: ("offload", "offload")}.items():
        assert run(folder, *start(name, kind, family), "--in-tree").split() == [
            f"sim/policies/{family}/{name}.py",
            f"tests/policies/{family}/test_{name}.py",
            "docs/coverage.md",
        ]
    return folder


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("name", NEW)
def test_a_new_policy_passes_the_check_with_its_default_options(outside, name, seed):
    said = run(outside, "sim", "check", f"{name}.py:{class_name(name)}", "--seed", str(seed))
    assert "FAIL" not in said
    if seed == 0:  # other examples may show a trait seldom, which is not a fault
        assert "not exercised:" not in said  # each trait showed; a law that is about others has nothing to say


@pytest.mark.parametrize("name", NEW)
def test_a_new_policys_own_test_passes(outside, name):
    assert "3 passed" in run(outside, "pytest", "-q", "-p", "no:cacheprovider", f"test_{name}.py")


def test_what_is_written_outside_passes_the_linters(outside):
    config = str(ROOT / "pyproject.toml")
    run(outside, "ruff", "check", "--no-cache", "--config", config, ".")
    run(outside, "ruff", "format", "--no-cache", "--check", "--config", config, ".")


def test_what_is_written_in_the_tree_passes_the_linters(checkout):
    run(checkout, "ruff", "check", "--no-cache", ".")
    run(checkout, "ruff", "format", "--no-cache", "--check", ".")


def test_what_is_written_in_the_tree_has_its_types_right(checkout):
    files = [f"sim/policies/{family}/{name}.py" for name, (_, family) in NEW.items()]
    if (ROOT / ".mypy_cache").is_dir():  # a quarter of the time
        shutil.copytree(ROOT / ".mypy_cache", checkout / ".mypy_cache")
    run(checkout, "mypy", *files)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i < 2 else pytest.mark.slow) for i, name in enumerate(NEW)]
)
def test_what_is_written_in_the_tree_passes_its_tests(checkout, name):
    own = f"tests/policies/{NEW[name][1]}/test_{name}.py"
    held = ("policies/test_conformance.py", "policies/test_distinct.py", "policies/test_recipe.py", "test_coverage.py")
    # that its docstring is its own is what is left to do
    named = f"{name} and not two_policies and not where_a_policy_is_from or every_policy_of_the_tree or the_page_is"
    words = ("-q", "-n", "0", "-p", "no:cacheprovider")
    assert "2 passed" in run(checkout, "pytest", *words, own)
    run(checkout, "pytest", *words, *(f"tests/{file}" for file in (*held, "test_experiment.py")), "-k", named)


def test_what_is_written_in_the_tree_is_covered_once(checkout):
    page = (checkout / "docs" / "coverage.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in page if f"/{PLANNED}.py" in line]
    assert f"`{PLANNED}`" not in row  # it is the item that planned it
    assert "| done |" in row
    for name in NEW:
        (row,) = [line for line in page if f"/{name}.py" in line]
        assert row.startswith(f"| `{name}`: ")


@pytest.mark.parametrize("name", ["my policy", "class", "MyPolicy", "_mine", ""])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(PolicyError, match="not a name for a policy"):
        write_policy(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_names_the_nearest(tmp_path):
    with pytest.raises(PolicyError, match="did you mean 'offload'"):
        write_policy("mine", tmp_path, kind="offlaod")


def test_an_unknown_family_names_the_nearest(tmp_path):
    with pytest.raises(PolicyError, match=r"called 'recomputation' .did you mean 'recompute'"):
        write_policy("mine", tmp_path, family="recomputation")
    assert list(tmp_path.iterdir()) == []


def test_an_evictor_of_the_family_recompute_drops_and_any_other_moves(tmp_path):
    for family, action in (("recompute", "Drop"), ("offload", "Move"), ("hybrid", "Move")):
        policy, _ = write_policy(f"my_{family}", tmp_path, kind="online", family=family)
        assert f"answer.append({action}(" in policy.read_text(encoding="utf-8")


def test_a_file_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "test_mine.py").write_text("mine")
    with pytest.raises(PolicyError, match="already exists"):
        write_policy("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]


def test_in_the_tree_a_name_is_taken_once_and_the_tree_must_be_there(tmp_path):
    with pytest.raises(PolicyError, match="a policy is called 'vdnn' already"):
        write_policy("vdnn", ROOT, in_tree=True)
    with pytest.raises(PolicyError, match="not the root of a checkout"):
        write_policy("mine", tmp_path, in_tree=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["keep_all", "rotor"])
def test_a_name_that_is_taken_is_refused_outside_of_the_tree_too(name, tmp_path):
    with pytest.raises(PolicyError, match=f"called '{name}' already; nothing was written.*'my_{name}'"):
        write_policy(name, tmp_path)
    assert not [*tmp_path.iterdir()]
