"""Wrong input as people type it ends in one line that says what is wrong and what is right, never in a traceback."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from sim.cli import main

WRONG = tomllib.loads((Path(__file__).parent / "wrong_words.toml").read_text(encoding="utf-8"))["words"]
STUDY = 'model = "gpt2"\nbatch = {batch}\n{sequence} = 64\nprofile = "p100"\npolicy = "{policy}"\n'
FILES = {
    "config.json": json.dumps({"model_type": "gpt2", "n_embd": 33, "n_layer": 2, "n_head": 2, "vocab_size": 64}),
    "bad.py": "x = 1\n",
    "syntax.py": "class P(:\n",
    "bad.jsonl": '{"a":\n',
    "bad_profile.toml": 'name = "x"\n[tiers.hbm]\ncapasity = "8 GB"\n',
    "no_standing.toml": 'name = "x"\n[tiers.hbm]\nsource = "x"\ncapacity = "8 GB"\n',
    "no_unit.toml": 'name = "x"\n[tiers.hbm]\ncapacity = 8\n',
    "bad_study.toml": 'model = "gpt2"\nbatch = [1,\n',
    "study_key.toml": STUDY.format(batch=1, sequence="seqence", policy="keep_all"),
    "study_policy.toml": STUDY.format(batch=1, sequence="sequence", policy="keepall"),
    "study_zero.toml": STUDY.format(batch=0, sequence="sequence", policy="keep_all"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the words name."""
    where = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (where / name).write_text(text, encoding="utf-8")
    return where


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said_with_what_is_right(words, folder, monkeypatch, capsys):
    if words.startswith("trace capture"):
        pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["tiersim", *shlex.split(words)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(line.startswith("tiersim: ") for line in said.splitlines())
    assert WRONG[words] in said
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)  # a refusal leaves nothing behind


def test_there_are_as_many_as_the_page_says():
    assert len(WRONG) >= 80
