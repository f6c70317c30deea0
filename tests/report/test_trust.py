"""What a folder of results says is data: no file that it names is executed or opened unless its reader asks."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from sim.hardware.profile import profile_text
from sim.policies import policy_file
from sim.report.files import write_aside
from sim.report.page import SavedView, write_run_page
from tests.report.test_page import read, tiersim

POLICY = """
from pathlib import Path

from sim.plan import Plan
from sim.policies.base import Policy

Path({mark!r}).touch()


class Mine(Policy):
    '''Keeps all, and leaves a mark.'''

    def plan(self, problem):
        return Plan(problem.trace)
"""
JOB = ["--profile", "mt3000_survey", "--model", "gpt2", "--batch", "1", "--seq", "64"]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Figures are empty files here: to draw one takes longer than all else that a test does."""
    monkeypatch.setattr("sim.report.draw.save_figure", lambda figure, path: write_aside(path, lambda file: None))


@pytest.fixture
def mine(tmp_path):
    """A policy's file, and the mark that it leaves when it is executed."""
    mark = tmp_path / "mark"
    path = tmp_path / "mine.py"
    path.write_text(POLICY.format(mark=str(mark)))
    yield f"{path}:Mine", mark
    forget()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Writes what a command saves into a folder; it runs for the first one that asks, the others get a copy."""
    folders = {}

    def write(command, folder, capsys):
        if command not in folders:
            folders[command] = tmp_path_factory.mktemp("saved") / "out"
            assert tiersim(*command, "-o", folders[command], capsys=capsys)[0] == 0
        shutil.copytree(folders[command], folder)

    return write


def forget():
    """As in a new process: no policy's file has been executed yet."""
    for name in [name for name in sys.modules if name.startswith("tiersim_policy_")]:
        del sys.modules[name]


def saved(words, folder, mark, capsys):
    assert tiersim(*words, "-o", folder, capsys=capsys)[0] == 0
    assert mark.exists()
    mark.unlink()
    forget()


def test_what_keeps_several_runs_from_being_repeated_is_said_once(tmp_path, capsys):
    profile = tmp_path / "mine.toml"
    profile.write_text(profile_text("a100_40_pcie"))
    job = ["--profile", profile, *JOB[2:]]
    policies = "keep_all,full_recompute,swap_all,dtr,chen"
    assert tiersim("compare", *job, "--policies", policies, "-o", tmp_path / "out", capsys=capsys)[0] == 0
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    (line,) = err.splitlines()
    assert code == 0
    assert "and 2 more: profile " in line
    assert line.endswith("(--trust)")


def test_the_policy_of_a_saved_run_is_not_executed_and_the_page_and_the_terminal_say_so(mine, tmp_path, capsys):
    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert code == 0
    assert not mark.exists()
    assert "from what was saved" in err
    assert "mine.py" in err
    run = read(tmp_path / "r.html").parts["run"]
    figures = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert run["figures"]["makespan_ns"] == figures["makespan_ns"]
    assert run["links"] == [["timeline.pftrace", "out/timeline.pftrace"]]
    (line,) = run["caution"]
    assert "--trust" in line
    assert name in line


def test_it_is_run_again_where_asked_and_gives_the_same_page(mine, tmp_path, capsys):
    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", "--trust", capsys=capsys)
    assert (code, err) == (0, "")
    assert mark.exists()
    again = read(tmp_path / "r.html").parts["run"]
    tiersim("report", tmp_path / "out", "-o", tmp_path / "s.html", capsys=capsys)
    from_saved = read(tmp_path / "s.html").parts["run"]
    assert again.pop("caution") == []
    assert from_saved.pop("caution")
    assert from_saved == again


@pytest.mark.parametrize("change", ["edited", "gone", "unrecorded"])
def test_a_policy_that_is_not_the_one_that_was_run_is_not_executed_even_where_asked(change, mine, tmp_path, capsys):
    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    path = policy_file(name)
    if change == "edited":
        path.write_text(path.read_text() + "\n")
    elif change == "gone":
        path.unlink()
    else:
        summary = tmp_path / "out" / "summary.json"
        summary.write_text(json.dumps({**json.loads(summary.read_text()), "files": {}}))
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", "--trust", capsys=capsys)
    assert code == 0
    assert not mark.exists()
    assert "SHA-256" in err
    assert "SHA-256" in read(tmp_path / "r.html").parts["run"]["caution"][0]


@pytest.mark.parametrize("model", ["{out}/evil.py:make", "evil.py:make", "evil:make", "{other}/evil.py:make"])
@pytest.mark.parametrize("verb", ["report", "comparison", "explain", "export"])
def test_a_model_that_is_a_function_is_not_executed_wherever_it_lies(
    verb, model, results, tmp_path, capsys, monkeypatch
):
    out, mark = tmp_path / "out", tmp_path / "mark"
    command = ("compare", *JOB, "--policies", "keep_all") if verb == "comparison" else ("run", *JOB)
    results(command, out, capsys)
    for folder in (out, tmp_path):
        (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\ndef make(): ...\n")
    path = out / ("comparison.json" if verb == "comparison" else "summary.json")
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "asked": {**saved["asked"], "model": model.format(out=out, other=tmp_path)}}))
    monkeypatch.chdir(out)
    last = {"explain": ("--seconds", "0"), "export": ("--to", "torch")}.get(verb, ("-o", tmp_path / "r.html"))
    for trust in ((), ("--trust",)):  # its SHA-256 was not recorded
        code, _, err = tiersim("report" if verb == "comparison" else verb, ".", *last, *trust, capsys=capsys)
        assert not mark.exists()
        assert ("SHA-256" if trust else "--trust") in err
        assert code == (0 if verb in ("report", "comparison") else 2)


def test_a_folder_without_a_view_is_one_line(mine, tmp_path, capsys):
    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    (tmp_path / "out" / "view.json.gz").unlink()
    code, out, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--trust" in err
    assert not mark.exists()
    assert not (tmp_path / "r.html").exists()


def cut(data):
    return data[: len(data) // 2]


def other_figures(data):
    record = json.loads(gzip.decompress(data))
    record["view"]["figures"]["peak_bytes"] += 1
    return gzip.compress(json.dumps(record).encode())


def no_tiers(data):
    record = json.loads(gzip.decompress(data))
    record["view"]["tiers"] = "all of them"
    return gzip.compress(json.dumps(record).encode())


def changed(**parts):
    """The view with some of its parts as they are given."""

    def change(data):
        record = json.loads(gzip.decompress(data))
        record["view"].update(parts)
        return gzip.compress(json.dumps(record).encode())

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (changed(figures={}), "has no peak_bytes"),
        (changed(summary=[["time", "1 ns"]]), "shows other figures"),
        (changed(end=5), "shows other figures"),
        (cut, "damaged"),
        (lambda data: b"{}", "view.json.gz"),
        (lambda data: gzip.compress(b"[1, 2"), "damaged"),
        (lambda data: gzip.compress(b"{}"), "not a view"),
        (lambda data: gzip.compress(b" " * (65 << 20), 1), "holds more than 67,108,864 bytes"),
        (lambda data: gzip.compress(b"[" + b"[]," * 1_000_000 + b"0]", 1), "more lists and objects"),
        (other_figures, "peak_bytes"),
        (no_tiers, "tiers: expected list"),
    ],
)
def test_a_damaged_view_or_one_of_another_run_is_one_line(damage, said, mine, tmp_path, capsys):
    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    path = tmp_path / "out" / "view.json.gz"
    path.write_bytes(damage(path.read_bytes()))
    code, out, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "r.html").exists()


def test_a_page_from_what_was_saved_takes_no_link_of_the_folder(mine, tmp_path, capsys):
    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    path = tmp_path / "out" / "view.json.gz"
    record = json.loads(gzip.decompress(path.read_bytes()))
    record["view"]["links"] = [["click", "javascript:alert(1)"]]
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    assert tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)[0] == 0
    assert read(tmp_path / "r.html").parts["run"]["links"] == [["timeline.pftrace", "out/timeline.pftrace"]]


def test_policies_of_a_comparison_are_not_executed_and_the_others_are_run_again(mine, tmp_path, capsys):
    name, mark = mine
    saved(["compare", *JOB, "--policies", f"keep_all,{name}"], tmp_path / "out", mark, capsys)
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert code == 0
    assert not mark.exists()
    assert name in err
    parts = read(tmp_path / "r.html").parts
    assert set(parts["about"]["runs"]) == {"keep_all", name}
    assert parts["run keep_all"]["caution"] == []
    assert len(parts[f"run {name}"]["caution"]) == len(parts["table"]["caution"]) == 1
    assert tiersim("report", tmp_path / "out", "-o", tmp_path / "s.html", "--trust", capsys=capsys)[0] == 0
    assert mark.exists()
    assert read(tmp_path / "s.html").parts["table"]["caution"] == []


def test_policies_of_a_sweep_are_not_executed(mine, tmp_path, capsys):
    from sim import sweep

    name, mark = mine
    study = {"model": "gpt2", "sequence": 64, "profile": "mt3000_survey", "policy": ["keep_all", name]}
    table = sweep({**study, "timeline": True}, out=tmp_path / "out", jobs=1)
    assert mark.exists()
    mark.unlink()
    forget()
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert code == 0
    assert not mark.exists()
    assert name in err
    parts = read(tmp_path / "r.html").parts
    assert set(parts["about"]["runs"]) == set(table["cell"])
    (theirs,) = table["cell"][table["policy"] == name]
    assert len(parts[f"run {theirs}"]["caution"]) == len(parts["table"]["caution"]) == 1
    for words in (["list"], ["show"], ["query"], ["export", "--csv", tmp_path / "t.csv"]):
        more = ["SELECT * FROM cells"] if words == ["query"] else []
        assert tiersim("results", words[0], tmp_path / "out", *words[1:], *more, capsys=capsys)[0] == 0
        assert not mark.exists()
    assert tiersim("report", tmp_path / "out", "-o", tmp_path / "s.html", "--trust", capsys=capsys)[0] == 0
    assert mark.exists()
    assert read(tmp_path / "s.html").parts["table"]["caution"] == []
    mark.unlink()
    forget()
    policy_file(name).write_text(policy_file(name).read_text() + "\n")
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "t.html", "--trust", capsys=capsys)
    assert code == 0
    assert not mark.exists()
    assert "SHA-256" in err


@pytest.mark.parametrize("kind", ["profile", "model", "trace"])
@pytest.mark.parametrize("verb", ["run", "compare"])
def test_a_file_outside_the_folder_is_not_opened_unless_asked(kind, verb, tmp_path, capsys, monkeypatch):
    from sim.hardware.profile import profile_text
    from sim.trace.io import save
    from workloads import transformer

    path = tmp_path / {"profile": "p.toml", "model": "config.json", "trace": "t.jsonl"}[kind]
    words = JOB
    if kind == "profile":
        path.write_text(profile_text("mt3000_survey"))
        words = ["--profile", path, *JOB[2:]]
    elif kind == "model":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}
        path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
        words = [*JOB[:2], "--model", path, *JOB[4:]]
    else:
        save(transformer("gpt2", batch=1, sequence=64), path)
        words = [*JOB[:2], "--trace", path]
    which = ["--policy", "keep_all"] if verb == "run" else ["--policies", "keep_all"]
    assert tiersim(verb, *words, *which, "-o", tmp_path / "out", capsys=capsys)[0] == 0
    opened = []
    real = Path.read_bytes, Path.read_text, open
    watch = str(path)

    def seen(number):
        def call(first, *rest, **more):
            if str(first) == watch:
                opened.append(first)
            return real[number](first, *rest, **more)

        return call

    monkeypatch.setattr(Path, "read_bytes", seen(0))
    monkeypatch.setattr(Path, "read_text", seen(1))
    monkeypatch.setattr("builtins.open", seen(2))
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert (code, opened) == (0, [])
    assert f"{kind} '{path}'" in err
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "s.html", "--trust", capsys=capsys)
    assert (code, err) == (0, "")
    assert opened
    monkeypatch.undo()
    # what lies in the folder belongs to it
    inside = tmp_path / "out" / tmp_path.name / path.name  # a model is called by its folder's name
    inside.parent.mkdir()
    shutil.copy(path, inside)
    for name in ("summary.json", "comparison.json"):
        file = tmp_path / "out" / name
        if file.is_file():
            file.write_text(file.read_text().replace(str(path), str(inside)))
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "t.html", capsys=capsys)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "asked",
    [5, {}, {"profile": 7}, {"profile": "h100", "model": 5}, {"profile": "h100", "model": "gpt2", "param": "abc"}],
)
def test_options_of_another_type_are_one_line(asked, tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps({"asked": asked, "trace": "x"}))
    code, out, err = tiersim("report", tmp_path, "-o", tmp_path / "r.html", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "asked" in err


@pytest.mark.parametrize("cells", [5, [5], [{"id": "../../../etc", "labels": {}}], [{"id": "ab" * 20, "labels": 1}]])
def test_cells_whose_id_is_a_path_are_refused(cells, tmp_path, capsys):
    study = {"tiersim_store": 1, "study": {}, "cells": cells}
    (tmp_path / "study.json").write_text(json.dumps(study))
    code, out, err = tiersim("report", tmp_path, "-o", tmp_path / "r.html", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "study.json" in err


def test_a_view_that_is_a_pipe_is_not_waited_for(mine, tmp_path, capsys):
    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    path = tmp_path / "out" / "view.json.gz"
    path.unlink()
    os.mkfifo(path)
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert code == 2
    assert "is not a regular file" in err


def asked_for(folder, **changes):
    """The folder of a run with some of its options as they are given."""
    path = folder / "summary.json"
    record = json.loads(path.read_text())
    record["asked"].update(changes)
    path.write_text(json.dumps(record))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"iterations": 10**9}, "iterations 1000000000 is more than the 1,000"),
        ({"batch": 10**30}, "batch 10000000000000000000000… is more than the 2,147,483,648"),
        ({"batch": 10**7, "micro_batches": 10**7}, "micro_batches 10000000 is more than the 1,024"),
        ({"seq": 10**9}, "seq 1000000000 is more than the 16,777,216"),
        ({"iterations": 1000, "model": "llama2-70b"}, "ops are more than the 2,000,000"),
        ({"batch": 1024, "micro_batches": 1024, "pp": 12}, "ops of microbatches are more than the 200,000"),
        ({"recompute_limit": 0.0}, "recompute_limit 0.0 is more than the 1,000"),
    ],
)
def test_a_run_that_would_not_end_is_not_made_again_unasked_and_says_so(changes, said, tmp_path, capsys):
    assert tiersim("run", *JOB, "--policy", "keep_all", "-o", tmp_path / "out", capsys=capsys)[0] == 0
    asked_for(tmp_path / "out", **changes)
    code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert code == 0
    assert said in err
    assert said in read(tmp_path / "r.html").parts["run"]["caution"][0]


@pytest.mark.parametrize("name", ["page.pdf", "page.png", "page"])
def test_a_page_is_written_under_the_name_of_a_page_alone(tmp_path, capsys, name):
    assert tiersim("run", *JOB, "--policy", "keep_all", "-o", tmp_path / "out", capsys=capsys)[0] == 0
    status, _, said = tiersim("report", tmp_path / "out", "-o", tmp_path / name, capsys=capsys)
    assert (status, (tmp_path / name).exists()) == (2, False)
    assert "page.html" in said
    assert "--figures pdf" in said


def test_a_number_that_no_trace_can_hold_is_one_line_even_where_asked(tmp_path, capsys):
    assert tiersim("run", *JOB, "--policy", "keep_all", "-o", tmp_path / "out", capsys=capsys)[0] == 0
    for changes, said in (({"batch": 10**30}, "bytes: 2**63 or more"), ({"set_": ["a=" + "9" * 5000]}, "a")):
        asked_for(tmp_path / "out", **changes)
        code, out, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", "--trust", capsys=capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err


@pytest.mark.timeout(60)
def test_a_study_that_crosses_millions_of_values_is_not_gone_through(tmp_path, capsys):
    from sim import sweep
    from sim.sweeps.store import _sum

    study = {"model": "gpt2", "sequence": 64, "profile": "mt3000_survey", "policy": "keep_all", "timeline": True}
    sweep(study, out=tmp_path / "out", jobs=1)
    path = tmp_path / "out" / "study.json"
    for changes, said in (
        ({"seed": list(range(2000)), "batch": list(range(1, 2000))}, "the study has 3,998,000 combinations"),
        ({"iterations": 10**9}, "iterations 1000000000 is more than the 1,000"),
    ):
        record = json.loads(path.read_text())
        record["study"] = {**study, **changes}
        path.write_text(json.dumps({**record, "sum": _sum(record)}))
        code, _, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
        assert code == 0
        assert said in err + "".join(read(tmp_path / "r.html").parts["table"]["notes"])


@pytest.fixture
def swept(tmp_path):
    """The folder of a sweep with a timeline."""
    from sim import sweep

    study = {"model": "gpt2", "sequence": 64, "profile": "mt3000_survey", "policy": "keep_all", "timeline": True}
    sweep(study, out=tmp_path / "out", jobs=1)
    return tmp_path / "out"


@pytest.mark.parametrize("kept", [True, False])
def test_a_cell_that_would_not_end_is_not_run_again_unasked_and_says_so(kept, swept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sim.foreign.MOST_OPS", 100)
    (id,) = os.listdir(swept / "cells")
    if not kept:
        (swept / "cells" / id / "view.json.gz").unlink()
    code, _, _ = tiersim("report", swept, "-o", tmp_path / "r.html", capsys=capsys)
    parts = read(tmp_path / "r.html").parts
    assert code == 0
    assert [part for part in parts if part.startswith("run ")] == ([f"run {parts['table']['ids'][0]}"] if kept else [])
    said = parts[f"run {parts['table']['ids'][0]}"]["caution"] if kept else parts["table"]["notes"]
    assert "ops are more than the 100 that results get without --trust" in " ".join(said)


@pytest.mark.timeout(60)
def test_a_cell_that_is_run_again_has_the_usual_limit_of_time(swept, tmp_path, capsys, monkeypatch):
    from sim.sweeps import load_study
    from sim.sweeps.store import _sum, line_of, read_segment

    path, segment = swept / "study.json", swept / "segments" / "00001.jsonl"
    about, (record,) = json.loads(path.read_text()), read_segment(segment)
    about["study"]["iterations"] = 10**6
    (cell,) = load_study(about["study"]).cells()
    (swept / "cells" / record["id"][:16]).rename(swept / "cells" / cell.id[:16])
    about["cells"][0]["id"] = record["id"] = cell.id
    path.write_text(json.dumps({**about, "sum": _sum(about)}))
    segment.write_bytes(line_of(record))
    monkeypatch.setattr("sim.limits.RUN_SECONDS", 0.5)
    code, out, err = tiersim("report", swept, "-o", tmp_path / "r.html", "--trust", capsys=capsys)
    assert (code, out, err) == (1, "", "tiersim: policy 'keep_all': no answer after 0.5 s of processor time\n")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["profile", "model", "trace", "policy"])
def test_a_pipe_in_the_folder_is_not_waited_for(kind, tmp_path, capsys):
    out = tmp_path / "out"
    assert tiersim("run", *JOB, "--policy", "keep_all", "-o", out, capsys=capsys)[0] == 0
    pipe = out / {"profile": "p.toml", "model": "config.json", "trace": "t.jsonl", "policy": "p.py"}[kind]
    os.mkfifo(pipe)
    asked_for(out, **{kind: str(pipe)})
    if kind == "policy":
        summary = json.loads((out / "summary.json").read_text())
        (out / "summary.json").write_text(json.dumps({**summary, "policy": str(pipe), "files": {str(pipe): "0" * 64}}))
    code, _, err = tiersim("report", out, "-o", tmp_path / "r.html", "--trust", capsys=capsys)
    assert code == 0
    assert ("SHA-256 differs" if kind == "policy" else "is not a regular file") in err


@pytest.mark.timeout(60)
def test_a_segment_that_is_a_pipe_is_not_waited_for(tmp_path, capsys):
    from sim import sweep

    study = {"model": "gpt2", "sequence": 64, "profile": "mt3000_survey", "policy": "keep_all"}
    sweep(study, out=tmp_path / "out", jobs=1)
    os.mkfifo(tmp_path / "out" / "segments" / "00002.jsonl")
    code, out, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is not a regular file" in err


def test_what_is_executed_is_what_was_read_for_the_sum(mine, tmp_path, capsys, monkeypatch):
    """The file is another one as soon as it has been read, and a compiled one of the same time lies beside it."""
    from sim import foreign

    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    path = policy_file(name)
    stranger = tmp_path / "stranger"
    evil = path.read_text() + f"Path({str(stranger)!r}).touch()\n"
    real = foreign.read_file

    def swapped(file, *rest):
        data = real(file, *rest)
        if Path(file) == path:
            path.write_text(evil)
        return data

    monkeypatch.setattr(foreign, "read_file", swapped)
    code, _, _ = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", "--trust", capsys=capsys)
    assert code == 0
    assert mark.exists()
    assert not stranger.exists()


def test_a_compiled_file_beside_a_policy_is_not_executed(mine, tmp_path, capsys):
    import py_compile

    name, mark = mine
    saved(["run", *JOB, "--policy", name], tmp_path / "out", mark, capsys)
    path = policy_file(name)
    good, stranger = path.read_bytes(), tmp_path / "stranger"
    evil = good.replace(str(mark).encode(), str(stranger).encode())
    path.write_bytes(evil + b"#" * (len(good) - len(evil)))
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    path.write_bytes(good)
    code, _, _ = tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", "--trust", capsys=capsys)
    assert code == 0
    assert mark.exists()
    assert not stranger.exists()


def test_half_a_character_in_a_view_becomes_a_page(tmp_path):
    assert write_run_page(SavedView({"title": "\ud800"}), tmp_path / "r.html").is_file()


def ranks(folder):
    """The prefix of the files of a Chakra trace, one per rank."""
    from sim import load_profile, simulate
    from workloads import transformer
    from workloads.exporters.chakra import export_chakra

    folder.mkdir(exist_ok=True)
    tiny = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    run = simulate(transformer(tiny, batch=1, sequence=8), load_profile("p100"), "keep_all")
    export_chakra(run.log, folder / "t")
    return folder / "t"


@pytest.mark.timeout(60)
def test_a_rank_of_a_trace_that_is_a_pipe_is_not_waited_for(tmp_path, capsys):
    out = tmp_path / "out"
    assert tiersim("run", *JOB, "--policy", "keep_all", "-o", out, capsys=capsys)[0] == 0
    os.mkfifo(out / "t.0.et")
    asked_for(out, trace=str(out / "t"))
    code, _, err = tiersim("report", out, "-o", tmp_path / "r.html", capsys=capsys)
    assert code == 0
    assert "is not a regular file" in err


def test_a_rank_of_a_trace_that_lies_outside_is_not_opened_unless_asked(tmp_path, capsys, monkeypatch):
    prefix, out = ranks(tmp_path / "traces"), tmp_path / "out"
    words = [*JOB[:2], "--trace", prefix, "--policy", "keep_all"]
    assert tiersim("run", *words, "-o", out, capsys=capsys)[0] == 0
    asked, summary = str(out / "t"), json.loads((out / "summary.json").read_text())
    assert list(summary["files"]) == [f"{prefix}.0.et"]
    (out / "t.0.et").symlink_to(f"{prefix}.0.et")
    asked_for(out, trace=asked)
    code, _, err = tiersim("report", out, "-o", tmp_path / "r.html", capsys=capsys)
    assert code == 0
    assert f"trace '{asked}.0.et' is a file that the results refer to" in err


def test_a_trace_of_all_ranks_is_used_again_where_asked(tmp_path, capsys):
    prefix, out = ranks(tmp_path / "traces"), tmp_path / "out"
    words = [*JOB[:2], "--trace", prefix, "--policy", "keep_all"]
    assert tiersim("run", *words, "-o", out, capsys=capsys)[0] == 0
    assert tiersim("report", out, "-o", tmp_path / "r.html", "--trust", capsys=capsys)[::2] == (0, "")


def test_a_model_whose_file_is_a_circle_of_links_is_one_line(tmp_path, capsys):
    pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")
    out = tmp_path / "out"
    assert tiersim("run", *JOB, "--policy", "keep_all", "-o", out, capsys=capsys)[0] == 0
    (tmp_path / "loop.py").symlink_to("loop.py")
    code, _, err = tiersim("run", *JOB[:2], "--model", f"{tmp_path / 'loop.py'}:step", *JOB[4:], capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "loop.py cannot be imported" in err


@pytest.mark.parametrize("given", [[], ["--batch", "2"]])
def test_the_command_of_a_captured_step_names_what_was_given_alone(given, tmp_path, capsys):
    pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")
    step, out = tmp_path / "step.py", tmp_path / "out"
    of = "batch=3" if given else ""
    step.write_text(
        f"import torch\n\n\ndef step({of}):\n    return dict(module=lambda: torch.nn.Linear(8, 8), "
        f"inputs=torch.empty({'batch' if given else 4}, 8), loss=torch.sum)\n"
    )
    words = [*JOB[:2], "--model", f"{step}:step", *given, "--policy", "keep_all"]
    assert tiersim("run", *words, "-o", out, capsys=capsys)[0] == 0
    page = tmp_path / "r.html"
    for trusted in ([], ["--trust"]):  # from what was saved, and repeated
        assert tiersim("report", out, "-o", page, *trusted, capsys=capsys)[0] == 0
        command = shlex.split(read(page).parts["run"]["command"])
        assert command[:2] == ["tiersim", "run"]
        assert [word for word in command if word in ("--batch", "--seq", "--precision", "--optimizer")] == given[:1]
    assert tiersim(*command[1:], capsys=capsys)[0] == 0
