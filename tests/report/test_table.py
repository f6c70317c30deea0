"""Tables say what the rows say: every figure once, who cannot be told from the winner, who does not fit and why."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.hardware.profile import load_profile
from sim.report.cells import columns, ordered, percent, standings, text_of, told_rows
from sim.report.error_bars import error_lines
from sim.report.footer import Footer, footer_lines
from sim.report.markdown import comparison_markdown
from sim.report.table import (
    comparison_csv,
    comparison_table,
    comparison_text,
    print_comparison,
    print_summary,
    summary_text,
)

MS = 10**6


def fitting(policy, ms, peak, **more):
    return {
        "policy": policy,
        "fits": True,
        "fidelity": "equations",
        "manages": ("activations",),
        "peak_bytes": peak,
        "makespan_ns": ms * MS,
        "compute_ns": 200 * MS,
        "recompute_ns": 0,
        "stall_ns": {"transfer": 0},
        "moved_bytes": {},
        "saved_fraction": None,
        "overhead": 0.0,
    } | more


@pytest.fixture
def rows():
    return [
        fitting(
            "delta",
            215,
            3 * 10**9,
            recompute_ns=5 * MS,
            stall_ns={"transfer": 8 * MS, "space": 2 * MS},
            moved_bytes={"d2h": 2 * 10**9, "h2d": 10**9},
            fidelity="reconstruction",
            manages=("activations", "weights"),
            saved_fraction=0.625,
            overhead=0.075,
        ),
        {
            "policy": "vdnn",
            "fits": False,
            "fidelity": "code",
            "manages": ("activations",),
            "error": "out of memory in hbm0",
            "floor_bytes": 9_100_000_000,
            "holders": [("h3", 1_200_000_000, "read by b3"), ("w", 8, "kept"), ("x", 7, "locked"), ("y", 6, "locked")],
        },
        fitting("keep_all", 200, 8 * 10**9, saved_fraction=0.0, fidelity="code"),
        {"policy": "revolve", "fits": None, "fidelity": "code", "manages": ("activations",), "error": "needs a chain"},
        fitting("chen", 260, 4 * 10**9, recompute_ns=60 * MS, overhead=0.3, saved_fraction=0.5),
        {"policy": "gist", "fits": False, "fidelity": "code", "manages": (), "error": "Infeasible: proved"},
    ]


def cut(text):
    """The lines of a plain table as lists of cells."""
    lines = text.split("\n\n")[0].splitlines()
    edges = [match.span() for match in re.finditer("-+", lines[1])]
    return [[line[a:b].strip() for a, b in edges] for line in (lines[0], *lines[2:])]


def test_each_row_reads_as_its_figures(rows):
    table = cut(comparison_text(rows, model_error=0.1))
    assert table[0] == [
        *("policy", "fits", "peak", "time", "vs fastest", "vs unlimited", "recompute", "stall", "moved", "saved"),
        *("manages", "fidelity"),
    ]
    assert table[1:] == [
        ["keep_all", "yes", "8 GB", "200 ms", "fastest", "0 %", "0 %", "0 %", "0 B", "0 %", "A", "code"],
        [
            "delta",
            "yes",
            "3 GB",
            "215 ms",
            "≈ +7.5 %",
            "+7.5 %",
            "2.3 %",
            "4.7 %",
            "3 GB",
            "62 %",
            "A W",
            "reconstruction",
        ],
        ["chen", "yes", "4 GB", "260 ms", "+30 %", "+30 %", "23 %", "0 %", "0 B", "50 %", "A", "equations"],
        ["vdnn", "no", *"––––––––", "A", "code"],
        ["gist", "no", *"––––––––", "–", "code"],
        ["revolve", "–", *"––––––––", "A", "code"],
    ]


def test_misfits_name_the_budget_that_would_do_and_what_holds_the_memory(rows):
    assert comparison_text(rows).split("\n\n")[1].splitlines() == [
        "vdnn: does not fit: fits from 9.1 GB; held by h3 1.2 GB (read by b3), w 8 B (kept), x 7 B (locked) and 1 more",
        "gist: does not fit: no budget is known to fit; Infeasible: proved",
        "revolve: not run: needs a chain",
    ]


def test_the_key_explains_only_the_signs_that_occur(rows):
    keys = comparison_text(rows, model_error=0.1).split("\n\n")[2].splitlines()
    assert keys[0] == "≈ not distinguishable from keep_all, the fastest: within the model's own error of 10 %"
    assert keys[-1].startswith("reconstruction: ")
    sure = comparison_text([row for row in rows if row["policy"] != "delta"])
    assert "≈" not in sure
    assert "reconstruction" not in sure


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=12),
    st.fractions(0, 1, max_denominator=64),
)
def test_not_distinguishable_is_within_the_model_error_of_the_fastest(times, error):
    rows = [{"policy": f"p{i}", "fits": True, "peak_bytes": 1, "makespan_ns": ns} for i, ns in enumerate(times)]
    found = standings(rows, float(error))
    assert sum(s.is_fastest for s in found.values()) == 1
    for row in rows:
        standing = found[row["policy"]]
        exact = row["makespan_ns"] <= min(times) * (1 + error)
        near_the_edge = abs(row["makespan_ns"] / min(times) - 1 - float(error)) < 1e-9
        assert standing.same == exact or near_the_edge
        assert standing.is_fastest <= standing.same


def test_a_negative_error_is_refused(rows):
    with pytest.raises(ValueError, match="not negative"):
        standings(rows, -0.1)


def test_the_error_is_the_worst_of_the_measured_pairs_unless_the_caller_sets_another():
    published = json.loads((files("sim.report") / "error_bars.json").read_text(encoding="utf-8"))
    worst, n = published["policies"]["worst"], published["policies"]["rows"]
    near, far = round(1000 * (1 + worst)) - 1, round(1000 * (1 + worst)) + 1
    rows = [fitting("a", 1000, 5), fitting("b", near, 5), fitting("c", far, 5)]
    assert [s.same for s in standings(rows).values()] == [True, True, False]
    said = f"the model's own error of {100 * worst:.1f} %, n = {n}"
    text = comparison_text(rows)
    assert text.count(said) == 2  # the key and the verdict
    assert "n = " not in comparison_text(rows, model_error=0.25)


def test_rows_as_data_have_the_verdict_of_the_table(rows):
    told = told_rows([fitting("a", 1000, 5), fitting("b", 1050, 5), fitting("c", 1200, 5), fitting("d", 1000, 6)], 0.1)
    assert [row["over_fastest"] for row in told] == pytest.approx([0, 0.05, 0.2, 0])
    assert [row["indistinguishable"] for row in told] == [False, True, False, True]
    signs = {name: "≈" in str(each) or each.ties for name, each in standings(told, 0.1).items()}
    assert signs == {row["policy"]: row["indistinguishable"] for row in told}
    (alone,) = [row for row in told_rows(rows) if row["fits"] is False][:1]
    assert not {"over_fastest", "indistinguishable"} & alone.keys()


def test_the_footer_states_the_error_of_a_ratio_and_of_a_time():
    published = json.loads((files("sim.report") / "error_bars.json").read_text(encoding="utf-8"))
    ratio, time = published["policies"], published["time"]
    (line,) = error_lines()
    first, second, last = line.split("; ")
    assert first.endswith(
        f"{100 * ratio['worst']:.1f} % (the worst of n = {ratio['rows']} pairs of {ratio['sources']} sources)"
    )
    assert second.startswith(f"a time itself {100 * time['nine_tenths']:.0f} % in nine of ten (n = {time['rows']}, ")
    assert last == "assumed figures come on top"


def test_a_machine_with_enough_published_runs_has_an_error_of_its_own():
    own = json.loads((files("sim.report") / "error_bars.json").read_text(encoding="utf-8"))["time"]["by_machine"]
    assert {"a100_80_sxm", "h100"} <= own.keys()
    for name, bar in own.items():
        (line,) = error_lines([load_profile(name), load_profile(name)])
        assert f"{100 * bar['nine_tenths']:.0f} % in nine of ten (n = {bar['rows']} on {name}, " in line


def test_of_several_machines_each_has_its_own_error_beside_that_of_all():
    time = json.loads((files("sim.report") / "error_bars.json").read_text(encoding="utf-8"))["time"]
    (line,) = error_lines(map(load_profile, ("a100_80_sxm", "h100", "h200")))
    assert f"a time itself {100 * time['nine_tenths']:.0f} % in nine of ten (n = {time['rows']}, " in line
    for name in ("a100_80_sxm", "h100"):
        own = time["by_machine"][name]
        assert f", on {name} {100 * own['nine_tenths']:.0f} % (n = {own['rows']}, {own['sources']} sources, " in line
    assert "on h200" not in line


def test_a_machine_that_no_published_run_is_of_is_told_so():
    known, unknown = load_profile("a100_80_sxm"), load_profile("mt3000_survey")
    assert len(error_lines([known])) == 1
    _, said = error_lines([known, unknown])
    assert "no published run of mt3000_survey" in said
    assert f"{len(unknown.assumed)} of its figures are assumed" in said
    facts = tuple(replace(fact, standing="measured") for fact in unknown.facts)
    calibrated = replace(unknown, name="my_machine", facts=facts)
    first, said = error_lines([calibrated])
    assert "on a100_80_sxm and v100_16 alone" in first
    assert said.startswith("that error is of other machines: no published run of my_machine is among them; what ")


def test_an_error_says_on_which_machines_it_was_measured_where_that_is_another_one():
    published = json.loads((files("sim.report") / "error_bars.json").read_text(encoding="utf-8"))
    *first, last = published["policies"]["machines"]
    said = f"{published['policies']['sources']} sources, on {', '.join(first)} and {last} alone)"
    for name in ("a100_80_sxm", "v100_16", "h100", "h200", "mt3000_survey"):
        assert (said in error_lines([load_profile(name)])[0]) == (name not in published["policies"]["machines"])
    assert said in error_lines([load_profile("a100_80_sxm"), load_profile("h100")])[0]
    (line,) = error_lines([load_profile("h200")], also=["layouts", "peak"])
    of_layouts, of_peaks = line.split("; ")[2:4]
    assert published["layouts"]["machines"][0] in of_layouts
    assert " alone" not in of_peaks


def test_the_error_is_the_caller_s(rows):
    assert [str(s) for s in standings(rows, 0.05).values()] == ["fastest", "+7.5 %", "+30 %"]
    assert [str(s) for s in standings(rows, 0.5).values()] == ["fastest", "≈ +7.5 %", "≈ +30 %"]


def test_a_column_that_nobody_fills_is_left_out(rows):
    bare = [{"policy": "a", "fits": True, "peak_bytes": 5, "makespan_ns": 7}]
    assert [column.title for column in columns(bare)] == ["policy", "fits", "peak", "time", "vs fastest"]
    assert cut(comparison_text(bare))[1] == ["a", "yes", "5 B", "7 ns", "fastest"]
    failing = [row for row in rows if not row["fits"]]
    assert [column.title for column in columns(failing)] == ["policy", "fits", "manages", "fidelity"]


def test_shares_are_of_the_time_of_all_devices():
    row = fitting("p", 100, 1, devices=2, compute_ns=120 * MS, recompute_ns=40 * MS, stall_ns={"peer": 40 * MS})
    table = cut(comparison_text([row]))
    assert table[1][table[0].index("recompute")] == "20 %"
    assert table[1][table[0].index("stall")] == "20 %"


def test_binary_units_on_request(rows):
    gib = [fitting("p", 1, 3 * 2**30)]
    assert cut(comparison_text(gib, binary=True))[1][2] == "3 GiB"
    assert "GiB" in comparison_markdown(gib, binary=True)


# ---- footer --------------------------------------------------------------------------------------


def test_the_foot_says_what_the_figures_stand_on(drawn_log):
    footer = Footer(
        drawn_log.platform, warm_up=2, command="tiersim compare --model x", workload="gpt2, batch 4", notes=("no opt",)
    )
    lines = footer_lines(footer, binary=True)
    assert lines[0] == "platform bench, workload gpt2, batch 4"
    assert lines[1] == "budget 32 MiB, nominal 64 MiB (hbm0)"
    assert lines[2].startswith("time: one iteration, the steady state after 2 for warm-up: ops, ")
    assert lines[3].startswith("left out of it: planning, ")
    assert lines[4:6] == error_lines([drawn_log.platform])
    assert lines[6] == "assumed, neither measured nor published (1): links.d2h0.rate = 10 GB/s"
    assert lines[7:] == ["no opt", "reproduce: tiersim compare --model x"]
    first = footer_lines(
        Footer(replace(drawn_log.platform, facts=drawn_log.platform.facts[:1], budget=None), steady=False)
    )
    assert "not the steady state" in first[2]
    assert first[1].startswith("usable capacity ")
    assert first[5].startswith("that error is of other machines: no published run of bench ")
    assert first[6] == "no figure of the profile is merely assumed (1 have a source)"


def test_the_foot_says_when_the_budget_is_more_than_the_machine_has():
    from sim import load_profile

    machine = load_profile("mt3000_survey")  # 8 GB
    said = "the budget of 20 GB exceeds this machine: a run that takes more than 8 GB does not fit on it"
    assert said in footer_lines(Footer(machine.with_budget(20 * 10**9)))
    for platform in (machine, machine.with_budget(8 * 10**9)):
        assert not [line for line in footer_lines(Footer(platform)) if "above" in line]
    bigger = load_profile("mt3000_survey", overrides={"tiers.zone.capacity": "32 GB", "tiers.zone.nominal": "32 GB"})
    assert not [line for line in footer_lines(Footer(bigger.with_budget(20 * 10**9))) if "above" in line]
    four = load_profile("mt3000_cluster")  # its tiers are called cluster@0, cluster@1, …
    assert [line for line in footer_lines(Footer(four.with_budget(20 * 10**9))) if "more than 13.96 GB" in line]


@pytest.mark.parametrize(
    ("profile", "precision", "said"),
    [
        ("mt3000_survey", "amp_bf16", ["no bf16 peak in this profile: priced as fp16"]),
        ("biren_br100", "amp_fp16", ["no fp16 peak in this profile: priced as bf16"]),
        ("mt3000_survey", "fp32", []),
        ("h100", "amp_bf16", []),
    ],
)
def test_the_foot_names_the_peak_that_stands_in_for_a_missing_one(profile, precision, said):
    from sim import load_profile
    from workloads import transformer

    work = transformer("gpt2", batch=1, sequence=16, precision=precision)
    lines = footer_lines(Footer(load_profile(profile), trace=work))
    assert [line for line in lines if "priced as" in line] == said


def test_equal_devices_are_said_once(make_log):
    four = make_log(2, devices=4).platform
    assert footer_lines(Footer(four), binary=True)[1] == "budget 2 GiB, nominal 4 GiB (each of 4 devices)"
    uneven = replace(four, tiers=(replace(four.tiers[0], capacity=2**30), *four.tiers[1:]))
    assert footer_lines(Footer(uneven), binary=True)[1].count("budget") == 4


# ---- terminal, pipe, CSV, Markdown -------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def at(width):
        monkeypatch.setenv("COLUMNS", str(width))
        return Terminal()

    return at


def test_a_pipe_gets_plain_text_without_control_codes(rows, drawn_log):
    footer = Footer(drawn_log.platform, command="tiersim compare")
    pipe = io.StringIO()
    print_comparison(rows, footer=footer, file=pipe)
    assert pipe.getvalue() == comparison_text(rows, footer=footer)
    assert "\x1b" not in pipe.getvalue()
    assert "reproduce: tiersim compare\n" in pipe.getvalue()
    assert all(line == line.rstrip() for line in pipe.getvalue().splitlines())


def plain(coloured):
    return re.sub(r"\x1b\[[0-9;]*m", "", coloured)


def test_a_terminal_gets_the_same_cells_in_colour(rows, terminal, drawn_log):
    file = terminal(140)
    print_comparison(rows, footer=Footer(drawn_log.platform), model_error=0.1, file=file)
    shown = file.getvalue()
    assert "\x1b[1;32mkeep_all" in shown  # the fastest
    assert "\x1b[1mdelta" in shown  # not distinguishable from it
    assert "\x1b[2mvdnn" in shown  # does not fit
    words = plain(shown).split()
    for cell in (c for line in cut(comparison_text(rows)) for c in line):
        assert all(word in words for word in cell.split())
    assert "too narrow" not in shown


@pytest.mark.parametrize("width", [100, 80, 70])
def test_a_narrow_terminal_names_the_columns_it_left_out(rows, terminal, width):
    file = terminal(width)
    print_comparison(rows, file=file)
    lines = plain(file.getvalue()).splitlines()
    assert all(len(line) <= width for line in lines)
    (said,) = [line for line in lines if line.startswith("too narrow for: ")]
    gone = said.removeprefix("too narrow for: ").split(", ")
    assert gone[0] == "manages"
    assert not any(title in lines[0] for title in gone)
    for title in ("policy", "peak", "time", "vs fastest", "fidelity"):
        assert title in lines[0]


def test_names_with_brackets_are_no_markup(terminal):
    file = terminal(120)
    print_comparison([fitting("chen[red]x[/red]", 5, 5)], file=file)
    assert "chen[red]x[/red]" in plain(file.getvalue())


def test_the_rich_table_has_the_rows_in_order(rows):
    table = comparison_table(rows)
    assert table.row_count == 6
    assert [str(cell) for cell in table.columns[0].cells] == ["keep_all", "delta", "chen", "vdnn", "gist", "revolve"]


def test_csv_keeps_every_figure_exactly_and_in_the_order_given(rows):
    read = list(csv.DictReader(io.StringIO(comparison_csv(rows))))
    assert [row["policy"] for row in read] == [row["policy"] for row in rows]
    first = read[0]
    assert int(first["peak_bytes"]) == 3 * 10**9
    assert int(first["stall_ns.space"]) == 2 * MS
    assert int(first["moved_bytes.h2d"]) == 10**9
    assert first["manages"] == "activations weights"
    assert [row["fits"] for row in read] == ["True", "False", "True", "", "True", "False"]
    assert json.loads(read[1]["holders"])[0] == ["h3", 1_200_000_000, "read by b3"]
    assert comparison_csv(rows) == comparison_csv([dict(row) for row in rows])
    assert "\r" not in comparison_csv(rows)


def unescape(cell):
    return re.sub(r"\\([\\`*_{}\[\]<>#|~$])", r"\1", cell)


def test_markdown_holds_the_same_cells_as_the_plain_table(rows, drawn_log):
    text = comparison_markdown(rows, footer=Footer(drawn_log.platform, command="tiersim compare --a 'x|y'"))
    lines = text.split("\n\n")[1].splitlines()
    cells = [[unescape(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert [cells[0], *cells[2:]] == cut(comparison_text(rows))
    assert set(cells[1]) == {"---", "---:"}
    assert "- reproduce: tiersim compare --a 'x\\|y'" in text
    bad = comparison_markdown([fitting("a|b_c", 1, 1)])
    assert "| a\\|b\\_c |" in bad


# ---- one run -----------------------------------------------------------------------------------


def test_a_summary_lists_each_figure_with_its_unit_and_its_parts(rows):
    lines = summary_text(rows[0] | {"tokens_per_s": 12592.4, "mfu": 0.412, "ignored_actions": 3}).splitlines()
    told = dict(re.split(r" {2,}(?=\S)", line, maxsplit=1) for line in lines if not line.startswith(" "))
    assert told["peak memory"] == "3 GB"
    assert told["time of an iteration"] == "215 ms"
    assert told["recomputing"] == "5 ms (2.3 % of the devices' time)"
    assert told["stalls"] == "10 ms (4.7 % of the devices' time)"
    assert told["moved"] == "3 GB"
    assert told["tokens per second"] == "12,592"
    assert told["MFU"] == "41 %"
    assert told["memory saved against keep_all"] == "62 %"
    assert told["ignored actions"] == "3"
    parts = [line.split() for line in lines if line.startswith("  ")]
    assert parts == [["transfer", "8", "ms"], ["space", "2", "ms"], ["d2h", "2", "GB"], ["h2d", "1", "GB"]]


def test_the_summary_of_a_log_is_told_whole(drawn_log):
    from sim.analysis.summary import summarize

    summary = summarize(drawn_log).as_dict()
    lines = summary_text(summary, binary=True).splitlines()
    told = dict(re.split(r" {2,}(?=\S)", line.strip(), maxsplit=1) for line in lines if "  " in line.strip())
    assert told["peak memory"] == told["hbm0"] == "29 MiB"
    assert told["host"] == "16 MiB"
    assert told["capacity"] == "32 MiB"
    assert told["time of an iteration"] == "67 ns"
    assert told["computing"] == "24 ns (36 % of the devices' time)"
    assert told["recomputing"] == "20 ns (30 % of the devices' time)"
    assert told["stalls"] == "23 ns (34 % of the devices' time)"
    assert told["transfer"] == "23 ns"
    assert told["moved"] == "32 MiB"
    assert told["MFU"] == "–"
    # every figure is there, and none of a kind that the table does not know
    assert not [line for line in lines if "{" in line or "_" in line.replace("keep_all", "")]
    assert sum(not line.startswith(" ") for line in lines) == len(summary)


def test_a_summary_in_a_pipe_and_on_a_terminal(rows, terminal, drawn_log):
    pipe = io.StringIO()
    print_summary(rows[1], footer=Footer(drawn_log.platform), file=pipe)
    assert pipe.getvalue() == summary_text(rows[1], footer=Footer(drawn_log.platform))
    assert "h3 1.2 GB (read by b3)" in pipe.getvalue()
    file = terminal(100)
    print_summary(rows[1], file=file)
    assert plain(file.getvalue()).split() == summary_text(rows[1]).split()


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.0, "0 %"),
        (0.0004, "0 %"),
        (0.031, "3.1 %"),
        (0.0994, "9.9 %"),
        (0.0996, "10 %"),
        (1.5, "150 %"),
        (-0.02, "-2.0 %"),
    ],
)
def test_percentages_have_two_digits(fraction, text):
    assert percent(fraction) == text


def test_the_unit_follows_the_key():
    assert text_of("x_ns", 1500) == "1.5 µs"
    assert text_of("x_bytes", 2048, binary=True) == "2 KiB"
    assert text_of("overhead", 0.25) == "+25 %"
    assert text_of("waits", None) == "–"
    assert text_of("complete", True) == "yes"
    assert text_of("energy_j", 0.123456) == "0.1235"


def test_ordering_puts_equal_times_by_memory_then_name():
    rows = [fitting("b", 1, 5), fitting("a", 1, 5), fitting("c", 1, 4)]
    assert [row["policy"] for row in ordered(rows)] == ["c", "a", "b"]
