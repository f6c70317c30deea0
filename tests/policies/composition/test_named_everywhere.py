"""Parameters and compositions can be given wherever a policy is named: on the command line, in studies, in Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim import compare
from sim.advice import advise
from sim.cli import app
from sim.errors import PolicyError
from sim.policies import load, policy_files
from sim.sweeps import load_study, run_sweep
from workloads import transformer

TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 64}
NAMES = ("checkmate(method=rounding)", "zero_offload+rotor(slots=200)")
JOB = ("--profile", "mt3000_survey", "--seq", "32")


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return str(path)


def said(*words):
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def named(rows):
    return {row["policy"] for row in rows if row.get("fits", True)}


def test_a_comparison(tiny):
    rows = said("compare", *JOB, "--model", tiny, "--batch", "2", "--budget", "90%", "--policies", ",".join(NAMES))
    assert named(rows) == {*NAMES}


def test_a_study(tiny, tmp_path):
    path, names = tmp_path / "study.toml", json.dumps(NAMES)
    path.write_text(
        f"model = '{tiny}'\nbatch = 2\nsequence = 32\nprofile = 'mt3000_survey'\nbudget = '90%'\npolicy = {names}\n"
    )
    rows = said("sweep", str(path), "-o", str(tmp_path / "out"), "--jobs", "1")
    assert named(rows) == {*NAMES} == {*run_sweep(load_study(path)).to_frame()["policy"]}


def test_advice(tiny):
    words = ("advise", *JOB, "--model", tiny, "--batch", "2", "--budget", "90%", "--jobs", "1", "--seconds", "20")
    found = said(*words, "--policies", ",".join(NAMES))
    assert named([found["best"], found["runner_up"]]) == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "words",
    [
        ("run", "--batch", "2"),
        ("smallest-budget", "--batch", "2"),
        ("largest-batch", "--budget", "2.3 MB"),
    ],
    ids=lambda words: words[0],
)
def test_commands_about_one_policy(words, name, tiny):
    found = said(words[0], *JOB, "--model", tiny, *words[1:], "--policy", name)
    assert (found[0] if isinstance(found, list) else found)["policy"] == name


def test_a_search_of_no_policies_is_refused(tiny):
    words = ("search", *JOB, "--model", tiny, "--global-batch", "2", "--devices", "2", "--policies", "")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "names none" in done.output


def test_python():
    trace = transformer(TINY, batch=2, sequence=32)
    budget = compare(trace, "mt3000_survey", ["keep_all"]).rows[0]["peak_bytes"] * 9 // 10
    assert named(compare(trace, "mt3000_survey", NAMES, budget=budget).rows) == {*NAMES}
    found = advise(trace, "mt3000_survey", budget=budget, policies=NAMES, jobs=1, seconds=20)
    assert named(found.rows) == {*NAMES}


OWN = """
from dataclasses import dataclass

from sim.plan import Plan
from sim.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class Mine(Policy):
    \"\"\"Keep everything, whatever the parameters.\"\"\"

    share: float = 0.5
    word: str = ""

    def plan(self, problem):
        return Plan(problem.trace)
"""


@pytest.fixture(params=["mine.py", "of (2024)+mine; x/mine, own.py"])
def own(tmp_path, request):
    """A policy of one's own, in a folder of any name."""
    path = tmp_path / request.param
    path.parent.mkdir(exist_ok=True)
    path.write_text(OWN, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "share", "word"),
    [
        ("", 0.5, ""),
        (":Mine", 0.5, ""),
        (":Mine()", 0.5, ""),
        (":Mine(share=0.9)", 0.9, ""),
        ("(share=0.9, word=abc)", 0.9, "abc"),
        (':Mine(word="a:b.py (c)", share=0.25)', 0.25, "a:b.py (c)"),
    ],
)
def test_a_policy_of_a_file_has_parameters(own, text, share, word):
    found = load(own + text)
    assert (type(found).__name__, found.share, found.word) == ("Mine", share, word)
    assert load(own + text, word="other").word == "other"
    assert [*policy_files(own + text).values()] == [Path(own)]


def test_a_wrong_parameter_of_a_file_is_named(own):
    for text, said in {
        ":Mine(shar=1)": "has no parameter 'shar' \\(did you mean 'share'",
        ":Mine(share)": "'share': expected parameter=value",
        ":Mine(share=wide)": "share is 'wide'; expected float",
        ":Min(share=1)": "no policy class 'Min' \\(did you mean 'Mine'",
    }.items():
        with pytest.raises(PolicyError, match=said):
            load(own + text)


def test_shares_of_a_policy_of_a_file_are_compared_and_swept(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    path = f"{tmp_path}/mine.py"
    names = [f"{path}:Mine", f"{path}:Mine(share=0.9)", f"layers 0: {path}:Mine(share=0.9); rest: keep_all"]
    rows = said("compare", *JOB, "--model", tiny, "--batch", "2", "--policies", ",".join(names))
    assert named(rows) == {*names}
    study = tmp_path / "study.toml"
    study.write_text(
        f"model = '{tiny}'\nbatch = 2\nsequence = 32\nprofile = 'mt3000_survey'\npolicy = {json.dumps(names)}\n"
    )
    assert len(said("sweep", str(study), "-o", str(tmp_path / "out"), "--jobs", "1")) == 3
    for name in names[1:]:
        said("run", *JOB, "--model", tiny, "--policy", name, "-o", str(tmp_path / "run"))
        assert said("explain", str(tmp_path / "run"), "--trust", "--seconds", "0")
