"""Files hold all that a trace says; whatever else they say is refused in one line."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.rewrites.rewrite import Codec, encode, pack_tensors, split_batch, split_tensors, unroll
from sim.trace import Implementation, Trace, TraceBuilder
from sim.trace.io import load, save
from sim.trace.io_columns import take_columns
from tests.strategies import traces
from workloads.synthetic import random_dag, w1

HEAD = '{"format": "tiersim trace", "version": 1}'
X = '{"tensor": "x", "bytes": 8, "role": "input"}'
Y = '{"tensor": "y", "bytes": 8}'
F = '{"op": "f", "reads": ["x"], "writes": ["y"]}'


@settings(max_examples=40, deadline=None)
@given(trace=traces(), packed=st.booleans(), rewritten=st.booleans())
def test_a_trace_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, packed: bool, rewritten: bool
) -> None:
    if rewritten:
        trace = unroll(trace, 2)
    path = tmp_path_factory.getbasetemp() / f"trace.jsonl{'.gz' if packed else ''}"
    save(trace, path)
    again = load(path)
    assert again.content_hash == trace.content_hash
    assert again.origin == trace.origin
    assert list(again.ops) == list(trace.ops)
    assert list(again.tensors) == list(trace.tensors)
    assert again.meta == trace.meta


def test_every_kind_of_origin_and_every_field_comes_back(tmp_path: Path) -> None:
    b = TraceBuilder({"model": "é ∑", "list": [1, 2.5, None], "batch": 4})
    x = b.tensor('a"b\\c\n:', 8, "input", shape=(2, 4), dtype="bf16", zeros=0.25)
    y = b.tensor("y", 8, layer=3, saved_for="because", shape=())
    fast = Implementation("fast", 0.1, 77)
    fields = {"flops": 2**61, "bytes": 0, "workspace": 5, "device": 2, "engine": "dma", "priority": -4, "group": "g"}
    more = {"random": True, "duration": 0, "dtype": "fp8", "alternatives": [fast], "splits": ["rows", "heads"]}
    z, held = b.tensor("z", 8), b.tensor("held", 8)
    b.op("f", "conv", reads=[x], writes=[y, z, held], layer=3, **fields, **more)
    b.op(
        "g",
        reads=[x, z],
        writes=[b.tensor("view", 0), b.tensor("none", 0)],
        views=[1, -1],
        releases=[held, z],
        unbinds=[y],
    )
    trace = b.build(outputs=[y])
    save(trace, tmp_path / "t.jsonl")
    again = load(tmp_path / "t.jsonl")
    assert list(again.ops) == list(trace.ops)
    assert list(again.tensors) == list(trace.tensors)
    assert again == trace
    big = split_tensors(split_batch(w1(2), 2), {"h0.gelu.mb0": 3})
    big = encode(big, {"h1.gelu.mb1": Codec("z", 0.5, lossless=False), "h1.ln1.mb0": Codec("q", 0.1)})
    big = pack_tensors(big, {"pack": ["h0.wqkv", "h1.wqkv"], "grads": ["h0.qkv.dw.mb1", "h1.qkv.dw.mb1"]})
    save(big, tmp_path / "big.jsonl.gz")
    assert load(tmp_path / "big.jsonl.gz").origin == big.origin


ODD = st.sampled_from(
    (-1, 0, 1, 2**31, 2**63, 1.5, True, None, "x", "", "h0.ln1", [], [0], [True], ["batch"], {}, [[0]])
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_reading_many_lines_at_once_is_reading_them_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.jsonl"
    save(w1(1), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # tensors and ops in runs, or a header whose end is not where a run begins
    line = lines[data.draw(st.integers(1, len(lines) - 1))]
    key = data.draw(
        st.sampled_from(sorted({*line, "shape", "replaces", "random", "dtype", "releases", "views", "extra"}))
    )
    line[key] = data.draw(ODD)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    results = []
    for at_once in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not at_once:
                patch.setattr("sim.trace.io.take_columns", lambda reader, rows: False)
            else:
                patch.setattr("sim.trace.io.BATCH", 200)  # so that most runs are of one kind
            try:
                results.append(load(path).content_hash)
            except TraceError as problem:
                results.append(str(problem))
    assert results[0] == results[1]


def test_plain_lines_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, answers = tmp_path / "t.jsonl", []
    save(random_dag(60, 1), path)

    def noting(reader: object, rows: list) -> bool:
        answers.append(take_columns(reader, rows))  # type: ignore[arg-type]
        return answers[-1]

    monkeypatch.setattr("sim.trace.io.take_columns", noting)
    monkeypatch.setattr("sim.trace.io.BATCH", 500)
    assert load(path) == random_dag(60, 1)
    assert sum(answers) > 0.8 * len(answers) > 10


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        save(w1(2), tmp_path / name)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "hand.jsonl"
    path.write_text("\n".join((HEAD, "", X, Y, F, '{"op" : "g", "reads": [1]}')))
    trace = load(path)
    assert [op.reads for op in trace.ops] == [(0,), (1,)]
    assert trace.ops[0].kind == "other"
    assert trace.tensors[1].role == "activation"


def bad(tmp_path: Path, *lines: str, name: str = "bad.jsonl") -> str:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text.removeprefix(str(path))


@pytest.mark.parametrize(
    ("where", "text", "lines"),
    [
        (1, "empty", [""]),
        (1, "must contain", ['{"tensor": "x"}']),
        (1, "must be an object", ["[1]"]),
        (1, "version 2 is not known", [HEAD.replace("1", "2")]),
        (1, "key 'outputz' is unknown (did you mean 'outputs'?)", [HEAD[:-1] + ', "outputz": []}']),
        (1, "meta: '3' is not an object", [HEAD[:-1] + ', "meta": 3}']),
        (2, "not JSON", [HEAD, '{"tensor": "x", "byt']),
        (2, "not JSON", [HEAD, X + ",", Y]),
        (2, "'bytes' is missing", [HEAD, '{"tensor": "x"}']),
        (2, "bytes: '1.5' is not a whole number", [HEAD, '{"tensor": "x", "bytes": 1.5}']),
        (2, "bytes: 'True' is not", [HEAD, '{"tensor": "x", "bytes": true}']),
        (2, "bytes: -1 is out of range", [HEAD, '{"tensor": "x", "bytes": -1}']),
        (2, "bytes: 9223372036854775808 is out of range", [HEAD, f'{{"tensor": "x", "bytes": {2**63}}}']),
        (2, "many digits", [HEAD, f'{{"tensor": "x", "bytes": {10**400}}}']),
        (2, "not JSON", [HEAD, f'{{"tensor": "x", "bytes": 1{"0" * 5000}}}']),
        (2, "NaN is not a number", [HEAD, '{"tensor": "x", "bytes": 1, "zeros": NaN}']),
        (2, "zeros: '2'", [HEAD, '{"tensor": "x", "bytes": 1, "zeros": 2}']),
        (2, "shape: '-1'", [HEAD, '{"tensor": "x", "bytes": 1, "shape": [-1]}']),
        (2, "role 'wieght' is unknown (did you mean 'weight'?)", [HEAD, X.replace("input", "wieght")]),
        (2, "'bytes' appears twice", [HEAD, '{"tensor": "x", "bytes": 1, "bytes": 2}']),
        (2, "'bytes' appears twice", [HEAD, '{"tensor": "x", "bytes": 1, "bytes" : 2}']),
        (3, "tensor 'x': it is defined twice", [HEAD, X, X]),
        (3, "neither a tensor nor an op", [HEAD, X, '{"name": "y"}']),
        (3, "no tensor 'z' precedes this line", [HEAD, X, '{"op": "f", "reads": ["z"]}']),
        (3, "tensor 1 is out of range", [HEAD, X, '{"op": "f", "reads": [1]}']),
        (3, "give its name or its id", [HEAD, X, '{"op": "f", "reads": [[0]]}']),
        (3, "kind 'matmull' is unknown", [HEAD, X, '{"op": "f", "kind": "matmull"}']),
        (3, "phase 'fwd' is unknown", [HEAD, X, '{"op": "f", "phase": "fwd"}']),
        (3, "splits: 'batches' is unknown", [HEAD, X, '{"op": "f", "splits": ["batches"]}']),
        (3, "alternatives", [HEAD, X, '{"op": "f", "alternatives": [["a", "b", 0]]}']),
        (3, "key 'flop' is unknown (did you mean 'flops'?)", [HEAD, X, '{"op": "f", "flop": 1}']),
        (5, "op 'f': it is defined twice", [HEAD, X, Y, F, '{"op": "f"}']),
        (5, "op 'g': tensor 'y' already has a producer", [HEAD, X, Y, F, F.replace('"f"', '"g"')]),
        (3, "replaces: no tensor 'q' precedes this line", [HEAD, X, '{"tensor": "y", "bytes": 8, "replaces": "q"}']),
        (4, "1 ops, but the header says 3", [HEAD[:-1] + ', "ops": 3}', X, Y, F]),
        (1, "no tensor 'q'", [HEAD[:-1] + ', "outputs": ["q"]}', X]),
        (1, "carry must be a list of pairs", [HEAD[:-1] + ', "carry": [1]}', X]),
        (2, "the header has no origin", [HEAD, X[:-1] + ', "stands_for": 0}']),
        (2, "`stands_for` is missing", [HEAD[:-1] + ', "origin": {"base": "b"}}', X]),
        (
            2,
            "is not an origin",
            [HEAD[:-1] + ', "origin": {"base": "b"}}', X[:-1] + ', "stands_for": ["part", 0, 2, 1]}'],
        ),
        (2, "nested too deeply", [HEAD, X[:-1] + ', "shape": ' + "[" * 100_000 + "]" * 100_000 + "}"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, where: int, text: str, lines: list[str]) -> None:
    complaint = bad(tmp_path, *lines)
    assert complaint.startswith(f": line {where}: ")
    assert text in complaint


def test_a_read_before_the_write_names_file_op_and_tensor(tmp_path: Path) -> None:
    complaint = bad(tmp_path, HEAD, X, Y, '{"op": "g", "reads": ["y"]}', F)
    assert "op 'g': tensor 'y': reads it before 'f' produces it" in complaint


def test_a_damaged_or_cut_archive_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl.gz"
    save(w1(4), whole)
    data = whole.read_bytes()
    for name, broken in (
        ("cut", data[: len(data) // 2]),
        ("noise", data[:60] + bytes(40) + data[100:]),
        ("text", b"no gzip at all"),
        ("tail", data[:-4]),
    ):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(broken)
        with pytest.raises(TraceError, match=f"{name}.jsonl.gz: line"):
            load(path)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3000))
def test_every_prefix_of_a_file_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "prefix.jsonl"
    save(w1(1), path)
    data = path.read_bytes()
    path.write_bytes(data[: min(length, len(data) - 2)])
    with pytest.raises(TraceError):
        load(path)


def test_a_bomb_is_refused_before_it_takes_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(HEAD.encode() + b"\n")
        for _ in range(12):
            out.write(b" " * 1_000_000 + b"\n")
    with pytest.raises(TraceError, match="holds more than 10000000 bytes"):
        load(path, max_bytes=10_000_000)
    monkeypatch.setattr("sim.trace.io.MAX_LINE", 500_000)
    with pytest.raises(TraceError, match="line 2: the line is longer than 500000 bytes"):
        load(path)


def test_no_half_written_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    save(w1(1), path)
    before = path.read_bytes()
    b = TraceBuilder({"circular": []})
    b.meta["circular"].append(b.meta["circular"])  # cannot be written
    with pytest.raises(ValueError, match="Circular"):
        save(b.build(), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


def test_lines_leave_out_what_has_a_default(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    b = TraceBuilder()
    b.op("f", writes=[b.tensor("y", 1)])
    save(b.build(), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1] == {"tensor": "y", "bytes": 1, "role": "activation"}
    assert lines[2] == {"op": "f", "kind": "other", "phase": "forward", "reads": [], "writes": [0]}


def test_the_folder_of_a_saved_trace_is_made(tmp_path):
    path = tmp_path / "a" / "b" / "t.jsonl"
    save(w1(1), path)
    assert load(path).content_hash == w1(1).content_hash


def test_a_trace_that_cannot_be_saved_is_named_as_it_was_asked_for(tmp_path):
    with pytest.raises(IsADirectoryError) as refused:
        save(w1(1), tmp_path)
    assert refused.value.filename == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "no name"])
def test_what_is_no_file_is_refused_and_not_waited_for(kind, tmp_path):
    path = {"device": "/dev/zero", "no name": f"{tmp_path}/a\0b"}.get(kind, str(tmp_path / "t.jsonl"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    with pytest.raises(TraceError, match={"folder": "is a folder", "no name": "null byte"}.get(kind, "not a regular")):
        load(path)


def test_empty_lines_without_end_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(f"{HEAD}\n".encode())
        for _ in range(100):
            file.write(b"\n" * 1_000_000)
        file.write(b"nonsense\n")
    began = time.process_time()
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz: line 100000002: not JSON"):
        load(path)
    assert time.process_time() - began < 5  # one by one they take a minute
