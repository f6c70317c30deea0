"""Rows that stream are those that the whole document has, wherever the text is cut."""

from __future__ import annotations

import gzip
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from workloads import load_trace
from workloads.importers import streaming
from workloads.importers.chrome import read_chrome
from workloads.importers.dtr import read_dtr
from workloads.importers.execution_trace import read_execution_trace
from workloads.importers.streaming import Document, open_document

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[2]

NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False), st.sampled_from([-0.0, 1e22, 1.5e-7, -(10**30), 0]))
SCALARS = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=12))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
LAYOUTS = st.sampled_from([None, 0, 3])


def rows_of(data: bytes, name: str = "rows", chunk: int = 1) -> tuple[list[Any], dict[str, Any]]:
    document = Document(io.BytesIO(data), chunk=chunk)
    document.find(name)
    return list(document.rows(name)), document.about


def problem(data: bytes, chunk: int = 7) -> str:
    with pytest.raises(TraceError) as caught:
        rows_of(data, chunk=chunk)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- the same rows -------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(rows=st.lists(VALUES, max_size=6), indent=LAYOUTS, chunk=st.integers(1, 40), ascii_only=st.booleans())
@example(rows=[1e-7, -1.25e300, 10, -math.inf, math.inf, True, None], indent=None, chunk=1, ascii_only=True)
@example(rows=["\U0001f600\ud83d", 'é\\u0041"', "\\"], indent=None, chunk=1, ascii_only=True)
def test_rows_are_those_of_the_whole_document_wherever_it_is_cut(
    rows: list[Any], indent: int | None, chunk: int, ascii_only: bool
) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    data = text.encode("utf-8", "surrogatepass")
    assert repr(rows_of(data, chunk=chunk)[0]) == repr(json.loads(text))


@settings(max_examples=100)
@given(
    before=st.dictionaries(st.text(max_size=5).map("b{}".format), VALUES, max_size=3),
    rows=st.lists(VALUES, max_size=4),
    after=st.dictionaries(st.text(max_size=5).map("a{}".format), VALUES, max_size=3),
    indent=LAYOUTS,
    chunk=st.integers(1, 40),
)
def test_members_round_the_rows_are_kept_unless_they_hold_others(
    before: dict[str, Any], rows: list[Any], after: dict[str, Any], indent: int | None, chunk: int
) -> None:
    document = {**before, "rows": rows, **after}
    found, about = rows_of(json.dumps(document, indent=indent).encode(), chunk=chunk)
    assert repr(found) == repr(rows)
    assert list(about) == list(document)
    assert about == {key: type(v)() if isinstance(v, (list, dict)) else v for key, v in document.items()}


@settings(max_examples=100)
@given(rows=st.lists(VALUES, max_size=4), data=st.data())
def test_what_the_whole_document_would_be_refused_for_is_refused_at_the_same_place(
    rows: list[Any], data: st.DataObject
) -> None:
    text = json.dumps({"a": 1, "rows": rows, "b": [2]}, indent=data.draw(LAYOUTS))
    at = data.draw(st.integers(1, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", ",", "}", "]", '"', "x", "\n", "1", ":"])) + text[at + 1 :]
    text = text[: data.draw(st.integers(1, len(text)))]
    expected, whole = "", None
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        exact = f"line {error.lineno}, column {error.colno}: not valid JSON"
        expected = "line " if "trailing comma" in error.msg else exact  # Python 3.13 places these elsewhere
    if expected:
        said = problem(text.encode(), data.draw(st.integers(1, 40)))
        assert said.startswith((expected, "two members are named 'rows'", "rows: expected list"))
    elif isinstance(whole, dict) and isinstance(whole.get("rows"), list) and text.count('"rows"') == 1:
        assert repr(rows_of(text.encode())[0]) == repr(whole["rows"])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
def test_every_encoding_that_json_allows_is_read(encoding: str, chunk: int) -> None:
    rows = [{"é": "\U0001f600"}, 12.5, "中"]
    assert rows_of(json.dumps(rows, ensure_ascii=False).encode(encoding), chunk=chunk)[0] == rows


@pytest.mark.parametrize("name", ["smallcnn.chrome.json.gz", "smallcnn.et.json.gz"])
@pytest.mark.parametrize("chunk", [61, 4096])
def test_real_files_have_the_same_rows(name: str, chunk: int) -> None:
    whole = json.loads(gzip.decompress((DATA / name).read_bytes()))
    key = "traceEvents" if "chrome" in name else "nodes"
    with open_document(DATA / name, chunk=chunk) as document:
        document.find(key)
        assert list(document.rows(key)) == whole[key]


# ---- what is refused -----------------------------------------------------------------------------------


def test_a_number_of_thousands_of_digits_is_placed() -> None:
    assert problem(b'{"rows": [1,\n ' + b"9" * 10_000 + b"]}") == "line 2, column 2: not valid JSON (ValueError)"
    assert rows_of(b"[" + b"9" * 10_000 + b"e-9990]")[0] == [pytest.approx(1e10)]


def test_too_deep_a_row_is_placed() -> None:
    assert problem(b"[0,\n" + b"[" * 200_000, 1 << 20) == "line 2, column 1: not valid JSON (RecursionError)"


def test_bytes_that_are_no_text_are_refused() -> None:
    for chunk in range(1, 12):
        where = "line 2, column 3: not valid JSON (UnicodeDecodeError)"
        assert problem(b'[1,\n"\xc3\xa9\xff\xff"]', chunk) == where
        assert problem(b"[1]\n  \xe2\x82", chunk) == where


def test_two_arrays_of_one_name_are_refused() -> None:
    assert problem(b'{"rows": [1], "rows": [2]}') == "two members are named 'rows'"


def test_a_member_that_is_no_array_and_one_that_is_missing_are_refused() -> None:
    assert problem(b'{"rows": {"a": 1}}') == "rows: expected list, found dict"
    assert problem(b'{"rows": 3}') == "rows: expected list, found int"
    assert problem(b'{"a": 3}') == "rows: expected list, found NoneType"


def test_a_row_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MAX_ROW", 100)
    assert rows_of(b'["' + b"a" * 90 + b'"]')[0] == ["a" * 90]
    assert problem(b'["' + b"a" * 900 + b'"]') == "line 1, column 2: a value of more than 100 characters"
    many = [["a" * 20] * 2] * 50
    assert rows_of(json.dumps({"x": many, "rows": many}).encode())[0] == many


def test_more_bytes_than_allowed_are_refused_when_they_are_met(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(gzip.compress(b"[" + b"1," * 1_000_000 + b"1]"))
    seen: list[Any] = []

    def read() -> None:
        with open_document(tmp_path / "bomb", 1000, chunk=100) as document:
            for row in document.rows():
                seen.append(row)

    with pytest.raises(TraceError, match="bomb: larger than 1,000 bytes unpacked"):
        read()
    assert 0 < len(seen) < 500


def test_a_gzip_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    packed = (DATA / "smallcnn.chrome.json.gz").read_bytes()
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"cut\.gz: cannot be read: "):
        load_trace(tmp_path / "cut.gz")


def test_a_long_row_is_decoded_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = streaming.DECODER.raw_decode

    class Counting:
        def raw_decode(self, text: str, at: int) -> tuple[Any, int]:
            lengths.append(len(text) - at)
            return decode(text, at)

    monkeypatch.setattr(streaming, "DECODER", Counting())
    data = json.dumps([list(range(200_000))]).encode()
    assert rows_of(data, chunk=16)[0] == [list(range(200_000))]
    assert sum(lengths) < 4 * len(data)


# ---- formats -------------------------------------------------------------------------------------------

CALL = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 2, "args": {}}
HELD = {"ph": "i", "name": "[memory]", "ts": 1, "args": {"Bytes": 8, "Addr": 1, "Total Allocated": 8}}
NODE = {"id": 1, "name": "aten::mm", "inputs": [[1, 1, 0, 4, 4, "cpu"]], "outputs": [[2, 2, 0, 4, 4, "cpu"]]}


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ({"traceEvents": [CALL, HELD], "z": {"a": [1]}}, "chrome"),
        ({"z": {"a": [1]}, "nodes": 0, "traceEvents": [CALL, HELD]}, "chrome"),
        ([{"ph": "M"}, CALL, HELD], "chrome"),
        ({"schema": "1.0.1", "nodes": [{**NODE, "op_schema": "mm(Tensor a) -> Tensor"}]}, "execution trace"),
        ({"nodes": [{**NODE, "op_schema": "mm(Tensor a) -> Tensor"}], "schema": "1.0.1"}, "execution trace"),
        ({"nodes": [{"id": 1, "name": "a", "type": 4, "data_deps": []}], "x": 1}, "chakra"),
        ([{"id": 1, "name": "a", "type": 4, "data_deps": []}], "chakra"),
    ],
)
def test_the_format_is_found_in_whatever_order_the_members_stand(document: Any, kind: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(json.dumps(document))
    if isinstance(document, dict) and document.get("nodes") == 0:
        with pytest.raises(TraceError, match="nodes: expected list, found int"):
            load_trace(tmp_path / "f")
        return
    trace = load_trace(tmp_path / "f")
    assert trace.meta["format"] == kind
    assert kind != "execution trace" or trace.meta["schema"] == "1.0.1"


def test_an_op_trace_is_found_where_its_format_stands_last(tmp_path: Path) -> None:
    document = json.loads(gzip.decompress((DATA / "resnet-50.optrace.json.gz").read_bytes()))
    document["format"] = document.pop("format")
    (tmp_path / "resnet-50.optrace.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))
    assert load_trace(tmp_path / "resnet-50.optrace.json.gz") == load_trace(DATA / "resnet-50.optrace.json.gz")


def test_what_follows_the_rows_must_be_json_too(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(json.dumps({"traceEvents": [CALL]})[:-1] + ',\n"a": [1, x]}')
    with pytest.raises(TraceError, match=r"/f: line 2, column 10: not valid JSON \(Expecting value\)"):
        load_trace(tmp_path / "f")


@pytest.mark.parametrize("read", [load_trace, read_chrome, read_execution_trace, read_dtr])
def test_a_missing_file_is_named_once(read: Any, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path / "gone")
    assert str(caught.value).count("gone: no such file") == str(caught.value).count("gone:") == 1


def test_a_gzipped_log_is_read_from_its_start_line_on_and_never_beyond_what_is_allowed(tmp_path: Path) -> None:
    lines = [*DTR, {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}, *DTR]
    (tmp_path / "log").write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    trace = read_dtr(tmp_path / "log")
    assert len(trace.ops) == 1
    assert trace.meta["left_out"] == {"lines before START": 4}
    with pytest.raises(TraceError, match="log: larger than 300 bytes unpacked"):
        read_dtr(tmp_path / "log", max_bytes=300)


MEMORY = """
import sys
from workloads import load_trace

def most():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

load_trace(sys.argv[1])
before = most()
load_trace(sys.argv[2])
print(most() - before)
"""


EXTRA = {"Call stack": ["a" * 40] * 10, "Ids": list(range(500))}
DTR = [
    {"INSTRUCTION": "CONSTANT", "NAME": "w"},
    {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": 8},
    {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": ["w"], "RESULT": [], "TIME": 1},
]


def filled(kind: str, count: int) -> str:
    """A small trace with many rows of which little or nothing is used, one per line."""
    unused = {"ph": "X", "cat": "python_function", "name": "f", "ts": 1, "dur": 1, "args": EXTRA}
    if kind == "DTR log":
        return "\n".join(map(json.dumps, [*DTR, *[{"INSTRUCTION": "NOTE", **EXTRA}] * count]))
    if kind == "execution trace":
        call = {"id": 1, "name": "f", "inputs": [[1, 1, 0, 4, 4, "cpu"]], "outputs": [[2, 2, 0, 4, 4, "cpu"]]}
        nodes = [call, *({"id": i + 2, "name": "f", "inputs": [], "outputs": [], "x": EXTRA} for i in range(count))]
        return '{"schema": "1", "nodes": [' + ",\n".join(map(json.dumps, nodes)) + "]}"
    rows = "[" + ",\n".join(map(json.dumps, [CALL, HELD, *[unused] * count])) + "]"
    return rows if kind == "bare array" else f'{{"traceEvents": {rows}}}'


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the high-water mark from /proc")
@pytest.mark.parametrize("kind", ["chrome", "bare array", "execution trace", "DTR log"])
def test_an_import_takes_less_memory_than_its_file_has_bytes(kind: str, tmp_path: Path) -> None:
    """A document held whole takes its text and several times that in values. Nodes are kept, so that they take more."""
    (tmp_path / "small").write_text(filled(kind, 1))
    (tmp_path / "large").write_text(filled(kind, 4_500))
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large")]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert taken < (tmp_path / "large").stat().st_size * (0.9 if kind == "execution trace" else 0.5)


@pytest.mark.parametrize("name", ["rows", "others"])
@pytest.mark.parametrize("sign", ["[]", "{}"])
def test_many_short_entries_are_refused_before_all_are_read(
    name: str, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MANY_ROWS", 1000)

    def text(entry: str, count: int = 5000) -> bytes:
        entries = ",".join([entry if sign == "[]" or name == "rows" else f'"a":{entry}'] * count)
        rows = f'"rows":{"[" + entries + "]" if name == "rows" else "[1]"}'
        other = "" if name == "rows" else f'"{name}":{sign[0]}{entries}{sign[1]},'
        return f"{{{other}{rows}}}".encode()

    found = problem(text("{}" if sign == "{}" else "1"))
    assert "1,000 entries of less than 32 bytes each" in found
    assert int(found.split("column ")[1].split(":")[0]) < 9000  # where it gave up
    assert rows_of(text('"' + 40 * "a" + '"'))[0]
    assert rows_of(text("{}", 999))[0]
