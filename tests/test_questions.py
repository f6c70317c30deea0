"""Twenty questions of users, kept as data, each answered by one command in the terms in which it was asked."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from sim.trace.io import save
from tests.test_cli import tiersim
from workloads import transformer

QUESTIONS = tomllib.loads((Path(__file__).parent / "questions.toml").read_text(encoding="utf-8"))["question"]
CONFIG = {
    "model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 211,
}  # fmt: skip
POLICY = '''"""My own."""

from sim.plan import Plan
from sim.policies import Policy


class Mine(Policy):
    """Keep everything: where one begins.

    Source: none.
    """

    fidelity = "reconstruction"
    moves = False
    recomputes = False

    def plan(self, problem):
        """Nothing is done."""
        return Plan(problem.trace)
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    config, trace, policy = folder / "config.json", folder / "step.trace.json.gz", folder / "mine.py"
    config.write_text(json.dumps(CONFIG))
    policy.write_text(POLICY)
    save(transformer(str(config), batch=4, sequence=64, precision="amp_bf16"), trace)
    return {"config": str(config), "trace": str(trace), "policy": f"{policy}:Mine"}


def test_there_are_twenty_of_three_kinds_of_users():
    assert len(QUESTIONS) >= 20
    assert len({question["asks"] for question in QUESTIONS}) == len(QUESTIONS)
    assert {question["who"] for question in QUESTIONS} == {"researcher", "engineer", "newcomer"}


@pytest.mark.parametrize("question", QUESTIONS, ids=[question["asks"] for question in QUESTIONS])
def test_one_command_answers(question, files, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {**files, "run": str(tmp_path / "run")}
    for command in filter(None, (question["command"], question.get("then"))):
        words = [word.format(**files) for word in shlex.split(command)]
        code, out, err = tiersim(*words, capsys=capsys)
        assert code == (1 if question.get("fails") else 0), err
    assert re.search(".*".join(f"(?:{pattern})" for pattern in question["answer"]), out, re.DOTALL), out
    assert {path.name for path in tmp_path.iterdir()} <= {
        "run"
    }  # an answer leaves nothing behind that nobody asked for
