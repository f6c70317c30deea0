"""A check in a process of its own: what ends that process, or never lets it end, ends in a report."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
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


STUBBORN = '''
import os, resource, sys, time
from sim.plan import Plan
from sim.policies.base import Policy
{first}

class Stubborn(Policy):
    """Does not let go."""

    def plan(self, problem):
{plan}
        return Plan(problem.trace)
'''


def check_stubborn(folder: Path, plan: str = "", first: str = "", limit_s: float = 20) -> tuple[bool, str]:
    """Whether such a policy passes, and the report."""
    lines = "".join(f"        {line}\n" for line in plan.splitlines())
    (folder / "stubborn.py").write_text(STUBBORN.format(plan=lines, first=first))
    report, text = isolation.checked("stubborn.py:Stubborn", {}, examples=3, seed=0, time_limit_s=limit_s)
    return report["passed"], text


def test_a_policy_that_does_nothing_passes(folder: Path) -> None:
    assert check_stubborn(folder)[0]


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        ("import sim.conformance.suite as suite\nsuite.breaks = lambda check, run: ''", "sim.conformance.suite.breaks"),
        ("import sim.conformance.suite as suite\nsuite.APPLIES.clear()", "sim.conformance.suite.APPLIES"),
        (
            "from sim.hardware.platform import Link\nLink.__getattribute__ = object.__getattribute__",
            "sim.hardware.platform.Link.__getattribute__",
        ),
    ],
)
def test_a_policy_leaves_the_program_alone(folder: Path, plan: str, part: str) -> None:
    passed, text = check_stubborn(folder, plan)
    assert not passed
    assert f"the policy replaces {part}" in text


SWALLOWS = "while True:\n    try:\n        while True: {does}\n    except BaseException:\n        pass"


@pytest.mark.slow  # ten seconds of grace each
@pytest.mark.parametrize("does", ["pass", "time.sleep(1)"])
def test_a_policy_that_takes_no_interruption_is_ended(folder: Path, does: str) -> None:
    passed, text = check_stubborn(folder, SWALLOWS.format(does=does), limit_s=0.3)
    assert not passed
    assert "no answer after" in text or "it takes no interruption" in text  # one that falls outside its `try` ends it


def test_a_process_that_a_policy_leaves_behind_is_not_waited_for(folder: Path) -> None:
    began = time.monotonic()
    check_stubborn(folder, "if not os.fork():\n    while True: time.sleep(60)")
    assert time.monotonic() - began < isolation.START_S  # silence would be longer


@pytest.mark.parametrize(
    ("plan", "error"),
    [("bytearray(9 << 30)", "MemoryError"), ("with open('large', 'wb') as file: file.truncate(300 << 20)", "OSError")],
)
def test_a_policy_does_not_take_the_whole_machine(folder: Path, plan: str, error: str) -> None:
    passed, text = check_stubborn(folder, plan)
    assert not passed
    assert error in text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells processes by /proc")
def test_a_check_ends_with_the_process_that_asked_for_it(folder: Path) -> None:
    (folder / "stubborn.py").write_text(STUBBORN.format(first="", plan="        time.sleep(10**6)"))
    command = [sys.executable, "-c", "from sim.cli import main; main()", "check", "stubborn.py:Stubborn"]
    with subprocess.Popen(command) as asked:
        while not (inner := children(asked.pid)) or not (second := children(inner[0])):
            assert asked.poll() is None
            time.sleep(0.1)
        asked.kill()
    for _ in range(200):
        if not {*inner, *second} & processes().keys():
            return
        time.sleep(0.1)
    raise AssertionError("it goes on")


def children(process: int) -> list[int]:
    """The processes that one has started."""
    return [child for child, parent in processes().items() if parent == process]


def processes() -> dict[int, int]:
    """Every process that is not ending, with its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(path.parent.name)] = int(parent)
    return found


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
