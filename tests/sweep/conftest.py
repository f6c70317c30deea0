"""A model small enough that a cell takes milliseconds, and policies that misbehave."""

import json
import textwrap

import pytest

TINY = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 64,
}

MISBEHAVED = '''
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from sim.plan import Plan
from sim.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class Faulty(Policy):
    """Divides by zero."""

    def plan(self, problem):
        return 1 // 0


@dataclass(frozen=True, kw_only=True)
class Killer(Policy):
    """Kills its process until `times` marks stand in `folder`."""

    folder: str
    times: int = 1000

    def plan(self, problem):
        marks = len(list(Path(self.folder).glob("mark*")))
        if marks < self.times:
            (Path(self.folder) / f"mark{marks}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Plan(problem.trace)


@dataclass(frozen=True, kw_only=True)
class KillsParent(Policy):
    """Kills what started its process until `times` marks stand in `folder`."""

    folder: str
    times: int = 1000

    def plan(self, problem):
        marks = len(list(Path(self.folder).glob("mark*")))
        if marks < self.times:
            (Path(self.folder) / f"mark{marks}").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return Plan(problem.trace)


@dataclass(frozen=True, kw_only=True)
class Solver(Policy):
    """Leaves a mark in `folder` for each plan that it makes."""

    solver = "thought"
    folder: str
    seeded: bool = False
    hurried: bool = False

    def plan(self, problem):
        marks = len(list(Path(self.folder).glob("plan*")))
        (Path(self.folder) / f"plan{marks}").touch()
        seed = problem.seed if self.seeded else 0
        return Plan(problem.trace, notes={"time_limited": self.hurried, "seed": seed})


@dataclass(frozen=True, kw_only=True)
class Sleeper(Policy):
    """Takes long."""

    seconds: float = 60.0

    def plan(self, problem):
        time.sleep(self.seconds)
        return Plan(problem.trace)


@dataclass(frozen=True, kw_only=True)
class Loud(Policy):
    """Prints where outcomes go."""

    def plan(self, problem):
        print("noise")
        os.write(1, b"more noise")
        return Plan(problem.trace)
'''


@pytest.fixture
def tiny(tmp_path):
    """The config.json of a GPT-2 of two layers."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def own(tmp_path):
    """Makes the name of a misbehaved policy from its class."""
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(MISBEHAVED))
    return lambda name: f"{path}:{name}"


@pytest.fixture
def study(tiny):
    """A study of eight cells, as a dict; keywords replace its keys."""

    def make(**changes):
        known = {
            "model": [tiny],
            "batch": [1, 2],
            "sequence": [16],
            "precision": "fp32",
            "profile": ["mt3000_survey"],
            "policy": ["keep_all", "dtr"],
            "budget": ["all", "90%"],
        }
        return {key: value for key, value in {**known, **changes}.items() if value is not None}

    return make


def toml(study):
    """A study as the text of a file."""

    def text(value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(text, value)) + "]"
        return json.dumps(value)

    return "".join(f"{key} = {text(value)}\n" for key, value in study.items())


@pytest.fixture
def study_file(tmp_path, study):
    """Writes a study to a file and returns its path."""

    def write(name="study.toml", **changes):
        path = tmp_path / name
        path.write_text(toml(study(**changes)))
        return str(path)

    return write
