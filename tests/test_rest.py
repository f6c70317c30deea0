"""`pytest --rest`: what did not pass before, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import pytest

def test_passes(): pass

def test_fails(): assert "EXTRA" in os.environ

@pytest.mark.skipif("EXTRA" not in os.environ, reason="no extra")
def test_is_skipped(): pass

@pytest.mark.parametrize("case", ["a", "b"] if "EXTRA" in os.environ else ["a"])
def test_has_more_cases(case): pass

@pytest.fixture
def faulty():
    yield
    assert "EXTRA" in os.environ

def test_breaks_afterwards(faulty): pass
"""


def ran(folder, *options, extra=False):
    """The names of the tests that a run in this folder reports, with their outcomes."""
    environment = {**os.environ, **({"EXTRA": "1"} if extra else {})}
    command = [sys.executable, "-m", "pytest", "-v", *options, "test_some.py"]
    printed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout
    lines = [line.split() for line in printed.splitlines() if line.startswith("test_some.py::")]
    return {line[0].partition("::")[2]: line[1] for line in lines}


def test_the_rest_is_what_did_not_pass(tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    assert ran(tmp_path)["test_passes"] == "PASSED"
    rest = dict.fromkeys(
        ("test_fails", "test_is_skipped", "test_has_more_cases[b]", "test_breaks_afterwards"), "PASSED"
    )
    assert ran(tmp_path, "--rest", extra=True) == rest
    assert ran(tmp_path, "--rest", extra=True) == rest, "a run of the rest does not change what the rest is"
