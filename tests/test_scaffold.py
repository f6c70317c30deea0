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
    """A folder with a new policy of each kind."""
    folder = tmp_path_factory.mktemp("outside")
    for kind in KINDS:
        assert run(folder, "sim", "policies", "--new", f"my_{kind}", "--kind", kind).split() == [
            f"my_{kind}.py",
            f"test_my_{kind}.py",
        ]
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the tree with a new policy of each kind in it."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / part, folder / part)
    for kind, family in KINDS.items():
        written = run(folder, "sim", "policies", "--new", f"my_{kind}", "--kind", kind, "--in-tree").split()
        assert written == [
            f"sim/policies/{family}/my_{kind}.py",
            f"tests/policies/{family}/test_my_{kind}.py",
            "docs/coverage.toml",
            "docs/coverage.md",
        ]
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_policy_passes_the_check_with_its_default_options(outside, kind):
    said = run(outside, "sim", "check", f"my_{kind}.py:{class_name(f'my_{kind}')}")
    assert "FAIL" not in said
    assert "not exercised" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_policys_own_test_passes(outside, kind):
    assert "3 passed" in run(outside, "pytest", "-q", "-p", "no:cacheprovider", f"test_my_{kind}.py")


def test_what_is_written_outside_passes_the_linters(outside):
    config = str(ROOT / "pyproject.toml")
    run(outside, "ruff", "check", "--no-cache", "--config", config, ".")
    run(outside, "ruff", "format", "--no-cache", "--check", "--config", config, ".")


def test_what_is_written_in_the_tree_passes_the_linters(checkout):
    run(checkout, "ruff", "check", "--no-cache", ".")
    run(checkout, "ruff", "format", "--no-cache", "--check", ".")


def test_what_is_written_in_the_tree_has_its_types_right(checkout):
    files = [f"sim/policies/{family}/my_{kind}.py" for kind, family in KINDS.items()]
    if (ROOT / ".mypy_cache").is_dir():  # a quarter of the time
        shutil.copytree(ROOT / ".mypy_cache", checkout / ".mypy_cache")
    run(checkout, "mypy", *files)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_in_the_tree_passes_its_tests(checkout, kind):
    own = f"tests/policies/{KINDS[kind]}/test_my_{kind}.py"
    held = ("policies/test_conformance.py", "policies/test_distinct.py", "test_coverage.py", "test_experiment.py")
    named = f"my_{kind} and not two_policies or every_policy_of_the_tree or the_page_is"
    words = ("-q", "-n", "0", "-p", "no:cacheprovider")
    assert "2 passed" in run(checkout, "pytest", *words, own)
    run(checkout, "pytest", *words, *(f"tests/{file}" for file in held), "-k", named)


@pytest.mark.parametrize("name", ["my policy", "class", "MyPolicy", "_mine", ""])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(PolicyError, match="not a name for a policy"):
        write_policy(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_names_the_nearest(tmp_path):
    with pytest.raises(PolicyError, match="did you mean 'offload'"):
        write_policy("mine", tmp_path, kind="offlaod")


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
