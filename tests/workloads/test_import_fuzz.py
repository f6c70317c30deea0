"""Whatever a file holds, reading it gives a trace or one TraceError of one line; nothing else escapes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.trace import Trace
from tests.fuzz.traces import DOCUMENTS, content, own_chakra
from workloads import load_trace
from workloads.importers.chakra_schema import attribute, encode, messages

ROOT = Path(__file__).parents[2]
MOST = 1 << 22
FUZZ = settings(max_examples=40, suppress_health_check=list(HealthCheck))


def read(data: bytes, folder: Path) -> Trace | TraceError:
    path = folder / "f"
    path.write_bytes(data)
    try:
        return load_trace(path, max_bytes=MOST)
    except TraceError as error:
        problem = error
    assert "\n" not in str(problem)
    assert len(str(problem)) < 3000
    return problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_documents_that_are_mutated_below_are_traces(name: str, folder: Path) -> None:
    assert isinstance(read(content(name, DOCUMENTS[name]), folder), Trace)


def test_the_protobuf_that_is_mutated_below_is_a_trace(folder: Path) -> None:
    assert isinstance(read(own_chakra(), folder), Trace)


# ---- mutations -----------------------------------------------------------------------------------------

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 60),
    st.sampled_from([2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**40, -(2**63), -(10**40)]),
    st.sampled_from([0.5, -1.0, 1e300, float("inf"), float("-inf"), float("nan")]),
    st.sampled_from(
        ["", "0", "-1", "9" * 30, "cpu", "START", "aten::empty", "aten::add_", "x0", "w", "\n", "\x00", "é" * 600]
    ),
    st.sampled_from([[], {}, [[]], [[[]]], [{}], {"values": []}, [1, 2, 3, 4, 5, "cpu"], [-1, -1, -1, -1, -1, "cpu"]]),
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found, stack = [], [document]
    while stack:
        here = stack.pop()
        keys = here.keys() if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        for key in list(keys):
            found.append((here, key))
            stack.append(here[key])
    return found


def mutate(data: st.DataObject, document: Any) -> Any:
    changed = json.loads(json.dumps(document))
    for _ in range(data.draw(st.integers(1, 4))):
        spots = places(changed)
        if not spots:
            break
        holder, key = spots[data.draw(st.integers(0, len(spots) - 1))]
        how = data.draw(st.sampled_from(["replace", "delete", "copy", "swap", "double"]))
        if how == "replace":
            holder[key] = deepcopy(data.draw(ODD))  # a later change must not reach the values that are drawn from
        elif how == "delete":
            del holder[key]
        elif how == "double" and isinstance(holder, list):
            holder.insert(key, holder[key])
        else:
            other, its = spots[data.draw(st.integers(0, len(spots) - 1))]
            if how == "copy":
                holder[key] = json.loads(json.dumps(other[its]))
            elif (
                how == "swap" and not isinstance(holder[key], (list, dict)) and not isinstance(other[its], (list, dict))
            ):
                holder[key], other[its] = other[its], holder[key]
    return changed


@pytest.mark.parametrize("name", DOCUMENTS)
@FUZZ
@given(data=st.data())
def test_a_document_with_anything_changed_is_a_trace_or_a_trace_error(
    name: str, folder: Path, data: st.DataObject
) -> None:
    read(content(name, mutate(data, DOCUMENTS[name])), folder)


@FUZZ
@given(data=st.data())
def test_a_file_with_bytes_changed_cut_or_doubled_is_a_trace_or_a_trace_error(
    folder: Path, data: st.DataObject
) -> None:
    whole = [content(name, document) for name, document in DOCUMENTS.items()] + [own_chakra()]
    whole.append(gzip.compress(whole[3], mtime=0))
    raw = bytearray(data.draw(st.sampled_from(whole)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw)))
        how = data.draw(st.sampled_from(["flip", "cut", "insert", "double"]))
        if how == "flip" and at < len(raw):
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del raw[at : at + data.draw(st.sampled_from([1, 2, 8, 1 << 20]))]
        elif how == "insert":
            raw[at:at] = data.draw(st.binary(max_size=8))
        elif how == "double":
            raw[at:at] = raw[at : at + 40]
    read(bytes(raw), folder)


@FUZZ
@given(raw=st.binary(max_size=300))
@example(raw=b"\x00\x00")
@example(raw=b"\x1f\x8b\x08\x00")
def test_any_bytes_are_a_trace_or_a_trace_error(folder: Path, raw: bytes) -> None:
    read(raw, folder)


@FUZZ
@given(data=st.data())
def test_protobuf_with_random_fields_is_a_trace_or_a_trace_error(folder: Path, data: st.DataObject) -> None:
    classes, number = messages(), st.sampled_from([0, 1, 2, 3, 2**31, 2**53, 2**63, 2**64 - 1])
    text = st.sampled_from(
        ["", "a", "[[1, 2, 0, 4, 4, 'cpu']]", "[[1,1,0,8,1,'d']]", "[" * 50, '{"tensors": 3}', "{}", "[[0]]"]
    )
    keys = st.sampled_from(
        ["tensor_size", "comm_size", "op", "order", "tiersim", "kind", "phase", "layer", "why", "duration_ns"]
    )

    def attrs() -> list[Any]:
        made = []
        for _ in range(data.draw(st.integers(0, 3))):
            kind = data.draw(st.sampled_from(["uint64", "string", "bool"]))
            value = data.draw({"uint64": number, "string": text, "bool": st.booleans()}[kind])
            made.append(attribute(data.draw(keys), kind, value))
        return made

    nodes = [classes["GlobalMetadata"](attr=attrs())]
    for i in range(data.draw(st.integers(0, 5))):
        node = classes["Node"](
            id=data.draw(st.sampled_from([i, i, i, 0, 2**63])), type=data.draw(st.integers(-1, 12)), attr=attrs()
        )
        node.data_deps.extend(data.draw(st.lists(st.integers(0, 5), max_size=3)))
        node.duration_micros = data.draw(number)
        node.inputs.values, node.outputs.values = data.draw(text), data.draw(text)
        nodes.append(node)
    read(encode(nodes), folder)


@pytest.mark.parametrize("value", [10**40, 2**63, float("inf"), 7], ids=["huge", "2**63", "inf", "no object"])
@pytest.mark.parametrize("where", ["flops", "bytes", "op"])
def test_op_traces_that_once_broke_the_reader_are_refused(where: str, value: float, folder: Path) -> None:
    document = json.loads(json.dumps(DOCUMENTS["op trace"]))
    if where == "flops":
        document["ops"][0]["flops"] = value
    elif where == "bytes":
        document["storages"][0][1] = value
    else:
        document["ops"][3] = value
    assert isinstance(read(content("op trace", document), folder), TraceError) or (where != "op" and value == 7)


# ---- hostile on purpose --------------------------------------------------------------------------------

DEEP = 200_000


@pytest.mark.parametrize(
    "data",
    [
        b"[" * DEEP,
        b'{"traceEvents": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"nodes": ' + b'{"a": ' * DEEP + b"1" + b"}" * DEEP + b"}",
        b'{"INSTRUCTION": ' + b"[" * DEEP,
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": ' + b"9" * 10_000 + b"}]}",
        b"\xff\xff\xff\xff\x0f\x0a" + b"\x00" * 100,
        b"\x02\x0a\x00" + b"\x80" * 1000,
        b"cposix\nsystem\n(S'exit 3'\ntR.",
        json.dumps({"nodes": [{"id": 1, "name": "a", "inputs": {"values": "[" * DEEP}, "data_deps": []}]}).encode(),
    ],
    ids=[
        "deep",
        "deep events",
        "deep nodes",
        "deep line",
        "long number",
        "long length",
        "endless varint",
        "pickle",
        "deep text",
    ],
)
def test_hostile_files_are_refused_or_harmless(data: bytes, folder: Path) -> None:
    read(data, folder)


def test_calls_nested_five_thousand_deep_are_read(folder: Path) -> None:
    count = 5_000
    rows = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": i, "dur": 2 * (count - i), "args": {}}
        for i in range(count)
    ]
    held = {"ph": "i", "name": "[memory]", "ts": 1, "args": {"Bytes": 8, "Addr": 1, "Total Allocated": 8}}
    trace = read(json.dumps({"traceEvents": [*rows, held]}).encode(), folder)
    assert isinstance(trace, Trace)
    nodes = [{"id": i + 1, "name": "f", "ctrl_deps": i, "inputs": [], "outputs": []} for i in range(count)]
    assert isinstance(read(json.dumps({"schema": "1", "nodes": nodes}).encode(), folder), Trace)
    chain = [
        {"id": i, "name": "f", "type": 1 + 3 * (i % 2), "data_deps": [i - 1] if i else []}
        for i in reversed(range(count))
    ]
    assert isinstance(read(json.dumps(chain).encode(), folder), Trace)


MEMORY = """
import sys
from sim.errors import TraceError
from tests.fuzz.traces import DOCUMENTS, content, own_chakra
from workloads import load_trace

def most():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = most()
try:
    load_trace(sys.argv[1], max_bytes=int(sys.argv[2]))
    said = "a trace"
except TraceError as error:
    said = str(error)
print(most() - before, said)
"""


def packed(piece: bytes, size: int) -> Callable[[], bytes]:
    """`size` bytes of one piece over and over, gzipped, when they are asked for: that takes seconds."""
    return lambda: gzip.compress(piece * (size // len(piece)), 6, mtime=0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the high-water mark from /proc")
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (packed(b" ", 1 << 26), "it is empty"),
        (packed(b"[", 1 << 26), "not valid JSON (RecursionError)"),
        (packed(b"[1" + b" " * 998, 1 << 26), "not valid JSON"),
        (b'{"traceEvents": [' + b'{"ph":"M"},' * 1000 + b" " * MOST + b"0]}", "larger than"),
        (b"[" + b"[]," * (MOST // 4) + b"0]", "a JSON list"),
        (b'{"traceEvents": [' + b"{}," * (MOST // 4) + b"0]}", "entries of less than 32 bytes"),
        (b'{"schema": "1", "nodes": [' + b'{"a":{}},' * (MOST // 10) + b"0]}", "node 0: id"),
        (b'{"traceEvents": [[' + b"[]," * (MOST // 4) + b"0]]}", "memory"),
        (b'{"schema": "1", "x": {"y": [' + b'{"a":{}},' * (MOST // 10) + b"0]}}", "memory"),
        (b'{"schema": ["1", ' + b"{}," * (MOST // 4) + b"0]}", "entries of less than 32 bytes"),
        (b'[{"data_deps": [], "id": 0}, ' + b"{}," * (MOST // 4) + b"0]", "memory"),
        (b'{"format": "op-trace-1", "ops": ' + b"[" * (MOST // 2) + b"}", "memory"),
        (b'{"traceEvents": [' + b"9" * (MOST // 2) + b"]}", "not valid JSON"),
        (b'{"traceEvents": [' + b"1.5," * (MOST // 8) + b"0]}", ""),
    ],
    ids=[
        "spaces",
        "brackets",
        "cut",
        "spaces after rows",
        "lists",
        "events",
        "nodes",
        "one event",
        "objects in objects",
        "member that is passed over",
        "chakra",
        "deep",
        "one number",
        "numbers",
    ],
)
def test_a_hostile_file_takes_bounded_memory(data: bytes | Callable[[], bytes], words: str, folder: Path) -> None:
    """4 MiB may be read: what a process takes at most is counted by its own high-water mark."""
    path = folder / "hostile"
    path.write_bytes(data() if callable(data) else data)
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), str(MOST)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    taken, said = ran.stdout.split(" ", 1)
    assert words in said
    assert int(taken) < 16 * MOST
