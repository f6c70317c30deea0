"""The command line: what it prints, its exit status, and one line for each mistake."""

import json
import os
import subprocess
import sys
import time

import pytest

from sim import cli
from sim.commands.options import command_with
from tests.clocks import least

JOB = ["--model", "gpt2", "--batch", "1", "--seq", "128"]


def tiersim(*words, capsys):
    """(exit status, standard output, standard error) of a command, run in this process."""
    old, sys.argv = sys.argv, ["tiersim", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        sys.argv = old
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_run_prints_the_summary_as_json_and_nothing_else(capsys):
    code, out, err = tiersim("run", "--profile", "a100_40_pcie", *JOB, "--json", capsys=capsys)
    assert code == 0
    assert err == ""
    record = json.loads(out)
    needed = {"peak_bytes", "makespan_ns", "compute_ns", "recompute_ns", "stall_ns", "moved_bytes", "overlap", "fits"}
    needed |= {"samples_per_s", "tokens_per_s", "mfu", "saved_fraction", "overhead"}
    assert needed <= record.keys()
    assert record["fits"] is True
    assert record["stall_ns"] == {} or all(isinstance(ns, int) for ns in record["stall_ns"].values())


def test_compare_gives_a_row_for_each_policy_that_was_named(capsys):
    words = ["compare", "--profile", "mt3000_survey", *JOB, "--policies", "keep_all,full_recompute", "--json"]
    code, out, _ = tiersim(*words, capsys=capsys)
    rows = json.loads(out)
    assert code == 0
    assert [row["policy"] for row in rows] == ["keep_all", "full_recompute"]
    assert rows[1]["recompute_ns"] > rows[0]["recompute_ns"] == 0


def test_json_says_what_the_table_says_of_the_error(capsys, tmp_path):
    job = ("--profile", "a100_40_pcie", *JOB, "--policies", "keep_all,lru_tiering,full_recompute")
    rows = json.loads(tiersim("compare", *job, "--json", "-o", str(tmp_path), capsys=capsys)[1])
    text = (tmp_path / "comparison.txt").read_text(encoding="utf-8")
    fastest = min(row["makespan_ns"] for row in rows)
    assert [row["over_fastest"] for row in rows] == [row["makespan_ns"] / fastest - 1 for row in rows]
    error = rows[0]["measured_error"]["policies"]
    assert f"two policies' times {100 * error['bar']:.1f} % (the worst of n = {error['rows']} pairs" in text
    assert f"on {' and '.join(error['measured_on'])} alone" in text
    assert not rows[2]["indistinguishable"]
    assert rows[2]["over_fastest"] > error["bar"]
    saved = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert saved["measured_error"] == rows[0]["measured_error"]
    assert [row["indistinguishable"] for row in saved["rows"]] == [row["indistinguishable"] for row in rows]
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["measured_error"] == saved["measured_error"]


def test_an_infeasible_row_is_an_answer_and_names_its_floor(capsys):
    words = ["compare", "--profile", "mt3000_survey", *JOB, "--policies", "keep_all", "--budget", "1.5 GB", "--json"]
    code, out, _ = tiersim(*words, capsys=capsys)
    (row,) = json.loads(out)
    assert code == 0
    assert row["fits"] is False
    assert row["floor_bytes"] > 1_500_000_000
    assert row["holders"]


def test_run_of_what_does_not_fit_exits_1_with_one_line(capsys):
    code, out, err = tiersim("run", "--profile", "mt3000_survey", *JOB, "--budget", "1.5 GB", capsys=capsys)
    assert code == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "largest holders" in err
    assert "; what fits: tiersim advise --profile mt3000_survey " in err
    assert " --batch 1 " in err


def test_files_are_written_to_the_folder(capsys, tmp_path):
    few = ["--policies", "keep_all,full_recompute,swap_all,dtr"]
    words = ["compare", "--profile", "a100_40_pcie", *JOB, *few, "-o", tmp_path / "out", "--figures"]
    code, *_ = tiersim(*words, capsys=capsys)
    assert code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"comparison.csv", "comparison.json", "comparison.png", "memory.png", "summary.json"} <= names
    assert any(name.startswith("timeline.") for name in names)
    assert not any(name.startswith(".") for name in names)


def test_a_policy_from_a_file_works_wherever_a_name_does(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = tiersim("policies", "--new", "mine", capsys=capsys)
    assert code == 0
    assert out.split() == ["mine.py", "test_mine.py"]
    words = ["run", "--profile", "a100_40_pcie", *JOB, "--policy", "mine.py:Mine", "-p", "share=0.9", "--json"]
    code, out, _ = tiersim(*words, capsys=capsys)
    assert code == 0
    assert json.loads(out)["recompute_ns"] > 0


def test_a_trace_is_built_shown_and_run_from_its_file(capsys, tmp_path):
    path = tmp_path / "t.jsonl.gz"
    code, *_ = tiersim("trace", "build", *JOB, "-o", path, capsys=capsys)
    assert code == 0
    code, out, _ = tiersim("trace", "show", path, "--json", capsys=capsys)
    assert json.loads(out)["meta"]["batch"] == 1
    code, out, _ = tiersim("run", "--profile", "a100_40_pcie", "--trace", path, "--json", capsys=capsys)
    assert code == 0
    code, direct, _ = tiersim("run", "--profile", "a100_40_pcie", *JOB, "--json", capsys=capsys)
    assert json.loads(out) == json.loads(direct)


DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workloads", "data")


@pytest.mark.parametrize("name", sorted(os.listdir(DATA)))
def test_a_trace_of_another_tool_is_imported_run_and_exported(name, capsys, tmp_path):
    path, exported = tmp_path / "imported.jsonl.gz", tmp_path / "run"
    code, *_ = tiersim("trace", "import", os.path.join(DATA, name), "-o", path, capsys=capsys)
    assert code == 0
    code, out, _ = tiersim("run", "--profile", "a100_40_pcie", "--trace", path, "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["peak_bytes"] > 0
    code, *_ = tiersim("trace", "export", path, "--profile", "a100_40_pcie", "-o", exported, capsys=capsys)
    assert code == 0
    assert (tmp_path / "run.0.et").stat().st_size > 0


def test_a_file_that_is_no_trace_is_refused_and_nothing_is_written(capsys, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('{"hello": [1, 2')
    code, _, err = tiersim("trace", "import", bad, "-o", tmp_path / "out.jsonl", capsys=capsys)
    assert code == 2
    assert err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_set_changes_one_figure(capsys):
    words = ["run", "--profile", "mt3000_survey", *JOB, "--policy", "save_on_cpu", "--json"]
    _, slow, _ = tiersim(*words, "--set", "links.d2h.rate=4 GB/s", capsys=capsys)
    _, fast, _ = tiersim(*words, capsys=capsys)
    assert json.loads(slow)["makespan_ns"] > json.loads(fast)["makespan_ns"]


@pytest.mark.parametrize("command", ["profiles", "policies", "models"])
def test_listings_name_everything_and_are_json_on_request(command, capsys):
    code, out, _ = tiersim(command, capsys=capsys)
    assert code == 0
    code, as_json, _ = tiersim(command, "--json", capsys=capsys)
    for record in json.loads(as_json):
        assert record["name"] in out


def test_a_profile_page_gives_source_and_standing_of_every_figure(capsys):
    _, page, _ = tiersim("profiles", "mt3000_survey", capsys=capsys)
    assert "assumed" in page
    assert "as the survey states" in page
    _, out, _ = tiersim("profiles", "mt3000_survey", "--json", capsys=capsys)
    for figure in json.loads(out)["figures"]:
        assert figure["source"], figure
        assert figure["standing"], figure


def test_a_profile_printed_as_toml_loads_again(capsys, tmp_path):
    from sim import load_profile

    _, out, _ = tiersim("profiles", "ascend_910b", "--toml", capsys=capsys)
    path = tmp_path / "ascend_910b.toml"
    path.write_text(out)
    assert load_profile(str(path)).content_hash == load_profile("ascend_910b").content_hash


MISTAKES = {
    "unknown profile": (["run", "--profile", "mt3000", *JOB], "mt3000_survey"),
    "unknown model": (["run", "--profile", "h100", "--model", "gtp2"], "gpt2"),
    "unknown policy": (["run", "--profile", "h100", *JOB, "--policy", "dtrr"], "'dtr'"),
    "unknown policy in a list": (["compare", "--profile", "h100", *JOB, "--policies", "keep_al"], "keep_all"),
    "unknown parameter": (["run", "--profile", "h100", *JOB, "--policy", "dtr", "-p", "heuristc=lru"], "heuristic"),
    "parameter of another type": (["run", "--profile", "h100", *JOB, "--policy", "every_k", "-p", "k=two"], "int"),
    "parameter of no bool": (["run", "--profile", "h100", *JOB, "--policy", "dtr", "-p", "by_size=yes"], "bool"),
    "no examples": (["check", "keep_all", "--examples", "0"], "examples"),
    "unknown precision": (["run", "--profile", "h100", *JOB, "--precision", "amp_bf61"], "amp_bf16"),
    "unknown option": (["run", "--profil", "h100"], "--profile"),
    "unknown command": (["rum"], "run"),
    "bare budget": (["run", "--profile", "h100", *JOB, "--budget", "7"], "7"),
    "wrong unit": (["run", "--profile", "h100", *JOB, "--budget", "7 Gb"], "GB"),
    "negative budget": (["run", "--profile", "h100", *JOB, "--budget=-7 GB"], "-7 GB"),
    "negative batch": (["run", "--profile", "h100", "--model", "gpt2", "--batch", "-1"], "batch"),
    "no workload": (["run", "--profile", "h100"], "--model"),
    "wrong figure": (["run", "--profile", "h100", *JOB, "--set", "tiers.hbm.bandwith=1 GB/s"], "bandwidth"),
    "figure without a value": (["run", "--profile", "h100", *JOB, "--set", "tiers.hbm.bandwidth"], "PATH=VALUE"),
    "missing trace": (["run", "--profile", "h100", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
    "missing policy file": (["run", "--profile", "h100", *JOB, "--policy", "nowhere.py:X"], "nowhere.py"),
    "unknown profile to show": (["profiles", "h1000"], "h100"),
    "bad name for a policy": (["policies", "--new", "my policy"], "my policy"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_that_names_it_and_status_2(mistake, capsys):
    words, hint = MISTAKES[mistake]
    code, out, err = tiersim(*words, capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.startswith("tiersim: ")
    assert err.count("\n") == 1, err
    assert hint in err


def test_a_malformed_config_is_named(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", ')
    code, _, err = tiersim("run", "--profile", "h100", "--model", path, capsys=capsys)
    assert code == 2
    assert "config.json" in err
    path.write_text('{"model_type": "llama", "hidden_size": 64}')
    code, _, err = tiersim("run", "--profile", "h100", "--model", path, capsys=capsys)
    assert code == 2
    assert "is missing" in err


def test_every_mistake_in_a_profile_gets_its_line(capsys, tmp_path):
    from sim.hardware.profile import profile_text

    text = profile_text("h100").replace('"80 GB"', '"80 Gb"', 1).replace("[links", "[linkz", 1)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    code, _, err = tiersim("run", "--profile", path, *JOB, capsys=capsys)
    assert code == 2
    assert all(line.startswith("tiersim: ") for line in err.splitlines())
    assert "mine.toml" in err


def test_a_policy_that_asks_for_the_impossible_exits_1(capsys, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from sim import Move, Plan, Policy\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Broken(Policy):\n"
        "    moves = True\n"
        "    def plan(self, problem):\n"
        "        return Plan(problem.trace, (Move(0, 'hots', before=0),))\n"
    )
    code, _, err = tiersim("run", "--profile", "h100", *JOB, "--policy", f"{path}:Broken", capsys=capsys)
    assert code == 1
    assert "'host'" in err
    assert err.count("\n") == 1


def test_a_fault_of_a_policy_is_one_line_and_one_row(capsys, tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text(
        "from sim import Policy\nclass Faulty(Policy):\n    def plan(self, problem):\n        return 1 / 0\n"
    )
    code, out, err = tiersim("run", "--profile", "h100", *JOB, "--policy", path, capsys=capsys)
    assert (code, out) == (1, "")
    assert err == f"tiersim: policy '{path}': faulty.py line 4: ZeroDivisionError: division by zero\n"
    words = ["compare", "--profile", "h100", *JOB, "--policies", f"keep_all,{path}", "--json"]
    code, out, _ = tiersim(*words, capsys=capsys)
    assert code == 1
    assert [row["fits"] for row in json.loads(out)] == [True, None]


def test_a_folder_that_cannot_be_written_is_found_before_the_work(capsys, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    code, out, err = tiersim("run", "--profile", "h100", *JOB, "-o", blocker / "out", capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert str(blocker) in err


@pytest.mark.alone
def test_help_starts_in_three_tenths_of_a_second():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    def took(*options):
        began = time.perf_counter()
        subprocess.run([sys.executable, *options], capture_output=True, cwd=root, check=True)
        return time.perf_counter() - began

    # 0.3 s on a quiet machine, where a bare interpreter takes about 0.02 s
    limit = max(0.3, 15 * min(took("-c", "pass") for _ in range(5)))
    assert least(limit, lambda: took("-m", "sim", "--help")) < limit


def test_help_imports_nothing_heavy():
    code = "import sys, sim.cli; print([m for m in ('numpy', 'pandas', 'matplotlib', 'scipy') if m in sys.modules])"
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert run.stdout.strip() == "[]"


# ---- options that would be passed over, folders that hold something else, budgets ------------------


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    from sim.trace.io import save
    from workloads import transformer

    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    save(transformer("gpt2", batch=1, sequence=16, precision="amp_bf16"), path)
    return path


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("--model", "gpt2"), ("--batch", "1"), ("--seq", "64"), ("--precision", "fp32"), ("--dropout", "0")],
)
def test_an_option_that_a_trace_file_would_pass_over_is_refused(command, option, value, trace_file, capsys):
    words = [command, "--profile", "h100", "--trace", trace_file, option, value]
    code, out, err = tiersim(*words, capsys=capsys)
    assert (code, out) == (2, "")
    assert f"{option}:" in err
    assert err.count("\n") == 1


def test_a_run_of_a_trace_file_is_reported_with_a_command_that_works(trace_file, capsys, tmp_path):
    words = ["--profile", "h100", "--trace", trace_file]
    assert tiersim("run", *words, "-o", tmp_path / "r", capsys=capsys)[0] == 0
    asked = json.loads((tmp_path / "r" / "summary.json").read_text())["asked"]
    assert {"batch", "seq", "precision"}.isdisjoint(asked)
    assert tiersim("report", tmp_path / "r", "-o", tmp_path / "r.html", capsys=capsys)[0] == 0


def test_a_run_with_something_turned_off_is_reported(capsys, tmp_path):
    words = ["--profile", "h100", "--model", "gpt2", "--batch", "2", "--seq", "8", "--dp", "2", "--no-barrier"]
    assert tiersim("run", *words, "-o", tmp_path / "r", capsys=capsys)[0] == 0
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["asked"]["barrier"] is False
    assert tiersim("report", tmp_path / "r", "-o", tmp_path / "r.html", capsys=capsys)[0] == 0
    assert command_with("run", {"barrier": False, "gradient_buffer": True, "dp": 2}) == (
        "tiersim run --no-barrier --gradient-buffer --dp 2"
    )


@pytest.mark.parametrize(
    ("command", "holds", "refused"),
    [
        ("run", ["comparison.json", "summary.json"], "comparison.json"),
        ("run", ["study.json"], "study.json"),
        ("compare", ["summary.json"], "summary.json"),
        ("compare", ["study.json"], "study.json"),
    ],
)
def test_a_folder_with_results_of_another_kind_is_left_as_it_is(command, holds, refused, trace_file, capsys, tmp_path):
    for name in holds:
        (tmp_path / name).write_text("{}")
    code, _, err = tiersim(command, "--profile", "h100", "--trace", trace_file, "-o", tmp_path, capsys=capsys)
    assert code == 2
    assert refused in err
    assert {path.name for path in tmp_path.iterdir()} == set(holds)
    assert all((tmp_path / name).read_text() == "{}" for name in holds)


def test_results_of_the_same_kind_are_written_over(trace_file, capsys, tmp_path):
    for name in ("comparison.json", "summary.json"):
        (tmp_path / name).write_text("{}")
    words = ["compare", "--profile", "h100", "--trace", trace_file, "--policies", "keep_all", "-o", tmp_path]
    assert tiersim(*words, capsys=capsys)[0] == 0
    assert json.loads((tmp_path / "comparison.json").read_text())["rows"]


@pytest.mark.parametrize("wrong", [["--profile", "nowhere"], ["--profile", "h100", "--policy", "nobody"]])
def test_a_run_that_cannot_begin_leaves_no_folder(wrong, trace_file, capsys, tmp_path):
    code, *_ = tiersim("run", *wrong, "--trace", trace_file, "-o", tmp_path / "new" / "er", capsys=capsys)
    assert code in (1, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_examples_below_one_is_refused(capsys):
    code, _, err = tiersim("check", "keep_all", "--examples", "0", capsys=capsys)
    assert code == 2
    assert "--examples" in err


def test_trace_build_makes_the_folder_and_names_the_file_that_it_cannot_write(capsys, tmp_path):
    words = ["trace", "build", "--model", "gpt2", "--seq", "16", "-o"]
    assert tiersim(*words, tmp_path / "a" / "t.jsonl", capsys=capsys)[0] == 0
    code, _, err = tiersim(*words, tmp_path / "a", capsys=capsys)
    assert code == 2
    assert err.startswith(f"tiersim: {tmp_path / 'a'}: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("largest-batch --profile h100 --model gpt2 --batch 8", "--batch: this is what largest-batch looks for"),
        (
            "smallest-budget --profile h100 --model gpt2 --budget 8GB",
            "--budget: this is what smallest-budget looks for",
        ),
        ("run --profile a100-80gb --model gpt2", "'a100_80_sxm'"),
        ("run --profile v100-32GB --model gpt2", "did you mean 'v100_32'"),
        ("compare --profile h100,h200 --model gpt2", "expected one; `tiersim sweep` compares machines"),
        ("trace build --model gpt2 --seq 16 -o x.txt", "-o x.txt: the name of a trace ends in .jsonl or .jsonl.gz"),
    ],
)
def test_what_newcomers_type_is_answered_in_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = tiersim(*words.split(), capsys=capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_fits_on_a_screen_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = tiersim("--help", capsys=capsys)
    assert code == 0
    assert "..." not in out.partition("Commands:")[2]


@pytest.mark.parametrize("group", ["trace", "results"])
def test_a_group_of_commands_alone_shows_what_it_can_do(group, capsys):
    code, out, err = tiersim(group, capsys=capsys)
    assert (code, err) == (2, "")
    assert out.startswith("Usage: ")
    assert "..." not in out.partition("Commands:")[2]


def test_missing_keys_of_a_profile_are_one_line(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('description = "x"')
    code, _, err = tiersim("profiles", path, capsys=capsys)
    assert (code, err) == (2, f"tiersim: {path}: these keys are missing: tiers, engines, fit\n")


def test_a_folder_as_a_profile_is_called_one(capsys, tmp_path):
    _, _, err = tiersim("run", "--profile", tmp_path, *JOB, capsys=capsys)
    assert "a folder" in err


def test_capitals_do_not_hide_the_name_that_was_meant(capsys):
    _, _, err = tiersim("run", "--profile", "H100", *JOB, capsys=capsys)
    assert "'h100'" in err
    _, _, err = tiersim("run", "--profile", "h100", *JOB, "--policy", "SWAP_ALL", capsys=capsys)
    assert "did you mean 'swap_all'" in err


@pytest.mark.parametrize("budget", ["0", "-1", "7e9", "0 GB", "0%", "-5%", "much"])
def test_what_is_no_budget_is_named_beside_one_that_is(budget, capsys):
    code, _, err = tiersim("run", "--profile", "h100", *JOB, f"--budget={budget}", capsys=capsys)
    assert code == 2
    assert "'--budget'" in err
    assert repr(budget) in err
    assert "'7.5 GB'" in err


def test_a_budget_in_percent_is_one_of_the_unconstrained_peak(trace_file, capsys, tmp_path):
    words = ["run", "--profile", "h100", "--trace", trace_file, "--json"]
    peak = json.loads(tiersim(*words, capsys=capsys)[1])["peak_bytes"]
    share = ["--budget", "112.5%", "-o", tmp_path / "r"]
    _, out, _ = tiersim(*words, *share, capsys=capsys)
    assert json.loads(out)["capacity_bytes"] == 9 * peak // 8
    assert tiersim("report", tmp_path / "r", "-o", tmp_path / "r.html", capsys=capsys)[0] == 0
    compared = ["compare", *words[1:], "--policies", "keep_all", "--budget", "95%"]
    (row,) = json.loads(tiersim(*compared, capsys=capsys)[1])
    assert row["fits"] is False


def test_run_as_json_that_does_not_fit_prints_the_row_of_compare(trace_file, capsys):
    words = ["--profile", "h100", "--trace", trace_file, "--budget", "90%", "--json"]
    code, out, err = tiersim("run", *words, "--policy", "keep_all", capsys=capsys)
    assert code == 1
    assert err.count("\n") == 1
    _, rows, _ = tiersim("compare", *words, "--policies", "keep_all", capsys=capsys)
    assert [json.loads(out)] == json.loads(rows)
    assert json.loads(out)["holders"]
    assert json.loads(out)["floor_bytes"] > 0


def test_models_show_their_own_count_beside_the_published_one_and_their_aliases(capsys):
    _, listed, _ = tiersim("models", capsys=capsys)
    (line,) = [line for line in listed.splitlines() if line.startswith("gpt2-small ")]
    assert "124,439,808" in line  # as released
    assert "124,000,000" in line
    assert " gpt2," in line
    _, out, _ = tiersim("models", "gpt2", "--json", capsys=capsys)
    record = json.loads(out)
    assert record["parameters"] == 124_439_808
    assert "gpt2" in record["aliases"]


def test_profiles_as_json_have_the_columns_of_the_list(capsys):
    _, out, _ = tiersim("profiles", "--json", capsys=capsys)
    (record,) = [record for record in json.loads(out) if record["name"] == "mt3000_survey"]
    assert (record["home_tier"], record["home_bytes"]) == ("zone", 8_000_000_000)
    assert record["peak"] > 0
    assert record["peak_dtype"] == "fp16"
    assert record["host_link"] == 40_000_000_000
    assert record["assumed"] == 16


@pytest.mark.parametrize(("command", "options"), [("run", 3), ("report", 1)])
def test_help_says_which_options_repeat(command, options, capsys):
    _, out, _ = tiersim(command, "--help", capsys=capsys)
    assert " ".join(out.split()).count("more than once") == options


NOISY = """
from sim import Plan, Policy


class Noisy(Policy):
    def plan(self, problem):
        print("thinking")
        return Plan(problem.trace)
"""


@pytest.mark.parametrize(
    "command",
    [["run", "--policy"], ["compare", "--no-bound", "--jobs", "1", "--policies"], ["largest-batch", "--policy"]],
)
def test_what_a_policy_prints_is_not_in_the_json(tmp_path, capsys, command):
    (tmp_path / "noisy.py").write_text(NOISY)
    words = [command[0], "--profile", "a100_40_pcie", *(JOB if command[0] != "largest-batch" else JOB[:2])]
    budget = ["--budget", "4GB"] if command[0] == "largest-batch" else []
    policy = f"{tmp_path / 'noisy.py'}:Noisy"
    code, out, err = tiersim(*words, *budget, *command[1:], policy, "--json", capsys=capsys)
    assert code == 0
    json.loads(out)
    assert "thinking" in err or command[0] == "compare"  # which runs it in a process of its own


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_folder_that_cannot_be_written_loses_no_figure(tmp_path, capsys, monkeypatch, command):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "view.json")

    monkeypatch.setattr("sim.outputs.write_run", full)
    monkeypatch.setattr("sim.outputs.write_comparison", full)
    chosen = ["--policy", "keep_all"] if command == "run" else ["--policies", "keep_all", "--no-bound"]
    folder = str(tmp_path / "out")
    code, out, err = tiersim(command, "--profile", "a100_40_pcie", *JOB, *chosen, "-o", folder, capsys=capsys)
    assert code
    assert "keep_all" in out
    assert "No space left" in err
