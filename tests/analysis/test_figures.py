"""A figure is declared once, and an analysis is a file: tables, JSON, CSV, pages and documents ask there."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from sim import compare, load_profile, simulate
from sim.analysis import figures as declared
from sim.analysis import registry
from sim.analysis.figures import BESIDE, Figure, columns, figures, known
from sim.analysis.registry import analyses, as_records
from sim.cli import parser
from sim.errors import TiersimError
from sim.log import EventLog
from sim.pages import run_view
from sim.report.page.run import run_data
from sim.report.table import comparison_csv, summary_text
from sim.sweeps.frame import FIRST, TIMING, flat_rows
from tests.test_cli import tiersim
from workloads import uniform_chain

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_figures

PLATFORM = load_profile("a100_40_pcie")
TRACE = uniform_chain(4)


@pytest.fixture
def made_up(monkeypatch):
    """A file of analyses that nobody has written, with a figure for the summary."""

    @dataclass(frozen=True)
    class Longest:
        op: str
        run_ns: int

    def longest_op(log: "EventLog") -> Longest:
        """The op that ran longest."""
        rows = log.intervals[log.interval("why") == 0]
        row = max(rows.tolist(), key=lambda row: row[1] - row[0])
        return Longest(log.trace.ops[row[5]].name, row[1] - row[0])

    module = ModuleType("sim.analysis.longest")
    longest_op.__module__ = module.__name__
    longest_op.__annotations__["log"] = "EventLog"
    module.longest_op = longest_op
    module.FIGURES = {
        "longest_op_ns": Figure(
            "time", "longest op", "of all that ran", 26, (99, "longest"), lambda log, reference: longest_op(log).run_ns
        )
    }
    there = registry.modules()
    monkeypatch.setattr(registry, "modules", lambda: (*there, module))
    for cached in (figures, analyses, parser):
        cached.cache_clear()
    yield
    for cached in (figures, analyses, parser):
        cached.cache_clear()


def test_a_figure_of_a_new_file_reaches_every_output(made_up):
    result = simulate(TRACE, PLATFORM, "keep_all")
    summary = result.summary()
    assert summary["longest_op_ns"] > 0
    assert "longest op" in summary_text(summary)
    rows = compare(TRACE, PLATFORM, ["keep_all"]).rows
    assert "longest_op_ns" in comparison_csv(rows).splitlines()[0].split(",")
    cell = ({"id": "1", "labels": {"policy": "keep_all"}}, {"row": {**summary, "zzz": 1, "status": "ok"}, "ran": {}})
    names = list(flat_rows([cell])[0])
    assert names.index("fits") < names.index("longest_op_ns") < names.index("zzz")
    assert columns()["longest_op_ns"] == "longest"
    assert "| `longest_op_ns` | ns | longest op | of all that ran |" in make_figures.page()
    shown = run_data(run_view(result))
    assert shown["figures"]["longest_op_ns"] == summary["longest_op_ns"]
    assert "longest op" in [title for title, _ in shown["summary"]]


def test_an_analysis_of_a_new_file_is_on_the_command_line(made_up, capsys, tmp_path):
    from sim.trace.io import save

    save(TRACE, tmp_path / "t.jsonl")
    words = ("run", "--profile", "a100_40_pcie", "--trace", str(tmp_path / "t.jsonl"))
    assert "longest_op" in "".join(tiersim("run", "--help", capsys=capsys)[1].split())
    code, out, _ = tiersim(*words, "--analysis", "longest_op", capsys=capsys)
    assert code == 0
    assert "longest_op: The op that ran longest." in out
    _, out, _ = tiersim(*words, "--json", "--analysis", "longest_op", capsys=capsys)
    (record,) = json.loads(out)["analyses"]["longest_op"]
    assert record["run_ns"] == json.loads(out)["longest_op_ns"]


def test_a_key_is_declared_once(made_up, monkeypatch):
    module = registry.modules()[-1]
    monkeypatch.setitem(module.FIGURES, "peak_bytes", Figure("bytes", "peak", "again"))
    figures.cache_clear()
    with pytest.raises(TiersimError, match=r"^sim/analysis/longest\.py: figure 'peak_bytes' is declared already$"):
        figures()


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        (Figure("ns", "x", "y", of=lambda log, reference: 1), "no unit is called 'ns' (valid: 'bytes', "),
        (Figure("bits", "x", "y", of=lambda log, reference: 1), "no unit is called 'bits' (did you mean 'bytes'?)"),
        (Figure("time", "x", "y"), "needs `of`"),
    ],
)
def test_a_figure_that_cannot_be_shown_is_refused_with_its_file(made_up, monkeypatch, figure, said):
    monkeypatch.setitem(registry.modules()[-1].FIGURES, "mine", figure)
    figures.cache_clear()
    with pytest.raises(TiersimError) as caught:
        figures()
    assert str(caught.value).startswith(f"sim/analysis/longest.py: figure 'mine'{':' if figure.of else ''} {said}")


# ---- what is declared ------------------------------------------------------------------------------


def test_every_key_of_every_row_is_declared(tmp_path):
    small = compare(TRACE, PLATFORM, ["keep_all", "full_recompute"], budget="100 kB", find_floor=True).rows
    rows = (*compare(TRACE, PLATFORM, ["keep_all", "zero_offload"]).rows, *small)
    assert {key for row in rows for key in row} <= set(known())
    assert set(FIRST) <= set(known())
    assert {"wall_s", "plan_s"} <= {*TIMING} & {*known()}


def test_a_unit_is_that_of_the_keys_name():
    ends = {"_ns": "time", "_bytes": "bytes", "_fraction": "percent", "_share": "percent"}
    for key, each in known().items():
        for end, unit in ends.items():
            assert not key.endswith(end) or each.unit == unit, key


def test_titles_are_different_and_meanings_say_more():
    titles = [each.title for each in known().values()]
    assert len(set(titles)) == len(titles)
    assert len(set(columns().values())) == len(columns())
    assert all(each.meaning for each in known().values())
    assert not set(figures()) & set(BESIDE)


def test_the_document_is_that_of_the_declarations():
    assert make_figures.TARGET.read_text(encoding="utf-8") == make_figures.page(), "run scripts/make_figures.py"


# ---- analyses on the command line ------------------------------------------------------------------


@pytest.mark.parametrize("name", analyses())
def test_every_analysis_gives_records_of_json_values(name):
    result = simulate(uniform_chain(8), PLATFORM, "swap_all")
    records = as_records(analyses()[name](result.log))
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert len({tuple(record) for record in records}) <= 1


def test_every_public_analysis_is_one():
    import sim.analysis as package

    functions = {name for name in package.__all__ if callable(getattr(package, name)) and name[0].islower()}
    others = {"pareto", "pareto_front", "samples_in", "summarize"}  # of rows, of a trace's fields; the summary itself
    assert functions - set(analyses()) == others


def test_an_analysis_is_printed_and_written(capsys, tmp_path):
    words = ("run", "--profile", "a100_40_pcie", "--model", "gpt2", "--batch", "1", "--seq", "16")
    code, out, _ = tiersim(
        *words, "--analysis", "traffic", "--analysis", "lifetimes", "-o", str(tmp_path / "out"), capsys=capsys
    )
    assert code == 0
    assert "traffic: " in out
    assert "more rows; --json prints and -o writes all of them" in out
    head, *lines = (tmp_path / "out" / "lifetimes.csv").read_text().splitlines()
    assert head.startswith("tensor,role,layer,bytes,")
    assert len(lines) > 1000
    code, out, err = tiersim(*words, "--analysis", "trafic", capsys=capsys)
    assert (code, out, err) == (2, "", "tiersim: no analysis is called 'trafic' (did you mean 'traffic'?)\n")


def test_what_declares_figures_is_named_by_its_module():
    assert declared.__name__ not in {module.__name__ for module in registry.modules()}
