"""What a command writes replaces nothing that it reads, and no part of saved results; it is refused before any work."""

import json

import pytest

from tests.test_cli import tiersim

CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 50}
STEP = """
import torch


def step(batch=2):
    model = torch.nn.Linear(4, 4)
    model(torch.zeros(batch, 4)).sum().backward()
"""
POLICY = """
from sim.plan import Plan
from sim.policies.base import Policy


class Mine(Policy):
    def plan(self, problem):
        return Plan(problem.trace)
"""
STUDY = """
profile = "h100"
model = "config.json"
batch = [1, 2]
sequence = 8
policy = "keep_all"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with inputs of each kind, and the results of a run, a comparison and a sweep."""
    folder = tmp_path_factory.mktemp("made")
    texts = {"config.json": json.dumps(CONFIG), "step.py": STEP, "mine.py": POLICY, "study.toml": STUDY}
    for name, text in texts.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def results(made, request):
    """The files of `made` with results, and what each file holds."""
    job = ["--profile", "h100", "--model", "config.json", "--seq", "8"]
    lines = [
        ["trace", "build", "--model", "config.json", "--seq", "8", "-o", "trace.jsonl"],
        ["trace", "export", "trace.jsonl", "--profile", "h100", "-o", "ranks"],
        ["run", *job, "--policy", "mine.py:Mine", "--analysis", "lifetimes", "-o", "r"],
        ["compare", *job, "--policies", "keep_all,mine.py:Mine", "-o", "c"],
        ["sweep", "study.toml", "-o", "s", "--jobs", "1"],
    ]
    capture = request.getfixturevalue("capsys_of_module")
    for words in lines:
        code, _, err = tiersim(*words, capsys=capture)
        assert code == 0, err
    (made / "link.jsonl").symlink_to("trace.jsonl")
    return {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def capsys_of_module():
    class Nothing:
        def readouterr(self):
            return "", ""

    return Nothing()


READ = {
    "trace build --model config.json --seq 8 -o config.json": "'config-2.json'",
    "trace build --model . --seq 8 -o ./config.json": "'config-2.json'",
    "trace import trace.jsonl -o trace.jsonl": "'trace-2.jsonl'",
    "trace import trace.jsonl -o link.jsonl": "'link-2.jsonl'",
    "trace import ranks.0.et -o ../{here}/ranks.0.et": "ranks.0-2.et'",
    "trace capture step.py:step -o step.py": "'step-2.py'",
    "trace export ranks.0.et --profile h100 -o ranks": "'ranks-2'",
    "trace export ranks --profile h100 -o ranks": "'ranks-2'",
    "trace export trace.jsonl --profile h100 --policy mine.py:Mine -o mine.py": "'mine-2.py'",
    "export r --to torch --trust -o config.json": "'config-2.json'",
    "export r --to torch --trust -o mine.py": "'mine-2.py'",
    "run --profile h100 --trace r/summary.json -o r": "'r-2'",
}
PARTS = {
    "export r --to torch --trust -o r/summary.json": ("r", "'summary-2.json'"),
    "export r --to torch --trust -o r/view.json.gz": ("r", "'view.json-2.gz'"),
    "export r --to torch --trust -o r/lifetimes.csv": ("r", "'lifetimes-2.csv'"),
    "results export s --csv s/segments/00001.jsonl": ("s", "'00001-2.jsonl'"),
    "results export s --csv s/study.json": ("s", "'study-2.json'"),
    "results export s --csv c/comparison.csv": ("c", "'comparison-2.csv'"),
    "results export s --parquet c/views/000.json.gz": ("c", "'000.json-2.gz'"),
    "trace build --model config.json --seq 8 -o s/segments": ("s", "'segments-2'"),
    "run --profile h100 --model config.json --seq 8 -o s/cells": ("s", "'cells-2'"),
}


@pytest.mark.parametrize("line", READ)
def test_what_a_command_reads_is_not_replaced(line, made, results, capsys):
    code, out, err = tiersim(*line.format(here=made.name).split(), capsys=capsys)
    assert (code, out) == (2, "")
    assert "would replace" in err
    assert READ[line] in err
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == results


@pytest.mark.parametrize("line", PARTS)
def test_a_part_of_saved_results_is_not_replaced(line, made, results, capsys):
    folder, name = PARTS[line]
    code, out, err = tiersim(*line.split(), capsys=capsys)
    assert (code, out) == (2, "")
    assert f"is a part of the results in '{made / folder}'" in err
    assert name in err
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == results


@pytest.mark.parametrize(
    "line",
    [
        "results export s --csv s/table.csv",
        "report r -o r/report.html --trust",
        "report c -o c/comparison.html",
        "export r --to torch --trust --nearest -o r/plan.py",
        "trace build --model config.json --seq 8 -o trace-again.jsonl",
        "run --profile h100 --trace trace.jsonl -o r",
    ],
)
def test_other_files_are_written_beside_results_and_again(line, made, results, capsys):
    for _ in range(2):
        code, _, err = tiersim(*line.split(), capsys=capsys)
        assert code == 0, err
    for name in ("config.json", "mine.py", "s/study.json", "c/comparison.csv"):
        assert (made / name).read_bytes() == results[made / name]


def test_two_outputs_of_one_name_are_refused(made, results, capsys):
    code, _, err = tiersim("results", "export", "s", "--csv", "t.csv", "--parquet", "./t.csv", capsys=capsys)
    assert code == 2
    assert "--csv and --parquet ./t.csv: one file" in err
    assert not (made / "t.csv").exists()


@pytest.mark.parametrize("name", ["", "   "])
@pytest.mark.parametrize(
    "line",
    ["run --profile h100 --model config.json -o", "sweep study.toml -o", "results export s --csv", "report r -o"],
)
def test_a_blank_name_is_refused(line, name, made, results, capsys):
    code, out, err = tiersim(*line.split(), name, capsys=capsys)
    assert (code, out) == (2, "")
    assert f"{line.split()[-1]} {name!r}: expected a name" in err
