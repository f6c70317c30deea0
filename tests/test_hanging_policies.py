"""A policy that never lets go is ended, in one line, by whatever command runs it; the others are answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim import compare, limits, load_profile
from sim.errors import PolicyFailed
from sim.limits import STUCK, calling, limited, usually_limited
from sim.sweeps import run_sweep
from tests.test_cli import tiersim
from workloads import transformer

ROOT = Path(__file__).resolve().parent.parent
TINY = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16, "n_positions": 8}
JOB = ("--profile", "p100", "--model", "tiny.json", "--batch", "1", "--seq", "8")
HANGS = """
import itertools, os, threading
from sim.plan import Drop, Online, Plan
from sim.policies.base import Policy


def loop():
    while True:
        sum(range(1000))


def swallow(depth=3):
    while True:
        try:
            swallow(depth - 1) if depth else loop()
        except BaseException:
            pass


class Loops(Online):
    def before(self, op, memory):
        loop()

{first}

class P(Policy):
    \"\"\"A policy.\"\"\"

    recomputes, online = True, {online}

    def __post_init__(self):
        {made}

    def plan(self, problem):
        {plan}
        return Plan(problem.trace, online=Loops if self.online else None)

    def unlimited(self, problem):
        {unlimited}
        return super().unlimited(problem)
"""
PLACES = {"first": "", "online": "False", "made": "pass", "plan": "pass", "unlimited": "pass"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a tiny model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    return tmp_path


def hangs(**places: str) -> str:
    """The file of a policy with these pieces of code in it."""
    Path("p.py").write_text(HANGS.format(**{**PLACES, **places}))
    return "p.py"


LITTLE_GRACE = "import sim.limits as limits; limits.GRACE_S = limits.CLOSING_S = 0.5; limits.AGAIN_S = 0.1"


def process(*words: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a command in a process of its own, which gives little grace."""
    code = f"{LITTLE_GRACE}; import sys; sys.argv = {['tiersim', *words]!r}; from sim.cli import program; program()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("place", [{"first": "loop()"}, {"made": "loop()"}, {"plan": "loop()"}, {"unlimited": "loop()"},
                                   {"online": "True"}, {"plan": "self.plan(problem)"}])  # fmt: skip
def test_a_run_ends_in_one_line_and_leaves_no_folder(place, folder, capsys):
    words = ("run", *JOB, "--policy", hangs(**place), "--time-limit", "0.3", "-o", "out")
    code, out, err = tiersim(*words, capsys=capsys)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("tiersim: policy 'p.py': ")
    assert "RecursionError" in err or "--time-limit allows more" in err
    assert not Path("out").exists()


@pytest.mark.parametrize("place", [{"first": "loop()"}, {"made": "loop()"}])
def test_every_command_that_loads_a_policy_ends(place, folder, capsys):
    for command in (("compare", *JOB, "--policies"), ("smallest-budget", *JOB, "--policy"),
                    ("largest-batch", *JOB[:4], "--seq", "8", "--policy")):  # fmt: skip
        code, out, err = tiersim(*command, hangs(**place), "--time-limit", "0.3", capsys=capsys)
        assert (code, out, err.count("\n")) == (1, "", 1), command[0]
        assert "--time-limit allows more" in err


def test_of_several_policies_the_others_are_answered(folder, capsys):
    words = ("smallest-budget", *JOB, "--policy", f"keep_all,{hangs(plan='loop()')}", "--time-limit", "0.5")
    code, out, err = tiersim(*words, capsys=capsys)
    assert (code, err) == (1, "")
    assert out.startswith("keep_all: a budget of ")
    assert "p.py: policy 'p.py': no answer after " in out


@pytest.mark.parametrize("place", [{"first": "swallow()"}, {"plan": "swallow()"}])
def test_one_that_swallows_every_interruption_ends_with_its_process(place, folder):
    code, out, err = process("run", *JOB, "--policy", hangs(**place), "--time-limit", "0.3", "-o", "out")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("tiersim: policy 'p.py': no answer after ")
    assert err.endswith("; --time-limit allows more; it takes no interruption\n")
    assert not Path("out").exists()


def test_one_in_a_loop_of_c_is_ended_by_the_kernel(folder):
    code, out, _ = process("run", *JOB, "--policy", hangs(plan="sum(itertools.repeat(1))"), "--time-limit", "0.3")
    assert (code, out) == (-26, "")


def test_a_thread_that_a_policy_leaves_does_not_keep_the_process(folder):
    policy = hangs(plan="threading.Thread(target=threading.Event().wait).start()")
    code, out, err = process("run", *JOB, "--policy", policy)
    assert (code, err) == (0, "")
    assert out.startswith("policy  ")
    assert "reproduce: tiersim run" in out


def test_one_that_sticks_is_a_row_of_a_comparison_and_is_tried_once(folder):
    policy = hangs(plan=f"open('tried', 'a').write('x'); os._exit({STUCK})")
    found = compare(transformer(TINY, batch=1, sequence=8), load_profile("p100"), ["keep_all", policy],
                    time_limit_s=60, bound=False)  # fmt: skip
    kept, stuck = found.rows
    assert kept["fits"] is True
    assert stuck["fits"] is None
    assert stuck["error"] == "its policy took no interruption after its limit of time, and its process was ended"
    assert Path("tried").read_text() == "x"


@pytest.mark.slow
def test_one_that_sticks_is_a_cell_of_a_sweep_and_is_tried_once(folder):
    policy = hangs(plan=f"open('tried', 'a').write('x'); os._exit({STUCK})")
    study = {"model": "tiny.json", "batch": 1, "sequence": 8, "profile": "p100", "policy": ["keep_all", policy]}
    swept = run_sweep(study, jobs=1, out=folder / "results")
    assert [record["row"]["status"] for _, record in swept.rows] == ["ok", "timed_out"]
    assert Path("tried").read_text() == "x"


@pytest.mark.slow
def test_a_comparison_answers_for_the_others_where_one_swallows_every_interruption(folder):
    words = ("compare", *JOB, "--policies", f"keep_all,{hangs(plan='swallow()')},full_recompute", "--json")
    code, out, err = process(*words, "--time-limit", "0.3")
    assert (code, err) == (1, "")
    assert [row["fits"] for row in json.loads(out)] == [True, None, True]


def test_only_calls_of_a_policy_have_the_usual_limit_and_one_inside_another_has_none():
    def busy():
        return sum(range(10**7))

    with usually_limited(0.01):
        busy()
        with limited(60), calling("p"):
            busy()
        with pytest.raises(PolicyFailed, match=r"policy 'p': no answer after 0\.01 s"), calling("p"):  # noqa: PT012
            busy()
            busy()
    with calling("p"):
        busy()


def test_a_folder_that_asks_for_a_million_iterations_is_answered(folder, monkeypatch, capsys):
    assert tiersim("run", *JOB, "-o", "out", capsys=capsys)[0] == 0
    saved = json.loads(Path("out/summary.json").read_text())
    saved["asked"]["iterations"] = 10**6
    Path("out/summary.json").write_text(json.dumps(saved))
    monkeypatch.setattr(limits, "RUN_SECONDS", 0.3)
    code, out, err = tiersim("explain", "out", "--trust", capsys=capsys)
    assert (code, out, err) == (1, "", "tiersim: policy 'keep_all': no answer after 0.3 s of processor time\n")
