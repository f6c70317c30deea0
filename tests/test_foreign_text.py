"""What a file calls things is shown and never acts: not in a terminal, not in a spreadsheet."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

import sim.cli
from sim.errors import TraceError
from sim.foreign_text import Stream, cell, csv_text, printable, styled
from sim.trace import TraceBuilder
from sim.trace.io import load, save

EVIL = "=1+1\x1b[31mred\x1b]0;title\x07\u202e"


@pytest.fixture
def evil(tmp_path):
    """A trace in which every name acts where it is believed."""
    b = TraceBuilder({"model": EVIL})
    w, x, y = b.tensor(EVIL, 1_000_000, "weight"), b.tensor("x", 8_000_000, "input"), b.tensor(f"+y\n{EVIL}", 9_000_000)
    b.op(f"@{EVIL}", "elementwise", reads=[w, x], writes=[y], flops=1000)
    save(b.build(outputs=[y], carry=()), tmp_path / "evil.jsonl")
    return str(tmp_path / "evil.jsonl")


def ran(monkeypatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["tiersim", *words])
    with pytest.raises(SystemExit) as end:
        sim.cli.main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    "words",
    [
        ("trace", "show", "TRACE"),
        ("run", "--profile", "p100", "--trace", "TRACE", "--analysis", "lifetimes"),
        ("run", "--profile", "p100", "--trace", "TRACE", "--budget", "10 MB"),
        ("compare", "--profile", "p100", "--trace", "TRACE", "--policies", "keep_all", "--budget", "10 MB"),
        ("run", "--profile", "p100", "--model", EVIL),
        ("run", "--profile", EVIL, "--model", "gpt2"),
        ("run", "--profile", "p100", "--trace", "TRACE", "--policy", EVIL),
        ("sweep", EVIL),
        ("results", "list", EVIL),
        ("run", "--profile", "keys.toml", "--model", "gpt2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("terminal", [False, True])
def test_no_control_character_reaches_the_terminal(words, terminal, evil, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("keys.toml").write_text('description = "x"\n["a\\u001b[2J"]\n')
    monkeypatch.setattr("sim.foreign_text.Stream.isatty", lambda stream: terminal)
    monkeypatch.setenv("TERM", "xterm")
    ran(monkeypatch, *(evil if word == "TRACE" else word for word in words))
    out, err = capsys.readouterr()
    assert out + err
    assert "\x1b[31m" not in out + err
    assert "\x1b[2J" not in out + err
    said = re.sub(r"\x1b\[[0-9;]*m", "", out + err) if terminal else out + err  # tables have colours of their own
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", said)
    assert "\\x1b[31mred" in out + err or "trace" not in words


def test_no_cell_of_a_table_is_a_formula(evil, tmp_path, monkeypatch):
    from sim import compare, load_profile, simulate
    from sim.analysis.registry import analysis, as_records
    from sim.report.analyses import analysis_csv
    from sim.report.table import comparison_csv
    from sim.sweeps.frame import write_csv

    trace, platform = load(evil), load_profile("p100")
    log = simulate(trace, platform).log
    written = [
        comparison_csv([{**row, "policy": EVIL} for row in compare(trace, platform, ["keep_all"], jobs=1).rows]),
        analysis_csv(as_records(analysis("lifetimes")(log))),
        write_csv(
            [({"id": "a", "labels": {EVIL: f"-{EVIL}"}}, {"row": {"status": "ok", "x": -3}, "ran": {}})],
            tmp_path / "x.csv",
        ).read_text(),
    ]
    for text in written:
        for row in csv.reader(io.StringIO(text)):
            for value in row:
                assert not re.match(r"\s*[=+@]|\s*-[^\d]", value)
                assert "\x1b" not in value
    assert ",-3" in written[-1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [("=1+1", "'=1+1"), (" @f", "' @f"), ("-1.5", "-1.5"), ("-x", "'-x"), (-3, -3), (None, None), ("a=b", "a=b")],
)
def test_a_text_that_a_spreadsheet_would_compute_begins_with_an_apostrophe(value, shown):
    assert cell(value) == shown


class Terminal(io.StringIO):
    def __init__(self, tty, encoding="utf-8"):
        super().__init__()
        self.tty, self.code = tty, encoding

    def isatty(self):
        return self.tty

    @property
    def encoding(self):
        return self.code


@pytest.mark.parametrize(
    ("tty", "encoding", "text", "shown"),
    [
        (True, "utf-8", "\x1b[1mbold\x1b[0m\x1b]52;c;x\x07é\n", "\x1b[1mbold\x1b[0m\\x1b]52;c;x\\x07é\n"),
        (False, "utf-8", "\x1b[1mbold\x1b[0m \ud800\n", "\\x1b[1mbold\\x1b[0m \\ud800\n"),
        (False, "utf-8", "good\rbad\r\n", "good\\rbad\\r\n"),
        (True, "utf-8", "12 of 20\r\x1b[K", "12 of 20\r\x1b[K"),
        (False, "ascii", "1 µs … 量\n", "1 \\xb5s \\u2026 \\u91cf\n"),
    ],
)
def test_a_stream_keeps_its_own_colours_and_nothing_else_that_acts(tty, encoding, text, shown):
    below = Terminal(tty, encoding)
    print(text, end="", file=styled(Stream(below)))
    assert below.getvalue() == shown


def test_a_name_hides_no_line_and_begins_none(evil, tmp_path, monkeypatch, capsys):
    from sim.report.page.document import document

    monkeypatch.chdir(tmp_path)
    ran(monkeypatch, "run", "--profile", "p100", "--trace", evil, "-o", "out")
    capsys.readouterr()
    assert ran(monkeypatch, "explain", "out", "--trust", "--seconds", "0") == 0
    out, _ = capsys.readouterr()
    assert "+y\\n=1+1" in out
    assert "+y\n" not in out
    assert "<title>=1+1\\x1b[31mred" in document(EVIL, {}, {})
    below = Terminal(True, "utf-8")
    print("good\rbad", end="", file=Stream(below))
    assert below.getvalue() == "good\\rbad"


def test_a_stream_that_is_not_the_writers_of_colours_shows_none():
    below = Terminal(True, "utf-8")
    print("\x1b[2J", end="", file=Stream(below))
    assert below.getvalue() == "\\x1b[2J"


def test_ordinary_text_of_any_script_stays_as_it_is():
    text = "GPT-2 中文 é ≈ ✗ 1\u00a0GB"
    assert printable(text) == text


@pytest.mark.parametrize("place", ["tensor", "op", "meta", "dtype", "engine"])
def test_half_a_character_is_refused_on_reading(place, tmp_path):
    half = "\ud800x"
    head = {"format": "tiersim trace", "version": 1, "meta": {"model": half} if place == "meta" else {}}
    tensor = {"tensor": half if place == "tensor" else "x", "bytes": 8, **({"dtype": half} if place == "dtype" else {})}
    op = {"op": half if place == "op" else "f", "reads": [tensor["tensor"]], "writes": []}
    op |= {"engine": half} if place == "engine" else {}
    path = tmp_path / "half.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (head, tensor, op)))
    with pytest.raises(TraceError, match="half a character"):
        load(path)


def test_a_fault_of_the_program_is_one_line_that_says_where_to_report_it(capsys, monkeypatch):
    def fails():
        raise KeyError("a\nb")

    monkeypatch.setattr("sim.report.listings.policy_listing", lambda *_: fails())
    assert ran(monkeypatch, "policies") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "KeyError" in line
    assert "test_foreign_text.py, line" in line
    assert "CONTRIBUTING.md" in line
    monkeypatch.setenv("TIERSIM_TRACEBACK", "1")
    ran(monkeypatch, "policies")
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_has_read_enough_is_no_fault(capsys, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("sim.report.listings.policy_listing", closed)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    assert ran(monkeypatch, "policies") == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mark", [";", "\t", "|", "\n"])
@pytest.mark.parametrize("text", ["=1", "x{}=HYPERLINK(1)", "x{0}{0} +1", 'x{}"=1"', "x{0}@a{0}-2"])
def test_no_part_of_a_line_is_a_formula_for_whoever_splits_it_elsewhere(text, mark):
    """Reads as a spreadsheet does that splits lines at another mark, which does not heed quotes inside a cell."""
    whole = csv_text([{"a": "plain", "b": text.format(mark), "c": "plain"}], ["a", "b", "c"])
    parts = re.split(r"[,\n]" if mark == "\n" else re.escape(mark) + r"|\n", whole)
    assert not [part for part in parts if part.strip(' "\t')[:1] in tuple("=+-@")]


def test_semicolons_and_numbers_stay_as_they_are():
    assert [cell(text) for text in ("a; b", "-1.5", "a-b; c=d", "a;b;")] == ["a; b", "-1.5", "a-b; c=d", "a;b;"]


def test_a_path_of_thousands_of_characters_is_not_repeated_whole(capsys, monkeypatch):
    assert ran(monkeypatch, "report", "x" * 5000, "-o", "page.html") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("File name too long\n")
    assert len(err) < 1100
