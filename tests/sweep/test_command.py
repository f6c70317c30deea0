"""`tiersim sweep` and `tiersim results`: a summary, tables, and what to do after ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from typer.testing import CliRunner

import sim
from sim.cli import app
from sim.errors import TiersimError
from sim.sweeps import Store, command, frame, load_study, run_sweep, write_csv
from sim.sweeps.execute import Inline

RUN = "import sys; from sim.sweeps.command import run_study; sys.exit(run_study(sys.argv[1], out=sys.argv[2], jobs=2))"


@pytest.fixture
def folder(study_file, tmp_path, capsys):
    assert command.run_study(study_file(), out=str(tmp_path / "out")) == 0
    capsys.readouterr()
    return str(tmp_path / "out")


def test_a_sweep_ends_with_a_summary(study_file, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert command.run_study(study_file(), out=out) == 0
    said = capsys.readouterr()
    assert said.err == ""  # quiet in a pipe
    first, last = said.out.splitlines()
    assert first.startswith("8 of 8 cells in ")
    assert last == f"results in {out}; tiersim results show {out}"
    assert command.run_study(study_file(), out=out, resume=True) == 0
    assert "8 were known already" in capsys.readouterr().out


def test_cells_of_another_study_in_the_folder_are_said_to_be_kept(study_file, folder, capsys):
    one = study_file(batch=4, policy="keep_all", budget="all")
    assert command.run_study(one, out=folder, resume=True) == 0
    said = "cells that are none of this study are kept in the folder, and not among its results"
    assert f"\n8 {said}\n" in capsys.readouterr().out
    assert command.run_study(study_file(), out=folder, resume=True) == 0
    out = capsys.readouterr().out
    assert "8 were known already" in out
    assert f"\n1 {said}\n" in out


def test_a_cell_that_failed_is_named_and_gives_exit_status_1(study_file, tmp_path, capsys, own):
    path = study_file(policy=["keep_all", own("Faulty")], budget="all", batch=1)
    assert command.run_study(path, out=str(tmp_path / "out")) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert own("Faulty") in line
    assert line.endswith("ZeroDivisionError: integer division or modulo by zero")


def test_json_is_the_rows_and_nothing_else(study_file, tmp_path, capsys):
    command.run_study(study_file(), out=str(tmp_path / "out"), as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in rows] == [1] * 4 + [2] * 4
    assert {"cell", "policy", "status", "peak_bytes", "makespan_ns", "unconstrained_peak_bytes"} <= set(rows[0])


def test_the_bound_is_a_column_where_it_is_asked_for_computed_once_for_each_budget(study, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("sim.sweeps.cell.lower_bound", lambda *given: calls.append(given) or sim.lower_bound(*given))
    plain = load_study(study(policy=["keep_all", "full_recompute", "zero_offload"], batch=4))
    assert "bound_ns" not in run_sweep(plain, executor=Inline()).to_frame()
    assert not calls
    swept = run_sweep(plain.bounded(), out=tmp_path / "out", executor=Inline())
    assert len(calls) == len({platform.content_hash for _, platform in calls}) == 2
    assert {cell.id for cell in plain.cells()}.isdisjoint(cell["id"] for cell, _ in swept.rows)
    table = swept.to_frame().set_index(["policy", "budget"])
    assert table["above_bound"].dropna().min() >= 0.0
    assert table.loc[("keep_all", "all"), "above_bound"] == 0.0
    assert table.loc[("full_recompute", "90%"), "above_bound"] > 0.0
    assert table.loc[("zero_offload", "all"), "outside_bound"] == "changes what is computed"
    assert "above_bound" in write_csv(swept.rows, tmp_path / "t.csv").read_text().partition("\n")[0]
    assert "above_bound" in command.show_results(str(tmp_path / "out"))


def test_a_study_and_the_command_line_ask_for_the_bound_alike(study_file, tmp_path):
    out = []
    for key, words in ((True, []), (False, ["--bound"])):
        path = study_file(f"{key}.toml", bound=key, batch=1, policy="keep_all", budget="all")
        done = CliRunner().invoke(app, ["sweep", path, "-o", str(tmp_path / f"out {key}"), "--json", *words])
        out.append(json.loads(done.stdout))
    assert out[0] == out[1]
    assert out[0][0]["above_bound"] == 0.0


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(study_file, tmp_path):
    path, out = study_file(batch=list(range(1, 31)), sequence=[8, 16, 32, 64]), str(tmp_path / "out")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, path, out], stderr=subprocess.PIPE, text=True, env=environment
    )
    segment = tmp_path / "out" / "segments" / "00001.jsonl"
    limit = time.monotonic() + 60
    while not (segment.exists() and segment.stat().st_size > 5000) and time.monotonic() < limit:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode != 0
    how, go_on = [line for line in said if line.startswith("tiersim: ")]
    done = int(how.split()[1])
    assert f"{done} of 480 cells in " in how
    assert go_on == f"tiersim: resume with: tiersim sweep {path} -o {out} --jobs 2 --resume"
    store = Store(out)
    assert done <= len(store.records()) <= done + 1
    assert store.damaged == 0


def test_ctrl_c_on_a_cluster_says_how_to_go_on_there(study_file, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_sweep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.run_study(study_file(), out="o", jobs=4, dask="slurm", slurm={"queue": "thcp1", "cores": 2})
    said = capsys.readouterr().err.splitlines()
    words = "-o o --jobs 4 --dask slurm --slurm queue=thcp1 --slurm cores=2 --resume"
    assert said == [
        "tiersim: no cell was finished",
        f"tiersim: resume with: tiersim sweep {study_file()} {words}",
    ]


def test_results_are_listed_and_shown(folder, tmp_path):
    assert command.list_results(str(tmp_path)).startswith(f"{folder}: 8 cells: ")
    head, *rows = command.show_results(folder).splitlines()
    assert head.split()[:4] == ["cell", "batch", "policy", "budget"]
    assert len(rows) == 8
    one = command.show_results(folder, rows[0].split()[0])
    assert "policy: keep_all" in one
    assert "wall_s: " in one
    assert json.loads(command.show_results(folder, rows[0].split()[0], as_json=True))["row"]["status"] == "ok"


def test_an_unknown_cell_or_folder_is_one_line(folder, tmp_path):
    for use in (lambda: command.show_results(folder, "zz"), lambda: command.list_results(str(tmp_path / "none"))):
        with pytest.raises(TiersimError) as caught:
            use()
        assert "\n" not in str(caught.value)


def test_a_csv_is_the_whole_table(folder, tmp_path):
    (path,) = command.export_results(folder, tmp_path / "t.csv")
    head, *rows = path.read_text().splitlines()
    assert len(rows) == 8
    assert head.startswith("cell,model,batch,sequence,precision,profile,policy,budget,seed,status,fits,error,fidelity,")
    assert "wall_s" not in head
    (path,) = command.export_results(folder, tmp_path / "u.csv", timing=True)
    assert "wall_s" in path.read_text().splitlines()[0]


def test_parquet_holds_what_the_csv_does(folder, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'tiersim[parquet]'")
    csv, parquet = command.export_results(folder, tmp_path / "t.csv", parquet=tmp_path / "t.parquet")
    table = pd.read_parquet(parquet)
    assert list(table.columns) == csv.read_text().splitlines()[0].split(",")
    assert table.astype(str).equals(frame(Store(folder).rows()).astype(str))
    (again,) = command.export_results(folder, parquet=tmp_path / "u.parquet")
    assert again.read_bytes() == parquet.read_bytes()


def test_parquet_without_pyarrow_is_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TiersimError, match=r"^Parquet needs pyarrow: pip install 'tiersim\[parquet\]'$"):
        command.export_results(folder, parquet=tmp_path / "t.parquet")
    assert not (tmp_path / "t.parquet").exists()


def test_an_export_to_nowhere_says_what_is_missing(folder):
    with pytest.raises(TiersimError, match="--csv FILE, --parquet FILE"):
        command.export_results(folder)


def test_a_query_prints_a_table(folder):
    text = command.query_results(folder, "SELECT batch, COUNT(*) AS n FROM cells GROUP BY batch")
    assert text.splitlines() == ["batch  n", "1      4", "2      4"]


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_the_time_left_reads_as_people_say_it(seconds, text):
    assert command.clock_text(seconds) == text


def tiersim(*words, monkeypatch, capsys):
    """(exit status, standard output, standard error) of a command, run in this process."""
    from sim import cli

    monkeypatch.setattr(sys, "argv", ["tiersim", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slurm", "queue"], "--slurm 'queue': expected NAME=VALUE, as in queue=debug"),
        (["--slurm", "queue=x"], "slurm: goes with dask 'slurm'"),
        (["--jobs", "0"], "jobs: value 0: expected at least 1"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_and_status_2(
    study_file, tmp_path, monkeypatch, capsys, words, message
):
    code, out, err = tiersim(
        "sweep", study_file(), "-o", str(tmp_path / "out"), *words, monkeypatch=monkeypatch, capsys=capsys
    )
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_commands_work_together(study_file, tmp_path, monkeypatch, capsys):
    def run(*words):
        return tiersim(*words, monkeypatch=monkeypatch, capsys=capsys)

    out, csv = str(tmp_path / "out"), str(tmp_path / "t.csv")
    assert run("sweep", study_file(time_limit="60 s"), "-o", out, "--jobs", "1")[0] == 0
    assert run("results", "list", out)[1].startswith(f"{out}: 8 cells: ")
    assert run("results", "export", out, "--csv", csv) == (0, f"{csv}\n", "")
    assert run("results", "query", out, "SELECT COUNT(*) AS n FROM cells")[1].split() == ["n", "8"]
    assert run("results", "export", out)[0] == 2
