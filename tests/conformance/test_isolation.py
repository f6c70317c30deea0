"""A check in a process of its own: what ends that process, or never lets it end, ends in a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.conformance import isolation

ENDS = """
import os, signal, time
from sim.policies.base import Policy


class Base(Policy):
    \"\"\"Never answers.\"\"\"

    def away(self):
        os._exit(3)

    def plan(self, problem):
        self.away()


class Leaves(Base):
    \"\"\"Ends its process.\"\"\"


class Sleeps(Base):
    \"\"\"Clears all timers, and sleeps.\"\"\"

    def away(self):
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        while True:
            time.sleep(60)


class Fails(Base):
    \"\"\"Fails.\"\"\"

    def away(self):
        raise ValueError("no")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the policies in it, and a folder for caches."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "ends.py").write_text(ENDS)
    monkeypatch.chdir(here)
    monkeypatch.setenv("TIERSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return here


def test_a_process_that_is_ended_from_within_is_a_broken_law(folder: Path) -> None:
    report, text = isolation.checked("ends.py:Leaves", {}, examples=5, seed=0)
    assert not report["passed"]
    assert "(exit status 3)" in text
    assert "FAIL  Law 6" in text


def test_a_process_that_is_silent_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "START_S", 3.0)
    report, text = isolation.checked("ends.py:Sleeps", {}, examples=5, seed=0, time_limit_s=0.1)
    assert not report["passed"]
    assert "nothing was heard of it for 5 s, and it could not be stopped from within" in text


@pytest.mark.parametrize("out", [None, "failing"])
def test_failing_examples_leave_nothing_in_the_current_folder(folder: Path, out: str | None) -> None:
    said = CliRunner().invoke(
        app, ["check", "ends.py:Fails", "--examples", "5", *(["-o", out] if out is not None else [])]
    )
    assert said.exit_code == 1
    kept = folder / out if out is not None else folder.parent / "cache" / "checks"
    assert sorted(path.suffix for path in kept.iterdir()) == [".jsonl", ".toml"]
    assert all(str(path.name) in said.output for path in kept.iterdir())
    assert {path.name for path in folder.iterdir()} == {"ends.py"} | ({out} if out is not None else set())
