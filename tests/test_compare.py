"""Comparisons: in several processes as in one, kept when interrupted, state that is too large said at once and once."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from sim import compare, load_policy, load_profile
from sim.analysis.peak_memory import home_peak
from sim.commands.progress import progress_line, told
from sim.comparison import Interrupted
from sim.errors import PolicyError, TiersimError, UnitError
from sim.experiment import reference_run, simulate
from sim.floors import state_in
from sim.outputs import write_comparison
from sim.parallel import BENCH, Bench, Request, answers
from sim.plan import Plan
from sim.policies.base import Policy
from sim.report.cells import key_lines, ordered, standings, state_lines
from sim.report.table import comparison_text
from sim.rows import Setting
from sim.sweeps.pool import Local
from sim.trace.graph import Trace
from tests.test_cli import tiersim
from workloads import synthetic, transformer

PLATFORM = load_profile("a100_40_pcie")
TINY = {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 512}
TRACE = transformer(TINY, batch=1, sequence=16)
PEAK = home_peak(reference_run(TRACE, PLATFORM))
STATE = state_in(reference_run(TRACE, PLATFORM))[0]
BELOW = STATE.placed_bytes * 4 // 5
"""Less than weights and optimizer state take, but enough where they are on the host."""
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ASKED = [
    *("keep_all", "chen(method=sqrt)", "dtr", "capuchin", "zero_offload", "zero_offload + full_recompute"),
    *(("every_k", {"k": 3}), load_policy("swap_all"), "twremat"),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The options of a command that choose this trace."""
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return ["--profile", "a100_40_pcie", "--model", str(path), "--seq", "16", "--precision", "fp32"]


@dataclass(frozen=True, kw_only=True)
class Mine(Policy):
    """Keeps everything."""

    def plan(self, problem):
        return Plan(problem.trace)


def plain(found):
    """Everything of a comparison but how long planning took."""
    rows = [{key: value for key, value in row.items() if key != "plan_s"} for row in found.rows]
    logs = {name: result.log.content_hash for name, result in (*found.results.items(), *found.attempts.items())}
    figures = {name: result.summary() for name, result in found.results.items()}
    return json.dumps([rows, logs, figures, dict(found.left_out)], default=list)


# ---- several processes -------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [BELOW, (STATE.bytes + PEAK) // 2])
def test_two_processes_give_the_same_bytes_as_one(budget):
    one = compare(TRACE, PLATFORM, ASKED, budget=budget)
    two = compare(TRACE, PLATFORM, ASKED, budget=budget, jobs=2)
    assert not two.notes
    assert plain(two) == plain(one)
    assert {row["fits"] for row in one.rows} == {True, False}
    assert bool(one.attempts) == (budget > BELOW)  # below, all are refused before they run
    assert two.attempts.keys() == one.attempts.keys() <= {row["policy"] for row in one.rows if row["fits"] is False}
    for name, result in two.results.items():
        assert result.policy == one.results[name].policy
        assert result.log.trace is TRACE or result.plan.trace is result.log.trace  # shared, not copied
        assert result.reference().makespan_ns == one.results[name].reference().makespan_ns


def test_views_are_the_same_wherever_they_are_made(tmp_path):
    budget, folders = (STATE.bytes + PEAK) // 2, []
    for jobs in (1, 2):
        found = compare(TRACE, PLATFORM, ASKED, budget=budget, jobs=jobs, views=True)
        assert found.views.keys() == ({*found.results, *found.attempts} if jobs > 1 else set())
        folders.append(tmp_path / str(jobs))
        write_comparison(found, folders[-1], about={}, text="")
    one, two = ({path.name: path.read_bytes() for path in (each / "views").iterdir()} for each in folders)
    assert len(one) == len(found.views) > 2
    assert two == one
    assert compare(TRACE, PLATFORM, ["keep_all"], jobs=2).views == {}


def test_a_policy_that_another_process_cannot_load_runs_in_this_one_and_the_comparison_says_so():
    local = dataclass(frozen=True, kw_only=True)(type("Local", (Mine,), {"__module__": "__main__"}))
    found = compare(TRACE, PLATFORM, ["keep_all", local(), "chen"], jobs=2)
    assert [row["fits"] for row in found.rows] == [True, True, True]
    assert [row["policy"] for row in found.rows] == ["keep_all", "Local", "chen"]
    (note,) = found.notes
    assert note.startswith("Local: ran in this process: ")


def test_a_policy_of_a_file_is_the_one_that_was_loaded(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from sim import Plan, Policy\nclass Own(Policy):\n    def plan(self, p):\n        return Plan(p.trace)\n"
    )
    load_policy(str(path))
    path.write_text("raise SystemExit('changed meanwhile')")
    found = compare(TRACE, PLATFORM, [str(path), "keep_all"], jobs=2)
    assert [row["fits"] for row in found.rows] == [True, True]
    assert not found.notes


KILLER = '''
import os, signal
from sim import Policy

class Killer(Policy):
    """Ends its process."""

    def plan(self, problem):
        os.kill(os.getpid(), signal.SIGKILL)
'''


def test_a_policy_that_kills_its_process_is_one_row(tmp_path):
    path = tmp_path / "killer.py"
    path.write_text(KILLER)
    found = compare(TRACE, PLATFORM, [f"{path}:Killer", "keep_all"], jobs=2)
    assert [row["fits"] for row in found.rows] == [None, True]
    assert "died each time" in found.rows[0]["error"]


def test_a_trace_travels_with_nothing_that_was_computed_from_it_and_is_the_same():
    trace = transformer(TINY, batch=1, sequence=16)
    compare(trace, PLATFORM, ["dtr", "chen"])
    copy = pickle.loads(pickle.dumps(trace))
    assert isinstance(copy, Trace)
    assert copy == trace
    assert copy.meta == trace.meta
    assert not copy.op_columns.flops.flags.writeable
    assert len(pickle.dumps(trace)) < 1.1 * len(pickle.dumps(transformer(TINY, batch=1, sequence=16)))


def test_jobs_below_one_are_refused():
    with pytest.raises(TiersimError, match="jobs: value 0"):
        compare(TRACE, PLATFORM, "keep_all", jobs=0)


def test_what_differs_in_another_process_would_be_seen(monkeypatch):
    """A planted fault: an answer of the process for another policy than the one asked for."""
    setting = Setting(TRACE, PLATFORM)
    requests = [Request(name, name, {}, load_policy(name)) for name in ("keep_all", "full_recompute")]
    found = {i: answer for i, answer, _ in answers(requests, setting, Local(1, bench=BENCH))}
    serial = compare(TRACE, PLATFORM, ["keep_all", "full_recompute"])
    for i, row in enumerate(serial.rows):
        assert found[i].row["makespan_ns"] == row["makespan_ns"]
        assert found[1 - i].row["makespan_ns"] != row["makespan_ns"]
    assert Bench().run({"id": "0", "folder": "/nowhere"})["why"].startswith("FileNotFoundError")


def test_other_processes_compute_the_bound_too(monkeypatch):
    """What this process computes at the end, alone, another has computed beside the policies."""
    names, trace = ["full_recompute", "twremat"], transformer(TINY, batch=16, sequence=64)
    budget = home_peak(reference_run(trace, PLATFORM)) * 3 // 4
    serial = compare(trace, PLATFORM, names, budget=budget)
    assert serial.bound.makespan_ns > serial.bound.ops_ns  # memory counts
    monkeypatch.setattr("sim.comparison.lower_bound", lambda *_: pytest.fail("computed here"))
    found = compare(trace, PLATFORM, names, budget=budget, jobs=2)
    assert (found.bound.makespan_ns, found.bound.among) == (serial.bound.makespan_ns, serial.bound.among)
    assert found.bound.trace is trace
    assert [row["above_bound"] for row in found.rows] == [row["above_bound"] for row in serial.rows]
    with pytest.raises(pytest.fail.Exception):
        compare(trace, PLATFORM, names, budget=budget)


# ---- interrupted -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stops(Policy):
    """A person presses Ctrl-C while it plans."""

    def plan(self, problem):
        raise KeyboardInterrupt


def test_an_interrupted_comparison_keeps_its_rows():
    with pytest.raises(Interrupted) as stopped:
        compare(TRACE, PLATFORM, ["keep_all", "chen", Stops(), "dtr"])
    found = stopped.value.comparison
    assert [row["policy"] for row in found.rows] == ["keep_all", "chen"]
    assert set(found.results) == {"keep_all", "chen"}
    assert set(found.left_out) == {"Stops", "dtr"}


WAITS = '''
import time
from pathlib import Path
from sim import Policy

class Waits(Policy):
    """Plans for longer than anybody waits, and says when it began."""

    def plan(self, problem):
        Path(BEGAN).touch()
        while True:
            time.sleep(0.01)
'''


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_shows_and_saves_the_rows_so_far(jobs, job, tmp_path):
    path = tmp_path / "waits.py"
    path.write_text(f"BEGAN = {str(path.with_suffix('.began'))!r}\n{WAITS}")
    words = ["compare", *job, "--policies", f"keep_all,chen,{path}:Waits"]
    words += ["--jobs", str(jobs), "-o", str(tmp_path / "out"), "--json"]
    running = subprocess.Popen(
        [sys.executable, "-m", "sim", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while not path.with_suffix(".began").exists():
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.05)
        if jobs > 1:  # the others have ended, or are about to
            time.sleep(1)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=200)
    finally:
        running.kill()
    assert running.returncode == 130
    rows = json.loads(out)
    assert {row["policy"] for row in rows} <= {"keep_all", "chen"}
    assert jobs == 2 or len(rows) == 2
    saved = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert all(row.pop("measured_error") == saved["measured_error"] for row in rows)
    assert saved["rows"] == rows
    assert f"{path}:Waits" in saved["left_out"]
    assert err == f"tiersim: stopped: {len(rows)} rows so far\n"


def test_ctrl_c_in_a_command_says_that_it_stopped(job, tmp_path):
    path = tmp_path / "waits.py"
    path.write_text(f"BEGAN = {str(path.with_suffix('.began'))!r}\n{WAITS}")
    words = [sys.executable, "-m", "sim", "run", *job, "--policy", f"{path}:Waits"]
    running = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not path.with_suffix(".began").exists():
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=200)
    finally:
        running.kill()
    assert (running.returncode, out, err) == (130, "", "tiersim: stopped\n")


# ---- state that is too large -------------------------------------------------------------------


def test_state_that_alone_is_too_large_is_said_before_any_policy_runs_and_once():
    order = []
    compare(
        TRACE,
        PLATFORM,
        ["full_recompute", "zero_offload", "keep_all"],
        budget=BELOW,
        on_progress=lambda progress: order.append((progress.label, progress.row.get("refusal"), progress.left_s)),
    )
    assert [entry[:2] for entry in order[:2]] == [("full_recompute", "state"), ("keep_all", "state")]
    assert order[0][2] is None  # nothing has run that the time left could be told from
    found = compare(TRACE, PLATFORM, ["full_recompute", "zero_offload", "keep_all"], budget=BELOW)
    (line,) = state_lines(found.rows)
    assert "optimizer state alone" in line
    assert ": full_recompute, keep_all leave them there and are not run" in line
    assert comparison_text(found.rows).startswith(line)
    assert comparison_text(found.rows).count("optimizer state alone") == 1
    assert found.rows[1]["fits"]  # the state that it moves is not held against it


class Never(Policy):
    """Must not be asked."""

    def plan(self, problem):
        raise AssertionError("planned though its state cannot fit")


def test_a_policy_that_is_refused_for_its_state_is_not_asked_to_plan():
    assert compare(TRACE, PLATFORM, [Never()], budget=BELOW).rows[0]["refusal"] == "state"
    assert "planned though" in compare(TRACE, PLATFORM, [Never()]).rows[0]["error"]


# ---- ties --------------------------------------------------------------------------------------


def test_equal_policies_are_as_fast_and_the_simplest_of_them_comes_first():
    found = compare(TRACE, PLATFORM, ["dtr", "keep_all", "full_recompute"])
    assert found.rows[0]["makespan_ns"] == found.rows[1]["makespan_ns"]
    assert found.fastest == "keep_all"
    assert [str(standings(found.rows)[name]) for name in ("dtr", "keep_all")] == ["as fast", "fastest"]
    rows = [
        {"policy": name, "fits": True, "makespan_ns": ns, "peak_bytes": 5, "recompute_ns": again}
        for name, ns, again in (("a", 100, 7), ("b", 100, 0), ("c", 101, 0))
    ]
    assert [row["policy"] for row in ordered(rows)] == ["b", "a", "c"]
    assert any("from b and a, the fastest" in line for line in key_lines(rows))


# ---- progress ----------------------------------------------------------------------------------


def test_progress_counts_and_says_what_is_left(monkeypatch):
    seen = []
    compare(TRACE, PLATFORM, ["keep_all", "chen", "dtr"], on_progress=seen.append)
    assert [(each.done, each.total) for each in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[0].left_s > 0
    assert progress_line(seen[0]).startswith("1 of 3  keep_all: ")
    assert progress_line(seen[0]).endswith(" left")
    assert "left" not in progress_line(seen[2])
    lines = []
    monkeypatch.setattr("sim.commands.progress.say", lines.append)
    tell, refused = told(), {"refusal": "state", "error": "weights alone take 9 GB", "fits": False}
    for i in range(3):
        tell(SimpleNamespace(done=i, total=9, label="x", row=refused, left_s=None))
    assert lines == ["weights alone take 9 GB: policies that leave these in place are not run"]


# ---- figures and floors ------------------------------------------------------------------------


def test_figures_are_drawn_on_request_alone(job, capsys, tmp_path):
    words = ["compare", *job, "--policies", "keep_all,chen", "--json"]
    assert tiersim(*words, "-o", tmp_path / "plain", capsys=capsys)[0] == 0
    assert not list((tmp_path / "plain").glob("*.png"))
    assert tiersim(*words, "-o", tmp_path / "drawn", "--figures", capsys=capsys)[0] == 0
    drawn = {path.name for path in (tmp_path / "drawn").glob("*.png")}
    assert drawn == {"comparison.png", "memory.png", "lanes.png"}
    assert tiersim(*words, "-o", tmp_path / "drawn", "--figures", "svg", capsys=capsys)[0] == 0
    assert (tmp_path / "drawn" / "comparison.svg").read_text().startswith("<?xml")
    code, _, err = tiersim(*words, "-o", tmp_path / "drawn", "--figures", "gif", capsys=capsys)
    assert (code, err) == (2, "tiersim: Invalid value: --figures 'gif': expected png, svg, pdf; nearest: png\n")
    code, _, err = tiersim(*words, "--figures", capsys=capsys)
    assert (code, err) == (2, "tiersim: Invalid value: --figures: name their folder: -o DIR\n")


def test_figures_of_the_fastest_are_titled_as_its_row():
    table = compare(synthetic.uniform_chain(4), "a100_40_pcie", ["keep_all", "swap_all"])
    for name, result in table.results.items():
        assert result.plot_memory().get_suptitle() == result.name == name


def test_floors_that_take_a_search_are_found_on_request(job, capsys):
    trace = synthetic.uniform_chain(6)

    def floors(**how):
        return [row["floor_bytes"] for row in compare(trace, PLATFORM, ["keep_all", "dtr"], budget=2, **how).rows]

    assert floors() == [6, None]
    assert floors(find_floor=True) == [6, 3]
    assert floors(find_floor=False) == [None, None]
    words = ["compare", *job, "--policies", "keep_all,dtr", "--budget", f"{STATE.bytes} B"]
    assert "smallest budget not searched: dtr: --floors" in tiersim(*words, capsys=capsys)[1]
    assert "not searched" not in tiersim(*words, "--floors", capsys=capsys)[1]


def test_a_name_may_have_its_parameters():
    row = compare(TRACE, PLATFORM, "chen(method=sqrt)").rows[0]
    assert (row["policy"], row["fits"]) == ("chen(method=sqrt)", True)
    with pytest.raises(PolicyError, match="no parameter 'methd'"):
        compare(TRACE, PLATFORM, "chen(methd=sqrt)")


@pytest.mark.parametrize(("profile", "saves"), [("mt3000_cluster", True), ("a100_40_pcie", False)])
def test_what_takes_less_time_than_every_op_once_says_what_it_saves(profile, saves):
    """The CPU of MT-3000 updates in place and in one kernel; behind PCIe copies take longer than that saves."""
    trace = transformer("gpt2", batch=1, sequence=64, precision="amp_fp16")
    compared = compare(trace, profile, ["keep_all", "zero_offload"], budget="1000 TB")
    said = [line for line in compared.bounds if line.startswith("zero_offload: declared saving: fusion")]
    assert (compared.results["zero_offload"].log.end < compared.results["keep_all"].log.end) == saves == bool(said)


def test_a_budget_may_be_a_part_of_the_unconstrained_peak():
    trace = transformer("gpt2", batch=1, sequence=64, precision="amp_bf16")
    peak = simulate(trace, "a100_40_pcie").summary()["peak_bytes"]
    assert simulate(trace, "a100_40_pcie", budget="120%").platform.budget == int(1.2 * peak)
    found = compare(trace, "a100_40_pcie", ["keep_all"], budget="120%")
    assert found.results["keep_all"].platform.budget == int(1.2 * peak)
    with pytest.raises(UnitError):
        simulate(trace, "a100_40_pcie", budget="90 %%")
