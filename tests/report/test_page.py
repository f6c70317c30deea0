"""The report page as a file: it needs nothing outside, runs nothing of a user's, and says what the analyses say."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest

from sim import OutOfMemory, TraceBuilder, cli, compare, load_profile, simulate
from sim.analysis import peak_memory, roles_over_time, stalls_by_op, summarize, traffic
from sim.pages import run_view
from sim.report.colours import ROLE_COLOURS, WHY_COLOURS
from sim.report.error_bars import error_bar, error_lines
from sim.report.footer import Footer, footer_lines
from sim.report.page import RunView, TableView, write_run_page, write_table_page
from sim.report.page.document import SCRIPTS, pack
from sim.report.page.table import table_data
from sim.report.table import summary_lines
from sim.report.tracks import Scene
from sim.trace.tensor import ROLES
from workloads import transformer
from workloads.capture import with_facts

HOSTILE = "</script><img src=x onerror='window.pwned=1'><!-- \"&\u2028"
JOB = ["--model", "gpt2", "--batch", "4", "--seq", "256"]


class Page(HTMLParser):
    """What a browser would make of the file: elements with attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside in ("script", "style", "title"):
            self.texts.append((self.inside, self.elements[-1][1], data))

    @property
    def parts(self):
        return {
            about["data-part"]: json.loads(zlib.decompress(base64.b64decode(data)))
            for tag, about, data in self.texts
            if tag == "script" and "data-part" in about
        }

    @property
    def script(self):
        (text,) = [data for tag, about, data in self.texts if tag == "script" and "data-part" not in about]
        return text

    @property
    def style(self):
        (text,) = [data for tag, _, data in self.texts if tag == "style"]
        return text


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def view_of(log, **more):
    about = {"title": "some_policy", "log": log, "summary": summarize(log).as_dict(), "footer": Footer(log.platform)}
    return RunView(**{**about, **more})


def tiersim(*words, capsys):
    old, sys.argv = sys.argv, ["tiersim", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        sys.argv = old
    out, err = capsys.readouterr()
    return end.value.code, out, err


@pytest.fixture(scope="module")
def page(step_log, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_run_page(view_of(step_log, links=(("timeline", "cells/a/timeline.pftrace.gz"),)), path)
    return read(path)


@pytest.fixture(scope="module")
def result():
    trace = transformer("gpt2", batch=4, sequence=256)
    return simulate(trace, load_profile("mt3000_survey"), "swap_all", budget="2.6 GB")


# ---- one file, and nothing outside ---------------------------------------------------------------


def test_the_page_refers_to_nothing_outside(page):
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "audio", "video", "svg")
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
    for text in (page.script, page.style):
        assert not re.search(r"https?://|url\(|@import|\bimport\(|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon", text)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_page_lets_itself_run_no_script_but_its_own_and_ask_for_nothing(page):
    (policy,) = [about["content"] for _, about in page.elements if about.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for rule, text in (("script-src", page.script), ("style-src", page.style)):
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    types = [about.get("type") for tag, about in page.elements if tag == "script"]
    assert types == ["text/plain"] * (len(types) - 1) + [None]


def test_every_file_beside_the_page_is_used_and_the_library_is_as_published_with_its_licence(page):
    here = files("sim.report.page")
    scripts = {item.name for item in here.iterdir() if item.name.endswith(".js")}
    assert scripts == set(SCRIPTS)
    for name in SCRIPTS:
        assert here.joinpath(name).read_text(encoding="utf-8") in page.script
    published = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    for name, sum_ in published.items():
        assert hashlib.sha256(here.joinpath("uplot", name).read_bytes()).hexdigest() == sum_
    assert here.joinpath("uplot", "LICENSE").read_text(encoding="utf-8").strip() in page.script


def test_scripts_put_text_into_the_page_and_never_markup():
    for name in SCRIPTS:
        text = files("sim.report.page").joinpath(name).read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )


def test_equal_runs_give_equal_files_and_a_failure_leaves_the_old_one(step_log, tmp_path):
    one, two = (write_run_page(view_of(step_log), tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert one == two
    with pytest.raises(ValueError):
        write_run_page(view_of(step_log, summary={"makespan_ns": float("nan")}), tmp_path / "a.html")
    assert (tmp_path / "a.html").read_bytes() == one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


# ---- what comes from a user's file ---------------------------------------------------------------


def hostile_log(like):
    """A log whose every name tries to get out of its place."""
    b = TraceBuilder({"model": HOSTILE})
    x = b.tensor(HOSTILE, 2**20, "input")
    b.op(HOSTILE + "op", "matmul", reads=[x], writes=[b.tensor("y", 2**20)])
    intervals = np.array([[0, 10, 0, 0, 0, 0, -1, 0, 0]], np.int64)
    changes = np.array([[0, 0, 2**20, 0, -1, 0], [0, 0, 2**20, 1, 0, 1]], np.int64)
    trace = b.build()
    return replace(like, trace=trace, intervals=intervals, changes=changes, end=10)


def test_names_from_a_file_stay_text(step_log, tmp_path):
    log = hostile_log(step_log)
    footer = Footer(log.platform, workload=HOSTILE, command=HOSTILE, notes=(HOSTILE,))
    view = view_of(log, title=HOSTILE, footer=footer, doc=HOSTILE, links=((HOSTILE, "a.gz"),))
    mean, plain = tmp_path / "mean.html", tmp_path / "plain.html"
    write_run_page(view, mean)
    write_run_page(replace(view, title="plain"), plain)
    assert "<img" not in mean.read_text(encoding="utf-8")
    assert read(mean).elements == read(plain).elements
    data = read(mean).parts["run"]
    assert data["tensors"]["name"][0] == data["title"] == data["doc"] == HOSTILE
    assert data["ops"]["name"] == [HOSTILE + "op"]


def test_half_a_character_in_a_name_does_not_stop_the_page():
    assert json.loads(zlib.decompress(base64.b64decode(pack(["a\ud800b"])))) == ["a?b"]


def test_names_of_many_runs_stay_text(tmp_path):
    rows = [
        {"id": HOSTILE, "policy": HOSTILE, HOSTILE: 1, "fits": False, "error": HOSTILE, "holders": [[HOSTILE, 1, ""]]}
    ]
    path = write_table_page(TableView(HOSTILE, ("policy", HOSTILE), rows, notes=[HOSTILE]), tmp_path / "many.html")
    assert "<img" not in path.read_text(encoding="utf-8")
    assert read(path).parts["table"]["ids"] == [HOSTILE]


# ---- figures -------------------------------------------------------------------------------------


def test_every_interval_is_in_the_page(page, step_log):
    lanes = page.parts["run"]["lanes"]
    scene = Scene(step_log)
    op, tensor = np.cumsum(lanes["op"]), np.cumsum(lanes["tensor"])
    found, at = [], 0
    for track, (name, _, _, count, _) in zip(scene.tracks, lanes["tracks"], strict=True):
        assert name == track.name
        now = 0
        for i in range(at, at + count):
            start = now + lanes["gap"][i]
            now = start + lanes["length"][i]
            row = (
                lanes["device"][i],
                track.lane,
                lanes["why"][i],
                op[i],
                tensor[i],
                lanes["cause"][i],
                lanes["bytes"][i],
            )
            found.append((start, now, *row))
        at += count
    assert sorted(found) == sorted(map(tuple, step_log.intervals.tolist()))


def test_memory_is_that_of_the_analyses(page, step_log):
    run = page.parts["run"]
    for number, tier in enumerate(run["tiers"]):
        time, tensor = np.cumsum(tier["time"]), np.cumsum(tier["tensor"]).astype(int)
        rows = step_log.changes[step_log.changes[:, 1] == number]
        assert (time == rows[:, 0]).all()
        assert (tensor == rows[:, 3]).all()
        assert tier["delta"] == rows[:, 2].tolist()
        peak = peak_memory(step_log, tier["name"])
        found = tier["peak"]
        assert (found["bytes"], found["time"], found["op"]) == (peak.bytes, peak.time_ns, peak.op)
        assert (found["by_role"], found["by_phase"]) == (peak.by_role, peak.by_phase)
        if peak.bytes:
            assert sum(tier["delta"][: found["at"] + 1]) == peak.bytes
        roles = [*ROLES, "workspace"]
        last = roles_over_time(step_log, tier["name"]).iloc[-1:] if len(rows) else None
        for role in ROLE_COLOURS if last is not None else ():
            of = [
                d for d, t in zip(tier["delta"], tensor) if roles[run["tensors"]["role"][t] if t >= 0 else -1] == role
            ]
            assert sum(of) == (int(last[role].iloc[0]) if role in last else 0)


def test_stalls_links_and_summary_are_those_of_the_analyses(page, step_log):
    run = page.parts["run"]
    summary = summarize(step_log).as_dict()
    assert run["figures"] == json.loads(json.dumps(summary))
    assert [tuple(line) for line in run["summary"]] == summary_lines(summary)
    assert run["stalls"] == stalls_by_op(step_log)[["op", "cause", "stall_ns", "stalls"]].to_numpy().tolist()
    assert [row[:4] for row in run["traffic"]] == [[t.link, t.bytes, t.transfers, t.busy_ns] for t in traffic(step_log)]
    assert sum(ns for _, _, ns, _ in run["stalls"]) == sum(summary["stall_ns"].values()) > 0


def test_assumed_figures_come_first_with_standing_and_source(page, step_log):
    facts = page.parts["run"]["facts"]
    assert facts[0] == ["bench", "links.d2h0.rate", "10 GB/s", "assumed", "nobody knows"]
    assert len(facts) == len(step_log.platform.facts)


def test_colours_are_those_of_the_figures(page):
    colours = dict(page.parts["about"]["colours"])
    assert set(colours.pop("inks")) == set(WHY_COLOURS)
    assert colours == {"roles": ROLE_COLOURS, "whys": WHY_COLOURS}


def test_a_run_of_24_layers_is_under_3_mb(tmp_path):
    trace = transformer("gpt2-medium", batch=1, sequence=128)
    path = simulate(trace, load_profile("mt3000_survey"), "lru_tiering", budget="7 GB").report(tmp_path / "run.html")
    assert path.stat().st_size < 3_000_000
    assert len(read(path).parts["run"]["ops"]["name"]) > 1000


# ---- results -------------------------------------------------------------------------------------


def test_a_result_reports_itself(result, tmp_path):
    run = read(result.report(tmp_path / "run.html", command="tiersim run")).parts["run"]
    assert run["figures"] == json.loads(json.dumps(result.summary()))
    assert (run["title"], run["command"], run["fidelity"][0]) == ("swap_all", "tiersim run", result.policy.fidelity)
    assert "batch 4, sequence 256" in run["workload"]
    assert "budget 2.6 GB" in run["memory"]
    assert "Source:" in run["doc"]


def test_a_run_that_found_no_room_can_be_looked_at(tmp_path):
    trace, platform = transformer("gpt2", batch=4, sequence=256), load_profile("mt3000_survey")
    with pytest.raises(OutOfMemory) as refused:
        simulate(trace, platform, "keep_all", budget="2.6 GB")
    log = refused.value.log
    run = read(write_run_page(view_of(log), tmp_path / "run.html")).parts["run"]
    assert run["complete"] is run["figures"]["fits"] is False
    assert run["tiers"][0]["peak"]["bytes"] == peak_memory(log).bytes > 2 * 10**9


def test_a_refused_run_reports_itself_until_it_did_not_fit(tmp_path):
    trace, platform = transformer("gpt2", batch=4, sequence=256), load_profile("mt3000_survey")
    with pytest.raises(OutOfMemory) as refused:
        simulate(trace, platform, "keep_all", budget="2.6 GB")
    error = refused.value
    run = read(error.attempt.report(tmp_path / "run.html")).parts["run"]
    assert run["title"] == "keep_all"
    assert run["end"] == error.log.end > 0
    figures = run["figures"]
    assert (figures["fits"], figures["complete"], figures["refusal"]) == (False, False, "out_of_memory")
    assert figures["error"] == str(error)
    assert figures["full"][0] == error.tier == "zone"
    assert figures["need_bytes"] > figures["free_bytes"] == 2_600_000_000 - sum(run["tiers"][0]["delta"])
    shown = {name for name, _ in run["summary"]}
    assert "time until it did not fit" in shown
    assert "time of an iteration" not in shown
    assert figures["overhead"] is figures["saved_fraction"] is figures["tokens_per_s"] is None


def test_a_comparison_reports_its_rows_and_all_runs(tmp_path):
    trace, platform = transformer("gpt2", batch=4, sequence=256), load_profile("mt3000_survey")
    found = compare(trace, platform, ["keep_all", "swap_all", "chen"], budget="2.6 GB", find_floor=False)
    parts = read(found.report(tmp_path / "all.html")).parts
    table = parts["table"]
    assert {row["policy"]: row["fits"] for row in found.rows} == {"keep_all": False, "swap_all": True, "chen": True}
    names = [row["policy"] for row in found.rows]
    assert sorted(parts["about"]["runs"]) == sorted(names)
    assert set(parts) == {"about", "table", *(f"run {name}" for name in names)}
    assert [parts[f"run {name}"]["complete"] for name in names] == [False, True, True]
    by_policy = dict(zip(table["ids"], table["values"]["makespan_ns"]))
    assert by_policy == {row["policy"]: row.get("makespan_ns") for row in found.rows}
    best = min(ns for ns in by_policy.values() if ns)
    for policy, over, same in zip(table["ids"], table["values"]["over_fastest"], table["same"]):
        ns = by_policy[policy]
        assert over == (None if ns is None else pytest.approx(ns / best - 1))
        assert same == (ns is not None and best < ns <= 1.1 * best)


def test_the_fastest_is_that_of_the_same_job(tmp_path):
    def row(id, policy, batch, ns):
        return {"id": id, "policy": policy, "batch": batch, "fits": True, "makespan_ns": ns, "peak_bytes": 1}

    rows = [row("a", "p", 1, 100), row("b", "q", 1, 103), row("c", "p", 2, 300), row("d", "q", 2, 200)]
    table = read(write_table_page(TableView("t", ("policy", "batch"), rows), tmp_path / "t.html")).parts["table"]
    assert table["values"]["over_fastest"] == pytest.approx([0, 0.03, 0.5, 0])
    assert table["same"] == [False, True, False, False]
    assert table["shown"][:2] == ["policy", "batch"]


# ---- the command ---------------------------------------------------------------------------------


def test_a_page_of_several_machines_states_the_error_of_each_that_has_its_own():
    machines = [load_profile(name) for name in ("a100_80_sxm", "h100")]
    rows = [
        {"id": p.name, "policy": "keep_all", "profile": p.name, "fits": True, "makespan_ns": 10, "peak_bytes": 5}
        | {"over_fastest": 0.0, "indistinguishable": True}
        for p in machines
    ]
    found = table_data(TableView("a study", ("policy", "profile"), rows, platforms=machines))
    (line,) = [note for note in found["notes"] if note.startswith("error, ")]
    for name in ("a100_80_sxm", "h100"):
        own = error_bar("time").by_machine[name]
        assert f", on {name} {100 * own.nine_tenths:.0f} % (n = {own.rows}, " in line
    assert "indistinguishable" not in found["values"]


def test_of_equally_fast_policies_the_verdict_and_the_map_name_the_same():
    """Rows as a sweep's: they do not say what a policy manages."""

    def cell(policy, peak, budget):
        figures = {"makespan_ns": 10**6, "peak_bytes": peak, "recompute_ns": 0, "moved_bytes": {"d2h": peak}}
        return {"id": f"{policy}{budget}", "policy": policy, "budget": budget, "fits": True, **figures}

    rows = [cell(name, 9 - budget, budget) for budget in (1, 2) for name in ("dtr", "keep_all")]
    rows.append(cell("swap_all", 5, 2))
    found = table_data(TableView("a study", ("policy", "budget"), rows))
    first = [row["policy"] for row, rank in zip(rows, found["rank"], strict=True) if rank == 0]
    assert first == ["keep_all", "swap_all"]
    assert found["verdict"][0] == "keep_all is the fastest in 1 of 2 jobs, swap_all in 1."


def test_a_saved_run_becomes_a_page(tmp_path, capsys):
    job = [*JOB, "--policy", "swap_all", "--budget", "2.6 GB", "--set", "links.d2h.rate=30 GB/s"]
    assert tiersim("run", "--profile", "mt3000_survey", *job, "-o", tmp_path / "out", capsys=capsys)[0] == 0
    code, out, err = tiersim("report", tmp_path / "out", "-o", tmp_path / "pages" / "report.html", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.strip() == str(tmp_path / "pages" / "report.html")
    run = read(tmp_path / "pages" / "report.html").parts["run"]
    saved = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert run["figures"]["makespan_ns"] == saved["makespan_ns"]
    assert run["links"] == [["timeline.pftrace", "../out/timeline.pftrace"]]
    assert "--set 'links.d2h.rate=30 GB/s'" in run["command"]


def test_a_saved_run_that_does_not_fit_becomes_a_page(tmp_path, capsys):
    words = ["run", "--profile", "mt3000_survey", *JOB, "--budget", "2.6 GB", "-o", tmp_path / "out"]
    code, _, err = tiersim(*words, capsys=capsys)
    assert code == 1
    assert "needs" in err
    saved = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert saved["fits"] is saved["complete"] is False
    assert tiersim("report", tmp_path / "out", "-o", tmp_path / "r.html", capsys=capsys)[0] == 0
    run = read(tmp_path / "r.html").parts["run"]
    assert run["figures"] == {key: saved[key] for key in run["figures"]}
    assert run["figures"]["error"] in err
    for command in ("explain", "export"):
        more = ["--to", "torch"] if command == "export" else []
        code, out, said = tiersim(command, tmp_path / "out", *more, capsys=capsys)
        assert (code, out) == (2, "")
        assert said.count("\n") == 1
        assert f"the run does not fit: {run['figures']['error']}" in said


def test_a_saved_run_that_is_no_longer_the_same_is_refused(tmp_path, capsys):
    assert tiersim("run", "--profile", "mt3000_survey", *JOB, "-o", tmp_path, capsys=capsys)[0] == 0
    path = tmp_path / "summary.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "makespan_ns": saved["makespan_ns"] + 1}))
    code, out, err = tiersim("report", tmp_path, "-o", tmp_path / "report.html", capsys=capsys)
    assert (code, out) == (2, "")
    assert "makespan_ns" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_saved_comparison_becomes_a_page(tmp_path, capsys):
    words = ["compare", "--profile", "mt3000_survey", *JOB, "--policies", "swap_all,chen,keep_all", "-o", tmp_path]
    assert tiersim(*words, "--budget", "2.6 GB", capsys=capsys)[0] == 0
    for most, shown in ((2, {"swap_all", "chen"}), (3, {"swap_all", "chen", "keep_all"})):
        assert tiersim("report", tmp_path, "-o", tmp_path / "r.html", "--runs", str(most), capsys=capsys)[0] == 0
        parts = read(tmp_path / "r.html").parts
        assert set(parts["about"]["runs"]) == shown
        assert len(parts["table"]["ids"]) == 3
    assert parts["run keep_all"]["complete"] is False


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    from sim import sweep

    folder = tmp_path_factory.mktemp("sweep") / "results"
    study = {
        "model": "gpt2",
        "batch": 4,
        "sequence": 256,
        "profile": "mt3000_survey",
        "policy": ["keep_all", "swap_all"],
        "budget": ["all", "85%", "1%"],
        "timeline": {"policy": "swap_all", "budget": "85%"},
        "bound": True,
    }
    return folder, sweep(study, out=folder, jobs=1)


def test_what_was_assumed_of_a_workload_stands_on_the_page_of_its_run(step_log, tmp_path):
    view = view_of(step_log)
    footer = replace(view.footer, trace=with_facts(step_log.trace, assumed={"batches without padding": 2}))
    shown = read(write_run_page(replace(view, footer=footer), tmp_path / "run.html")).parts["run"]
    assert "assumed of the workload: batches without padding (2)" in shown["beside"]


def test_every_line_that_a_terminal_has_under_a_run_stands_on_its_page(tmp_path):
    result = simulate(transformer("gpt2", batch=1, sequence=64, precision="amp_bf16"), "mt3000_survey", budget="30 GB")
    view = run_view(result)
    shown = read(write_run_page(view, tmp_path / "run.html")).parts["run"]
    lines = footer_lines(view.footer)
    assert shown["warnings"] == [line for line in lines if "exceeds this machine" in line or "priced as fp16" in line]
    assert len(shown["warnings"]) == 2
    assert shown["notes"] == list(result.platform.notes)
    assert shown["beside"] == error_lines([result.platform])  # and nothing of the run in the machine's card
    said = {*shown["warnings"], *shown["notes"], *shown["beside"], shown["memory"]}
    scope = ("platform ", "time: ", "left out of it: ", "assumed, ")
    assert {line for line in lines if not line.startswith(scope)} <= said


def test_a_comparison_warns_as_each_of_its_runs_does(tmp_path):
    trace = transformer("gpt2", batch=1, sequence=64, precision="amp_bf16")
    comparison = compare(trace, "mt3000_survey", "keep_all", budget="30 GB")
    shown = read(comparison.report(tmp_path / "c.html")).parts["table"]
    warned = [line.partition(":")[0] for line in shown["warnings"]]
    assert warned == ["the budget of 30 GB exceeds this machine", "no bf16 peak in this profile"]
    assert shown["machine_notes"] == list(comparison.platform.notes)


def test_the_notes_of_a_sweep_name_policies_and_each_of_them_once():
    def row(id, policy, batch, **more):
        known = {"makespan_ns": 10, "peak_bytes": 1, "overhead": 0.0, "unlimited_run": "captured launches"}
        return {"id": id, "policy": policy, "batch": batch, "fits": True, **known, **more}

    moved = {"counters.moves_cancelled": 3, "counters.cancelled_bytes": 4000, "counters.moves_without_space": 0}
    rows = [row("a" * 64, "tso", 1), row("b" * 64, "tso", 2), row("c" * 64, "swap_all", 1, **moved)]
    rows += [row("d" * 64, "swap_all", 2), row("e" * 64, "once", 1, **moved)]
    rows += [row("f" * 64, "tso", 3, priced_as="bf16 as fp16", fits=False, floor_bytes=None)]
    shown = table_data(TableView(title="many", labels=("policy", "batch"), rows=rows))
    assert not re.search("a{9}|b{9}|c{9}|d{9}|e{9}", json.dumps(shown["notes"]))
    (captured,) = [line for line in shown["notes"] if "captured" in line]
    assert "; tso, swap_all, once: against their own times there, with captured launches; " in captured
    assert [line for line in shown["notes"] if "cancelled" in line] == [
        "once: 3 moves (4 kB) cancelled before the copy started: their tensors stayed where they were",
        "swap_all: moves cancelled before the copy started in 1 of 2 runs, at most 3 moves (4 kB): their tensors "
        "stayed where they were",
    ]
    assert shown["warnings"] == ["no bf16 peak in this profile: priced as fp16"]


def test_a_sweep_becomes_a_page_with_links_to_the_runs_that_were_kept(swept, tmp_path, capsys):
    folder, table = swept
    assert tiersim("report", folder, "-o", tmp_path / "r.html", capsys=capsys)[0] == 0
    parts = read(tmp_path / "r.html").parts
    shown = parts["table"]
    assert shown["ids"] == table["cell"].tolist()
    for name in ("status", "policy", "budget"):
        assert shown["values"][name] == table[name].tolist()
    assert shown["values"]["makespan_ns"] == [
        None if ns is None else int(ns) for ns in table["makespan_ns"].astype(object).where(table["fits"], None)
    ]
    near = [row for row in zip(shown["values"]["above_bound"], table["above_bound"], strict=True) if row[0] is not None]
    assert near
    assert all(ours == theirs >= 0 for ours, theirs in near)
    assert any(line.startswith("above bound: over the least time among plans that run") for line in shown["notes"])
    (kept,) = parts["about"]["runs"]
    (row,) = table[(table["policy"] == "swap_all") & (table["budget"] == "85%")].to_dict("records")
    assert kept == row["cell"]
    assert parts[f"run {kept}"]["figures"]["makespan_ns"] == row["makespan_ns"]
    files_kept = [(tmp_path / address).resolve() for _, address in shown["links"][kept]]
    assert files_kept
    assert all(path.is_file() for path in files_kept)
    assert any(fact[3] == "assumed" for fact in shown["facts"])


def test_a_cell_that_does_not_fit_can_be_asked_for(swept, tmp_path, capsys):
    folder, table = swept
    (row,) = table[(table["policy"] == "swap_all") & (table["budget"] == "1%")].to_dict("records")
    assert (row["status"], row["refusal"]) == ("infeasible", "out_of_memory")
    assert tiersim("report", folder, "-o", tmp_path / "r.html", "--cell", row["cell"][:12], capsys=capsys)[0] == 0
    parts = read(tmp_path / "r.html").parts
    assert parts["about"]["runs"] == [row["cell"]]
    run = parts[f"run {row['cell']}"]
    assert run["complete"] is False
    assert run["figures"]["error"] == row["error"]


def test_a_cell_that_was_not_kept_can_be_asked_for(swept, tmp_path, capsys):
    folder, table = swept
    id = table["cell"][0]
    code, _, err = tiersim("report", folder, "-o", tmp_path / "r.html", "--cell", id[:10], capsys=capsys)
    assert (code, err) == (0, "")
    assert read(tmp_path / "r.html").parts["about"]["runs"] == [id]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{empty}", "-o", "{empty}/r.html"], "no results here"),
        (["{empty}/nothing", "-o", "{empty}/r.html"], "no results here"),
        (["{swept}", "-o", "{empty}"], "a folder"),
        (["{swept}", "-o", "{empty}/r.html", "--cell", "zz"], "no cell has that id"),
        (["{empty}", "-o", "{empty}/r.html", "--cell", "zz"], "only a sweep has cells"),
        (["{broken}", "-o", "{empty}/r.html"], "not JSON"),
        (["{swept}", "-o", "{broken}/summary.json/r.html"], "summary.json"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words, said, swept, tmp_path, capsys):
    places = {"swept": swept[0], "empty": tmp_path / "empty", "broken": tmp_path / "broken"}
    places["empty"].mkdir()
    places["broken"].mkdir()
    (places["broken"] / "summary.json").write_text("{")
    code, out, err = tiersim("report", *(word.format(**places) for word in words), capsys=capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not list(places["empty"].iterdir())
